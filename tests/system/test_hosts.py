"""Hosts as they are: containers that share much or nothing, forks in every role, no descriptors, a thousand sudden ends."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import pytest

from loadbox.mailbox import MailboxReader
from loadbox.piggyback import MsgpackFrontend
from loadbox.reader import LoadReader

ROOT = Path(__file__).resolve().parents[2]

ENGINE = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)

def call(name, *arguments):
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

group, address, flags, own_shm = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "True"
call("unshare", flags)
if own_shm:
    call("mount", b"none", b"/", None, 0x44000, None)
    call("mount", b"none", b"/dev/shm", b"tmpfs", 0, b"")
if flags & 0x20000000:  # pids: for the children
    if pid := os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    call("prctl", 1, signal.SIGKILL)

import zmq
from loadbox.mailbox import MailboxWriter
from loadbox.piggyback import BatchTokenIDOutSlim, connect_msgpack_engine
writer = MailboxWriter(group, 1, 2)
writer.publish(3, 1, 5, 10)
print("up", flush=True)
context = zmq.Context()
recv, send, init = connect_msgpack_engine(context, address, engine_index=1, ready={}, mailbox=writer, timeout=60)
send.send_pyobj(BatchTokenIDOutSlim([], [], [], [], [], [], [], []), load=(3, 1, 5, 10))
sys.stdin.read()
os._exit(0)
"""
NET, PIDS, MOUNTS = 0x40000000, 0x20000000, 0x20000


@pytest.mark.parametrize(
    ("flags", "own_shm"),
    [(NET, False), (NET | PIDS, False), (NET | PIDS | MOUNTS, True)],
    ids=["another network", "another network and other pids", "a container that shares nothing but the socket's folder"],
)
def test_an_engine_in_another_container(children: Any, group: str, tmp_path: Path, flags: int, own_shm: bool) -> None:
    """Shared memory tells that the host is one, whatever the network and the pids say; without it, the piggyback serves."""
    import zmq

    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: only root can make network and PID namespaces")

    def epoch(of: str, rank: int) -> int | None:
        with MailboxReader(of, rank, liveness_interval=0) as reader:
            reader.read()
            return reader.epoch or None

    address = f"ipc://{tmp_path}/lane"
    context = zmq.Context()
    with MsgpackFrontend(context, address, engines=2, mailbox_epoch=epoch) as front, LoadReader(group, 2, board=False) as view:
        engine = children.start(ENGINE, group, address, flags, own_shm)
        if engine.stdout.readline() != "up\n":
            pytest.skip(f"NOT TESTED: this machine forbids these namespaces ({engine.communicate()[1].strip()[-200:]})")
        rank, batch = front.recv(60)
        assert (rank, batch.load) == (1, (3, 1, 5, 10))
        view.feed(batch)
        assert front.engines[1].same_host is (not own_shm)
        load = view.loads()[1]
        assert load.snapshot is not None
        if own_shm:
            assert (load.source, load.state.name, load.snapshot[2:]) == ("piggyback", "ABSENT", (5, 10))
        else:
            assert (load.source, load.state.name, tuple(load.snapshot)) == ("mailbox", "LIVE", (3, 1, 5, 10))
        assert view.loads()[0].snapshot is None
    context.term()


