"""The mailbox as an engine uses it: whatever goes wrong with it stays here.

An engine must serve on without a mailbox (a full /dev/shm, a predecessor that is slow to die), but not in silence: every publish
that reaches no mailbox is counted, said in the log at most once a minute, and readers call the rank ABSENT.
"""

from __future__ import annotations

import logging
import threading
import weakref
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from loadbox.mailbox import MailboxError, MailboxUnsupported, MailboxWriter

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["LoadPublisher", "PublisherStats", "publisher_stats"]

_LOG_INTERVAL_S = 60.0
_RETRY_FIRST_S = 1.0
_RETRY_LIMIT_S = 30.0
_log = logging.getLogger("loadbox")
_publishers: weakref.WeakSet[LoadPublisher] = weakref.WeakSet()


class PublisherStats(NamedTuple):
    """One publisher's counters, since it was made."""

    group: str
    rank: int
    published: int
    """Publishes that reached the mailbox."""
    dropped: int
    """Publishes that did not."""
    error: str | None
    """Why the last one did not, or why there is no mailbox; None if there is one and it took the last publish."""


class LoadPublisher:
    """A rank's mailbox for an engine: like ``MailboxWriter``, but nothing that goes wrong with it reaches the engine.

    No method raises an ``Exception``, whatever it is given.  If the mailbox cannot be had, the engine serves without one, and a
    background thread tries again, after 1 s and then at growing intervals of up to 30 s, for as long as that can help; the first
    thing that it publishes is the last load it was given.

    Args:
        group, rank, dp_size, mode: as of ``MailboxWriter``.
        start_wait: seconds that the constructor may wait for a previous owner that is just dying.

    Attributes:
        published: publishes that reached the mailbox.
        dropped: publishes that did not: there was no mailbox, or it refused the numbers.
        error: why the last one was dropped, or why there is no mailbox; None if all is well.
        writer: the ``MailboxWriter``, to be announced to frontends (``connect_msgpack_engine(…, mailbox=…)``), or None.

    Threads: any may publish; with several at once the counters may be short by some.
    Fork: a child is no owner; its publishes are dropped, and it does not try again.
    asyncio: ``publish`` never waits; the constructor may, for ``start_wait``.
    """

    def __init__(self, group: str, rank: int, dp_size: int | None = None, *, mode: int = 0o600, start_wait: float = 2.0) -> None:
        self.published = 0
        self.dropped = 0
        self.error: str | None = None
        self.writer: MailboxWriter | None = None
        self._group, self._rank = group, rank
        self._arguments = (group, rank, dp_size)
        self._mode = mode
        self._last: tuple[int, int, int, int] | None = None
        self._next_log = 0.0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._store: Callable[[int, int, int, int], None] = self._nowhere
        _publishers.add(self)
        try:
            self._open(MailboxWriter(*self._arguments, mode=mode, start_wait=start_wait))
        except Exception as error:
            heals = isinstance(error, MailboxError) and not isinstance(error, MailboxUnsupported)
            self._tell(error, "the engine serves without a mailbox" + (", and tries again" if heals else ""))
            if heals:
                self._start_retrying()

    def publish(self, num_running: int, num_waiting: int, kv_active_pages: int, kv_total_pages: int) -> None:
        """Publish one iteration's load, as ``MailboxWriter.publish``; never raises an ``Exception`` and never waits."""
        try:
            self._store(num_running, num_waiting, kv_active_pages, kv_total_pages)
        except Exception as error:
            self.drop(error)
        else:
            self.published += 1

    def drop(self, error: Exception) -> None:
        """Count a publish that could not even be made: the engine's numbers could not be had.  Never raises an ``Exception``."""
        self.dropped += 1
        if isinstance(error, _NoMailbox):
            if monotonic() >= self._next_log and not self._closed.is_set():
                self._say(f"{self.dropped} publishes dropped so far, the engine serves without a mailbox: {self.error}")
        else:
            self._tell(error, f"a publish was dropped, {self.dropped} so far; the engine serves on")

    def close(self) -> None:
        """Say CLOSED, and try no more.  Idempotent."""
        self._closed.set()
        with self._lock:
            writer, self.writer = self.writer, None
            self._store = self._nowhere
        if writer is not None:
            try:
                writer.close()
            except Exception as error:
                self._tell(error, "closing the mailbox failed")

    def stats(self) -> PublisherStats:
        """The counters."""
        return PublisherStats(self._group, self._rank, self.published, self.dropped, self.error)

    def _nowhere(self, num_running: int, num_waiting: int, kv_active_pages: int, kv_total_pages: int) -> None:
        # Held by others for one publish, when a mailbox was had at last: without the lock an older load could overwrite this one.
        with self._lock:
            self._last = (num_running, num_waiting, kv_active_pages, kv_total_pages)
            if self.writer is None:
                raise _NoMailbox
        self._store(num_running, num_waiting, kv_active_pages, kv_total_pages)

    def _open(self, writer: MailboxWriter) -> None:
        self.writer = writer
        self.error = None
        self._store = writer.publish

    def _tell(self, error: Exception, what: str) -> None:
        try:
            self.error = str(error) or type(error).__name__
        except Exception:
            self.error = type(error).__name__
        if monotonic() >= self._next_log:
            self._say(f"{what}: {self.error}")

    def _say(self, sentence: str) -> None:
        self._next_log = monotonic() + _LOG_INTERVAL_S
        _log.warning("rank %s of group %s: %s", self._rank, self._group, sentence)

    def _start_retrying(self) -> None:
        try:
            # It holds a weak reference: a publisher that is dropped without close() takes its thread along.
            threading.Thread(target=_retry, args=(weakref.ref(self), self._closed), name="loadbox-retry", daemon=True).start()
        except Exception as error:  # "can't start new thread", at exit or at the limit
            self._tell(error, "the mailbox will not be tried again")

    def _try_again(self) -> bool:
        """Whether there is nothing more to be tried."""
        try:
            writer = MailboxWriter(*self._arguments, mode=self._mode, start_wait=0.0)
        except Exception as error:
            self.error = str(error)
            return not isinstance(error, MailboxError)
        with self._lock:
            if self._closed.is_set():
                writer.close()
                return True
            last = self._last
            try:
                if last is not None:
                    writer.publish(*last)
            except Exception:
                pass  # numbers that it does not take; the next publish says so
            self._open(writer)
        self._say(f"there is a mailbox now, after {self.dropped} dropped publishes")
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LoadPublisher {self._group}.{self._rank} published={self.published} dropped={self.dropped}>"


def publisher_stats() -> list[PublisherStats]:
    """The counters of every ``LoadPublisher`` of this process, for an engine's own metrics or a debugger."""
    return [publisher.stats() for publisher in list(_publishers)]


class _NoMailbox(Exception):
    """There is none to publish to."""


def _retry(reference: weakref.ref[LoadPublisher], closed: threading.Event) -> None:
    delay = _RETRY_FIRST_S
    while not closed.wait(delay):
        publisher = reference()
        if publisher is None or publisher._try_again():
            return
        del publisher
        delay = min(2 * delay, _RETRY_LIMIT_S)
