"""The scheduler's end of a mailbox."""

from __future__ import annotations

import os
import time
import warnings
from types import TracebackType
from typing import TYPE_CHECKING

from loadbox.mailbox import _segment, _seqlock
from loadbox.mailbox._check import check_seconds
from loadbox.mailbox._host import boot_id, time_ns_inode
from loadbox.mailbox._layout import KIND_RANK
from loadbox.mailbox._names import check_dp_size, check_int, check_rank, segment_name

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MailboxWriter"]


class MailboxWriter(_seqlock.WriterCore):
    """Own one rank's mailbox and publish its load.

    ``MailboxWriter("llama-0", rank=3, dp_size=8)`` makes ``/dev/shm/loadbox.llama-0.3``, or adopts what a dead writer of that
    rank left.  Call ``publish`` after every iteration has been applied (finished requests gone, pages freed), and once after
    construction: until then readers say SILENT.

    Args:
        group: names the DP group on this host, one a server instance: 1 to 64 of ``A-Z a-z 0-9 _ -``.
        rank: this rank, 0 to 65535.
        dp_size: ranks in the group, if known; readers that were not told it find it here.
        mode: permission bits of the file, under any umask.  0o600: this user reads.  0o640: its group, too.  0o644: everybody.
            Nobody but the owner may write.
        start_wait: seconds to wait for a previous owner that is just dying.

    Raises:
        ValueError, TypeError: bad arguments.
        MailboxInUse: another living writer has this rank.
        MailboxRefused: something foreign or odd has the name; it is left as it is.
        MailboxUnsupported: not x86-64, and the C core is missing.
        MailboxError: the system refused, ``errno`` says why (ENOSPC: /dev/shm is full).  Serve on without a mailbox.

    Threads: any thread may publish; calls are serialised.  With the pure-Python twin a ``publish`` that interrupts another on the
    same thread (from a signal handler) raises ``MailboxError``.
    Fork: the child is no owner.  ``publish`` raises there, ``close`` removes nothing.  With the pure-Python twin this holds for
    ``os.fork`` only, not for forks made by C code.
    asyncio: ``publish`` never waits; the constructor may wait ``start_wait`` seconds, so make the writer before the loop runs.
    """

    __slots__ = ("_epoch", "_name")

    _name: str
    _epoch: int

    def __init__(self, group: str, rank: int, dp_size: int | None = None, *, mode: int = 0o600, start_wait: float = 2.0) -> None:
        self._name = segment_name(group, rank)
        self._epoch = 0
        rank = check_rank(rank)
        dp_size = check_dp_size(dp_size, rank)
        _check_mode(mode)
        start_wait = check_seconds("start_wait", start_wait, forever=False)
        _seqlock.require_supported()
        lock_fd, map_fd = _segment.claim(self._name, KIND_RANK, mode=mode, start_wait=start_wait, hold=self._hold)
        try:
            self._attach(map_fd)
            self._repair()
            epoch = _segment.lock_epoch(self._name, lock_fd)
            self._begin(epoch, rank, dp_size or 0, os.getpid(), time.time_ns(), boot_id(), time_ns_inode())
        except BaseException as error:
            _segment.abandon(self._name, lock_fd)
            self._detach()
            if isinstance(error, OSError):
                raise _segment.explained(self._name, error) from error
            raise
        finally:
            os.close(map_fd)
        self._epoch = epoch

    @property
    def name(self) -> str:
        """The segment's name, ``/loadbox.<group>.<rank>``; its file is in /dev/shm."""
        return self._name

    @property
    def epoch(self) -> int:
        """This life's random number, 1 <= epoch < 2**62: readers tell a restart by it."""
        return self._epoch

    def close(self) -> None:
        """Say CLOSED, remove the segment and let go of it.  Idempotent; in a forked child it only lets go."""
        lock_fd = self._finish()
        if lock_fd < 0:  # closed already, or a forked child
            return
        try:
            _segment.unlink_own(self._name, lock_fd)
        except OSError:
            pass  # the name stays, closed and free: the next writer of the rank, or `loadbox clean`, takes it
        finally:
            self._detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if self._owns():
            warnings.warn(f"{self!r} was dropped without close(); readers will call the rank DEAD", ResourceWarning, 2, source=self)
            self._detach()

    def __repr__(self) -> str:
        return f"<MailboxWriter {getattr(self, '_name', '?')} epoch={getattr(self, '_epoch', 0)}>"


def _check_mode(mode: int) -> None:
    bits = check_int("mode", mode)
    if bits & ~0o644 or bits & 0o600 != 0o600:
        meant = f" (did you mean 0o{bits}?)" if bits in (600, 640, 604, 644) else ""
        raise ValueError(f"mode {bits:#o} is not allowed{meant}: use 0o600, 0o640, 0o604 or 0o644 (only the owner may write)")
