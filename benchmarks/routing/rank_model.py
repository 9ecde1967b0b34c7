"""The ranks of a simulated server, in plain Python: what `_ranks.c` computes, to the last bit, and easier to read.

A rank acts only at the boundaries between its iterations: it produces the tokens of the finished iteration, takes in the requests
that have arrived, schedules the next iteration and publishes its load. README.md has the model in prose, and its constants.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

RING = 8  # piggybacks kept for each rank and frontend, as in _ranks.c
FIRST_TOKEN, FINISHED = 0, 1


@dataclass(frozen=True)
class RankParams:
    """What a rank can do: seconds an iteration takes, and its limits."""

    base_s: float = 6e-3
    """Any iteration: the weights are read once, kernels are launched."""
    prefill_s: float = 40e-6
    """Each prompt token of the iteration."""
    attention_s: float = 1.3e-9
    """Each prompt token for each token before it."""
    decode_s: float = 12e-6
    """Each sequence that decodes one token."""
    context_s: float = 45e-9
    """Each KV token that a decoding sequence reads."""
    chunk_tokens: int = 2048
    max_running: int = 256
    kv_tokens: int = 400_000
    page_tokens: int = 16
    publish_early: bool = False
    """Publish before the arrived requests are taken in, not after the next iteration is scheduled."""

    @property
    def kv_pages(self) -> int:
        """Pages of the KV cache."""
        return self.kv_tokens // self.page_tokens


class Load(NamedTuple):
    """A rank's load and the simulated second it was taken."""

    at: float
    running: int
    waiting: int
    pages: int


LOAD_DTYPE = np.dtype([("at", "f8"), ("running", "i8"), ("waiting", "i8"), ("pages", "i8")])


class Event(NamedTuple):
    """A token that a frontend waits for, at the second it left the rank."""

    at: float
    request: int
    kind: int


@dataclass
class _Request:
    reach: float
    prompt: int
    output: int
    frontend: int
    generated: int = 0
    computed: int = 0
    pages: int = 0
    step: int = 0


@dataclass
class _Rank:
    free_pages: int
    running: list[int] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)
    inbox: deque[int] = field(default_factory=deque)
    iterations: int = 0
    preemptions: int = 0
    since_rare: int = 0
    end: float = 0.0
    busy: bool = False


