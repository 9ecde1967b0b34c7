"""``loadbox inspect`` and ``loadbox ls``: whatever lies in shared memory, told as it is."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from loadbox.cli._app import app
from loadbox.mailbox._host import boot_id, time_ns_inode
from loadbox.mailbox._layout import HEADER, KIND_BOARD, KIND_RANK, MAGIC, MAGIC_SWAPPED, RECORD, SEGMENT_SIZE, SEQ
from loadbox.reader import LoadReader

EPOCH = 123456789


def run(*args: str) -> str:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    return result.output


def told(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("inspect", name, "--json"))
    return found


def only(name: str) -> str:
    """The one odd thing about a file."""
    odd = told(name)["odd"]
    assert len(odd) == 1, odd
    assert odd[0] in run("inspect", name)
    return str(odd[0])


def segment(**changes: Any) -> bytearray:
    """A whole segment that nobody owns, with what is changed."""
    words = {
        "magic": MAGIC, "abi_major": 1, "abi_minor": 0, "kind": KIND_RANK, "record_offset": 128, "rank": 0, "dp_size": 2,
        "owner_pid": 4, "start_ns": time.time_ns(), "state": 1, "boot_id": boot_id(), "time_ns_inode": time_ns_inode(),
        "capacity": 0, "epoch": 0,
    }  # fmt: skip
    seq = changes.pop("seq", 4)
    a = changes.pop("a", (1, 2, 3, 4, time.monotonic_ns(), EPOCH))
    b = changes.pop("b", a)
    assert changes.keys() <= words.keys()
    data = bytearray(SEGMENT_SIZE)
    HEADER.pack_into(data, 0, *(words | changes).values())
    struct.pack_into("<Q", data, SEQ, seq)
    RECORD.pack_into(data, SEQ + 8, *a)
    RECORD.pack_into(data, 192, *b)
    return data


@pytest.fixture
def put(group: str) -> Callable[..., str]:
    """Write a file under a rank's name, or another; gives the name as one types it."""

    def write(data: bytes | bytearray, end: str = "0", mode: int = 0o600) -> str:
        path = Path(f"/dev/shm/loadbox.{group}.{end}")
        path.write_bytes(data)
        path.chmod(mode)
        return f"{group}.{end}"

    return write


@pytest.fixture
def locked() -> Any:
    """Locks on bytes of a file, as its owner has them."""
    fds = []

    def lock(name: str, *offsets: int, kind: int = fcntl.F_WRLCK) -> None:
        fd = os.open(f"/dev/shm/loadbox.{name}", os.O_RDWR)
        fds.append(fd)
        for offset in offsets:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("@hhqqi0q", kind, os.SEEK_SET, offset, 1, 0))

    yield lock
    for fd in fds:
        os.close(fd)


def test_a_living_rank(group: str, writer: Any) -> None:
    rank = writer(group, 3, 4, (7, 2, 30, 60))
    rank.publish(8, 1, 31, 60)
    for name in (f"{group}.3", f"loadbox.{group}.3", f"/loadbox.{group}.3", f"/dev/shm/loadbox.{group}.3"):
        found = told(name)
        assert found["name"] == f"/loadbox.{group}.3"
    assert (found["state"], found["reason"], found["odd"]) == ("LIVE", None, [])
    assert (found["header"]["rank"], found["header"]["dp_size"], found["header"]["owner_pid"]) == (3, 4, rank.pid)
    copy = found["copies"][found["copy_in_use"]]
    assert [copy[name] for name in ("num_running", "num_waiting", "kv_active_pages", "kv_total_pages")] == [8, 1, 31, 60]
    assert found["locks"] == {"byte_0": "held", "byte_of_epoch": "held"}
    text = run("inspect", f"{group}.3")
    for words in ("LIVE", "31 of 60, 52%", f"{rank.pid}, here that is", "even: readers use copy A", "this boot", "nothing odd"):
        assert words in text


