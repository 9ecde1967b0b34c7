"""One replay's books in one frontend: which request is where, and when its first token came.  No clock and no socket inside."""

from __future__ import annotations

from collections import deque

from loadbox.cli.demo._links import REFUSED
from loadbox.cli.demo._reports import PhaseReport
from loadbox.piggyback import BatchTokenIDOutSlim

__all__ = ["Phase"]


class _Open:
    __slots__ = ("due", "first", "rank")

    def __init__(self, rank: int, due: float) -> None:
        self.rank = rank
        self.due = due
        self.first = True


class Phase:
    """The requests of one replay.

    A request's time to first token counts from when it was due, not from when it was sent: what waits in the frontend waits, too.
    """

    def __init__(self, total: int, speed_up: float) -> None:
        self.total = total
        self.sent = self.served = self.lost = self.refused = self.unanswered = 0
        self._speed_up = speed_up
        self._open: dict[str, _Open] = {}
        # Filled in one thread and emptied in another.
        self._ttft: deque[float] = deque()
        self._ages: deque[float] = deque()

    @property
    def in_flight(self) -> int:
        """Requests sent and not ended."""
        return len(self._open)

    def decided(self, age: float) -> None:
        """A rank was chosen by loads of this age (seconds of real time)."""
        self._ages.append(age * self._speed_up)

    def dispatched(self, rid: str, rank: int, due: float) -> None:
        """The next request, due at ``due`` (seconds of real time), went to a rank."""
        self._open[rid] = _Open(rank, due)
        self.sent += 1

    def undeliverable(self) -> None:
        """The next request found no rank."""
        self.sent += 1
        self.lost += 1

    def outputs(self, batch: BatchTokenIDOutSlim, now: float) -> None:
        """Take in what a rank gave; what belongs to no request of this phase is ignored."""
        for rid, ids, reason in zip(batch.rids, batch.output_ids, batch.finished_reasons, strict=True):
            request = self._open.get(rid)
            if request is None:
                continue
            if request.first and ids:
                request.first = False
                self._ttft.append((now - request.due) * self._speed_up)
            if reason:
                del self._open[rid]
                if reason == REFUSED:
                    self.refused += 1
                else:
                    self.served += 1

    def rank_gone(self, rank: int) -> None:
        """A rank has died: its requests are lost."""
        for rid in [rid for rid, request in self._open.items() if request.rank == rank]:
            del self._open[rid]
            self.lost += 1

    def close(self) -> None:
        """End the phase; what is still in flight stays unanswered."""
        self.unanswered += len(self._open)
        self._open.clear()

    def report(self) -> PhaseReport:
        """The counters so far, and the times since the last report.  Any thread may call it, one at a time."""
        return PhaseReport(
            total=self.total,
            sent=self.sent,
            served=self.served,
            lost=self.lost,
            refused=self.refused,
            unanswered=self.unanswered,
            ttft=_drain(self._ttft),
            ages=_drain(self._ages),
        )


def _drain(times: deque[float]) -> list[float]:
    return [times.popleft() for _ in range(len(times))]
