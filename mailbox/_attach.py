"""Finding a segment to read, and judging it before it is mapped.

A reader opens read-only, follows no link, waits for nothing and changes nothing.  It believes only a file that somebody whom it
has reason to trust made: its own user, root, a user named in ``LOADBOX_TRUST_UIDS``, or a user who gave the file to a group that
the reader is in (the writer's ``mode=0o640``).  Others can take a name, but cannot make a load untrue.
"""

from __future__ import annotations

import errno
import os

from loadbox.mailbox import _files
from loadbox.mailbox._host import boot_id, time_ns_inode
from loadbox.mailbox._layout import (
    ABI_MAJOR,
    HEADER,
    KIND_RANK,
    MAGIC,
    MAGIC_SWAPPED,
    RANK_LIMIT,
    RECORD_OFFSET,
    SEGMENT_SIZE,
    Header,
)
from loadbox.mailbox._names import SHM_DIR

__all__ = ["NO_NAME", "find", "peek", "read_header"]

NO_NAME = -2
"""For a descriptor: there is no such name.  That stays so until the directory changes, unlike what -1 stands for."""

_NO_BOOT = bytes(16)


def find(name: str, rank: int) -> tuple[int, str | None, int]:
    """Open the segment of a rank for reading.

    Gives (descriptor, None, inode of this process's time namespace); with descriptor -1 the rank is ABSENT, or REFUSED if a reason
    is given, and with NO_NAME it is ABSENT for want of the name.  Never raises because of what lies there.
    """
    fd = -1
    try:
        os.lstat(SHM_DIR + name)  # most names that are asked for in vain are not there, and this says so at a tenth of the price
        fd = _files.open_existing(name, read_only=True)
        absent, reason, _ = _judge(fd, rank)
        if not absent and reason is None:
            found, fd = fd, -1
            return found, None, time_ns_inode()
        return -1, reason and f"refused to read /dev/shm{name}: {reason}", 0
    except FileNotFoundError:
        return NO_NAME, None, 0
    except OSError as error:
        return -1, _unopened(name, error), 0
    finally:
        if fd >= 0:
            os.close(fd)


def peek(name: str, rank: int) -> int:
    """Ranks that the group has, going by this segment: its header's dp_size, or rank + 1; 0 if nobody trustworthy made it."""
    fd = -1
    try:
        fd = _files.open_existing(name, read_only=True)
        absent, reason, header = _judge(fd, rank)
        return 0 if absent or reason or header is None else max(rank + 1, header.dp_size)
    except OSError:
        return 0
    finally:
        if fd >= 0:
            os.close(fd)


def _judge(fd: int, rank: int) -> tuple[bool, str | None, Header | None]:
    """(absent, why refused, header): a segment to read is neither absent nor refused."""
    found = os.fstat(fd)
    reason = _files.odd(found, SEGMENT_SIZE) or _distrusted(found)
    if reason:
        return False, reason, None
    if found.st_size == 0 or found.st_nlink == 0:
        return True, None, None  # being made, or just removed
    if found.st_blocks == 0:
        return False, "it is a hole without memory behind it", None
    header = read_header(fd)
    if header is None or header.magic == 0:
        return True, None, None
    return _judge_header(header, rank)


def read_header(fd: int) -> Header | None:
    """The header, the magic read first (it is stored last); None if the file is shorter than one."""
    ready = os.pread(fd, 8, 0)
    data = os.pread(fd, HEADER.size, 0)
    if len(ready) < 8 or len(data) < HEADER.size:
        return None
    return Header.unpack(ready + data[8:])


def _judge_header(header: Header, rank: int) -> tuple[bool, str | None, Header | None]:
    here = boot_id()
    if header.magic == MAGIC_SWAPPED:
        reason = "it was written by a machine of the other byte order"
    elif header.magic != MAGIC:
        reason = f"it is no segment of loadbox (it starts with {header.magic.to_bytes(8, 'little')!r})"
    elif header.abi_major != ABI_MAJOR:
        reason = f"its ABI is {header.abi_major}, this reader's is {ABI_MAJOR}: update the older of the two"
    elif header.kind != KIND_RANK:
        reason = f"it is a segment of kind {header.kind}, not a rank's mailbox"
    elif header.record_offset != RECORD_OFFSET:
        reason = f"its record is said to be at {header.record_offset}, not {RECORD_OFFSET}"
    elif header.rank != rank:
        reason = f"it speaks for rank {header.rank}, not {rank}"
    elif header.dp_size > RANK_LIMIT:
        reason = f"its dp_size {header.dp_size} is past {RANK_LIMIT}"
    elif _NO_BOOT not in (header.boot_id, here) and header.boot_id != here:
        return True, None, header
    else:
        return False, None, header
    return False, reason, header


def _distrusted(found: os.stat_result) -> str | None:
    if found.st_uid in (0, os.geteuid()) or str(found.st_uid) in os.environ.get("LOADBOX_TRUST_UIDS", "").replace(",", " ").split():
        return None
    if found.st_mode & 0o040 and (found.st_gid == os.getegid() or found.st_gid in os.getgroups()):
        return None
    return (
        f"it belongs to another user ({_files.owner_of(found)}): "
        "share a group with its writer and give it mode=0o640, or name the uid in LOADBOX_TRUST_UIDS"
    )


def _unopened(name: str, error: OSError) -> str:
    found = _files.stat_name(name)
    if found is not None:
        odd = _files.odd(found, 0)
        if odd:
            return f"refused to read /dev/shm{name}: {odd}"
        if error.errno == errno.EACCES:
            return (
                f"no permission to read /dev/shm{name} ({_files.owner_of(found)}): "
                "run as the same user, or give its writer mode=0o640 and a common group"
            )
    advice = "; raise the limit (ulimit -n)" if error.errno == errno.EMFILE else ""
    return f"/dev/shm{name} cannot be opened: {error.strerror}{advice}"