def test_a_rank_that_died_has_last_words(group: str, writer: Any) -> None:
    rank = writer(group, 0, 1, (7, 2, 30, 60))
    rank.kill()
    assert f"Nobody owns it: its scheduler (pid {rank.pid}) is gone" in only(f"{group}.0")
    assert told(f"{group}.0")["state"] == "DEAD"


def test_a_rank_that_hangs_or_is_stopped(group: str, put: Callable[..., str], locked: Any, children: Any) -> None:
    child = children.start("input()")
    long_ago = time.monotonic_ns() - 10 * 10**9
    name = put(segment(a=(1, 2, 3, 4, max(1, long_ago), EPOCH), owner_pid=child.pid))
    locked(name, 0, EPOCH)
    assert "its scheduler hangs, or one step takes that long" in only(name)
    assert told(name)["state"] == "STALLED"
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)
    assert f"process {child.pid} is stopped (kill -CONT {child.pid} lets it go on)" in only(name)


def test_a_rank_that_is_silent(group: str, writer: Any) -> None:
    writer(group, 0, 1)
    assert "nothing has been published in this life yet" in only(f"{group}.0")


def test_a_board(group: str, writer: Any) -> None:
    writer(group, 0, 2, (0, 0, 0, 10))
    with LoadReader(group, 2) as view:
        view.choose("a")
        name = next(entry for entry in os.listdir("/dev/shm") if entry.startswith(f"loadbox.{group}.f."))
        found = told(name)
        assert (found["state"], found["header"]["kind"], found["odd"]) == ("LIVE", KIND_BOARD, [])
        assert found["words"] == {"0": [1, 1]}
        text = run("inspect", name)
        assert "1 in flight, 1 owed a first token" in text
        assert "dispatch board" in text
        rows = run("ls", "--group", group).splitlines()
        assert [row.split()[:2] for row in rows] == [["state", "kind"], ["LIVE", "rank"], ["LIVE", "board"]]


def test_a_board_that_was_left(group: str, put: Callable[..., str]) -> None:
    name = put(segment(kind=KIND_BOARD, capacity=496, epoch=5), end="f.0123456789abcdef")
    assert "its frontend (pid 4) is gone" in only(name)
    assert told(name)["state"] == "DEAD"
    assert "DEAD" in run("ls", "--group", group)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"magic": 0}, "half made"),
        ({"magic": MAGIC_SWAPPED}, "other byte order"),
        ({"magic": 0x4847464544434241}, "no segment of loadbox: it starts with b'ABCDEFGH'"),
        ({"abi_major": 2, "abi_minor": 7}, "Its ABI is 2.7, this program's is 1.0"),
    ],
)
def test_heads_that_are_not_ours(changes: dict[str, Any], words: str, put: Callable[..., str]) -> None:
    name = put(segment(**changes))
    assert words in only(name)
    assert told(name)["copies"] is None  # what follows is not known


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"abi_minor": 3}, "newer than 1.0"),
        ({"kind": KIND_BOARD, "capacity": 8, "epoch": EPOCH}, "its name is a rank's"),
        ({"kind": 9}, "Its kind is 9 (unknown)"),
        ({"record_offset": 256}, "Its record is said to be at 256"),
        ({"rank": 1}, "It speaks for rank 1, and its name says 0"),
        ({"dp_size": 1 << 40}, "is past 65536"),
        ({"boot_id": b"0123456789abcdef"}, "of another boot"),
        ({"state": 7}, "neither open (1) nor closed (2)"),
        ({"time_ns_inode": 0}, "could not tell its time namespace"),
        ({"time_ns_inode": 1}, "another time namespace"),
        ({"a": (-1, 0, 0, 8, 0, EPOCH)}, "none that a writer of loadbox publishes"),
        ({"a": (0, 0, 9, 8, 0, EPOCH)}, "none that a writer of loadbox publishes"),
        ({"a": (1, 2, 3, 4, 1 << 62, EPOCH)}, "ahead of this machine's clock"),
        ({"seq": 5}, "in the middle of a publish, which takes nanoseconds, or was stopped there"),
        ({"b": (0, 0, 0, 4, 7, EPOCH)}, "its writer is about to write copy B"),
        ({"a": (0, 0, 0, 0, 5, EPOCH)}, "nothing has been published in this life yet"),
    ],
)  # fmt: skip
def test_what_a_living_owner_says(changes: dict[str, Any], words: str, put: Callable[..., str], locked: Any) -> None:
    name = put(segment(**changes))
    locked(name, 0, EPOCH)
    assert words in only(name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq": 5}, "its writer died in the middle of a publish. Readers use copy B"),
        ({"b": (0, 0, 0, 4, 7, EPOCH)}, "its writer died before copy B was written. Readers use copy A"),
        ({"state": 2, "a": (0, 0, 0, 0, 5, EPOCH)}, "It says closed, and its name is still there"),
    ],
)
def test_what_a_dead_owner_said(changes: dict[str, Any], words: str, put: Callable[..., str]) -> None:
    assert words in run("inspect", put(segment(**changes)))


