"""Who owns a rank when several want it at once, or when the owner goes slowly, silently or not at all."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Takes and leaves the rank over and over.  While it owns it, it holds a witness that cannot be had twice, the name leads to the
# very inode that it has locked, and whatever a fresh reader sees there is its own.
STARTER = """
import os, random, sys
import loadbox.mailbox as box

group, witness, number, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
chance = random.Random(number)
owned = lost = 0
print("ready")
sys.stdin.readline()
while owned < rounds:
    try:
        writer = box.MailboxWriter(group, 0, start_wait=chance.choice((0, 0, 0.001)))
    except box.MailboxInUse:
        lost += 1
        continue
    os.close(os.open(witness, os.O_CREAT | os.O_EXCL))
    writer.publish(number, owned, 0, 9)
    locked = max(map(os.stat, (f"/proc/self/fd/{fd}" for fd in fds_of(writer))), key=lambda found: found.st_ino)
    named = os.stat("/dev/shm" + writer.name)
    assert (named.st_ino, named.st_nlink) == (locked.st_ino, 1), "the name leads elsewhere"
    with box.MailboxReader(group, 0, liveness_interval=0) as reader:
        for _ in range(chance.randrange(3)):
            assert (reader.read(), reader.epoch, reader.state().name) == ((number, owned, 0, 9), writer.epoch, "LIVE")
    os.unlink(witness)
    if chance.random() < 0.7:
        writer.close()
    else:
        writer._detach()  # as if it had died: its segment is there to be adopted or cleaned
    owned += 1
print(owned, lost)
"""
FDS = """
import os
def fds_of(writer):
    "The descriptors of this process that lead to the writer's segment."
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if path.partition(" ")[0] == "/dev/shm" + writer.name:
            found.append(int(fd))
    return found
"""
CLEANER = """
import sys
import loadbox.mailbox as box
name = f"/loadbox.{sys.argv[1]}.0"
removed = kept = 0
print("ready")
for line in sys.stdin:
    for _ in range(20):
        reason = box._segment.clean(name)
        removed += reason is None
        kept += reason is not None
    if line == "end\\n":
        break
    print("more")
print(removed, kept)
"""


def begin(children: Any, code: str, *arguments: object, backend: str) -> Any:
    child = children.start(FDS + code, *arguments, backend=backend)
    line = child.stdout.readline()
    assert line == "ready\n", (line, child.communicate()[1])
    return child


def tell(child: Any, line: str = "go") -> None:
    child.stdin.write(line + "\n")
    child.stdin.flush()


def ask(child: Any, line: str = "go") -> str:
    tell(child, line)
    answer = child.stdout.readline().strip()
    assert answer, child.communicate()[1]
    return str(answer)


def test_starters_closers_and_a_cleaner_at_one_name(box: Any, group: str, children: Any, tmp_path: Path) -> None:
    """Several hundred lives of one rank, with three who want it and one who clears up: never two owners."""
    rounds = 150
    other = "c" if box.backend == "py" and not os.environ.get("LOADBOX_TEST_WITHOUT_C") else box.backend
    starters = [
        begin(children, STARTER, group, tmp_path / "witness", number, rounds, backend=backend)
        for number, backend in enumerate((box.backend, other, box.backend), 1)
    ]
    cleaner = begin(children, CLEANER, group, backend=box.backend)
    for starter in starters:
        tell(starter)
    while any(starter.poll() is None for starter in starters):
        assert ask(cleaner) == "more"
    ends = [starter.communicate() for starter in starters]
    assert [starter.returncode for starter in starters] == [0, 0, 0], "\n".join(err for _, err in ends)
    counts = [tuple(map(int, out.split())) for out, _ in ends]
    assert [owned for owned, _ in counts] == [rounds] * 3
    assert sum(lost for _, lost in counts) > 0, "they never met"
    removed, kept = map(int, ask(cleaner, "end").split())
    assert removed > 0
    assert kept > 0
    assert not list(Path("/dev/shm").glob(f"loadbox.{group}.*"))


AT_ONCE = """
import sys, time
import loadbox.mailbox as box
print("ready")
for line in sys.stdin:
    at = int(line)
    while time.monotonic_ns() < at:
        pass
    began = time.monotonic()
    try:
        writer = box.MailboxWriter(sys.argv[1], 0, start_wait=0.01)
    except box.MailboxInUse as error:
        print("lost", time.monotonic() - began, error)
    else:
        print("won", writer.epoch)
        sys.stdin.readline()
        writer.close() if at % 2 else writer._detach()
        print("left")
