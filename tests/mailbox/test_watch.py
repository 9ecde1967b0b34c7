"""The directory's watch: a group's reader asks for each file only when a name has changed, and misses none."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

SECOND = 1_000_000_000


def until(holds: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A watch, the directory that it sees and the file systems' clock; ``moved()``: did its number grow at this look?"""
    from loadbox.mailbox import _watch_py

    world = SimpleNamespace(now=1000 * SECOND, dev=1, ino=2, mtime=900 * SECOND, ctime=900 * SECOND, error=None)

    def stat(path: str) -> Any:
        assert path == "/dev/shm"
        if world.error:
            raise world.error
        return SimpleNamespace(st_dev=world.dev, st_ino=world.ino, st_mtime_ns=world.mtime, st_ctime_ns=world.ctime)

    monkeypatch.setattr(_watch_py, "os", SimpleNamespace(stat=stat))
    monkeypatch.setattr(_watch_py, "time", SimpleNamespace(clock_gettime_ns=lambda clock: world.now))
    watch = _watch_py.Watch()

    def moved() -> bool:
        before = watch._generation
        watch.again()
        return bool(watch.generation() > before)

    world.watch, world.moved = watch, moved
    assert moved()
    assert not moved()
    return world


@pytest.mark.parametrize("what", ["dev", "ino", "mtime", "ctime"])
def test_any_change_of_the_directory_is_a_new_number(watched: Any, what: str) -> None:
    setattr(watched, what, getattr(watched, what) + 1)
    assert watched.moved()
    assert not watched.moved()


def test_a_young_time_is_not_believed(watched: Any) -> None:
    """Another change in the same tick leaves the same time behind."""
    watched.mtime = watched.ctime = watched.now
    for _ in range(3):
        assert watched.moved()
    watched.now += 20_000_000
    assert watched.moved()
    watched.now += 1
    assert watched.moved()  # what came between the last look and this one is not known
    assert not watched.moved()


def test_a_clock_that_was_set_back_is_not_believed(watched: Any) -> None:
    watched.now = watched.mtime - 3600 * SECOND
    watched.mtime = watched.ctime = watched.now
    for _ in range(3):
        assert watched.moved()
    watched.now += SECOND
    assert watched.moved()
    assert not watched.moved()


def test_no_directory_is_always_new(watched: Any) -> None:
    watched.error = FileNotFoundError()
    for _ in range(3):
        assert watched.moved()
    watched.error = None
    assert watched.moved()
    assert not watched.moved()


def test_it_asks_once_a_read(watched: Any) -> None:
    number = watched.watch.generation()
    watched.mtime += 1
    assert watched.watch.generation() == number
    watched.watch.again()
    assert watched.watch.generation() == number + 1


def test_a_change_in_the_same_tick_is_not_missed(box: Any, group: str) -> None:
    """A change, a look, a change, all in one tick of the clock: without a mark on young times the second would wait six seconds."""
    path, junk = f"/dev/shm/loadbox.{group}.0", f"/dev/shm/loadbox.{group}.junk"
    with box.GroupReader(group, 1, liveness_interval=0.3) as ranks, ExitStack() as writers:
        for turn in range(3):
            writer = writers.enter_context(box.MailboxWriter(f"{group}-{turn}", 0, 1))
            writer.publish(turn + 1, 0, 0, 1)
            time.sleep(0.31)  # the next look is due
            os.close(os.open(junk, os.O_CREAT))
            os.unlink(junk)
            ranks.read()
            os.rename(f"/dev/shm/loadbox.{group}-{turn}.0", path)
            until(lambda turn=turn: ranks.read()["num_running"][0] == turn + 1, 5)  # type: ignore[misc]
        os.unlink(path)


def give_away(name: str) -> None:
    """Let every read-only descriptor of a segment lead to /dev/null, as a program does that closes what is not its own."""
    segment = os.stat("/dev/shm" + name)
    given = 0
    for entry in os.listdir("/proc/self/fd"):
        fd = int(entry)
        try:
            found, flags = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
        except OSError:
            continue  # the listing's own
        if (found.st_dev, found.st_ino) == (segment.st_dev, segment.st_ino) and flags & os.O_ACCMODE == os.O_RDONLY:
            null = os.open("/dev/null", os.O_RDONLY)
            os.dup2(null, fd)
            os.close(null)
            given += 1
    assert given


def test_a_descriptor_that_another_part_closed_is_nobodys_death(box: Any, group: str) -> None:
    """The owner's lock is asked for by descriptor; one that leads to another file by now knows of no owner."""
    with box.MailboxWriter(group, 0, 1) as writer, box.GroupReader(group, 1, liveness_interval=0.05) as ranks:
        writer.publish(1, 0, 0, 1)
        assert ranks.read()["state"][0] == box.RankState.LIVE
        seen = set()
        for _ in range(5):
            time.sleep(0.06)  # so long that the directory's last change is past, where nobody else is at work in it
            ranks.read()
            give_away(writer.name)
            end = time.monotonic() + 0.3
            while time.monotonic() < end or ranks.read()["state"][0] != box.RankState.LIVE:
                seen.add(box.RankState(ranks.read()["state"][0]).name)
                assert time.monotonic() < end + 20
        assert seen <= {"LIVE", "REFUSED"}
        assert ranks.reason(0) is None
