"""The rule itself, on figures that were worked out by hand, and the two cores against each other."""

from __future__ import annotations

from collections import Counter
from random import Random
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadbox.reader import _core_py
from loadbox.reader._view import INPUT_COLUMNS, NEVER_NS, VIEW_COLUMNS, View

NOW = 10_000_000_000
MS = 1_000_000


def view(*ranks: dict[str, int], own_rate: float = 0.0) -> View:
    """Ranks with a fresh mailbox, but for what is said; ``own`` is ``in_flight`` if it is not."""
    shown = View(len(ranks))
    shown.now_ns, shown.own_rate = NOW, own_rate
    for rank, given_ in enumerate(ranks):
        known = given_.get("usable", 1)
        row = {
            "usable": 1,
            "mailbox": known,
            "reported_ns": NOW if known else NEVER_NS,
            "own": given_.get("in_flight", 0),
            **given_,
        }
        for column, value in row.items():
            getattr(shown, column)[rank] = value
    return shown


def picks(core: ModuleType, shown: View, draws: int = 400, seed: int = 1) -> Counter[int]:
    rng = Random(seed)
    return Counter(core.cold_set(shown.table, shown.now_ns, shown.own_rate, rng.random(), rng.random()) for _ in range(draws))


def test_the_least_loaded_rank_is_chosen(core: ModuleType) -> None:
    assert picks(core, view({"running": 3}, {"running": 2}, {"running": 4})).keys() == {1}


@pytest.mark.parametrize(
    ("light", "heavy"),
    [
        ({"running": 4}, {"running": 1, "waiting": 1}),  # 4 against 1 + 1 + 3
        ({"running": 4}, {"unseen": 2, "in_flight": 2}),  # 4 against 2 + 3 * 2
        ({"running": 4}, {"owed": 1, "in_flight": 2}),  # 4 against 2 + 3
        ({"running": 4}, {"in_flight": 5}),  # what is in flight is a floor
        ({"waiting": 2}, {"waiting": 1, "unseen": 2}),  # 8 against 3 + 9
        ({"waiting": 2, "owed": 2, "in_flight": 2}, {"waiting": 2, "owed": 3, "in_flight": 2}),  # 2 + 6 against 2 + 9
    ],
)
def test_what_makes_a_load(core: ModuleType, light: dict[str, int], heavy: dict[str, int]) -> None:
    assert picks(core, view(heavy, light)).keys() == {1}
    assert picks(core, view(light, heavy)).keys() == {0}


def test_ties_are_even(core: ModuleType) -> None:
    got = picks(core, view(*[{"running": 2}] * 8), draws=8000)
    assert set(got) == set(range(8))
    assert all(850 < n < 1150 for n in got.values()), got


def test_unseen_requests_of_others_widen_the_choice(core: ModuleType) -> None:
    """20 reported, 4 of them own, 100 a second, 10 ms old: M = 4 * 100 * 0.01 = 4; the nine coldest ranks are cold."""
    old = {"reported_ns": NOW - 10 * MS, "running": 2}
    shown = view(*[{**old, "running": 2, "in_flight": int(i < 4)} for i in range(10)], own_rate=100.0)
    got = picks(core, shown, 4000)
    assert set(got) == set(range(4, 10)), "own dispatches decide among the cold"
    alone = view(*[{**old, "running": i, "in_flight": i} for i in range(1, 6)], own_rate=1000.0)
    assert picks(core, alone).keys() == {0}, "nobody else is about: no doubt"


@pytest.mark.parametrize(
    ("m", "cold"), [(0.0, 1), (0.4, 1), (0.5, 2), (0.99, 2), (1.0, 3), (1.5, 4), (2.0, 5), (100.0, 6), (1e300, 6)]
)
def test_how_many_ranks_are_cold(core: ModuleType, m: float, cold: int) -> None:
    """Loads 10 to 15, one request of one's own on the fullest; 74 foreign ones, 250 ms: M = 74 * rate / 4."""
    ranks = [{"running": 10 + i, "reported_ns": NOW - 250 * MS} for i in range(6)]
    ranks[5].update(in_flight=1)
    shown = view(*ranks, own_rate=4 * m / 74 * (1 + 1e-12))
    got = picks(core, shown, 600)
    # Among the cold ranks, those with nothing of one's own are tied; of two tied ones the emptier wins, so the fullest never does.
    free = min(cold, 5)
    assert set(got) == set(range(max(1, free - 1)))


