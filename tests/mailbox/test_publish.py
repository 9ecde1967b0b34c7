"""What may be published, and that a refused publish changes nothing."""

from __future__ import annotations

import enum
import os
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

OLD = (3, 1, 70, 100)


class Index:
    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Colour(enum.IntEnum):
    RED = 5


@pytest.fixture
def pair(box: Any, group: str) -> Any:
    with box.MailboxWriter(group, 0, 2) as writer, box.MailboxReader(group, 0) as reader:
        writer.publish(*OLD)
        yield writer, reader


@pytest.mark.parametrize(
    "load",
    [
        (0, 0, 0, 1),
        (1, 2, 3, 4),
        (2**62, 2**63 - 1, 2**63 - 1, 2**63 - 1),
        (2**30 - 1, 2**30, 2**31, 2**32),
        (np.int64(4), np.uint8(200), np.int32(7), np.uint64(2**63 - 1)),
        (Index(9), 0, Colour.RED, 5),
        (256, 257, 100, 100),
    ],
)
def test_what_has_an_index_is_taken(pair: Any, load: tuple[Any, ...]) -> None:
    writer, reader = pair
    assert writer.publish(*load) is None
    got = reader.read()
    assert got == tuple(int(value.__index__()) for value in load)
    assert all(type(value) is int for value in got)
    assert (got.num_running, got.num_waiting, got.kv_active_pages, got.kv_total_pages) == got


BAD_TYPES = [True, False, 1.0, np.float64(1), np.True_, None, "1", b"1", [], object(), 1j]
BAD_VALUES = [-1, -(2**63), -(2**200), 2**63, 2**64, 2**200, np.int8(-1), np.uint64(2**63), Index(-1)]


@pytest.mark.parametrize("field", range(4))
@pytest.mark.parametrize("value", BAD_TYPES + BAD_VALUES, ids=lambda value: str(value).split(" object", 1)[0])
def test_the_rest_is_refused_and_the_old_value_stays(box: Any, pair: Any, field: int, value: Any) -> None:
    writer, reader = pair
    load: list[Any] = list(OLD)
    load[field] = value
    kind = TypeError if any(value is bad for bad in BAD_TYPES) else ValueError
    with pytest.raises(kind, match=box._check.FIELDS[field]):
        writer.publish(*load)
    assert reader.read() == OLD


def test_more_active_pages_than_there_are(pair: Any) -> None:
    writer, reader = pair
    with pytest.raises(ValueError, match="kv_active_pages is 101 of kv_total_pages 100"):
        writer.publish(1, 0, 101, 100)
    assert reader.read() == OLD


def test_total_zero_is_no_snapshot(box: Any, pair: Any) -> None:
    writer, reader = pair
    writer.publish(1, 0, 5, 0)
    assert reader.read() is None
    assert reader.state() is box.RankState.SILENT
    assert reader.age() is None


@pytest.mark.parametrize("arguments", [(), (1,), (1, 2, 3), (1, 2, 3, 4, 5)])
def test_too_few_and_too_many(pair: Any, arguments: tuple[int, ...]) -> None:
    writer, reader = pair
    with pytest.raises(TypeError):
        writer.publish(*arguments)
    with pytest.raises(TypeError):
        writer.publish(1, 2, 3, kv_total_pages=4)
    assert reader.read() == OLD


def test_an_index_that_raises(pair: Any) -> None:
    class Broken:
        def __index__(self) -> int:
            raise ZeroDivisionError

    writer, reader = pair
    with pytest.raises(ZeroDivisionError):
        writer.publish(1, Broken(), 1, 1)
    assert reader.read() == OLD


def test_an_index_that_closes_the_writer(box: Any, group: str) -> None:
    class Closer:
        def __index__(self) -> int:
            writer.close()
            return 1

    writer = box.MailboxWriter(group, 0)
    with pytest.raises(box.MailboxError, match="closed"):
        writer.publish(Closer(), 1, 1, 1)


