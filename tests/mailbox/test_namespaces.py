"""What the system may refuse, and who may be on the other side: full or missing /dev/shm, limits, other users, other namespaces.

Nothing is imitated.  Each case is made for real in a process of its own; where this machine forbids that, the test says so.
"""

from __future__ import annotations

import os
import time
from textwrap import dedent
from typing import Any

import pytest

# Without root, a user namespace gives the rights that the other ones need.
PRELUDE = """
import ast, ctypes, errno, os, resource, signal, sys, time
import loadbox.mailbox as box

NEWTIME, NEWNS, NEWUSER, NEWPID = 0x80, 0x20000, 0x10000000, 0x20000000
libc = ctypes.CDLL(None, use_errno=True)

def call(name, *arguments):
    if getattr(libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")

def unshare(flags):
    uid, gid = os.geteuid(), os.getegid()
    call("unshare", flags | (NEWUSER if uid else 0))
    if uid:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    if flags & NEWNS:
        call("mount", b"none", b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE: nothing of it gets out

def mount(where, options=""):
    call("mount", b"none", where.encode(), b"tmpfs", 0, options.encode())

def shm(options=""):
    "A /dev/shm of this process's own."
    unshare(NEWNS)
    mount("/dev/shm", options)

def enter(flags, offset=0):
    "Go on in a child within the new namespaces, which ends with this process."
    unshare(flags)
    if flags & NEWTIME:
        with open("/proc/self/timens_offsets", "w") as file:
            file.write(f"monotonic {offset} 0")
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    call("prctl", 1, signal.SIGKILL)  # PR_SET_PDEATHSIG

def as_user(uid, act, gid=None, groups=()):
    "What act() gives, or (type, text, errno) of what it raises, in a child that is another user."
    readable, writable = os.pipe()
    if not os.fork():
        try:
            become(uid, gid, groups)
            result = act()
        except Exception as error:
            result = type(error).__name__, str(error), getattr(error, "errno", None)
        os.write(writable, repr(result).encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as file:
        text = file.read()
    os.wait()
    return ast.literal_eval(text)

def become(uid, gid, groups):
    os.setgroups(list(groups))
    os.setgid(uid if gid is None else gid)
    os.setuid(uid)

def lives(uid, rank, load, gid=None, **options):
    "A writer that is another user and lives as long as this process."
    readable, writable = os.pipe()
    if not os.fork():
        become(uid, gid, ())
        call("prctl", 1, signal.SIGKILL)
        os.umask(0o077)
        writer = box.MailboxWriter(GROUP, rank, **options)
        writer.publish(*load)
        os.write(writable, b"ready")
        signal.pause()
    os.close(writable)
    assert os.read(readable, 5) == b"ready"

def look(rank, **options):
    "(state, load, reason) as a reader sees them."
    with box.MailboxReader(GROUP, rank, **options) as reader:
        state, load = reader.state(), reader.read()
        return state.name, load and tuple(load), reader.reason

def made(rank=0):
    with box.MailboxWriter(GROUP, rank, start_wait=1) as writer:
        writer.publish(1, 2, 3, 4)
    return "made"

def fails(number, saying, rank=0):
    "A writer fails with this errno and these words, and leaves nothing behind."
    before = names()
    try:
        box.MailboxWriter(GROUP, rank, start_wait=1)
    except box.MailboxError as error:
        assert (type(error), error.errno) == (box.MailboxError, number), repr(error)
        assert saying in str(error) and f"/loadbox.{GROUP}.{rank}" in str(error), error
    else:
        raise AssertionError("it was made")
    assert names() == before, names()

def names():
    "What there is of this group: others are at work here, too."
    try:
        return sorted(name for name in os.listdir("/dev/shm") if GROUP in name)
    except OSError as error:
        return errno.errorcode[error.errno]

GROUP = sys.argv[1]
"""

_permitted: dict[str, str] = {}


