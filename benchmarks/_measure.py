"""Ratios, measured side by side: in every round each statement runs once, so that whatever the machine does hits all of them."""

from __future__ import annotations

import gc
import statistics
import time
import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timing:
    """Seconds a call, one figure a round."""

    rounds: tuple[float, ...]

    @property
    def median_ns(self) -> float:
        return statistics.median(self.rounds) * 1e9


def side_by_side(
    statements: Mapping[str, str], names: Mapping[str, Any], *, rounds: int = 41, round_s: float = 0.004, setup: str = "pass"
) -> dict[str, Timing]:
    """Time statements in turn, ``rounds`` times; each round of each takes about ``round_s`` seconds, not counting ``setup``."""
    timers = {key: timeit.Timer(statement, setup, globals=dict(names)) for key, statement in statements.items()}
    numbers = {key: max(1, int(round_s / max(timer.timeit(20) / 20, 1e-8))) for key, timer in timers.items()}
    taken: dict[str, list[float]] = {key: [] for key in timers}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for key, timer in timers.items():
                taken[key].append(timer.timeit(numbers[key]) / numbers[key])
    finally:
        gc.enable()
    return {key: Timing(tuple(values)) for key, values in taken.items()}


def ratio(one: Timing, other: Timing, minus: Timing | None = None) -> float:
    """Median over the rounds of ``(one - minus) / other``, each round by itself."""
    spare = minus.rounds if minus else (0.0,) * len(one.rounds)
    return statistics.median((a - c) / b for a, b, c in zip(one.rounds, other.rounds, spare, strict=True))


_LOOPS = """
def batch(call, clock, number):
    before = clock()
    for _ in number:
        {statement}
    return clock() - before

def singles(call, clock, until, taken):
    now = clock()
    while now < until:
        {statement}
        after = clock()
        taken.append(after - now)
        now = clock()
"""


@dataclass(frozen=True)
class Distribution:
    """ns a call: the median is of batches and free of what the clock costs; the others are of single calls and include it."""

    median: float
    p99: float
    p999: float
    maximum: float


def distribution(call: Callable[..., object], statement: str, *, seconds: float = 0.15, rounds: int = 1) -> Distribution:
    """Time a statement that uses the name ``call``, in batches and then call by call, for ``seconds`` each, ``rounds`` times."""
    names: dict[str, Any] = {}
    exec(_LOOPS.format(statement=statement), names)
    clock = time.perf_counter_ns
    one = min(names["batch"](call, clock, range(1)) for _ in range(5))
    number = range(max(1, min(1000, int(seconds * 1e9 / 20 / max(one, 50)))))
    batches: list[float] = []
    singles: list[int] = []
    for _ in range(rounds):
        end = clock() + seconds * 1e9
        while clock() < end:
            batches.append(names["batch"](call, clock, number) / len(number))
        names["singles"](call, clock, clock() + seconds * 1e9, singles)
    singles.sort()
    quantiles = (float(singles[int(len(singles) * part)]) for part in (0.99, 0.999))
    return Distribution(statistics.median(batches), *quantiles, float(singles[-1]))
