"""The table of peers: times as ratios to loadbox's, what each tears, what is left when a side dies or stops; and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["PACED", "show", "verdicts"]

# To be ahead of, at the median: publish, read, read of 64 ranks.
ASKED = {"SGLang": (40.0, 40.0, 100.0), "Kickmsg": (2.0, 4.0, None)}
_COLUMNS = ("publish_ns", "publish_loaded_p99_ns", "read_ns", "read_loaded_p99_ns", "read_all_ns")
PACED = {
    "paced_10_ns": "a read every 10 ms",
    "paced_150_ns": "every 150 ms",
    "paced_all_1_ns": "64 ranks every 1 ms",
    "paced_all_10_ns": "64 ranks every 10 ms",
    "paced_all_150_ns": "64 ranks every 150 ms",
    "paced_idle_150_ns": "64 idle ranks every 150 ms",
}
"""Reads at a router's pace, and what they are called."""


def _words(counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    return ", ".join(word if n == total else f"{word} {n}/{total}" for word, n in counts.items())


def _cell(figure: float | None, own: float | None) -> str:
    if figure is None:
        return "-"
    return f"{figure:,.0f}" + (f" ({figure / own:.1f}x)" if own else "")


def verdicts(figures: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, float, float, bool]]:
    """(what, ratio to loadbox, asked, met) for every peer that never tears: ahead in publish and read, at the median and at p99.

    Without pause as it was asked, and at a router's pace at all.
    """
    own = figures["LoadboxC"]
    found: list[tuple[str, float, float, bool]] = []
    for name, peer in figures.items():
        if name.startswith("Loadbox") or not peer["guarded"]:
            continue
        asked_publish, asked_read, asked_all = ASKED.get(name, (1.0, 1.0, 1.0))
        asked = dict(zip(_COLUMNS, (asked_publish, 1.0, asked_read, 1.0, asked_all or 1.0), strict=True))
        titles = ("publish", "publish under load, p99", "read", "read under load, p99", "read of 64 ranks")
        asked |= dict.fromkeys(PACED, 1.0)
        for column, title in [*zip(_COLUMNS, titles, strict=True), *PACED.items()]:
            if peer[column] is None or own[column] is None:
                continue
            ratio = peer[column] / own[column]
            found.append((f"{peer['name']}: {title}", ratio, asked[column], ratio >= asked[column]))
    return found


def show(figures: Mapping[str, Mapping[str, Any]], missing: Mapping[str, str]) -> None:
    """Print everything."""
    console = Console(width=None if Console().is_terminal else 200)
    own = figures.get("LoadboxC", {})
    table = Table(title="ns a call without pause, and how many times loadbox's (C core)", title_justify="left")
    for heading in ("", "publish", "under load, p99", "read", "under load, p99", "64 ranks", "torn reads"):
        table.add_column(heading, justify="left" if not heading else "right")
    faults = Table(title="when a side dies or stops", title_justify="left")
    for heading in ("", "writer killed: a reader gets", "writer stopped: a reader gets", "reader stopped: the writer"):
        faults.add_column(heading)
    for name, peer in figures.items():
        cells = [_cell(peer[column], None if name == "LoadboxC" else own.get(column)) for column in _COLUMNS]
        table.add_row(peer["name"], *cells, f"{peer['torn']:,} of {peer['reads']:,}")
        faults.add_row(peer["name"], *(_words(peer[key]) for key in ("after_kill", "after_stop", "after_reader_stop")))
    paced = Table(title="ns a read at a router's pace: cold caches, and looks whether writers live fall due", title_justify="left")
    for heading in ("", *PACED.values()):
        paced.add_column(heading, justify="left" if not heading else "right")
    for name, peer in figures.items():
        paced.add_row(peer["name"], *(_cell(peer[column], None if name == "LoadboxC" else own.get(column)) for column in PACED))
    console.print(table, paced, faults)
    for name, why in missing.items():
        console.print(f"not measured: {name}: {why}")
    if own:
        found = verdicts(figures)
        behind = [one for one in found if not one[3]]
        console.print(f"ahead as asked in {len(found) - len(behind)} of {len(found)} comparisons with peers that never tear")
        for what, ratio, asked, _ in behind:
            console.print(f"NOT ahead as asked: {what}: {ratio:.2f} times loadbox's, {asked:g} asked")
    console.print("Less what two looks at the clock take at the median; a p99 has the tail of those looks in it, the same for all.")
