"""The policies that are compared, by name: what the frontends look at, and which of loadbox's choosers decides."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from frontend import Frontend
from rank_model import FIRST_TOKEN, Event
from simulation import Policy, Setting, World

Look = Callable[[World, int, Frontend], None]
"""Shows a frontend, the so-many-th one, what there is to be seen now."""


class _Frontends:
    """A ``Frontend`` for each; ``look`` shows it what this policy shows. Those on one host see each other's boards."""

    def __init__(self, setting: Setting, seed: str, chooser: str, look: Look, boards: int) -> None:
        self._look = look
        self._frontends = [
            Frontend(setting.ranks, chooser, setting.rank.kv_pages, random.Random(f"{seed}/{i}")) for i in range(setting.frontends)
        ]
        for host in range(boards):
            together = self._frontends[host::boards]
            for one in together:
                one.others = [other.words for other in together if other is not one]

    def choose(self, world: World, frontend: int, request: int) -> int:
        self._look(world, frontend, self._frontends[frontend])
        return self._frontends[frontend].choose(request, world.now)

    def first_token(self, frontend: int, request: int, now: float) -> None:
        self._frontends[frontend].first_token(request)

    def finished(self, frontend: int, request: int, now: float) -> None:
        self._frontends[frontend].finished(request)

    def produced(self, event: Event) -> None:
        pass


class _VllmClients:
    """vLLM's own frontends: they take over each broadcast as it is, and until the next one count each dispatch as
    one more waiting on that rank for each frontend there is. Ties go to the first rank from the frontend's own place on."""

    def __init__(self, setting: Setting) -> None:
        self._frontends = setting.frontends
        self._taken = [-1.0] * setting.frontends
        self._scores: list[list[int]] = [[] for _ in range(setting.frontends)]
        ranks = list(range(setting.ranks))
        starts = [f * setting.ranks // setting.frontends for f in range(setting.frontends)]
        self._orders = [ranks[start:] + ranks[:start] for start in starts]

    def choose(self, world: World, frontend: int, request: int) -> int:
        collected, loads = world.broadcast()
        if collected != self._taken[frontend]:
            self._taken[frontend] = collected
            self._scores[frontend] = (4 * loads["waiting"] + loads["running"]).tolist()
        scores = self._scores[frontend]
        chosen = min(self._orders[frontend], key=scores.__getitem__)
        scores[chosen] += 4 * self._frontends
        return chosen

    def first_token(self, frontend: int, request: int, now: float) -> None:
        pass

    def finished(self, frontend: int, request: int, now: float) -> None:
        pass

    def produced(self, event: Event) -> None:
        pass


class _Oracle:
    """Weighted join-shortest-queue over what is in flight on each rank at this very moment, wherever it came from."""

    def __init__(self, setting: Setting, seed: str) -> None:
        self._rng = random.Random(seed)
        self._load = [0] * setting.ranks
        self._rank: dict[int, int] = {}

    def choose(self, world: World, frontend: int, request: int) -> int:
        least = min(self._load)
        chosen = self._rng.choice([rank for rank, load in enumerate(self._load) if load == least])
        self._load[chosen] += 4
        self._rank[request] = chosen
        return chosen

    def produced(self, event: Event) -> None:
        self._load[self._rank[event.request]] -= 3 if event.kind == FIRST_TOKEN else 1

    def first_token(self, frontend: int, request: int, now: float) -> None:
        pass

    def finished(self, frontend: int, request: int, now: float) -> None:
        pass


def _nothing(world: World, index: int, frontend: Frontend) -> None:
    pass


def _mailbox(world: World, index: int, frontend: Frontend) -> None:
    frontend.see_mailboxes(world.mailbox())


def _other_host(world: World, index: int, frontend: Frontend) -> None:
    """The frontends of even number are on the ranks' host, the others are not."""
    (_piggyback if index % 2 else _mailbox)(world, index, frontend)


def _rare(world: World, index: int, frontend: Frontend) -> None:
    frontend.see_mailboxes(world.rare())


def _piggyback(world: World, index: int, frontend: Frontend) -> None:
    frontend.hear_batches(world.piggyback(index))


def _broadcast(world: World, index: int, frontend: Frontend) -> None:
    frontend.see_mailboxes(world.broadcast()[1])


class Entry(NamedTuple):
    """A policy's line in the tables and how it is made for one run."""

    title: str
    make: Callable[[Setting, str], Policy]


def _with(chooser: str, look: Look, boards: int = 0) -> Callable[[Setting, str], Policy]:
    """``boards``: the number of hosts with boards; frontends are dealt out to them in turn."""
    return lambda setting, seed: _Frontends(setting, seed, chooser, look, boards)


DEFAULT, BASELINE = "board", "own"

POLICIES = {
    "round-robin": Entry("round robin", _with("round-robin", _nothing)),
    "own": Entry("own in-flight", _with("own", _nothing)),
    "blind": Entry("no report, cold-set", _with("cold-set", _nothing)),
    "blind-board": Entry("no report, cold-set, board", _with("cold-set", _nothing, boards=1)),
    "coordinator": Entry("coordinator 100 ms, vLLM's client", lambda setting, seed: _VllmClients(setting)),
    "coordinator-vllm": Entry("coordinator 100 ms, vllm chooser", _with("vllm", _broadcast)),
    "rare": Entry("every 10 iterations, cold-set", _with("cold-set", _rare)),
    "piggyback": Entry("piggyback, cold-set", _with("cold-set", _piggyback)),
    "least": Entry("mailbox, least", _with("least", _mailbox)),
    "p2c": Entry("mailbox, p2c", _with("p2c", _mailbox)),
    "vllm": Entry("mailbox, vllm", _with("vllm", _mailbox)),
    "smg": Entry("mailbox, smg", _with("smg", _mailbox)),
    "cold-set": Entry("mailbox, cold-set", _with("cold-set", _mailbox)),
    "board": Entry("mailbox, cold-set, board (default)", _with("cold-set", _mailbox, boards=1)),
    "two-hosts": Entry("half on another host, cold-set, boards", _with("cold-set", _other_host, boards=2)),
    "oracle": Entry("oracle: exact weighted JSQ", lambda setting, seed: _Oracle(setting, seed)),
}
