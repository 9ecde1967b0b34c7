"""The other choosers: each by its own rule, none by a rank's number, none for a rank's being unknown."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from loadbox.reader import LoadReader
from loadbox.reader._chooser import CHOOSERS, make_chooser
from loadbox.reader._view import View


def view(*ranks: dict[str, int]) -> View:
    shown = View(len(ranks))
    for rank, given in enumerate(ranks):
        for column, value in {"usable": 1, "mailbox": 1, "reported_ns": 0, "own": given.get("in_flight", 0), **given}.items():
            getattr(shown, column)[rank] = value
    return shown


def picks(name: str, shown: View, draws: int = 300) -> Counter[int]:
    chooser, rng = make_chooser(name), Random(5)
    return Counter(chooser.pick(shown, rng) for _ in range(draws))


@pytest.mark.parametrize("name", CHOOSERS)
def test_ties_are_even(name: str) -> None:
    got = picks(name, view(*[{"running": 1}] * 5), 2500)
    assert set(got) == set(range(5))
    assert all(400 < n < 600 for n in got.values()), got


@pytest.mark.parametrize("name", CHOOSERS)
def test_only_allowed_ranks(name: str) -> None:
    shown = view(*[{}] * 6)
    for rank in (0, 2, 5):
        shown.allowed[rank] = 0
    assert set(picks(name, shown)) == {1, 3, 4}
    for rank in (1, 3, 4):
        shown.allowed[rank] = 0
    assert set(picks(name, shown)) == {-1}
    assert make_chooser(name).pick(View(0), Random(1)) == -1


@pytest.mark.parametrize("name", sorted(CHOOSERS.keys() - {"own", "round-robin"}))
def test_an_unknown_rank_never_wins_for_that(name: str) -> None:
    got = picks(name, view({"usable": 0}, {"running": 30, "waiting": 2}, {"running": 29, "waiting": 2}))
    assert got[0] == 0 or (name == "p2c" and got[0] < got[2]), got
    assert set(picks(name, view(*[{"usable": 0}] * 4), 400)) == {0, 1, 2, 3}, "at a cold start all get their share"


def test_own_looks_at_nothing_else() -> None:
    assert picks("own", view({"in_flight": 2}, {"running": 99, "in_flight": 9, "own": 1})).keys() == {1}


def test_least_is_the_snapshot_alone() -> None:
    assert picks("least", view({"running": 5}, {"running": 2, "waiting": 2, "in_flight": 9, "unseen": 9})).keys() == {1}


def test_vllm_weighs_waiting_fourfold() -> None:
    assert picks("vllm", view({"running": 7}, {"waiting": 2})).keys() == {0}
    assert picks("vllm", view({"running": 9}, {"waiting": 2})).keys() == {1}
    assert picks("vllm", view({"running": 7}, {"waiting": 1, "unseen": 1})).keys() == {0}


def test_smg_weighs_a_full_cache() -> None:
    full = {"running": 4, "waiting": 2, "kv_active": 75, "kv_total": 100}  # 6 + 2 * 6 * 0.25 = 9
    assert picks("smg", view(full, {"running": 10})).keys() == {0}
    assert picks("smg", view(full, {"running": 8})).keys() == {1}
    assert picks("smg", view({"running": 1, "in_flight": 5}, {"running": 4})).keys() == {1}


def test_power_of_two_takes_the_better_of_two() -> None:
    got = picks("p2c", view({"running": 1}, {"running": 2}, {"running": 3}, {"running": 4}), 6000)
    # Of the six pairs rank 0 wins three, rank 1 two, rank 2 one.
    assert got[3] == 0
    assert abs(got[0] - 3000) < 200
    assert abs(got[1] - 2000) < 200


def test_round_robin_goes_round() -> None:
    chooser, shown, rng = make_chooser("round-robin"), view(*[{}] * 4), Random(3)
    first = chooser.pick(shown, rng)
    assert [chooser.pick(shown, rng) for _ in range(7)] == [(first + i) % 4 for i in range(1, 8)]
    shown.allowed[(first + 8) % 4] = 0
    assert chooser.pick(shown, rng) == (first + 9) % 4


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="no chooser 'best': use one of cold-set, "):
        LoadReader("group", 2, chooser="best")
    with pytest.raises(ValueError, match="no chooser"):
        make_chooser([])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CHOOSERS)
def test_each_serves_a_view(name: str, group: str) -> None:
    with LoadReader(group, 3, chooser=name, seed=1) as reader:
        assert {reader.choose(str(i)) for i in range(40)} == {0, 1, 2}
