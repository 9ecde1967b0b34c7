"""The mailbox as an engine uses it: whatever goes wrong with it stays here.

An engine must serve on without a mailbox (a full /dev/shm, a predecessor that is slow to die), but not in silence: every publish
that reaches no mailbox is counted, said in the log at most once a minute, and readers call the rank ABSENT.

Two may publish: the engine, and while a mailbox has just been had, the background thread on its behalf, since an idle engine
would not.  So that neither an older load comes after a newer one nor the engine ever waits:

* The engine notes its load first and only then *tries* for the lock.  If it has the lock, it takes the mailbox over for good.
* The thread publishes the noted load under the lock, and after letting go looks whether another has been noted meanwhile.  Whoever
  did not get the lock had noted its load before.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from loadbox.mailbox import MailboxError, MailboxUnsupported, MailboxWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Sized
    from types import TracebackType
    from typing import TypeVar

    from typing_extensions import Self

    Method = TypeVar("Method", bound=Callable[..., None])

    Publish = Callable[[int, int, int, int], None]
    PublishLengths = Callable[[Sized, Sized, Sized, int, int], None]
    Use = Callable[..., None]

__all__ = ["LoadPublisher", "PublisherStats", "publisher_stats"]

_LOG_INTERVAL_S = 60.0
_RETRY_FIRST_S = 1.0
_RETRY_LIMIT_S = 30.0
_LOOK_S = 5.0  # how soon a segment that was removed under its writer is missed
_log = logging.getLogger("loadbox")
_publishers: weakref.WeakValueDictionary[int, LoadPublisher] = weakref.WeakValueDictionary()


class PublisherStats(NamedTuple):
    """One publisher's counters, since it was made."""

    group: str
    rank: int
    published: int
    """Publishes that a mailbox took."""
    dropped: int
    """Publishes that none took."""
    error: str | None
    """Why the last one was not taken, or why there is no mailbox; None if there is one and it took the last publish."""


def _dropping(method: Method) -> Method:
    """The method, which drops what it cannot publish; that includes what it cannot be called with."""

    @functools.wraps(method)
    def guarded(self: LoadPublisher, *args: int, **kwargs: int) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.drop(error)

    return guarded  # type: ignore[return-value] # for the caller it is the method


