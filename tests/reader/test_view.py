"""The merged view: which source is believed for which rank, and how that changes without being told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import loadbox.reader
from loadbox.mailbox import LoadSnapshot, MailboxError, MailboxUnsupported, MailboxWriter, RankState, _seqlock
from loadbox.reader import LoadReader, NoRankAvailable, RankLoad, _core_py, _sources

WRITER = """
    import sys, time
    from loadbox.mailbox import MailboxWriter
    writer = MailboxWriter(sys.argv[1], int(sys.argv[2]), 2)
    writer.publish(3, 1, 40, 100)
    print("up", flush=True)
    sys.stdin.readline()
"""


def source(view: LoadReader, rank: int) -> tuple[str, RankState, LoadSnapshot | None]:
    load = view.loads()[rank]
    return load.source, load.state, load.snapshot


def test_the_door() -> None:
    assert loadbox.reader.__all__ == ["LoadReader", "NoRankAvailable", "RankLoad"]
    assert RankLoad._fields == ("rank", "snapshot", "source", "state", "age", "in_flight", "owed")


def test_nothing_is_known_at_first(group: str, core: ModuleType, view_of: Callable[..., LoadReader]) -> None:
    loads = view_of(group, 3).loads()
    assert loads == [RankLoad(rank, None, "none", RankState.ABSENT, None, 0, 0) for rank in range(3)]
    assert all(type(load) is RankLoad and type(load.state) is RankState for load in loads)


def test_a_mailbox_that_comes_late_takes_over(group: str, core: ModuleType, view_of: Callable[..., LoadReader], kit: Any) -> None:
    view = view_of(group, 2)
    assert source(view, 1) == ("none", RankState.ABSENT, None)
    view.choose("a", pinned=1)
    view.feed(kit.Batch.of(1, (9, 2, 5, 100)))
    assert source(view, 1) == ("piggyback", RankState.ABSENT, LoadSnapshot(9, 2, 5, 100))
    assert 0 <= view.loads()[1].age < 60
    with MailboxWriter(group, 1, 2) as writer:
        kit.until(lambda: view.loads()[1].state == RankState.SILENT)
        assert source(view, 1)[0] == "piggyback", "a silent mailbox says nothing yet"
        writer.publish(4, 0, 7, 100)
        assert source(view, 1) == ("mailbox", RankState.LIVE, LoadSnapshot(4, 0, 7, 100))
        load = view.loads()[1]
        assert type(load.snapshot) is LoadSnapshot
        assert load[5:] == (1, 1), "a dispatch from before the mailbox still counts"
        view.feed(kit.Batch.of(1, (8, 8, 8, 100)))
        assert source(view, 1)[2] == (4, 0, 7, 100), "the mailbox is the truth"
    assert source(view, 1) == ("none", RankState.CLOSED, None), "what was fed before the close is forgotten"
    view.feed(kit.Batch.of(1, (2, 1, 6, 100)))
    assert source(view, 1) == ("piggyback", RankState.CLOSED, LoadSnapshot(2, 1, 6, 100))
    assert source(view, 0) == ("none", RankState.ABSENT, None)


def test_a_killed_scheduler(group: str, core: ModuleType, view_of: Callable[..., LoadReader], kit: Any, children: Any) -> None:
    view = view_of(group, 2)
    child = children.start(WRITER, group, 0)
    assert child.stdout.readline() == "up\n"
    view.feed(kit.Batch.of(0, (1, 1, 1, 10)))
    kit.until(lambda: source(view, 0) == ("mailbox", RankState.LIVE, LoadSnapshot(3, 1, 40, 100)))
    assert view.choose("a", pinned=0) == 0
    child.send_signal(signal.SIGKILL)
    kit.until(lambda: source(view, 0) == ("none", RankState.DEAD, None))
    assert kit.spread(view, 6) == [0, 6], "nothing goes to the dead"
    with pytest.raises(NoRankAvailable, match=r"rank 0 of group .* is pinned, but it is DEAD"):
        view.choose("b", pinned=0)
    with pytest.raises(NoRankAvailable, match=r"none of the 2 ranks .*1 excluded; ended or declared gone: 0 DEAD"):
        view.choose("b", exclude=[1])
    assert kit.in_flight(view) == [1, 6], "what failed is not booked; what was sent is the caller's to finish"
    # Another life of it: what the former one had is lost, what the dead one's mailbox said is not shown again.
    child = children.start(WRITER, group, 0)
    assert child.stdout.readline() == "up\n"
    kit.until(lambda: source(view, 0) == ("mailbox", RankState.LIVE, LoadSnapshot(3, 1, 40, 100)))
    assert kit.in_flight(view) == [0, 6]
    view.finished("a")
    assert view.choose("a", pinned=0) == 0


def test_a_restart_between_two_looks(group: str, core: ModuleType, view_of: Callable[..., LoadReader], kit: Any) -> None:
    view = view_of(group, 2)
    with MailboxWriter(group, 0, 2) as writer:
        writer.publish(1, 0, 1, 10)
        kit.until(lambda: source(view, 0)[0] == "mailbox")
        for name in "abc":
            view.choose(name, pinned=0)
        view.first_token("a")
        view.feed(kit.Batch.of(0, (5, 5, 5, 10)))
    with MailboxWriter(group, 0, 2):
        kit.until(lambda: view.loads()[0].state == RankState.SILENT)
        assert source(view, 0) == ("none", RankState.SILENT, None)
        assert (kit.in_flight(view), kit.owed(view)) == ([0, 0], [0, 0])
        view.choose("d", pinned=0)
        for late in "abc":
            view.first_token(late)
            view.finished(late)
        view.feed(kit.Batch.of(0, (0, 0, 0, 0), a="stop", b="abort"))
        assert (kit.in_flight(view), kit.owed(view)) == ([1, 0], [1, 0]), "nothing resurrects, and nothing else goes"


def test_a_group_that_nobody_knows_is_told_once(
    group: str, view_of: Callable[..., LoadReader], kit: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A misspelt name looks like engines that are still to come."""

    def said() -> list[str]:
        return [message for message in caplog.messages if "nothing is known of group" in message]

    monkeypatch.setattr(_sources, "_PATIENCE_NS", 50_000_000)
    fed, late, lost = view_of(f"{group}-fed", 1), view_of(f"{group}-late", 1), view_of(f"{group}-lost", 1)
    fed.feed(kit.Batch.of(0, (1, 0, 1, 2)))
    with MailboxWriter(f"{group}-late", 0, 1):  # SILENT: nothing published, and yet it is there
        for view in (fed, late, lost):
            view.loads()
        kit.until(lambda: lost.loads() and said())
        time.sleep(0.2)
        for view in (fed, late, lost):
            view.loads()
    assert len(said()) == 1
    assert said()[0].startswith(f"nothing is known of group {group}-lost yet: no mailbox on this host and no batch; groups here: ")
    lost.feed(kit.Batch.of(0, (1, 0, 1, 2)))
    assert lost.loads()[0].source == "piggyback"