def need(children: Any, what: str, code: str) -> None:
    """Skip, and say loudly why, if this machine does not permit ``code``."""
    if what not in _permitted:
        trial = children.start(PRELUDE + code, "trial")
        _permitted[what] = trial.communicate()[1].strip().rpartition("\n")[2] if trial.wait() else ""
    if _permitted[what]:
        pytest.skip(f"NOT TESTED: this machine does not permit {what} ({_permitted[what]})")


@pytest.fixture
def mounts(children: Any) -> None:
    need(children, "a /dev/shm of one's own", "shm()")


@pytest.fixture
def times(children: Any) -> None:
    need(children, "a time namespace", "enter(NEWTIME, 1000)")


@pytest.fixture
def pids(children: Any) -> None:
    need(children, "a PID namespace", "enter(NEWPID)")


@pytest.fixture
def users() -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: only root can become several other users")


@pytest.fixture
def run(box: Any, group: str, children: Any) -> Any:
    """Run code after the prelude, with ``GROUP`` set, to its end."""
    return lambda code, *arguments: children.run(PRELUDE + dedent(code), group, *arguments, backend=box.backend)


@pytest.fixture
def start(box: Any, group: str, children: Any) -> Any:
    """Start code after the prelude and wait for its "ready"."""

    def begin(code: str, *arguments: object) -> Any:
        child = children.start(PRELUDE + dedent(code), group, *arguments, backend=box.backend)
        line = child.stdout.readline()
        assert line == "ready\n", (line, child.communicate()[1])
        return child

    return begin


def tell(child: Any, line: str) -> str:
    """Say a line to a child and give its answer."""
    child.stdin.write(line + "\n")
    child.stdin.flush()
    answer = child.stdout.readline().strip()
    assert answer, child.communicate()[1]
    return str(answer)


def until(what: Any) -> None:
    """Wait until something has come true; it must do so in the end, however slow the machine."""
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ---- /dev/shm -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("mounts")
def test_shared_memory_is_full(run: Any) -> None:
    run("""
        shm("size=32k")
        alive = box.MailboxWriter(GROUP, 0)
        dead = box.MailboxWriter(GROUP, 1)
        dead.publish(1, 1, 1, 1)
        dead._detach()
        with open("/dev/shm/filling", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC
        fails(errno.ENOSPC, "/dev/shm is full", 2)
        fails(errno.ENOSPC, "/dev/shm is full", 2)

        alive.publish(1, 2, 3, 4)  # its memory is its own since its creation
        assert look(0) == ("LIVE", (1, 2, 3, 4), None)
        assert made(1) == "made"  # a dead one's memory is there already, too

        with open("/dev/shm/filling", "ab", buffering=0) as file:  # take the place of what was closed
            file.write(bytes(4096))
        os.truncate(os.open(f"/dev/shm/loadbox.{GROUP}.3", os.O_CREAT | os.O_WRONLY, 0o600), 4096)
        state, load, reason = look(3)
        assert (state, load) == ("REFUSED", None) and "a hole without memory" in reason, reason
        os.unlink(f"/dev/shm/loadbox.{GROUP}.3")
        fails(errno.ENOSPC, "/dev/shm is full", 3)

        os.unlink("/dev/shm/filling")
        assert made(2) == "made"
    """)


@pytest.mark.usefixtures("mounts")
def test_a_half_made_segment_on_a_full_disk(run: Any) -> None:
    """There is no room to finish what a dead creator began: that is told, and what was begun is no good to anybody."""
    run("""
        shm("size=4k")
        with open("/dev/shm/filling", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 4096)
        open(f"/dev/shm/loadbox.{GROUP}.0", "x").close()
        try:
            box.MailboxWriter(GROUP, 0)
        except box.MailboxError as error:
            assert error.errno == errno.ENOSPC, error
        assert os.listdir("/dev/shm") == ["filling"]
        os.unlink("/dev/shm/filling")
        made()
    """)


@pytest.mark.usefixtures("mounts")
def test_no_inode_is_left(run: Any) -> None:
    run("""
        shm("nr_inodes=2")
        open("/dev/shm/last", "x").close()
        fails(errno.ENOSPC, "/dev/shm is full")
        os.unlink("/dev/shm/last")
        made()
    """)


