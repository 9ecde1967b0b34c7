"""Choosing a rank against reading the ranks, side by side in one run; how the cost grows; and where it goes.

    python benchmarks/bench_reader.py [--json FILE]

``choose`` includes the look at all mailboxes and boards, the rule, and the booking with its store on the board.  Every call is of a
new request; they are finished between the rounds, off the clock.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _measure import Timing, side_by_side
from _results import facts
from rich.console import Console
from rich.table import Table

from loadbox.mailbox import GroupReader, MailboxWriter
from loadbox.reader import LoadReader, _core
from loadbox.reader._board import Board

ASKED = {8: 60.0, 64: 40.0}
SIZES = (8, 64, 256, 512, 1024)
OTHERS = (0, 15, 31, 63)
ROUNDS: dict[str, Any] = {"rounds": 101, "round_s": 0.001, "setup": "level()"}  # short, so that most are not interrupted


class Batch:
    """A decoded batch of 16 tokens, none of them of our requests."""

    engine_index = 1
    rids = tuple(f"other-{i}" for i in range(16))
    output_ids = ((7,),) * 16
    finished_reasons = ("",) * 16
    num_running, num_waiting, kv_active_pages, kv_total_pages = 16, 0, 100, 1000


@contextlib.contextmanager
def frontend(ranks: int, others: int) -> Iterator[dict[str, Any]]:
    """Ranks with mailboxes, a view with a board, and the boards of ``others``: names for the statements."""
    group = f"bench-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(MailboxWriter(group, rank, ranks)) for rank in range(ranks)]
        for rank, writer in enumerate(writers):
            writer.publish(6 + others + rank % 3, rank % 2, 100, 1000)
        boards = [Board(group, ranks) for _ in range(others)]
        for board in boards:
            stack.callback(board.close)
            for rank in range(ranks):
                board.words[rank] = 1
        view = stack.enter_context(LoadReader(group, ranks, board=True, seed=1))
        reader = stack.enter_context(GroupReader(group, ranks))
        ids = map(str, itertools.count())

        def level() -> None:
            """Four requests in flight a rank."""
            for request_id in list(view._sources.ledger.requests)[4 * ranks :]:
                view.finished(request_id)

        for _ in range(4 * ranks):
            view.choose(next(ids))
        assert len(view._sources._others.words) == others, "not all boards were found"
        names = {"v": view, "g": reader, "out": reader.read(), "ids": ids, "turn": itertools.cycle(writers), "level": level}
        yield {**names, "s": view._sources, "core": _core, "batch": Batch()}


def against_reads(ranks: int, others: int) -> dict[str, Timing]:
    """Choose beside read; busy: a scheduler publishes before each call, and what that takes is subtracted."""
    statements = {
        "read": "g.read(out)",
        "choose": "v.choose(next(ids))",
        "publish": "next(turn).publish(7, 1, 100, 1000)",
        "publish, read": "next(turn).publish(7, 1, 100, 1000); g.read(out)",
        "publish, choose": "next(turn).publish(7, 1, 100, 1000); v.choose(next(ids))",
    }
    with frontend(ranks, others) as names:
        t = side_by_side(statements, names, **ROUNDS)
    for what in ("read", "choose"):
        pairs = zip(t[f"publish, {what}"].rounds, t["publish"].rounds, strict=True)
        t[f"busy {what}"] = Timing(tuple(both - publish for both, publish in pairs))
    return t


def parts(ranks: int) -> dict[str, Timing]:
    """What choose is made of, and the other calls."""
    statements = {
        "choose": "v.choose(next(ids))",
        "  read the mailboxes": "g.read(out)",
        "  merge": "core.merge(s.view.table, s.inputs.table, s._row_words, s.words, s._others.words, s.view.now_ns, s._last_ns)",
        "  look (read, merge, clocks)": "s.look()",
        "  pick": "v._chooser.pick(s.view, v._random)",
        "  book": "s.ledger.book(next(ids), 1, 1, s.view.now_ns)",
        "choose, finished": "i = next(ids); v.choose(i); v.finished(i)",
        "loads": "v.loads()",
        "feed, 16 requests of others": "v.feed(batch)",
    }
    with frontend(ranks, 0) as names:
        return side_by_side(statements, names, **ROUNDS)


def growth() -> list[tuple[int, int, float]]:
    """Median ns of choose over ranks and frontends."""
    figures = []
    for ranks, others in itertools.product(SIZES, OTHERS):
        with frontend(ranks, others) as names:
            timing = side_by_side({"choose": "v.choose(next(ids))"}, names, **ROUNDS)["choose"]
            figures.append((ranks, others + 1, timing.median_ns))
    return figures


def main() -> None:
    """Measure, print the tables, and write JSON if asked."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", metavar="FILE", help="also write the figures there")
    options.add_argument("--quick", action="store_true", help="no profile and no growth")
    arguments = options.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a thousand mailboxes, written and read by one process
    console = Console(width=120)

    table = Table(title=f"choose() in reads of the same ranks, core {_core.BACKEND!r}", title_justify="left")
    for name in ("ranks", "frontends", "schedulers", "read ns", "choose ns", "ratio", "asked", ""):
        table.add_column(name, justify="right")
    rows = []
    for ranks, others in ((8, 0), (8, 3), (8, 15), (64, 0), (64, 3), (64, 15)):
        t = against_reads(ranks, others)
        for how, prefix in (("quiet", ""), ("busy", "busy ")):
            read, choose = t[prefix + "read"], t[prefix + "choose"]
            # Of the medians: a difference of two short times is no denominator round by round.
            value, limit = choose.median_ns / read.median_ns, ASKED[ranks]
            verdict = "yes" if value <= limit else "NOT REACHED"
            figures = f"{read.median_ns:.0f}", f"{choose.median_ns:.0f}", f"{value:.1f}"
            table.add_row(str(ranks), str(others + 1), how, *figures, f"<= {limit:g}", verdict)
            what = f"choose(), {ranks} ranks, {others + 1} frontend{'s' if others else ''}, schedulers {how}"
            row = {"what": what, "median_ns": choose.median_ns, "against": "a read of the same ranks", "ratio": value}
            rows.append({**row, "asked_at_most": limit})
    console.print(table)
    results = {**facts(), "rows": rows}
    if not arguments.quick:
        results["growth"] = details(console)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n")


