"""Whatever may lie under a segment's name: it gets the right state or a refusal with its reason, and stays as it was.

The files are real ones, in /dev/shm.  One that is right but for a single word is the work of ``segment()``, and the first test
proves that nothing else is wrong with it.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HEADER = struct.Struct("<10Q16s3Q")
RECORD = struct.Struct("<6q")
MAGIC = int.from_bytes(b"LOADBOX\0", "little")
EPOCH = 77
WORDS = (1, 2, 3, 4, 5, EPOCH)


def segment(*, size: int = 4096, words: tuple[int, ...] = WORDS, **header: int) -> bytes:
    """A whole segment of rank 1, left by a dead writer, with some words of its header or its record set otherwise."""
    fields = {
        "magic": MAGIC, "abi_major": 1, "abi_minor": 0, "kind": 1, "record_offset": 128, "rank": 1, "dp_size": 3, "owner_pid": 1,
        "start_ns": 1, "state": 1,
    }  # fmt: skip
    assert fields.keys() >= header.keys()
    fields.update(header)
    data = bytearray(size)
    HEADER.pack_into(data, 0, *fields.values(), bytes(16), 0, 0, 0)
    record = RECORD.pack(*(word - (1 << 64) if word >= 1 << 63 else word for word in words))
    struct.pack_into("<Q", data, 128, 2)
    data[136:184] = data[192:240] = record
    return bytes(data)


class Odd(NamedTuple):
    """Something under a segment's name, and what is to come of it."""

    put: Callable[[Path], None]
    reader: str  # a state's name, or the reason of REFUSED
    writer: str  # "finished" (the same file), "replaced" or the reason of MailboxRefused
    clean: str | None  # None: removed; else the reason why not


def data(content: bytes, mode: int = 0o600) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        path.write_bytes(content)
        path.chmod(mode)

    return put


def sparse(path: Path) -> None:
    data(b"")(path)
    os.truncate(path, 4096)
    assert path.stat().st_blocks == 0


def directory(path: Path) -> None:
    path.mkdir(0o700)


def fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    path.chmod(0o600)


def link_to(content: bytes | None) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        target = path.with_name(path.name + ".target")  # swept with the rest of the group
        if content is not None:
            data(content)(target)
        path.symlink_to(target)

    return put


def hard_link(path: Path) -> None:
    data(segment())(path)
    os.link(path, path.with_name(path.name + ".target"))


