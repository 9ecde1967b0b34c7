"""How old and how wrong is what a router reads at the moment of a decision?  The demo's ranks and trace, in virtual time.

    python benchmarks/bench_staleness.py [--quick] [--seed N] [--json FILE]

Four ranks run the demo's scheduler model on its trace; four frontends get the requests at random and each sends its own to the
rank with the fewest requests in truth, so that all ways of knowing are asked about the same run.  At every decision each way is
asked about every rank:

* ``age``: how long ago the rank's state was what the answer says, ms;
* ``requests off``: the difference in running and waiting requests to the truth, which counts what is on its way to the rank;
* ``pages off``: the difference in KV pages, in per cent of all;
* ``waits``: how long the frontend waits for the answer, ms.

The ways: **mailbox** (published after scheduling and after each iteration); **every ten** iterations; **piggyback** (rides on the
batches that this frontend gets, 1 ms on the way); **coordinator** (ranks report changes, rebroadcast every 100 ms); **poll** (asked
at the decision, answered between two iterations, 1 ms each way; compared with the truth when the answer is there); **scrape**
(every second).
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from _results import facts
from rich.console import Console
from rich.table import Table

from loadbox.cli.demo._model import Iteration, ModelConfig, Scheduler
from loadbox.cli.demo._trace import read_trace, scale

RANKS, FRONTENDS = 4, 4
TRANSIT_S = 0.001
WAYS = ("mailbox", "every ten", "piggyback", "coordinator", "poll", "scrape")

_SHOWN = (
    "age, p50", "age, p99", "requests off, mean", "requests off, p99", "pages off, mean", "pages off, p99",
    "waits, p50", "waits, p99",
)  # fmt: skip

Report = tuple[float, tuple[int, int, int, int]]
"""When the rank was so, and its four numbers."""


class Rank:
    """A scheduler, and what every way of knowing has of it."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(ModelConfig())
        self.inbox: list[tuple[int, int, int]] = []
        self.asked: list[float] = []  # when those polls were sent that wait for the iteration's end
        self.iteration: Iteration | None = None
        self.ends = 0.0
        self.iterations = 0
        idle: Report = (0.0, self.scheduler.load())
        self.known: dict[str, Report] = dict.fromkeys(("mailbox", "every ten", "coordinator", "scrape", "last"), idle)
        self.piggyback: list[Report] = [idle] * FRONTENDS

    def begin(self, now: float) -> None:
        """Take in what has arrived, and start an iteration if there is work."""
        for request in self.inbox:
            self.scheduler.add(*request)
        self.inbox.clear()
        self.iteration = self.scheduler.schedule()
        self.known["mailbox"] = self.known["last"] = (now, self.scheduler.load())
        if self.iteration is not None:
            self.ends = now + self.iteration.seconds

    def end(self, now: float, frontend_of: dict[int, int]) -> list[int]:
        """Apply the iteration; gives the frontends that get a batch."""
        assert self.iteration is not None
        applied = self.scheduler.apply(self.iteration)
        self.iterations += 1
        report = self.known["mailbox"] = self.known["last"] = (now, self.scheduler.load())
        if self.iterations % 10 == 0:
            self.known["every ten"] = report
        return sorted({frontend_of[rid] for rid in applied.rids})


