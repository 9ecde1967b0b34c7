"""What this frontend has in flight, and where: the bookkeeping, exact over any history.

Every request id is in at most one place.  Counts in flight are lengths of the sets that hold the ids, so they cannot drift: an
event for an id that is not in flight (a duplicate, a late one, one of a former life) finds nothing and changes nothing.  Every
event costs the same, whatever is in flight; dropping a rank costs as much as its requests did.

The requests of a rank are of two kinds: those sent later than its last report, which cannot know them, in the order of sending;
and the others.  Requests in flight, and those of them that are owed their first token, are also one word of the dispatch board,
changed by one store.
"""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadbox.reader._view import Inputs

__all__ = ["Ledger"]

RATE_NS = 1e9
"""Time constant of the dispatch rate: 1 s, in ns."""


class Ledger:
    """The dispatches of one frontend to the ranks of ``inputs``, whose columns unseen and oldest_ns it keeps.

    ``words`` are the board's, one a rank: in flight in the low 32 bits, owed a first token in the high.  ``requests``, to be read
    only, has what is in flight.  Not safe to share between threads by itself.  Times are ns of one monotonic clock and come in
    from outside.
    """

    __slots__ = ("_inputs", "_owed", "_rate", "_rate_ns", "_seen", "_strays", "_unseen", "_words", "requests")

    def __init__(self, inputs: Inputs, words: memoryview) -> None:
        self.requests: dict[str, int] = {}  # 2 * rank, and 1 more while the first token is owed
        self._unseen: list[dict[str, int]] = []  # a rank's requests that no report can know, with their times
        self._seen: list[set[str]] = []  # and the others
        self._strays: list[set[str]] = []  # those that went to no life that was known
        self._owed: list[int] = []
        self._rate = 0.0
        self._rate_ns = 0
        self.move(inputs, words)

    def move(self, inputs: Inputs, words: memoryview) -> None:
        """Go on with other tables, of as many ranks or more, and fill them."""
        for _ in range(len(self._owed), inputs.n):
            self._unseen.append({})
            self._seen.append(set())
            self._strays.append(set())
            self._owed.append(0)
        self._inputs, self._words = inputs, words
        for rank in range(inputs.n):
            self._store(rank)
            self._store_unseen(rank)

    def _store(self, rank: int) -> None:
        self._words[rank] = len(self._unseen[rank]) + len(self._seen[rank]) | self._owed[rank] << 32

    def _store_unseen(self, rank: int) -> None:
        unseen = self._unseen[rank]
        self._inputs.unseen[rank] = len(unseen)
        if unseen:
            self._inputs.oldest_ns[rank] = next(iter(unseen.values()))

    def rank_of(self, request_id: str) -> int:
        """The rank that a request was sent to; -1 if it is not in flight."""
        return self.requests.get(request_id, -2) >> 1

    def in_flight(self, rank: int) -> int:
        """Requests in flight on a rank."""
        return len(self._unseen[rank]) + len(self._seen[rank])

    def book(self, request_id: str, rank: int, life: int, now_ns: int) -> None:
        """A request that is not in flight is sent to ``rank``; ``life``: the mailbox's epoch there, 0 if not known."""
        unseen = self._unseen[rank]
        if not unseen:
            self._inputs.oldest_ns[rank] = now_ns
        self.requests[request_id] = rank << 1 | 1
        unseen[request_id] = now_ns
        if not life:
            self._strays[rank].add(request_id)
        count = len(unseen)
        self._owed[rank] = owed = self._owed[rank] + 1
        self._inputs.unseen[rank] = count
        self._words[rank] = count + len(self._seen[rank]) | owed << 32
        if now_ns > self._rate_ns:
            self.rate(now_ns)
        self._rate += 1.0

    def rate(self, now_ns: int) -> float:
        """Dispatches a second, averaged with weights that fall to 1/e in 1 s."""
        if now_ns > self._rate_ns:
            self._rate *= exp((self._rate_ns - now_ns) / RATE_NS)
            self._rate_ns = now_ns
        return self._rate

    def first_token(self, request_id: str) -> None:
        """The first token has come; nothing happens a second time, or if the request is not in flight."""
        code = self.requests.get(request_id, 0)
        if code & 1:
            rank = code >> 1
            self.requests[request_id] = code ^ 1
            self._owed[rank] -= 1
            self._store(rank)

    def finished(self, request_id: str) -> int:
        """The request has ended.  Gives the rank if that has now nothing in flight, else -1."""
        code = self.requests.pop(request_id, -1)
        if code < 0:
            return -1
        rank = code >> 1
        seen, unseen = self._seen[rank], self._unseen[rank]
        if request_id in seen:
            seen.remove(request_id)
        else:
            del unseen[request_id]
            self._store_unseen(rank)
        self._strays[rank].discard(request_id)
        self._owed[rank] -= code & 1
        self._store(rank)
        return -1 if seen or unseen else rank

    def reported(self, rank: int, reported_ns: int) -> int:
        """A report that left the rank at ``reported_ns`` knows what was sent until then.  Gives how many that are new to us."""
        unseen, seen = self._unseen[rank], self._seen[rank]
        count = len(unseen)
        if count and next(reversed(unseen.values())) <= reported_ns:
            seen.update(unseen)
            unseen.clear()
            self._inputs.unseen[rank] = 0
            return count
        known = [request_id for request_id, sent_ns in unseen.items() if sent_ns <= reported_ns]
        for request_id in known:
            del unseen[request_id]
        seen.update(known)
        self._store_unseen(rank)
        return len(known)

    def new_life(self, rank: int) -> None:
        """The rank has started anew: what was sent to a former life is lost; what was sent to none that was known is this one's."""
        strays = self._strays[rank]
        for request_id in [*self._seen[rank], *self._unseen[rank]]:
            if request_id not in strays:
                self.finished(request_id)
        strays.clear()

    def drop(self, rank: int) -> None:
        """The rank is gone, and its requests with it."""
        for request_id in [*self._seen[rank], *self._unseen[rank]]:
            self.finished(request_id)
