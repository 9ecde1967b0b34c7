"""One rank: the event loop of an engine, with a model in the place of the accelerator.

The order of things is the one that a real engine needs:

1. receive requests: without waiting while there is work, waiting when there is none; an idle engine publishes nothing;
2. schedule an iteration and execute it (here: let the modelled time pass);
3. apply it: finished requests are gone, their pages free;
4. take in what has arrived meanwhile, so that the numbers count it, and publish them;
5. send the outputs: whoever learns of a finish from them finds it in the mailbox already.
"""

from __future__ import annotations

import logging
import sys
import time

import msgspec
import zmq

from loadbox.cli.demo import _reports, _wire
from loadbox.cli.demo._lifeline import Lifeline
from loadbox.cli.demo._model import Applied, Iteration, ModelConfig, Scheduler
from loadbox.cli.demo._options import Options
from loadbox.cli.demo._publish import LoadPublisher

__all__ = ["Engine", "main"]


class Engine:
    """A rank's scheduler, its two lanes and its mailbox, driven by ``run``."""

    def __init__(
        self, scheduler: Scheduler, publisher: LoadPublisher, recv: _wire.RecvSocket, send: _wire.SendSocket, speed_up: float
    ) -> None:
        self.scheduler = scheduler
        self.publisher = publisher
        self.iterations = 0
        self.modelled_s = 0.0
        self.spent_s = 0.0
        self._recv = recv
        self._send = send
        self._speed_up = speed_up

    def run(self) -> None:
        """Serve until SystemExit."""
        while True:
            self._receive(wait=not self.scheduler.has_work)
            started = time.monotonic()
            iteration = self.scheduler.schedule()
            if iteration is None:
                continue
            self._execute(iteration, started)
            applied = self.scheduler.apply(iteration)
            self._receive(wait=False)
            self.publisher.publish(*self.scheduler.load())
            self._send_outputs(applied)
            self.iterations += 1
            self.spent_s += time.monotonic() - started

    def _receive(self, *, wait: bool) -> None:
        try:
            while True:
                request = self._recv.recv_pyobj(0 if wait else zmq.NOBLOCK)
                if not self.scheduler.add(request.rid, request.prompt_tokens, request.output_tokens):
                    self._send.send_pyobj(_wire.Outputs([request.rid], [_wire.REFUSED]))
                wait = wait and not self.scheduler.has_work
        except zmq.Again:
            pass

    def _execute(self, iteration: Iteration, started: float) -> None:
        seconds = iteration.seconds / self._speed_up
        self.modelled_s += seconds
        # Scheduling was part of the iteration's time, as it is in engines that overlap it.
        time.sleep(max(0.0, started + seconds - time.monotonic()))

    def _send_outputs(self, applied: Applied) -> None:
        if applied.rids:
            self._send.send_pyobj(_wire.Outputs(applied.rids, [_wire.STOP if done else None for done in applied.finished]))

    def report(self, rank: int, *, last: bool = False) -> bytes:
        """The counters, as a line."""
        publisher = self.publisher
        return _reports.encode(
            _reports.EngineReport(
                rank=rank,
                iterations=self.iterations,
                preemptions=self.scheduler.preemptions,
                publishes=publisher.publishes,
                publish_errors=publisher.errors,
                modelled_s=self.modelled_s,
                spent_s=self.spent_s,
                publish_ns=publisher.cost.median_ns() if last else None,
            )
        )


def main() -> None:
    """A rank's process: ``argv`` is its rank and the options as JSON."""
    logging.basicConfig(format="%(message)s")
    rank, options = int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Options)
    scheduler = Scheduler(ModelConfig())
    publisher = LoadPublisher(options.group, rank, options.ranks)
    publisher.publish(*scheduler.load())  # until then readers say SILENT
    context: _wire.Context = zmq.Context()
    try:
        engine = Engine(scheduler, publisher, *_wire.connect_engine(context, options.directory, rank), options.speed_up)
        lifeline = Lifeline(lambda: engine.report(rank))
        try:
            engine.run()
        finally:
            lifeline.last_words(engine.report(rank, last=True))
    finally:
        publisher.close()
        context.destroy(linger=0)
