"""The routing benchmark's model: conservation, C and Python to the last bit, the same seed the same result."""

from __future__ import annotations

import importlib
import json
import math
import random
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "routing"


def _load(name: str) -> ModuleType:
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


rank_model, rank_core, workload, simulation = (_load(name) for name in ("rank_model", "rank_core", "workload", "simulation"))
policies, intervals, scenarios, frontend = (_load(name) for name in ("policies", "intervals", "scenarios", "frontend"))
report = _load("report")

RankParams, PythonRanks = rank_model.RankParams, rank_model.PythonRanks
FIRST_TOKEN, FINISHED = rank_model.FIRST_TOKEN, rank_model.FINISHED

needs_compiler = pytest.mark.skipif(rank_core.library() is None, reason="there is no C compiler")


def _history(seed: int) -> tuple[dict[str, Any], list[tuple[float, int, int, int, int]]]:
    """A small random server and requests: (time, rank, frontend, prompt, output)."""
    rng = random.Random(seed)
    params = RankParams(
        chunk_tokens=rng.choice([8, 64, 512]),
        max_running=rng.choice([2, 5, 64]),
        kv_tokens=rng.choice([320, 1000, 5000]),
        page_tokens=rng.choice([1, 4, 16]),
        publish_early=rng.random() < 0.3,
    )
    server = {"ranks": rng.randint(1, 4), "frontends": rng.randint(1, 3), "params": params}
    requests, at = [], 0.0
    for _ in range(rng.randint(1, 60)):
        at += rng.choice([0.0, rng.random() * 0.05])
        place = rng.randrange(server["ranks"]), rng.randrange(server["frontends"])
        requests.append((at, *place, rng.randint(1, 200), rng.randint(1, 80)))
    return server, requests


def _make(kind: Any, server: dict[str, Any], count: int) -> Any:
    return kind(server["ranks"], server["frontends"], count, server["params"], rare_every=3)


@needs_compiler
@pytest.mark.parametrize("seed", range(60))
def test_c_equals_python(seed: int) -> None:
    server, requests = _history(seed)
    ours, theirs = (_make(kind, server, len(requests)) for kind in (rank_core.CRanks, PythonRanks))
    for request, (at, rank, front, prompt, output) in enumerate(requests):
        assert ours.advance(at) == theirs.advance(at)
        for look in ("mailbox", "rare", "totals"):
            assert np.array_equal(getattr(ours, look)(), getattr(theirs, look)()), (look, at)
        assert np.array_equal(ours.piggyback(front, at - 0.001), theirs.piggyback(front, at - 0.001))
        for ranks in (ours, theirs):
            ranks.submit(rank, request, front, at + 0.001, prompt, output)
    assert ours.advance(math.inf) == theirs.advance(math.inf)
    assert ours.totals() == theirs.totals()
    ours.close()


def test_some_histories_preempt() -> None:
    """Otherwise the comparison above says nothing of preemption."""
    preempted = 0
    for seed in range(60):
        server, requests = _history(seed)
        ranks = _make(PythonRanks, server, len(requests))
        for request, (at, rank, front, prompt, output) in enumerate(requests):
            ranks.submit(rank, request, front, at, prompt, output)
        ranks.advance(math.inf)
        preempted += any(row[1] for row in ranks.totals())
    assert preempted >= 5


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_and_no_limit_is_passed(seed: int) -> None:
    server, requests = _history(seed)
    params = server["params"]
    ranks = _make(PythonRanks, server, len(requests))
    arrived, tokens = {}, {FIRST_TOKEN: {}, FINISHED: {}}
    sent = 0
    for step in range(4000):
        now = step * 0.01
        while sent < len(requests) and requests[sent][0] <= now:
            at, rank, front, prompt, output = requests[sent]
            ranks.submit(rank, sent, front, at, prompt, output)
            arrived[sent] = at
            sent += 1
        for event in ranks.advance(now):
            assert event.request not in tokens[event.kind], "a token came twice"
            assert event.at > arrived[event.request]
            tokens[event.kind][event.request] = event.at
        mailbox = ranks.mailbox()
        assert (mailbox["running"] <= params.max_running).all()
        assert (mailbox["running"] >= 0).all()
        assert (mailbox["waiting"] >= 0).all()
        assert (mailbox["pages"] >= 0).all()
        assert (mailbox["pages"] <= params.kv_pages).all()
        # Every request is in exactly one place: running, waiting or on its way, or finished.
        assert sum(row[3] + row[4] for row in ranks.totals()) == sent - len(tokens[FINISHED])
    assert tokens[FIRST_TOKEN].keys() == tokens[FINISHED].keys() == set(range(len(requests)))
    assert all(tokens[FIRST_TOKEN][request] <= tokens[FINISHED][request] for request in tokens[FINISHED])
    assert all(row[2:] == (params.kv_pages, 0, 0) for row in ranks.totals()), "pages or requests were left"
    mailbox = ranks.mailbox()
    assert not mailbox["running"].any()
    assert not mailbox["waiting"].any()
    assert not mailbox["pages"].any()