@pytest.mark.usefixtures("mounts")
def test_there_is_no_shared_memory(run: Any) -> None:
    run("""
        unshare(NEWNS)
        import numpy
        reader, ranks, told = box.MailboxReader(GROUP, 0, liveness_interval=0), box.GroupReader(GROUP), box.GroupReader(GROUP, 2)
        mount("/dev")
        fails(errno.ENOENT, "there is no /dev/shm here")
        assert (reader.state().name, reader.read(), reader.reason) == ("ABSENT", None, None)
        assert len(ranks.read()) == 0 and told.read()["state"].tolist() == [0, 0]
        assert box.list_groups() == []
        os.mkdir("/dev/shm")
        with box.MailboxWriter(GROUP, 0) as writer:
            writer.publish(1, 2, 3, 4)
            assert reader.read() == (1, 2, 3, 4)
    """)


@pytest.mark.usefixtures("mounts")
def test_shared_memory_is_read_only(run: Any) -> None:
    run("""
        shm()
        writer = box.MailboxWriter(GROUP, 1)
        writer.publish(1, 2, 3, 4)
        writer._detach()
        call("mount", b"none", b"/dev/shm", None, 0x21, None)  # MS_REMOUNT | MS_RDONLY
        fails(errno.EROFS, "/dev/shm is mounted read-only", 0)
        fails(errno.EROFS, "/dev/shm is mounted read-only", 1)
        assert look(0) == ("ABSENT", None, None)
        assert look(1, liveness_interval=0) == ("DEAD", (1, 2, 3, 4), None)
        assert box._segment.clean(f"/loadbox.{GROUP}.1") == "it cannot be opened: Read-only file system"
    """)


@pytest.mark.usefixtures("mounts", "users")
def test_shared_memory_is_not_for_this_user(run: Any) -> None:
    run("""
        shm("mode=755")
        assert as_user(65534, lambda: fails(errno.EACCES, "no permission: is /dev/shm writable")) is None
        made()
        os.chmod("/dev/shm", 0o1700)
        with box.MailboxWriter(GROUP, 0, mode=0o644):
            state, load, reason = as_user(65534, lambda: look(0))
            assert (state, load) == ("REFUSED", None) and reason, reason
            assert as_user(65534, box.list_groups) == []
        assert as_user(65534, lambda: fails(errno.EACCES, "no permission")) is None
    """)


@pytest.mark.usefixtures("mounts")
def test_a_container_with_shared_memory_of_its_own(box: Any, group: str, start: Any) -> None:
    """Neither side sees the other, and nothing is in the way of either."""
    inside = start("""
        shm()
        with box.MailboxWriter(GROUP, 0) as writer:
            writer.publish(1, 2, 3, 4)
            print("ready")
            for line in sys.stdin:
                print(look(int(line)), box.list_groups() == [GROUP])
    """)
    with box.MailboxReader(group, 0, liveness_interval=0) as reader, box.GroupReader(group) as ranks:
        assert (reader.state().name, reader.read(), len(ranks.read())) == ("ABSENT", None, 0)
        assert group not in box.list_groups()
        with box.MailboxWriter(group, 0, start_wait=0) as one, box.MailboxWriter(group, 1, start_wait=0):
            one.publish(5, 6, 7, 8)
            assert reader.read() == (5, 6, 7, 8)
            assert tell(inside, "0") == "('LIVE', (1, 2, 3, 4), None) True"
            assert tell(inside, "1") == "('ABSENT', None, None) True"


# ---- limits of the process ------------------------------------------------------------------------------------------------

LIMITED = """
class left:
    "Leave this process so many descriptors and no more."
    def __init__(self, count):
        self.count = count

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, self.before[1]))
        self.taken = []
        try:
            while True:
                self.taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError as error:
            assert error.errno == errno.EMFILE
        for _ in range(self.count):
            os.close(self.taken.pop())

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_NOFILE, self.before)
        for fd in self.taken:
            os.close(fd)
"""


