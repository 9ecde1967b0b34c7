"""The mailbox as an engine uses it: nothing of it reaches the engine, and nothing goes wrong in silence."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from loadbox.engines import LoadPublisher, PublisherStats, _publisher, publisher_stats
from loadbox.mailbox import MailboxError, MailboxReader, MailboxWriter, RankState


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_publisher, "_RETRY_FIRST_S", 0.01)


def test_it_publishes(group: str) -> None:
    with LoadPublisher(group, 1, 2) as publisher, MailboxReader(group, 1) as reader:
        publisher.publish(1, 2, 3, 4)
        assert (reader.read(), reader.state()) == ((1, 2, 3, 4), RankState.LIVE)
        assert publisher.writer is not None
        assert publisher.writer.epoch == reader.epoch
        assert publisher.stats() == PublisherStats(group, 1, 1, 0, None)
        assert publisher.stats() in publisher_stats()
    assert not os.path.exists(f"/dev/shm/loadbox.{group}.1")
    publisher.close()
    publisher.publish(1, 2, 3, 4)
    assert (publisher.published, publisher.dropped, publisher.writer) == (1, 1, None)


@pytest.mark.parametrize(
    "bad",
    [(1, 2, 5, 4), (-1, 0, 0, 1), (True, 0, 0, 1), (1.0, 0, 0, 1), (None, 0, 0, 1), (1 << 63, 0, 0, 1), (numpy.True_, 0, 0, 1)],
    ids=repr,
)
def test_numbers_that_no_scheduler_has(group: str, caplog: pytest.LogCaptureFixture, bad: tuple[Any, ...]) -> None:
    with LoadPublisher(group, 0, 1) as publisher, MailboxReader(group, 0) as reader:
        publisher.publish(1, 2, 3, 4)
        for _ in range(3):
            publisher.publish(*bad)
        assert reader.read() == (1, 2, 3, 4)
        assert (publisher.published, publisher.dropped) == (1, 3)
        assert "the mailbox keeps its old value" in str(publisher.error)
        publisher.publish(5, 6, 7, 8)
        assert reader.read() == (5, 6, 7, 8)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "a publish was dropped, 1 so far" in caplog.text


class Own(LoadPublisher):
    def publish(self, *load: Any, **named: Any) -> None:
        super().publish(*load, **named)


@pytest.mark.parametrize("kind", [LoadPublisher, Own])
@pytest.mark.parametrize(
    ("load", "named"),
    [
        ((), {}),
        ((1, 2, 3), {}),
        ((1, 2, 3, 4, 5), {}),
        ((), {"num_running": 1}),
        ((1, 2), {"kv_active_pages": 1}),
    ],
    ids=repr,
)
def test_another_number_of_arguments(
    group: str, caplog: pytest.LogCaptureFixture, kind: type[LoadPublisher], load: tuple[int, ...], named: dict[str, int]
) -> None:
    with kind(group, 0, 1) as publisher, MailboxReader(group, 0) as reader:
        publisher.publish(1, 2, 3, 4)
        for _ in range(3):
            publisher.publish(*load, **named)
        assert reader.read() == (1, 2, 3, 4)
        assert (publisher.published, publisher.dropped) == (1, 3)
        assert "publish() " in str(publisher.error)
        assert "<locals>" not in caplog.text + str(publisher.error)
        assert len(caplog.records) == 1
        publisher.publish(5, 6, 7, 8)
        assert reader.read() == (5, 6, 7, 8)
        publisher.publish(6, kv_total_pages=9, num_waiting=7, kv_active_pages=8)
        assert reader.read() == (6, 7, 8, 9)
        assert publisher.error is None
    with kind("no group!", 0) as publisher:
        publisher.publish(*load, **named)
        assert publisher.dropped == 1


@pytest.mark.parametrize(("load", "named"), [((1, 2, 3), {"total": 4}), ((1, 2, 3, 4), {"kv_total_pages": 4})], ids=repr)
def test_names_that_there_are_not(group: str, load: tuple[int, ...], named: dict[str, int]) -> None:
    with LoadPublisher(group, 0, 1) as publisher, pytest.raises(TypeError, match=r"^LoadPublisher\.publish\(\) got "):
        publisher.publish(*load, **named)


def test_a_load_given_as_what_runs_and_waits(group: str, caplog: pytest.LogCaptureFixture, at_once: None) -> None:
    """Whichever way it goes to the mailbox, it is a publish like another, and guarded like another."""

    class Queue(deque[int]):
        pass

    running, waiting, more = [1, 2], Queue([1]), Queue([1, 2])
    with MailboxReader(group, 0, liveness_interval=0) as reader:
        with MailboxWriter(group, 0, 1):
            publisher = LoadPublisher(group, 0, 1, start_wait=0.0)
            publisher._publish_lengths(running, waiting, more, 4, 5)
            assert (publisher.published, publisher.dropped) == (0, 1)
        until(lambda: reader.read() == (2, 3, 4, 5))
        for n in range(3):  # from the second on by the writer's own count
            running.append(n)
            publisher._publish_lengths(running, waiting, more, 4, 5)
            assert reader.read() == (3 + n, 3, 4, 5)
        publisher.publish(1, 1, 1, 1)
        assert reader.read() == (1, 1, 1, 1)
        dropped = publisher.dropped
        for bad in ((5, waiting, more, 4, 5), (running, None, more, 4, 5), (running, waiting, more, 6, 5)):
            for _ in range(2):
                publisher._publish_lengths(*bad)  # type: ignore[arg-type] # what is no good
            assert reader.read() == (1, 1, 1, 1)
            assert publisher.error is not None
        assert publisher.dropped == dropped + 6
        publisher._publish_lengths(running, waiting, more, 4, 5)
        assert (reader.read(), publisher.error) == ((5, 3, 4, 5), None)
        publisher.close()
        publisher._publish_lengths(running, waiting, more, 4, 5)
        assert publisher.dropped == dropped + 7


@pytest.mark.parametrize("arguments", [("no group!", 0, 1), ("g", -1, 1), ("g", 5, 2), (None, None, None), ("g", "0", 1)], ids=repr)
def test_arguments_that_name_no_mailbox(caplog: pytest.LogCaptureFixture, arguments: tuple[Any, ...]) -> None:
    """Not even these are the engine's trouble, and no thread tries for ever what cannot be."""
    before = threading.active_count()
    publisher = LoadPublisher(*arguments)
    assert threading.active_count() == before
    publisher.publish(1, 2, 3, 4)
    assert (publisher.published, publisher.dropped, publisher.writer) == (0, 1, None)
    assert publisher.error
    assert len(caplog.records) == 1
    assert publisher.error in caplog.text
    publisher.close()


