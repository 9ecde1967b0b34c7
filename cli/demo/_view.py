"""The run as a person sees it: a live table at a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loadbox.cli._show import KV_WIDTH, kv_bar, seconds, state_text
from loadbox.cli.demo._figures import percentile
from loadbox.cli.demo._observe import Picture, RankRow, Replay
from loadbox.mailbox import RankState

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LiveView", "PlainView", "View", "draw"]

_LIVE_INTERVAL_S = 0.12
_PLAIN_INTERVAL_S = 1.0


def draw(picture: Picture) -> RenderableType:
    """The whole screen: what runs, the ranks, the replays."""
    options = picture.options
    what = f"  {options.trace} at {options.rate:g} x its rate, time runs {options.speed_up:g} x; {options.frontends} frontends"
    title = Text.assemble(("loadbox demo", "bold"), what)
    live = next((row for row in picture.rows if row.state is RankState.LIVE), None)
    hint = f"group {options.group}; Ctrl-C ends it" + (f"; kill -9 {live.pid} shows how a rank dies" if live else "")
    return Group(title, _ranks(picture.rows), "", _replays(picture.replays), Text(hint, "dim"))


def _ranks(rows: list[RankRow]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    for name in ("rank", "pid"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state", width=7, no_wrap=True)
    for name in ("running", "waiting"):
        table.add_column(name, justify="right", width=7, no_wrap=True)
    table.add_column("KV pages", width=KV_WIDTH, no_wrap=True)
    table.add_column("age", justify="right", width=7, no_wrap=True)
    table.add_column("iter/s", justify="right", width=6, no_wrap=True)
    for row in rows:
        rate = row.iterations_a_second
        load = row.load
        table.add_row(
            str(row.rank),
            str(row.pid),
            state_text(row.state),
            str(load[0]) if load else "-",
            Text(str(load[1]), "yellow" if load[1] else "") if load else "-",
            kv_bar(load[2], load[3]) if load else "-",
            seconds(row.age_s),
            f"{rate:.0f}" if rate is not None else "-",
        )
    return table


def _replays(replays: list[Replay]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("policy", width=21, no_wrap=True)
    table.add_column("replay", width=10)
    for name, width in (("sent", 9), ("served", 6), ("lost", 4), ("TTFT p50", 8), ("p99", 7), ("age", 7)):
        table.add_column(name, justify="right", width=width, no_wrap=True)
    for replay in replays:
        for name, figures, one_source in replay.rows():
            table.add_row(
                Text(name, "" if figures.sent else "dim"),
                ProgressBar(total=figures.total or 1, completed=figures.ended, width=10),
                f"{figures.sent}/{figures.total}",
                str(figures.served),
                Text(str(figures.lost), "bold red" if figures.lost else ""),
                seconds(percentile(figures.ttft, 0.5)),
                seconds(percentile(figures.ttft, 0.99)),
                seconds(percentile(figures.ages, 0.5)) if one_source else "",
            )
    return table


class View(Protocol):
    """Shows pictures as they come, and lines that must not be missed."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def due(self) -> bool:
        """Whether another picture is wanted."""

    def show(self, picture: Picture) -> None:
        """Show a picture."""

    def say(self, line: str) -> None:
        """Show a line, to stay."""


class _Paced:
    _interval_s: float

    def __init__(self) -> None:
        self._next = 0.0

    def due(self) -> bool:
        return time.monotonic() >= self._next

    def _shown(self) -> None:
        self._next = time.monotonic() + self._interval_s


class LiveView(_Paced):
    """A table that stays in place, drawn eight times a second."""

    _interval_s = _LIVE_INTERVAL_S

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, picture: Picture) -> None:
        self._live.update(draw(picture), refresh=True)
        self._shown()

    def say(self, line: str) -> None:
        self._live.console.print(line, markup=False, highlight=False)


class PlainView(_Paced):
    """A line a second, without colours or cursor movements."""

    _interval_s = _PLAIN_INTERVAL_S

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def show(self, picture: Picture) -> None:
        current = next((replay for replay in picture.replays if not replay.all.done), None)
        if current is not None:
            progress = f"{current.title}: {current.all.sent}/{current.all.total} sent, {current.all.served} served"
        else:
            progress = "done" if any(replay.all.total for replay in picture.replays) else "starting"
        ranks = "; ".join(_plain_rank(row) for row in picture.rows)
        self.say(f"{picture.elapsed_s:5.1f} s  {progress} | {ranks}")
        self._shown()

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _plain_rank(row: RankRow) -> str:
    if row.load is None:
        return f"{row.rank} {row.state.name}"
    running, waiting, active, total = row.load
    return f"{row.rank} {row.state.name} {running}+{waiting} kv {active / total:.0%}"