"""


def test_two_start_at_the_same_instant(box: Any, group: str, children: Any) -> None:
    """One of them owns the rank, at once; the other one is told so, after the time that it was willing to wait and not before."""
    two = [begin(children, AT_ONCE, group, backend=box.backend) for _ in range(2)]
    won = []
    with box.MailboxReader(group, 0, liveness_interval=0) as reader:
        for _ in range(60):
            at = time.monotonic_ns() + 1_000_000
            for child in two:
                tell(child, str(at))
            answers = [child.stdout.readline().split() for child in two]
            assert sorted(answer[0] for answer in answers) == ["lost", "won"], answers
            winner = answers.index(next(answer for answer in answers if answer[0] == "won"))
            won.append(winner)
            assert float(answers[1 - winner][1]) >= 0.01
            assert "is owned by another living writer (pid " in " ".join(answers[1 - winner]), answers
            assert reader.state().name == "SILENT"
            assert reader.epoch == int(answers[winner][1])
            assert ask(two[winner]) == "left"
    assert len(won) == 60


def test_the_loser_is_told_whom_it_met(box: Any, group: str) -> None:
    with box.MailboxWriter(group, 0) as writer:
        writer.publish(1, 2, 3, 4)
        before = bytes(Path("/dev/shm" + writer.name).read_bytes())
        for wait in (0, 0.05):
            began = time.monotonic()
            with pytest.raises(box.MailboxInUse, match=rf"{writer.name} is owned by another living writer \(pid {os.getpid()}\)"):
                box.MailboxWriter(group, 0, start_wait=wait)
            assert time.monotonic() - began >= wait
        assert Path("/dev/shm" + writer.name).read_bytes() == before
        writer.publish(5, 6, 7, 8)
    with box.MailboxWriter(group, 0, start_wait=0):
        pass


def test_waiting_for_one_who_closes(box: Any, group: str) -> None:
    first = box.MailboxWriter(group, 0)
    closing = threading.Timer(0.1, first.close)
    closing.start()
    with box.MailboxWriter(group, 0, start_wait=60) as second:
        assert second.epoch != first.epoch
        assert os.path.exists("/dev/shm" + second.name)
    closing.join()


# ---- deaths ---------------------------------------------------------------------------------------------------------------

OWNER = """
import os, signal, sys, time
import loadbox.mailbox as box
writer = box.MailboxWriter(sys.argv[1], 0)
writer.publish(1, 2, 3, 4)
print("ready")
for line in sys.stdin:
    what, *load = line.split()
    if what == "publish":
        writer.publish(*map(int, load))
    elif what == "close":
        writer.close()
    elif what == "exit":
        sys.exit(0)
    elif what == "raise":
        raise RuntimeError("the engine's own")
    print("done")