def details(console: Console) -> list[dict[str, float]]:
    """Print the profile of a choice, and how its cost grows; gives the latter."""
    table = Table(title="where it goes, ns", title_justify="left")
    table.add_column("")
    profiles = {ranks: parts(ranks) for ranks in (8, 64)}
    for ranks in profiles:
        table.add_column(f"{ranks} ranks", justify="right")
    for what in profiles[8]:
        table.add_row(what, *(f"{profile[what].median_ns:.0f}" for profile in profiles.values()))
    console.print(table)

    grown = growth()
    table = Table(title="choose(), µs, by ranks (down) and frontends on the host (across)", title_justify="left")
    table.add_column("ranks", justify="right")
    for others in OTHERS:
        table.add_column(str(others + 1), justify="right")
    for ranks in SIZES:
        table.add_row(str(ranks), *(f"{ns / 1e3:.1f}" for size, _, ns in grown if size == ranks))
    console.print(table)
    cells = {(ranks, frontends): ns for ranks, frontends, ns in grown}
    console.print(f"twice the ranks (512 to 1024), 64 frontends: {cells[1024, 64] / cells[512, 64]:.2f} times the cost")
    console.print(f"twice the frontends (32 to 64), 1024 ranks: {cells[1024, 64] / cells[1024, 32]:.2f} times the cost")
    return [dict(zip(("ranks", "frontends", "choose_ns"), row, strict=True)) for row in grown]


if __name__ == "__main__":
    main()
