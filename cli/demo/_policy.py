"""Which rank gets the next request: the rules that the demo compares, behind one small interface.

Decision code without a clock: the time comes in as an argument.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["TRANSIT_NS", "LeastLoad", "Policy", "RoundRobin"]

TRANSIT_NS = 1_000_000
"""How long a request may be on its way to a scheduler (ZMQ and its threads, on a busy machine)."""

_OWED = 4


class Policy(Protocol):
    """Choose a rank for each request."""

    name: str
    reads_mailboxes: bool

    def pick(self, ranks: Sequence[int], rows: Any, now_ns: int) -> int:
        """One of ``ranks`` (at least one), booked as a dispatch at ``now_ns``; ``rows`` are a ``GroupReader``'s, or None."""

    def finished(self, rank: int) -> None:
        """A request of that rank is gone."""


class RoundRobin:
    """The ranks in turn, whatever their load."""

    name = "round robin"
    reads_mailboxes = False

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, ranks: Sequence[int], rows: Any, now_ns: int) -> int:
        """The next rank in turn."""
        self._turn += 1
        return ranks[(self._turn - 1) % len(ranks)]

    def finished(self, rank: int) -> None:
        """Nothing to know."""


class LeastLoad:
    """The rank with the least load: what its mailbox says, and the own dispatches that the mailbox cannot have seen.

    load = running + 4 * (waiting + unseen).  A request that still owes its first token costs more than one that decodes, and
    who stands in the queue owes it.  Of equal loads one is drawn at random: a fixed choice would pile requests up.  A rank whose
    load is unknown is never taken for idle: it is used only if no rank's load is known, and then the one with the fewest own
    requests.
    """

    name = "least load, by mailbox"
    reads_mailboxes = True

    def __init__(self, ranks: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._in_flight = [0] * ranks
        self._dispatched: list[deque[int]] = [deque() for _ in range(ranks)]

    def pick(self, ranks: Sequence[int], rows: Any, now_ns: int) -> int:
        """The least loaded of ``ranks``."""
        loads = {rank: self._load(rank, rows[rank]) for rank in ranks if rows["usable"][rank]}
        if not loads:
            loads = {rank: self._in_flight[rank] for rank in ranks}
        least = min(loads.values())
        rank = self._random.choice([rank for rank, load in loads.items() if load == least])
        self._in_flight[rank] += 1
        self._dispatched[rank].append(now_ns)
        return rank

    def finished(self, rank: int) -> None:
        """Take the request off the rank's account."""
        self._in_flight[rank] -= 1

    def _load(self, rank: int, row: Any) -> int:
        seen = int(row["published_ns"]) - TRANSIT_NS
        dispatched = self._dispatched[rank]
        while dispatched and dispatched[0] <= seen:
            dispatched.popleft()
        return int(row["num_running"]) + _OWED * (int(row["num_waiting"]) + len(dispatched))
