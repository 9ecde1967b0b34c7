"""What a replay comes to: counts, and times with their percentiles.  Pure."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["Figures", "percentile"]


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest of the sorted values that at least ``share`` of them do not exceed (nearest rank); None if there are none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


@dataclass
class Figures:
    """The requests of one or more frontends in one replay; times are seconds of trace time, in order."""

    total: int = 0
    sent: int = 0
    served: int = 0
    lost: int = 0
    refused: int = 0
    unanswered: int = 0
    ttft: list[float] = field(default_factory=list)
    ages: list[float] = field(default_factory=list)

    @property
    def ended(self) -> int:
        """Requests that are over, well or not."""
        return self.served + self.lost + self.refused + self.unanswered

    @property
    def done(self) -> bool:
        """Whether all requests are over."""
        return self.ended >= self.total

    def add_times(self, ttft: Iterable[float], ages: Iterable[float]) -> None:
        """Take in more times."""
        for time in ttft:
            insort(self.ttft, time)
        for time in ages:
            insort(self.ages, time)

    @classmethod
    def sum_of(cls, parts: Iterable[Figures]) -> Figures:
        """Several frontends' figures as one."""
        result = cls()
        for part in parts:
            result.total += part.total
            result.sent += part.sent
            result.served += part.served
            result.lost += part.lost
            result.refused += part.refused
            result.unanswered += part.unanswered
            result.ttft += part.ttft
            result.ages += part.ages
        result.ttft.sort()
        result.ages.sort()
        return result
