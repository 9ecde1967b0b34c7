"""The dispatch board: what the frontends of one host have in flight, each in a segment that it alone writes.

``/loadbox.<group>.f.<16 hex digits>``: the header of a mailbox with kind 2 and a capacity n, then at offset 128 n words, one a
rank: requests in flight in the low 32 bits, those owed a first token in the high (``lbx_board_pack`` in ``loadbox.h``).  A word is
changed by one aligned 8-byte store and no invariant spans words, so a board needs no latch, no fence, and no C.

It is owned as a mailbox is: the lock on byte 0 makes the owner, the one on the byte at the offset ``epoch`` says that this life
goes on, and the kernel drops both at death.  A frontend that starts takes a name of its own, so it starts clean, and removes what
dead frontends of its group have left, so that their files do not pile up.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from typing import TYPE_CHECKING

from loadbox.mailbox import _files, _segment, _seqlock
from loadbox.mailbox._fork_py import enlist
from loadbox.mailbox._host import boot_id, time_ns_inode
from loadbox.mailbox._layout import (
    ABI_MAJOR,
    ABI_MINOR,
    HEADER,
    KIND_BOARD,
    MAGIC,
    RECORD_OFFSET,
    SEGMENT_SIZE,
    STATE_CLOSED,
    STATE_OPEN,
)
from loadbox.mailbox._names import SHM_DIR

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Board", "board_names"]

_STATE = 72  # the header's offset of state
_START_WAIT = 2.0
_entropy = random.SystemRandom()


def board_names(group: str) -> Iterator[str]:
    """The names of a group's boards in /dev/shm, whatever lies behind them."""
    prefix = f"loadbox.{group}.f."
    try:
        entries = os.listdir(SHM_DIR)
    except OSError:
        return
    for entry in entries:
        digits = entry[len(prefix) :]
        if entry.startswith(prefix) and len(digits) == 16 and set(digits) <= set("0123456789abcdef"):
            yield "/" + entry


class Board:
    """A board that this process owns, all words 0.

    ``capacity``: ranks that it has room for, at least; it is rounded up to what its memory holds.  Raises as ``MailboxWriter``.
    Threads: the caller serialises.  Fork: the child is no owner, also if it is forked while the board is being made.
    """

    __slots__ = ("__weakref__", "_lock_fd", "_map", "capacity", "name", "words")

    def __init__(self, group: str, capacity: int) -> None:
        _seqlock.require_supported()
        for name in board_names(group):
            _segment.clean(name)
        size = -(-(RECORD_OFFSET + 8 * capacity) // SEGMENT_SIZE) * SEGMENT_SIZE
        self.capacity = (size - RECORD_OFFSET) // 8
        self.name = f"/loadbox.{group}.f.{_entropy.getrandbits(64):016x}"
        self._lock_fd = -1
        # Nobody else has this name, but another frontend that starts may clear it away before it is locked: then it is made anew.
        _, map_fd = _segment.claim(self.name, KIND_BOARD, mode=0o600, start_wait=_START_WAIT, size=size, hold=self._hold)
        try:
            self._map = _files.map_shared(map_fd, size, mmap.PROT_READ | mmap.PROT_WRITE)
            self.words = memoryview(self._map)[RECORD_OFFSET:].cast("Q")
            self._begin()
        except BaseException as error:
            _segment.unlink_own(self.name, self._lock_fd)
            self.disown()
            if isinstance(error, OSError):
                raise _segment.explained(self.name, error) from error
            raise
        finally:
            os.close(map_fd)

    def _hold(self, lock_fd: int) -> None:
        self._lock_fd = lock_fd
        enlist(self)

    def _after_fork(self) -> None:
        self.disown()

    def _begin(self) -> None:
        """Words, then the header, and its magic last.  By system calls: they keep their order on every machine."""
        for rank in range(self.capacity):
            self.words[rank] = 0
        epoch = _segment.lock_epoch(self.name, self._lock_fd)
        header = HEADER.pack(
            MAGIC, ABI_MAJOR, ABI_MINOR, KIND_BOARD, RECORD_OFFSET, 0, 0, os.getpid(), time.time_ns(), STATE_OPEN, boot_id(),
            time_ns_inode(), self.capacity, epoch,
        )  # fmt: skip
        os.pwrite(self._lock_fd, header[8:], 8)
        os.pwrite(self._lock_fd, header[:8], 0)

    def close(self) -> None:
        """Say closed, remove the name and let go.  Idempotent; nothing happens in a child."""
        if self._lock_fd < 0:
            return
        try:
            os.pwrite(self._lock_fd, STATE_CLOSED.to_bytes(8, "little"), _STATE)
            _segment.unlink_own(self.name, self._lock_fd)
        except OSError:
            pass  # the name stays, free: the next frontend of the group, or `loadbox clean`, takes it
        finally:
            self.disown()

    def disown(self) -> None:
        """Close the lock's descriptor and nothing else: the whole duty of a forked child."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)
