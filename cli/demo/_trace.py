"""Request traces: a CSV with arrival_s, prompt_tokens and output_tokens, read whole and checked."""

from __future__ import annotations

import csv
import math
import random
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import NamedTuple

__all__ = ["BUILT_IN", "Request", "TraceError", "read_trace", "scale", "split"]

BUILT_IN = "azure2023_conv_excerpt.csv"
_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")


class TraceError(ValueError):
    """A trace cannot be used; the message says where and why."""


class Request(NamedTuple):
    """One request: when it arrives (seconds from the first one), its prompt and the output it will get, in tokens."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


def read_trace(path: Path | None = None) -> list[Request]:
    """Read a trace, the built-in excerpt if no path is given; arrivals are counted from the first one.

    Raises TraceError with the line's number if the file cannot be read or is not such a CSV.
    """
    try:
        if path is None:
            text = resources.files("loadbox.cli.demo").joinpath("traces", BUILT_IN).read_text(encoding="utf-8")
        else:
            text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TraceError(f"{path or BUILT_IN} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path or BUILT_IN} is not text in UTF-8 (byte {error.start}): give a CSV file") from None
    return _parse(text, str(path or BUILT_IN))


def _parse(text: str, name: str) -> list[Request]:
    lines = csv.reader(text.splitlines(), strict=True)
    header = [column.strip() for column in next(lines, [])]
    missing = [column for column in _COLUMNS if column not in header]
    if missing:
        raise TraceError(f"{name} has no column {' and no '.join(missing)}: its first line must name {', '.join(_COLUMNS)}")
    where = [header.index(column) for column in _COLUMNS]
    rows: list[Request] = []
    try:
        for cells in lines:
            if cells:
                rows.append(_row(cells, where, rows[-1].arrival_s if rows else -math.inf))
    except (ValueError, csv.Error) as error:
        raise TraceError(f"{name}, line {lines.line_num}: {error}") from None
    if not rows:
        raise TraceError(f"{name} has no requests: there must be a line for each after the first")
    start = rows[0].arrival_s
    return [row._replace(arrival_s=row.arrival_s - start) for row in rows]


def _row(cells: list[str], where: list[int], previous: float) -> Request:
    if len(cells) <= max(where):
        raise ValueError(f"{len(cells)} values where at least {max(where) + 1} are needed")
    arrival = _number(cells[where[0]], "arrival_s")
    if arrival < previous:
        raise ValueError(f"arrival_s is {arrival:g} after {previous:g}: sort the requests by arrival")
    return Request(arrival, *(_tokens(cells[where[i]], _COLUMNS[i]) for i in (1, 2)))


def _number(cell: str, column: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{column} is {cell.strip()!r}, which is no number of seconds")
    return value


def _tokens(cell: str, column: str) -> int:
    try:
        value = int(cell)
    except ValueError:
        value = 0
    if not 1 <= value <= 10**9:
        raise ValueError(f"{column} is {cell.strip()!r}: use a whole number of tokens, 1 or more")
    return value


def scale(trace: list[Request], *, rate: float, seconds: float, limit: int | None = None) -> list[Request]:
    """The trace's requests with ``rate`` times as many a second, those that arrive in the first ``seconds``, at most ``limit``."""
    scaled = (row._replace(arrival_s=row.arrival_s / rate) for row in trace)
    return list(islice((row for row in scaled if row.arrival_s < seconds), limit))


def split(requests: list[Request], frontends: int, seed: int) -> list[list[Request]]:
    """Give each request to one of the frontends, drawn at random, as a load balancer before them does; each keeps its order."""
    parts: list[list[Request]] = [[] for _ in range(frontends)]
    draw = random.Random(seed)
    for request in requests:
        parts[draw.randrange(frontends)].append(request)
    return parts
