"""The readers of the pure-Python twin: of one rank, and of a whole group.  Load-only, on read-only mappings."""

from __future__ import annotations

import threading
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from loadbox.mailbox._errors import MailboxError
from loadbox.mailbox._fork_py import enlist
from loadbox.mailbox._layout import RANK_LIMIT
from loadbox.mailbox._slot_py import FULL_CHECK, LIVE, NOTHING, STALLED, Slot
from loadbox.mailbox._types import LoadSnapshot, RankState
from loadbox.mailbox._watch_py import Watch

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GroupCore", "ReaderCore"]


class ReaderCore:
    """The memory side of a reader of one rank; see ``MailboxReader``."""

    __slots__ = ("__weakref__", "_interval_ns", "_lock", "_open", "_slot", "_snapshot", "_stall_ns")

    def _setup(self, stall_ns: int, interval_ns: int, /) -> None:
        """Start with nothing attached."""
        self._stall_ns, self._interval_ns = stall_ns, interval_ns
        self._slot = Slot()
        self._snapshot: LoadSnapshot | None = None
        self._open = True
        self._after_fork()
        enlist(self)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()

    def _find(self, rank: int, /) -> tuple[int, str | None, int]:
        raise NotImplementedError

    def _look(self, now: int) -> Slot:
        if not self._open:
            raise MailboxError("this reader is closed")
        if self._slot.look(now, self._interval_ns, lambda: self._find(0)):
            self._snapshot = None
        return self._slot

    def read(self, /) -> LoadSnapshot | None:
        """Give the last whole snapshot of a rank that is LIVE, STALLED or DEAD (last words), else None; never waits."""
        with self._lock:
            slot = self._look(monotonic_ns())
            if not slot.snapshot:
                return None
            if self._snapshot is None:
                self._snapshot = LoadSnapshot._make(slot.words[:4])
            return self._snapshot

    def state(self, /) -> RankState:
        """Say what is known of the rank now; DEAD is told within ``liveness_interval`` of the owner's end."""
        with self._lock:
            now = monotonic_ns()
            return RankState(self._look(now).state(now, self._interval_ns, self._stall_ns))

    def age(self, /) -> float | None:
        """Seconds since the snapshot was published, never negative; None if there is none or its time is not known.

        Where the writer's clock is another one (time namespace), an upper bound: since the last look that saw the old snapshot.
        """
        with self._lock:
            now = monotonic_ns()
            age = self._look(now).age_ns(now)
        return None if age is None else age / 1e9

    @property
    def epoch(self) -> int:
        """The epoch of the last look, 0 if none: another number is another life of the writer."""
        return self._slot.words[5]

    @property
    def reason(self) -> str | None:
        """Why the rank was REFUSED at the last look, in words; None otherwise."""
        return self._slot.reason

    def close(self, /) -> None:
        """Let go of the mapping.  Idempotent; snapshots already read stay good."""
        with self._lock:
            self._open = False
            self._slot.drop()


class GroupCore:
    """The memory side of a reader of all ranks; see ``GroupReader``."""

    __slots__ = (
        "__weakref__", "_discovered", "_discovers", "_full_discovery_ns", "_interval_ns", "_lock", "_names", "_next_discovery_ns",
        "_open", "_slots", "_stall_ns",
    )  # fmt: skip

    def _setup(self, size: int, stall_ns: int, interval_ns: int, discovers: bool, /) -> None:
        """Start with ``size`` ranks, nothing attached; ``discovers``: ask ``_discover`` for more."""
        self._stall_ns, self._interval_ns, self._discovers = stall_ns, interval_ns, discovers
        self._slots: list[Slot] = []
        self._next_discovery_ns = self._full_discovery_ns = 0
        self._discovered = 0  # the directory's generation then
        self._names = Watch()
        self._grow(size)
        self._open = True
        self._after_fork()
        enlist(self)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()

    def _grow(self, size: int) -> None:
        """Make room for ``size`` ranks; never shrinks."""
        self._slots.extend(Slot(self._interval_ns // 64 * (rank % 64)) for rank in range(len(self._slots), size))

    def _find(self, rank: int, /) -> tuple[int, str | None, int]:
        raise NotImplementedError

    def _discover(self) -> int:
        raise NotImplementedError

    def _rows(self, size: int, /) -> NDArray[Any]:
        raise NotImplementedError

    def _check_out(self, out: object, size: int, /) -> None:
        raise NotImplementedError

    def read(self, /, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Read all ranks at once; row i is rank i.  Give ``out``, an array that was returned before, to allocate nothing.

        Unusable rows hold four zeros, and ``state`` says why.  Rows of ``out`` past the group's size are ABSENT.  ValueError if
        ``out`` is too short (the group has grown) or read-only, TypeError if it is no array of these rows.
        """
        with self._lock:
            if not self._open:
                raise MailboxError("this reader is closed")
            now = monotonic_ns()
            self._names.again()
            if self._discovers and now >= self._next_discovery_ns:
                self._look_for_more(now)
            rows = self._fill(out, now)
            while self._discovers and (announced := self._announced()) > len(self._slots):  # a rank told of more ranks
                self._grow(announced)
                rows = self._fill(out, now)
            return rows

    def _look_for_more(self, now: int) -> None:
        generation = self._names.generation()
        self._next_discovery_ns = now + self._interval_ns
        if generation == self._discovered and now < self._full_discovery_ns:
            return
        self._discovered = 0
        self._grow(self._discover())
        self._full_discovery_ns = now + FULL_CHECK * self._interval_ns
        self._discovered = generation

    def _announced(self) -> int:
        return max((slot.dp_size for slot in self._slots if slot.dp_size <= RANK_LIMIT), default=0)

    def _fill(self, out: NDArray[Any] | None, now: int) -> NDArray[Any]:
        size = len(self._slots)
        rows = self._rows(size) if out is None else out
        self._check_out(rows, size)
        for rank in range(len(rows)):
            if rank >= size:
                rows[rank] = (*NOTHING, rank, 0, False)
                continue
            slot = self._slots[rank]
            slot.look(now, self._interval_ns, lambda rank=rank: self._find(rank), self._names)  # type: ignore[misc]
            state = slot.state(now, self._interval_ns, self._stall_ns)
            words = slot.words
            if state in (LIVE, STALLED):
                rows[rank] = (*words, rank, state, True)
            else:
                rows[rank] = (0, 0, 0, 0, words[4], words[5] % (1 << 64), rank, state, False)
        return rows

    def __len__(self) -> int:
        """Ranks known at the last read."""
        return len(self._slots)

    def reason(self, rank: int, /) -> str | None:
        """Why ``rank`` was REFUSED at the last read, in words; None otherwise."""
        if not 0 <= rank < len(self._slots):
            raise IndexError(f"rank {rank} is not among the {len(self._slots)} known")
        return self._slots[rank].reason

    def close(self, /) -> None:
        """Let go of all mappings.  Idempotent; arrays already read stay good."""
        with self._lock:
            self._open = False
            for slot in self._slots:
                slot.drop()
