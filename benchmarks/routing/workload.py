"""Requests for the simulation: those of a public trace, at a chosen utilisation."""

from __future__ import annotations

import bisect
import csv
import functools
import gzip
import heapq
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rank_core import make_ranks
from rank_model import FINISHED, RankParams

TRACES = {
    "chat": "azure2023_conv.csv.gz",
    "code": "azure2023_code.csv.gz",
    "mooncake": "mooncake_conversation.csv.gz",
}
MOONCAKE_STEP_S = 3.0  # its arrivals are rounded to this


class TraceRow(NamedTuple):
    """One request of a trace."""

    arrival_s: float
    prompt: int
    output: int


class Workload(NamedTuple):
    """What one run serves: parallel lists, one entry a request, in the order of arrival."""

    arrival_s: list[float]
    prompt: list[int]
    output: list[int]
    frontend: list[int]
    capacity: float
    """Requests a second that one rank can finish when its queue is never empty."""


@functools.cache
def read_trace(name: str) -> tuple[TraceRow, ...]:
    """All requests of a trace, by the name in ``TRACES``."""
    path = Path(__file__).parent / "traces" / TRACES[name]
    with gzip.open(path, "rt", newline="") as file:
        return tuple(
            TraceRow(float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(file)
        )


def capacity(prompt: Sequence[int], output: Sequence[int], params: RankParams) -> float:
    """Requests a second of one rank that has all these requests in its queue from the start.

    Counted between the first and the last tenth of the finishes, so that neither the cold start nor the last stragglers count.
    """
    ranks = make_ranks(1, 1, len(prompt), params)
    for request, (tokens, out) in enumerate(zip(prompt, output, strict=True)):
        ranks.submit(0, request, 0, 0.0, tokens, out)
    finishes = sorted(event.at for event in ranks.advance(float("inf")) if event.kind == FINISHED)
    ranks.close()
    first, last = len(finishes) // 10, len(finishes) - 1 - len(finishes) // 10
    return (last - first) / (finishes[last] - finishes[first])


def make_workload(
    trace: str,
    *,
    requests: int,
    ranks: int,
    frontends: int,
    utilisation: float,
    params: RankParams,
    seed: int,
    arrivals: str = "overlaid",
) -> Workload:
    """Requests of a trace, each at a random frontend, at ``utilisation`` times the rate that the ranks can finish of them.

    ``arrivals`` says how a trace of some requests a second becomes one of some hundred:

    ``"overlaid"``
        copies of the trace, each from a random place on, served together: a larger server has more users, not hastier ones. As many
        as are needed; each request is kept with the same probability, so that the rate comes out right.
    ``"squeezed"``
        consecutive requests from a random place on, with all gaps multiplied by one small factor.
    ``"poisson"``
        the same requests, with gaps drawn at random.

    Last, all times are multiplied by one factor, so that the rate is right for exactly the requests of this run; with
    ``"overlaid"`` it is within a few per cent of 1, but for the code trace, which is so bursty that it may be a fourth away.
    The result depends on the arguments alone, so that all policies see the same requests.
    """
    times, prompt, output, one = _requests(trace, requests, ranks, utilisation, params, seed, arrivals)
    split = random.Random(f"{trace}/{ranks}/{seed}/{arrivals}/{frontends}")
    return Workload(times, prompt, output, [split.randrange(frontends) for _ in times], one)


@functools.lru_cache(maxsize=32)  # scenarios that differ in their frontends alone share it
def _requests(
    trace: str, requests: int, ranks: int, utilisation: float, params: RankParams, seed: int, arrivals: str
) -> tuple[list[float], list[int], list[int], float]:
    rng = random.Random(f"{trace}/{ranks}/{seed}/{arrivals}")
    rows = read_trace(trace)
    if trace == "mooncake":
        rows = tuple(sorted(row._replace(arrival_s=row.arrival_s + rng.random() * MOONCAKE_STEP_S) for row in rows))
    if arrivals == "overlaid":
        whole = capacity([row.prompt for row in rows], [row.output for row in rows], params)
        picked = _overlay(rows, utilisation * ranks * whole, requests, rng)
    elif arrivals in ("squeezed", "poisson"):
        picked = list(itertools.islice(_from(rows, rng.randrange(len(rows))), requests))
    else:
        raise ValueError(f"arrivals are {arrivals!r}; they can be 'overlaid', 'squeezed' or 'poisson'")
    times = [row.arrival_s - picked[0].arrival_s for row in picked]
    if arrivals == "poisson":
        times = [0.0, *itertools.accumulate(rng.expovariate(1.0) for _ in range(requests - 1))]
    prompt, output = [row.prompt for row in picked], [row.output for row in picked]
    one = capacity(prompt, output, params)
    factor = (requests - 1) / (utilisation * ranks * one) / times[-1]
    return [time * factor for time in times], prompt, output, one


def _from(rows: Sequence[TraceRow], start: int) -> Iterator[TraceRow]:
    """The rows from one on, over and over, their times going on."""
    span = rows[-1].arrival_s * len(rows) / (len(rows) - 1)
    for index in itertools.count(start):
        row = rows[index % len(rows)]
        yield row._replace(arrival_s=row.arrival_s + span * (index // len(rows)))


def _overlay(rows: Sequence[TraceRow], rate: float, requests: int, rng: random.Random) -> list[TraceRow]:
    span = rows[-1].arrival_s * len(rows) / (len(rows) - 1)
    copies = math.ceil(rate * span / len(rows))
    keep = rate * span / len(rows) / copies
    arrivals = [row.arrival_s for row in rows]
    streams = []
    for _ in range(copies):
        begin = rng.random() * span
        streams.append(_shifted(rows, bisect.bisect(arrivals, begin), begin))
    return list(itertools.islice((row for row in heapq.merge(*streams) if rng.random() < keep), requests))


def _shifted(rows: Sequence[TraceRow], start: int, begin: float) -> Iterator[TraceRow]:
    return (row._replace(arrival_s=row.arrival_s - begin) for row in _from(rows, start))
