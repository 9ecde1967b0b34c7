"""What a person sees of the vLLM demo: the steps so far, what is going on, and the ranks as their mailboxes say."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from loadbox.cli._show import KV_WIDTH, kv_bar, seconds, state_text

if TYPE_CHECKING:
    from typing_extensions import Self

    from loadbox.cli._survey import RankLook

__all__ = ["Scene", "Screen", "draw"]

_LIVE_INTERVAL_S = 0.12
_PLAIN_INTERVAL_S = 1.0
_PLAIN_SAME_S = 10.0


@dataclass
class Scene:
    """One moment."""

    group: str
    doing: str = ""
    elapsed_s: float = 0.0
    shown: list[str] = field(default_factory=list)
    """What has been seen to hold, in order."""
    ranks: list[RankLook] = field(default_factory=list)


def draw(scene: Scene) -> RenderableType:
    """The whole screen."""
    title = Text.assemble(
        ("loadbox demo --engine vllm", "bold"), f"  vllm serve -dp {len(scene.ranks)}, group {scene.group}; Ctrl-C ends it"
    )
    steps = [Text.assemble(("✓ ", "green"), text) for text in scene.shown]
    now = Text.assemble((f"{scene.elapsed_s:5.1f} s  ", "dim"), (scene.doing, "cyan")) if scene.doing else Text("")
    return Group(title, *steps, now, "", _table(scene.ranks))


def _table(ranks: list[RankLook]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    for name, width in (("rank", 4), ("pid", 7)):
        table.add_column(name, justify="right", width=width, no_wrap=True)
    table.add_column("state", width=7, no_wrap=True)
    for name in ("running", "waiting"):
        table.add_column(name, justify="right", width=7, no_wrap=True)
    table.add_column("KV blocks", width=KV_WIDTH, no_wrap=True)
    for name, width in (("age", 7), ("publishes/s", 11)):
        table.add_column(name, justify="right", width=width, no_wrap=True)
    for look in ranks:
        load = look.snapshot
        table.add_row(
            str(look.rank),
            str(look.pid or "-"),
            state_text(look.state),
            str(load.num_running) if load else "-",
            Text(str(load.num_waiting), "yellow" if load.num_waiting else "") if load else "-",
            kv_bar(load.kv_active_pages, load.kv_total_pages) if load else "-",
            seconds(look.age_s),
            f"{look.publishes_per_s:.0f}" if look.publishes_per_s is not None else "-",
        )
    return table


class Screen:
    """Shows scenes: a live table at a terminal, or a line for each step and, at most once a second, for what changes."""

    def __init__(self, console: Console, *, plain: bool) -> None:
        self._console = console
        self._live = None if plain else Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._interval_s = _PLAIN_INTERVAL_S if plain else _LIVE_INTERVAL_S
        self._next = 0.0
        self._told = 0
        self._last = ("", 0.0)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def due(self) -> bool:
        """Whether another scene is wanted."""
        return time.monotonic() >= self._next

    def show(self, scene: Scene) -> None:
        """Show a scene."""
        self._next = time.monotonic() + self._interval_s
        if self._live is not None:
            self._live.update(draw(scene), refresh=True)
            return
        for text in scene.shown[self._told :]:
            self._say(f"✓ {text}")
        self._told = len(scene.shown)
        now = f"{scene.doing} | " + "; ".join(map(_plain, scene.ranks))
        if now != self._last[0] or scene.elapsed_s >= self._last[1] + _PLAIN_SAME_S:
            self._last = (now, scene.elapsed_s)
            self._say(f"{scene.elapsed_s:5.1f} s  {now}")

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _plain(look: RankLook) -> str:
    if look.snapshot is None:
        return f"{look.rank} {look.state.name}"
    running, waiting, active, total = look.snapshot
    return f"{look.rank} {look.state.name} {running}+{waiting} kv {active / total:.0%}"
