"""Readers are fed arbitrary pages: they give a state or a reason, both cores alike, and never a load that nobody could publish.

The pages have locks or not, and change under a reader that is attached already, as a writer gone mad would change them.
``LOADBOX_FUZZ=50`` tries fifty times as many.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadbox.mailbox import MailboxReader, MailboxWriter, _segment
from loadbox.reader import LoadReader, _core_py, _sources

TIMES = int(os.environ.get("LOADBOX_FUZZ", "1"))
EPOCHS = (1, 2, (1 << 62) - 1, 0x1234_5678)
ODD = [0, 1, 2, 3, 127, 128, 255, 4096, 65536, 1 << 31, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
MAGIC = int.from_bytes(b"LOADBOX\0", "little")

word = st.one_of(st.sampled_from(ODD), st.sampled_from(EPOCHS), st.integers(0, (1 << 64) - 1))
changes = st.lists(st.tuples(st.integers(0, 32), word), max_size=3)
locks = st.sets(st.sampled_from([0, *EPOCHS]))


def tried(count: int) -> settings:
    return settings(max_examples=count * TIMES, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@st.composite
def good(draw: st.DrawFn, kind: int) -> list[int]:
    """The words of a segment as somebody who keeps the rules might have left it, in the middle of a publish or not."""
    words = [0] * 512
    words[0:10] = [MAGIC, 1, 0, kind, 128, 0, draw(st.sampled_from([0, 1, 4])), 4242, 1, draw(st.sampled_from([1, 1, 2]))]
    if kind == 2:
        words[13], words[14] = draw(st.integers(1, 496)), draw(st.sampled_from(EPOCHS))
        words[16:24] = [draw(word) for _ in range(8)]
        return words
    words[16] = draw(st.integers(0, 9) | word)
    for at in (17, 24):
        total = draw(st.sampled_from([0, 100, 100, 100]))
        load = draw(st.tuples(*[st.integers(0, 100)] * 3))
        words[at : at + 6] = [*load, total, draw(st.integers(0, 1 << 40)), draw(st.sampled_from(EPOCHS))]
    return words


@st.composite
def page(draw: st.DrawFn, kind: int) -> bytes:
    """A good segment, one with some words changed, one cut short, or bytes of any kind."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=300)).ljust(draw(st.sampled_from([0, 8, 120, 128, 256, 4095, 4096, 8192])), b"\x5a")
    words = draw(good(kind))
    for at, value in draw(changes):
        words[at] = value
    return struct.pack("<512Q", *words)[: draw(st.sampled_from([4096] * 12 + [0, 7, 8, 127, 128, 240, 4095]))]


