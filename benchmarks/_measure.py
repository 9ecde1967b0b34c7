"""Ratios, measured side by side: in every round each statement runs once, so that whatever the machine does hits all of them.

And distributions: medians of short batches, tails of single calls, both free of what looking at the clock costs at the median.  The
clock's own tail stays in: ``bench_latency`` has a row of it.  So does the loop around a call, some 10 ns.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
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
    # The least of several: what comes only every 0.1 s, a look whether writers live, would pass for the cost of every call.
    numbers = {key: max(1, int(round_s / max(min(timer.repeat(5, 20)) / 20, 1e-8))) for key, timer in timers.items()}
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
_BATCH_NS = 50_000
"""Short, so that most batches are not interrupted on a machine that others use, too."""
_P99_NEEDS, _P999_NEEDS = 100, 1000
"""So many calls, or the quantile would be the longest of them."""
_PATIENCE = 10


@dataclass(frozen=True)
class Distribution:
    """ns a call, free of what two looks at the clock cost at the median; None: too few calls for that quantile."""

    median: float
    p99: float | None
    p999: float | None
    maximum: float
    calls: int


@functools.cache
def clock_ns() -> float:
    """What looking at the clock adds to the time of one call, at the median."""
    taken: list[int] = []
    _compiled("pass")["singles"](None, time.perf_counter_ns, time.perf_counter_ns() + 20_000_000, taken)
    return statistics.median(taken)


@functools.cache
def _compiled(statement: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(_LOOPS.format(statement=statement), names)
    return names


def summary(batches: Sequence[float], singles: Sequence[float]) -> Distribution:
    """The median of batches, and the quantiles of single calls."""
    taken = sorted(singles)

    def quantile(part: float, needs: int) -> float | None:
        return float(taken[int(len(taken) * part)]) if len(taken) >= needs else None

    tail = quantile(0.99, _P99_NEEDS), quantile(0.999, _P999_NEEDS)
    return Distribution(statistics.median(batches), *tail, float(taken[-1]), len(taken))


def distribution(call: Callable[..., object], statement: str, *, seconds: float = 0.15, rounds: int = 1) -> Distribution:
    """Time a statement that uses the name ``call``, in short batches and then call by call, for ``seconds`` each, ``rounds`` times.

    The single calls of a slow statement go on until there are enough for a p99, up to ten times as long.
    """
    names, clock, spare = _compiled(statement), time.perf_counter_ns, clock_ns()
    one = min(names["batch"](call, clock, range(1)) for _ in range(5))
    number = range(max(1, min(1000, int(_BATCH_NS / max(one, 50)))))
    batches: list[float] = []
    singles: list[int] = []
    for turn in range(rounds):
        end = clock() + seconds * 1e9
        while clock() < end:
            batches.append(max(0.0, names["batch"](call, clock, number) - spare) / len(number))
        end = clock() + seconds * 1e9
        names["singles"](call, clock, end, singles)
        while len(singles) * rounds < _P99_NEEDS * (turn + 1) and clock() < end + (_PATIENCE - 1) * seconds * 1e9:
            names["singles"](call, clock, clock() + 1, singles)
    return summary(batches, [max(0.0, taken - spare) for taken in singles])


def at_a_pace(call: Callable[[], object], *, every_s: float, calls: int) -> float:
    """Mean ns of a call that comes only every ``every_s`` seconds: what it is to one who does something else meanwhile.

    The mean, and nothing left out: some work falls due only in some of the calls.  What else the machine ran is in it; so is a cold
    cache, as it is for one who has done something else.
    """
    clock, spare = time.perf_counter_ns, clock_ns()
    taken = 0.0
    for _ in range(calls):
        time.sleep(every_s)
        before = clock()
        call()
        taken += max(0.0, clock() - before - spare)
    return taken / calls