def test_a_rank_that_is_taken_is_had_later(group: str, caplog: pytest.LogCaptureFixture, at_once: None) -> None:
    with MailboxReader(group, 0, liveness_interval=0) as reader, caplog.at_level(logging.INFO, "loadbox"):
        with MailboxWriter(group, 0, 1) as other:
            other.publish(9, 9, 9, 9)
            publisher = LoadPublisher(group, 0, 1, start_wait=0.0)
            assert "owned by another living writer" in str(publisher.error)
            for i in range(5):
                publisher.publish(i, 0, 1, 2)
            assert (publisher.published, publisher.dropped) == (0, 5)
            assert reader.read() == (9, 9, 9, 9)
            assert len(caplog.records) == 1, "said once"
        until(lambda: publisher.writer is not None)
        until(lambda: reader.state() is RankState.LIVE)
        assert reader.read() == (4, 0, 1, 2), "the last load, though an idle engine publishes nothing now"
        assert publisher.error is None
        assert "there is a mailbox now, after 5 dropped publishes" in caplog.text
        publisher.publish(7, 0, 1, 2)
        assert reader.read() == (7, 0, 1, 2)
        publisher.close()


def test_the_last_load_wins_when_the_mailbox_comes(group: str, at_once: None) -> None:
    for _ in range(20):
        with MailboxWriter(group, 0, 1):
            publisher = LoadPublisher(group, 0, 1, start_wait=0.0)
            publisher.publish(0, 0, 0, 1)
        i = 0
        while publisher.writer is None:
            i += 1
            publisher.publish(i, 0, 0, 1)
        with publisher, MailboxReader(group, 0) as reader:
            until(lambda publisher=publisher: publisher.error is None)
            assert reader.read() == (i, 0, 0, 1)


