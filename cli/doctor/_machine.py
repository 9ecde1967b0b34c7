"""Checks of the machine and of this process's place on it: the core, /dev/shm, clocks, limits, whom a reader believes."""

from __future__ import annotations

import os
import pwd
import resource
import stat

from loadbox.cli._show import size
from loadbox.cli.doctor._finding import Finding, fault, fine, warning
from loadbox.mailbox import MailboxUnsupported, _names, _seqlock
from loadbox.mailbox._host import boot_id, time_ns_inode
from loadbox.mailbox._layout import SEGMENT_SIZE

__all__ = ["MACHINE"]

_ROOM_FAULT = 16 * SEGMENT_SIZE
_ROOM_WARNING = 1024 * SEGMENT_SIZE
_INODES_WARNING = 256
_DESCRIPTORS_WARNING = 256
_ENLARGE = (
    "Remove what is not needed, or enlarge it: mount -o remount,size=1G /dev/shm; in a container: --shm-size, or an emptyDir of "
    "medium Memory at /dev/shm."
)
_SERVE_ON = "Until then the load comes with the output batches alone (the piggyback)."


def core() -> Finding:
    """C core, or its twin."""
    try:
        _seqlock.require_supported()
    except MailboxUnsupported as error:
        return fault("core", f"{error}.", f"Install a C compiler and Python's headers, and install loadbox anew. {_SERVE_ON}")
    if _seqlock.BACKEND == "c":
        return fine("core", "The C core is used.")
    if _seqlock.FORCED:
        return warning("core", "LOADBOX_PURE_PYTHON is set: the pure-Python twin is used, several times slower.", "Unset it.")
    return warning(
        "core",
        "The pure-Python twin is used, several times slower: the C core was not built.",
        "Install a C compiler and Python's headers, then install anew with LOADBOX_REQUIRE_C=1, which tells why it fails.",
    )


def folder(path: str = _names.SHM_DIR) -> Finding:
    """Is /dev/shm there, in memory, and may this user write?"""
    try:
        found = os.stat(path)
    except OSError as error:
        return fault("shm", f"{path} cannot be used: {error.strerror}.", f"Mount a tmpfs there. {_SERVE_ON}")
    if not stat.S_ISDIR(found.st_mode):
        return fault("shm", f"{path} is no directory.", "Mount a tmpfs there.")
    mode = f"mode {stat.S_IMODE(found.st_mode):04o}, uid {found.st_uid}"
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return fault("shm", f"{path} is mounted read-only: schedulers cannot make mailboxes.", f"Mount it read-write. {_SERVE_ON}")
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        return fault("shm", f"This user may not write to {path} ({mode}).", f"chmod 1777 {path}. {_SERVE_ON}")
    kind = _filesystem(path)
    if kind not in ("tmpfs", "ramfs", None):
        return warning("shm", f"{path} is on {kind}, not in memory.", "Mount a tmpfs there: a disk may stop a publish for a while.")
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        return warning("shm", f"{path} has no sticky bit ({mode}): every user may remove others' mailboxes.", f"chmod 1777 {path}.")
    return fine("shm", f"{path} is {kind or 'there'} and writable ({mode}).")


def _filesystem(path: str) -> str | None:
    """The type of the file system at a path; None if it cannot be told."""
    best, kind = -1, None
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                left, _, right = line.partition(" - ")
                point = left.split()[4]
                if (path + "/").startswith(point.rstrip("/") + "/") and len(point) >= best:
                    best, kind = len(point), right.split()[0]
    except (OSError, IndexError):
        return None
    return kind


def room(path: str = _names.SHM_DIR) -> Finding:
    """Is there room for more segments?"""
    try:
        found = os.statvfs(path)
    except OSError as error:
        return fault("room", f"The size of {path} cannot be told: {error.strerror}.", "See shm.")
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    if total == 0:
        return fine("room", f"{path} has no size limit.")
    words = f"{size(free)} of {size(total)} are free in {path}"
    if free < _ROOM_FAULT:
        return fault("room", f"{words}: a scheduler that starts now may get no mailbox.", _ENLARGE)
    if free < _ROOM_WARNING:
        return warning("room", f"{words}; a rank takes {size(SEGMENT_SIZE)}.", _ENLARGE)
    if found.f_files and found.f_favail < _INODES_WARNING:
        level = warning if found.f_favail else fault
        return level("room", f"{found.f_favail} of {found.f_files} inodes are free in {path}; a rank takes one.", _ENLARGE)
    inodes = f", and {found.f_favail} inodes" if found.f_files else ""
    return fine("room", f"{words}{inodes}; a rank takes {size(SEGMENT_SIZE)}.")


def clocks() -> Finding:
    """Can ages be compared, and boots be told apart?"""
    if boot_id() == bytes(16):
        return warning(
            "clocks", "The kernel's boot id cannot be read: leftovers of an earlier boot are not told by it.", "Mount /proc."
        )
    if not time_ns_inode():
        return warning(
            "clocks",
            "This process's time namespace cannot be read: ages of snapshots are upper bounds.",
            "Mount /proc; kernels before 5.6 and some sandboxes have no time namespaces.",
        )
    return fine("clocks", f"Boot id and time namespace ({time_ns_inode()}) can be read: ages are exact within it.")


def descriptors() -> Finding:
    """Are there enough descriptors for a reader of many ranks?"""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    each = 1 if _seqlock.BACKEND == "c" else 2
    words = f"A process may have {soft} open files; a reader takes {each} for each rank."
    if soft != resource.RLIM_INFINITY and soft < _DESCRIPTORS_WARNING * each:
        return warning("descriptors", words, f"Raise the limit (ulimit -n; up to {hard} is allowed here).")
    return fine("descriptors", words)


def trust() -> Finding:
    """Whom does a reader of this user believe?"""
    words = os.environ.get("LOADBOX_TRUST_UIDS", "").replace(",", " ").split()
    wrong = [word for word in words if not (word.isascii() and word.isdigit())]
    uids = dict.fromkeys([str(os.geteuid()), "0", *(word for word in words if word not in wrong)])
    found = (
        f"Readers believe segments of {', '.join(map(_name, uids))}, and of those who share a group and mode 0640 with this user."
    )
    if wrong:
        named = ", ".join(map(repr, wrong))
        return warning(
            "trust", f"LOADBOX_TRUST_UIDS names {named}, which is no uid. {found}", "Give numbers: LOADBOX_TRUST_UIDS=1000,1001."
        )
    return fine("trust", found)


def _name(uid: str) -> str:
    try:
        return f"{pwd.getpwuid(int(uid)).pw_name} (uid {uid})"
    except (KeyError, OverflowError):
        return f"uid {uid}"


MACHINE = (core, folder, room, clocks, descriptors, trust)
