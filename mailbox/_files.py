"""Opening, judging and locking the files behind segments.  Nothing here waits, follows a link or changes what it did not make.

posix_ipc opens and unlinks; it never gets ``size=``, which would resize a live segment.  Every open adds ``O_NONBLOCK``: a
planted FIFO would block for ever, with the interpreter's lock held.  ``shm_open`` itself adds ``O_NOFOLLOW`` and ``O_CLOEXEC``.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from struct import Struct

import posix_ipc

from loadbox.mailbox._names import SHM_DIR

__all__ = [
    "create", "let_go", "lock_byte", "map_shared", "odd", "open_existing", "owner_alive", "owner_of", "same_file",
    "shared_lock_only", "stat_name", "unlink",
]  # fmt: skip

_FLOCK = Struct("@hhqqi0q")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_FIRST_FD = 3  # never a standard stream: a program that closed its stdin would read or write our segment through it


def _open(name: str, flags: int, mode: int, read_only: bool) -> int:
    """Open and give a descriptor of 3 or more; OSError with errno, whatever posix_ipc makes of it."""
    try:
        fd: int = posix_ipc.SharedMemory(name, flags | os.O_NONBLOCK, mode, read_only=read_only).fd
    except posix_ipc.ExistentialError as error:  # EEXIST or ENOENT, it does not say; creating meets ENOENT only without /dev/shm
        number = errno.EEXIST if flags & os.O_CREAT and os.path.isdir(SHM_DIR) else errno.ENOENT
        raise OSError(number, os.strerror(number), name) from error
    except posix_ipc.PermissionsError as error:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), name) from error
    except ValueError as error:  # shm_open turns EISDIR into EINVAL
        raise OSError(errno.EINVAL, "not a regular file", name) from error
    except OSError as error:
        if error.errno is not None:
            raise
        number = errno.ENFILE if "system" in str(error) else errno.EMFILE  # posix_ipc gives these two without their number
        raise OSError(number, os.strerror(number), name) from error
    if fd >= _FIRST_FD:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)
    finally:
        os.close(fd)


def create(name: str) -> int:
    """Make the segment's empty file, readable by its owner only, and open it; FileExistsError if the name is taken."""
    fd = _open(name, posix_ipc.O_CREX, 0o600, False)
    try:
        os.fchmod(fd, 0o600)  # a umask may have taken away what its owner needs to open it again
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_existing(name: str, *, read_only: bool) -> int:
    """Open what has the name; OSError (FileNotFoundError, PermissionError, ELOOP for a symlink, EINVAL for a directory)."""
    return _open(name, 0, 0, read_only)


def map_shared(fd: int, size: int, protection: int) -> mmap.mmap:
    """Map ``fd``.  The mapping keeps a copy of it, which is no standard stream either; OSError if there is none left."""
    plugs: list[int] = []
    try:
        while True:
            lowest = os.dup(fd)
            if lowest >= _FIRST_FD:
                os.close(lowest)
                return mmap.mmap(fd, size, prot=protection)
            plugs.append(lowest)
    except ValueError as error:  # it shrank meanwhile
        raise OSError(errno.EINVAL, "it is too short", None) from error
    finally:
        for plug in plugs:
            os.close(plug)


def let_go(fd: int) -> None:
    """Close ``fd``; nothing happens if another part of the program has done so."""
    try:
        os.close(fd)
    except OSError:
        pass


def unlink(name: str) -> None:
    """Remove the name; nothing happens if it is gone already."""
    try:
        posix_ipc.unlink_shared_memory(name)
    except posix_ipc.ExistentialError:
        pass
    except posix_ipc.PermissionsError as error:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), name) from error


def stat_name(name: str) -> os.stat_result | None:
    """What the name leads to now, links not followed; None if nothing, or if it cannot be seen."""
    try:
        return os.stat(SHM_DIR + name, follow_symlinks=False)
    except OSError:
        return None


def same_file(one: os.stat_result | None, other: os.stat_result) -> bool:
    """Is it the same inode?"""
    return one is not None and (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def odd(found: os.stat_result, size: int) -> str | None:
    """Say why a file cannot be a segment that only its owner writes, or None.  An empty file passes: it is half made."""
    if not stat.S_ISREG(found.st_mode):
        return f"it is a {_kind(found.st_mode)}, not a regular file"
    if found.st_nlink > 1:
        return f"it has {found.st_nlink} hard links"
    if found.st_mode & 0o022:
        return f"its mode {stat.S_IMODE(found.st_mode):04o} lets others write to it"
    if 0 < found.st_size < size:
        return f"it is {found.st_size} bytes long, shorter than a segment's {size}"
    return None


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "directory", stat.S_IFIFO: "FIFO", stat.S_IFLNK: "symbolic link", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")


def owner_of(found: os.stat_result) -> str:
    """Whose file it is, for messages."""
    return f"uid {found.st_uid}, gid {found.st_gid}, mode {stat.S_IMODE(found.st_mode):04o}"


def lock_byte(fd: int, offset: int) -> bool:
    """Take the exclusive open-file-description lock of one byte, without waiting; False if somebody has a lock there."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def shared_lock_only(fd: int, offset: int) -> bool:
    """Is the byte locked by readers only?  One question, so that an owner who leaves meanwhile is not taken for a reader."""
    return _asked(fd, fcntl.F_WRLCK, offset) == fcntl.F_RDLCK


def _asked(fd: int, kind: int, offset: int) -> int:
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0))
    return int(_FLOCK.unpack(answer)[0])


def owner_alive(fd: int, epoch: int) -> bool:
    """Does the life ``epoch`` hold its lock?  As ``lbx_owner_alive`` of loadbox.h; OSError if it cannot be asked."""
    return _asked(fd, fcntl.F_RDLCK, epoch) != fcntl.F_UNLCK
