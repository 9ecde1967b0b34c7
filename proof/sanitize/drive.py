"""Drive the C core through what it can meet, for a sanitizer to watch: drive.py FORKS_LIBRARY GROUP [--leaks] PART ...

Parts are the functions below, each as often as it is named.  ``--leaks`` asks LeakSanitizer at the end, while the interpreter still
stands, and ends with 23 if anything cannot be reached any more.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from loadbox.mailbox import GroupReader, MailboxError, MailboxReader, MailboxWriter, RankState, _seqlock
from loadbox.mailbox._segment import clean

assert _seqlock.BACKEND == "c"
FORKS = ctypes.CDLL(sys.argv[1])
GROUP = sys.argv[2]
NOW: Any = {"liveness_interval": 0.0}


@contextmanager
def refused(*kinds: type[BaseException]) -> Iterator[None]:
    """What is inside must raise one of these."""
    try:
        yield
    except kinds:
        return
    raise AssertionError(f"nothing was raised, expected {kinds}")


def path(rank: int = 0) -> str:
    """A segment's file."""
    return f"/dev/shm/loadbox.{GROUP}.{rank}"


def descriptors_open() -> set[int]:
    """This process's descriptors."""
    return {int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}


def mappings() -> int:
    """How many mappings of segments this process has."""
    with open("/proc/self/maps") as maps:
        return sum(GROUP in line for line in maps)


def closing() -> Any:
    """An int that closes the writer while it is being converted."""

    class Closing:
        writer: MailboxWriter

        def __index__(self) -> int:
            self.writer.close()
            return 1

    return Closing()


def publish() -> None:
    """Good and bad arguments, writers that are not open, a writer closed in the middle of its own publish."""
    with MailboxWriter(GROUP, 0, 2) as writer:
        loads: list[Any] = [(0, 0, 0, 0), (1, 2, 3, 4), (2**30, 2**60, 2**62, 2**63 - 1), (0, 0, 5, 4)]
        loads += [(bad, 0, 0, 1) for bad in (True, -1, 2**63, -(2**63), 10**40, 1.0, None, "1", object())]
        for load in loads:
            with suppress(ValueError, TypeError):
                writer.publish(*load)
        for count in (0, 1, 3, 5, 100):
            with refused(TypeError):
                writer.publish(*range(count))
            with refused(TypeError):
                writer._publish_lengths(*range(count))
        requests: list[Any] = [[1] * 500, deque([1] * 500), (), 5, None]
        for sized in itertools.product(requests, requests, requests):
            for pages in ((10**6, 10**7), (10**7, 10**6)):
                with suppress(ValueError, TypeError):
                    writer._publish_lengths(*sized, *pages)
        with refused(MailboxError):
            writer._attach(0)
        with refused(MailboxError):
            writer._repair()
        number = closing()
        number.writer = writer
        with refused(MailboxError):
            writer.publish(1, 2, number, 4)
        writer.close()
    calls: list[tuple[str, Any]] = [
        ("publish", (1, 2, 3, 4)),
        ("_repair", ()),
        ("_attach", (-1,)),
        ("_attach", ("",)),
        ("_hold", ("",)),
    ]
    calls += [("_begin", (1, 2)), ("_begin", (1, 0, 0, 1, 1, b"short", 0)), ("_begin", (1, 0, 0, 1, 1, bytes(16), 0))]
    for name, arguments in calls:
        with refused(MailboxError, OSError, TypeError):
            getattr(_seqlock.WriterCore(), name)(*arguments)
    unopened = _seqlock.WriterCore()
    unopened._detach()
    assert unopened._finish() == -1
    assert not unopened._owns()