def test_locks_that_are_not_as_they_should_be(put: Callable[..., str], locked: Any) -> None:
    name = put(segment())
    locked(name, 0)
    assert "a new writer is taking it over this very moment" in only(name)
    name = put(segment(rank=1), end="1")
    locked(name, EPOCH)
    assert "byte 0 is not" in only(name)
    name = put(segment(rank=2, dp_size=3), end="2")
    locked(name, 0, kind=fcntl.F_RDLCK)
    text = run("inspect", name)
    assert "a shared lock on byte 0" in text
    assert "Nobody owns it" not in text


@pytest.mark.parametrize(
    ("size", "words"), [(0, "It is empty"), (100, "100 bytes long, shorter"), (SEGMENT_SIZE, "It is sparse: 0 of 4096 bytes")]
)
def test_short_and_sparse_files(size: int, words: str, put: Callable[..., str]) -> None:
    name = put(b"")
    os.truncate(f"/dev/shm/loadbox.{name}", size)
    assert words in run("inspect", name)


def test_what_is_no_file_is_not_opened(group: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(segment()))
    os.symlink(secret, f"/dev/shm/loadbox.{group}.0")
    os.mkfifo(f"/dev/shm/loadbox.{group}.1")
    os.mkdir(f"/dev/shm/loadbox.{group}.2")
    assert f"It is a symbolic link, not a regular file to {str(secret)!r}, which was not followed" in only(f"{group}.0")
    assert told(f"{group}.0")["header"] is None
    done = subprocess.run(  # with a time limit: a FIFO must not be waited for
        [sys.executable, "-m", "loadbox.cli", "inspect", f"{group}.1"], capture_output=True, text=True, cwd="/", timeout=60
    )
    assert "It is a FIFO, not a regular file. It was not opened" in done.stdout
    assert "It is a directory" in only(f"{group}.2")
    assert [line.split()[0] for line in run("ls", "--group", group).splitlines()[1:4]] == ["REFUSED"] * 3


