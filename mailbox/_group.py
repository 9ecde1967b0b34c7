"""All ranks of a group, read at once."""

from __future__ import annotations

import os
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any

from loadbox.mailbox import _attach, _seqlock
from loadbox.mailbox._names import SHM_DIR, check_dp_size, check_group, list_ranks, segment_name
from loadbox.mailbox._reader import to_ns

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray
    from typing_extensions import Self

__all__ = ["GroupReader"]

_MANY = 1024  # ranks up to which each absent one is simply tried; no host has more
_LISTING_S = 0.01
_FIELDS = (
    ("num_running", "<i8"),
    ("num_waiting", "<i8"),
    ("kv_active_pages", "<i8"),
    ("kv_total_pages", "<i8"),
    ("published_ns", "<i8"),
    ("epoch", "<u8"),
    ("rank", "<i4"),
    ("state", "i1"),
    ("usable", "?"),
)


class GroupReader(_seqlock.GroupCore):
    """Read the load of every rank of a group, on the same host, in one call and without waiting for any writer.

    ``read()`` gives a structured numpy array, one row a rank, row i being rank i (see ``dtype``):

    ==================================== ======= =====================================================================
    num_running, num_waiting              int64  requests in the running batch, and queued
    kv_active_pages, kv_total_pages       int64  KV-cache pages in use, and in all
    published_ns                          int64  CLOCK_MONOTONIC of the writer at its publish, ns
    epoch                                uint64  the writer's life, 0 if nothing was read
    rank                                  int32  the row's number
    state                                  int8  a ``RankState``
    usable                                 bool  LIVE or STALLED; otherwise the four numbers are 0
    ==================================== ======= =====================================================================

    A rank that is missing or broken is a row with its state and never hides the others; ``reason(rank)`` explains REFUSED.

    Args:
        group: as the writers'.
        dp_size: ranks in the group.  None: the largest dp_size or rank + 1 seen so far, looked for again as ranks come.
        stall_after, liveness_interval: seconds, as of ``MailboxReader``.

    Raises, threads, fork, asyncio: as ``MailboxReader``.  Threads that share a reader give an ``out`` of their own each.
    The reader keeps the last ``out``, so give the same array again, and never resize it with ``refcheck=False``.
    """

    __slots__ = ("_dtype", "_group", "_listed", "_listed_until")

    def __init__(self, group: str, dp_size: int | None = None, *, stall_after: float = 5.0, liveness_interval: float = 0.1) -> None:
        import numpy  # here, so that a scheduler that only publishes does not load it

        self._group = check_group(group)
        size = check_dp_size(dp_size) or 0
        stall_ns, interval_ns = to_ns("stall_after", stall_after), to_ns("liveness_interval", liveness_interval)
        self._dtype = numpy.dtype(list(_FIELDS), align=True)
        self._listed: frozenset[int] | None = None
        self._listed_until = 0.0
        _seqlock.require_supported()
        self._setup(size, stall_ns, interval_ns, dp_size is None)

    @property
    def group(self) -> str:
        """The group's name."""
        return self._group

    @property
    def dtype(self) -> numpy.dtype[Any]:
        """The rows' dtype: 56 bytes, aligned."""
        return self._dtype

    def _find(self, rank: int, /) -> tuple[int, str | None, int]:
        if len(self) > _MANY and not self._may_exist(rank):
            return _attach.NO_NAME, None, 0  # of 10 ms ago: for longer than that the watch believes no change of the directory
        return _attach.find(segment_name(self._group, rank), rank)

    def _may_exist(self, rank: int) -> bool:
        """Is the name in /dev/shm, as of 10 ms ago?  A header may promise 65,536 ranks, and opening so many takes seconds."""
        now = monotonic()
        if now >= self._listed_until:
            self._listed_until = now + _LISTING_S
            self._listed = frozenset(list_ranks(self._group)) if os.access(SHM_DIR, os.R_OK) else None
        listed = self._listed
        return listed is None or rank in listed

    def _discover(self) -> int:
        """The group's size, going by the ranks that somebody trustworthy made; a stranger's name must not swell the table."""
        known = len(self)
        new = [rank for rank in list_ranks(self._group) if rank >= known]
        return max([known, *(_attach.peek(segment_name(self._group, rank), rank) for rank in new)])

    def _rows(self, size: int, /) -> NDArray[Any]:
        import numpy

        return numpy.empty(size, self._dtype)

    def _check_out(self, out: object, size: int, /) -> None:
        import numpy

        if not isinstance(out, numpy.ndarray):
            raise TypeError(f"out must be a numpy array of GroupReader.dtype, not {type(out).__name__}")
        if out.dtype != self._dtype:
            raise TypeError(f"out has the dtype {out.dtype}, not GroupReader.dtype")
        if out.ndim != 1 or not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError("out must be one-dimensional, contiguous and writeable")
        if len(out) < size:
            raise ValueError(f"out has {len(out)} rows for {size} ranks: the group has grown, call read() without out once")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<GroupReader {getattr(self, '_group', '?')} ranks={len(self)}>"
