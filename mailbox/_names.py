"""The names of segments: ``/loadbox.<group>.<rank>``, and which groups this host has."""

from __future__ import annotations

import os
import re
from operator import index

from loadbox.mailbox._check import BOOLS
from loadbox.mailbox._layout import RANK_LIMIT

__all__ = [
    "SHM_DIR",
    "check_dp_size",
    "check_group",
    "check_int",
    "check_rank",
    "list_groups",
    "list_names",
    "list_ranks",
    "segment_name",
]

SHM_DIR = "/dev/shm"
"""Where Linux (glibc and musl) keeps POSIX shared memory."""

_GROUP = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_SEGMENT = re.compile(r"loadbox\.([A-Za-z0-9_-]{1,64})\.(0|[1-9][0-9]{0,4})", re.ASCII)
_BOARD = re.compile(r"loadbox\.([A-Za-z0-9_-]{1,64})\.f\.[0-9a-f]{16}", re.ASCII)


def check_group(group: str) -> str:
    """Give ``group`` back if it can name a DP group; TypeError or ValueError, with the rule, if not."""
    if not isinstance(group, str):
        raise TypeError(f"group must be a str, not {type(group).__name__}")
    if not _GROUP.fullmatch(group):
        raise ValueError(f"group {group!r} cannot name a DP group: use 1 to 64 of A-Z a-z 0-9 _ and -")
    return group


def check_int(what: str, value: int) -> int:
    """Give ``value`` back as an int if it is one; TypeError if not, and for a bool."""
    if type(value).__name__ in BOOLS:
        raise TypeError(f"{what} must be an int, not {type(value).__name__}")
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{what} must be an int, not {type(value).__name__}") from None


def check_rank(rank: int) -> int:
    """Give ``rank`` back as an int if it is one, from 0 to 65535."""
    rank = check_int("rank", rank)
    if not 0 <= rank < RANK_LIMIT:
        raise ValueError(f"rank {rank} is out of range: use 0 to {RANK_LIMIT - 1}")
    return rank


def check_dp_size(dp_size: int | None, rank: int = 0) -> int | None:
    """Give ``dp_size`` back if it is None or a size that has ``rank`` in it."""
    if dp_size is None:
        return None
    dp_size = check_int("dp_size", dp_size)
    if not rank < dp_size <= RANK_LIMIT:
        why = f" for rank {rank} (ranks count from 0)" if 0 < dp_size <= rank else ""
        raise ValueError(f"dp_size {dp_size} is out of range{why}: use {rank + 1} to {RANK_LIMIT}, or None if it is not known")
    return dp_size


def segment_name(group: str, rank: int) -> str:
    """Name the segment of one rank, checking both."""
    return f"/loadbox.{check_group(group)}.{check_rank(rank)}"


def _entries() -> list[str]:
    try:
        return os.listdir(SHM_DIR)
    except OSError:
        return []


def _rank_of(entry: str) -> tuple[str, int] | None:
    match = _SEGMENT.fullmatch(entry)
    return (match[1], int(match[2])) if match and int(match[2]) < RANK_LIMIT else None


def list_names() -> list[str]:
    """Every name on this host that is one of ours, with the leading slash: by group, ranks by their number, then boards."""
    return ["/" + entry for entry in sorted((e for e in _entries() if _rank_of(e) or _BOARD.fullmatch(e)), key=_order)]


def _order(entry: str) -> tuple[str, int, str]:
    found = _rank_of(entry)
    return (found[0], found[1], "") if found else (entry.split(".")[1], RANK_LIMIT, entry)


def list_groups() -> list[str]:
    """The DP groups that have a rank's mailbox on this host, sorted; leftovers of dead writers are among them.

    Never raises because of what lies in /dev/shm.  Safe from any thread.
    """
    return sorted({found[0] for found in map(_rank_of, _entries()) if found})


def list_ranks(group: str) -> list[int]:
    """The ranks of ``group`` whose names are in /dev/shm, sorted, whatever lies behind them."""
    return sorted(found[1] for found in map(_rank_of, _entries()) if found and found[0] == group)
