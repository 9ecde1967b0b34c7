"""Whole views over histories: bursts, frozen snapshots, cold starts, lost ranks, late reports."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loadbox.mailbox import MailboxWriter, RankState
from loadbox.reader import LoadReader, NoRankAvailable


@pytest.fixture
def writers(group: str) -> Any:
    made = [MailboxWriter(group, rank, 8) for rank in range(8)]
    yield made
    for writer in made:
        writer.close()


def level(counts: list[int]) -> int:
    return max(counts) - min(counts)


@pytest.mark.parametrize("load", [(0, 0), (6, 0), (6, 3)])
@pytest.mark.parametrize("board", [True, False])
def test_a_frozen_snapshot(
    group: str, core: ModuleType, view_of: Callable[..., LoadReader], writers: Any, kit: Any, load: tuple[int, int], board: bool
) -> None:
    """64 requests with nothing heard in between: spread within one."""
    for writer in writers:
        writer.publish(*load, 10, 100)
    view = view_of(group, 8, board=board)
    for burst in range(1, 9):
        kit.spread(view, 8, f"{burst}-")
        assert level(kit.in_flight(view)) <= 1
    assert kit.in_flight(view) == [8] * 8


def test_uneven_ranks_are_levelled(
    group: str, core: ModuleType, view_of: Callable[..., LoadReader], writers: Any, kit: Any
) -> None:
    """Ranks that this view has loaded unevenly, 0 to 7 requests, are filled up to one level."""
    view = view_of(group, 8)
    pins: list[int | None] = [rank for rank in range(8) for _ in range(rank)]
    for i, pinned in enumerate(pins + [None] * 31):
        rank = view.choose(str(i), pinned=pinned)
        view.first_token(str(i))
        writers[rank].publish(kit.in_flight(view)[rank], 0, 10, 100)
    assert sum(kit.in_flight(view)) == 59
    assert level(kit.in_flight(view)) <= 1


def test_a_burst_longer_than_the_report_interval(
    group: str, core: ModuleType, view_of: Callable[..., LoadReader], writers: Any, kit: Any
) -> None:
    """Reports come in the middle of the burst, each of what had arrived three requests earlier: none erases a later dispatch."""
    for writer in writers:
        writer.publish(0, 0, 10, 100)
    view, arrived = view_of(group, 8), [0] * 8
    on_the_way: list[int] = []
    for i in range(160):
        on_the_way.append(view.choose(str(i)))
        if len(on_the_way) > 3:
            arrived[on_the_way.pop(0)] += 1
        rank = i * 5 % 8
        writers[rank].publish(0, arrived[rank], 10, 100)
        assert level(kit.in_flight(view)) <= 1, f"after {i + 1} requests"


def test_piggybacks_do_not_erase_what_is_on_the_way(
    group: str, core: ModuleType, view_of: Callable[..., LoadReader], kit: Any
) -> None:
    view = view_of(group, 4)
    for i in range(40):
        view.choose(str(i))
        view.feed(kit.Batch.of(i % 4, (0, 0, 10, 100)))  # says idle, whatever was sent
        assert level(kit.in_flight(view)) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_a_cold_start(group: str, core: ModuleType, view_of: Callable[..., LoadReader], kit: Any, seed: int) -> None:
    view = view_of(group, 16, seed=seed)
    order = [view.choose(str(i)) for i in range(32)]
    assert sorted(order[:16]) == sorted(order[16:]) == list(range(16))
    assert order[:16] != sorted(order[:16])


def test_ties_do_not_favour_a_rank(group: str, view_of: Callable[..., LoadReader], writers: Any) -> None:
    for writer in writers:
        writer.publish(0, 0, 10, 100)
    view, first = view_of(group, 8), [0] * 8
    for i in range(4000):
        first[view.choose(str(i))] += 1
        view.finished(str(i))
    assert all(380 < n < 620 for n in first), first


def test_a_queue_behind_an_empty_batch(group: str, view_of: Callable[..., LoadReader], writers: Any, kit: Any) -> None:
    """Running 0 with a long queue is a loaded rank; page totals that differ are no matter; total 0 is no snapshot."""
    for rank, writer in enumerate(writers):
        writer.publish(3, 0, 5, 10 * (rank + 1))
    writers[2].publish(0, 9, 5, 77)
    writers[5].publish(0, 0, 0, 0)
    view = view_of(group, 8)
    loads = view.loads()
    assert [load.snapshot[3] for load in loads if load.snapshot] == [10, 20, 77, 40, 50, 70, 80]
    assert (loads[5].snapshot, loads[5].source, loads[5].state) == (None, "none", RankState.SILENT)
    got = kit.spread(view, 12)
    assert got[2] == 0
    assert got[5] <= 2, "unknown is not idle"


class Lives(RuleBasedStateMachine):
    """One view over ranks that publish, die, close, come back and speak late, against a model of what is in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.group = f"t-lives-{random.SystemRandom().getrandbits(60):x}"
        self.view = LoadReader(self.group, 3, seed=1)
        # Every look asks for the files anew, so that what the rules do is seen at once.
        self.view._sources._reader.close()
        from loadbox.mailbox import GroupReader

        self.view._sources._reader = GroupReader(self.group, 3, liveness_interval=0.0)
        self.writers: dict[int, MailboxWriter] = {}
        self.sent: dict[str, tuple[int, int]] = {}
        self.number = 0

    def epoch(self, rank: int) -> int:
        return self.writers[rank].epoch if rank in self.writers else 0

    @rule(rank=st.integers(0, 2))
    def start(self, rank: int) -> None:
        if rank in self.writers:
            self.writers.pop(rank).close()
        self.view.loads()
        self.writers[rank] = MailboxWriter(self.group, rank, 3)
        self.view.loads()
        epoch = self.epoch(rank)
        self.sent = {name: (to, epoch if to == rank else life) for name, (to, life) in self.sent.items() if to != rank or not life}

    @rule(rank=st.integers(0, 2))
    def close(self, rank: int) -> None:
        if rank in self.writers:
            self.writers.pop(rank).close()
        self.view.loads()

    @rule(rank=st.integers(0, 2), running=st.integers(0, 9), waiting=st.integers(0, 9))
    def publish(self, rank: int, running: int, waiting: int) -> None:
        if rank in self.writers:
            self.writers[rank].publish(running, waiting, 1, 9)
            load = self.view.loads()[rank]
            assert (load.source, load.snapshot) == ("mailbox", (running, waiting, 1, 9))

    @rule(pinned=st.sampled_from([None, None, 0, 1, 2]))
    def choose(self, pinned: int | None) -> None:
        self.number += 1
        name = str(self.number)
        try:
            rank = self.view.choose(name, pinned=pinned)
        except NoRankAvailable:
            return
        assert pinned in (None, rank)
        self.sent[name] = (rank, self.epoch(rank))

    @rule(back=st.integers(0, 12))
    def first_token(self, back: int) -> None:
        self.view.first_token(str(self.number - back))

    @rule(back=st.integers(0, 12))
    def finish(self, back: int) -> None:
        self.view.finished(str(self.number - back))
        self.sent.pop(str(self.number - back), None)

    @rule(
        rank=st.integers(0, 2),
        back=st.integers(0, 12),
        reason=st.sampled_from(["", "stop", "abort"]),
        total=st.sampled_from([0, 9]),
    )
    def feed(self, rank: int, back: int, reason: str, total: int) -> None:
        name = str(self.number - back)

        class Batch:
            engine_index = rank
            rids, output_ids, finished_reasons = (name,), ((1,),), (reason,)
            num_running, num_waiting, kv_active_pages, kv_total_pages = 5, 5, 5, total

        self.view.feed(Batch())
        if reason and self.sent.get(name, (None,))[0] == rank:
            del self.sent[name]

    @rule(rank=st.integers(0, 2))
    def gone(self, rank: int) -> None:
        self.view.rank_gone(rank)
        self.sent = {name: place for name, place in self.sent.items() if place[0] != rank}

    @invariant()
    def agree(self) -> None:
        for rank, load in enumerate(self.view.loads()):
            assert load.in_flight == sum(to == rank for to, _ in self.sent.values())
            assert 0 <= load.owed <= load.in_flight
            assert (load.snapshot is None) == (load.source == "none") == (not (load.snapshot and load.snapshot[3]))
            if load.source == "mailbox":
                assert load.state in (RankState.LIVE, RankState.STALLED)
            if load.source == "piggyback" and not load.in_flight:
                assert load.snapshot[:2] == (0, 0)

    def teardown(self) -> None:
        for number in range(self.number + 1):
            self.view.finished(str(number))
        assert [(load.in_flight, load.owed) for load in self.view.loads()] == [(0, 0)] * 3
        for writer in self.writers.values():
            writer.close()
        self.view.close()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def cycles(view: LoadReader, count: int, kit: Any) -> None:
    rng = random.Random(3)
    flying: list[str] = []
    for i in range(count):
        request = str(i)
        rank = view.choose(request)
        flying.append(request)
        kind = rng.random()
        if kind < 0.3:
            view.feed(kit.Batch.of(rank, (1, 0, 1, 10), **{request: ""}))
        elif kind < 0.5:
            view.first_token(request)
        elif kind < 0.6:
            view.finished(request)
            view.finished(request)
            view.feed(kit.Batch.of(rank, (1, 0, 1, 10), **{request: "abort"}))
        if len(flying) > 30:
            view.finished(flying.pop(rng.randrange(30)))
    for request in flying:
        view.finished(request)
    assert all((load.in_flight, load.owed) == (0, 0) for load in view.loads())
    assert not any(view._sources.words)


def test_many_cycles_return_to_zero(group: str, view_of: Callable[..., LoadReader], kit: Any) -> None:
    cycles(view_of(group, 8), 20_000, kit)


@pytest.mark.slow
def test_a_million_cycles_return_to_zero(group: str, view_of: Callable[..., LoadReader], kit: Any) -> None:
    cycles(view_of(group, 8), 1_000_000, kit)


def test_threads_share_a_view(group: str, view_of: Callable[..., LoadReader], kit: Any) -> None:
    view, errors = view_of(group, 8), []

    def work(name: int) -> None:
        try:
            for i in range(800):
                request = f"{name}-{i}"
                rank = view.choose(request)
                view.feed(kit.Batch.of(rank, (1, 1, 1, 10), **{request: ""}))
                if i % 7 == 0:
                    view.loads()
                view.finished(request)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert kit.in_flight(view) == kit.owed(view) == [0] * 8