class Laid:
    """A name with bytes behind it, and the locks of a living owner."""

    def __init__(self, name: str) -> None:
        self.path = f"/dev/shm{name}"
        self._fd = -1

    def put(self, data: bytes, locked: set[int]) -> None:
        self.remove()
        self._fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        os.write(self._fd, data)
        for offset in locked:
            fcntl.fcntl(self._fd, 37, struct.pack("@hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0))

    def write(self, at: int, value: int) -> None:
        with mmap.mmap(self._fd, 4096) as memory, memoryview(memory).cast("Q") as words:
            words[at] = value

    def remove(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if os.path.lexists(self.path):
            os.unlink(self.path)


@pytest.fixture(scope="module")
def laid() -> Iterator[Callable[[str], Laid]]:
    made: list[Laid] = []

    def make(name: str) -> Laid:
        made.append(Laid(name))
        return made[-1]

    yield make
    for one in made:
        one.remove()


class Readers:
    """Both readers of one core, and what they say."""

    def __init__(self, box: Any, group: str) -> None:
        self.box = box
        self.one = box.MailboxReader(group, 0, liveness_interval=0)
        self.ranks = box.GroupReader(group, 1, liveness_interval=0)
        self.finding = box.GroupReader(group, liveness_interval=0)

    def say(self) -> tuple[Any, ...]:
        """What can be compared with another core: everything but the age, which is checked here."""
        state, load, age, epoch, reason = self.one.state(), self.one.read(), self.one.age(), self.one.epoch, self.one.reason
        rows = self.ranks.read()
        row = rows[0].item()
        assert age is None or 0 <= age < 1e10
        assert (state == self.box.RankState.REFUSED) == bool(reason), (state, reason)
        assert (load is None) <= (state not in (self.box.RankState.LIVE, self.box.RankState.STALLED))
        if load is not None:
            assert min(load) >= 0
            assert load[3] > 0
            assert load[2] <= load[3]
        assert row[8] == (row[7] in (2, 3))
        assert tuple(row[:4]) == (tuple(load) if row[8] else (0, 0, 0, 0))
        assert (row[7], row[5]) == (int(state), epoch % (1 << 64))
        self.finding.read()
        return state.name, load and tuple(load), age is None, epoch % (1 << 64), reason, row, self.ranks.reason(0)

    def close(self) -> None:
        for reader in (self.one, self.ranks, self.finding):
            reader.close()


@pytest.fixture(scope="module")
def place(laid: Callable[[str], Laid]) -> tuple[str, Laid]:
    group = f"t-{uuid.uuid4().hex[:16]}"
    return group, laid(f"/loadbox.{group}.0")


@tried(150)
@given(data=page(1), locked=locks, steps=st.lists(changes, max_size=5), again=page(1))
def test_readers_of_arbitrary_pages(
    twins: dict[str, Any], place: tuple[str, Laid], data: bytes, locked: set[int], steps: list[Any], again: bytes
) -> None:
    group, segment = place
    segment.put(data, locked)
    readers = [Readers(box, group) for box in twins.values()]
    try:
        for step in [None, *steps]:
            if step and len(data) >= 4096:
                for at, value in step:
                    segment.write(at, value)
            said = [reader.say() for reader in readers]
            assert said[0] == said[-1]
        segment.put(again, locked)  # another file under the name
        said = [reader.say() for reader in readers]
        assert said[0] == said[-1]
        segment.remove()
        said = [reader.say() for reader in readers]
        assert said[0] == said[-1]
        assert said[0][0] in ("ABSENT", "CLOSED")
    finally:
        for reader in readers:
            reader.close()


@tried(100)
@given(data=page(1), locked=locks)
def test_writers_of_arbitrary_pages(twins: dict[str, Any], place: tuple[str, Laid], data: bytes, locked: set[int]) -> None:
    """A writer takes it over and all is well, or refuses with a reason and leaves it as it was."""
    group, segment = place
    for box in twins.values():
        segment.put(data, locked)
        try:
            writer = box.MailboxWriter(group, 0, start_wait=0)
        except box.MailboxError:
            with open(segment.path, "rb") as file:
                assert file.read() == data
            continue
        with writer, box.MailboxReader(group, 0, liveness_interval=0) as reader:
            assert (reader.state().name, reader.read(), reader.epoch) == ("SILENT", None, writer.epoch)
            writer.publish(1, 2, 3, 4)
            assert (reader.state().name, reader.read()) == ("LIVE", (1, 2, 3, 4))


@tried(60)
@given(data=page(1) | page(2), locked=locks)
def test_cleaning_arbitrary_pages(place: tuple[str, Laid], data: bytes, locked: set[int]) -> None:
    group, segment = place
    segment.put(data, locked)
    why = _segment.clean(f"/loadbox.{group}.0")
    assert os.path.exists(segment.path) == (why is not None)
    if 0 in locked and len(data):
        assert why


def cores() -> list[Any]:
    try:
        from loadbox.reader import _core_c
    except ImportError:
        return [_core_py]
    return [_core_c, _core_py]


@tried(100)
@given(one=page(2), other=page(2), locked=locks, steps=st.lists(changes, max_size=3))
def test_views_with_arbitrary_boards(
    laid: Callable[[str], Laid], one: bytes, other: bytes, locked: set[int], steps: list[Any]
) -> None:
    """Whatever the other frontends' boards say, a rank is chosen, and both cores have the same sums."""
    group = f"t-{uuid.uuid4().hex[:16]}"
    boards = [laid(f"/loadbox.{group}.f.{i:016x}") for i in range(2)]
    merge = _sources.merge
    view = LoadReader(group, 4, board=False, seed=1)
    view._sources._wants_board = "auto"
    try:
        for board, data in zip(boards, (one, other), strict=True):
            board.put(data, locked)
        for step in [(), *steps]:
            if len(one) >= 4096:
                for at, value in step:
                    boards[0].write(at, value)
            tables = []
            view._sources._next_boards_ns = 0
            for core in cores():
                _sources.merge = core.merge
                view.loads()
                table = view._sources.view
                tables.append((list(table.in_flight), list(table.owed), list(table.unseen)))
                assert 0 <= view.choose("r") < 4
                view.finished("r")
            assert tables[0] == tables[-1]
            assert min(tables[0][0] + tables[0][1] + tables[0][2]) >= 0
    finally:
        _sources.merge = merge
        view.close()
        for board in boards:
            board.remove()


@tried(60)
@given(data=page(1), locked=locks, load=st.tuples(*[st.integers(0, 1 << 63)] * 4))
def test_a_view_of_arbitrary_pages(place: tuple[str, Laid], data: bytes, locked: set[int], load: Any) -> None:
    """The view never raises, and shows no load for a rank that has none."""
    group, segment = place
    segment.put(data, locked)
    with LoadReader(group, 2, board=False, seed=1) as view:
        for rank_load in view.loads():
            if rank_load.snapshot is not None:
                assert rank_load.rank == 0
                assert rank_load.source == "mailbox"
                assert 0 <= rank_load.snapshot.kv_active_pages <= rank_load.snapshot.kv_total_pages
        view.choose("r")
        view.finished("r")
        assert [rank_load.in_flight for rank_load in view.loads()] == [0, 0]
    segment.remove()
    with MailboxWriter(group, 0, start_wait=0) as writer, MailboxReader(group, 0, liveness_interval=0) as reader:
        good = max(load) < 1 << 63 and (load[3] == 0 or load[2] <= load[3])
        try:
            writer.publish(*load)
        except ValueError:
            assert not good
        else:
            assert good
        assert reader.read() == (load if good and load[3] else None)
