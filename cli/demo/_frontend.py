"""A frontend: replays its part of the arrivals, chooses a rank for each request by its view, and measures time to first token.

It learns from the ranks' handshakes where their mailboxes are.  If it finds one under the name and the epoch that were announced,
it is on the ranks' host, and its view reads the mailboxes.  A frontend that behaves as if it were on another host does not look;
its view has what comes with the batches.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, Literal

import msgspec
import zmq

from loadbox.cli.demo import _reports
from loadbox.cli.demo._cost import Cost
from loadbox.cli.demo._figures import percentile
from loadbox.cli.demo._lifeline import Lifeline
from loadbox.cli.demo._options import ROUND_ROBIN, Options
from loadbox.cli.demo._phase import Phase
from loadbox.cli.demo._trace import Request
from loadbox.mailbox import MailboxReader
from loadbox.piggyback import EngineUnavailable, GenerateRequest, HandshakeTimeout, MsgpackFrontend, NothingReceived
from loadbox.reader import LoadReader, NoRankAvailable, RankLoad

__all__ = ["Frontend", "main", "mean_age"]

_log = logging.getLogger("loadbox")
_START_LIMIT_S = 15.0
_SLICE_S = 0.1
_SHORT_SLICE_S = 0.02
_SILENCE_S = 5.0
_BATCHES_A_TURN = 64


def mean_age(loads: list[RankLoad]) -> float | None:
    """How old the known loads are, in seconds, the mean over the ranks; None if none is known.

    An idle mailbox counts as fresh: it is silent because there is nothing to say.  An idle batch may have been overtaken.
    """
    ages = [_age(load) for load in loads if load.snapshot is not None and load.age is not None]
    return sum(ages) / len(ages) if ages else None


def _age(load: RankLoad) -> float:
    assert load.snapshot is not None
    idle = load.snapshot.num_running == load.snapshot.num_waiting == 0
    return 0.0 if load.source == "mailbox" and idle else load.age or 0.0


class Frontend:
    """Replays the same arrivals with each chooser in turn, together with the other frontends, against the same ranks."""

    def __init__(self, number: int, options: Options, arrivals: list[Request], lane: MsgpackFrontend) -> None:
        self.phases = [Phase(len(arrivals), options.speed_up) for _ in options.choosers]
        self.orders: deque[str] = deque()
        self._number = number
        self._options = options
        self._arrivals = arrivals
        self._lane = lane
        self._gone: set[int] = set()
        self._start: float | None = None
        self._waits_for: int | None = None
        self._mailboxes = self._batches = self._load_only = self._choices = 0
        self._longest = 0
        self._cost = Cost()
        self._late: list[float] = []
        lane.on_dead = lambda rank: self.orders.append(f"gone {rank}")

    def run(self) -> None:
        """All replays, one after the other, each when the supervisor says so."""
        self._wait_for_ranks()
        engines = self._lane.engines
        self._mailboxes = sum(engine.same_host is True for engine in engines)
        group = next(
            (engine.mailbox.group for engine in engines if engine.mailbox and engine.same_host), self._options.remote_group
        )
        self._longest = max(engine.ready.get("max_model_len", 0) for engine in engines)
        for number, (phase, chooser) in enumerate(zip(self.phases, self._options.choosers, strict=True)):
            start = self._wait_for_start(number)
            seed = (self._options.seed << 16) + (number << 8) + self._number
            board: Literal["auto", False] = "auto" if self._options.board else False
            with LoadReader(group, self._options.ranks, chooser=chooser, board=board, seed=seed) as view:
                self._replay(number, phase, view, start)

    def _wait_for_ranks(self) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < deadline:
            try:
                self._lane.wait_ready(_SLICE_S)
                break
            except HandshakeTimeout:
                self._follow_orders(None, None)
                if all(engine.state == "ready" or engine.rank in self._gone for engine in self._lane.engines):
                    break
        late = [engine.rank for engine in self._lane.engines if engine.state != "ready" and engine.rank not in self._gone]
        if late:
            _log.warning("rank %s did not start within %g s; going on without", ", ".join(map(str, late)), _START_LIMIT_S)
            self._gone.update(late)

    def _wait_for_start(self, number: int) -> float:
        self._start, self._waits_for = None, number
        while self._start is None:
            self._receive(None, None, _SHORT_SLICE_S)
            self._follow_orders(None, None)
        self._waits_for = None
        return self._start

    def _replay(self, number: int, phase: Phase, view: LoadReader, start: float) -> None:
        speed_up = self._options.speed_up
        due = deque(start + request.arrival_s / speed_up for request in self._arrivals)
        quiet = 0
        # Patience is counted in turns in which nothing came: a demo that was suspended (Ctrl-Z) has lost none of it.
        patience = int((_SILENCE_S + _SILENCE_S / speed_up) / _SLICE_S)
        weighs_loads = self._options.choosers[number] != ROUND_ROBIN
        while due or (phase.in_flight and quiet < patience):
            self._follow_orders(phase, view)
            now = time.monotonic()
            while due and due[0] <= now:
                self._late.append(now - due[0])
                if weighs_loads:
                    age = mean_age(view.loads())
                    if age is not None:
                        phase.decided(age)
                self._dispatch(f"{self._number}-{number}-{phase.sent}", phase, view, due.popleft())
                now = time.monotonic()
            if self._receive(phase, view, min(due[0] - now, _SLICE_S) if due else _SLICE_S):
                quiet = 0
            elif not due:
                quiet += 1
        phase.close()

    def _dispatch(self, rid: str, phase: Phase, view: LoadReader, due: float) -> None:
        request = self._arrivals[phase.sent]
        # What is too long for the engine need not be sent whole to be refused.
        prompt = [0] * min(request.prompt_tokens, self._longest + 1)
        message = GenerateRequest(rid, input_ids=prompt, sampling_params=[request.output_tokens], stream=True)
        while True:
            try:
                rank = self._choose(rid, request, view)
                self._lane.add(rank, message)
            except NoRankAvailable:
                phase.undeliverable()
                return
            except EngineUnavailable:
                self._rank_gone(rank, phase, view)
            else:
                phase.dispatched(rid, rank, due)
                return

    def _choose(self, rid: str, request: Request, view: LoadReader) -> int:
        before = time.perf_counter_ns()
        rank = view.choose(rid, request.prompt_tokens, exclude=self._gone)
        self._cost.add(time.perf_counter_ns() - before)
        self._choices += 1
        return rank

    def _receive(self, phase: Phase | None, view: LoadReader | None, timeout: float) -> int:
        """Take in batches, waiting for the first one until ``timeout`` is over; how many there were."""
        if 0 < timeout < 0.001:  # the lane waits in whole milliseconds
            time.sleep(timeout)
        timeout = max(0.0, math.floor(timeout * 1000) / 1000)
        batches = 0
        try:
            while batches < _BATCHES_A_TURN:
                _, batch = self._lane.recv(0.0 if batches else timeout)
                batches += 1
                self._load_only += not batch.rids
                if view is not None:
                    view.feed(batch)
                if phase is not None:
                    phase.outputs(batch, time.monotonic())
        except NothingReceived:
            pass
        self._batches += batches
        return batches

    def _follow_orders(self, phase: Phase | None, view: LoadReader | None) -> None:
        while self.orders:
            what, value = self.orders.popleft().split()
            if what == "gone":
                self._rank_gone(int(value), phase, view)
            elif what == "start":
                self._start = float(value)

    def _rank_gone(self, rank: int, phase: Phase | None, view: LoadReader | None) -> None:
        self._gone.add(rank)
        if view is not None:
            view.rank_gone(rank)
        if phase is not None:
            phase.rank_gone(rank)

    def report(self, *, last: bool = False) -> bytes:
        """The counters and the new times, as a line."""
        return _reports.encode(
            _reports.FrontendReport(
                frontend=self._number,
                waits_for=self._waits_for,
                phases=[phase.report() for phase in self.phases],
                mailboxes=self._mailboxes,
                batches=self._batches,
                load_only=self._load_only,
                choices=self._choices,
                late_p99_s=percentile(sorted(self._late), 0.99) if last else None,
                choose_ns=self._cost.median_ns() if last else None,
            )
        )


def _epoch_here(group: str, rank: int) -> int:
    with MailboxReader(group, rank) as reader:
        reader.state()
        return reader.epoch


def main() -> None:
    """A frontend's process: ``argv`` is its number and the options as JSON."""
    logging.basicConfig(format="%(message)s")
    number, options = int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Options)
    parts = msgspec.json.decode(Path(options.directory, _reports.ARRIVALS).read_bytes(), type=list[list[Request]])
    context: zmq.Context[Any] = zmq.Context()
    lookup = None if options.is_remote(number) else _epoch_here
    try:
        with MsgpackFrontend(context, options.address(number), options.ranks, mailbox_epoch=lookup) as lane:
            frontend = Frontend(number, options, parts[number], lane)
            lifeline = Lifeline(frontend.report, frontend.orders.append)
            try:
                frontend.run()
            finally:
                lifeline.last_words(lambda: frontend.report(last=True))
    finally:
        context.destroy(linger=0)