def test_a_writer_without_descriptors(run: Any) -> None:
    out = run(
        LIMITED
        + """
for count in range(8):
    open_before = len(os.listdir("/proc/self/fd"))
    files = names()
    try:
        with left(count):
            fails(errno.EMFILE, "too many open files: raise its limit (ulimit -n)")
        assert names() == files, names()
        print("failed")
    except AssertionError as error:
        assert str(error) == "it was made", error
        print("made")
    made(), made()
    import gc
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == open_before
"""
    ).split()
    assert out == sorted(out)
    assert 2 <= out.count("failed") < 8


def test_a_reader_without_descriptors(run: Any) -> None:
    out = run(
        LIMITED
        + """
import numpy
with box.MailboxWriter(GROUP, 0) as one, box.MailboxWriter(GROUP, 1) as other, box.GroupReader(GROUP, 1) as attached:
    one.publish(1, 0, 0, 1)
    other.publish(2, 0, 0, 1)
    attached.read()
    for count in range(8):
        with (
            box.MailboxReader(GROUP, 0, liveness_interval=0) as reader,
            box.GroupReader(GROUP, 2, liveness_interval=0) as ranks,
            box.GroupReader(GROUP, liveness_interval=0) as finding,
        ):
            with left(count):
                rows = ranks.read()
                seen = []
                for rank in range(2):
                    seen.append(box.RankState(rows["state"][rank]).name)
                    assert rows["usable"][rank] == (seen[-1] == "LIVE")
                    if seen[-1] != "LIVE":
                        assert "Too many open files" in ranks.reason(rank), ranks.reason(rank)
                state = reader.state().name
                assert state == "LIVE" or (state, reader.read()) == ("REFUSED", None) and "Too many open files" in reader.reason
                assert finding.read()["usable"].tolist() in ([], [False, False], [True, False], [True, True])
                assert attached.read()["usable"].tolist() == [True]
                one.publish(1, 1, 1, 1)
            print(*sorted(set(seen)))
            assert ranks.read()["usable"].tolist() == finding.read()["usable"].tolist() == [True, True]
            assert reader.state().name == "LIVE" and reader.reason is None and ranks.reason(0) is None
"""
    ).split("\n")
    assert out[0] == "REFUSED"
    assert "LIVE" in out


def test_no_address_space_is_left(run: Any) -> None:
    run("""
        with box.MailboxWriter(GROUP, 0) as writer, box.MailboxReader(GROUP, 0) as reader:
            writer.publish(1, 2, 3, 4)
            assert look(0)[0] == "LIVE"
            try:
                box.MailboxWriter(GROUP, 0, start_wait=0)
            except box.MailboxInUse:
                pass  # all that is needed below has been loaded now
            before = resource.getrlimit(resource.RLIMIT_AS)
            with open("/proc/self/statm") as file:
                size = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size, before[1]))
            try:
                box.MailboxWriter(GROUP, 1, start_wait=1)
            except box.MailboxError as error:
                refused = error
            else:
                refused = None
            try:
                state, load = reader.state().name, reader.read()
                reason = reader.reason
                writer.publish(5, 6, 7, 8)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, before)
            # Looked at only now, since even listing a directory takes memory.
            assert (type(refused), refused.errno) == (box.MailboxError, errno.ENOMEM), repr(refused)
            assert "no memory left for it" in str(refused), refused
            assert names() == [f"loadbox.{GROUP}.0"], names()
            assert (state, load) == ("REFUSED", None) and "it cannot be mapped: Cannot allocate memory" in reason, (state, reason)
            time.sleep(0.1)
            assert (reader.state().name, reader.read(), reader.reason) == ("LIVE", (5, 6, 7, 8), None)
            assert made(1) == "made"
    """)


def test_no_file_may_be_that_long(run: Any) -> None:
    run("""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
        fails(errno.EFBIG, "File too large")
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        made()
    """)


