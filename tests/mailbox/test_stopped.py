"""Writers and readers that are stopped, slow or killed from outside: nobody waits for anybody, and nobody is called dead who lives.

Being stopped *within* a publish is in test_kill_walk.py.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

WRITER = """
    import sys, time
    from loadbox.mailbox import MailboxWriter

    writer = MailboxWriter(sys.argv[1], 0, 1)
    for line in sys.stdin:
        before = time.monotonic()
        writer.publish(*map(int, line.split()))
        print(before, time.monotonic(), flush=True)
"""

READER = """
    import sys
    from loadbox.mailbox import GroupReader, MailboxReader

    reader, group = MailboxReader(sys.argv[1], 0, liveness_interval=0.001), GroupReader(sys.argv[1], 1, liveness_interval=0.001)
    out = group.read()
    print("ready", flush=True)
    while True:
        reader.read(), reader.state(), reader.age(), group.read(out)
"""


def publish(writer: Any, *load: int) -> tuple[float, float]:
    """Have a child publish; the times before and after."""
    print(*load, file=writer.stdin, flush=True)
    before, after = map(float, writer.stdout.readline().split())
    return before, after


def stop(child: Any) -> None:
    """SIGSTOP, and wait until it stands."""
    child.send_signal(signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(child.pid, os.WUNTRACED)[1])


def until(holds: Callable[[], bool]) -> None:
    """Wait, for a minute at most."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_stopped_between_publishes(box: Any, group: str, children: Any) -> None:
    """Idle it stays LIVE, at work it becomes STALLED; never DEAD, and readable at once all along."""
    writer = children.start(WRITER, group, backend=box.backend)
    with (
        box.MailboxReader(group, 0, stall_after=0.05, liveness_interval=0.01) as reader,
        box.GroupReader(group, 1, stall_after=0.05, liveness_interval=0.01) as ranks,
    ):
        for load, state in [
            ((0, 0, 3, 10), "LIVE"),
            ((0, 1, 3, 10), "STALLED"),
            ((1, 0, 3, 10), "STALLED"),
            ((0, 0, 0, 10), "LIVE"),
        ]:
            publish(writer, *load)
            stop(writer)
            time.sleep(0.1)
            for _ in range(3):
                assert reader.read() == load
                assert reader.state().name == state
                [row] = ranks.read()
                assert row.tolist()[:4] == load
                assert (box.RankState(row["state"]).name, row["usable"]) == (state, True)
                time.sleep(0.02)
            writer.send_signal(signal.SIGCONT)
        writer.kill()
        writer.wait()
        time.sleep(0.02)
        assert reader.state().name == "DEAD"


def test_a_long_iteration_has_its_true_age(box: Any, group: str, children: Any) -> None:
    writer = children.start(WRITER, group, backend=box.backend)
    with box.MailboxReader(group, 0, stall_after=0.2) as reader:
        before, after = publish(writer, 5, 6, 7, 8)
        states = []
        while not states or states[-1] != "STALLED":
            early = time.monotonic()
            assert reader.read() == (5, 6, 7, 8)
            age, state = reader.age(), reader.state().name
            late = time.monotonic()
            assert early - after <= age <= late - before
            if late - before <= 0.2:
                assert state == "LIVE"
            if early - after > 0.2:
                assert state == "STALLED"
            states.append(state)
        publish(writer, 9, 9, 9, 9)
        assert reader.read() == (9, 9, 9, 9)