class LoadPublisher:
    """A rank's mailbox for an engine: like ``MailboxWriter``, but nothing that goes wrong with it reaches the engine.

    No method raises an ``Exception``, whatever numbers it is given.  If the mailbox cannot be had, the engine serves without one,
    and a background thread tries again, after 1 s and then at growing intervals of up to 30 s, for as long as that can help; it
    publishes the last load that was given.  The thread also looks every 5 s whether somebody has removed the segment
    (``rm /dev/shm/*``, or systemd's RemoveIPC), and then makes it anew.  A look takes the interpreter for some microseconds.

    Args:
        group, rank, dp_size, mode: as of ``MailboxWriter``.
        start_wait: seconds that the constructor may wait for a previous owner that is just dying.

    Attributes:
        dropped: publishes that no mailbox took: there was none, or it refused the numbers.
        error: why the last one was dropped, or why there is no mailbox; None if all is well.
        writer: the ``MailboxWriter``, to be announced to frontends (``connect_msgpack_engine(…, mailbox=…)``), or None.

    Threads: any may publish; with several at once ``dropped`` may be short by some.
    Fork: a child is no owner; its publishes are dropped, and it does not try again.
    asyncio: ``publish`` never waits; the constructor may, for ``start_wait``.
    """

    def __init__(self, group: str, rank: int, dp_size: int | None = None, *, mode: int = 0o600, start_wait: float = 2.0) -> None:
        self.dropped = 0
        self.error: str | None = None
        self.writer: MailboxWriter | None = None
        self._group, self._rank = group, rank
        self._dp_size, self._mode = dp_size, mode
        self._counted: tuple[MailboxWriter | None, int, int] = (None, 0, 0)
        self._last: tuple[int, ...] | None = None
        self._taken = False
        self._next_log = 0.0
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        publish, self._publish_lengths, self._use = _guarded(self._slowly, self.drop)
        if type(self).publish is LoadPublisher.publish:
            # A closure takes two thirds of the time of a method that looks up in self what to call.
            self.publish = publish  # type: ignore[method-assign, assignment] # the same call
        _publishers[id(self)] = self
        try:
            self._have(self._make(start_wait))
        except Exception as error:
            self._tell(error, "the engine serves without a mailbox" + (", and tries again" if _heals(error) else ""))
            if not _heals(error):
                return
        self._start_thread()

    @_dropping
    def publish(self, num_running: int, num_waiting: int, kv_active_pages: int, kv_total_pages: int) -> None:
        """Publish one iteration's load, as ``MailboxWriter.publish``; never raises an ``Exception`` and never waits."""
        self._slowly(num_running, num_waiting, kv_active_pages, kv_total_pages)

    @property
    def published(self) -> int:
        """Publishes that a mailbox took."""
        while True:
            counted = writer, earlier, first = self._counted
            seen = writer._seen() if writer else None
            if seen:
                return earlier + (seen[0] - first) % (1 << 64) // 2  # each adds two to the sequence, which may wrap
            if counted is self._counted:
                return earlier

    def drop(self, error: Exception) -> None:
        """Count a publish that could not even be made: the engine's numbers could not be had.  Never raises an ``Exception``."""
        self._use(self._slowly)
        self.dropped += 1
        if not isinstance(error, _NoMailbox):
            self._tell(error, f"a publish was dropped, {self.dropped} so far; the engine serves on")
        elif not self._closed.is_set():
            self._say(f"{self.dropped} publishes dropped so far, the engine serves without a mailbox: {self.error}")

    def close(self) -> None:
        """Say CLOSED, and try no more.  Idempotent."""
        if self._pid == os.getpid():  # a child has no thread to stop, and may have inherited these locked for ever
            self._closed.set()
            with self._lock:
                writer = self._lose()
        else:
            writer = self._lose()
        self.error = "it is closed"
        try:
            if writer is not None:
                writer.close()
        except Exception as error:
            self._tell(error, "closing the mailbox failed")

    def stats(self) -> PublisherStats:
        """The counters."""
        return PublisherStats(self._group, self._rank, self.published, self.dropped, self.error)

    # ---- the engine's side -------------------------------------------------------------------------------------------------

    def _slowly(self, *load: int) -> None:
        """Publish when there is, or was, something wrong, and go back to the writer's own method when there no longer is."""
        self._last = load
        if not self._lock.acquire(blocking=False):
            raise _NoMailbox
        try:
            writer = self.writer
            if writer is None:
                raise _NoMailbox
            self._taken = True
        finally:
            self._lock.release()
        writer.publish(*load)
        self.error = None
        self._use(writer.publish, writer._publish_lengths)
        if self._last is not load and self._last is not None:  # another thread's, which did not get the lock
            writer.publish(*self._last)

    # ---- having and losing a mailbox ---------------------------------------------------------------------------------------

    def _make(self, start_wait: float) -> MailboxWriter:
        return MailboxWriter(self._group, self._rank, self._dp_size, mode=self._mode, start_wait=start_wait)

    def _have(self, writer: MailboxWriter) -> None:
        seen = writer._seen()
        self._counted = (writer, self._counted[1], seen[0] if seen else 0)
        self.writer = writer
        self.error = None
        self._taken = False

    def _lose(self) -> MailboxWriter | None:
        writer = self.writer
        self._use(self._slowly)
        self._counted = (None, self.published, 0)
        self.writer = None
        return writer

    def _look(self, delay: float) -> float | None:
        """The background thread's work; gives the seconds until it is wanted again, None: never."""
        writer = self.writer
        if writer is not None:
            if not writer._removed():
                return _LOOK_S
            with self._lock:
                seen = writer._seen()
                if seen is None:  # closed meanwhile
                    return None
                self._last = seen[1:]
                self._lose()
            self._tell(MailboxError(f"{writer.name} was removed from /dev/shm"), "its mailbox is made anew")
            writer.close()
            delay = _RETRY_FIRST_S / 2
        try:
            writer = self._make(0.0)
        except Exception as error:
            if self._closed.is_set():
                return None
            self.error = _words(error)
            return min(2 * delay, _RETRY_LIMIT_S) if _heals(error) else None
        with self._lock:
            if self._closed.is_set():
                writer.close()
                return None
            self._have(writer)
        self._hand_over(writer)
        self._say(f"there is a mailbox now, after {self.dropped} dropped publish{'' if self.dropped == 1 else 'es'}", always=True)
        return _LOOK_S

    def _hand_over(self, writer: MailboxWriter) -> None:
        while True:
            with self._lock:
                last = self._last
                if self._taken or self._closed.is_set():
                    return
                try:
                    if last is not None:
                        writer.publish(*last)
                except Exception:
                    pass  # numbers that it does not take; the next publish says so
            if self._last is last:
                return

    def _start_thread(self) -> None:
        try:
            # It holds a weak reference: a publisher that is dropped without close() takes its thread along.
            threading.Thread(target=_keep, args=(weakref.ref(self), self._closed), name="loadbox-keeper", daemon=True).start()
        except Exception as error:  # "can't start new thread", at exit or at the limit
            if self.writer is None:
                self._tell(error, "the mailbox will not be tried again")

    # ---- saying so ---------------------------------------------------------------------------------------------------------

    def _tell(self, error: Exception, what: str) -> None:
        self.error = _words(error)
        self._say(f"{what}: {self.error}")

    def _say(self, sentence: str, *, always: bool = False) -> None:
        now = monotonic()
        if now < self._next_log and not always:
            return
        self._next_log = now + _LOG_INTERVAL_S
        try:
            _log.warning("rank %s of group %s: %s", self._rank, self._group, sentence)
        except Exception:
            pass  # somebody's filter or handler

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LoadPublisher {self._group}.{self._rank} published={self.published} dropped={self.dropped}>"


