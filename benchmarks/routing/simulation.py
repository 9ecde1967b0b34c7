"""The event loop: arrivals, decisions, requests and tokens on the wire, ranks."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from intervals import percentile
from rank_core import CRanks, make_ranks
from rank_model import FINISHED, FIRST_TOKEN, Event, PythonRanks, RankParams
from workload import Workload


@dataclass(frozen=True)
class Setting:
    """What surrounds the policy."""

    ranks: int
    frontends: int
    rank: RankParams = field(default_factory=RankParams)
    dispatch_s: float = 1e-3
    """From the decision to the rank's queue."""
    wire_s: float = 1e-3
    """From the end of an iteration to the frontend: tokens, piggyback, reports to a coordinator and its broadcasts."""
    rare_every: int = 10
    """Iterations between two publishes of the rank that publishes rarely."""
    coordinator_s: float = 0.1
    """Between two broadcasts of the coordinator."""
    warm_up: float = 0.4
    """The share of the requests, from the first on, that fill the ranks and are not measured."""


class World:
    """What a policy may look at when it decides; each source as it would be seen at that moment."""

    def __init__(self, setting: Setting, ranks: CRanks | PythonRanks) -> None:
        self.setting = setting
        self._ranks = ranks
        self._broadcasts: list[tuple[float, np.ndarray[Any, Any]]] = []
        self.now = 0.0

    def mailbox(self) -> np.ndarray[Any, Any]:
        """Each rank's last publish, one an iteration."""
        return self._ranks.mailbox()

    def rare(self) -> np.ndarray[Any, Any]:
        """Each rank's last publish, one in ten iterations."""
        return self._ranks.rare()

    def piggyback(self, frontend: int) -> np.ndarray[Any, Any]:
        """Of each rank the load on the last batch that this frontend has received; ``at`` is when it left."""
        return self._ranks.piggyback(frontend, self.now - self.setting.wire_s)

    def broadcast(self) -> tuple[float, np.ndarray[Any, Any]]:
        """The coordinator's last broadcast that has arrived: when it was collected, and the loads."""
        while len(self._broadcasts) > 1 and self._broadcasts[1][0] + 2 * self.setting.wire_s <= self.now:
            del self._broadcasts[0]
        return self._broadcasts[0]

    def collect(self, at: float) -> None:
        """The coordinator gathers what had been reported to it."""
        self._broadcasts.append((at, self._ranks.mailbox().copy()))


class Policy(Protocol):
    """A way of choosing, for all frontends of one server; frontends share nothing that the policy does not give them."""

    def choose(self, world: World, frontend: int, request: int) -> int:
        """The rank for a request that has come in at ``world.now``; booked as dispatched."""

    def first_token(self, frontend: int, request: int, now: float) -> None:
        """The frontend has received a request's first token."""

    def finished(self, frontend: int, request: int, now: float) -> None:
        """The frontend has received a request's last token."""

    def produced(self, event: Event) -> None:
        """A rank has produced a token that somebody waits for. Only an oracle may listen."""


@dataclass(frozen=True)
class Outcome:
    """Seconds, over the measured requests of one run."""

    ttft_p50: float
    ttft_p99: float
    e2e_mean: float
    preemptions: int
    busy_end_s: float
    """When the last token left."""


def simulate(setting: Setting, workload: Workload, policy: Policy) -> Outcome:
    """Serve a workload under a policy, to the last token."""
    count = len(workload.arrival_s)
    ranks = make_ranks(setting.ranks, setting.frontends, count, setting.rank, setting.rare_every)
    world = World(setting, ranks)
    on_wire: list[tuple[float, int, int]] = []  # received at, kind, request: at equal times the first token comes first
    first, last = [0.0] * count, [0.0] * count

    def run(until: float) -> None:
        for event in ranks.advance(until):
            policy.produced(event)
            heapq.heappush(on_wire, (event.at + setting.wire_s, event.kind, event.request))

    def receive(until: float) -> None:
        while on_wire and on_wire[0][0] <= until:
            at, kind, request = heapq.heappop(on_wire)
            if kind == FIRST_TOKEN:
                first[request] = at
                policy.first_token(workload.frontend[request], request, at)
            elif kind == FINISHED:
                last[request] = at
                policy.finished(workload.frontend[request], request, at)

    world.collect(0.0)
    ticks = 1
    for request, arrival in enumerate(workload.arrival_s):
        while ticks * setting.coordinator_s <= arrival:
            run(ticks * setting.coordinator_s)
            world.collect(ticks * setting.coordinator_s)
            ticks += 1
        run(arrival)
        receive(arrival)
        world.now = arrival
        frontend = workload.frontend[request]
        rank = policy.choose(world, frontend, request)
        ranks.submit(rank, request, frontend, arrival + setting.dispatch_s, workload.prompt[request], workload.output[request])
    run(float("inf"))
    receive(float("inf"))
    preemptions = sum(row[1] for row in ranks.totals())
    ranks.close()
    measured = range(int(count * setting.warm_up), count)
    ttft = sorted(first[i] - workload.arrival_s[i] for i in measured)
    e2e = [last[i] - workload.arrival_s[i] for i in measured]
    return Outcome(percentile(ttft, 0.5), percentile(ttft, 0.99), sum(e2e) / len(e2e), preemptions, max(last))
