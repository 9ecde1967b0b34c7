"""Whatever goes wrong, an iteration of the publishing side neither raises nor waits.

That it does not wait is shown by structure and not by a clock: while it publishes, the kernel kills the scheduler for any system
call but those that give memory, tell the time, or let it report.  What makes no system call waits for nobody.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import warnings
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # `make test-more` runs them

SETUP = """
import ctypes, errno, fcntl, gc, json, logging, os, platform, resource, signal, struct, sys, threading, time
import loadbox.mailbox as box
from loadbox.engines import LoadPublisher, _publisher
_publisher._LOOK_S = 3600.0  # its thread wants the interpreter for some microseconds then, which is the one wait that there is
GROUP, RANK = sys.argv[1], 0
PATH = f"/dev/shm/loadbox.{GROUP}.0"
MACHINE = platform.machine()
libc = ctypes.CDLL(None, use_errno=True)
logging.basicConfig(level=logging.ERROR)

def call(name, *arguments):
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)

# write, exit_group, clock_gettime, rt_sigreturn, mmap, munmap, mremap, brk, madvise
CALLS = {"x86_64": [1, 231, 228, 15, 9, 11, 25, 12, 28], "aarch64": [64, 94, 113, 139, 222, 215, 216, 214, 233]}
FUTEX = {"x86_64": 202, "aarch64": 98}

def forbid(*more):
    "From now on this thread is killed for any other system call."
    allowed = CALLS[MACHINE] + list(more)
    code = [(0x20, 0, 0, 0)]  # the call's number
    code += [(0x15, len(allowed) - i, 0, number) for i, number in enumerate(allowed)]
    code += [(0x06, 0, 0, 0x80000000), (0x06, 0, 0, 0x7FFF0000)]  # kill the process; allow
    packed = b"".join(struct.pack("HBBI", *line) for line in code)
    buffer = ctypes.create_string_buffer(packed)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(buffer)))
    call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    call("prctl", 22, 2, program)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    return buffer, program

def iterate(publisher, count=20000, *more, load=lambda i: (i, 2, 3, 4)):
    "So many iterations, with nothing allowed that could wait."
    publisher.publish(*load(1))
    gc.collect()
    gc.disable()
    keep = forbid(*more)
    for i in range(count):
        publisher.publish(*load(i))
    os.write(1, f"{publisher.published} {publisher.dropped}\\n".encode())
    os._exit(0)

def lock(fd, kind, start, length):
    fcntl.fcntl(fd, 37, struct.pack("@hhqqi0q", kind, os.SEEK_SET, start, length, 0))

def beside(act):
    "A process that does something, says so, and then stands still."
    out, into = os.pipe()
    pid = os.fork()
    if not pid:
        call("prctl", 1, signal.SIGKILL)
        act()
        os.write(into, b"x")
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    assert os.read(out, 1) == b"x"
    os.waitpid(pid, os.WUNTRACED)
    return pid

def shm(options=""):
    call("unshare", 0x20000)
    call("mount", b"none", b"/", None, 0x44000, None)
    call("mount", b"none", b"/dev/shm", b"tmpfs", 0, options.encode())

def each(cases, more):
    "Make each case in a process of its own, under a rank of its own; how each ended, and what it said."
    global RANK, PATH
    for RANK, (what, code) in enumerate(cases.items()):
        PATH = f"/dev/shm/loadbox.{GROUP}.{RANK}"
        out, into = os.pipe()
        pid = os.fork()
        if not pid:
            os.dup2(into, 1)
            exec(code + more, globals())
            os._exit(9)
        os.close(into)
        with os.fdopen(out) as file:
            said = file.read().split()  # also a case's own children have its end: they die with it
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps([what, ended, *map(int, said)]), flush=True)

