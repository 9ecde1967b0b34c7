"""The command ``loadbox watch``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from loadbox.cli._params import Number, explained, to_group
from loadbox.mailbox import MailboxReader, RankState, _names

if TYPE_CHECKING:
    from loadbox.mailbox import LoadSnapshot

__all__ = ["watch"]

_COLUMNS = ("time", "epoch", "state", "num_running", "num_waiting", "kv_active_pages", "kv_total_pages", "age_s")
_WIDTHS = (24, 19, 7, 11, 11, 15, 14, 12)


@click.command()
@click.argument("where", nargs=-1, metavar="[GROUP] RANK")
@click.option(
    "--group", envvar="LOADBOX_GROUP", callback=to_group, help="The DP group.  [default: $LOADBOX_GROUP, or the only one]"
)
@click.option("--csv", "form", flag_value="csv", help="As CSV, with a line of headings; what is not known is empty.")
@click.option("--json", "form", flag_value="json", help="As JSON, one object a line; what is not known is null.")
@click.option(
    "--interval", type=Number(0.001, 3600), default=0.1, show_default=True, metavar="SECONDS", help="Time between two looks."
)
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after so many lines.")
@click.option("--every", is_flag=True, help="A line for every look, not for changes only.")
@explained
def watch(where: tuple[str, ...], group: str | None, form: str | None, interval: float, count: int | None, every: bool) -> None:
    """Follow one rank's load as it changes: a line for each change of its state, its epoch or its four numbers.

    It looks once an interval: of what changes faster, it shows the last.  A rank that is not there yet is waited for, and
    restarts are followed: they show as another epoch.  Why a rank is REFUSED goes to stderr.  Ctrl-C ends it, as does the end
    of whatever reads its lines.

    \b
    loadbox watch 3                     rank 3 of the only group on this host
    loadbox watch llama-0 3 --csv > rank3.csv
    loadbox watch 3 --group llama-0 --every --interval 1
    loadbox watch llama-0 3 --csv --count 10 | column -ts,
    """
    group, rank = _which(where, group)
    try:
        if form == "csv":
            _put(",".join(_COLUMNS))
        elif form is None:
            _put(" ".join(name.rjust(width) for name, width in zip(_COLUMNS, _WIDTHS, strict=True)))
        with MailboxReader(group, rank) as reader:
            for number, row in enumerate(_rows(reader, interval, every), 1):
                _put(_line(row, form))
                if row[2] is RankState.REFUSED and not every:
                    click.echo(f"loadbox: {reader.reason}", err=True)
                if number == count:
                    break
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:
        # Whoever read has enough.  What the interpreter flushes at its end must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _which(where: tuple[str, ...], group: str | None) -> tuple[str, int]:
    if not 1 <= len(where) <= 2:
        raise click.UsageError("Say which rank: loadbox watch RANK, or loadbox watch GROUP RANK.")
    try:
        if len(where) == 2:
            group = _names.check_group(where[0])
        rank = _names.check_rank(int(where[-1]))
    except ValueError as error:
        said = f"{where[-1]!r} is no rank: use a number from 0 to 65535" if "invalid literal" in str(error) else str(error)
        raise click.BadParameter(f"{said}.", param_hint="'[GROUP] RANK'") from None
    if group is None:
        groups = _names.list_groups()
        if len(groups) != 1:
            found = (
                f"there are {len(groups)} groups on this host ({', '.join(groups)})" if groups else "there is no group on this host"
            )
            raise click.UsageError(f"Say which group, since {found}: loadbox watch GROUP {rank}.")
        group = groups[0]
    return group, rank


_Row = tuple[float, "int | None", RankState, "LoadSnapshot | None", "float | None"]


def _rows(reader: MailboxReader, interval: float, every: bool) -> Iterator[_Row]:
    last = None
    due = time.monotonic()
    while True:
        state = reader.state()
        snapshot = reader.read() if state in (RankState.LIVE, RankState.STALLED) else None
        epoch = reader.epoch if state not in (RankState.ABSENT, RankState.REFUSED) and reader.epoch else None
        if every or (state, epoch, snapshot) != last:
            last = (state, epoch, snapshot)
            yield time.time(), epoch, state, snapshot, reader.age() if snapshot is not None else None
        now = time.monotonic()
        due = max(now, due + interval)
        time.sleep(due - now)


def _line(row: _Row, form: str | None) -> str:
    from loadbox.cli._record import utc

    at, epoch, state, snapshot, age = row
    values = [utc(at), epoch, state.name, *(snapshot or (None,) * 4), None if age is None else round(age, 9)]
    if form == "json":
        import json

        return json.dumps(dict(zip(_COLUMNS, [values[0], None if epoch is None else str(epoch), *values[2:]], strict=True)))
    if form == "csv":
        return ",".join("" if value is None else _number(value) for value in values)
    cells = ("-" if value is None else f"{value:.6f}" if isinstance(value, float) else str(value) for value in values)
    return " ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))


def _number(value: object) -> str:
    return f"{value:.9f}" if isinstance(value, float) else str(value)


def _put(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
