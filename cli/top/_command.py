"""The command ``loadbox top`` and its options."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from loadbox.cli._params import Number, explained, to_groups

__all__ = ["top"]

_ORDERS = ("group", "state", "running", "waiting", "kv", "age", "iterations", "flight", "up", "pid", "owner")
_WIDE = 1000
_PICTURE = 132


@click.command()
@click.option("--group", "groups", multiple=True, callback=to_groups, help="Only this DP group; may be repeated.")
@click.option(
    "--sort", type=click.Choice(_ORDERS), default="group", show_default=True, metavar="COLUMN", help=f"{', '.join(_ORDERS)}."
)
@click.option("--reverse", is_flag=True, help="The other way round.")
@click.option(
    "--interval", type=Number(0.1, 3600), default=1.0, show_default=True, metavar="SECONDS", help="Time between two looks."
)
@click.option("--once", is_flag=True, help="One plain snapshot, as without a terminal.")
@click.option("--json", "as_json", is_flag=True, help="One snapshot as JSON; what is not known is null.")
@click.option("--svg", type=click.Path(dir_okay=False, writable=True, path_type=Path), hidden=True)
@explained
def top(groups: tuple[str, ...], sort: str, reverse: bool, interval: float, once: bool, as_json: bool, svg: Path | None) -> None:
    """Show every group and rank on this host, live.

    One line a rank: its state, requests running and waiting, KV-cache pages, the age of its last snapshot, its iterations
    (publishes) a second, what this host's frontends have in flight there, how long its scheduler has been up, the end of its
    epoch, and the pid and the user of its scheduler.  What is not known is a dash, never a zero; a rank that is REFUSED says why
    below the table.  Looking slows no scheduler.

    Keys: q quits; g s r w k a i f u p o sort by the column with that letter underlined, the same key again or - turns the order
    round; space pauses; arrows, Page Up, Page Down, Home and End scroll.

    \b
    loadbox top                         all groups
    loadbox top --group llama-0         one of them
    loadbox top --sort waiting          the longest queue first
    loadbox top --once | grep DEAD      for scripts: one snapshot, no colours in a pipe
    loadbox top --json | jq '.groups[].ranks[] | select(.usable | not)'
    """
    from rich.console import Console

    from loadbox.cli._record import host_record, to_json
    from loadbox.cli._show import print_trimmed, save_svg
    from loadbox.cli.top._order import Order
    from loadbox.cli.top._run import run, snapshot
    from loadbox.cli.top._table import Screen, draw

    order = Order(sort, reverse)
    console = Console()
    if as_json:
        click.echo(to_json(host_record(*snapshot(groups))))
    elif svg:
        save_svg(svg, draw(Screen(*snapshot(groups), order, only=groups)), title="loadbox top", width=_PICTURE)
    elif once or console.is_dumb_terminal or not (sys.stdin.isatty() and sys.stdout.isatty()):
        if not sys.stdout.isatty():
            console = Console(width=_WIDE)
        screen = Screen(*snapshot(groups), order, only=groups, width=console.width)
        print_trimmed(console, draw(screen), no_wrap=True)
    else:
        run(groups, order, interval, console)