def owned_by_another(mode: int) -> Callable[[Path], None]:
    def put(path: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("NOT TESTED: only root can make another user's file")
        data(segment(), mode)(path)
        os.chown(path, 65533, 65533)

    return put


def device(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: only root can make a device")
    os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # as /dev/zero


def bad_word(index: int, value: int) -> Odd:
    words = list(WORDS)
    words[index] = value
    return Odd(data(segment(words=tuple(words))), "its record is none that a writer publishes", "finished", None)


def in_header(reason: str, writer: str = "finished", clean: str | None = None, **header: int) -> Odd:
    return Odd(data(segment(**header)), reason, writer, clean)


FOREIGN = "it is no segment of loadbox"
ODD = {
    "empty": Odd(data(b""), "ABSENT", "finished", None),
    "zeros": Odd(data(bytes(4096)), "ABSENT", "finished", None),
    "magic not yet stored": in_header("ABSENT", magic=0),
    "sparse": Odd(sparse, "it is a hole without memory behind it", "finished", None),
    "one byte": Odd(data(b"\0"), "it is 1 bytes long, shorter than a segment's 4096", "it is 1 bytes long", None),
    "header only": Odd(data(segment()[:128]), "it is 128 bytes long", "it is 128 bytes long", None),
    "one byte short": Odd(data(segment()[:4095]), "it is 4095 bytes long", "it is 4095 bytes long", None),
    "longer": Odd(data(segment(size=12288)), "DEAD", "finished", None),
    "text": Odd(data(b"hello\n" * 1000), FOREIGN, FOREIGN, FOREIGN),
    "all ones": Odd(data(b"\xff" * 4096), FOREIGN, FOREIGN, FOREIGN),
    "magic off by one": in_header(FOREIGN, FOREIGN, FOREIGN, magic=MAGIC + 1),
    "other byte order": Odd(
        data(struct.pack(">512Q", *struct.unpack("<512Q", segment()))), "of the other byte order", FOREIGN, FOREIGN
    ),
    "newer major": in_header("its ABI is 2, this reader's is 1", "replaced", abi_major=2),
    "major 0": in_header("its ABI is 0, this reader's is 1", "replaced", abi_major=0),
    "newer minor": in_header("DEAD", abi_minor=9),
    "a board": in_header("it is a segment of kind 2", "it is a segment of kind 2", kind=2),
    "unknown kind": in_header("it is a segment of kind 9", "it is a segment of kind 9", kind=9),
    "record elsewhere": in_header("its record is said to be at 192, not 128", record_offset=192),
    "another rank's": in_header("it speaks for rank 0, not 1", rank=0),
    "absurd rank": in_header("it speaks for rank 18446744073709551615, not 1", rank=(1 << 64) - 1),
    "absurd dp_size": in_header("its dp_size 65537 is past 65536", dp_size=65537),
    "most absurd dp_size": in_header("its dp_size 18446744073709551615 is past 65536", dp_size=(1 << 64) - 1),
    "unknown state": in_header("DEAD", state=9),
    **{f"negative word {index}": bad_word(index, -1) for index in range(5)},
    "smallest word": bad_word(0, -(1 << 63)),
    "more pages in use than there are": bad_word(2, 5),
    "epoch 0": bad_word(5, 0),
    "epoch 2**62": bad_word(5, 1 << 62),
    "epoch 2**63": bad_word(5, 1 << 63),
    "epoch 2**64 - 1": bad_word(5, (1 << 64) - 1),
    "directory": Odd(directory, "it is a directory", "it is a directory", "not a regular file"),
    "FIFO": Odd(fifo, "it is a FIFO", "it is a FIFO", "it is a FIFO"),
    "socket": Odd(bound_socket, "it is a socket", "it is a socket", "cannot be opened"),
    "device": Odd(device, "it is a device", "it is a device", "it is a device"),
    "dangling link": Odd(link_to(None), "it is a symbolic link", "it is a symbolic link", "cannot be opened"),
    "link to a good segment": Odd(link_to(segment()), "it is a symbolic link", "it is a symbolic link", "cannot be opened"),
    "link to an empty file": Odd(link_to(b""), "it is a symbolic link", "it is a symbolic link", "cannot be opened"),
    "link to /etc/passwd": Odd(lambda path: path.symlink_to("/etc/passwd"), "symbolic link", "symbolic link", "cannot be opened"),
    "hard link": Odd(hard_link, "it has 2 hard links", "it has 2 hard links", "it has 2 hard links"),
    "writable by all": Odd(data(segment(), 0o666), "its mode 0666 lets others write", "its mode 0666 lets others", "its mode 0666"),
    "writable by its group": Odd(data(segment(), 0o620), "its mode 0620 lets others", "its mode 0620 lets others", "its mode 0620"),
    "writable by strangers": Odd(data(segment(), 0o602), "its mode 0602 lets others", "its mode 0602 lets others", "its mode 0602"),
    "another user's": Odd(
        owned_by_another(0o644), "it belongs to another user (uid 65533, ", "it belongs to another user (uid 65533, ", None
    ),
}
REFUSED = {name: case for name, case in ODD.items() if case.reader not in ("ABSENT", "DEAD")}


@pytest.fixture
def path(group: str) -> Path:
    return Path(f"/dev/shm/loadbox.{group}.1")


def picture(path: Path) -> list[object]:
    """All that must not change, of a file and of what it leads to."""
    found = path.lstat()
    seen: list[object] = [found.st_ino, found.st_mode, found.st_uid, found.st_gid, found.st_size, found.st_mtime_ns, found.st_nlink]
    if stat.S_ISLNK(found.st_mode):
        seen.append(os.readlink(path))
        target = path.resolve()
        if target.exists():
            seen += picture(target)
    elif stat.S_ISREG(found.st_mode):
        seen.append(path.read_bytes())
    return seen


def test_the_model_of_all_these_is_a_good_segment(box: Any, group: str, path: Path) -> None:
    data(segment())(path)
    with box.MailboxReader(group, 1) as reader, box.GroupReader(group) as ranks:
        assert (reader.state().name, reader.read(), reader.epoch, reader.reason) == ("DEAD", WORDS[:4], EPOCH, None)
        assert [int(state) for state in ranks.read()["state"]] == [0, 4, 0]
    with box.MailboxWriter(group, 1, 3) as writer:
        assert writer.epoch != EPOCH
    assert not path.exists()


@pytest.mark.parametrize("case", ODD.values(), ids=ODD.keys())
def test_a_reader_gets_a_state_or_a_reason(box: Any, group: str, path: Path, case: Odd) -> None:
    case.put(path)
    before = picture(path)
    with box.MailboxReader(group, 1) as reader:
        state = reader.state().name
        reason = reader.reason
        assert reader.read() == (WORDS[:4] if state == "DEAD" else None)
        assert reader.age() is None
    if case.reader in ("ABSENT", "DEAD"):
        assert (state, reason) == (case.reader, None)
    else:
        assert state == "REFUSED"
        assert case.reader in reason
        assert "record" in case.reader or f"/dev/shm/loadbox.{group}.1" in reason
    assert picture(path) == before


@pytest.mark.parametrize("case", ODD.values(), ids=ODD.keys())
def test_the_other_ranks_are_not_affected(box: Any, group: str, path: Path, case: Odd) -> None:
    case.put(path)
    with (
        box.MailboxWriter(group, 0) as first,
        box.MailboxWriter(group, 2) as last,
        box.GroupReader(group, liveness_interval=0) as ranks,
    ):
        for turn in range(2):  # the second read finds what the first one made of it
            first.publish(turn, 0, 0, 1)
            last.publish(0, turn, 0, 1)
            rows = ranks.read()
            assert len(rows) == 3
            assert rows["usable"].tolist() == [True, False, True]
            assert rows["state"][[0, 2]].tolist() == [2, 2]
            assert rows["num_running"].tolist() == [turn, 0, 0]
            assert rows["num_waiting"].tolist() == [0, 0, turn]
            state = box.RankState(rows["state"][1]).name
            if case.reader in ("ABSENT", "DEAD"):
                assert (state, ranks.reason(1)) == (case.reader, None)
            else:
                assert state == "REFUSED"
                assert case.reader in ranks.reason(1)
            assert [ranks.reason(0), ranks.reason(2)] == [None, None]


@pytest.mark.parametrize("case", ODD.values(), ids=ODD.keys())
def test_a_writer_takes_what_is_its_own_and_refuses_the_rest(box: Any, group: str, path: Path, case: Odd) -> None:
    case.put(path)
    before = picture(path)
    with box.MailboxReader(group, 1, liveness_interval=0) as reader:
        reader.state()
        if case.writer in ("finished", "replaced"):
            with box.MailboxWriter(group, 1, start_wait=0) as writer:
                assert (path.stat().st_ino == before[0]) == (case.writer == "finished")
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
                assert (reader.state().name, reader.read(), reader.reason) == ("SILENT", None, None)
                writer.publish(5, 6, 7, 8)
                assert (reader.state().name, reader.read()) == ("LIVE", (5, 6, 7, 8))
            assert not path.exists()
            return
        with pytest.raises(box.MailboxRefused, match=re.escape(case.writer)) as caught:
            box.MailboxWriter(group, 1, start_wait=0)
        assert f"/dev/shm/loadbox.{group}.1" in str(caught.value)
    assert picture(path) == before


@pytest.mark.parametrize("case", ODD.values(), ids=ODD.keys())
def test_clean_removes_segments_and_nothing_else(box: Any, group: str, path: Path, case: Odd) -> None:
    case.put(path)
    before = picture(path)
    reason = box._segment.clean(f"/loadbox.{group}.1", dry_run=True)
    assert picture(path) == before
    assert box._segment.clean(f"/loadbox.{group}.1") == reason
    if case.clean is None:
        assert reason is None
        assert not os.path.lexists(path)
        assert box._segment.clean(f"/loadbox.{group}.1") == "it is gone already"
    else:
        assert case.clean in reason
        assert picture(path) == before


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_a_reader_attaches_once_the_odd_thing_is_gone(box: Any, group: str, path: Path, case: Odd) -> None:
    case.put(path)
    with box.MailboxReader(group, 1, liveness_interval=0) as reader, box.GroupReader(group, 2, liveness_interval=0) as ranks:
        assert reader.state().name == "REFUSED"
        assert ranks.read()["state"][1] == 6
        (path.rmdir if path.is_dir() and not path.is_symlink() else path.unlink)()
        assert (reader.state().name, reader.reason) == ("ABSENT", None)
        with box.MailboxWriter(group, 1) as writer:
            writer.publish(1, 0, 0, 1)
            assert (reader.state().name, reader.reason) == ("LIVE", None)
            assert (ranks.read()["state"][1], ranks.reason(1)) == (2, None)


def test_a_first_page_without_memory(box: Any, group: str, path: Path) -> None:
    """Long enough and with blocks, but not there where the header would be."""
    with path.open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        os.posix_fallocate(file.fileno(), 65536, 4096)
    with box.MailboxReader(group, 1) as reader:
        assert reader.state().name == "ABSENT"
        assert reader.read() is None


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o604, 0o644])
def test_modes_that_only_the_owner_writes_are_believed(box: Any, group: str, path: Path, mode: int) -> None:
    data(segment(), mode)(path)
    with box.MailboxReader(group, 1) as reader:
        assert (reader.state().name, reader.read()) == ("DEAD", WORDS[:4])


