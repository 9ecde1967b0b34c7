"""Who may read, write, make, plant and remove.  Other users are real ones: child processes that root turns into them."""

from __future__ import annotations

import os
from typing import Any

import pytest

PRELUDE = """
import ast, ctypes, errno, fcntl, gc, os, signal, stat, struct, sys, time
import numpy
import loadbox.mailbox as box
from loadbox.engines import LoadPublisher
from loadbox.reader import LoadReader
from loadbox.reader._board import Board
GROUP = sys.argv[1]
STRANGER, FRIEND, TEAM = 61009, 61002, 61000
libc = ctypes.CDLL(None, use_errno=True)

def become(uid, gid=None, groups=()):
    os.setgroups(list(groups))
    os.setgid(uid if gid is None else gid)
    os.setuid(uid)
    assert libc.prctl(1, signal.SIGKILL) == 0

def as_user(uid, act, **rights):
    "What act() gives, in a child that is another user."
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            become(uid, **rights)
            said = act()
        except BaseException as error:
            said = type(error).__name__ + ": " + str(error)
        os.write(into, repr(said).encode())
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as file:
        said = file.read()
    os.waitpid(pid, 0)
    return ast.literal_eval(said)

def beside(uid, act, stop=False, **rights):
    "A process of another user's that does something and then stays."
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            become(uid, **rights)
            act()
            os.write(into, b"x")
        except BaseException as error:
            os.write(into, repr(error).encode())
        while True:
            os.kill(os.getpid(), signal.SIGSTOP) if stop else signal.pause()
    said = os.read(out, 4096)
    assert said == b"x", said
    return pid

def lock(fd, kind, start, length=1):
    fcntl.fcntl(fd, 37, struct.pack("@hhqqi0q", kind, os.SEEK_SET, start, length, 0))

def refused(act):
    "The errno with which the system refuses act()."
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"

def files():
    return sorted(name for name in os.listdir("/dev/shm") if name.startswith(f"loadbox.{GROUP}."))

def look(rank, **options):
    with box.MailboxReader(GROUP, rank, **options) as reader:
        state, load = reader.state(), reader.read()
        return state.name, load and tuple(load)
"""


@pytest.fixture
def run(group: str, children: Any, box: Any) -> Any:
    """Run code after the prelude, as root, to its end."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: only root can become several other users")
    return lambda code: children.run(PRELUDE + code, group, backend=box.backend)


def test_nothing_that_is_made_lets_others_write(group: str, children: Any) -> None:
    """Under any umask, whatever the mode asked for: rank's segments by their mode, boards for their user alone."""
    children.run(
        PRELUDE
        + """
for umask in (0, 0o022, 0o077, 0o777):
    os.umask(umask)
    kept = [box.MailboxWriter(GROUP, rank, mode=mode) for rank, mode in enumerate((0o600, 0o640, 0o604, 0o644))]
    kept += [LoadPublisher(GROUP, 8), LoadPublisher(GROUP, 9, mode=0o640), Board(GROUP, 4)]
    modes = [stat.S_IMODE(os.stat(f"/dev/shm/{name}").st_mode) for name in files()]
    assert sorted(modes) == sorted([0o600, 0o640, 0o604, 0o644, 0o600, 0o640, 0o600]), [oct(mode) for mode in modes]
    assert {os.stat(f"/dev/shm/{name}").st_uid for name in files()} == {os.geteuid()}
    for one in kept:
        one.close()
assert not files()
""",
        group,
    )


