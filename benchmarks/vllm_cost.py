"""What the mailbox costs vLLM's scheduler: CPU time of an iteration with and without it, side by side.

``make bench-vllm`` runs it in vLLM's environment.  An iteration is ``schedule`` and ``update_from_output`` of the real class, with
all requests decoding and a model that makes up its tokens beforehand: neither the forward pass, which takes milliseconds, nor the
engine core's own work around the scheduler is counted, so that the ratios are upper bounds.

Two schedulers, of which one publishes, take turns at short bursts of iterations on the same requests, in an order that changes from
round to round.  ``process_time`` leaves out what other processes take.  The ratio is of the median over the rounds; the spread is
that of ratios of halves of the rounds drawn at random, 5 to 95 of 100.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import logging
import os
import random
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engines" / "vllm"))

BATCHES = (1, 8, 64)
BURST = 20
PROMPT = 16


@functools.cache
def _clock_ns() -> float:
    """What the clock itself adds to a measurement: it is a system call."""
    marks = [time.process_time_ns() for _ in range(2001)]
    return statistics.median(b - a for a, b in itertools.pairwise(marks))


def burst(rig: Any) -> float:
    """CPU seconds an iteration of schedule and update, without the making of tokens."""
    scheduler = rig.scheduler
    taken = 0.0
    clock = time.process_time_ns
    for _ in range(BURST):
        start = clock()
        output = scheduler.schedule()
        taken += clock() - start
        made = rig.make_up(output)
        start = clock()
        scheduler.update_from_output(output, made)
        taken += clock() - start
    return (taken / BURST - 2 * _clock_ns()) / 1e9


def refill(rig: Any, batch: int, round_: int) -> None:
    """The requests of the round before are gone, and new ones decode."""
    from vllm.v1.request import RequestStatus

    rig.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    for n in range(batch):
        rig.add(rig.request(f"{round_}.{n}", [3 + n] * PROMPT, 10_000))
    for _ in range(4 + batch * PROMPT // 128):
        output = rig.scheduler.schedule()
        rig.scheduler.update_from_output(output, rig.make_up(output))
    assert rig.scheduler.get_request_counts() == (batch, 0)


def compare(rigs: list[Any], batch: int, rounds: int) -> list[list[float]]:
    """Seconds an iteration, of every burst of either side."""
    taken: list[list[float]] = [[], []]
    for round_ in range(rounds):
        order = (0, 1) if round_ % 2 else (1, 0)
        for side in order:
            refill(rigs[side], batch, round_)
        for _ in range(3):
            for side in order:
                taken[side].append(burst(rigs[side]))
    return taken


def spread(taken: list[list[float]]) -> tuple[float, float]:
    """The ratio's 5th and 95th percentile."""
    draw = random.Random(0)
    pairs = list(zip(*taken, strict=True))
    ratios = []
    for _ in range(100):
        half = draw.sample(pairs, len(pairs) // 2)
        ratios.append(statistics.median(b for _, b in half) / statistics.median(a for a, _ in half))
    ratios.sort()
    return ratios[5], ratios[94]


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="rounds a batch size, of 3 bursts each [200]")
    rounds = parser.parse_args().rounds
    try:
        from rig import Rig, make_config, make_scheduler, rank_config
    except ModuleNotFoundError as error:
        sys.exit(f"this benchmark needs vLLM ({error}); `make bench-vllm` installs it and runs this")
    from loadbox.cli.demo.vllm._tiny_llama import make_tiny_llama

    logging.getLogger("vllm").setLevel(logging.ERROR)
    print(f"{'scheduler':<10} {'batch':>5} {'without, µs':>12} {'with, µs':>10} {'ratio':>7}  5 to 95 %")
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_llama(Path(folder))
        config = make_config(Path(folder), asynchronous=False, seqs=max(BATCHES), blocks=2049)
        for asynchronous in (False, True):
            config.scheduler_config.async_scheduling = asynchronous
            group = f"bench-{uuid.uuid4().hex[:8]}"
            rigs = [
                Rig(make_scheduler(rank_config(config, scheduler=None))),
                Rig(make_scheduler(rank_config(config, loadbox_group=group))),
            ]
            gc.collect()
            gc.freeze()
            gc.disable()
            try:
                for batch in BATCHES:
                    compare(rigs, batch, 3)  # warm
                    taken = compare(rigs, batch, rounds)
                    without, with_ = map(statistics.median, taken)
                    low, high = spread(taken)
                    name = f"{'async' if asynchronous else 'sync':<10} {batch:>5}"
                    print(f"{name} {without * 1e6:>12.1f} {with_ * 1e6:>10.1f} {with_ / without:>7.3f}  {low:.3f} to {high:.3f}")
                assert rigs[1].scheduler._loadbox.dropped == 0
            finally:
                gc.enable()
                for rig in rigs:
                    rig.scheduler.shutdown()


if __name__ == "__main__":
    main()
