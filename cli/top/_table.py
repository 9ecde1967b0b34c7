"""What ``loadbox top`` shows: a title, the ranks, why some are refused, and the keys."""

from __future__ import annotations

import math
import socket
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadbox.cli._show import KV_WIDTH, kv_bar, seconds, state_text, user
from loadbox.cli._survey import GroupLook, RankLook, all_ranks
from loadbox.cli.top._order import ORDERS, Order
from loadbox.mailbox import RankState

__all__ = ["Screen", "draw"]

_NOTES = 4


@dataclass(frozen=True)
class _Column:
    heading: str
    width: int
    """At least, so that the table does not jump about; cells may be wider."""
    right: bool = True
    gives_way: int = 0
    """The highest goes first where the terminal is too narrow; 0 never goes."""


_COLUMNS = {
    "group": _Column("group", 8, right=False),
    "rank": _Column("rank", 4),
    "state": _Column("state", 7, right=False),
    "running": _Column("running", 8),
    "waiting": _Column("waiting", 8),
    "kv": _Column("KV pages", KV_WIDTH, right=False, gives_way=3),
    "age": _Column("age", 7),
    "iterations": _Column("iter/s", 7, gives_way=1),
    "flight": _Column("flight", 7, gives_way=4),
    "up": _Column("up", 6, gives_way=5),
    "epoch": _Column("epoch", 7, gives_way=7),
    "pid": _Column("pid", 7, gives_way=2),
    "owner": _Column("owner", 6, right=False, gives_way=6),
}
_KV_SHORT = 15
_GROUP_WIDEST = 24
_GROUP_SHORTEST = 6
_KEYS = "q quit  - reverse  space pause  ↑↓ scroll  sort: " + " ".join(key.letter for key in ORDERS.values())


@dataclass(frozen=True)
class Screen:
    """One picture: what was seen, and how it is to be shown."""

    groups: Sequence[GroupLook]
    now_s: float
    """Unix time of the look."""
    order: Order = field(default_factory=Order)
    only: Collection[str] = ()
    """The groups that were asked for; empty: all."""
    paused: bool = False
    first: int = 0
    """How many rows are scrolled past."""
    width: int | None = None
    """Columns of the terminal; None: as many as it takes."""
    height: int | None = None
    """Lines of the terminal; None: as many as it takes, and no keys are told."""

    def scrolled(self, by: float) -> Screen:
        """The screen scrolled by so many rows (inf: to an end), no further than there is something to see."""
        room = self._room()
        most = max(0, self.ranks - room) if room is not None else 0
        return replace(self, first=int(min(most, max(0, self.first + by))) if math.isfinite(by) else most if by > 0 else 0)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return sum(len(group.ranks) for group in self.groups)

    @property
    def page(self) -> int:
        """How many rows fit."""
        room = self._room()
        return self.ranks if room is None else room

    def _notes(self) -> list[RankLook]:
        return [look for look in all_ranks(list(self.groups)) if look.reason]

    def _room(self) -> int | None:
        if self.height is None:
            return None
        notes = len(self._notes())
        return max(1, self.height - 4 - (min(notes, _NOTES) + (notes > _NOTES)))  # title, headings, a blank, keys