@pytest.mark.parametrize("readers", ["c", "py"])
def test_readers_are_stopped_and_killed_at_any_moment(box: Any, group: str, children: Any, readers: str) -> None:
    """The writer publishes on, closes, and another takes its place, whatever a reader was in the middle of."""
    if readers == "c" and os.environ.get("LOADBOX_TEST_WITHOUT_C"):
        pytest.skip("LOADBOX_TEST_WITHOUT_C is set: the C core is not tested")
    chance = random.Random(1)
    for _ in range(3):
        reader = children.start(READER, group, backend=readers)
        assert reader.stdout.readline() == "ready\n"
        for ending in [signal.SIGCONT] * 10 + [signal.SIGKILL]:
            with box.MailboxWriter(group, 0, 1, start_wait=0) as writer, box.MailboxReader(group, 0) as witness:
                time.sleep(chance.random() / 200)
                stop(reader)
                for n in range(1, 101):
                    writer.publish(n, n, n, n)
                    assert witness.read() == (n, n, n, n)
                reader.send_signal(ending)
                writer.publish(0, 0, 0, 1)
                assert witness.read() == (0, 0, 0, 1)
        assert reader.wait() == -signal.SIGKILL


READER_WALK = """
    import ctypes, itertools, os, signal, sys
    import killpoints

    group, backend = sys.argv[1:]
    box = killpoints.load(os.environ["LOADBOX_KILL_CORE"])[backend]
    for at in itertools.count():
        writer = box.MailboxWriter(group, 0, 1, start_wait=0)
        writer.publish(1, 1, 1, 1)
        pid = os.fork()
        if pid == 0:
            try:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no stopped process stays behind
                killpoints.arm(box, "line", at, signal.SIGSTOP)
                reader = box.MailboxReader(group, 0, liveness_interval=0)
                assert (reader.read(), reader.state().name) == ((1, 1, 1, 1), "LIVE")
                os._exit(7)
            finally:
                os._exit(1)
        status = os.waitpid(pid, os.WUNTRACED)[1]
        if not os.WIFSTOPPED(status):
            assert os.waitstatus_to_exitcode(status) == 7
            writer.close()
            break
        with box.MailboxReader(group, 0) as witness:
            writer.publish(2, 2, 2, 2)
            assert witness.read() == (2, 2, 2, 2)
            writer.close()
            with box.MailboxWriter(group, 0, 1, start_wait=0) as second:
                second.publish(3, 3, 3, 3)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert not os.path.exists(f"/dev/shm/loadbox.{group}.0")
    print(at)
"""


def test_a_reader_is_stopped_at_every_line(box: Any, group: str, children: Any, armed: dict[str, str]) -> None:
    if box.backend == "c" and not armed["LOADBOX_KILL_CORE"]:
        pytest.skip("LOADBOX_TEST_WITHOUT_C is set: the C core is not tested")
    assert int(children.run(READER_WALK, group, box.backend, env=armed)) > 60


CROWD = """
    import os, sys
    from loadbox.mailbox import MailboxReader

    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    def mappings():
        with open("/proc/self/maps") as maps:
            return sum(f"loadbox.{sys.argv[1]}." in line for line in maps)

    before = descriptors()
    readers = [MailboxReader(sys.argv[1], 0) for _ in range(250)]
    assert {reader.state().name for reader in readers} == {"SILENT"}
    each = 2 if os.environ["LOADBOX_PURE_PYTHON"] else 1  # Python's mmap keeps a duplicate
    assert (descriptors() - before, mappings()) == (each * 250, 250)
    print("ready", flush=True)
    last = 0
    while last < 10_000:
        for reader in readers:
            snapshot = reader.read()
            if snapshot is not None:
                n, waiting, active, total = snapshot
                assert last <= n == waiting == active == total
                last = n
    for reader in readers:
        reader.close()
    assert (descriptors() - before, mappings()) == (0, 0)
    print("done", flush=True)
"""


def test_a_thousand_readers(box: Any, group: str, children: Any) -> None:
    with box.MailboxWriter(group, 0) as writer:
        crowds = [children.start(CROWD, group, backend=box.backend) for _ in range(4)]
        for crowd in crowds:
            assert crowd.stdout.readline() == "ready\n", crowd.communicate()[1]
        for n in range(1, 10_001):
            writer.publish(n, n, n, n)
        for crowd in crowds:
            assert crowd.communicate() == ("done\n", "")
        assert writer.publish(0, 0, 0, 1) is None