def test_unsupported_mailboxes(
    group: str, view_of: Callable[..., LoadReader], kit: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported() -> None:
        raise MailboxUnsupported("not safe on this machine")

    monkeypatch.setattr(_seqlock, "require_supported", unsupported)
    view = view_of(group, 2)
    assert "goes on without mailboxes: not safe on this machine" in caplog.text
    assert "goes on without a dispatch board" in caplog.text
    assert source(view, 0) == ("none", RankState.ABSENT, None)
    view.choose("a", pinned=0)
    view.feed(kit.Batch.of(0, (3, 1, 5, 100)))
    assert source(view, 0) == ("piggyback", RankState.ABSENT, LoadSnapshot(3, 1, 5, 100))
    assert view.choose("b") == 1
    with pytest.raises(MailboxUnsupported):
        view_of(group, 2, board=True)


def test_quiescence_of_a_piggybacked_rank(group: str, core: ModuleType, view_of: Callable[..., LoadReader], kit: Any) -> None:
    """With nothing of one's own in flight the stored queue counts are zero; the KV pages stay as reported."""
    view = view_of(group, 2)
    for name in "ab":
        view.choose(name, pinned=0)
    view.feed(kit.Batch.of(0, (2, 1, 50, 100), a="", b=""))
    assert source(view, 0)[2] == (2, 1, 50, 100)
    assert (kit.in_flight(view), kit.owed(view)) == ([2, 0], [0, 0])
    view.feed(kit.Batch.of(0, (2, 1, 60, 100), a="stop"))
    assert source(view, 0)[2] == (2, 1, 60, 100)
    view.feed(kit.Batch.of(0, (1, 0, 70, 100), b="length"))  # the terminal batch still counts what it ends
    assert source(view, 0)[2] == (0, 0, 70, 100)
    view.choose("c", pinned=0)
    assert source(view, 0)[2] == (0, 0, 70, 100), "a new dispatch does not bring the old counts back"
    view.feed(kit.Batch.of(0, (4, 4, 70, 100)))
    assert source(view, 0)[2] == (4, 4, 70, 100)
    view.finished("c")
    assert source(view, 0)[2] == (0, 0, 70, 100)
    view.feed(kit.Batch.of(0, (4, 4, 80, 100)))  # late
    assert source(view, 0)[2] == (0, 0, 80, 100)


def test_a_mailbox_rank_is_not_zeroed(group: str, view_of: Callable[..., LoadReader]) -> None:
    with MailboxWriter(group, 0, 1) as writer:
        writer.publish(6, 2, 10, 100)
        view = view_of(group, 1)
        view.choose("a")
        view.finished("a")
        assert source(view, 0)[2] == (6, 2, 10, 100)


@pytest.mark.parametrize(
    "load",
    [
        (1, 1, 1, 0),
        (-1, 0, 0, 9),
        (0, 0, 10, 9),
        (1.0, 0, 0, 9),
        (None, 0, 0, 9),
        (0, True, 0, 9),
        (0, 0, 0, 1 << 63),
        ("1", 0, 0, 9),
    ],
)
def test_loads_that_no_scheduler_has(
    group: str, view_of: Callable[..., LoadReader], kit: Any, load: tuple[Any, Any, Any, Any]
) -> None:
    view = view_of(group, 1)
    view.choose("a")
    view.choose("b")
    view.feed(kit.Batch.of(0, load, a=""))
    assert source(view, 0) == ("none", RankState.ABSENT, None), "unknown is never idle"
    view.feed(kit.Batch.of(0, (2, 0, 5, 9)))
    view.feed(kit.Batch.of(0, load, b=""))
    assert source(view, 0)[2] == (2, 0, 5, 9), "the last good one stands"
    assert kit.owed(view) == [0], "the tokens are not lost with the load"


def test_engine_indices(group: str, view_of: Callable[..., LoadReader], kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    view = view_of(group, 2, engine_index_base=10)
    view.choose("a", pinned=1)
    for stranger in (9, 12, 1):
        view.feed(kit.Batch.of(stranger, (1, 1, 1, 10), a="stop"))
    assert kit.in_flight(view) == [0, 1]
    assert [load.source for load in view.loads()] == ["none", "none"]
    assert caplog.text.count("batches of engine 9 are left out") == 1
    view.feed(kit.Batch.of(9))
    assert caplog.text.count("batches of engine 9 are left out") == 1
    view.feed(kit.Batch.of(11, (1, 0, 1, 10)))
    assert [load.source for load in view.loads()] == ["none", "piggyback"]
    view.feed(kit.Batch.of(10, a="stop"))
    assert kit.in_flight(view) == [0, 1], "another rank's word on our request does not count"
    view.feed(kit.Batch.of(11, a="stop", someone="stop"))
    assert kit.in_flight(view) == [0, 0]


def test_ranks_that_nobody_announced(group: str, core: ModuleType, view_of: Callable[..., LoadReader], kit: Any) -> None:
    view = view_of(group)
    assert view.loads() == []
    with pytest.raises(NoRankAvailable, match=r"no rank of group .* is known yet: give dp_size"):
        view.choose("a")
    with pytest.raises(NoRankAvailable, match="only 0 ranks"):
        view.choose("a", pinned=0)
    with MailboxWriter(group, 1) as one:
        one.publish(1, 0, 1, 10)
        kit.until(lambda: len(view.loads()) == 2)
        assert {view.choose(f"a{i}") for i in range(8)} == {0, 1}
        with MailboxWriter(group, 0, 4) as zero:
            zero.publish(0, 0, 1, 10)
            kit.until(lambda: len(view.loads()) == 4)
            assert sum(kit.in_flight(view)) == 8, "what was booked stays"
            assert source(view, 1)[0] == "mailbox"
            view.feed(kit.Batch.of(600, (1, 0, 1, 10)))
            assert len(view.loads()) == 601
            assert (sum(kit.in_flight(view)), sum(kit.owed(view))) == (8, 8)
            assert kit.on_the_host(view)[:2] == kit.in_flight(view)[:2]
            for i in range(8):
                view.finished(f"a{i}")
            assert sum(kit.in_flight(view)) == 0


def test_pinned_and_excluded(group: str, core: ModuleType, view_of: Callable[..., LoadReader], kit: Any) -> None:
    view = view_of(group, 4)
    assert [view.choose(f"p{i}", pinned=2) for i in range(5)] == [2] * 5
    assert kit.spread(view, 30, exclude={0, 2, 99, -1}) == [0, 15, 0, 15]
    for wrong in (4, -1):
        with pytest.raises(ValueError, match=rf"pinned is {wrong}, but group .* has the ranks 0 to 3"):
            view.choose("x", pinned=wrong)
    with pytest.raises(NoRankAvailable, match="pinned and excluded"):
        view.choose("x", pinned=1, exclude=[1])
    with pytest.raises(NoRankAvailable, match=r"none of the 4 ranks .* 4 excluded$"):
        view.choose("x", exclude=range(4))
    assert sum(kit.in_flight(view)) == 35
    assert view.choose("x") == 0, "an exclusion is for one call"


def test_an_id_in_flight(group: str, view_of: Callable[..., LoadReader], kit: Any) -> None:
    view = view_of(group, 2)
    view.choose("a", pinned=1)
    for options in ({}, {"pinned": 0}):
        with pytest.raises(ValueError, match="request 'a' is in flight on rank 1"):
            view.choose("a", **options)
    view.finished("a")
    view.finished("a")
    view.first_token("a")
    view.finished("never")
    assert view.choose("a", pinned=0) == 0
    assert (kit.in_flight(view), kit.owed(view)) == ([1, 0], [1, 0])


def test_a_rank_that_is_gone(group: str, core: ModuleType, view_of: Callable[..., LoadReader], kit: Any) -> None:
    view = view_of(group, 3)
    for i in range(9):
        view.choose(f"a{i}")
    view.feed(kit.Batch.of(1, (3, 0, 1, 10)))
    view.rank_gone(1)
    assert kit.in_flight(view) == [3, 0, 3]
    assert view.loads()[1].snapshot is None
    assert kit.spread(view, 12) == [6, 0, 6], "an empty rank would draw everything to it"
    view.rank_gone(1)
    view.feed(kit.Batch.of(1, (3, 0, 1, 10)))
    assert view.choose("b0") == 1, "a batch shows life"
    view.rank_gone(1)
    assert view.choose("b1", pinned=1) == 1, "and so does the caller's word"
    assert view.choose("b2") == 1
    view.rank_gone(1)
    with MailboxWriter(group, 1, 3) as writer:
        writer.publish(0, 0, 0, 10)
        kit.until(lambda: view.loads()[1].state == RankState.LIVE)
        assert view.choose("b3") == 1, "and so does a new life"
        view.rank_gone(1)
        writer.publish(0, 0, 0, 10)
        assert view.choose("b4") != 1, "but not the same one"
    for rank in range(3):
        view.rank_gone(rank)
    with pytest.raises(NoRankAvailable, match="declared gone"):
        view.choose("c")
    with pytest.raises(ValueError, match="rank is 3"):
        view.rank_gone(3)


def test_a_rank_not_seen_yet_may_be_gone(group: str, view_of: Callable[..., LoadReader], kit: Any) -> None:
    view = view_of(group)  # as many ranks as are seen: none so far
    view.rank_gone(2)
    assert view.loads() == []
    view.feed(kit.Batch.of(2, (3, 0, 1, 10)))
    assert view.choose("a", pinned=2) == 2
    for beyond in (-1, 65536):
        with pytest.raises(ValueError, match=f"^rank is {beyond}, "):
            view.rank_gone(beyond)


@pytest.mark.parametrize("pinned", [None, 1])
@pytest.mark.parametrize("bad", [1, "1", {"1"}, [None]], ids=repr)
def test_what_cannot_be_excluded(group: str, view_of: Callable[..., LoadReader], bad: Any, pinned: int | None) -> None:
    view = view_of(group, 2)
    if pinned is None or bad == 1:
        with pytest.raises(TypeError, match=r"^exclude must be a collection of ranks, as in exclude=\{0\}, not "):
            view.choose("a", pinned=pinned, exclude=bad)
        assert view.choose("a", exclude={1}) == 0, "nothing was booked"


@pytest.mark.parametrize("bad", [None, b"bytes", {"rids": []}], ids=repr)
def test_what_is_no_batch(group: str, view_of: Callable[..., LoadReader], bad: Any) -> None:
    with pytest.raises(TypeError, match=r"^feed takes a decoded batch, .* not (NoneType|bytes|dict)$"):
        view_of(group, 2).feed(bad)


def test_ages_and_stalls(group: str, core: ModuleType, view_of: Callable[..., LoadReader], kit: Any) -> None:
    with MailboxWriter(group, 0, 2) as busy, MailboxWriter(group, 1, 2) as idle:
        busy.publish(3, 0, 5, 10)
        idle.publish(0, 0, 5, 10)
        view = view_of(group, 2)
        first = [load.age for load in view.loads()]
        time.sleep(0.05)
        second = [load.age for load in view.loads()]
        assert all(b - a >= 0.05 and a >= 0 for a, b in zip(first, second, strict=True))
        busy.publish(3, 0, 5, 10)
        assert view.loads()[0].age < second[0]


def test_a_stalled_rank_is_usable_but_does_not_win(
    group: str, core: ModuleType, view_of: Callable[..., LoadReader], kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = _sources.GroupReader
    monkeypatch.setattr(_sources, "GroupReader", lambda group, size: real(group, size, stall_after=0.05))
    with MailboxWriter(group, 0, 2) as stalled, MailboxWriter(group, 1, 2) as busy:
        stalled.publish(1, 0, 1, 10)
        view = view_of(group, 2)
        kit.until(lambda: view.loads()[0].state == RankState.STALLED)
        assert source(view, 0) == ("mailbox", RankState.STALLED, LoadSnapshot(1, 0, 1, 10))
        busy.publish(4, 0, 1, 10)
        assert view.choose("a") == 1
        assert view.choose("b", pinned=0) == 0


def test_a_clock_that_is_not_ours(
    group: str, core: ModuleType, view_of: Callable[..., LoadReader], kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer in another time namespace: its times say nothing, so ages are bounds and no dispatch is erased too early."""
    monkeypatch.setattr(_sources, "time_ns_inode", lambda: 1)
    with MailboxWriter(group, 0, 1) as writer:
        writer.publish(1, 0, 1, 10)
        view = view_of(group, 1)
        assert view.loads()[0].age is None, "at first sight nothing is known of it"
        view.choose("a")
        before = time.monotonic()
        view.loads()
        time.sleep(0.02)
        writer.publish(1, 0, 1, 10)
        age = view.loads()[0].age
        assert 0.02 <= age <= time.monotonic() - before
        assert view._sources.inputs.unseen[0] == 0
        view.choose("b")
        view.loads()
        assert view._sources.inputs.unseen[0] == 1


def test_times_from_the_future(
    group: str, core: ModuleType, view_of: Callable[..., LoadReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    with MailboxWriter(group, 0, 1) as writer:
        view = view_of(group, 1)
        writer.publish(1, 0, 1, 10)
        now = time.monotonic_ns()
        monkeypatch.setattr(_sources, "monotonic_ns", lambda: now - 10**12)
        load = view.loads()[0]
        assert load.snapshot == (1, 0, 1, 10)
        assert load.age is None


def test_bad_arguments(group: str) -> None:
    for arguments in (("a/b", 2), (group, 0), (group, 70000)):
        with pytest.raises(ValueError, match="use"):
            LoadReader(*arguments)
    for arguments in ((3, 2), (group, 2.0), (group, True)):
        with pytest.raises(TypeError):
            LoadReader(*arguments)
    for options in ({"board": "yes"}, {"board": None}, {"chooser": "x"}):
        with pytest.raises(ValueError, match="use"):
            LoadReader(group, 2, **options)
    with pytest.raises(TypeError):
        LoadReader(group, 2, engine_index_base="0")
    assert not [name for name in os.listdir("/dev/shm") if group in name]


def test_after_close(group: str, kit: Any) -> None:
    with LoadReader(group, 2) as view:
        view.choose("a")
    view.close()
    for call in (view.loads, lambda: view.choose("b")):
        with pytest.raises(MailboxError, match="this view is closed"):
            call()
    view.feed(kit.Batch.of(0, a="stop"))
    view.first_token("a")
    view.finished("a")
    view.rank_gone(0)
    assert "closed" in repr(view)
    assert not [name for name in os.listdir("/dev/shm") if group in name]


def test_a_view_that_is_dropped_leaves_nothing(group: str, open_files: Callable[[], int]) -> None:
    view = LoadReader(group, 2)
    assert [name for name in os.listdir("/dev/shm") if group in name]
    descriptors = open_files()
    del view
    assert not [name for name in os.listdir("/dev/shm") if group in name]
    assert open_files() < descriptors


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 5), max_size=30), st.integers(0, 1000))
def test_the_cores_merge_alike(c_core: ModuleType, moves: list[int], seed: int) -> None:
    """The same history through both cores: the same rows, and the same choices."""
    name = f"t-merge-{os.getpid()}"
    with MailboxWriter(name, 0, 3) as writer, LoadReader(name, 3, seed=seed) as view, LoadReader(name, 3, seed=seed) as other:
        for step, move in enumerate(moves):
            if move == 0:
                writer.publish(step, step % 3, 1, 10)
            elif move == 1:
                view.feed(_batch(1, step))
            elif move == 2:
                view.finished(f"r{step - 2}")
                view.first_token(f"r{step - 1}")
            elif move == 3:
                other.choose(f"o{step}")
            else:
                view.choose(f"r{step}")
            view.loads()
            sources = view._sources
            ours, theirs = type(sources.view)(3), type(sources.inputs)(3)
            theirs.copy_from(sources.inputs)
            rows = sources._row_words
            words = (sources.words, sources._others.words, sources.view.now_ns, sources._last_ns)
            assert _sources.merge is c_core.merge
            assert _core_py.merge(ours.table, theirs.table, rows, *words) == 0
            assert ours.table == sources.view.table
            assert theirs.table == sources.inputs.table


def _batch(rank: int, step: int) -> Any:
    class Batch:
        engine_index = rank
        rids, output_ids, finished_reasons = (), (), ()
        num_running, num_waiting, kv_active_pages, kv_total_pages = step, 1, 2, 10

    return Batch()


@pytest.mark.parametrize("bad", [True, numpy.True_, 1.0, "1"], ids=repr)
def test_ranks_that_are_no_ints(group: str, view_of: Callable[..., LoadReader], bad: Any) -> None:
    view = view_of(group, 2)
    with pytest.raises(TypeError, match=r"^pinned must be an int, not "):
        view.choose("a", pinned=bad)
    with pytest.raises(TypeError, match=r"^rank must be an int, not "):
        view.rank_gone(bad)
    with pytest.raises(TypeError, match=r"^engine_index_base must be an int, not "):
        view_of(group, 2, engine_index_base=bad)
    assert [load.in_flight for load in view.loads()] == [0, 0]
