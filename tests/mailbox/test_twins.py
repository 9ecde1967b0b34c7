"""The two twins are one library; and what only the Python one has to survive."""

from __future__ import annotations

import inspect
import logging
import os
import platform
import signal
import sys
import time
from typing import Any

import pytest


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("__")}


def test_the_c_core_is_what_is_tested(box: Any) -> None:
    assert box._seqlock.BACKEND == box.backend
    assert box.MailboxWriter.__mro__[1].__module__ == f"loadbox.mailbox._seqlock_{box.backend}"


def test_same_names_same_signatures() -> None:
    if os.environ.get("LOADBOX_TEST_WITHOUT_C"):
        pytest.skip("LOADBOX_TEST_WITHOUT_C is set: the C core is not tested")
    from loadbox.mailbox import _seqlock_c, _seqlock_py

    for name in ("WriterCore", "ReaderCore", "GroupCore"):
        c, py = getattr(_seqlock_c, name), getattr(_seqlock_py, name)
        hooks = {"_find", "_discover", "_rows", "_check_out"}
        helpers = {member for member, value in vars(py).items() if type(value).__name__ == "member_descriptor"}
        internal = {
            "_store",
            "_check_interrupted",
            "_look",
            "_look_for_more",
            "_grow",
            "_after_fork",
            "_announced",
            "_fill",
        } | helpers
        assert public(c) == public(py) - hooks - internal - helpers
        for member in public(c):
            if callable(getattr(c, member)):
                c_signature, py_signature = (inspect.signature(getattr(core, member)) for core in (c, py))
                assert [(p.name, p.kind) for p in c_signature.parameters.values()] == [
                    (p.name, p.kind) for p in py_signature.parameters.values()
                ], member
            assert inspect.getdoc(getattr(c, member)) == inspect.getdoc(getattr(py, member)), member


def test_import_is_cheap_and_alone(children: Any) -> None:
    listed = children.run("import sys, loadbox.mailbox; print(*sys.modules)").split()
    for heavy in ("zmq", "msgspec", "numpy", "asyncio", "multiprocessing", "rich", "click"):
        assert heavy not in listed