def test_ages_are_capped_and_idle_mailboxes_are_fresh(core: ModuleType) -> None:
    """With 0.5 s at most, M is 9 * 0.05 * 0.5 = 0.225; with an uncapped hour everything would be cold."""
    busy = [
        {"running": 5, "reported_ns": NOW - 3_600_000 * MS},
        {"running": 4, "in_flight": 1, "reported_ns": NOW - 3_600_000 * MS},
    ]
    assert picks(core, view(*busy, own_rate=0.05)).keys() == {1}
    assert picks(core, view(*busy, own_rate=0.2)).keys() == {0}, "M is 0.8: both are cold, and the other has nothing of ours"
    ahead = [{**rank, "reported_ns": NOW + 5_000 * MS} for rank in busy]
    assert picks(core, view(*ahead, own_rate=0.2)).keys() == {0}, "a report from the future is not fresh"


@pytest.mark.parametrize(("mailbox", "chosen"), [(1, set(range(6))), (0, {7})])
def test_an_idle_mailbox_is_fresh_and_an_idle_piggyback_is_not(core: ModuleType, mailbox: int, chosen: set[int]) -> None:
    """Six idle ranks that reported 9 s ago and have one of ours each: load 1.  Two that reported 0.1 s ago: loads 4 and 5.

    Two foreign requests to seven of ours, 100 a second.  Fresh: a mean age of 25 ms, M = 0.7, one rank more is cold.  Not fresh:
    0.4 s, M = 11, all are cold and the last one, without any of ours, is taken.
    """
    idle = {"in_flight": 1, "mailbox": mailbox, "reported_ns": NOW - 9_000 * MS}
    busy = {"running": 5, "reported_ns": NOW - 100 * MS}
    shown = view(*[idle] * 6, {**busy, "running": 4, "in_flight": 1}, busy, own_rate=100.0)
    assert set(picks(core, shown)) == chosen


def test_nothing_of_ones_own_means_no_doubt(core: ModuleType) -> None:
    ranks = [{"running": 10 + i, "reported_ns": NOW - 400 * MS} for i in range(4)]
    assert picks(core, view(*ranks, own_rate=1e6)).keys() == {0}


def test_the_board_explains_foreign_requests(core: ModuleType) -> None:
    """The same reports, once with the others' dispatches on the board: then nothing is unexplained, and the choice is exact."""
    old = NOW - 100 * MS
    alone = [{"running": 6, "in_flight": 1, "reported_ns": old}, {"running": 5, "in_flight": 2, "reported_ns": old}]
    assert picks(core, view(*alone, own_rate=100.0)).keys() == {0}
    board = [
        {"running": 6, "in_flight": 6, "own": 1, "reported_ns": old},
        {"running": 5, "in_flight": 5, "own": 2, "reported_ns": old},
    ]
    assert picks(core, view(*board, own_rate=100.0)).keys() == {1}


def test_unknown_ranks_never_win_by_being_unknown(core: ModuleType) -> None:
    unknown = {"usable": 0}
    assert picks(core, view(unknown, {}, unknown, {})).keys() == {1, 3}, "an idle rank that is known is better"
    assert picks(core, view(unknown, {"running": 50}, {"running": 40, "waiting": 9})).keys() == {1}
    # A STALLED rank's old numbers count, but not in its favour.
    assert picks(core, view({"usable": 0, "running": 1}, {"running": 3})).keys() == {1}


