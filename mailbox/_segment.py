"""Owning a segment: create, adopt, give up, clean.  The rules, in one place.

* **The owner is who holds the write lock on byte 0**, an open-file-description lock on a descriptor that is never mapped (a
  mapping pins its description, and a forked child would keep a dead owner's lock).  The kernel drops it at death.
* **Lock first, then compare with the name.**  Between opening and locking, a closer or a cleaner may have unlinked the file; the
  mapping's descriptor, opened by name under the lock, must lead to the inode that was locked, else start over.  Nobody unlinks
  without the lock, so from then on the name is ours until we give it up.  (proof/life.pml; without the comparison two writers
  end up with one rank.)
* **A second lock says whose record it is:** the byte at offset ``epoch``.  Readers ask about the byte of the epoch they read, so
  a new owner's lock never vouches for a dead one's numbers.
* What is half made by a dead creator (empty, or magic still 0) is finished; another ABI major is replaced; anything odd or
  foreign is refused and left as it is.
"""

from __future__ import annotations

import errno
import os
import random
import time
from typing import TYPE_CHECKING, NamedTuple

from loadbox.mailbox import _files
from loadbox.mailbox._errors import MailboxError, MailboxInUse, MailboxRefused
from loadbox.mailbox._layout import ABI_MAJOR, EPOCH_LIMIT, HEADER, MAGIC, SEGMENT_SIZE, Header

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Claim", "abandon", "claim", "clean", "explained", "lock_epoch", "unlink_own"]

_RETRY_PAUSE = 0.005
_EPOCH_TRIES = 8
_entropy = random.SystemRandom()


def _no_hold(fd: int) -> None:
    pass


class Claim(NamedTuple):
    """A segment that is ours: the descriptor that holds the lock, and another of the same inode, to be mapped and closed."""

    lock_fd: int
    map_fd: int


class _Taken(Exception):
    """Somebody else has the lock, or the name moved while we took it: try again until ``start_wait`` is over."""

    def __init__(self, final: MailboxError) -> None:
        self.final = final


class _Removed(Exception):
    """What stood in the way is gone, by our own hand: try again at once."""


def claim(
    name: str, kind: int, *, mode: int, start_wait: float, size: int = SEGMENT_SIZE, hold: Callable[[int], None] = _no_hold
) -> Claim:
    """Own the segment called ``name``, made anew or adopted, its memory allocated and its mode set.

    Waits up to ``start_wait`` seconds for another owner to die or to close.  MailboxInUse if it does not; MailboxRefused if what
    is there must not be touched; MailboxError with errno for what the system refuses (ENOSPC: /dev/shm is full).

    ``hold`` is given the descriptor before it is locked, and -1 when it is given up: so that a child which another thread forks
    meanwhile closes it, and does not keep a dead owner's lock.
    """
    deadline = time.monotonic() + start_wait
    while True:
        try:
            return _try_claim(name, kind, mode, size, hold)
        except _Taken as taken:
            if time.monotonic() >= deadline:
                raise taken.final from None
            time.sleep(_RETRY_PAUSE)
        except _Removed:
            pass
        except OSError as error:
            raise explained(name, error) from error


def _try_claim(name: str, kind: int, mode: int, size: int, hold: Callable[[int], None]) -> Claim:
    lock_fd = _open_or_create(name)
    map_fd = -1
    locked = False
    try:
        found = _check_ours(name, lock_fd, size)
        hold(lock_fd)
        _lock(name, lock_fd)
        locked = True
        try:
            map_fd = _files.open_existing(name, read_only=False)
        except FileNotFoundError:
            raise _moved(name) from None
        if not _files.same_file(os.fstat(map_fd), found):
            raise _moved(name)
        # From here on the name is ours: whoever wants to unlink it needs the lock.
        _check_ours(name, lock_fd, size)
        if not _check_content(name, lock_fd, kind):
            unlink_own(name, lock_fd)
            raise _Removed
        os.fchmod(lock_fd, mode)
        os.posix_fallocate(lock_fd, 0, size)
    except BaseException as error:
        if locked and not isinstance(error, (MailboxError, _Taken)):
            abandon(name, lock_fd)
        hold(-1)
        _files.let_go(lock_fd)
        if map_fd >= 0:
            os.close(map_fd)
        raise
    return Claim(lock_fd, map_fd)


def abandon(name: str, lock_fd: int) -> None:
    """After a failure, under the lock: remove the name if nothing was ever finished behind it."""
    try:
        if not os.pread(lock_fd, 8, 0).strip(b"\0"):
            unlink_own(name, lock_fd)
    except OSError:
        pass  # a half-made file stays: the next writer finishes it


def _open_or_create(name: str) -> int:
    try:
        return _files.create(name)
    except FileExistsError:
        pass
    try:
        return _files.open_existing(name, read_only=False)
    except FileNotFoundError:
        raise _moved(name) from None


def _moved(name: str) -> _Taken:
    return _Taken(
        MailboxInUse(f"{_called(name)} was replaced while this writer took it: another writer starts or stops at the same time")
    )


