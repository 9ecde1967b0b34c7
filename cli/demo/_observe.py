"""What is to be shown: the mailboxes as this process reads them, and what the children report."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from loadbox.cli.demo import _reports
from loadbox.cli.demo._children import Child, Line
from loadbox.cli.demo._options import Options
from loadbox.cli.demo._reports import EngineReport, FrontendReport, PhaseReport
from loadbox.mailbox import GroupReader, RankState

__all__ = ["Observer", "Picture", "RankRow"]

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
class Picture:
    """One moment of the run."""

    options: Options
    elapsed_s: float
    rows: list[RankRow]
    phases: list[PhaseReport]


class Observer:
    """Collects reports and reads the mailboxes, like any third process on this host may."""

    def __init__(self, options: Options, ranks: list[Child]) -> None:
        self.engines: dict[int, EngineReport] = {}
        self.frontend: FrontendReport | None = None
        self._options = options
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
                self._take_report(_reports.decode(line.data))
                return None
            except msgspec.DecodeError:
                pass
        return f"{line.child.name}: {line.data.decode(errors='replace')}"

    def _take_report(self, report: _reports.Report) -> None:
        if isinstance(report, FrontendReport):
            self.frontend = report
            return
        self.engines[report.rank] = report
        now = time.monotonic()
        then, iterations = self._marks.setdefault(report.rank, (now, report.iterations))
        if now - then >= _RATE_WINDOW_S:
            self._rates[report.rank] = (report.iterations - iterations) / (now - then)
            self._marks[report.rank] = (now, report.iterations)

    def picture(self) -> Picture:
        """How things are now."""
        rows = self._reader.read(out=self._rows)
        now = time.monotonic_ns()
        return Picture(
            options=self._options,
            elapsed_s=time.monotonic() - self._start,
            rows=[self._row(rank, rows[rank], now) for rank in range(self._options.ranks)],
            phases=self.frontend.phases if self.frontend else [],
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