"""

# Its lock goes on after its death: another process has the description too, as the kernel has while it takes a process apart.
SLOWLY_DYING = """
import fcntl, os, signal, subprocess, sys
import loadbox.mailbox as box
writer = box.MailboxWriter(sys.argv[1], 0)
writer.publish(1, 2, 3, 4)
copies = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds_of(writer)]
subprocess.Popen(["cat"], pass_fds=copies, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # until stdin ends
print("ready")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_restart_during_a_slow_death(box: Any, group: str, children: Any) -> None:
    child = begin(children, SLOWLY_DYING, group, backend=box.backend)
    child.wait()
    with box.MailboxReader(group, 0, liveness_interval=0) as reader:
        assert reader.state().name == "LIVE"
        with pytest.raises(box.MailboxInUse):
            box.MailboxWriter(group, 0, start_wait=0.02)
        assert "its owner is alive" in box._segment.clean(f"/loadbox.{group}.0")
        gone = threading.Timer(0.3, child.stdin.close)
        began = time.monotonic()
        gone.start()
        with box.MailboxWriter(group, 0, start_wait=60) as writer:
            assert time.monotonic() - began >= 0.3
            assert reader.state().name == "SILENT"
            writer.publish(5, 6, 7, 8)
            assert reader.read() == (5, 6, 7, 8)
        gone.join()


def end_by_signal(child: Any, number: int) -> int:
    child.send_signal(number)
    child.communicate()
    return -number


def end_by_itself(child: Any, what: str, code: int) -> int:
    child.communicate(what + "\n")
    return code


ENDS: dict[str, Callable[[Any], int]] = {
    "SIGTERM": lambda child: end_by_signal(child, signal.SIGTERM),
    "SIGKILL": lambda child: end_by_signal(child, signal.SIGKILL),
    "SIGINT": lambda child: end_by_signal(child, signal.SIGINT),
    "exit": lambda child: end_by_itself(child, "exit", 0),
    "exception": lambda child: end_by_itself(child, "raise", 1),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS.keys())
def test_an_end_without_close(box: Any, group: str, children: Any, end: Callable[[Any], int]) -> None:
    """What is left could be cleared away, and the next one starts at once."""
    child = begin(children, OWNER, group, backend=box.backend)
    code = end(child)
    assert child.returncode == code
    with box.MailboxReader(group, 0, liveness_interval=0) as reader:
        assert (reader.state().name, reader.read()) == ("DEAD", (1, 2, 3, 4))
        assert box._segment.clean(f"/loadbox.{group}.0", dry_run=True) is None
        with box.MailboxWriter(group, 0, start_wait=0) as writer:
            assert (reader.state().name, reader.epoch) == ("SILENT", writer.epoch)
    assert not list(Path("/dev/shm").glob(f"loadbox.{group}.*"))


# ---- clean ----------------------------------------------------------------------------------------------------------------


def test_clean_takes_leftovers_and_never_the_living(box: Any, group: str, children: Any) -> None:
    child = begin(children, OWNER, group, backend=box.backend)
    name = f"/loadbox.{group}.0"
    with box.MailboxReader(group, 0, liveness_interval=0) as reader:
        for dry_run in (True, False):
            assert box._segment.clean(name, dry_run=dry_run) == f"its owner is alive (pid {child.pid})"
        assert reader.state().name == "LIVE"
        child.kill()
        child.wait()
        assert box._segment.clean(name, dry_run=True) is None
        assert reader.state().name == "DEAD"
        assert box._segment.clean(name) is None
        assert reader.state().name == "ABSENT"
        assert box._segment.clean(name) == "it is gone already"


def test_a_name_that_could_not_be_removed_is_free(box: Any, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closing writer that may not unlink (it gave up the rights meanwhile, say) leaves a closed segment, owned by nobody."""

    def refuse(name: str, lock_fd: int) -> None:
        raise PermissionError(13, "Permission denied")

    writer = box.MailboxWriter(group, 0)
    with monkeypatch.context() as patch:
        patch.setattr(box._segment, "unlink_own", refuse)
        writer.close()
    with box.MailboxReader(group, 0) as reader:
        assert reader.state().name == "CLOSED"
        with box.MailboxWriter(group, 0, start_wait=0):
            assert reader.state().name == "SILENT"
    assert not os.path.exists("/dev/shm" + writer.name)


# ---- locks of others ------------------------------------------------------------------------------------------------------


# Another program, which knows nothing of loadbox.
HOLDER = """
import fcntl, os, struct, sys
path, what = sys.argv[1:]
fd = os.open(path, os.O_RDONLY)

def lock(start, length):
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("@hhqqi0q", fcntl.F_RDLCK, os.SEEK_SET, start, length, 0))

try:
    if what == "lockf":
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    else:
        lock(*map(int, what.split()))
except BlockingIOError:
    lock(1, 1 << 40)  # what the owner does not hold, anybody may
    print("blocked")
else:
    print("locked")
sys.stdin.readline()
"""
LOCKS = {"byte 0": "0 1", "the whole file": "0 0", "all but byte 0": "1 0", "lockf": "lockf"}


def hold(children: Any, path: Path, what: str, expected: str) -> Any:
    holder = children.start(HOLDER, path, what)
    line = holder.stdout.readline()
    assert line == expected + "\n", (line, holder.communicate()[1])
    return holder


@pytest.mark.parametrize("what", LOCKS.values(), ids=LOCKS.keys())
def test_a_shared_lock_delays_an_adoption_and_says_so(box: Any, group: str, children: Any, what: str) -> None:
    dead = box.MailboxWriter(group, 0)
    dead.publish(1, 2, 3, 4)
    dead._detach()
    path = Path("/dev/shm" + dead.name)
    before = path.read_bytes()
    holder = hold(children, path, what, "locked")
    with box.MailboxReader(group, 0, liveness_interval=0) as reader:
        assert (reader.state().name, reader.read()) == ("DEAD", (1, 2, 3, 4))  # a shared lock is no sign of life
        for wait in (0, 0.02):
            began = time.monotonic()
            with pytest.raises(box.MailboxRefused, match="another process holds a shared lock on it") as caught:
                box.MailboxWriter(group, 0, start_wait=wait)
            assert time.monotonic() - began >= wait or what == "1 0"
            assert str(path) in str(caught.value)
        assert path.read_bytes() == before
        assert reader.state().name == "DEAD"
        leaving = threading.Timer(0 if what == "1 0" else 0.05, holder.communicate)
        leaving.start()
        if what == "1 0":
            leaving.join()
        with box.MailboxWriter(group, 0, start_wait=60) as writer:
            writer.publish(5, 6, 7, 8)
            assert reader.read() == (5, 6, 7, 8)
        leaving.join()


@pytest.mark.parametrize("what", LOCKS.values(), ids=LOCKS.keys())
def test_a_running_writer_does_not_notice_locks(box: Any, group: str, children: Any, what: str) -> None:
    with box.MailboxReader(group, 0, liveness_interval=0) as reader:
        writer = box.MailboxWriter(group, 0)
        hold(children, Path("/dev/shm" + writer.name), what, "blocked")
        writer.publish(5, 6, 7, 8)
        assert (reader.read(), reader.state().name) == ((5, 6, 7, 8), "LIVE")
        writer.close()
        assert reader.state().name == "CLOSED"
        with box.MailboxWriter(group, 0, start_wait=0):
            assert reader.state().name == "SILENT"


# ---- back from the dead ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["close", "exit"])
def test_an_old_writer_that_was_replaced_while_it_stood_still(box: Any, group: str, children: Any, last: str) -> None:
    old = begin(children, OWNER, group, backend=box.backend)
    path = Path(f"/dev/shm/loadbox.{group}.0")
    with (
        box.MailboxReader(group, 0, liveness_interval=0) as early,
        box.GroupReader(group, liveness_interval=0) as ranks,
    ):
        assert early.read() == (1, 2, 3, 4)
        assert len(ranks.read()) == 1
        old.send_signal(signal.SIGSTOP)
        path.unlink()
        assert early.state().name == "ABSENT"
        with box.MailboxWriter(group, 0, start_wait=0) as new:
            inode = path.stat().st_ino
            assert early.state().name == "SILENT"
            new.publish(7, 7, 7, 7)
            old.send_signal(signal.SIGCONT)
            for number in range(3):
                assert ask(old, f"publish {number} 0 0 1") == "done"
                with box.MailboxReader(group, 0) as late:
                    assert late.read() == early.read() == (7, 7, 7, 7)
                    assert late.epoch == early.epoch == new.epoch
                assert ranks.read()["num_running"].tolist() == [7]
            if last == "close":
                assert ask(old, "close") == "done"
                with contextlib.suppress(BrokenPipeError):
                    old.communicate()
            else:
                old.communicate("exit\n")
            assert path.stat().st_ino == inode
            assert (early.state().name, early.read()) == ("LIVE", (7, 7, 7, 7))
            new.publish(8, 8, 8, 8)
            assert early.read() == (8, 8, 8, 8)
        assert not path.exists()


def test_a_removed_and_not_replaced_segment_is_nobodys(box: Any, group: str, children: Any) -> None:
    """The orphan's writer goes on without harm, and a reader does not show what it says there."""
    old = begin(children, OWNER, group, backend=box.backend)
    with box.MailboxReader(group, 0, liveness_interval=0) as reader:
        assert reader.state().name == "LIVE"
        Path(f"/dev/shm/loadbox.{group}.0").unlink()
        assert ask(old, "publish 5 6 7 8") == "done"
        assert (reader.state().name, reader.read()) == ("ABSENT", None)
        assert ask(old, "close") == "done"
