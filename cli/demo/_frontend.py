"""The frontend: replays the arrivals, chooses a rank for each request with all mailboxes read, and measures time to first token."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from pathlib import Path

import msgspec
import zmq

from loadbox.cli.demo import _reports, _wire
from loadbox.cli.demo._cost import Cost
from loadbox.cli.demo._lifeline import Lifeline
from loadbox.cli.demo._options import Options
from loadbox.cli.demo._phase import Phase, percentile
from loadbox.cli.demo._policy import LeastLoad, Policy, RoundRobin
from loadbox.cli.demo._trace import Request
from loadbox.mailbox import GroupReader

__all__ = ["Frontend", "main"]

_log = logging.getLogger("loadbox")
_START_LIMIT_S = 15.0
_SLICE_S = 0.1
_SILENCE_S = 5.0
_BATCHES_A_TURN = 64


class Frontend:
    """Replays the same arrivals under each policy in turn, against the same ranks, idle at the start of each replay."""

    def __init__(self, options: Options, arrivals: list[Request], socket: _wire.FrontendSocket) -> None:
        policies: tuple[Policy, ...] = (LeastLoad(options.ranks, options.seed), RoundRobin())
        self.phases = [
            Phase(policy, number * len(arrivals), len(arrivals), options.speed_up) for number, policy in enumerate(policies)
        ]
        self.orders: deque[str] = deque()
        self._cost = Cost()
        self._late: list[float] = []
        self._reads = 0
        self._options = options
        self._arrivals = arrivals
        self._socket = socket
        self._reader = GroupReader(options.group, options.ranks)
        self._rows = self._reader.read()
        self._ranks: list[int] = []
        self._gone: set[int] = set()

    def run(self) -> None:
        """All phases, one after the other."""
        self._wait_for_ranks()
        for phase in self.phases:
            self._replay(phase)

    def _wait_for_ranks(self) -> None:
        started: set[int] = set()
        everyone = set(range(self._options.ranks))
        deadline = time.monotonic() + _START_LIMIT_S
        while started | self._gone != everyone and time.monotonic() < deadline:
            rank = self._socket.ready(_SLICE_S)
            if rank is not None:
                started.add(rank)
            self._follow_orders(None)
        late = sorted(everyone - started - self._gone)
        if late:
            _log.warning("rank %s did not start within %g s; going on without", ", ".join(map(str, late)), _START_LIMIT_S)
        self._ranks = sorted(started - self._gone)

    def _replay(self, phase: Phase) -> None:
        speed_up = self._options.speed_up
        start = time.monotonic() + 0.01
        due = deque(start + request.arrival_s / speed_up for request in self._arrivals)
        quiet = 0
        # Patience is counted in turns in which nothing came: a demo that was suspended (Ctrl-Z) has lost none of it.
        patience = int((_SILENCE_S + _SILENCE_S / speed_up) / _SLICE_S)
        while due or (phase.in_flight and quiet < patience):
            self._follow_orders(phase)
            now = time.monotonic()
            while due and due[0] <= now:
                self._dispatch(phase, due.popleft(), now)
                now = time.monotonic()
            if self._collect(phase, min(due[0] - now, _SLICE_S) if due else _SLICE_S):
                quiet = 0
            elif not due:
                quiet += 1
        phase.close()

    def _dispatch(self, phase: Phase, due: float, now: float) -> None:
        request = self._arrivals[phase.sent]
        self._late.append(now - due)
        while self._ranks:
            if phase.policy.reads_mailboxes:
                before = time.perf_counter_ns()
                self._reader.read(out=self._rows)
                self._cost.add(time.perf_counter_ns() - before)
                self._reads += 1
            rank = phase.policy.pick(self._ranks, self._rows, time.monotonic_ns())
            message = _wire.AddRequest(phase.next_rid(), request.prompt_tokens, request.output_tokens)
            if self._socket.add(rank, message):
                phase.dispatched(rank, due)
                return
            phase.policy.finished(rank)
            self._rank_gone(rank, phase)
        phase.undeliverable()

    def _collect(self, phase: Phase, timeout: float) -> int:
        """Take in outputs, waiting for the first ones until ``timeout`` is over; how many batches there were."""
        if 0 < timeout < 0.001:  # ZMQ waits in whole milliseconds
            time.sleep(timeout)
            timeout = 0.0
        received = self._socket.recv(max(timeout, 0.0))
        batches = 0
        while received is not None:
            phase.outputs(received[1], time.monotonic())
            batches += 1
            received = self._socket.recv() if batches < _BATCHES_A_TURN else None
        return batches

    def _follow_orders(self, phase: Phase | None) -> None:
        while self.orders:
            self._rank_gone(int(self.orders.popleft()), phase)

    def _rank_gone(self, rank: int, phase: Phase | None) -> None:
        self._gone.add(rank)
        self._ranks = [other for other in self._ranks if other != rank]
        if phase is not None:
            phase.rank_gone(rank)

    def report(self, *, last: bool = False) -> bytes:
        """The counters, as a line."""
        return _reports.encode(
            _reports.FrontendReport(
                phases=[phase.report() for phase in self.phases],
                reads=self._reads,
                late_p99_s=percentile(self._late, 0.99) if last else None,
                read_ns=self._cost.median_ns() if last else None,
            )
        )

    def close(self) -> None:
        """Let go of the mailboxes."""
        self._reader.close()


def main() -> None:
    """The frontend's process: ``argv`` is the options as JSON."""
    logging.basicConfig(format="%(message)s")
    options = msgspec.json.decode(sys.argv[1], type=Options)
    arrivals = msgspec.json.decode(Path(options.directory, _reports.ARRIVALS).read_bytes(), type=list[Request])
    context: _wire.Context = zmq.Context()
    frontend = Frontend(options, arrivals, _wire.FrontendSocket(context, options.directory))
    try:
        lifeline = Lifeline(frontend.report, frontend.orders.append)
        try:
            frontend.run()
        finally:
            lifeline.last_words(frontend.report(last=True))
    finally:
        frontend.close()
        context.destroy(linger=0)
