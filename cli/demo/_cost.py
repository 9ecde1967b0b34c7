"""What a call costs where it happens: between iterations, with caches and clocks as they are there."""

from __future__ import annotations

import statistics
from array import array
from time import perf_counter_ns

__all__ = ["Cost"]

_LIMIT = 200_000


class Cost:
    """Durations in ns, at most so many; the median is free of what reading the clock costs."""

    def __init__(self) -> None:
        self._samples = array("q")

    def add(self, ns: int) -> None:
        if len(self._samples) < _LIMIT:
            self._samples.append(ns)

    def median_ns(self) -> float | None:
        """The median, less that of doing nothing between two looks at the clock; None without samples."""
        if not self._samples:
            return None
        nothing = array("q")
        for _ in range(1001):
            before = perf_counter_ns()
            nothing.append(perf_counter_ns() - before)
        return max(0.0, statistics.median(self._samples) - statistics.median(nothing))