def read() -> None:
    """Readers of nothing, of a life, of the next, of what is pulled away from under them; readers closed or never set up."""
    reader, all_ranks = MailboxReader(GROUP, 0, **NOW), GroupReader(GROUP, **NOW)
    assert (reader.read(), reader.state(), reader.age(), reader.epoch, reader.reason) == (None, RankState.ABSENT, None, 0, None)
    assert len(all_ranks.read()) == 0
    for life in range(3):
        writer = MailboxWriter(GROUP, 0, 3)
        assert reader.state() == RankState.SILENT
        writer.publish(life, 2, 3, 4)
        rows = all_ranks.read()
        assert (reader.read(), rows["num_running"].tolist()) == ((life, 2, 3, 4), [life, 0, 0])
        assert reader.read() is reader.read()
        assert reader.state() == RankState.LIVE
        assert reader.age() is not None
        assert all_ranks.read(out=rows) is rows
        if life:
            os.unlink(path())
        writer.close()
        assert reader.read() is None
    for junk in (b"", b"x" * 4096, b"LOADBOX\0" + bytes(4088), b"\0" * 4096, b"LOADBOX\0" + b"\xff" * 4088):
        with open(os.open(path(), os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
            file.write(junk)
        assert reader.state() != RankState.LIVE
        assert reader.read() is None
        all_ranks.read()
        assert isinstance(all_ranks.reason(0), (str, type(None)))
        os.unlink(path())
    held = MailboxWriter(GROUP, 0)
    held.publish(1, 2, 3, 4)
    assert reader.read() == (1, 2, 3, 4)
    with open(path(), "r+b") as file:  # a record that no writer publishes
        file.seek(136)
        file.write(b"\xff" * 48)
        file.seek(128)
        file.write(b"\x00\x01")
    assert reader.state() == RankState.REFUSED
    assert "record" in str(reader.reason)
    held.close()
    rows = all_ranks.read()
    for closed in (reader, all_ranks):
        closed.close()
        closed.close()
        with refused(MailboxError):
            closed.read()
    assert rows["rank"].tolist() == [0, 1, 2]
    for core in (_seqlock.ReaderCore(), _seqlock.GroupCore()):
        with refused(MailboxError):
            core.read()
        core.close()


def descriptors() -> None:
    """A program that closes what is not its own: the reader's descriptor, and gives the number to another file."""
    with MailboxWriter(GROUP, 0) as writer, MailboxReader(GROUP, 0, **NOW) as reader:
        for again in (False, True):
            before = descriptors_open()
            writer.publish(1, 2, 3, 4)
            probe = MailboxReader(GROUP, 0, **NOW)
            assert probe.read() == (1, 2, 3, 4)
            (fd,) = descriptors_open() - before
            os.close(fd)
            other = os.open("/dev/null", os.O_RDONLY) if again else -1
            probe.read(), probe.state(), probe.age()
            probe.close()
            if again:
                os.fstat(other)
                os.close(other)
        assert reader.read() == (1, 2, 3, 4)


def group() -> None:
    """A group that grows past its first tables, arrays of every wrong kind, ranks that fail inside the read."""
    import numpy

    writers = [MailboxWriter(GROUP, rank) for rank in range(0, 140, 7)]
    for rank, writer in enumerate(writers):
        writer.publish(rank, 0, 1, 2)
    with GroupReader(GROUP, **NOW) as reader:
        rows = reader.read()
        assert rows["usable"].sum() == len(writers)
        late = MailboxWriter(GROUP, 300, 700)
        with refused(ValueError):
            reader.read(out=rows)
        assert len(reader.read()) == 700
        long = numpy.zeros(1000, reader.dtype)
        assert reader.read(long) is long
        for wrong in (numpy.zeros(1000), long[::2], numpy.zeros((2, 1000), reader.dtype), b"x" * 60000, 3, [1]):
            with refused(TypeError, ValueError):
                reader.read(out=wrong)  # type: ignore[arg-type]
        long.flags.writeable = False
        fresh = numpy.zeros(1000, reader.dtype)
        fresh.flags.writeable = False
        with refused(TypeError, ValueError):
            reader.read(out=fresh)
        for call in (lambda: reader.read(1, 2), lambda: reader.read(outt=1), lambda: reader.reason(700), lambda: reader.reason("")):  # type: ignore[call-arg,arg-type]
            with refused(TypeError, IndexError):
                call()
        late.close()

    class Failing(GroupReader):
        def _find(self, rank: int, /) -> tuple[int, str | None, int]:
            if rank == 5:
                raise KeyError(rank)
            return super()._find(rank)

    class Rubbish(GroupReader):
        def _find(self, rank: int, /) -> Any:
            return ("fd", None)

    class Huge(GroupReader):
        def _discover(self) -> int:
            return "many"  # type: ignore[return-value]

    for kind in (Failing, Rubbish, Huge):
        with kind(GROUP, **NOW) as reader, refused(KeyError, TypeError):
            reader.read()
    for writer in writers:
        writer.close()


def forks() -> None:
    """Children forked by Python and by C, that drop, close and publish; a writer killed, and its rank adopted."""
    reader = MailboxReader(GROUP, 0, **NOW)
    with MailboxWriter(GROUP, 0) as writer:
        writer.publish(1, 2, 3, 4)
        for fork in (os.fork, ctypes.PyDLL(None).fork):
            pid = fork()
            if pid == 0:
                with suppress(MailboxError):
                    writer.publish(9, 9, 9, 9)
                    os._exit(1)
                writer.close()
                del writer
                gc.collect()
                os._exit(0 if reader.read() == (1, 2, 3, 4) else 2)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert FORKS.fork_and_wait() == 0
        writer.publish(5, 6, 7, 8)
        assert (reader.read(), reader.state()) == ((5, 6, 7, 8), RankState.LIVE)
    code = f"""
import os
from loadbox.mailbox import MailboxWriter
writer = MailboxWriter({GROUP!r}, 0)
writer.publish(4, 3, 2, 1 << 40)
os.kill(os.getpid(), {signal.SIGKILL})
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert (reader.read(), reader.state()) == ((4, 3, 2, 1 << 40), RankState.DEAD)
    with MailboxWriter(GROUP, 0) as writer:
        assert reader.state() == RankState.SILENT
    reader.close()
    subprocess.run([sys.executable, "-c", code])
    assert clean(f"/loadbox.{GROUP}.0") is None


def lives() -> None:
    """Many short lives, and objects dropped without a close: what they leave behind would add up."""
    import warnings

    warnings.simplefilter("ignore", ResourceWarning)
    things: list[tuple[int, int, int]] = []
    for life in range(50):
        writer, reader, all_ranks = MailboxWriter(GROUP, 0, 2), MailboxReader(GROUP, 0, **NOW), GroupReader(GROUP, **NOW)
        writer.publish(1, 2, 3, 4)
        reader.read(), all_ranks.read(out=all_ranks.read())
        with open(path(1), "wb") as file:
            file.write(b"junk" * 1024)
        all_ranks.read(), all_ranks.reason(1)
        os.unlink(path(1))
        del writer, reader, all_ranks, file
        if life in (10, 49):
            gc.collect()
            things.append((len(gc.get_objects()), len(descriptors_open()), mappings()))
    early, late = things
    assert late[0] <= early[0] + 10, things
    assert early[1:] == late[1:] == (late[1], 0), things


def threads(seconds: float = 2.0) -> None:
    """Publish, read, close, open and fork at the same time, on shared objects."""
    import numpy

    stop = threading.Event()
    failures: list[BaseException] = []
    writer, reader, all_ranks = MailboxWriter(GROUP, 0, 4), MailboxReader(GROUP, 0, **NOW), GroupReader(GROUP, **NOW)

    def publishes() -> None:
        for n in range(200):
            writer.publish(n, 2 * n, n, n + 1)

    def reads() -> None:
        for _ in range(100):
            seen = reader.read()
            assert seen is None or (seen[1], seen[3]) == (2 * seen[0], seen[0] + 1), seen
            reader.state(), reader.age(), reader.epoch, reader.reason

    def reads_all() -> None:
        with suppress(ValueError):  # the group has grown meanwhile
            all_ranks.read(numpy.zeros(len(all_ranks), all_ranks.dtype))
        all_ranks.read(), all_ranks.reason(0) if len(all_ranks) else None

    def comes_and_goes() -> None:
        with suppress(MailboxError), MailboxWriter(GROUP, 1, start_wait=0) as other, MailboxReader(GROUP, 1, **NOW) as its:
            other.publish(1, 2, 3, 4)
            its.read()

    def is_closed_by_another() -> None:
        shared = GroupReader(GROUP, 4, **NOW)
        closer = threading.Thread(target=shared.close)
        closer.start()
        with suppress(MailboxError):
            while not stop.is_set():
                shared.read()
        closer.join()

    def forks_in_c() -> None:
        assert FORKS.fork_and_wait() == 0

    def again(work: Callable[[], None]) -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:
            failures.append(error)
            stop.set()

    works = [publishes, publishes, reads, reads, reads_all, comes_and_goes, comes_and_goes, is_closed_by_another, forks_in_c]
    running = [threading.Thread(target=again, args=(work,)) for work in works]
    for thread in running:
        thread.start()
    stop.wait(seconds)
    stop.set()
    for thread in running:
        thread.join()
    for thing in (reader, all_ranks, writer):
        thing.close()
    if failures:
        raise failures[0]


PARTS = {work.__name__: work for work in (publish, read, descriptors, group, forks, lives, threads)}


def main(arguments: list[str]) -> int:
    """Run the chosen parts; 23 if something was lost."""
    leaks = "--leaks" in arguments
    chosen = [argument for argument in arguments if argument != "--leaks"] or list(PARTS)
    for name in chosen:
        PARTS[name]()
    gc.collect()
    if leaks and ctypes.CDLL(None).__lsan_do_recoverable_leak_check():
        return 23
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[3:]))