def test_one_request_by_hand() -> None:
    """Two chunks of prefill and two tokens more, each iteration's time by the formula."""
    params = RankParams(chunk_tokens=10)
    ranks = PythonRanks(1, 1, 1, params)
    ranks.submit(0, 0, 0, 1.0, 15, 3)
    events = ranks.advance(10.0)
    chunks = sum(
        params.base_s + params.prefill_s * n + params.attention_s * n * (before + n / 2) for n, before in ((10, 0), (5, 10))
    )
    decodes = sum(params.base_s + params.decode_s + params.context_s * context for context in (15, 16))
    assert [(event.request, event.kind) for event in events] == [(0, FIRST_TOKEN), (0, FINISHED)]
    assert events[0].at == pytest.approx(1.0 + chunks)
    assert events[1].at == pytest.approx(1.0 + chunks + decodes)


def test_a_request_that_fits_nowhere_is_refused() -> None:
    ranks = rank_core.make_ranks(1, 1, 1, RankParams(kv_tokens=160))
    with pytest.raises(ValueError, match="does not fit into a rank of 160 KV tokens"):
        ranks.submit(0, 0, 0, 0.0, 150, 11)
    with pytest.raises(ValueError, match="at least 1"):
        ranks.submit(0, 0, 0, 0.0, 150, 0)
    ranks.close()


def test_the_piggyback_reaches_only_those_whose_tokens_it_carries() -> None:
    ranks = PythonRanks(1, 2, 2, RankParams())
    ranks.submit(0, 0, 0, 0.0, 100, 50)
    ranks.submit(0, 1, 1, 0.005, 100, 2)
    ranks.advance(0.0115)  # one iteration has ended: the first token of request 0 alone
    assert ranks.piggyback(0, 0.0115)["at"][0] > 0
    assert ranks.piggyback(1, 0.0115)["at"][0] == -1
    # It was sampled before the queue was looked at; the mailbox was written after.
    assert ranks.piggyback(0, 0.0115)["running"][0] == 1
    assert ranks.mailbox()["running"][0] == 2
    ranks.advance(10.0)
    assert ranks.piggyback(1, 10.0)[["running", "waiting"]][0].tolist() == (0, 0), "the edge to idleness was not told"


@pytest.mark.parametrize("arrivals", ["overlaid", "squeezed", "poisson"])
@pytest.mark.parametrize("trace", list(workload.TRACES))
def test_workloads_are_real_requests_at_the_chosen_rate(trace: str, arrivals: str) -> None:
    made = [
        workload.make_workload(
            trace, requests=300, ranks=4, frontends=3, utilisation=0.8, params=RankParams(), seed=5, arrivals=arrivals
        )
        for _ in range(2)
    ]
    assert made[0] == made[1]
    load = made[0]
    assert {(row.prompt, row.output) for row in workload.read_trace(trace)} >= set(zip(load.prompt, load.output, strict=True))
    assert load.arrival_s[0] == 0.0
    assert load.arrival_s == sorted(load.arrival_s)
    assert 299 / load.arrival_s[-1] == pytest.approx(0.8 * 4 * load.capacity)
    assert set(load.frontend) == {0, 1, 2}


def test_traces_are_whole() -> None:
    assert {name: len(workload.read_trace(name)) for name in workload.TRACES} == {"chat": 19366, "code": 8819, "mooncake": 12031}


@pytest.mark.parametrize("name", list(policies.POLICIES))
def test_the_same_seed_gives_the_same_result(name: str) -> None:
    setting = simulation.Setting(4, 3)
    load = workload.make_workload("chat", requests=250, ranks=4, frontends=3, utilisation=0.8, params=setting.rank, seed=1)
    one, other = (simulation.simulate(setting, load, policies.POLICIES[name].make(setting, "a seed")) for _ in range(2))
    assert one == other
    assert 0 < one.ttft_p50 < one.ttft_p99
    assert one.ttft_p50 < one.e2e_mean < one.busy_end_s


