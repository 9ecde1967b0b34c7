"""The pure-Python twin of the C core, for x86-64 machines without a compiler.

Why it is right there: x86-64 keeps the order of stores and the order of loads, and ``memoryview.cast("q")[i] = v`` is one aligned
8-byte store (never ``struct.pack_into`` on live memory, which zero-fills first: readers saw 0 in 18-28 % of loads).

What can come between two stores here and not in C: an asynchronous exception, another thread, a signal handler.  So the stores
stand in a straight line, with no call and no loop between them; a dirty flag stays up if they were cut short, and the next publish
repairs first; a re-entrant lock serialises threads, and a publish that interrupts another on its own thread is told so at once.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from loadbox.mailbox import _files
from loadbox.mailbox._check import check_load
from loadbox.mailbox._errors import MailboxError
from loadbox.mailbox._layout import (
    ABI_MAJOR,
    ABI_MINOR,
    KIND_RANK,
    MAGIC,
    RANK_LIMIT,
    RECORD_OFFSET,
    SEGMENT_SIZE,
    STATE_CLOSED,
    STATE_OPEN,
)
from loadbox.mailbox._slot_py import LIVE, NOTHING, STALLED, Slot
from loadbox.mailbox._types import LoadSnapshot, RankState

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GroupCore", "ReaderCore", "WriterCore"]

_family: weakref.WeakSet[WriterCore | ReaderCore | GroupCore] = weakref.WeakSet()


class WriterCore:
    """The memory side of a writer; see ``MailboxWriter``."""

    __slots__ = ("__weakref__", "_dirty", "_life", "_lock", "_lock_fd", "_map", "_why_not", "_words")

    _lock: threading.RLock
    _lock_fd: int
    _map: mmap.mmap
    _words: memoryview[int]
    _life: int
    _dirty: bool
    _why_not: str | None

    def __new__(cls, *args: object, **kwargs: object) -> WriterCore:
        self = super().__new__(cls)
        self._lock = threading.RLock()
        self._lock_fd = -1
        self._why_not = "it was never opened"
        self._dirty = False
        self._life = 0
        return self

    def publish(self, num_running: int, num_waiting: int, kv_active_pages: int, kv_total_pages: int, /) -> None:
        """Publish one iteration's load; returns None.

        Four ints, counts of requests and of pages, 0 to 2**63 - 1, active pages not above the total; ``kv_total_pages`` 0 means
        "no snapshot".  Anything with ``__index__`` but bool is taken.  TypeError or ValueError before memory is touched: the old
        value stays.  MailboxError after ``close`` and in a forked child.  Never waits for a reader.
        """
        running, waiting, active, total = check_load(num_running, num_waiting, kv_active_pages, kv_total_pages)
        with self._lock:
            if self._why_not:
                raise MailboxError(f"cannot publish to this mailbox: {self._why_not}")
            self._store(running, waiting, active, total)

    def _store(self, running: int, waiting: int, active: int, total: int) -> None:
        if self._dirty:
            self._check_interrupted()
            self._repair()
        words, epoch = self._words, self._life
        seq = words[16]
        half, whole = seq + 1, seq + 2
        now = monotonic_ns()
        self._dirty = True
        words[16] = half
        words[17] = running
        words[18] = waiting
        words[19] = active
        words[20] = total
        words[21] = now
        words[22] = epoch
        words[16] = whole
        words[24] = running
        words[25] = waiting
        words[26] = active
        words[27] = total
        words[28] = now
        words[29] = epoch
        self._dirty = False

    def _check_interrupted(self) -> None:
        """Is the publish that left the flag up still under way, below this one on the stack, or was it cut off for good?"""
        frame = sys._getframe(2)
        while frame:
            if frame.f_code is WriterCore._store.__code__ and frame.f_locals.get("self") is self:
                raise MailboxError("publish was called while it runs on this thread, from a signal handler: only set a flag there")
            frame = frame.f_back  # type: ignore[assignment]

    def _attach(self, map_fd: int, lock_fd: int, /) -> None:
        """Map ``map_fd`` for writing and own ``lock_fd``."""
        self._map = _files.map_shared(map_fd, SEGMENT_SIZE, mmap.PROT_READ | mmap.PROT_WRITE)
        self._words = memoryview(self._map).cast("q")
        self._lock_fd = lock_fd
        self._why_not = "it is not open yet"
        _family.add(self)

    def _repair(self, /) -> None:
        """Make both copies whole after a writer that may have been stopped half-way."""
        words = self._words
        seq = words[16]
        if seq & 1:
            for i in range(6):
                words[17 + i] = words[24 + i]
            words[16] = seq + 1
        else:
            for i in range(6):
                words[24 + i] = words[17 + i]
        self._dirty = False

    def _begin(self, epoch: int, rank: int, dp_size: int, pid: int, start_ns: int, boot_id: bytes, time_ns_inode: int, /) -> None:
        """Start a life: no snapshot under the new epoch, the header, state open, and the magic last."""
        words = self._words
        self._life = epoch
        self._store(0, 0, 0, 0)
        boot = memoryview(boot_id).cast("q")
        words[1] = ABI_MAJOR
        words[2] = ABI_MINOR
        words[3] = KIND_RANK
        words[4] = RECORD_OFFSET
        words[5] = rank
        words[6] = dp_size
        words[7] = pid
        words[8] = start_ns
        words[10] = boot[0]
        words[11] = boot[1]
        words[12] = time_ns_inode
        words[13] = 0
        words[14] = 0
        words[9] = STATE_OPEN
        words[0] = MAGIC
        self._why_not = None

    def _finish(self, /) -> int:
        """End the life: no snapshot, state closed.  Gives the lock's descriptor; -1 if there is nothing to end (any more)."""
        with self._lock:
            if self._why_not:
                return -1
            self._store(0, 0, 0, 0)
            self._words[9] = STATE_CLOSED
            self._why_not = "it is closed"
            return self._lock_fd

    def _detach(self, /) -> None:
        """Unmap, and close the lock's descriptor, if it is still ours."""
        with self._lock:
            self._why_not = self._why_not or "it is closed"
            if self._lock_fd >= 0:
                self._words.release()
                self._map.close()
                os.close(self._lock_fd)
                self._lock_fd = -1

    def _owns(self, /) -> bool:
        """Is this an open owner?"""
        return self._why_not is None

    def _after_fork(self) -> None:
        self._lock = threading.RLock()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
            self._why_not = "this process was forked from its owner, which alone may publish"


