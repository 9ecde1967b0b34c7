"""What is read out of a mailbox: the snapshot, and what can be said about a rank."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

__all__ = ["LoadSnapshot", "RankState"]


class LoadSnapshot(NamedTuple):
    """One rank's load as its scheduler published it, whole.

    Four ints: requests in the running batch, requests queued, KV-cache pages in use, KV-cache pages in all (at least 1: a record
    with 0 is "no snapshot" and never becomes a ``LoadSnapshot``).
    """

    num_running: int
    num_waiting: int
    kv_active_pages: int
    kv_total_pages: int


class RankState(IntEnum):
    """What a reader can say about a rank.  A load is usable in LIVE and STALLED only: unknown is never idle."""

    ABSENT = 0
    """No such segment, not ready yet, or one of another boot."""
    SILENT = 1
    """The owner is alive and has published nothing yet."""
    LIVE = 2
    """The owner is alive and its snapshot is young, or idle: an idle engine may block and publish nothing for hours."""
    STALLED = 3
    """The owner is alive and has work, but has not published for longer than ``stall_after``; usable, with its age."""
    DEAD = 4
    """The owner is gone and did not close."""
    CLOSED = 5
    """The owner closed the mailbox."""
    REFUSED = 6
    """Something is there that must not be trusted; the reader's ``reason`` says what."""