def test_closed_standard_streams_never_lead_to_a_segment(run: Any, box: Any, group: str) -> None:
    """A program that closed its stdin, stdout or stderr and uses them nevertheless must not write into a mailbox."""
    with box.MailboxWriter(group, 9) as writer:
        writer.publish(1, 2, 3, 4)
        run("""
            import numpy
            for closed in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)):
                child = os.fork()
                if not child:
                    saved = os.dup(2)
                    for fd in closed:
                        os.close(fd)
                    writer = box.MailboxWriter(GROUP, 0)
                    reader, ranks = box.MailboxReader(GROUP, 9), box.GroupReader(GROUP)
                    ranks.read()
                    writer.publish(1, 1, 1, 1)
                    right = reader.read() == (1, 2, 3, 4) and ranks.read()["usable"].sum() == 2
                    mappings = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2]
                    right = right and sum(GROUP in path for path in mappings) >= 4
                    for fd in closed:
                        try:
                            path = os.readlink(f"/proc/self/fd/{fd}")
                            os.write(saved, f"descriptor {fd} is {path}".encode())
                            right = False
                        except FileNotFoundError:
                            pass
                    writer.close()
                    os._exit(0 if right else 1)
                assert os.waitpid(child, 0)[1] == 0, closed
        """)


# ---- other users ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("users")
def test_another_users_reader(run: Any) -> None:
    run("""
        import numpy
        os.umask(0o077)
        lives(61001, 0, (1, 2, 3, 4))
        lives(61001, 1, (1, 2, 3, 4), gid=61000, mode=0o640)
        lives(61001, 2, (1, 2, 3, 4), mode=0o644)
        lives(61001, 3, (1, 2, 3, 4), gid=61000, mode=0o604)
        mine = [os.stat(f"/dev/shm/loadbox.{GROUP}.{rank}") for rank in range(4)]
        assert [found.st_mode & 0o777 for found in mine] == [0o600, 0o640, 0o644, 0o604]
        assert [found.st_gid for found in mine] == [61001, 61000, 61001, 61000]

        def seen():
            with box.GroupReader(GROUP, 4) as ranks:
                rows = ranks.read()
                reasons = [ranks.reason(rank) for rank in range(4)]
            single = [look(rank) for rank in range(4)]
            assert [box.RankState(state).name for state in rows["state"]] == [state for state, _, _ in single]
            assert reasons == [reason for _, _, reason in single]
            assert all(load == ((1, 2, 3, 4) if state == "LIVE" else None) for state, load, _ in single)
            assert all(bool(reason) == (state == "REFUSED") for state, _, reason in single)
            return single

        def states(uid, **options):
            return "".join(state[0] for state, _, _ in as_user(uid, seen, **options))

        live = ("LIVE", (1, 2, 3, 4), None)
        assert as_user(61001, seen) == [live] * 4
        stranger = as_user(65534, seen)
        for rank, words in enumerate(["no permission to read"] * 2 + ["it belongs to another user"] * 2):
            state, load, reason = stranger[rank]
            assert (state, load) == ("REFUSED", None), stranger
            assert words in reason and f"/dev/shm/loadbox.{GROUP}.{rank}" in reason and "uid 61001, gid 6100" in reason, reason
        assert states(61002, gid=61000) == states(61002, groups=[5, 61000]) == "RLRR"
        assert states(0) == "RRRR"  # root may read all, and believes no more for it
        assert states(0, groups=[61000]) == "RLRR"  # what was not given to the group, though it is the file's
        for trusted, expected in (("61001", "RRLL"), ("7, 61001 ,8", "RRLL"), ("6100", "RRRR"), ("", "RRRR"), ("x,,-1", "RRRR")):
            os.environ["LOADBOX_TRUST_UIDS"] = trusted
            assert states(65534) == expected, trusted
        os.environ["LOADBOX_TRUST_UIDS"] = "61001"
        assert "".join(state[0] for state, _, _ in seen()) == "LLLL"
    """)


@pytest.mark.usefixtures("users")
def test_roots_writer_is_believed_by_all_who_may_read_it(run: Any) -> None:
    run("""
        with box.MailboxWriter(GROUP, 0, mode=0o644) as writer, box.MailboxWriter(GROUP, 1):
            writer.publish(1, 2, 3, 4)
            assert as_user(65534, lambda: look(0)) == ("LIVE", (1, 2, 3, 4), None)
            assert as_user(65534, lambda: look(1))[0] == "REFUSED"
    """)