# ---- killed half-way ------------------------------------------------------------------------------------------------------

# Runs the given call in forked children, the k-th of which kills itself at the k-th event (a call or a return, of Python or of C)
# in it, and says so; ends once a child has come through alive.
KILLED = """
import os, signal, sys
import loadbox.mailbox as box

group, what = sys.argv[1:]
name = f"/loadbox.{group}.1"

def act(count):
    def event(frame, kind, argument):
        nonlocal count
        count -= 1
        if count == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if what != "create":
        writer = box.MailboxWriter(group, 1, 3)
        writer.publish(1, 2, 3, 4)
        if what == "clean":
            writer._detach()
    sys.setprofile(event)
    if what == "create":
        writer = box.MailboxWriter(group, 1, 3)
    elif what == "close":
        writer.close()
    else:
        box._segment.clean(name)
    sys.setprofile(None)
    os._exit(0)

for k in range(1, 2000):
    child = os.fork()
    if not child:
        act(k)
    status = os.waitpid(child, 0)[1]
    print(k, -status if os.WIFSIGNALED(status) else os.WEXITSTATUS(status), flush=True)
    if not status or sys.stdin.readline() != "next\\n":
        break
"""


@pytest.fixture
def killed(box: Any, group: str, children: Any) -> Callable[[str], Iterator[None]]:
    def steps(what: str) -> Iterator[None]:
        program = children.start(KILLED, group, what, backend=box.backend)
        count = 0
        while True:
            count += 1
            line = program.stdout.readline().split()
            assert line, program.communicate()[1]
            if line == [str(count), "0"]:
                break
            assert line == [str(count), str(-signal.SIGKILL)]
            yield
            program.stdin.write("next\n")
            program.stdin.flush()
        assert count > (15 if what != "create" else 60), "the walk ended early: nothing was walked through"

    return steps