def test_unknown_ranks_get_their_share(core: ModuleType) -> None:
    """With equal foreign load an unknown rank is given requests as soon as the known ones have one more of ours."""
    shown = view({"usable": 0}, {"running": 6, "in_flight": 2}, {"running": 5, "in_flight": 1, "unseen": 1, "owed": 1})
    # 6, 5 + 1 + 3 = 9; foreign 4 and 5, on average 5 when rounded up, and 1 more: 6 for the unknown one, which has nothing of ours.
    assert picks(core, shown).keys() == {0}
    everywhere = picks(core, view(*[{"usable": 0}] * 5), 2000)
    assert set(everywhere) == set(range(5))
    assert picks(core, view(*[{"usable": 0, "in_flight": int(i != 3)} for i in range(5)])).keys() == {3}


def test_only_allowed_ranks_are_chosen(core: ModuleType) -> None:
    shown = view({}, {"running": 9, "allowed": 1}, {"running": 8}, {"running": 9})
    shown.allowed[0] = shown.allowed[2] = 0
    assert picks(core, shown).keys() == {1, 3}
    for rank in range(4):
        shown.allowed[rank] = 0
    assert picks(core, shown).keys() == {-1}
    assert picks(core, View(0)).keys() == {-1}


@pytest.mark.parametrize("draws", [(1.0, 0.0), (0.0, 1.0), (-0.1, 0.0), (float("nan"), 0.0)])
def test_bad_draws(core: ModuleType, draws: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="draws"):
        core.cold_set(View(2).table, 0, 0.0, *draws)


def test_huge_reports_do_no_harm(core: ModuleType) -> None:
    huge = (1 << 63) - 1
    shown = view({"running": huge, "waiting": huge}, {"running": 5, "in_flight": 1}, {"waiting": huge}, own_rate=1e9)
    shown.reported_ns[0] = -(1 << 62)
    assert picks(core, shown).keys() <= {0, 1, 2}
    shown.own[1] = 0
    assert picks(core, shown).keys() == {1}


counts = st.one_of(st.integers(0, 4), st.integers(0, 3000), st.sampled_from([0, 1 << 31, (1 << 32) + 5, (1 << 63) - 1]))
small = st.integers(0, 5)
flag = st.sampled_from([1, 1, 1, 0])
row = st.tuples(
    counts, counts, st.just(0), st.just(0), st.one_of(st.integers(NOW - 10**9, NOW + 10**6), st.just(NEVER_NS)),
    st.integers(0, 9), small, small, st.integers(0, 9), flag, flag, flag,
)  # fmt: skip
unit = st.floats(0, 1, exclude_max=True)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(row, max_size=60) | st.lists(row, max_size=6), st.floats(0, 1e4) | st.floats(0, 1), unit, unit)
def test_the_twins_decide_alike(c_core: ModuleType, rows: list[tuple[int, ...]], rate: float, first: float, second: float) -> None:
    shown = View(len(rows))
    for rank, words in enumerate(rows):
        for column, word in zip(VIEW_COLUMNS, words, strict=True):
            getattr(shown, column)[rank] = word
    arguments = (shown.table, NOW, rate, first, second)
    assert c_core.cold_set(*arguments) == _core_py.cold_set(*arguments)


def test_more_ranks_than_fit_on_the_stack(c_core: ModuleType) -> None:
    """From 257 ranks on the C core works in memory that it allocates."""
    rng = Random(9)
    for n in (255, 256, 257, 1024):
        shown = view(
            *[{"running": rng.randrange(9), "in_flight": rng.randrange(4), "reported_ns": NOW - 99 * MS} for _ in range(n)]
        )
        for rate in (0.0, 3.0, 30.0, 300.0, 3000.0, 1e9):
            draws = rng.random(), rng.random()
            assert c_core.cold_set(shown.table, NOW, rate, *draws) == _core_py.cold_set(shown.table, NOW, rate, *draws)


def test_the_columns_are_the_same(core: ModuleType) -> None:
    assert (core.view_columns, core.input_columns) == (VIEW_COLUMNS, INPUT_COLUMNS)


def test_wrong_arguments(core: ModuleType) -> None:
    wrong: list[tuple[Any, ...]] = [(), (View(1).table,), (None, 0, 0.0, 0.0, 0.0)]
    for arguments in wrong:
        with pytest.raises(TypeError):
            core.cold_set(*arguments)