def _check_ours(name: str, fd: int, size: int) -> os.stat_result:
    found = os.fstat(fd)
    if found.st_uid != os.geteuid():
        raise _refused(name, f"it belongs to another user ({_files.owner_of(found)})")
    reason = _files.odd(found, size)
    if reason:
        raise _refused(name, reason)
    return found


def _called(name: str) -> str:
    return f"the {'dispatch board' if '.f.' in name else 'mailbox'} {name}"


def _refused(name: str, reason: str) -> MailboxRefused:
    return MailboxRefused(f"refused to use /dev/shm{name}: {reason}; remove it, or choose another group")


def _lock(name: str, fd: int) -> None:
    if _files.lock_byte(fd, 0):
        return
    if _files.shared_lock_only(fd, 0):
        raise _Taken(_refused(name, "another process holds a shared lock on it, which no reader of ours takes"))
    raise _Taken(
        MailboxInUse(f"{_called(name)} is owned by another living writer (pid {_pid_hint(fd)}): give each server its own group")
    )


def _pid_hint(fd: int) -> str:
    data = os.pread(fd, HEADER.size, 0)
    return str(Header.unpack(data).owner_pid) if len(data) == HEADER.size else "unknown"


def _check_content(name: str, fd: int, kind: int) -> bool:
    """True: empty, half made or ours.  False: another ABI major.  MailboxRefused: not ours."""
    data = os.pread(fd, HEADER.size, 0).ljust(HEADER.size, b"\0")
    header = Header.unpack(data)
    if header.magic == 0:
        return True
    if header.magic != MAGIC:
        raise _refused(name, f"it is no segment of loadbox (it starts with {data[:8]!r})")
    if header.abi_major != ABI_MAJOR:
        return False
    if header.kind != kind:
        raise _refused(name, f"it is a segment of kind {header.kind}, not {kind}")
    return True


def lock_epoch(name: str, lock_fd: int) -> int:
    """Choose a life's epoch, 1 <= epoch < 2**62, and lock its byte, so that readers can ask whether that life goes on."""
    for _ in range(_EPOCH_TRIES):
        epoch = _entropy.randrange(1, EPOCH_LIMIT)
        if _files.lock_byte(lock_fd, epoch):
            return epoch
    raise _refused(name, "another process holds a shared lock on it, which no reader of ours takes")


def unlink_own(name: str, lock_fd: int) -> None:
    """Under the lock, remove the name if it still leads to our own inode; another writer's segment stays."""
    if _files.same_file(_files.stat_name(name), os.fstat(lock_fd)):
        _files.unlink(name)


def clean(name: str, *, dry_run: bool = False) -> str | None:
    """Remove a segment that nobody owns.  None if it was (or, with ``dry_run``, would be) removed; else why not, in words."""
    try:
        fd = _files.open_existing(name, read_only=False)
    except FileNotFoundError:
        return "it is gone already"
    except OSError as error:
        return f"it cannot be opened: {error.strerror}"
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() and os.geteuid() != 0:
            return f"it belongs to another user ({_files.owner_of(found)})"
        reason = _files.odd(found, 0)
        if reason:
            return reason
        if not _files.lock_byte(fd, 0):
            return f"its owner is alive (pid {_pid_hint(fd)})"
        if not _files.same_file(_files.stat_name(name), found):
            return "it was replaced meanwhile"
        data = os.pread(fd, 8, 0).ljust(8, b"\0")
        if int.from_bytes(data, "little") not in (0, MAGIC):
            return "it is no segment of loadbox"
        if not dry_run:
            _files.unlink(name)
        return None
    except OSError as error:
        return f"it cannot be removed: {error.strerror}"
    finally:
        os.close(fd)


_ADVICE = {
    errno.ENOSPC: "/dev/shm is full: make room there or enlarge it (in a container: --shm-size, or an emptyDir of medium Memory)",
    errno.EMFILE: "this process has too many open files: raise its limit (ulimit -n)",
    errno.ENFILE: "this machine has too many open files: raise fs.file-max",
    errno.EACCES: "no permission: is /dev/shm writable, or does the name belong to another user?",
    errno.ENOENT: "there is no /dev/shm here: mount a tmpfs on it",
    errno.EROFS: "/dev/shm is mounted read-only",
    errno.ENOMEM: "no memory left for it",
}


def explained(name: str, error: OSError) -> MailboxError:
    """The system's refusal to make or open a segment, as a sentence."""
    number = error.errno or 0
    found = _files.stat_name(name)
    if found is not None and number in (errno.EACCES, errno.ELOOP, errno.EINVAL, errno.ENXIO):
        reason = _files.odd(found, 0)
        if reason is None and found.st_uid != os.geteuid():
            reason = f"it belongs to another user ({_files.owner_of(found)})"
        elif reason is None and number == errno.EACCES:
            reason = f"its own user may not open it ({_files.owner_of(found)})"
        if reason:
            return _refused(name, reason)
    return MailboxError(f"{_called(name)} cannot be made: {_ADVICE.get(number, os.strerror(number))} (errno {number})", number)