def test_one_without_rights_sees_and_does_nothing(run: Any) -> None:
    """The default: one user.  A stranger can neither read, write, lock, remove nor signal; it knows that the name is there."""
    run("""
writer = box.MailboxWriter(GROUP, 0, 4)
writer.publish(1, 2, 3, 4)
board = Board(GROUP, 4)
for name in files():
    path = f"/dev/shm/{name}"
    def try_all():
        return [refused(act) for act in (
            lambda: open(path, "rb"), lambda: open(path, "r+b"), lambda: os.truncate(path, 0), lambda: os.unlink(path),
            lambda: os.rename(path, path + "x"), lambda: os.chmod(path, 0o666), lambda: os.chown(path, STRANGER, STRANGER),
            lambda: os.utime(path), lambda: os.kill(os.getppid(), signal.SIGSTOP),
        )]
    assert set(as_user(STRANGER, try_all)) <= {"EACCES", "EPERM"}
assert as_user(STRANGER, lambda: look(0)) == ("REFUSED", None)
def reason():
    reader = box.MailboxReader(GROUP, 0)
    reader.state()
    return reader.reason
assert "no permission to read" in as_user(STRANGER, reason)
assert as_user(STRANGER, lambda: [tuple(load)[2] for load in LoadReader(GROUP, 4, board=False).loads()]) == ["none"] * 4
assert look(0) == ("LIVE", (1, 2, 3, 4))
""")


def test_a_group_by_mode(run: Any) -> None:
    """``mode=0o640``: the file's group reads, and believes; others do not, and nobody of either writes or removes."""
    run("""
def own():
    global kept
    kept = box.MailboxWriter(GROUP, 0, mode=0o640)
    kept.publish(1, 2, 3, 4)
beside(61001, own, gid=TEAM)
path = f"/dev/shm/loadbox.{GROUP}.0"
for rights in ({"gid": TEAM}, {"groups": (TEAM,)}):
    assert as_user(FRIEND, lambda: look(0), **rights) == ("LIVE", (1, 2, 3, 4))
    assert as_user(FRIEND, lambda: refused(lambda: open(path, "r+b")), **rights) == "EACCES"
    said = as_user(FRIEND, lambda: refused(lambda: os.unlink(path)), **rights)
    assert said in ("EPERM", "EACCES"), said
    said = as_user(FRIEND, lambda: box.MailboxWriter(GROUP, 0, start_wait=0), **rights)
    assert said.startswith("MailboxRefused"), said
assert as_user(STRANGER, lambda: look(0)) == ("REFUSED", None)
assert look(0) == ("REFUSED", None)  # root may read it, and has no reason to believe it
os.environ["LOADBOX_TRUST_UIDS"] = "61001"
assert look(0) == ("LIVE", (1, 2, 3, 4))
""")


def test_one_with_read_rights_cannot_slow_or_stop_a_running_writer(run: Any) -> None:
    """It maps, locks what it can, tries all else, and stands still.  The writer publishes on, closes, and another starts."""
    run("""
writer = box.MailboxWriter(GROUP, 0, 4, mode=0o644)
writer.publish(1, 2, 3, 4)
path = f"/dev/shm/loadbox.{GROUP}.0"
before = os.stat(path)

def hold():
    global kept
    fd = os.open(path, os.O_RDONLY)
    kept = [fd, box.MailboxReader(GROUP, 0), box.GroupReader(GROUP)]
    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    lock(fd, fcntl.F_RDLCK, 1, writer.epoch - 1)
    lock(fd, fcntl.F_RDLCK, writer.epoch + 1, 0)
    assert refused(lambda: lock(fd, fcntl.F_RDLCK, 0)) == "EAGAIN"  # the owner's
    assert refused(lambda: lock(fd, fcntl.F_WRLCK, 1)) == "EBADF"  # needs a descriptor for writing
    assert refused(lambda: fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)) in ("EACCES", "EAGAIN")
    for act in (
        lambda: os.ftruncate(fd, 0), lambda: os.write(fd, b"x"), lambda: os.posix_fallocate(fd, 0, 1 << 20),
        lambda: os.open(f"/proc/self/fd/{fd}", os.O_RDWR), lambda: os.unlink(path), lambda: os.chmod(path, 0o666),
        lambda: os.setxattr(path, "user.x", b"1"), lambda: os.kill(os.getppid(), signal.SIGSTOP),
    ):
        assert refused(act) != "done"

pid = beside(STRANGER, hold, stop=True)
for i in range(20000):
    writer.publish(i, 2, 3, 4)
assert look(0) == ("LIVE", (19999, 2, 3, 4))
after = os.stat(path)
assert (before.st_ino, before.st_mode, before.st_size, before.st_uid) == (after.st_ino, after.st_mode, after.st_size, after.st_uid)
writer.close()  # its locks are on a file that has no name any more
with box.MailboxWriter(GROUP, 0, start_wait=0) as again:
    again.publish(5, 6, 7, 8)
    assert look(0) == ("LIVE", (5, 6, 7, 8))
""")


