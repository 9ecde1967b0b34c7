"""Ratios, measured side by side: in every round each statement runs once, so that whatever the machine does hits all of them."""

from __future__ import annotations

import gc
import statistics
import timeit
from collections.abc import Mapping
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