def _after_fork_in_child() -> None:
    # Every lock anew: the old one may be held by a thread that the child does not have.
    for core in list(_family):
        core._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


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
        _family.add(self)

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

    __slots__ = ("__weakref__", "_discovers", "_interval_ns", "_lock", "_next_discovery_ns", "_open", "_slots", "_stall_ns")

    def _setup(self, size: int, stall_ns: int, interval_ns: int, discovers: bool, /) -> None:
        """Start with ``size`` ranks, nothing attached; ``discovers``: ask ``_discover`` for more."""
        self._stall_ns, self._interval_ns, self._discovers = stall_ns, interval_ns, discovers
        self._slots: list[Slot] = []
        self._next_discovery_ns = 0
        self._grow(size)
        self._open = True
        self._after_fork()
        _family.add(self)

    def _after_fork(self) -> None:
        self._lock = threading.RLock()

    def _grow(self, size: int) -> None:
        """Make room for ``size`` ranks; never shrinks."""
        self._slots.extend(Slot(self._interval_ns * (rank % 64) // 64) for rank in range(len(self._slots), size))

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
            if self._discovers and now >= self._next_discovery_ns:
                self._next_discovery_ns = now + self._interval_ns
                self._grow(self._discover())
            rows = self._fill(out, now)
            while self._discovers and (announced := self._announced()) > len(self._slots):  # a rank told of more ranks
                self._grow(announced)
                rows = self._fill(out, now)
            return rows

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
            slot.look(now, self._interval_ns, lambda rank=rank: self._find(rank))  # type: ignore[misc]
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
