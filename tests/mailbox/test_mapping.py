"""What readers map and hold: read-only, close-on-exec, nothing once closed; and when they attach."""

from __future__ import annotations

import fcntl
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest


def maps(name: str) -> list[str]:
    """The protections of this process's mappings of a segment, "r--s" for one that is shared and read-only."""
    with open("/proc/self/maps") as file:
        return [line.split()[1] for line in file if "/dev/shm" + name in line]


def descriptors(name: str) -> list[int]:
    """This process's descriptors that lead to a segment."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{entry}").startswith("/dev/shm" + name):
                found.append(int(entry))
        except OSError:
            pass  # the listing's own
    return found


OWNER = """
import sys
import loadbox.mailbox as box
for rank in map(int, sys.argv[2:]):
    writer = box.MailboxWriter(sys.argv[1], rank, 3)
    writer.publish(rank, 0, 0, 9)
    globals()[f"writer{rank}"] = writer
    print("ready")
    sys.stdin.readline()
"""


def begin(children: Any, group: str, *ranks: int, backend: str) -> Any:
    child = children.start(OWNER, group, *ranks, backend=backend)
    line = child.stdout.readline()
    assert line == "ready\n", (line, child.communicate()[1])
    return child


def test_readers_map_read_only(box: Any, group: str, children: Any) -> None:
    begin(children, group, 0, backend=box.backend)
    name = f"/loadbox.{group}.0"
    with box.MailboxReader(group, 0) as reader, box.GroupReader(group, 2) as ranks, box.GroupReader(group) as finding:
        assert maps(name) == descriptors(name) == []  # nothing before the first look
        reader.read()
        ranks.read()
        finding.read()
        assert maps(name) == ["r--s"] * 3
        found = descriptors(name)
        assert len(found) >= 3
        for fd in found:
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(fd, b"x")
        reader.state()
        reader.age()
        assert maps(name) == ["r--s"] * 3
    assert maps(name) == descriptors(name) == []


def test_what_a_writer_maps_and_holds(box: Any, group: str) -> None:
    """The description that has the lock is mapped by nobody: a mapping, which a child inherits, would keep the lock."""
    with box.MailboxWriter(group, 0) as writer:
        assert maps(writer.name) == ["rw-s"]
        found = descriptors(writer.name)
        assert found
        assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in found)
        owns = [fd for fd in found if "OFDLCK" in Path(f"/proc/self/fdinfo/{fd}").read_text()]
        assert len(owns) == 1
        os.close(owns[0])  # the one descriptor of it: the lock goes with it, though the mapping stays
        assert maps(writer.name) == ["rw-s"]
        with box.MailboxWriter(group, 0, start_wait=0) as other:
            assert other.epoch != writer.epoch
    assert maps(writer.name) == descriptors(writer.name) == []


def test_a_dead_ones_mapping_is_let_go_once_its_name_is_gone(box: Any, group: str) -> None:
    name = f"/loadbox.{group}.0"
    with box.MailboxReader(group, 0, liveness_interval=0) as reader, box.GroupReader(group, 1, liveness_interval=0) as ranks:
        for turn in range(3):
            writer = box.MailboxWriter(group, 0)
            writer.publish(turn, 0, 0, 9)
            assert reader.read()[0] == ranks.read()["num_running"][0] == turn
            writer._detach()
            os.unlink("/dev/shm" + name)
            assert reader.state().name == "ABSENT"
            assert ranks.read()["state"][0] == 0
            assert maps(name) == descriptors(name) == []


def test_closing_while_rows_are_in_use(box: Any, group: str) -> None:
    with box.MailboxWriter(group, 0) as one, box.MailboxWriter(group, 1) as other:
        one.publish(1, 2, 3, 4)
        other.publish(5, 6, 7, 8)
        ranks, reader = box.GroupReader(group), box.MailboxReader(group, 1)
        rows = ranks.read()
        mine = ranks.read(out=rows.copy())
        row, column, part, view = rows[1], rows["kv_total_pages"], mine[:1], memoryview(mine)
        snapshot = reader.read()
        ranks.close()
        reader.close()
        ranks.close()
        reader.close()
        other.publish(0, 0, 0, 1)
        assert list(row)[:4] == [5, 6, 7, 8]
        assert column.tolist() == [4, 8]
        assert part["num_running"].tolist() == [1]
        assert snapshot == (5, 6, 7, 8)
        assert view.nbytes == 2 * 56
        mine["num_running"] = 3
        with pytest.raises(box.MailboxError, match="closed"):
            ranks.read(out=mine)
        with pytest.raises(box.MailboxError, match="closed"):
            reader.read()
        del ranks, reader
        gc.collect()
        assert (mine["num_running"].tolist(), rows["num_running"].tolist()) == ([3, 3], [1, 5])
        for name in (one.name, other.name):
            assert maps(name) == ["rw-s"]


def test_dropping_readers_without_close(box: Any, group: str) -> None:
    with box.MailboxWriter(group, 0) as writer:
        writer.publish(1, 2, 3, 4)
        reader, ranks = box.MailboxReader(group, 0), box.GroupReader(group)
        rows, snapshot = ranks.read(), reader.read()
        del reader, ranks
        gc.collect()
        assert maps(writer.name) == ["rw-s"]
        assert (rows["num_running"].tolist(), snapshot) == ([1], (1, 2, 3, 4))


def read_until_it_ends(reader: Any, ended: list[Exception], started: threading.Event) -> None:
    try:
        while True:
            reader.read()
            started.set()
    except Exception as error:
        ended.append(error)


def test_closing_from_another_thread_while_it_is_read(box: Any, group: str) -> None:
    with box.MailboxWriter(group, 0) as writer:
        writer.publish(1, 2, 3, 4)
        for make in (lambda: box.MailboxReader(group, 0, liveness_interval=0), lambda: box.GroupReader(group, liveness_interval=0)):
            for _ in range(20):
                reader = make()
                ended: list[Exception] = []
                started = threading.Event()
                thread = threading.Thread(target=read_until_it_ends, args=(reader, ended, started))
                thread.start()
                started.wait()
                reader.close()
                thread.join()
                assert [type(error) for error in ended] == [box.MailboxError], ended
                assert maps(writer.name) == ["rw-s"]


@pytest.mark.parametrize("kind", ["MailboxReader", "GroupReader"])
def test_closing_while_it_is_about_to_attach(box: Any, group: str, kind: str) -> None:
    """The other thread closes between the finding of the file and its mapping (C), or waits until the read is over (the twin)."""
    closing: list[threading.Thread] = []

    class Reader(getattr(box, kind)):  # type: ignore[misc]
        def _find(self, rank: int) -> Any:
            found = super()._find(rank)
            closing.append(threading.Thread(target=self.close))
            closing[0].start()
            closing[0].join(0.1)
            return found

    with box.MailboxWriter(group, 0) as writer:
        writer.publish(1, 2, 3, 4)
        reader = Reader(group, *([0] if kind == "MailboxReader" else []))
        if box.backend == "c":
            with pytest.raises(box.MailboxError, match="closed"):
                reader.read()
        else:
            reader.read()
        closing[0].join()
        assert len(closing) == 1
        assert maps(writer.name) == ["rw-s"]
        with pytest.raises(box.MailboxError, match="closed"):
            reader.read()


def test_readers_that_come_first_attach_by_themselves(box: Any, group: str, children: Any) -> None:
    """Before all of the writers, before some of them, and after."""
    readers = [box.MailboxReader(group, rank, liveness_interval=0) for rank in range(3)]
    told, finding = box.GroupReader(group, 3, liveness_interval=0), box.GroupReader(group, liveness_interval=0)

    def states() -> str:
        seen = [reader.state().name for reader in readers]
        rows = told.read()
        assert [box.RankState(state).name for state in rows["state"]] == seen
        assert rows["usable"].tolist() == [name == "LIVE" for name in seen]
        assert rows["num_running"].tolist() == [rank if name == "LIVE" else 0 for rank, name in enumerate(seen)]
        found = finding.read()
        assert found.tolist() == rows.tolist()[: len(found)]
        assert len(found) in (0, 3)
        return " ".join(seen)

    assert states() == "ABSENT ABSENT ABSENT"
    child = begin(children, group, 2, 0, backend=box.backend)
    assert states() == "ABSENT ABSENT LIVE"
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "ready\n"
    assert states() == "LIVE ABSENT LIVE"
    with box.MailboxWriter(group, 1, 3) as writer:
        assert states() == "LIVE SILENT LIVE"
        writer.publish(1, 0, 0, 9)
        assert states() == "LIVE LIVE LIVE"
        child.kill()
        child.wait()
        assert states() == "DEAD LIVE DEAD"
    assert states() == "DEAD CLOSED DEAD"
    begin(children, group, 0, backend=box.backend)
    assert states() == "LIVE CLOSED DEAD"
    for reader in (*readers, told, finding):
        reader.close()


def test_the_default_interval_attaches_too(box: Any, group: str) -> None:
    """Without being asked to look at every read: within a tenth of a second, but not at every one."""
    with box.MailboxReader(group, 0) as reader, box.GroupReader(group) as ranks:
        assert reader.read() is None
        assert len(ranks.read()) == 0
        with box.MailboxWriter(group, 0) as writer:
            writer.publish(1, 2, 3, 4)
            done = threading.Event()
            while reader.read() is None or len(ranks.read()) == 0:
                assert not done.wait(0.01)
            assert reader.read() == (1, 2, 3, 4)


def test_a_file_that_shrank_before_it_was_mapped(group: str) -> None:
    """The twin's mapping says it as an ``OSError``, as the system does for the C core."""
    from loadbox.mailbox import _files

    path = f"/dev/shm/loadbox.{group}.0"
    with open(path, "xb") as file:
        file.write(bytes(100))
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="it is too short"):
            _files.map_shared(fd, 4096, 1)
    finally:
        os.close(fd)