def publisher_stats() -> list[PublisherStats]:
    """The counters of every ``LoadPublisher`` of this process, for an engine's own metrics or a debugger."""
    publishers = [reference() for reference in _publishers.valuerefs()]
    return [publisher.stats() for publisher in publishers if publisher is not None]


class _NoMailbox(Exception):
    """There is none to publish to."""


_NOT_GIVEN: Any = object()


def _wrong_number(*load: object) -> TypeError:
    given = sum(number is not _NOT_GIVEN for number in load)
    return TypeError(f"publish() takes num_running, num_waiting, kv_active_pages and kv_total_pages, {given} given")


def _guarded(store: Publish, failed: Callable[[Exception], None]) -> tuple[Publish, PublishLengths, Use]:
    """``publish`` and ``publish_lengths``, which hand loads to a store and errors to ``failed``; and what changes the store."""

    def count(running: Sized, waiting: Sized, more_waiting: Sized, kv_active_pages: int, kv_total_pages: int) -> None:
        store(len(running), len(waiting) + len(more_waiting), kv_active_pages, kv_total_pages)

    store_lengths: PublishLengths = count

    # A call with another number of arguments gets in, too, to be dropped and not to be the engine's trouble.  (**named would double
    # the time: a name that there is not is a TypeError as of any function.)
    def publish(
        num_running: int = _NOT_GIVEN,
        num_waiting: int = _NOT_GIVEN,
        kv_active_pages: int = _NOT_GIVEN,
        kv_total_pages: int = _NOT_GIVEN,
        *more: int,
    ) -> None:
        """Publish one iteration's load, as ``MailboxWriter.publish``; never raises an ``Exception`` and never waits."""
        try:
            if more or kv_total_pages is _NOT_GIVEN:
                raise _wrong_number(num_running, num_waiting, kv_active_pages, kv_total_pages, *more)
            store(num_running, num_waiting, kv_active_pages, kv_total_pages)
        except Exception as error:
            failed(error)

    publish.__qualname__ = "LoadPublisher.publish"

    def publish_lengths(running: Sized, waiting: Sized, more_waiting: Sized, kv_active_pages: int, kv_total_pages: int) -> None:
        """As ``publish``, given the requests themselves: what runs, and what waits in two queues."""
        try:
            store_lengths(running, waiting, more_waiting, kv_active_pages, kv_total_pages)
        except Exception as error:
            failed(error)

    def use(other: Publish, by_lengths: PublishLengths = count) -> None:
        nonlocal store, store_lengths
        store, store_lengths = other, by_lengths

    return publish, publish_lengths, use


def _words(error: Exception) -> str:
    try:
        return str(error) or type(error).__name__
    except Exception:
        return type(error).__name__


def _heals(error: Exception) -> bool:
    """Whether it can help to try again."""
    return isinstance(error, (MailboxError, OSError, MemoryError)) and not isinstance(error, MailboxUnsupported)


def _keep(reference: weakref.ref[LoadPublisher], closed: threading.Event) -> None:
    publisher: Any = reference()
    delay: float | None = None if publisher is None else _LOOK_S if publisher.writer is not None else _RETRY_FIRST_S
    while delay is not None:
        del publisher
        if closed.wait(delay):
            return
        publisher = reference()
        if publisher is None:
            return
        try:
            delay = publisher._look(delay)
        except Exception as error:
            publisher._tell(error, "looking after the mailbox failed")
            delay = _RETRY_LIMIT_S