def fill():
    with open("/dev/shm/filling", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
"""

# What is wrong; all publishes arrive where it can be known.
PUBLISHED = {
    "nothing": "",
    "a reader stands still with all open, mapped and locked": """
def hold():
    global kept
    kept = [box.MailboxReader(GROUP, RANK), box.GroupReader(GROUP), open(PATH, "rb")]
    kept[0].read(), kept[1].read()
    fcntl.flock(kept[2], fcntl.LOCK_SH)
    for start, length in ((1, publisher.writer.epoch - 1), (publisher.writer.epoch + 1, 0)):
        lock(kept[2].fileno(), fcntl.F_RDLCK, start, length)
beside(hold)
""",
    "readers were killed": """
for _ in range(5):
    pid = beside(lambda: box.MailboxReader(GROUP, RANK).read())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
""",
    "a rival waits for the rank": """
def want():
    try:
        box.MailboxWriter(GROUP, RANK, start_wait=0)
    except box.MailboxInUse:
        pass
beside(want)
""",
    "its segment was removed": "os.unlink(PATH)",
    "its segment was renamed": "os.rename(PATH, PATH + '.elsewhere')",
    "its segment was linked": "os.link(PATH, PATH + '.twice')",
    "its segment was replaced by a FIFO": "os.unlink(PATH); os.mkfifo(PATH)",
    "its segment was replaced by another writer's": """
os.unlink(PATH)
beside(lambda: box.MailboxWriter(GROUP, RANK, start_wait=0).publish(1, 1, 1, 1))
""",
    "its segment may not be opened any more": "os.chmod(PATH, 0)",
    "no descriptor is left": """
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
""",
    "its descriptors were closed by others": "os.closerange(3, 4096)",
    "descriptors 0 and 2 are closed": "os.close(0); os.close(2)",
    "no file may be written any more": "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
    "a forked child lives on": "beside(lambda: None)",
    "/dev/shm is full": "fill()",
    "/dev/shm was taken away": 'call("umount2", b"/dev/shm", 2)',
}
MOUNTS = {"/dev/shm is full", "/dev/shm was taken away"}

# What is wrong, and there is no mailbox: every publish is dropped and counted.
DROPPED = {
    "another writer has the rank": "other = box.MailboxWriter(GROUP, RANK)",
    "a FIFO has the name": "os.mkfifo(PATH)",
    "a directory has the name": "os.mkdir(PATH)",
    "no descriptor is left": "taken = [os.dup(0) for _ in range(3)]; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))",
    "/dev/shm is full": 'shm("size=32k"); fill()',
    "/dev/shm is read-only": 'shm(); call("mount", b"none", b"/dev/shm", None, 0x21, None)',
    "there is no /dev/shm": 'shm(); call("mount", b"none", b"/dev", b"tmpfs", 0, b"")',
    "the machine has no safe mailbox": """
import loadbox.mailbox._seqlock as seqlock
seqlock.BACKEND = "py"
seqlock.platform.machine = lambda: "riscv64"
""",
    "the group cannot be a name": "GROUP = 'not/a/name'",
}


def child(children: Any, box: Any, group: str, code: str) -> Any:
    process = children.start(SETUP + code, group, backend=box.backend)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.fixture
def seccomp(children: Any) -> None:
    if platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip(f"NOT TESTED: no table of system calls for {platform.machine()}")
    trial = children.start(SETUP + "keep = forbid()\nos._exit(0)", "trial")
    _, err = trial.communicate(timeout=60)
    if trial.returncode:
        pytest.skip(f"NOT TESTED: this machine forbids system call filters ({err.strip()[-200:]})")


@pytest.mark.usefixtures("seccomp")
def test_the_filter_bites(children: Any, box: Any, group: str) -> None:
    """A publish that makes a system call, or sleeps, does not survive it."""
    for wait in ("os.getppid()", "time.sleep(0)", "os.stat('/')"):
        code, out, _ = child(children, box, group, f"keep = forbid()\n{wait}\nos.write(1, b'survived')")
        assert (code, out) == (-signal.SIGSYS, ""), wait


def ends(children: Any, box: Any, group: str, cases: dict[str, str], more: str) -> dict[str, list[int]]:
    """How each case ended and what it said: [exit code, published, dropped].  What only root can make is left out, and said so."""
    if os.geteuid() != 0:
        for what in [what for what in cases if "/dev/shm" in what]:
            cases = {name: code for name, code in cases.items() if name != what}
            warnings.warn(f"NOT TESTED: only root can make it so that {what}", stacklevel=1)
    code, out, err = child(children, box, group, f"each({cases!r}, {more!r})")
    assert code == 0, err
    found = {what: rest for what, *rest in map(json.loads, out.splitlines())}
    assert list(found) == list(cases)
    bad = {what: rest for what, rest in found.items() if rest[0]}
    assert not bad, f"{bad}\n{err}"
    return found


@pytest.mark.filterwarnings("default:NOT TESTED")
@pytest.mark.usefixtures("seccomp")
def test_publishing_waits_for_nobody(children: Any, box: Any, group: str) -> None:
    cases = {
        what: ('shm("size=32k")\n' if what in MOUNTS else "") + "publisher = LoadPublisher(GROUP, RANK, start_wait=0)\n" + code
        for what, code in PUBLISHED.items()
    }
    found = ends(children, box, group, cases, "\niterate(publisher)")
    assert found == {what: [0, 20001, 0] for what in found}


@pytest.mark.filterwarnings("default:NOT TESTED")
@pytest.mark.usefixtures("seccomp")
def test_serving_without_a_mailbox_waits_for_nobody(children: Any, box: Any, group: str) -> None:
    """The thread that tries again may want the interpreter meanwhile: to give it that is the one more call allowed."""
    more = "\npublisher = LoadPublisher(GROUP, RANK, start_wait=0)\niterate(publisher, 5000, FUTEX[MACHINE])"
    found = ends(children, box, group, DROPPED, more)
    assert found == {what: [0, 0, 5001] for what in found}


@pytest.mark.usefixtures("seccomp")
def test_numbers_that_no_scheduler_has_wait_for_nobody(children: Any, box: Any, group: str) -> None:
    code, out, err = child(
        children, box, group,
        "publisher = LoadPublisher(GROUP, RANK, start_wait=0)\n"
        "iterate(publisher, 5000, load=lambda i: [(-1, 0, 0, 1), (None, 0, 0, 1), (0, 0, 2, 1), (1 << 70, 0, 0, 1)][i % 4])",
    )  # fmt: skip
    assert (code, out) == (0, "0 5001\n"), err


@pytest.mark.parametrize("peer", ["stands still", "is dead", "was never there"])
def test_a_whole_iteration_with_a_peer_that_does_not_read(children: Any, box: Any, group: str, peer: str, tmp_path: Any) -> None:
    """The mailbox, and what goes over the wire for the load's sake: thousands of iterations behind a full queue."""
    code, out, err = child(
        children, box, group,
        f"PEER, ADDRESS = {peer!r}, {f'ipc://{tmp_path}/lane'!r}"
         """
import zmq
from loadbox.piggyback import BatchTokenIDOutSlim, MsgpackSendSocket

def read():
    global kept
    kept = zmq.Context()
    kept = kept, kept.socket(zmq.PULL)
    kept[1].setsockopt(zmq.RCVHWM, 2)
    kept[1].bind(ADDRESS)

pid = 0 if PEER == "was never there" else beside(read)
if PEER == "is dead":
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
context = zmq.Context()
socket = context.socket(zmq.PUSH)
socket.setsockopt(zmq.SNDHWM, 3)
socket.setsockopt(zmq.SNDTIMEO, 0)  # the tokens' own wait is not the load's
socket.setsockopt(zmq.LINGER, 0)
socket.connect(ADDRESS)
send = MsgpackSendSocket(socket, 0, load_only="always")
publisher = LoadPublisher(GROUP, RANK, start_wait=0)
refused = 0
for i in range(5000):
    load = (i % 3, 0, 1, 4)
    publisher.publish(*load)
    try:
        send.send_pyobj(BatchTokenIDOutSlim([], [], [], [], [], [], [], []), load=load)
    except zmq.Again:
        refused += 1
    send.after_advance(load=load)
send.send_engine_dead()
assert refused > 4000, refused
print(publisher.published, publisher.dropped)
publisher.close()
send.close()
context.term()
""",
    )  # fmt: skip
    assert (code, out) == (0, "5000 0\n"), err