FORKS = """
import os, sys, threading, time
from loadbox.mailbox import GroupReader, MailboxReader, MailboxWriter
from loadbox.reader import LoadReader
group, how = sys.argv[1:]
writer = MailboxWriter(group, 0, 2)
writer.publish(1, 2, 3, 4)
one, ranks, view = MailboxReader(group, 0), GroupReader(group, 2), LoadReader(group, 2, seed=1)
fresh = MailboxReader(group, 0), GroupReader(group, 2), LoadReader(group, 2, board=False)
one.read(), ranks.read(), view.choose("a")
going = True
def busy():
    while going:
        one.read(), one.state(), ranks.read(), view.loads()
threads = [threading.Thread(target=busy, daemon=True) for _ in range(2)] if how == "while others read" else []
for thread in threads:
    thread.start()

def look():
    for reader in (one, fresh[0]):
        assert (reader.state().name, reader.read()) == ("LIVE", (1, 2, 3, 4))
    for reader in (ranks, fresh[1]):
        assert reader.read()["usable"].tolist() == [True, False]
    for reader in (view, fresh[2]):
        assert reader.loads()[0].snapshot == (1, 2, 3, 4)

for i in range(20):
    pid = os.fork()
    if not pid:
        import faulthandler
        faulthandler.dump_traceback_later(60, exit=True)
        try:
            look()
            assert sum(load.in_flight for load in view.loads()) == 0
            view.choose("a")
            view.finished("a")
            for reader in (one, ranks, view, *fresh):
                reader.close()
        except BaseException as error:
            sys.stderr.write(repr(error))
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    look()
    assert sum(load.in_flight for load in view.loads()) == 1
going = False
for thread in threads:
    thread.join()
for reader in (one, ranks, view, *fresh, writer):
    reader.close()
"""


@pytest.mark.parametrize("how", ["alone", "while others read"])
def test_readers_and_views_in_a_forked_child(children: Any, box: Any, group: str, how: str) -> None:
    """A child reads on with what it got, closes it, and its parent notices nothing; also when other threads read at the time."""
    children.run(FORKS, group, how, backend=box.backend, env={"PYTHONWARNINGS": "ignore"})


LAUNCHES = """
import os, signal, sys
import numpy
from loadbox.mailbox import GroupReader, MailboxReader, MailboxWriter
from loadbox.reader import LoadReader
group, count = sys.argv[1], int(sys.argv[2])
most = 0
for i in range(count):
    pid = os.fork()
    if not pid:
        writer = MailboxWriter(group, i % 8, 8)
        writer.publish(i, 0, 0, 1)
        readers = MailboxReader(group, (i + 1) % 8), GroupReader(group)
        readers[0].read(), readers[1].read()
        view = LoadReader(group, 8, board=True)
        view.choose("a")
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    most = max(most, sum(name.startswith(f"loadbox.{group}.") for name in os.listdir("/dev/shm")))
print(most)
"""


def launches(children: Any, box: Any, group: str, count: int) -> None:
    child = children.start(LAUNCHES, group, count, backend=box.backend)
    out, err = child.communicate(timeout=220)
    assert child.returncode == 0, err
    assert int(out) <= 8 + 2  # a file a rank, and the boards of the last frontend and the one before
    removed = [box._segment.clean(name) for name in box._names.list_names() if name.startswith(f"/loadbox.{group}.")]
    assert removed == [None] * len(removed)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"loadbox.{group}.")]


def test_fifty_launches_ended_by_sigkill(children: Any, box: Any, group: str) -> None:
    launches(children, box, group, 50)


@pytest.mark.slow
def test_a_thousand_launches_ended_by_sigkill(children: Any, box: Any, group: str) -> None:
    launches(children, box, group, 1000)


EXHAUSTED = """
import gc, os, resource, sys, time
import numpy
from loadbox.mailbox import MailboxError, MailboxWriter
from loadbox.reader import LoadReader
group = sys.argv[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
writer = MailboxWriter(group, 0, 2)
writer.publish(1, 2, 3, 4)
foreign = LoadReader(group, 2, board=True)
foreign.choose("x", pinned=1)
old = LoadReader(group, 2)
old.loads()
made = []

def held():
    "How many descriptors there are, once everybody has looked for boards again."
    gc.collect()
    for view in (foreign, old):
        view._sources._others._skipped.clear()
        view._sources._next_boards_ns = 0
        view.loads()
    return len(os.listdir("/proc/self/fd"))

for left in range(12):
    before = held()
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for _ in range(left):
        os.close(taken.pop())
    view = LoadReader(group, 2)  # "auto": without a board, if there is none to be had
    loads = view.loads()
    assert loads[0].snapshot in (None, (1, 2, 3, 4)) and loads[1].snapshot is None
    assert view.choose("a") in (0, 1)
    view.finished("a")
    assert old.choose(f"b{left}") in (0, 1)  # attached before: knows all
    assert old.loads()[0].snapshot == (1, 2, 3, 4)
    try:
        LoadReader(group, 2, board=True).close()
        made.append(left)
    except MailboxError as error:
        assert error.errno == 24, error
    for fd in taken:
        os.close(fd)
    view._sources._next_boards_ns = 0
    end = time.monotonic() + 30
    while view.loads()[0].snapshot is None:
        assert time.monotonic() < end
    view.close()
    del view
    assert held() == before, left
assert made and made[0] > 0, made
"""


