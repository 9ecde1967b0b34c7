"""One rank: the event loop of an engine, with a model in the place of the accelerator.

The order of things is the one that a real engine needs:

1. receive requests: without waiting while there is work, waiting when there is none; an idle engine publishes nothing;
2. schedule an iteration and execute it (here: let the modelled time pass);
3. apply it: finished requests are gone, their pages free;
4. take in what has arrived meanwhile, so that the numbers count it, and publish them;
5. send the outputs, with the same four numbers on every batch: whoever learns of a finish from them finds it in the load already;
6. if the rank has become idle, tell the frontends that have not heard so.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import msgspec
import zmq

from loadbox.cli.demo import _reports
from loadbox.cli.demo._cost import Cost
from loadbox.cli.demo._lifeline import Lifeline
from loadbox.cli.demo._links import Links
from loadbox.cli.demo._model import Iteration, ModelConfig, Scheduler
from loadbox.cli.demo._options import Options
from loadbox.engines import LoadPublisher
from loadbox.piggyback import HandshakeTimeout, connect_msgpack_engine

__all__ = ["Engine", "main"]

_log = logging.getLogger("loadbox")
_START_LIMIT_S = 15.0


class Engine:
    """A rank's scheduler, its frontends and its mailbox, driven by ``run``."""

    def __init__(self, scheduler: Scheduler, publisher: LoadPublisher, links: Links, speed_up: float) -> None:
        self.scheduler = scheduler
        self.publisher = publisher
        self.publish_cost = Cost()
        self.iterations = 0
        self.modelled_s = 0.0
        self.spent_s = 0.0
        self._links = links
        self._speed_up = speed_up
        self._load = scheduler.load()

    def load(self) -> tuple[int, int, int, int]:
        """The four numbers as they were last published: what every batch carries."""
        return self._load

    def run(self) -> None:
        """Serve until SystemExit."""
        while True:
            if not self.scheduler.has_work:
                self._links.wait()
            self._receive()
            started = time.monotonic()
            iteration = self.scheduler.schedule()
            if iteration is None:
                continue
            self._execute(iteration, started)
            applied = self.scheduler.apply(iteration)
            self._receive()
            self._load = self.scheduler.load()
            before = time.perf_counter_ns()
            self.publisher.publish(*self._load)
            self.publish_cost.add(time.perf_counter_ns() - before)
            self._links.send(applied)
            self._links.after_advance()
            self.iterations += 1
            self.spent_s += time.monotonic() - started

    def _receive(self) -> None:
        for number, prompt_tokens, output_tokens in self._links.requests():
            if not self.scheduler.add(number, prompt_tokens, output_tokens):
                self._links.refuse(number)

    def _execute(self, iteration: Iteration, started: float) -> None:
        seconds = iteration.seconds / self._speed_up
        self.modelled_s += seconds
        # Scheduling was part of the iteration's time, as it is in engines that overlap it.
        time.sleep(max(0.0, started + seconds - time.monotonic()))

    def report(self, rank: int, *, last: bool = False) -> bytes:
        """The counters, as a line."""
        publisher = self.publisher
        return _reports.encode(
            _reports.EngineReport(
                rank=rank,
                iterations=self.iterations,
                preemptions=self.scheduler.preemptions,
                publishes=publisher.published,
                publish_errors=publisher.dropped,
                modelled_s=self.modelled_s,
                spent_s=self.spent_s,
                publish_ns=self.publish_cost.median_ns() if last else None,
            )
        )


def _connect(context: zmq.Context[Any], links: Links, engine: Engine, rank: int, options: Options) -> None:
    """Register with every frontend; one that does not answer is left out."""
    config = engine.scheduler.config
    ready = {
        "max_model_len": config.kv_pages * config.page_tokens,
        "num_gpu_blocks": config.kv_pages,
        "kv_cache_size_tokens": config.kv_pages * config.page_tokens,
        "max_num_seqs": config.max_running,
        "max_num_batched_tokens": config.token_budget,
        "data_parallel_size": options.ranks,
        "data_parallel_rank": rank,
        "instance_id": options.group,
    }
    for frontend in range(options.frontends):
        try:
            recv, send, _ = connect_msgpack_engine(
                context,
                options.address(frontend),
                engine_index=rank,
                ready=ready,
                timeout=_START_LIMIT_S,
                mailbox=engine.publisher.writer,
            )
        except HandshakeTimeout as error:
            _log.warning("going on without frontend %d: %s", frontend, error)
            continue
        send.load_fn = engine.load
        links.add(frontend, recv, send)


def main() -> None:
    """A rank's process: ``argv`` is its rank and the options as JSON."""
    logging.basicConfig(format="%(message)s")
    rank, options = int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Options)
    scheduler = Scheduler(ModelConfig())
    publisher = LoadPublisher(options.group, rank, options.ranks)
    publisher.publish(*scheduler.load())  # until then readers say SILENT
    context: zmq.Context[Any] = zmq.Context()
    try:
        links = Links()
        engine = Engine(scheduler, publisher, links, options.speed_up)
        lifeline = Lifeline(lambda: engine.report(rank))
        try:
            _connect(context, links, engine, rank, options)
            engine.run()
        finally:
            lifeline.last_words(lambda: engine.report(rank, last=True))
    finally:
        publisher.close()
        context.destroy(linger=0)
