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
from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING

from loadbox.mailbox import _files
from loadbox.mailbox._check import check_load
from loadbox.mailbox._errors import MailboxError
from loadbox.mailbox._fork_py import enlist
from loadbox.mailbox._layout import (
    ABI_MAJOR,
    ABI_MINOR,
    KIND_RANK,
    MAGIC,
    RECORD_OFFSET,
    SEGMENT_SIZE,
    STATE_CLOSED,
    STATE_OPEN,
)
from loadbox.mailbox._readers_py import GroupCore, ReaderCore

if TYPE_CHECKING:
    from collections.abc import Sized

__all__ = ["GroupCore", "ReaderCore", "WriterCore"]

_SEQ_LIMIT = (1 << 63) - 2  # no writer comes so far; a damaged segment that is adopted may have


def _wrapped(seq: int) -> int:
    """The sequence, which is unsigned, as the signed word that the view takes."""
    return (seq + (1 << 63)) % (1 << 64) - (1 << 63)


def _length(some: Sized) -> int:
    return deque.__len__(some) if isinstance(some, deque) else len(some)


class WriterCore:
    """The memory side of a writer; see ``MailboxWriter``."""

    __slots__ = ("__weakref__", "_dirty", "_life", "_lock", "_lock_fd", "_map", "_why_not", "_words")

    _lock: threading.RLock
    _lock_fd: int
    _map: mmap.mmap | None
    _words: memoryview[int]
    _life: int
    _dirty: bool
    _why_not: str | None

    def __new__(cls, *args: object, **kwargs: object) -> WriterCore:
        self = super().__new__(cls)
        self._lock = threading.RLock()
        self._lock_fd = -1
        self._map = None
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

    def _publish_lengths(
        self, running: Sized, waiting: Sized, more_waiting: Sized, kv_active_pages: int, kv_total_pages: int, /
    ) -> None:
        """``publish`` given the requests themselves: how many run, and how many there are in ``waiting`` and ``more_waiting``.

        Each is anything with a length; a deque is asked for its own, also where a subclass has another ``__len__``.  Errors as of
        ``publish``, and those of ``len``.
        """
        WriterCore.publish(self, _length(running), _length(waiting) + _length(more_waiting), kv_active_pages, kv_total_pages)

    def _store(self, running: int, waiting: int, active: int, total: int) -> None:
        if self._dirty:
            self._check_interrupted()
            self._repair()
        words, epoch = self._words, self._life
        seq = words[16]
        half, whole = (seq + 1, seq + 2) if seq < _SEQ_LIMIT else (_wrapped(seq + 1), _wrapped(seq + 2))
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

    def _hold(self, lock_fd: int, /) -> None:
        """Own the descriptor that is about to be locked: a forked child closes it; -1: own none any more."""
        self._lock_fd = lock_fd
        if lock_fd >= 0:
            enlist(self)

    def _attach(self, map_fd: int, /) -> None:
        """Map ``map_fd`` for writing."""
        if self._lock_fd < 0:
            raise MailboxError(f"this mailbox cannot be opened: {self._why_not}")
        self._map = _files.map_shared(map_fd, SEGMENT_SIZE, mmap.PROT_READ | mmap.PROT_WRITE)
        self._words = memoryview(self._map).cast("q")
        self._why_not = "it is not open yet"

    def _repair(self, /) -> None:
        """Make both copies whole after a writer that may have been stopped half-way."""
        words = self._words
        seq = words[16]
        if seq & 1:
            for i in range(6):
                words[17 + i] = words[24 + i]
            words[16] = _wrapped(seq + 1)
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
                if self._map is not None:
                    self._words.release()
                    self._map.close()
                _files.let_go(self._lock_fd)
                self._lock_fd = -1

    def _owns(self, /) -> bool:
        """Is this an open owner?"""
        return self._why_not is None

    def _seen(self, /) -> tuple[int, int, int, int, int] | None:
        """The record as its owner sees it: (sequence, the four numbers); None if this is no open owner.  No system call."""
        with self._lock:
            if self._why_not:
                return None
            words = self._words
            seq = words[16]
            first = 24 if seq & 1 else 17  # odd if a publish was cut short, or is being interrupted
            return seq % (1 << 64), words[first], words[first + 1], words[first + 2], words[first + 3]

    def _removed(self, /) -> bool:
        """Is this an open owner of a segment that no name leads to any more?"""
        with self._lock:
            try:
                return not self._why_not and os.fstat(self._lock_fd).st_nlink == 0
            except OSError:
                return False  # cannot be told

    def _after_fork(self) -> None:
        self._lock = threading.RLock()
        if self._lock_fd >= 0:
            _files.let_go(self._lock_fd)
            self._lock_fd = -1
            self._why_not = "this process was forked from its owner, which alone may publish"