@given(load=st.tuples(*[st.integers(-(2**70), 2**70) | st.integers(0, 100)] * 4))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_integers(pair: Any, load: tuple[int, int, int, int]) -> None:
    writer, reader = pair
    writer.publish(*OLD)
    good = all(0 <= value < 2**63 for value in load) and (load[3] == 0 or load[2] <= load[3])
    if good:
        writer.publish(*load)
        assert reader.read() == (load if load[3] else None)
    else:
        with pytest.raises(ValueError, match="mailbox keeps its old value"):
            writer.publish(*load)
        assert reader.read() == OLD


def test_closed_and_unopened(box: Any, group: str) -> None:
    writer = box.MailboxWriter(group, 0)
    writer.close()
    writer.close()
    with pytest.raises(box.MailboxError, match="it is closed"):
        writer.publish(1, 1, 1, 1)
    unopened = box.MailboxWriter.__new__(box.MailboxWriter)
    with pytest.raises(box.MailboxError, match="never opened"):
        unopened.publish(1, 1, 1, 1)


def test_a_failed_writer_cannot_publish(box: Any, group: str) -> None:
    class Kept(box.MailboxWriter):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            try:
                super().__init__(group, 0, start_wait=0.0)
            except box.MailboxInUse:
                pass

    with box.MailboxWriter(group, 0):
        second = Kept()
        with pytest.raises(box.MailboxError, match="never opened"):
            second.publish(1, 1, 1, 1)
        second.close()


def test_dropping_an_open_writer_warns(box: Any, group: str) -> None:
    writer = box.MailboxWriter(group, 0)
    writer.publish(*OLD)
    with pytest.warns(ResourceWarning, match="DEAD"):
        del writer
    with box.MailboxReader(group, 0, liveness_interval=0) as reader:
        assert reader.state() is box.RankState.DEAD
        assert reader.read() == OLD


def test_subclasses_may_override(box: Any, group: str) -> None:
    class Counting(box.MailboxWriter):  # type: ignore[misc,name-defined]
        count = 0

        def publish(self, *load: int) -> None:
            self.count += 1
            super().publish(*load)

    class Further(Counting):
        pass

    with Further(group, 0) as writer, box.MailboxReader(group, 0) as reader:
        writer.publish(*OLD)
        assert writer.count == 1
        assert reader.read() == OLD


def test_threads_never_tear(box: Any, group: str) -> None:
    """Four threads publish loads whose fields belong together; a reader sees no mixture and the sequence loses no step."""
    rounds = 20_000 if box.backend == "c" else 3_000
    stop = threading.Event()
    torn: list[Any] = []

    with box.MailboxWriter(group, 0) as writer, box.MailboxReader(group, 0) as reader:
        writer.publish(0, 0, 0, 1)

        def publish(base: int) -> None:
            for i in range(base, base + rounds):
                writer.publish(i, 2 * i, 3 * i, 3 * i + 1)

        def read() -> None:
            while not stop.is_set():
                n, twice, thrice, more = reader.read()
                if (twice, thrice, more) != (2 * n, 3 * n, 3 * n + 1):
                    torn.append((n, twice, thrice, more))

        threads = [threading.Thread(target=publish, args=(i * rounds,)) for i in range(4)]
        watcher = threading.Thread(target=read)
        watcher.start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stop.set()
        watcher.join()
        with open("/dev/shm" + writer.name, "rb") as file:
            seq = int.from_bytes(file.read()[128:136], "little")
    assert not torn
    assert seq == 2 * (4 * rounds + 2)  # no snapshot, 0, and all of theirs


def test_what_the_owner_sees_of_its_own(box: Any, group: str) -> None:
    with box.MailboxWriter(group, 0, 1) as writer:
        first, *load = writer._seen()
        assert load == [0, 0, 0, 0]
        for i in range(1, 6):
            writer.publish(i, 2, 3, 4)
            assert writer._seen() == (first + 2 * i, i, 2, 3, 4)
        with pytest.raises(ValueError, match="num_running"):
            writer.publish(-1, 2, 3, 4)
        assert writer._seen() == (first + 10, 5, 2, 3, 4)
        assert not writer._removed()
        os.unlink(f"/dev/shm{writer.name}")
        assert writer._removed()
        assert writer._seen() == (first + 10, 5, 2, 3, 4)
    assert writer._seen() is None
    assert not writer._removed()