class PythonRanks:
    """Ranks in plain Python; the same doors as ``rank_core.CRanks``."""

    def __init__(self, ranks: int, frontends: int, requests: int, params: RankParams, rare_every: int = 10) -> None:
        del requests  # only C needs the number beforehand
        self._p = params
        self._frontends = frontends
        self._rare_every = rare_every
        self._ranks = [_Rank(params.kv_pages) for _ in range(ranks)]
        self._requests: dict[int, _Request] = {}
        self._mailbox = [Load(0.0, 0, 0, 0)] * ranks
        self._rare = list(self._mailbox)
        self._rides: list[list[deque[Load]]] = [[deque(maxlen=RING) for _ in range(frontends)] for _ in range(ranks)]
        self._ridden = [[0] * frontends for _ in range(ranks)]
        self._events: list[Event] = []

    def submit(self, rank: int, request: int, frontend: int, reach: float, prompt: int, output: int) -> None:
        """A request that will be at a rank at ``reach``; times must not fall."""
        check_request(self._p, prompt, output)
        self._requests[request] = _Request(reach, prompt, output, frontend)
        self._ranks[rank].inbox.append(request)

    def advance(self, until: float) -> list[Event]:
        """Run every rank through its boundaries at or before ``until``."""
        self._events = []
        for index, rank in enumerate(self._ranks):
            while rank.busy or rank.inbox:
                at = rank.end if rank.busy else max(rank.end, self._requests[rank.inbox[0]].reach)
                if at > until:
                    break
                self._boundary(index, rank, at)
        return self._events

    def mailbox(self) -> np.ndarray[Any, Any]:
        """Of each rank the load at its last boundary; ``LOAD_DTYPE``, to be read before the next ``advance``."""
        return np.array(self._mailbox, LOAD_DTYPE)

    def rare(self) -> np.ndarray[Any, Any]:
        """The same, of a rank that publishes only every so many iterations, and when it runs out of work."""
        return np.array(self._rare, LOAD_DTYPE)

    def piggyback(self, frontend: int, sent: float) -> np.ndarray[Any, Any]:
        """Of each rank the newest load that left for a frontend by ``sent``, ``at`` = -1 if there was none."""
        found = []
        for rides, ridden in zip(self._rides, self._ridden, strict=True):
            load = next((load for load in reversed(rides[frontend]) if load.at <= sent), None)
            if load is None and ridden[frontend] >= RING:
                raise RuntimeError("piggybacks are on the wire for too many iterations")
            found.append(load or Load(-1.0, 0, 0, 0))
        return np.array(found, LOAD_DTYPE)

    def totals(self) -> list[tuple[int, int, int, int, int]]:
        """Of each rank: iterations, preemptions, free pages, running, waiting (with those on their way)."""
        return [(r.iterations, r.preemptions, r.free_pages, len(r.running), len(r.waiting) + len(r.inbox)) for r in self._ranks]

    def close(self) -> None:
        """Nothing to give back here."""

    def _boundary(self, index: int, rank: _Rank, at: float) -> None:
        was_busy = rank.busy
        if was_busy:
            self._produce(index, rank, at)
        early = self._load(rank, at)
        while rank.inbox and self._requests[rank.inbox[0]].reach <= at:
            rank.waiting.append(rank.inbox.popleft())
        taken = self._schedule(rank)
        load = early if self._p.publish_early else self._load(rank, at)
        if was_busy or not self._p.publish_early:
            self._mailbox[index] = load
        rank.busy = taken > 0.0
        if rank.busy:
            rank.iterations += 1
            rank.end = at + taken
        else:
            rank.end = at
            if was_busy:  # at the edge to idleness, one batch without tokens for each frontend that was told otherwise
                for frontend, rides in enumerate(self._rides[index]):
                    if rides and (rides[-1].running or rides[-1].waiting):
                        self._ride(index, frontend, load)
        rank.since_rare += 1
        if rank.since_rare >= self._rare_every or not rank.busy:
            self._rare[index] = load
            rank.since_rare = 0

    def _produce(self, index: int, rank: _Rank, at: float) -> None:
        kept = []
        spoken = [False] * self._frontends
        for id in rank.running:
            q = self._requests[id]
            done = False
            if q.step:
                q.computed += q.step
                q.step = 0
                if q.computed == q.prompt + q.generated:
                    q.generated += 1
                    spoken[q.frontend] = True
                    if q.generated == 1:
                        self._events.append(Event(at, id, FIRST_TOKEN))
                    if q.generated == q.output:
                        self._events.append(Event(at, id, FINISHED))
                        rank.free_pages += q.pages
                        q.pages = 0
                        done = True
            if not done:
                kept.append(id)
        rank.running = kept
        load = self._load(rank, at)
        for frontend in range(self._frontends):
            if spoken[frontend]:
                self._ride(index, frontend, load)

    def _schedule(self, rank: _Rank) -> float:
        p = self._p
        budget, before = p.chunk_tokens, rank.preemptions
        i = 0
        while i < len(rank.running) and budget > 0:
            q = self._requests[rank.running[i]]
            step = min(q.prompt + q.generated - q.computed, budget)
            fits = self._reserve(rank, q, q.computed + step)
            while not fits and len(rank.running) > i + 1:
                self._preempt(rank)
                fits = self._reserve(rank, q, q.computed + step)
            if not fits:
                self._preempt(rank)
                break
            q.step = step
            budget -= step
            i += 1
        while rank.preemptions == before and budget > 0 and len(rank.running) < p.max_running and rank.waiting:
            q = self._requests[rank.waiting[0]]
            whole = q.prompt + q.generated
            step = min(whole, budget)
            if -(-whole // p.page_tokens) > rank.free_pages:
                break
            self._reserve(rank, q, step)
            rank.running.append(rank.waiting.popleft())
            q.step = step
            budget -= step
        prefill = pairs = decodes = context = 0
        for q in self._scheduled(rank):
            if q.generated and q.computed + 1 == q.prompt + q.generated:
                decodes += 1
                context += q.computed
            else:
                prefill += q.step
                pairs += q.step * (2 * q.computed + q.step)
        if not prefill and not decodes:
            return 0.0
        return p.base_s + p.prefill_s * prefill + p.attention_s * (0.5 * pairs) + p.decode_s * decodes + p.context_s * context

    def _scheduled(self, rank: _Rank) -> Iterator[_Request]:
        return (q for q in map(self._requests.__getitem__, rank.running) if q.step)

    def _reserve(self, rank: _Rank, q: _Request, tokens: int) -> bool:
        need = -(-tokens // self._p.page_tokens) - q.pages
        if need <= 0:
            return True
        if need > rank.free_pages:
            return False
        rank.free_pages -= need
        q.pages += need
        return True

    def _preempt(self, rank: _Rank) -> None:
        id = rank.running.pop()
        q = self._requests[id]
        rank.free_pages += q.pages
        q.pages = q.computed = q.step = 0
        rank.preemptions += 1
        rank.waiting.appendleft(id)

    def _load(self, rank: _Rank, at: float) -> Load:
        return Load(at, len(rank.running), len(rank.waiting), self._p.kv_pages - rank.free_pages)

    def _ride(self, index: int, frontend: int, load: Load) -> None:
        self._rides[index][frontend].append(load)
        self._ridden[index][frontend] += 1


def check_request(params: RankParams, prompt: int, output: int) -> None:
    """Raises ``ValueError`` for a request that a rank could never finish."""
    if prompt < 1 or output < 1:
        raise ValueError(f"a request of {prompt} prompt and {output} output tokens: both must be at least 1")
    if -(-(prompt + output) // params.page_tokens) > params.kv_pages:
        raise ValueError(f"a request of {prompt + output} tokens does not fit into a rank of {params.kv_tokens} KV tokens; drop it")