@pytest.mark.usefixtures("users")
def test_a_stranger_can_take_a_name_and_not_make_a_load_untrue(run: Any) -> None:
    run("""
        import numpy
        def discovered():
            with box.GroupReader(GROUP) as ranks:
                return ranks.read()["state"].tolist()

        with box.MailboxWriter(GROUP, 0) as writer, box.GroupReader(GROUP, liveness_interval=0) as ranks:
            writer.publish(1, 2, 3, 4)
            assert len(ranks.read()) == 1
            lives(65534, 1, (0, 0, 0, 9), dp_size=900, mode=0o644)
            lives(65534, 700, (0, 0, 0, 9), mode=0o644)
            for rank in (300, 65535):
                open(f"/dev/shm/loadbox.{GROUP}.{rank}", "x").close()
                os.chown(f"/dev/shm/loadbox.{GROUP}.{rank}", 65534, 65534)
            for _ in range(3):
                assert ranks.read()["state"].tolist() == [2]
            assert as_user(65534, discovered) != [2]  # whoever trusts them would find them

            with box.GroupReader(GROUP, 2) as told:
                assert told.read()["state"].tolist() == [2, 6]
                assert told.read()["num_running"].tolist() == [1, 0]
                assert "it belongs to another user (uid 65534, gid 65534, mode 0644)" in told.reason(1)
            assert look(1)[:2] == ("REFUSED", None)

            path = f"/dev/shm/loadbox.{GROUP}.1"
            before = os.stat(path), open(path, "rb").read()
            for rank in (1, 300):
                try:
                    box.MailboxWriter(GROUP, rank, start_wait=0)
                except box.MailboxRefused as error:
                    assert "it belongs to another user (uid 65534" in str(error), error
                else:
                    raise AssertionError("taken from its owner")
            after = os.stat(path), open(path, "rb").read()
            assert before[1] == after[1] and before[0].st_mtime_ns == after[0].st_mtime_ns and before[0].st_mode == after[0].st_mode
            assert "its owner is alive" in box._segment.clean(f"/loadbox.{GROUP}.1")
    """)


@pytest.mark.usefixtures("users")
def test_a_stranger_cannot_adopt_or_remove(run: Any) -> None:
    run("""
        for mode in (0o600, 0o644):
            writer = box.MailboxWriter(GROUP, 0, mode=mode)
            writer.publish(1, 2, 3, 4)
            for alive in (True, False):
                if not alive:
                    writer._detach()
                path = f"/dev/shm/loadbox.{GROUP}.0"
                before = os.stat(path), open(path, "rb").read()
                kind, text, _ = as_user(65534, made)
                assert kind == "MailboxRefused" and "it belongs to another user (uid 0" in text, text
                assert as_user(65534, lambda: box._segment.clean(f"/loadbox.{GROUP}.0")) == "it cannot be opened: Permission denied"
                if os.stat("/dev/shm").st_mode & 0o1000:
                    assert as_user(65534, lambda: os.unlink(path))[0] == "PermissionError"
                after = os.stat(path), open(path, "rb").read()
                assert before == after or before[1] == after[1] and before[0].st_ino == after[0].st_ino
                assert look(0, liveness_interval=0) == ("LIVE" if alive else "DEAD", (1, 2, 3, 4), None)
            assert made() == "made"

        # A file that its group may write to: openable, and still nobody else's to use or to remove.
        open(path, "x").close()
        os.chown(path, 61001, 61000)
        os.chmod(path, 0o660)
        kind, text, _ = as_user(61002, made, gid=61000)
        assert kind == "MailboxRefused" and "it belongs to another user (uid 61001" in text, text
        reason = as_user(61002, lambda: box._segment.clean(f"/loadbox.{GROUP}.0"), gid=61000)
        assert reason == "it belongs to another user (uid 61001, gid 61000, mode 0660)", reason
    """)