def run(seconds: float, seed: int) -> dict[str, dict[str, list[float]]]:
    """Replay; gives for every way the samples of age, requests off, pages off and wait."""
    requests = scale(read_trace(), rate=0.95 * RANKS, seconds=seconds)
    dice = random.Random(seed)
    ranks = [Rank() for _ in range(RANKS)]
    frontend_of = {rid: dice.randrange(FRONTENDS) for rid in range(len(requests))}
    order = itertools.count()
    events: list[tuple[float, int, str, Any]] = []

    def at(when: float, what: str, about: Any) -> None:
        heapq.heappush(events, (when, next(order), what, about))

    for rid, request in enumerate(requests):
        at(request.arrival_s, "decide", rid)
    for tick in range(int(seconds * 10)):
        at(tick / 10, "coordinate", None)
    for tick in range(int(seconds)):
        at(float(tick), "scrape", None)
    samples: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in WAYS}
    on_the_way = [0] * RANKS
    while events:
        now, _, what, about = heapq.heappop(events)
        if what == "decide":
            held = [sum(rank.scheduler.load()[:2]) + len(rank.inbox) for rank in ranks]
            truth = [here + sent for here, sent in zip(held, on_the_way, strict=True)]
            for number, (rank, true) in enumerate(zip(ranks, truth, strict=True)):
                look(rank, frontend_of[about], now, true, samples)
                at(now + TRANSIT_S, "ask", (number, now))
            chosen = min(range(RANKS), key=lambda r: (truth[r], r))
            on_the_way[chosen] += 1
            at(now + TRANSIT_S, "arrive", (chosen, about))
        elif what == "arrive":
            number, rid = about
            rank = ranks[number]
            on_the_way[number] -= 1
            rank.inbox.append((rid, requests[rid].prompt_tokens, requests[rid].output_tokens))
            if rank.iteration is None:
                rank.begin(now)
                if rank.iteration is not None:
                    at(rank.ends, "end", number)
        elif what == "end":
            rank = ranks[about]
            for frontend in rank.end(now, frontend_of):
                at(now + TRANSIT_S, "batch", (about, frontend, rank.known["last"]))
            for since in rank.asked:
                at(now + TRANSIT_S, "answer", (about, since, rank.known["last"]))
            rank.asked.clear()
            rank.begin(now)
            if rank.iteration is not None:
                at(rank.ends, "end", about)
        elif what == "ask":
            number, since = about
            if ranks[number].iteration is None:
                at(now + TRANSIT_S, "answer", (number, since, (now, ranks[number].scheduler.load())))
            else:
                ranks[number].asked.append(since)
        elif what == "answer":
            number, since, report = about
            rank = ranks[number]
            true = sum(rank.scheduler.load()[:2]) + len(rank.inbox) + on_the_way[number]
            note(samples["poll"], rank, report, now, true, now - since)
        elif what == "batch":
            number, frontend, report = about
            ranks[number].piggyback[frontend] = report
        else:
            for rank in ranks:
                rank.known["coordinator" if what == "coordinate" else "scrape"] = rank.known["last"]
    return samples


def look(rank: Rank, frontend: int, now: float, true: int, samples: dict[str, dict[str, list[float]]]) -> None:
    """Look into everything that is at hand about one rank."""
    known = {**rank.known, "piggyback": rank.piggyback[frontend]}
    for way in WAYS:
        if way != "poll":
            note(samples[way], rank, known[way], now, true, 0.0)


def note(found: dict[str, list[float]], rank: Rank, report: Report, now: float, true: int, waited: float) -> None:
    """One report about one rank against the truth of now."""
    when, said = report
    load = rank.scheduler.load()
    # An idle rank's last word is as true as a new one.
    found["age"].append(0.0 if said == load and not sum(load[:2]) else (now - when) * 1e3)
    found["requests off"].append(abs(true - said[0] - said[1]))
    found["pages off"].append(100.0 * abs(load[2] - said[2]) / load[3])
    found["waits"].append(waited * 1e3)


def main() -> None:
    """Replay, print the table, and write JSON if asked."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="60 s of the trace, not all")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--json", metavar="FILE", help="also write the figures there")
    arguments = options.parse_args()
    samples = run(60.0 if arguments.quick else 200.0, arguments.seed)
    table = Table(title=f"what a router reads when it decides, seed {arguments.seed}", title_justify="left")
    for name in ("", "age ms p50", "p99", "requests off, mean", "p99", "pages off %, mean", "p99", "waits ms p50", "p99"):
        table.add_column(name, justify="right" if name else "left")
    rows: dict[str, dict[str, float]] = {}
    for way, found in samples.items():
        row: dict[str, float] = {}
        for key, values in found.items():
            values.sort()
            row[f"{key}, mean"] = statistics.fmean(values)
            row[f"{key}, p50"] = values[len(values) // 2]
            row[f"{key}, p99"] = values[int(len(values) * 0.99)]
        rows[way] = row
        table.add_row(way, *(f"{row[key]:.1f}" for key in _SHOWN))
    Console(width=120).print(table)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({**facts(seed=arguments.seed), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
