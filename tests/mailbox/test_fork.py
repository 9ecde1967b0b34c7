"""A forked child is no owner, whoever forked it, and however long it lives."""

from __future__ import annotations

import os
from typing import Any

import pytest

PARENT = """
import ctypes, gc, os, sys, time
from loadbox.mailbox import MailboxWriter, MailboxReader, MailboxError
group, how, what = sys.argv[1:4]
writer = MailboxWriter(group, 0)
writer.publish(1, 2, 3, 4)
reader = MailboxReader(group, 0, liveness_interval=0)
assert reader.read() == (1, 2, 3, 4)
libc = ctypes.PyDLL(None)  # PyDLL: the child keeps the interpreter's lock
out, into = os.pipe()
pid = os.fork() if how == "os" else libc.fork()
if pid == 0:
    if what == "publish":
        try:
            writer.publish(9, 9, 9, 9)
        except MailboxError as error:
            os.write(into, str(error).encode())
    elif what == "close":
        writer.close()
        os.write(into, b"closed")
    elif what == "drop":
        del writer
        gc.collect()
        os.write(into, b"dropped")
    elif what == "exit":
        os.close(into)
        sys.exit(0)
    elif what == "read":
        os.write(into, repr((tuple(reader.read()), reader.state().name)).encode())
    elif what == "live":
        os.write(into, b"alive")
        os.close(into)
        os.close(1); os.close(2)
        sys.stdin.read()
    os._exit(0)
os.close(into)
said = b""
while chunk := os.read(out, 4096):
    said += chunk
print(said.decode(), flush=True)
if what != "live":
    assert os.waitpid(pid, 0)[1] == 0
print(reader.state().name, tuple(reader.read()), flush=True)
writer.publish(5, 6, 7, 8)
print(reader.state().name, tuple(reader.read()), flush=True)
if what == "live":
    os._exit(0)
writer.close()
print(reader.state().name, flush=True)
"""


def forks(box: Any) -> list[str]:
    return ["os", "c"] if box.backend == "c" else ["os"]  # the twin does not see forks made by C code, and says so


@pytest.mark.parametrize("what", ["publish", "close", "drop", "exit", "read"])
def test_the_child_is_no_owner(box: Any, group: str, children: Any, what: str) -> None:
    for how in forks(box):
        lines = children.run(PARENT, group, how, what, backend=box.backend).splitlines()
        said = {"publish": "forked", "close": "closed", "drop": "dropped", "exit": "", "read": "((1, 2, 3, 4), 'LIVE')"}[what]
        assert said in lines[0]
        assert lines[1:] == ["LIVE (1, 2, 3, 4)", "LIVE (5, 6, 7, 8)", "CLOSED"]


def test_a_child_that_outlives_its_parent_does_not_keep_it_alive(box: Any, group: str, children: Any) -> None:
    for how in forks(box):
        parent = children.start(PARENT, group, how, "live", backend=box.backend)
        assert [parent.stdout.readline().strip() for _ in range(3)] == ["alive", "LIVE (1, 2, 3, 4)", "LIVE (5, 6, 7, 8)"]
        parent.wait(timeout=60)
        with box.MailboxReader(group, 0, liveness_interval=0) as reader:
            assert reader.state() is box.RankState.DEAD
            assert reader.read() == (5, 6, 7, 8)
            with box.MailboxWriter(group, 0, start_wait=0.0) as writer:  # while the grandchild still runs
                writer.publish(1, 1, 1, 1)
                assert reader.state() is box.RankState.LIVE
        parent.stdin.close()


def test_a_child_may_own_a_rank_of_its_own(box: Any, group: str) -> None:
    with box.MailboxWriter(group, 0) as mine, box.MailboxReader(group, 1, liveness_interval=0) as reader:
        mine.publish(1, 1, 1, 1)
        out, into = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                theirs = box.MailboxWriter(group, 1)
                theirs.publish(2, 2, 2, 2)
                os.write(into, b"x")
                os.close(into)
            finally:
                os._exit(0)
        os.close(into)
        assert os.read(out, 1) == b"x"
        os.close(out)
        os.waitpid(pid, 0)
        assert reader.state() is box.RankState.DEAD
        assert reader.read() == (2, 2, 2, 2)
        mine.publish(3, 3, 3, 3)


def test_descriptors_are_not_inherited_over_exec(box: Any, group: str, children: Any) -> None:
    with box.MailboxWriter(group, 0) as writer, box.MailboxReader(group, 0) as reader, box.GroupReader(group, 1) as both:
        writer.publish(1, 1, 1, 1)
        reader.read()
        both.read()
        listed = children.run(
            """
            import os
            for fd in os.listdir("/proc/self/fd"):
                if os.path.islink("/proc/self/fd/" + fd):
                    print(os.readlink("/proc/self/fd/" + fd))
            """,
            close_fds=False,
        )
        assert "loadbox" not in listed


WHILE_STARTING = """
import ctypes, os, sys, threading
from loadbox.mailbox import MailboxWriter, _segment
group, how = sys.argv[1:3]
libc = ctypes.CDLL(None)
lock = _segment._lock
def lock_and_fork(name, fd):
    lock(name, fd)
    def fork():
        if (os.fork() if how == "os" else libc.fork()) == 0:
            os.write(1, b"forked\\n")
            os.close(1); os.close(2)
            os.read(0, 1)  # outlives its parent
            os._exit(0)
    if how == "os":
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    else:
        fork()
_segment._lock = lock_and_fork
writer = MailboxWriter(group, 0)
writer.publish(1, 2, 3, 4)
os.write(1, b"published\\n")
os._exit(0)
"""


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_fork_while_a_writer_starts_does_not_keep_its_lock(box: Any, group: str, children: Any) -> None:
    """Another thread forks between the lock and the rest of the constructor; the child must not hold it for a dead parent."""
    for how in forks(box):
        parent = children.start(WHILE_STARTING, group, how, backend=box.backend)
        # Both, since a child that has not run yet holds what its parent held.
        assert {parent.stdout.readline(), parent.stdout.readline()} == {"forked\n", "published\n"}
        parent.wait(timeout=60)
        with box.MailboxReader(group, 0, liveness_interval=0) as reader:
            assert reader.state() is box.RankState.DEAD
        box.MailboxWriter(group, 0, start_wait=0.0).close()
        parent.stdin.close()