@pytest.mark.usefixtures("users")
def test_a_file_of_ones_own_that_one_may_not_open(run: Any) -> None:
    """Not even the strictest umask makes one; another program might."""
    run("""
        def strict():
            os.umask(0o777)
            return made()

        assert as_user(65534, strict) == "made"
        path = f"/dev/shm/loadbox.{GROUP}.0"
        open(path, "x").close()
        os.chown(path, 65534, 65534)
        os.chmod(path, 0o400)
        kind, text, _ = as_user(65534, made)
        assert kind == "MailboxRefused" and "its own user may not open it" in text, text
    """)


# ---- another clock, other pids --------------------------------------------------------------------------------------------

WRITER = """
if len(sys.argv) > 2:
    enter(int(sys.argv[2]), int(sys.argv[3]))
with box.MailboxWriter(GROUP, 0) as writer:
    writer.publish(1, 0, 0, 9)
    print("ready")
    for line in sys.stdin:
        writer.publish(*map(int, line.split()))
        print("published")
"""
NEWTIME, NEWPID = 0x80, 0x20000000


@pytest.mark.usefixtures("times")
@pytest.mark.parametrize("offset", [1_000_000, -1])
def test_a_writer_whose_clock_is_another_one(box: Any, group: str, start: Any, offset: int) -> None:
    """Its age is None at first sight and an upper bound from then on: never negative, and never fresh for ever."""
    writer = start(WRITER, NEWTIME, offset)
    with (
        box.MailboxReader(group, 0, stall_after=1e6) as reader,
        box.MailboxReader(group, 0, stall_after=0.1) as watch,
        box.GroupReader(group, stall_after=0.1) as ranks,
    ):
        assert (reader.state().name, reader.read(), reader.age()) == ("LIVE", (1, 0, 0, 9), None)
        assert (watch.state().name, watch.age()) == ("LIVE", None)
        assert ranks.read()["state"].tolist() == [2]
        until(lambda: watch.state().name == "STALLED")  # by the reader's own watch
        until(lambda: ranks.read()["state"].tolist() == [3])
        assert (watch.age(), reader.age(), reader.state().name) == (None, None, "LIVE")

        for load in ((2, 0, 0, 9), (0, 3, 0, 9)):
            before = time.monotonic()
            reader.read()
            time.sleep(0.05)  # unseen by the reader: it may have been any moment of this
            assert tell(writer, " ".join(map(str, load))) == "published"
            published = time.monotonic()
            time.sleep(0.05)
            asked = time.monotonic()
            age = reader.age()
            answered = time.monotonic()
            assert reader.read() == load
            assert asked - published <= age <= answered - before + 0.05  # read()'s clock is a coarse one
            assert age < reader.age()
            assert reader.state().name == "LIVE"
            until(lambda: watch.state().name == "STALLED")
            assert watch.age() > 0.1
            until(lambda: ranks.read()["state"].tolist() == [3])

        tell(writer, "0 0 0 9")
        time.sleep(0.15)
        assert (watch.state().name, ranks.read()["state"].tolist()) == ("LIVE", [2])  # idle is idle by any clock


@pytest.mark.usefixtures("times")
def test_a_reader_whose_clock_is_another_one(box: Any, group: str, start: Any) -> None:
    reader = start("""
        enter(NEWTIME, 1000000)
        with box.MailboxReader(GROUP, 0, stall_after=1000) as reader:
            print("ready")
            for line in sys.stdin:
                age = reader.age()
                print(reader.state().name, *(reader.read() or ()), age if age is None else "0..1000" if 0 <= age < 1000 else age)
    """)
    with box.MailboxWriter(group, 0) as writer:
        writer.publish(1, 0, 0, 9)
        assert tell(reader, "look") == "LIVE 1 0 0 9 None"
        writer.publish(2, 0, 0, 9)
        assert tell(reader, "look") == "LIVE 2 0 0 9 0..1000"