def test_unsupported_machine(box: Any, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    makers = [lambda: box.MailboxWriter(group, 0), lambda: box.MailboxReader(group, 0), lambda: box.GroupReader(group)]
    for make in makers:
        if box.backend == "c":
            make().close()
        else:
            with pytest.raises(box.MailboxUnsupported, match="not safe on aarch64"):
                make()


def test_without_the_c_core_it_is_told_once(children: Any, group: str) -> None:
    code = """
    import logging, sys
    logging.basicConfig(format="%(message)s")
    sys.modules["loadbox.mailbox._seqlock_c"] = None
    from loadbox.mailbox import MailboxWriter, MailboxReader, _seqlock
    assert _seqlock.BACKEND == "py"
    for _ in range(3):
        with MailboxWriter(sys.argv[1], 0) as w, MailboxReader(sys.argv[1], 0) as r:
            w.publish(1, 2, 3, 4)
            assert r.read() == (1, 2, 3, 4)
    """
    child = children.start(code, group)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert err.count("without its C core") == 1


def test_forced_twin_says_nothing(children: Any, group: str) -> None:
    code = """
    import logging, sys
    logging.basicConfig(level=0)
    from loadbox.mailbox import MailboxWriter
    MailboxWriter(sys.argv[1], 0).close()
    """
    child = children.start(code, group, backend="py")
    assert child.communicate(timeout=60)[1] == ""


def test_a_core_of_another_version_is_refused(children: Any) -> None:
    code = """
    import sys, types
    sys.modules["loadbox.mailbox._seqlock_c"] = types.ModuleType("old")
    import loadbox.mailbox
    """
    child = children.start(code)
    assert "install loadbox again" in child.communicate(timeout=60)[1]


def test_a_publish_that_interrupts_another_raises_at_once(box: Any, group: str) -> None:
    """From a signal handler on the same thread: in C it cannot happen between the stores, in Python it is refused there."""
    outcomes = {"published": 0, "refused": 0}
    with box.MailboxWriter(group, 0) as writer, box.MailboxReader(group, 0) as reader:

        def handler(*_: object) -> None:
            try:
                writer.publish(7, 14, 21, 22)
                outcomes["published"] += 1
            except box.MailboxError:
                outcomes["refused"] += 1

        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
        try:
            until = time.monotonic() + 0.5
            i = 0
            while time.monotonic() < until:
                i += 1
                writer.publish(i, 2 * i, 3 * i, 3 * i + 1)
                n, twice, thrice, more = reader.read()
                assert (twice, thrice, more) == (2 * n, 3 * n, 3 * n + 1)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert outcomes["published"] > 0
    assert box.backend == "py" or outcomes["refused"] == 0


STOPS = """
import ctypes, gc, sys, threading, time
from loadbox.mailbox import MailboxReader, MailboxWriter, _seqlock

assert _seqlock.BACKEND == sys.argv[2]
gc.disable()  # an exception that falls into a garbage collector's callback is lost there


class Stop(Exception):
    pass


i = received = 0
done = threading.Event()


def publish_on(writer):
    global i
    while not done.is_set():
        i += 1
        writer.publish(i, 2 * i, 3 * i, 3 * i + 1)


def publish(writer):
    global received
    while not done.is_set():
        try:
            publish_on(writer)  # a loop's own jumps are outside of the try that the loop is in (CPython 3.13)
        except Stop:
            received += 1


with MailboxWriter(sys.argv[1], 0) as writer, MailboxReader(sys.argv[1], 0) as reader:
    writer.publish(0, 0, 0, 1)
    sys.setswitchinterval(1e-4)
    thread = threading.Thread(target=publish, args=(writer,))
    thread.start()
    until = time.monotonic() + 30
    while received < 300 and time.monotonic() < until:
        before = received
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Stop))
        # One at a time: the next when this one has been caught and publishing goes on, or it would fall between two tries.
        again = None
        while (again is None or i < again) and thread.is_alive() and time.monotonic() < until:
            if again is None and received > before:
                again = i + 2
            n, twice, thrice, more = reader.read()
            assert (twice, thrice, more) == (2 * n, 3 * n, 3 * n + 1)
            time.sleep(0)
    assert thread.is_alive()
    done.set()
    thread.join()
    writer.publish(1, 2, 3, 4)
    assert reader.read() == (1, 2, 3, 4)
    with open("/dev/shm" + writer.name, "rb") as file:
        data = file.read()
    assert data[136:184] == data[192:240]
print(received)
"""


def test_asynchronous_exceptions_never_tear(box: Any, group: str, children: Any) -> None:
    """An exception from another thread may cut a publish short between any two bytecodes; readers see old or new, whole.

    In a process of its own: here it could fall into what pytest or hypothesis do in that thread.
    """
    assert int(children.run(STOPS, group, box.backend, backend=box.backend)) > 10


class Stop(Exception):
    """Raised in the middle of a publish."""


def test_a_cut_publish_is_repaired_by_the_next(group: str) -> None:
    """Every line of the twin's stores, one by one: cut there, read whole, publish again, read whole."""
    box = pytest.importorskip("loadbox.mailbox")
    from loadbox.mailbox import _seqlock_py

    source, first = inspect.getsourcelines(_seqlock_py.WriterCore._store)
    assert len(source) > 20
    cut = 0
    for line in range(first + 1, first + len(source)):
        twin = _seqlock_py.WriterCore()
        with box.MailboxWriter(group, 0) as owner, box.MailboxReader(group, 0) as reader:
            with open("/dev/shm" + owner.name, "r+b") as file:
                twin._hold(os.dup(file.fileno()))
                twin._attach(file.fileno())
            twin._life, twin._why_not = owner.epoch, None
            twin.publish(1, 2, 3, 4)

            def tracer(frame: Any, event: str, _: Any, line: int = line) -> Any:
                if frame.f_code is not _seqlock_py.WriterCore._store.__code__:
                    return tracer
                if event == "line" and frame.f_lineno == line:
                    sys.settrace(None)
                    raise Stop
                return tracer

            before = sys.gettrace()
            sys.settrace(tracer)
            try:
                twin.publish(5, 10, 15, 16)
            except Stop:
                cut += 1
            finally:
                sys.settrace(before)
            assert reader.read() in ((1, 2, 3, 4), (5, 10, 15, 16)), line
            for load in ((6, 12, 18, 19), (7, 14, 21, 22)):
                twin.publish(*load)
                assert reader.read() == load
            twin._detach()
    assert cut >= 18


def test_log_name() -> None:
    from loadbox.mailbox import _seqlock

    assert _seqlock._log is logging.getLogger("loadbox")
