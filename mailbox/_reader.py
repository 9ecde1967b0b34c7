"""One rank's mailbox as a frontend reads it."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from loadbox.mailbox import _attach, _seqlock
from loadbox.mailbox._check import check_seconds
from loadbox.mailbox._names import check_rank, segment_name

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MailboxReader", "to_ns"]

_FOREVER_NS = 1 << 62


def to_ns(what: str, seconds: float) -> int:
    """Seconds, 0 or more and inf allowed, as ns; TypeError or ValueError otherwise."""
    return int(min(float(_FOREVER_NS), check_seconds(what, seconds) * 1e9))


class MailboxReader(_seqlock.ReaderCore):
    """Read one rank's load, on the same host, without ever waiting for its writer.

    Attaches by itself, now or later, and follows restarts; whatever is missing or broken is a state, never an exception.
    Unknown is never idle: ``read`` gives None then.

    Args:
        group, rank: as the writer's.
        stall_after: seconds without a publish after which a rank that has work is STALLED.
        liveness_interval: seconds between questions to the kernel (is the file still the one? does its owner live?).

    Raises:
        ValueError, TypeError: bad arguments.
        MailboxUnsupported: not x86-64, and the C core is missing.

    After ``close`` its methods raise ``MailboxError``.
    Threads: may be shared.  Fork: a child may go on using it.  asyncio: no method waits, call them in the loop.
    """

    __slots__ = ("_name", "_rank")

    epoch = _seqlock.ReaderCore.epoch
    reason = _seqlock.ReaderCore.reason

    def __init__(self, group: str, rank: int, *, stall_after: float = 5.0, liveness_interval: float = 0.1) -> None:
        self._name = segment_name(group, rank)
        self._rank = check_rank(rank)
        stall_ns, interval_ns = to_ns("stall_after", stall_after), to_ns("liveness_interval", liveness_interval)
        _seqlock.require_supported()
        self._setup(stall_ns, interval_ns)

    @property
    def name(self) -> str:
        """The segment's name, ``/loadbox.<group>.<rank>``."""
        return self._name

    def _find(self, rank: int, /) -> tuple[int, str | None, int]:
        return _attach.find(self._name, self._rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<MailboxReader {getattr(self, '_name', '?')}>"