def draw(screen: Screen) -> RenderableType:
    """The whole screen."""
    rows = screen.order.sort(all_ranks(list(screen.groups)))
    room = screen._room()
    first = screen.scrolled(0).first
    shown = rows if room is None else rows[first : first + room]
    parts: list[RenderableType] = [_title(screen, len(rows), len(shown), first), _table(shown, screen)]
    if not rows:
        of = f" of group {' or '.join(screen.only)}" if screen.only else ""
        parts.append(Text(f"no mailboxes on this host{of}: no scheduler that publishes is running here", "dim"))
    notes = screen._notes()
    limit = len(notes) if room is None else _NOTES
    for look in notes[:limit]:
        parts.append(Text(f"{look.group} {look.rank}: {look.reason}", "red", no_wrap=room is not None, overflow="ellipsis"))
    if len(notes) > limit:
        parts.append(Text(f"… and {len(notes) - limit} more are refused: loadbox inspect NAME explains", "red"))
    if room is not None:
        parts.append(Text(_KEYS, "dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _title(screen: Screen, ranks: int, shown: int, first: int) -> Text:
    states = Counter(look.state for look in all_ranks(list(screen.groups)))
    frontends = sum(group.frontends for group in screen.groups)
    title = Text.assemble(("loadbox top", "bold"), f"  {socket.gethostname()}  {_count(len(screen.groups), 'group')}")
    title.append(f", {_count(ranks, 'rank')}")
    for number, state in enumerate(sorted(states)):
        title.append(": " if not number else ", ").append(f"{states[state]} ").append(state_text(state))
    if frontends:
        title.append(f"; {_count(frontends, 'frontend')}")
    if shown < ranks:
        title.append(f"; rows {first + 1} to {first + shown}")
    if screen.paused:
        title.append("  PAUSED", "reverse")
    title.no_wrap, title.overflow = True, "ellipsis"
    return title


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _table(rows: list[RankLook], screen: Screen) -> Table:
    order = screen.order
    headings = {name: _heading(name, order, keys=screen.height is not None) for name in _COLUMNS}
    cells = [_cells(look, screen.now_s) for look in rows]
    widths = {
        name: max(column.width, headings[name].cell_len, *(row[name].cell_len for row in cells), 0)
        for name, column in _COLUMNS.items()
    }
    widths["group"] = min(widths["group"], _GROUP_WIDEST)
    for name in sorted(_COLUMNS, key=lambda name: -_COLUMNS[name].gives_way):
        if screen.width is None or sum(widths.values()) + len(widths) <= screen.width + 1:
            break
        if name == "kv":
            widths[name] = _KV_SHORT
        elif _COLUMNS[name].gives_way:
            del widths[name]
    if screen.width is not None:
        excess = sum(widths.values()) + len(widths) - screen.width - 1
        widths["group"] = max(_GROUP_SHORTEST, widths["group"] - max(0, excess))
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name, width in widths.items():
        column = _COLUMNS[name]
        table.add_column(
            headings[name], width=width, justify="right" if column.right else "left", no_wrap=True, overflow="ellipsis"
        )
    for row in cells:
        if widths["kv"] == _KV_SHORT:
            row["kv"] = row["kv"][:_KV_SHORT]
        table.add_row(*(row[name] for name in widths))
    return table


def _heading(name: str, order: Order, *, keys: bool) -> Text:
    """A column's name, its key underlined where keys are taken, and an arrow if it sorts."""
    text = Text(_COLUMNS[name].heading, "bold" if name == order.name else "dim")
    if name == order.name:
        text.append("▼" if order.largest_first else "▲")
    if keys and name in ORDERS:
        at = text.plain.lower().index(ORDERS[name].letter)
        text.stylize("underline", at, at + 1)
    return text


def _cells(look: RankLook, now_s: float) -> dict[str, Text]:
    load = look.snapshot
    gone = look.state in (RankState.DEAD, RankState.CLOSED)
    up = None if look.started_s is None or gone else max(0.0, now_s - look.started_s)
    dash = Text("-")
    return {
        "group": Text(look.group),
        "rank": Text(str(look.rank)),
        "state": state_text(look.state),
        "running": Text(str(load.num_running)) if load else dash,
        "waiting": Text(str(load.num_waiting), "yellow" if load.num_waiting else "") if load else dash,
        "kv": kv_bar(load.kv_active_pages, load.kv_total_pages) if load else dash,
        "age": Text(seconds(look.age_s)),
        "iterations": dash if look.publishes_per_s is None else Text(f"{look.publishes_per_s:.0f}"),
        "flight": dash if look.in_flight is None else Text(str(look.in_flight)),
        "up": Text(seconds(up)),
        "epoch": dash if look.epoch is None else Text(f"…{look.epoch % 1_000_000:06d}"),
        "pid": dash if look.pid is None else Text(str(look.pid), "dim" if gone else ""),
        "owner": dash if look.uid is None else Text(user(look.uid)),
    }