def test_a_folder_where_nothing_can_be_made(group: str, children: Any) -> None:
    """A full /dev/shm: the engine goes on, and has its mailbox when there is room."""
    if os.geteuid():
        pytest.skip("only root may mount a small /dev/shm of its own")
    out = children.run(
        """
        import ctypes, os, sys, time
        from loadbox.engines import LoadPublisher, _publisher
        from loadbox.mailbox import MailboxReader
        _publisher._RETRY_FIRST_S = 0.01
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.unshare(0x00020000) == 0
        assert libc.mount(b"none", b"/", None, 0x44000, None) == 0
        assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=8192") == 0
        with open("/dev/shm/full", "wb") as file:
            file.write(bytes(8192))
        publisher = LoadPublisher(sys.argv[1], 0, 1)
        publisher.publish(1, 2, 3, 4)
        print(publisher.dropped, "/dev/shm is full" in publisher.error, os.listdir("/dev/shm"))
        os.unlink("/dev/shm/full")
        end = time.monotonic() + 30
        with MailboxReader(sys.argv[1], 0) as reader:
            while reader.read() is None and time.monotonic() < end:
                time.sleep(0.01)
            print(tuple(reader.read()))
        publisher.close()
        """,
        group,
    )
    assert out == "1 True ['full']\n(1, 2, 3, 4)\n"


