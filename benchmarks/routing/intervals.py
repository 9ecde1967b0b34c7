"""Means over seeds with 95 % confidence intervals (Student's t), and percentiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

# Two-sided 95 % quantiles of Student's t by degrees of freedom; any table of the distribution has them.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


class Interval(NamedTuple):
    """A mean and the half-width of its 95 % confidence interval (NaN with fewer than two values)."""

    mean: float
    half: float


def interval(values: Sequence[float]) -> Interval:
    """The mean of independent values and how well they tell it."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return Interval(mean, math.nan)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    t = _T[n - 2] if n - 2 < len(_T) else 2.1
    return Interval(mean, t * deviation / math.sqrt(n))


class Ratio(NamedTuple):
    """The geometric mean of paired ratios, with its 95 % confidence interval."""

    ratio: float
    low: float
    high: float


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """How large ours is beside theirs, seed by seed: both served the same requests, so most of the noise falls out."""
    logs = interval([math.log(a / b) for a, b in zip(ours, theirs, strict=True)])
    return Ratio(math.exp(logs.mean), math.exp(logs.mean - logs.half), math.exp(logs.mean + logs.half))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which a share of ordered values lies, between the two nearest ones."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
