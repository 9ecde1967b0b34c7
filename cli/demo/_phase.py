"""One replay's books: which request is where, and when its first token came.  No clock and no socket inside."""

from __future__ import annotations

import math
from collections.abc import Sequence

from loadbox.cli.demo._policy import Policy
from loadbox.cli.demo._reports import PhaseReport
from loadbox.cli.demo._wire import REFUSED, Outputs

__all__ = ["Phase", "percentile"]


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least ``share`` of the values do not exceed (nearest rank); None if there are none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class _Open:
    __slots__ = ("due", "first", "rank")

    def __init__(self, rank: int, due: float) -> None:
        self.rank = rank
        self.due = due
        self.first = True


class Phase:
    """The requests of one replay under one policy.

    A request's time to first token counts from when it was due, not from when it was sent: what waits in the frontend waits, too.
    """

    def __init__(self, policy: Policy, first_rid: int, total: int, speed_up: float) -> None:
        self.policy = policy
        self.total = total
        self.sent = self.served = self.lost = self.refused = self.unanswered = 0
        self.done = False
        self.ttft: list[float] = []
        self._first_rid = first_rid
        self._speed_up = speed_up
        self._open: dict[int, _Open] = {}

    @property
    def in_flight(self) -> int:
        """Requests sent and not ended."""
        return len(self._open)

    def next_rid(self) -> int:
        """The id of the request to be sent next; no other phase uses it."""
        return self._first_rid + self.sent

    def dispatched(self, rank: int, due: float) -> None:
        """The next request, due at ``due`` (seconds of real time), went to a rank."""
        self._open[self.next_rid()] = _Open(rank, due)
        self.sent += 1

    def undeliverable(self) -> None:
        """The next request found no rank."""
        self.sent += 1
        self.lost += 1

    def outputs(self, outputs: Outputs, now: float) -> None:
        """Take in what a rank gave; what belongs to no request of this phase is ignored."""
        for rid, reason in zip(outputs.rids, outputs.finished_reasons, strict=True):
            request = self._open.get(rid)
            if request is None:
                continue
            if request.first and reason != REFUSED:
                request.first = False
                self.ttft.append((now - request.due) * self._speed_up)
            if reason is not None:
                self._end(rid, request)
                if reason == REFUSED:
                    self.refused += 1
                else:
                    self.served += 1

    def rank_gone(self, rank: int) -> None:
        """A rank has died: its requests are lost."""
        for rid, request in [item for item in self._open.items() if item[1].rank == rank]:
            self._end(rid, request)
            self.lost += 1

    def close(self) -> None:
        """End the phase; what is still in flight stays unanswered."""
        self.unanswered += len(self._open)
        self._open.clear()
        self.done = True

    def report(self) -> PhaseReport:
        """The counters so far.  Any thread may call it."""
        ttft = self.ttft[:]
        return PhaseReport(
            policy=self.policy.name,
            total=self.total,
            sent=self.sent,
            served=self.served,
            lost=self.lost,
            refused=self.refused,
            unanswered=self.unanswered,
            ttft_p50=percentile(ttft, 0.5),
            ttft_p99=percentile(ttft, 0.99),
            done=self.done,
        )

    def _end(self, rid: int, request: _Open) -> None:
        del self._open[rid]
        self.policy.finished(request.rank)