@pytest.mark.usefixtures("pids")
def test_a_writer_with_other_pids(box: Any, group: str, start: Any) -> None:
    """It is process 1 of its own world, and here process 1 goes on living after its death."""
    writer = start(WRITER, NEWPID, 0)
    with box.MailboxReader(group, 0, liveness_interval=0) as reader, box.GroupReader(group, liveness_interval=0) as ranks:
        assert (reader.state().name, reader.read()) == ("LIVE", (1, 0, 0, 9))
        assert ranks.read()["state"].tolist() == [2]
        with pytest.raises(box.MailboxInUse, match=r"owned by another living writer \(pid 1\)"):
            box.MailboxWriter(group, 0, start_wait=0)
        assert "its owner is alive (pid 1)" in box._segment.clean(f"/loadbox.{group}.0")
        writer.kill()
        until(lambda: reader.state().name == "DEAD")
        assert reader.read() == (1, 0, 0, 9)
        assert ranks.read()["state"].tolist() == [4]
        with box.MailboxWriter(group, 0) as next_one:
            next_one.publish(2, 0, 0, 9)
            assert reader.state().name == "LIVE"


@pytest.mark.usefixtures("pids")
def test_a_reader_with_other_pids(box: Any, group: str, start: Any, children: Any) -> None:
    reader = start("""
        enter(NEWPID)
        with box.MailboxReader(GROUP, 0, liveness_interval=0) as reader:
            print("ready")
            for line in sys.stdin:
                print(reader.state().name, *(reader.read() or ()))
    """)
    assert tell(reader, "look") == "ABSENT"
    writer = start(WRITER)
    assert tell(reader, "look") == "LIVE 1 0 0 9"
    writer.kill()
    writer.wait()
    assert tell(reader, "look") == "DEAD 1 0 0 9"


@pytest.mark.usefixtures("mounts")
def test_a_quiet_directory_is_not_searched(run: Any) -> None:
    """What is read again and again asks for no name, neither of those that are there nor of those that are not; and misses none."""
    run("""
        shm()
        module, attach = box._group, box._attach
        asked, listed = [], []
        find, list_ranks = attach.find, module.list_ranks
        attach.find = lambda name, rank: (asked.append(rank), find(name, rank))[1]
        module.list_ranks = lambda group: (listed.append(group), list_ranks(group))[1]
        writer = box.MailboxWriter(GROUP, 0, 8)
        writer.publish(1, 0, 0, 1)
        told, finds = box.GroupReader(GROUP, 8, liveness_interval=0.2), box.GroupReader(GROUP, liveness_interval=0.2)

        def look():
            time.sleep(0.21)
            writer.publish(1, 0, 0, 1)
            return told.read()["state"].tolist(), finds.read()["state"].tolist()

        for turn in range(60):  # a machine that sleeps for the whole time of a full check may do one
            before = len(asked), len(listed)
            assert look() == look() == ([2] + [0] * 7,) * 2
            if turn > 1 and (len(asked), len(listed)) == before:
                break
        else:
            raise AssertionError(f"always searched: {len(asked)}, {len(listed)}")
        with box.MailboxWriter(GROUP, 3, 8) as another, box.MailboxWriter(GROUP, 9, 10) as beyond:
            another.publish(2, 0, 0, 1)
            beyond.publish(2, 0, 0, 1)
            assert look() == ([2, 0, 0, 2, 0, 0, 0, 0], [2, 0, 0, 2, 0, 0, 0, 0, 0, 2])
        assert look() == ([2, 0, 0, 5, 0, 0, 0, 0], [2, 0, 0, 5, 0, 0, 0, 0, 0, 5])
        writer._detach()
        assert told.read()["state"][0] in (2, 4)
        time.sleep(0.21)
        assert told.read()["state"][0] == 4
        os.rename(f"/dev/shm/loadbox.{GROUP}.0", f"/dev/shm/loadbox.{GROUP}.kept")
        with box.MailboxWriter(GROUP, 0, 8) as writer:
            writer.publish(4, 0, 0, 1)
            time.sleep(0.21)
            assert told.read()["num_running"][0] == 4
    """)