def test_a_view_without_descriptors(children: Any, group: str) -> None:
    """It chooses all the same, never raises unless a board was insisted on, sees all once there are some, and leaks none."""
    children.run(EXHAUSTED, group)


def test_wall_clocks_are_only_printed() -> None:
    """A jump of the wall clock cannot matter: it is asked only for the start time that a header shows to people.

    And where the age of a directory's time says whether that can be believed: a jump there costs a look (test_watch.py).
    """
    found = []
    for room in ("mailbox", "piggyback", "reader", "engines"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and node.attr in ("time", "time_ns", "CLOCK_REALTIME", "now", "utcnow"):
                    found.append((path.name, ast.unparse(node)))
                if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
                    found += [(path.name, name.name) for name in node.names if name.name in ("time", "time_ns", "datetime")]
        for path in (ROOT / room).rglob("*.[ch]"):
            if path.name != "_core_watch.c":
                assert "CLOCK_REALTIME" not in path.read_text().replace("/* CLOCK_REALTIME", ""), path
    assert found == [("_writer.py", "time.time_ns"), ("_board.py", "time.time_ns")]


def test_a_reader_that_cannot_learn_its_boot(box: Any, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a descriptor left it cannot tell another boot's segment by its boot; then the lock tells, and nothing is usable."""
    writer = box.MailboxWriter(group, 0, 1)
    writer.publish(1, 2, 3, 4)
    writer._detach()
    with open(f"/dev/shm/loadbox.{group}.0", "r+b") as file:
        file.seek(80)
        file.write(bytes(range(16)))
    with box.MailboxReader(group, 0, liveness_interval=0) as reader:
        assert (reader.state().name, reader.read()) == ("ABSENT", None)
    monkeypatch.setattr(box._attach, "boot_id", lambda: bytes(16))
    with box.MailboxReader(group, 0, liveness_interval=0) as reader, box.GroupReader(group, 1, liveness_interval=0) as ranks:
        assert reader.state().name == "DEAD"
        assert ranks.read()["usable"].tolist() == [False]


LANES = """
import gc, os, resource, sys, time
import zmq
from loadbox.piggyback import MsgpackFrontend, WireError, connect_msgpack_engine
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
context = zmq.Context()
context.socket(zmq.PAIR).close()  # its threads are there
made = told = 0
for left in range(40):
    before = len(os.listdir("/proc/self/fd"))
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for _ in range(left):
        os.close(taken.pop())
    for make in (
        lambda: MsgpackFrontend(context, f"ipc://{sys.argv[1]}/{left}", engines=4).close(),
        lambda: connect_msgpack_engine(context, f"ipc://{sys.argv[1]}/nobody", engine_index=0, ready={}, timeout=0.01),
    ):
        try:
            make()
            made += 1
        except TimeoutError:
            pass
        except WireError as error:
            assert "oo many open files" in str(error), error
            told += 1
    for fd in taken:
        os.close(fd)
    gc.collect()
    end = time.monotonic() + 30
    while len(os.listdir("/proc/self/fd")) > before:  # ZMQ closes in its own time
        assert time.monotonic() < end, left
        time.sleep(0.005)
assert made > 2 and told > 10, (made, told)
context.term()
"""


def test_lanes_without_descriptors(children: Any, tmp_path: Path) -> None:
    """One clear error at once, whichever descriptor is the first that is missing, and nothing is left open."""
    children.run(LANES, tmp_path)
