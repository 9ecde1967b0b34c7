"""The bookkeeping against a model that keeps everything, over random histories; and a million cycles."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loadbox.reader._ledger import Ledger
from loadbox.reader._view import NEVER_NS, Inputs

RANKS = 3
ids = st.sampled_from([f"r{i}" for i in range(12)])
ranks = st.integers(0, RANKS - 1)


def words(n: int) -> memoryview:
    return memoryview(bytearray(8 * n)).cast("Q")


class Histories(RuleBasedStateMachine):
    """Every event that can be, in any order, also twice and late."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.words = Inputs(RANKS), words(RANKS)
        self.ledger = Ledger(self.inputs, self.words)
        self.model: dict[str, dict[str, Any]] = {}
        self.reported = [NEVER_NS] * RANKS
        self.now = 0

    @rule(request=ids, rank=ranks, life=st.sampled_from([0, 0, 5]), later=st.integers(0, 3))
    def dispatch(self, request: str, rank: int, life: int, later: int) -> None:
        self.now += later
        if request in self.model:
            assert self.ledger.rank_of(request) == self.model[request]["rank"]
            return
        assert self.ledger.rank_of(request) == -1
        self.ledger.book(request, rank, life, self.now)
        self.model[request] = {"rank": rank, "life": life, "at": self.now, "owed": 1, "seen": False}

    @rule(request=ids)
    def first_token(self, request: str) -> None:
        self.ledger.first_token(request)
        if request in self.model:
            self.model[request]["owed"] = 0

    @rule(request=ids)
    def finish(self, request: str) -> None:
        emptied = self.ledger.finished(request)
        gone = self.model.pop(request, None)
        left = [entry for entry in self.model.values() if gone and entry["rank"] == gone["rank"]]
        assert emptied == (gone["rank"] if gone and not left else -1)

    @rule(rank=ranks, back=st.integers(-2, 5))
    def report(self, rank: int, back: int) -> None:
        """A report of any time, also one that is older than the last."""
        known = 0
        for entry in self.model.values():
            if entry["rank"] == rank and entry["at"] <= self.now - back and not entry["seen"]:
                entry["seen"] = True
                known += 1
        assert self.ledger.reported(rank, self.now - back) == known

    @rule(rank=ranks)
    def restart(self, rank: int) -> None:
        self.ledger.new_life(rank)
        for request, entry in list(self.model.items()):
            if entry["rank"] == rank and entry["life"]:
                del self.model[request]
            elif entry["rank"] == rank:
                entry["life"] = 6

    @rule(rank=ranks)
    def drop(self, rank: int) -> None:
        self.ledger.drop(rank)
        self.model = {request: entry for request, entry in self.model.items() if entry["rank"] != rank}

    @rule()
    def move(self) -> None:
        self.inputs, self.words = Inputs(RANKS), words(RANKS + 2)
        self.ledger.move(self.inputs, self.words)

    @invariant()
    def counts(self) -> None:
        for rank in range(RANKS):
            mine = [entry for entry in self.model.values() if entry["rank"] == rank]
            assert self.ledger.in_flight(rank) == len(mine)
            assert self.words[rank] == len(mine) | sum(entry["owed"] for entry in mine) << 32
            unseen = [entry["at"] for entry in mine if not entry["seen"]]
            assert self.inputs.unseen[rank] == len(unseen)
            assert not unseen or self.inputs.oldest_ns[rank] == min(unseen)
        assert self.ledger.requests.keys() == self.model.keys()

    def teardown(self) -> None:
        for request in [f"r{i}" for i in range(12)]:
            self.ledger.finished(request)
        self.model.clear()
        self.counts()
        assert_empty(self.ledger)


def assert_empty(ledger: Ledger) -> None:
    kept = [ledger.requests, *ledger._unseen, *ledger._seen, *ledger._strays]
    assert not any(kept)
    assert not any(ledger._owed)
    assert not any(ledger._words)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


def cycles(count: int, seed: int = 11) -> None:
    """Dispatches, first tokens, finishes, aborts and duplicates; some ranks report, one never does."""
    rng = random.Random(seed)
    inputs, board = Inputs(8), words(8)
    ledger = Ledger(inputs, board)
    flying: list[str] = []
    for i in range(count):
        request, rank = str(i), rng.randrange(8)
        ledger.book(request, rank, i & 1, i)
        flying.append(request)
        kind = rng.random()
        if kind < 0.6:
            ledger.first_token(request)
        if kind < 0.1:
            ledger.first_token(request)
            ledger.finished(request)
            ledger.finished(request)
        if kind > 0.98 and rank:
            ledger.reported(rank, i - 3)
        if len(flying) > 40:
            ledger.finished(flying.pop(rng.randrange(len(flying))))
        assert len(ledger.requests) <= 41
    assert 0 < sum(word & 0xFFFFFFFF for word in board) <= 41, f"seed {seed}"
    for request in flying:
        ledger.finished(request)
        ledger.finished(request)
        ledger.first_token(request)
    assert_empty(ledger)


def test_two_hundred_thousand_cycles_return_to_zero() -> None:
    cycles(200_000)


@pytest.mark.slow
def test_a_million_cycles_return_to_zero() -> None:
    cycles(1_000_000, seed=12)


def test_the_rate_is_averaged_over_a_second() -> None:
    ledger = Ledger(Inputs(1), words(1))
    assert ledger.rate(0) == 0.0
    for i in range(1, 2001):  # 200 a second for 10 s
        ledger.book(str(i), 0, 0, i * 5_000_000)
    assert ledger.rate(10 * 10**9) == pytest.approx(200, rel=0.01)
    assert ledger.rate(11 * 10**9) == pytest.approx(200 / math.e, rel=0.01)
    assert ledger.rate(10 * 10**9) == pytest.approx(200 / math.e, rel=0.01), "time does not go back"
    assert ledger.rate(10**12) == 0.0


def test_a_report_knows_what_was_sent_until_then() -> None:
    inputs = Inputs(1)
    ledger = Ledger(inputs, words(1))
    for request, sent_ns in (("a", 5), ("b", 6), ("c", 6), ("d", 7)):
        ledger.book(request, 0, 0, sent_ns)
    assert [ledger.reported(0, at) for at in (4, 5, 5, 6, 9)] == [0, 1, 0, 2, 1]
    assert ledger.in_flight(0) == 4
