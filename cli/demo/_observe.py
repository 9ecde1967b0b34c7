"""What is to be shown: the mailboxes as this process reads them, and what the children report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from loadbox.cli.demo import _reports
from loadbox.cli.demo._children import Child, Line
from loadbox.cli.demo._figures import Figures
from loadbox.cli.demo._options import Options
from loadbox.cli.demo._reports import EngineReport, FrontendReport
from loadbox.mailbox import GroupReader, RankState

__all__ = ["Observer", "Picture", "RankRow", "Replay"]

_RATE_WINDOW_S = 0.8


@dataclass(frozen=True)
class RankRow:
    """One rank: what its mailbox says (numbers only if they are usable), and its iterations a second of real time."""

    rank: int
    pid: int
    state: RankState
    load: tuple[int, int, int, int] | None
    age_s: float | None
    iterations_a_second: float | None


@dataclass(frozen=True)
class Replay:
    """One replay of the arrivals: the figures of all frontends, and of each kind of frontend if there are two."""

    title: str
    all: Figures
    kinds: list[tuple[str, Figures]]
    slowness: float | None = None
    """How many times as long as modelled its iterations took; None before the first."""

    def rows(self) -> Iterator[tuple[str, Figures, bool]]:
        """The rows of a table: a name, figures, and whether their ages are of one source."""
        yield self.title, self.all, not self.kinds
        for name, figures in self.kinds:
            yield f"  {name}", figures, True


@dataclass(frozen=True)
class Picture:
    """One moment of the run."""

    options: Options
    elapsed_s: float
    rows: list[RankRow]
    replays: list[Replay]


class Observer:
    """Collects reports and reads the mailboxes, like any third process on this host may."""

    def __init__(self, options: Options, ranks: list[Child]) -> None:
        self.engines: dict[int, EngineReport] = {}
        self.frontends: dict[int, FrontendReport] = {}
        """The last report of each."""
        self._options = options
        self._figures = [[Figures() for _ in range(options.frontends)] for _ in options.choosers]
        self._paces = [[0.0, 0.0] for _ in options.choosers]  # of the iterations in each replay: seconds modelled, and spent
        self._gone: set[int] = set()
        self._ranks = ranks
        self._start = time.monotonic()
        self._reader = GroupReader(options.group, options.ranks)
        self._rows = self._reader.read()
        self._marks: dict[int, tuple[float, int]] = {}
        self._rates: dict[int, float] = {}

    def take(self, line: Line) -> str | None:
        """Take in a child's line; words for people come back."""
        if not line.error:
            try:
                report = _reports.decode(line.data)
            except msgspec.DecodeError:
                pass
            else:
                if isinstance(report, FrontendReport):
                    self._take_frontend(report)
                else:
                    self._take_engine(report)
                return None
        return f"{line.child.name}: {line.data.decode(errors='replace')}"

    def _take_frontend(self, report: FrontendReport) -> None:
        self.frontends[report.frontend] = report
        for parts, phase in zip(self._figures, report.phases, strict=True):
            figures = parts[report.frontend]
            figures.total, figures.sent, figures.served = phase.total, phase.sent, phase.served
            figures.lost, figures.refused, figures.unanswered = phase.lost, phase.refused, phase.unanswered
            figures.add_times(phase.ttft, phase.ages)
        if report.frontend in self._gone:
            self.frontend_gone(report.frontend)

    def _take_engine(self, report: EngineReport) -> None:
        before = self.engines.get(report.rank)
        pace = self._paces[self._running()]
        pace[0] += report.modelled_s - (before.modelled_s if before else 0.0)
        pace[1] += report.spent_s - (before.spent_s if before else 0.0)
        self.engines[report.rank] = report
        now = time.monotonic()
        then, iterations = self._marks.setdefault(report.rank, (now, report.iterations))
        if now - then >= _RATE_WINDOW_S:
            self._rates[report.rank] = (report.iterations - iterations) / (now - then)
            self._marks[report.rank] = (now, report.iterations)

    def _running(self) -> int:
        """The replay that is on: the first that is not over everywhere."""
        for replay, parts in enumerate(self._figures[:-1]):
            if not all(figures.total and figures.done for figures in parts):
                return replay
        return len(self._figures) - 1

    def frontend_gone(self, frontend: int) -> None:
        """A frontend has died: all that it had, and all that it was still to get, is lost.  Its last report may come later."""
        self._gone.add(frontend)
        for parts in self._figures:
            parts[frontend].lost += parts[frontend].total - parts[frontend].ended

    def replays(self) -> list[Replay]:
        """The figures of every replay, as reported so far."""
        numbers = range(self._options.frontends)
        there = [number for number in numbers if self._options.is_remote(number)]
        here = [number for number in numbers if number not in there]
        kinds = [("same host, mailbox", here), ("remote, piggyback", there)] if here and there else []
        return [
            Replay(
                self._options.title(replay),
                Figures.sum_of(parts),
                [(name, Figures.sum_of(parts[number] for number in kind)) for name, kind in kinds],
                spent / modelled if modelled else None,
            )
            for replay, (parts, (modelled, spent)) in enumerate(zip(self._figures, self._paces, strict=True))
        ]

    def picture(self) -> Picture:
        """How things are now."""
        rows = self._reader.read(out=self._rows)
        now = time.monotonic_ns()
        return Picture(
            options=self._options,
            elapsed_s=time.monotonic() - self._start,
            rows=[self._row(rank, rows[rank], now) for rank in range(self._options.ranks)],
            replays=self.replays(),
        )

    def _row(self, rank: int, row: Any, now: int) -> RankRow:
        usable = bool(row["usable"])
        load = (int(row["num_running"]), int(row["num_waiting"]), int(row["kv_active_pages"]), int(row["kv_total_pages"]))
        return RankRow(
            rank=rank,
            pid=self._ranks[rank].pid,
            state=RankState(int(row["state"])),
            load=load if usable else None,
            age_s=max(0, now - int(row["published_ns"])) / 1e9 if usable else None,
            iterations_a_second=self._rates.get(rank) if self._ranks[rank].ended() is None else None,
        )

    def close(self) -> None:
        """Let go of the mailboxes."""
        self._reader.close()
