"""A replay's books, the figures made of them, and who gets which request."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loadbox.cli.demo import _reports
from loadbox.cli.demo._children import Line
from loadbox.cli.demo._figures import Figures, percentile
from loadbox.cli.demo._frontend import mean_age
from loadbox.cli.demo._observe import Observer
from loadbox.cli.demo._options import ROUND_ROBIN, Options
from loadbox.cli.demo._phase import Phase
from loadbox.cli.demo._reports import EngineReport, FrontendReport, PhaseReport
from loadbox.cli.demo._summary import print_summary
from loadbox.cli.demo._trace import Request, split
from loadbox.mailbox import LoadSnapshot, RankState
from loadbox.piggyback import BatchTokenIDOutSlim
from loadbox.reader import RankLoad

STOP = "length"
REFUSED = "abort"


def batch(**rows: tuple[int, str]) -> BatchTokenIDOutSlim:
    n = len(rows)
    ids, reasons = [[0] * tokens for tokens, _ in rows.values()], [reason for _, reason in rows.values()]
    return BatchTokenIDOutSlim(list(rows), ids, reasons, [0] * n, [0] * n, [0] * n, [[]] * n, [[]] * n)


def test_the_books_of_a_replay() -> None:
    phase = Phase(total=5, speed_up=10.0)
    for rid, rank in (("a", 0), ("b", 1), ("c", 1), ("d", 0)):
        phase.dispatched(rid, rank, due=1.0)
    phase.undeliverable()
    phase.outputs(batch(a=(1, ""), b=(1, ""), z=(1, STOP)), now=1.5)
    phase.outputs(batch(a=(1, STOP), d=(0, REFUSED)), now=2.0)
    phase.rank_gone(1)
    phase.rank_gone(1)
    phase.outputs(batch(a=(1, STOP), b=(1, STOP), c=(1, STOP)), now=9.0)
    assert phase.in_flight == 0
    report = phase.report()
    assert report.ttft == [5.0, 5.0], "in the trace's time, from when it was due; the refused one has none"
    assert (report.total, report.sent, report.served, report.lost, report.refused, report.unanswered) == (5, 5, 1, 3, 1, 0)
    assert phase.report().ttft == [], "each time is reported once"


def test_what_is_in_flight_at_the_end_stays_unanswered() -> None:
    phase = Phase(total=1, speed_up=4.0)
    phase.decided(0.5)
    phase.dispatched("a", 0, due=0.0)
    phase.close()
    report = phase.report()
    assert (report.unanswered, report.ttft, report.ages) == (1, [], [2.0])


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(n) for n in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([3.0], 0.99), percentile([], 0.5)) == (50, 99, 3, None)


def test_figures_add_up_and_keep_their_times_in_order() -> None:
    one, other = Figures(total=3, sent=2, served=1, lost=1), Figures(total=1, sent=1, refused=1)
    one.add_times([3.0, 1.0], [0.1])
    one.add_times([2.0], [])
    other.add_times([1.5], [0.05])
    both = Figures.sum_of([one, other])
    assert (both.total, both.sent, both.ended, both.done) == (4, 3, 3, False)
    assert (one.ttft, both.ttft, both.ages) == ([1.0, 2.0, 3.0], [1.0, 1.5, 2.0, 3.0], [0.05, 0.1])


def load(rank: int, source: Any, running: int, age: float | None) -> RankLoad:
    return RankLoad(rank, LoadSnapshot(running, 0, running, 8), source, RankState.LIVE, age, 0, 0)


def test_an_idle_mailbox_counts_as_fresh_and_an_idle_batch_does_not() -> None:
    unknown = RankLoad(2, None, "none", RankState.ABSENT, None, 0, 0)
    assert mean_age([unknown]) is None
    assert mean_age([load(0, "mailbox", 3, 0.5), load(1, "mailbox", 0, 9.0), unknown]) == 0.25
    assert mean_age([load(0, "piggyback", 0, 2.0), load(1, "piggyback", 1, 1.0), load(2, "mailbox", 1, None)]) == 1.5


def test_every_request_goes_to_one_frontend_and_the_same_one_with_the_same_seed() -> None:
    trace = [Request(float(n), n + 1, 1) for n in range(400)]
    parts = split(trace, 4, seed=7)
    assert sorted(request for part in parts for request in part) == trace
    assert all(part == sorted(part) for part in parts)
    assert all(60 <= len(part) <= 140 for part in parts)
    assert parts == split(trace, 4, seed=7) != split(trace, 4, seed=8)
    assert split(trace, 1, seed=0) == [trace]


def options(group: str, **changes: Any) -> Options:
    defaults: dict[str, Any] = {"group": group, "ranks": 1, "frontends": 3, "remote": 1, "choosers": ("cold-set", ROUND_ROBIN)}
    return Options(**{**defaults, "board": True, "speed_up": 1.0, "seed": 0, "trace": "t", "rate": 1.0, **changes})


def report(frontend: int, *phases: PhaseReport) -> Line:
    line = _reports.encode(FrontendReport(frontend, None, list(phases)))
    return Line(None, line, error=False)  # type: ignore[arg-type] # only words for people name their child


def test_frontends_are_shown_by_kind_and_together(group: str) -> None:
    observer = Observer(options(group), [])
    try:
        for frontend, ttft in ((0, 1.0), (1, 3.0), (2, 2.0)):
            phase = PhaseReport(2, sent=2, served=1, ttft=[ttft], ages=[ttft / 10])
            assert observer.take(report(frontend, phase, PhaseReport(2))) is None
        observer.take(report(0, PhaseReport(2, sent=2, served=2, ttft=[5.0]), PhaseReport(2)))
        first, second = observer.replays()
        rows = {name: (figures.served, figures.ttft, one_source) for name, figures, one_source in first.rows()}
        assert rows == {
            "cold-set": (4, [1.0, 2.0, 3.0, 5.0], False),
            "  same host, mailbox": (3, [1.0, 3.0, 5.0], True),
            "  remote, piggyback": (1, [2.0], True),
        }
        assert (second.title, second.all.total, second.all.sent, second.all.done) == ("round robin", 6, 0, False)
        observer.frontend_gone(2)
        first, second = observer.replays()
        assert (first.all.lost, first.all.ended, second.all.lost) == (1, 5, 2), "what it had and what it was still to get"
        observer.take(report(2, PhaseReport(2, sent=2, served=2), PhaseReport(2)))
        first, second = observer.replays()
        assert (first.all.lost, first.all.ended, second.all.lost) == (0, 5, 2), "a report that was under way when it died"
    finally:
        observer.close()


def test_replays_of_unequal_pace_are_not_to_be_compared(group: str) -> None:
    def told(rank: int, modelled: float, spent: float) -> Line:
        return Line(None, _reports.encode(EngineReport(rank, 1, 0, 1, 0, modelled, spent)), error=False)  # type: ignore[arg-type]

    def lines(observer: Observer) -> str:
        console = Console(width=400, file=io.StringIO())
        print_summary(console, observer)
        return console.file.getvalue()  # type: ignore[attr-defined]

    observer = Observer(options(group, frontends=1, remote=0), [])
    try:
        observer.take(report(0, PhaseReport(2, sent=1), PhaseReport(2)))
        observer.take(told(0, 1.0, 1.0))
        observer.take(told(1, 1.0, 1.04))
        assert [replay.slowness for replay in observer.replays()] == [1.02, None]
        observer.take(report(0, PhaseReport(2, sent=2, served=2), PhaseReport(2, sent=1)))
        observer.take(told(0, 2.0, 2.1))
        assert observer.replays()[1].slowness == pytest.approx(1.1)
        assert "Not to be compared" not in lines(observer)
        observer.take(told(1, 2.0, 2.34))
        assert "Not to be compared: iterations took 1.02 and 1.20 times as long as modelled" in lines(observer)
    finally:
        observer.close()


def test_one_kind_of_frontend_needs_no_rows_of_its_own(group: str) -> None:
    for remote in (0, 3):
        observer = Observer(options(group, remote=remote, board=False), [])
        assert [(name, one_source) for name, _, one_source in observer.replays()[0].rows()] == [("cold-set, no board", True)]
        observer.close()


def test_words_are_passed_on_with_their_speaker(group: str) -> None:
    class Speaker:
        name = "rank 0"

    observer = Observer(options(group), [])
    assert observer.take(Line(Speaker(), b"oh", error=True)) == "rank 0: oh"  # type: ignore[arg-type]
    assert observer.take(Line(Speaker(), b"{}", error=False)) == "rank 0: {}"  # type: ignore[arg-type]
    observer.close()


def test_the_last_frontends_are_the_remote_ones() -> None:
    told = options("g", frontends=4, remote=2, directory="/d")
    assert [told.is_remote(number) for number in range(4)] == [False, False, True, True]
    assert (told.address(1), told.remote_group, Path(told.address(0)[6:]).name) == ("ipc:///d/f1", "g-remote", "f0")