@needs_compiler
def test_simulations_agree_on_both_models(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = simulation.Setting(3, 2)
    load = workload.make_workload("code", requests=150, ranks=3, frontends=2, utilisation=0.8, params=setting.rank, seed=1)
    in_c = simulation.simulate(setting, load, policies.POLICIES["board"].make(setting, "1"))
    monkeypatch.setattr(simulation, "make_ranks", PythonRanks)
    assert simulation.simulate(setting, load, policies.POLICIES["board"].make(setting, "1")) == in_c


def test_the_board_is_exact() -> None:
    """With it every frontend sees all that is in flight; when all has been served, every word is zero again."""
    setting = simulation.Setting(4, 3)
    load = workload.make_workload("chat", requests=200, ranks=4, frontends=3, utilisation=0.8, params=setting.rank, seed=2)
    policy = policies.POLICIES["board"].make(setting, "1")
    sent = [0]
    for one in policy._frontends:
        others = [words.tolist() for words in one.others]
        assert len(others) == 2
    choose = policy.choose

    def counted(world: Any, front: int, request: int) -> int:
        chosen = int(choose(world, front, request))
        sent[0] += 1
        view = policy._frontends[front]._view
        words = [one.words[rank] for one in policy._frontends for rank in range(4)]
        assert sum(view.in_flight) + 1 == sum(word & 0xFFFFFFFF for word in words)
        return chosen

    policy.choose = counted
    simulation.simulate(setting, load, policy)
    assert sent[0] == 200
    assert not any(any(one.words.tolist()) for one in policy._frontends)


def test_own_choices_stay_level_without_any_report() -> None:
    one = frontend.Frontend(8, "own", 100, random.Random(1))
    counts = [0] * 8
    for request in range(64):
        counts[one.choose(request, 0.001 * request)] += 1
    assert counts == [8] * 8


def test_intervals() -> None:
    values = [10.0, 12.0, 9.0, 13.0]
    found = intervals.interval(values)
    assert found.mean == 11.0
    assert found.half == pytest.approx(3.182 * statistics.stdev(values) / 2, rel=1e-3)
    assert math.isnan(intervals.interval([1.0]).half)
    ratio = intervals.paired_ratio([1.0, 2.0, 4.0], [2.0, 4.0, 8.0])
    assert ratio == pytest.approx((0.5, 0.5, 0.5))
    assert intervals.percentile([0.0, 1.0, 2.0, 3.0], 0.5) == 1.5
    assert intervals.percentile([0.0, 1.0], 1.0) == 1.0


def test_a_small_plan_is_reported() -> None:
    plan = scenarios.Plan((scenarios.Scenario("code", 4, 2, 200),), ("own", "board", "oracle"), 3)
    shown: list[dict[str, Any]] = []
    results = scenarios.run(plan, shown.append)
    assert results["scenarios"] == shown
    assert [len(shown[0]["policies"][name]["ttft_p50"]) for name in plan.policies] == [3, 3, 3]
    rows = report.summary(shown)
    assert len(rows) == 1
    assert rows[0]["ttft_p50_verdict"] in ("wins", "level", "loses")
    assert report.scenario_table(shown[0]).row_count == 3
    assert report.summary_table(rows).row_count == 1
    read = json.loads(report.to_json({**results, "summary": rows}))
    assert read.keys() == {"versions", "parameters", "scenarios", "summary"}
    assert read["scenarios"][0]["policies"]["own"]["ttft_p50"] == pytest.approx(shown[0]["policies"]["own"]["ttft_p50"], abs=1e-6)
    assert "NaN" not in report.to_json({"scenarios": [{"values": [math.nan]}]})
    assert report.verdict(intervals.Ratio(0.9, 0.8, 0.95)) == "wins"
    assert report.verdict(intervals.Ratio(0.9, 0.8, 1.05)) == "level"
    assert report.verdict(intervals.Ratio(1.2, 1.1, 1.3)) == "loses"


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    target = tmp_path / "new" / "routing.json"
    chosen = ["--quick", "--trace", "code", "--frontends", "4", "--policy", "own", "--policy", "board", "--seeds", "2"]
    done = subprocess.run(
        [sys.executable, str(FOLDER), *chosen, "--json", str(target)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "code, 8 ranks, 4 frontends: 2000 requests, seeds 1, 2" in done.stdout
    assert "With four frontends and more" in done.stdout
    results = json.loads(target.read_text())
    assert results["parameters"]["utilisation"] == 0.8
    assert results["scenarios"][0]["seeds"] == [1, 2]
    refused = subprocess.run([sys.executable, str(FOLDER), "--ranks", "7"], capture_output=True, text=True, timeout=200)
    assert refused.returncode == 2
    assert "no scenario fits these options" in refused.stderr


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, which only `make bench-routing-full` installs")
    results = json.loads((FOLDER.parent / "results" / "routing.json").read_text())["scenarios"]
    _load("plot").draw(results, tmp_path / "one.svg")
    _load("plot").draw(results, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert "Mooncake conversation" in (tmp_path / "one.svg").read_text()