def test_links_and_modes(group: str, put: Callable[..., str]) -> None:
    name = put(segment(), mode=0o666)
    assert "mode 0666 lets others write to it" in run("inspect", name)
    os.link(f"/dev/shm/loadbox.{name}", f"/dev/shm/loadbox.{group}.f.0")
    assert "It has 2 hard links" in run("inspect", name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_another_users_file_is_shown_as_far_as_it_can_be_seen(put: Callable[..., str], group: str, children: Any) -> None:
    name = put(segment())
    os.chown(f"/dev/shm/loadbox.{name}", 12345, 12345)
    found = told(name)
    assert (found["state"], found["file"]["uid"], found["header"]["owner_pid"]) == ("REFUSED", 12345, 4)
    assert any("It belongs to another user (uid 12345, gid 12345, mode 0600)" in words for words in found["odd"])
    code = """
        import os, sys
        from click.testing import CliRunner
        from loadbox.cli._app import app
        commands = (["inspect", sys.argv[1]], ["ls", "--json"])
        for command in commands:  # once as root: what others may not read is loaded now
            CliRunner().invoke(app, command)
        os.setgroups([])
        os.setgid(54321)
        os.setuid(54321)
        for command in commands:
            print(CliRunner().invoke(app, command).output, end="")
            print("====")
    """
    inspected, listed, _ = children.run(code, name).split("====\n")
    assert "It cannot be read: Permission denied. Run as its user (uid 12345" in inspected
    row = next(row for row in json.loads(listed) if row["group"] == group)
    assert (row["state"], row["uid"], row["mode"]) == ("REFUSED", 12345, "0600")
    assert "no permission" in row["reason"]


def test_foreign_names_are_shown_too(group: str) -> None:
    path = Path(f"/dev/shm/loadbox.{group}.other")
    path.write_bytes(b"x" * 200)
    assert "no segment of loadbox" in run("inspect", str(path))
    assert told(str(path))["state"] is None


@pytest.mark.parametrize("name", ["../etc/passwd", "/etc/passwd", "", ".", "..", "a/b", "/dev/shm/"])
def test_names_that_are_none(name: str) -> None:
    result = CliRunner().invoke(app, ["inspect", name])
    assert result.exit_code == 2
    assert "is no name in /dev/shm" in result.output


def test_nothing_there(group: str) -> None:
    result = CliRunner().invoke(app, ["inspect", f"{group}.0"])
    assert result.exit_code == 1
    assert result.output == f"Error: There is no /dev/shm/loadbox.{group}.0; loadbox ls lists what there is.\n"
    assert run("ls", "--group", group) == f"Nothing of group {group}: no scheduler and no frontend has made anything there.\n"
    assert f"no mailboxes on this host of group {group}: " in run("top", "--once", "--group", group)
    assert json.loads(run("ls", "--group", group, "--json")) == []


def test_ranks_are_listed_by_number(group: str, put: Callable[..., str]) -> None:
    for rank in (10, 9, 100, 2):
        put(segment(rank=rank), end=str(rank))
    listed = [row.split()[-1] for row in run("ls", "--group", group).splitlines()[1:]]
    assert listed == [f"/loadbox.{group}.{rank}" for rank in (2, 9, 10, 100)]


def test_no_line_ends_in_blanks(group: str, put: Callable[..., str]) -> None:
    for rank in ("0", "10"):
        put(segment(rank=int(rank)), end=rank)
    for command in (("ls", "--group", group), ("top", "--once", "--group", group)):
        assert [line for line in run(*command).splitlines() if line != line.rstrip()] == []


def test_ls(group: str, writer: Any, put: Callable[..., str]) -> None:
    writer(group, 0, 3, (1, 0, 1, 2))
    writer(group, 1, 3, (1, 0, 1, 2)).kill()
    put(segment(abi_major=2), end="2")
    assert [(row["rank"], row["state"]) for row in json.loads(run("ls", "--group", group, "--json"))] == [
        (0, "LIVE"), (1, "DEAD"), (2, "REFUSED"),
    ]  # fmt: skip
    first, *rest, why = run("ls", "--group", group).splitlines()
    assert why.startswith(f"/loadbox.{group}.2: refused to read /dev/shm/loadbox.{group}.2: its ABI is 2, this reader's is 1")
    assert first.split() == ["state", "kind", "size", "mode", "owner", "name"]
    assert [row.split()[0] for row in rest] == ["LIVE", "DEAD", "REFUSED"]
    assert rest[1].split()[1:4] == ["rank", "4096", "0600"]
    assert rest[1].split()[-1] == f"/loadbox.{group}.1"