def test_errors_of_any_kind_stay_here(group: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def fails(*_: object, **__: object) -> None:
        raise Odd

    publisher = LoadPublisher(group, 0, 1)
    writer = publisher.writer
    assert writer is not None
    publisher._use(fails)
    publisher.publish(1, 2, 3, 4)
    assert (publisher.dropped, publisher.error) == (1, "Odd")
    publisher._use(writer.publish)
    publisher.publish(1, 2, 3, 4)
    monkeypatch.setattr(MailboxWriter, "close", fails)
    publisher.close()
    monkeypatch.undo()
    writer.close()
    monkeypatch.setattr(_publisher, "MailboxWriter", fails)
    with LoadPublisher(group, 0, 1) as publisher:
        assert publisher.error == "Odd"


def test_what_is_no_error_passes(group: str) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with LoadPublisher(group, 0, 1) as publisher:
        publisher._use(interrupted)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(1, 2, 3, 4)


def test_it_says_how_many_at_most_once_a_minute(
    group: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(_publisher, "monotonic", lambda: now)
    with MailboxWriter(group, 0, 1):
        publisher = LoadPublisher(group, 0, 1, start_wait=0.0)
        for _ in range(150):
            now += 1.0
            publisher.publish(1, 0, 1, 2)
        publisher.close()
    said = [record.getMessage() for record in caplog.records]
    assert ["tries again" in sentence or "publishes dropped so far" in sentence for sentence in said] == [True] * 3
    assert "60 publishes dropped so far" in said[1]
    assert "owned by another living writer" in said[1]


def test_a_forked_child_drops(group: str, children: Any) -> None:
    out = children.run(
        """
        import os, sys
        from loadbox.engines import LoadPublisher
        from loadbox.mailbox import MailboxReader
        publisher = LoadPublisher(sys.argv[1], 0, 1)
        publisher.publish(1, 2, 3, 4)
        pid = os.fork()
        if not pid:
            publisher.publish(9, 9, 9, 9)
            os.write(1, f"{publisher.published} {publisher.dropped} {'forked' in publisher.error}\\n".encode())
            publisher.close()
            os._exit(0)
        os.waitpid(pid, 0)
        publisher.publish(5, 6, 7, 8)
        with MailboxReader(sys.argv[1], 0) as reader:
            print(reader.state().name, tuple(reader.read()))
        publisher.close()
        """,
        group,
    )
    assert out == "0 1 True\nLIVE (5, 6, 7, 8)\n"


def test_a_segment_that_was_removed_is_made_anew(
    group: str, caplog: pytest.LogCaptureFixture, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``rm /dev/shm/*``, or systemd's RemoveIPC: an idle engine, which publishes nothing, must be found again all the same."""
    monkeypatch.setattr(_publisher, "_LOOK_S", 0.01)
    with LoadPublisher(group, 0, 1) as publisher, MailboxReader(group, 0, liveness_interval=0) as reader:
        publisher.publish(1, 2, 3, 4)
        publisher.publish(0, 0, 3, 4)
        old = publisher.writer
        os.unlink(f"/dev/shm/loadbox.{group}.0")
        until(lambda: reader.read() == (0, 0, 3, 4) and publisher.writer not in (None, old))
        assert reader.state() is RankState.LIVE
        until(lambda: publisher.error is None)
        published = publisher.published
        publisher.publish(5, 6, 7, 8)
        assert reader.read() == (5, 6, 7, 8)
        assert publisher.published == published + 1 >= 3
        assert "was removed" in caplog.text


def test_a_removed_segment_whose_name_another_took(group: str, at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No longer ours: the publishes that reach nobody are counted, until the other ends."""
    monkeypatch.setattr(_publisher, "_LOOK_S", 0.01)
    with LoadPublisher(group, 0, 1) as publisher, MailboxReader(group, 0, liveness_interval=0) as reader:
        publisher.publish(1, 2, 3, 4)
        path = f"/dev/shm/loadbox.{group}.0"
        os.rename(path, path + ".away")
        with MailboxWriter(group, 0, 1) as other:
            other.publish(9, 9, 9, 9)
            os.unlink(path + ".away")
            until(lambda: publisher.writer is None and "another living writer" in str(publisher.error))
            publisher.publish(2, 2, 3, 4)
            assert publisher.dropped == 1
            assert reader.read() == (9, 9, 9, 9)
        until(lambda: reader.read() == (2, 2, 3, 4))


def test_publish_never_waits(group: str) -> None:
    """Not for the background thread, which may be off the processor in the middle of its work."""
    with MailboxWriter(group, 0, 1):
        publisher = LoadPublisher(group, 0, 1, start_wait=0.0)
    with publisher._lock:
        engine = threading.Thread(target=publisher.publish, args=(1, 2, 3, 4), daemon=True)
        engine.start()
        engine.join(20)
        assert not engine.is_alive()
    publisher.close()


def test_a_child_inherits_locks_that_nobody_will_release(group: str, children: Any) -> None:
    """It is forked while the background thread holds them."""
    out = children.run(
        """
        import os, sys
        from loadbox.engines import LoadPublisher
        from loadbox.mailbox import MailboxWriter
        for rank in range(2):
            other = None if rank else MailboxWriter(sys.argv[1], rank, 2)
            publisher = LoadPublisher(sys.argv[1], rank, 2, start_wait=0.0)
            with publisher._lock, publisher._closed._cond:
                pid = os.fork()
                if not pid:
                    import faulthandler
                    faulthandler.dump_traceback_later(20, exit=True)
                    publisher.publish(1, 2, 3, 4)
                    publisher.publish(1, 2, 3, 4)
                    dropped = publisher.dropped
                    publisher.close()
                    os._exit(dropped)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), publisher.error is None, publisher.writer is None)
            publisher.close()
            if other:
                other.close()
        """,
        group,
    )
    assert out == "2 False True\n2 True False\n"


def test_a_log_that_fails(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(record: logging.LogRecord) -> bool:
        raise RuntimeError("no log today")

    log = logging.getLogger("loadbox")
    log.addFilter(fails)
    try:
        with pytest.raises(RuntimeError):
            log.warning("")
        LoadPublisher("no group!", 0).publish(1, 2, 3, 4)
        with LoadPublisher(group, 0) as publisher:
            publisher.publish(-1, 2, 3, 4)
            publisher.drop(ValueError())
            writer = publisher.writer
            assert writer is not None
            monkeypatch.setattr(MailboxWriter, "close", fails)
        monkeypatch.undo()
        writer.close()
        assert publisher.dropped == 2
    finally:
        log.removeFilter(fails)


def test_error_says_what_is_wrong_now(group: str) -> None:
    with LoadPublisher(group, 0) as publisher:
        for _ in range(2):
            publisher.publish(-1, 0, 0, 1)
            assert "num_running" in str(publisher.error)
            publisher.publish(1, 0, 0, 1)
            assert publisher.error is None
        publisher.drop(ValueError("no numbers"))
        assert publisher.error == "no numbers"
        publisher.publish(1, 0, 0, 1)
        assert publisher.error is None
        assert (publisher.published, publisher.dropped) == (3, 3)
    assert publisher.error == "it is closed"


def test_an_error_without_words_is_tried_again(group: str, at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(MailboxError):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    tries: list[int] = []

    def fails(*arguments: Any, **options: Any) -> MailboxWriter:
        tries.append(0)
        if len(tries) < 4:
            raise (Odd("odd"), Odd("odd"), MemoryError())[len(tries) - 1]
        return MailboxWriter(*arguments, **options)

    monkeypatch.setattr(_publisher, "MailboxWriter", fails)
    with LoadPublisher(group, 0) as publisher:
        until(lambda: publisher.error is None)
        assert len(tries) == 4


def test_no_publish_is_left_out_of_the_count(group: str) -> None:
    def engine() -> None:
        for i in range(5000):
            publisher.publish(i, 0, 0, 1)

    with LoadPublisher(group, 0) as publisher:
        engines = [threading.Thread(target=engine) for _ in range(4)]
        for thread in engines:
            thread.start()
        for thread in engines:
            thread.join()
        assert (publisher.published, publisher.dropped) == (20000, 0)
    assert publisher.published == 20000


def test_stats_while_publishers_come_and_go(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    caplog.set_level(logging.ERROR, "loadbox")

    def make() -> None:
        while not done.is_set():
            LoadPublisher("no group!", 0)

    thread = threading.Thread(target=make)
    thread.start()
    try:
        for _ in range(2000):
            publisher_stats()
    finally:
        done.set()
        thread.join()


def test_no_thread_stays(group: str, at_once: None) -> None:
    def keeping() -> int:
        return sum(thread.name == "loadbox-keeper" for thread in threading.enumerate())

    with MailboxWriter(group, 0, 1):
        publisher = LoadPublisher(group, 0, 1, start_wait=0.0)
        assert keeping() == 1
        publisher.close()
        until(lambda: keeping() == 0)
        publisher = LoadPublisher(group, 0, 1, start_wait=0.0)
        assert publisher.writer is None
        del publisher
        until(lambda: gc.collect() >= 0 and keeping() == 0)


def test_a_thread_that_cannot_be_started(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", cannot)
    with MailboxWriter(group, 0, 1):
        publisher = LoadPublisher(group, 0, 1, start_wait=0.0)
        publisher.publish(1, 2, 3, 4)
        assert (publisher.dropped, publisher.error) == (1, "can't start new thread")


def test_the_door_is_cheap(children: Any) -> None:
    heavy = "('zmq', 'msgspec', 'numpy', 'vllm', 'tokenspeed')"
    out = children.run(f"import sys, loadbox.engines; print([name for name in {heavy} if name in sys.modules])")
    assert out == "[]\n"
