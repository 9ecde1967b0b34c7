"""Nothing grows: not memory over publishes and reads, nor descriptors, mappings or files over the lives of writers and readers."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

# Does each operation many times and prints what has grown since a tenth of it was done: blocks of Python's allocator, which
# every object left behind is, and pages of resident memory, for what C code allocates by itself.
MANY_TIMES = """
    import collections, gc, itertools, json, sys
    from loadbox.mailbox import GroupReader, MailboxReader, MailboxWriter

    group, times = sys.argv[1], int(sys.argv[2])
    writer = MailboxWriter(group, 0, 1)
    reader, asking = MailboxReader(group, 0), MailboxReader(group, 0, liveness_interval=0)
    ranks, empty = GroupReader(group, 1), GroupReader(group + "-2", 3, liveness_interval=0)
    writer.publish(1, 1, 1, 1)
    out = ranks.read()
    big = itertools.count(1 << 40)
    load = [itertools.repeat(1 << 40)] * 3

    def exhaust(iterator):
        collections.deque(iterator, maxlen=0)

    def many(call):
        return lambda n: exhaust(itertools.starmap(call, itertools.repeat((), n)))

    def changing(n):
        for _ in range(n):
            new = next(big)
            writer.publish(new, new, new, new)
            assert reader.read()[0] == new
            assert ranks.read(out)["num_running"][0] == new

    def refused(n):
        for _ in range(n):
            try:
                writer.publish(1, 2, 9, 3)
            except ValueError:
                pass

    def measure():
        gc.collect()
        with open("/proc/self/statm") as statm:
            return sys.getallocatedblocks(), int(statm.read().split()[1])

    grown = {}
    for name, part, run in [
        ("publish", 1, lambda n: exhaust(map(writer.publish, itertools.islice(big, n), *load))),
        ("refused publish", 10, refused),
        ("read", 1, many(reader.read)),
        ("changing read", 4, changing),
        ("state", 2, many(reader.state)),
        ("age", 2, many(reader.age)),
        ("epoch and reason", 2, many(lambda: (reader.epoch, reader.reason))),
        ("read that checks", 10, many(asking.read)),
        ("state that asks", 10, many(asking.state)),
        ("group read", 4, many(ranks.read)),
        ("group read of out", 1, lambda n: exhaust(map(ranks.read, itertools.repeat(out, n)))),
        ("group read of nothing", 50, many(empty.read)),
    ]:
        run(times // part // 10)
        before = measure()
        run(times // part)
        after = measure()
        grown[name] = [after[0] - before[0], after[1] - before[1]]
    print(json.dumps(grown))
"""


def check_growth(children: Any, group: str, backend: str, times: int) -> None:
    child = children.start(MANY_TIMES, group, times, backend=backend, env={"OPENBLAS_NUM_THREADS": "1"})
    out, err = child.communicate()
    assert child.returncode == 0, err
    grown = json.loads(out)
    assert len(grown) == 12
    # A leak at each of the fewest times, times / 50, would leave that many blocks, and 16 bytes or more for each.
    for operation, (blocks, pages) in grown.items():
        assert blocks < times // 50 // 8, operation
        assert pages < 256, operation


def test_memory_does_not_grow(box: Any, group: str, children: Any) -> None:
    check_growth(children, group, box.backend, 400_000 if box.backend == "c" else 40_000)


@pytest.mark.slow
def test_memory_does_not_grow_over_ten_million(box: Any, group: str, children: Any) -> None:
    check_growth(children, group, box.backend, 10_000_000 if box.backend == "c" else 1_000_000)


def test_the_measure_finds_a_leak(group: str, children: Any) -> None:
    leaky = MANY_TIMES.replace("assert reader.read()[0] == new\n", "kept.append(reader.read())\n")
    leaky = leaky.replace("grown = {}", "grown, kept = {}, []")
    assert leaky.count("kept") == 2
    blocks, _ = json.loads(children.run(leaky, group, 40_000, backend="py"))["changing read"]
    assert blocks > 40_000 // 50 // 8


def test_a_snapshot_has_the_references_that_it_should(box: Any, group: str) -> None:
    with box.MailboxWriter(group, 0, 1) as writer, box.MailboxReader(group, 0) as reader:
        for n in range(3):
            writer.publish(1 << 40, 1 << 41, n, 1 << 42)
            snapshot = reader.read()
            mine = sys.getrefcount(snapshot)
            again = [reader.read() for _ in range(5)]
            assert sys.getrefcount(snapshot) == mine + 5
            del again
            assert sys.getrefcount(snapshot) == mine
            writer.publish(0, 0, 0, 1)
            assert reader.read() == (0, 0, 0, 1)
            assert sys.getrefcount(snapshot) == mine - 1  # the reader has let go of it
            plain = tuple(int(str(number)) for number in snapshot)
            assert [sys.getrefcount(number) for number in snapshot[:2]] == [sys.getrefcount(number) for number in plain[:2]]
            assert snapshot == (1 << 40, 1 << 41, n, 1 << 42)


def test_what_is_handed_out_keeps_its_references(box: Any, group: str) -> None:
    """States, the rows' dtype and ``out`` live on; what a reader keeps of them does not add up."""
    with box.MailboxWriter(group, 0, 1) as writer, box.MailboxReader(group, 0) as reader, box.GroupReader(group, 1) as ranks:
        writer.publish(1, 1, 1, 1)
        out = ranks.read()
        ranks.read(out)
        watched = [box.RankState.LIVE, ranks.dtype, out, box.LoadSnapshot, type(reader), type(ranks), type(writer)]
        reader.read()
        before = [sys.getrefcount(thing) for thing in watched]
        for n in range(1000):
            writer.publish(n, 1, 1, 1)
            reader.read()
            reader.state()
            reader.age()
            ranks.read(out)
            ranks.read()
            ranks.read(out)
            with box.MailboxReader(group, 0) as late, box.GroupReader(group, 1) as later:
                assert (late.read(), late.state(), len(later.read())) == ((n, 1, 1, 1), box.RankState.LIVE, 1)
        del late, later
        gc.collect()
        after = [sys.getrefcount(thing) for thing in watched]
        assert max(abs(new - old) for new, old in zip(after, before, strict=True)) < 20


class Held:
    """What this process holds of a group, and what lies in /dev/shm of it."""

    def __init__(self, group: str, open_files: Callable[[], int]) -> None:
        self.group = group
        self.open_files = open_files
        gc.collect()
        self.before = self.count()

    def count(self) -> tuple[int, int]:
        with open("/proc/self/maps") as maps:
            return self.open_files(), sum(f"loadbox.{self.group}." in line for line in maps)

    def nothing_more(self) -> bool:
        gc.collect()
        return self.count() == self.before

    def files(self) -> int:
        return sum(name.startswith(f"loadbox.{self.group}.") for name in os.listdir("/dev/shm"))


def test_a_hundred_clean_restarts(box: Any, group: str, open_files: Callable[[], int]) -> None:
    held = Held(group, open_files)
    with box.MailboxReader(group, 0, liveness_interval=0) as reader, box.GroupReader(group, liveness_interval=0) as ranks:
        for life in range(100):
            with box.MailboxWriter(group, 0, 1) as writer:
                writer.publish(life, 1, 1, 1)
                assert reader.read() == (life, 1, 1, 1)
                assert ranks.read()["num_running"].tolist() == [life]
                inside = held.count()
                if life == 0:
                    first = inside
                assert (inside, held.files()) == (first, 1)
            assert held.files() == 0
    assert held.nothing_more()


def test_a_hundred_writers_dropped(box: Any, group: str, open_files: Callable[[], int]) -> None:
    """As a SIGKILL leaves it: the segment stays, unlocked, and the next writer adopts it."""
    held = Held(group, open_files)
    epochs = set()
    with box.MailboxReader(group, 0, liveness_interval=0) as reader, box.GroupReader(group, liveness_interval=0) as ranks:
        for life in range(100):
            writer = box.MailboxWriter(group, 0, 1, start_wait=0)
            epochs.add(writer.epoch)
            assert (reader.state().name, reader.read()) == ("SILENT", None)
            writer.publish(life, 1, 1, 1)
            assert reader.read() == (life, 1, 1, 1)
            assert ranks.read()["num_running"].tolist() == [life]
            if life == 0:
                first, inode = held.count(), os.stat(f"/dev/shm{writer.name}").st_ino
            assert (held.count(), held.files(), os.stat(f"/dev/shm{writer.name}").st_ino) == (first, 1, inode)
            with pytest.warns(ResourceWarning, match="was dropped"):
                del writer
            assert reader.state().name == "DEAD"
        box.MailboxWriter(group, 0, 1, start_wait=0).close()
    assert len(epochs) == 100
    assert held.nothing_more()
    assert held.files() == 0


# Forks, so it is a program of its own.
KILLED = """
    import ctypes, os, signal, sys
    from loadbox.mailbox import GroupReader, MailboxReader, MailboxWriter

    group = sys.argv[1]
    reader, ranks = MailboxReader(group, 0, liveness_interval=0), GroupReader(group, 1, liveness_interval=0)

    def holds():
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum(f"loadbox.{group}." in line for line in maps)

    counts = set()
    for life in range(100):
        pid = os.fork()
        if pid == 0:
            try:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
                writer = MailboxWriter(group, 0, 1, start_wait=0)
                writer.publish(life, 1, 1, 1)
                os.kill(os.getpid(), signal.SIGKILL)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        assert (reader.state().name, reader.read()) == ("DEAD", (life, 1, 1, 1))
        assert ranks.read()["state"].tolist() == [reader.state()]
        counts.add((holds(), os.stat(f"/dev/shm/loadbox.{group}.0").st_ino))
    assert len(counts) == 1, counts
    assert [name for name in os.listdir("/dev/shm") if name.startswith(f"loadbox.{group}.")] == [f"loadbox.{group}.0"]
    MailboxWriter(group, 0, 1, start_wait=0).close()
    print(reader.state().name)
"""


def test_a_hundred_writers_killed(box: Any, group: str, children: Any) -> None:
    assert children.run(KILLED, group, backend=box.backend, env={"OPENBLAS_NUM_THREADS": "1"}) == "CLOSED\n"


def test_failed_starts_leave_nothing(box: Any, group: str, open_files: Callable[[], int]) -> None:
    with box.MailboxWriter(group, 0, 1) as writer:
        held = Held(group, open_files)
        for _ in range(100):
            with pytest.raises(box.MailboxInUse):
                box.MailboxWriter(group, 0, 1, start_wait=0)
        assert held.nothing_more()
        assert held.files() == 1
        writer.publish(1, 2, 3, 4)


@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
def test_a_thousand_readers_come_and_go(box: Any, group: str, close: bool, open_files: Callable[[], int]) -> None:
    with box.MailboxWriter(group, 0, 1) as writer:
        writer.publish(1, 2, 3, 4)
        held = Held(group, open_files)
        for _ in range(1000):
            reader = box.MailboxReader(group, 0)
            assert reader.read() == (1, 2, 3, 4)
            if close:
                reader.close()
        for _ in range(100):
            ranks = box.GroupReader(group)
            assert ranks.read()["usable"].tolist() == [True]
            if close:
                ranks.close()
        del reader, ranks
        assert held.nothing_more()