def test_a_creator_killed_at_any_step_is_followed_by_the_next(box: Any, group: str, path: Path, killed: Any) -> None:
    states = set()
    for _ in killed("create"):
        with box.MailboxReader(group, 1, liveness_interval=0) as reader:
            states.add(reader.state().name)
            assert reader.read() is None
            with box.MailboxWriter(group, 1, start_wait=0) as writer:
                assert reader.state().name == "SILENT"
                writer.publish(5, 6, 7, 8)
                assert reader.read() == (5, 6, 7, 8)
        assert not path.exists()
    assert states == {"ABSENT", "DEAD"}


@pytest.mark.parametrize("what", ["close", "clean"])
def test_a_closer_or_cleaner_killed_at_any_step(box: Any, group: str, path: Path, killed: Any, what: str) -> None:
    states = set()
    for step, _ in enumerate(killed(what)):
        with box.MailboxReader(group, 1, liveness_interval=0) as reader:
            state = reader.state().name
            states.add(state)
            load = reader.read()
            assert load is None or (state, load) == ("DEAD", (1, 2, 3, 4))  # it may have died after its last word, "no snapshot"
        if step % 2:
            assert box._segment.clean(f"/loadbox.{group}.1") == ("it is gone already" if state == "ABSENT" else None)
        else:
            with box.MailboxWriter(group, 1, start_wait=0) as writer:
                writer.publish(5, 6, 7, 8)
        assert not path.exists()
    assert states == ({"DEAD", "CLOSED", "ABSENT"} if what == "close" else {"DEAD", "ABSENT"})