def test_whatever_a_stranger_plants_makes_a_name_unavailable_and_no_load_untrue(run: Any) -> None:
    run("""
def plant():
    global kept
    os.umask(0)
    kept = [box.MailboxWriter(GROUP, rank, 4, mode=0o644) for rank in (0, 1)]
    for writer in kept:
        writer.publish(0, 0, 0, 9)  # "idle: take me"
    os.mkfifo(f"/dev/shm/loadbox.{GROUP}.2")
    os.symlink(f"/dev/shm/loadbox.{GROUP}.0", f"/dev/shm/loadbox.{GROUP}.3")
    os.mkdir(f"/dev/shm/loadbox.{GROUP}.4")
    open(f"/dev/shm/loadbox.{GROUP}.5", "wb").write(open(f"/dev/shm/loadbox.{GROUP}.0", "rb").read())
    os.symlink("/etc/passwd", f"/dev/shm/loadbox.{GROUP}.6")
    for rank in (0, 1):
        os.chmod(f"/dev/shm/loadbox.{GROUP}.{rank}", 0o666)
    board = Board(GROUP, 8)
    kept.append(board)
    for rank in range(8):
        board.words[rank] = 1000 if rank == 7 else 0  # "rank 7 is full"
    os.chmod("/dev/shm" + board.name, 0o666)

beside(STRANGER, plant)
planted = {name: os.lstat(f"/dev/shm/{name}").st_ino for name in files()}
with box.MailboxWriter(GROUP, 7, 8) as mine, LoadReader(GROUP, 8, seed=1) as view:
    mine.publish(1, 0, 1, 4)
    loads = view.loads()
    assert [load.snapshot and tuple(load.snapshot) for load in loads] == [None] * 7 + [(1, 0, 1, 4)], loads
    assert list(view._sources.view.in_flight) == [0] * 8
    assert box.GroupReader(GROUP, 8).read()["usable"].tolist() == [False] * 7 + [True]
    for rank in range(7):
        with LoadPublisher(GROUP, rank, start_wait=0) as publisher:
            publisher.publish(1, 2, 3, 4)  # the engine serves on
            assert (publisher.published, publisher.dropped) == (0, 1)
        assert box._segment.clean(f"/loadbox.{GROUP}.{rank}") is not None or os.geteuid() == 0
assert os.stat("/etc/passwd").st_size > 0
assert {name: ino for name, ino in planted.items() if ".f." not in name and name.rpartition(".")[2] not in "5"}.items() <= {
    name: os.lstat(f"/dev/shm/{name}").st_ino for name in files()}.items()
""")


def test_one_who_shares_the_writers_group_by_chance_is_believed_only_with_its_file_given_to_it(run: Any) -> None:
    """A file of another user in a group of the reader's, but not readable by that group, says nothing."""
    run("""
def plant(mode):
    def act():
        global kept
        kept = box.MailboxWriter(GROUP, 0, mode=mode)
        kept.publish(0, 0, 0, 9)
    return act
pid = beside(61001, plant(0o604), gid=TEAM)
assert as_user(FRIEND, lambda: look(0), gid=TEAM) == ("REFUSED", None)
""")
