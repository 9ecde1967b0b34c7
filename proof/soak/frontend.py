"""The frontends of the soak: they read, check every read against the truth, choose, finish, abort and finish again."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from typing import Any

import zmq
from values import (
    BEGUN,
    CHOSEN,
    DEAD_LIFE,
    DEAD_NS,
    DONE,
    DOOMED,
    EPOCH,
    EPOCH_LIFE,
    FED,
    FINISHED,
    FIRST_LIFE,
    FIRST_NS,
    RANKS,
    READS,
    USABLE,
    Shared,
    packed,
    value_of,
)  # fmt: skip

from loadbox.mailbox import GroupReader, MailboxReader, RankState
from loadbox.piggyback import MsgpackFrontend, NothingReceived
from loadbox.reader import LoadReader, NoRankAvailable

CHOOSERS = ("cold-set", "cold-set", "own", "p2c", "least", "vllm", "smg", "round-robin")
INTERVAL_NS = 100_000_000  # liveness_interval: within it, a reader may not know yet
INJECTIONS = ("leak-descriptor", "leak-memory", "leak-board", "forget")


class Judge:
    """Is what was read what was published?  ``tell`` is called for what is not."""

    def __init__(self, shared: Shared, tell: Callable[..., None]) -> None:
        self._truths = [shared.truth(rank) for rank in range(RANKS)]
        self._tell = tell
        self._last: dict[tuple[str, int], int] = {}

    def before(self) -> tuple[int, list[tuple[int, ...]]]:
        """What is known before a read begins."""
        known = [tuple(truth) for truth in self._truths]
        return time.monotonic_ns(), known

    def row(self, reader: str, rank: int, state: int, load: Any, known: tuple[int, list[tuple[int, ...]]], epoch: int = 0) -> None:
        """A rank as a mailbox shows it: ``load`` is None unless it is usable (or, for a single reader, its last words)."""
        start_ns, then, now = known[0], known[1][rank], self._truths[rank]
        fault = self._state_fault(RankState(state), load, then, now, start_ns, epoch)
        if fault is None and load is not None:
            fault = self._load_fault(reader, rank, RankState(state), load, then, now, start_ns)
        self._complain(fault, reader, rank, state, load, known, epoch)

    def words(self, reader: str, rank: int, load: Any, known: tuple[int, list[tuple[int, ...]]]) -> None:
        """The last whole snapshot of a rank, which may have died since."""
        fault = self._load_fault(reader, rank, RankState.DEAD, load, known[1][rank], self._truths[rank], known[0])
        self._complain(fault, reader, rank, RankState.DEAD, load, known, 0)

    def _complain(self, fault: str | None, reader: str, rank: int, state: int, load: Any, known: Any, epoch: int) -> None:
        if fault is not None:
            self._tell(
                fault, reader=reader, rank=rank, state=RankState(state).name, load=load and list(map(int, load)), epoch=int(epoch),
                value=load and value_of(tuple(map(int, load))), then=known[1][rank], now=list(self._truths[rank]), at=known[0],
            )  # fmt: skip

    def _state_fault(self, state: RankState, load: Any, then: Any, now: Any, start_ns: int, epoch: int) -> str | None:
        usable = state in (RankState.LIVE, RankState.STALLED)
        if state is RankState.REFUSED:
            return "a good segment was refused"
        ended = state in (RankState.DEAD, RankState.CLOSED)
        if ended and epoch and epoch == now[EPOCH] and now[EPOCH_LIFE] > now[DOOMED]:
            return "a rank that lives was called dead"
        if usable and load is None:
            return "a usable rank had no load"
        life = then[FIRST_LIFE]
        settled = life == now[FIRST_LIFE] > now[DOOMED] and start_ns > then[FIRST_NS] + INTERVAL_NS
        if settled and not usable:
            return "a rank that lives and has published was not usable"
        return None

    def _load_fault(self, reader: str, rank: int, state: RankState, load: Any, then: Any, now: Any, start_ns: int) -> str | None:
        value = value_of(tuple(map(int, load)))
        if value is None:
            return "a torn read"
        if value.rank != rank:
            return "another rank's load"
        this = packed(value.life, value.number)
        if this > now[BEGUN]:
            return "a load that nobody has published yet"
        if value.life == then[DONE] >> 32 and this < then[DONE]:
            return "a load older than what was published before the read began"
        if state in (RankState.LIVE, RankState.STALLED):
            if value.life <= then[DEAD_LIFE] and start_ns > then[DEAD_NS] + INTERVAL_NS:
                return "a dead rank was usable"
            if value.life < then[FIRST_LIFE] and start_ns > then[FIRST_NS] + INTERVAL_NS:
                return "a former life's load"
        if this < self._last.get((reader, rank), 0):
            return "a load went backwards"
        self._last[reader, rank] = this
        return None

    def batch(self, rank: int, load: Any) -> None:
        """A load that came with a batch: whole, the rank's own, and sent.  Batches carry no epoch: an old life's may come late."""
        value = value_of(tuple(load))
        if value is None:
            self._tell("a torn batch", rank=rank, load=list(load))
        elif value.rank != rank:
            self._tell("another rank's batch", rank=rank, value=value)
        elif packed(value.life, value.number) > self._truths[rank][BEGUN]:
            self._tell("a batch that nobody has sent yet", rank=rank, value=value)


class Requests:
    """A frontend's own requests, and what becomes of them: first tokens, finishes, aborts, all of them also twice."""

    def __init__(self, view: LoadReader, random_: random.Random, counters: memoryview, inject: str) -> None:
        self._view, self._random, self._counters = view, random_, counters
        self._open: dict[str, float] = {}
        self._next = 0
        self._forgets = inject == "forget"

    def step(self) -> None:
        """Send some, and let some go on or end."""
        random_, view = self._random, self._view
        for _ in range(random_.randrange(4)):
            self._next += 1
            name = f"r{self._next}"
            pinned = random_.randrange(RANKS) if random_.random() < 0.1 else None
            try:
                view.choose(name, pinned=pinned)
            except NoRankAvailable:
                continue
            self._counters[CHOSEN] += 1
            self._open[name] = time.monotonic() + random_.uniform(0.0, 1.0)
        now = time.monotonic()
        for name in [name for name, end in self._open.items() if end < now]:
            self._end(name)
        for name in list(self._open)[:2]:
            view.first_token(name)
        if random_.random() < 0.01:
            view.rank_gone(random_.randrange(RANKS))

    def _end(self, name: str) -> None:
        del self._open[name]
        if self._forgets:
            return
        self._view.finished(name)
        self._counters[FINISHED] += 1
        if self._random.random() < 0.2:
            self._view.finished(name)
            self._view.first_token(name)

    def end_all(self) -> int:
        """End what is left; what the view still has in flight."""
        for name in list(self._open):
            self._end(name)
        return sum(load.in_flight for load in self._view.loads())


def local(
    shared: Shared, actor: int, life: int, group: str, inject: str, phase: memoryview, tell: Callable[..., None], done: Any
) -> None:
    """A frontend on the ranks' host: a view with a board, and readers of both kinds beside it."""
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ending.append(number))
    random_, counters, judge = random.Random(life), shared.counters(actor), Judge(shared, tell)
    leaks: list[Any] = []
    with (
        LoadReader(group, RANKS, chooser=random_.choice(CHOOSERS), board=True, seed=life) as view,
        GroupReader(group, RANKS) as ranks,
        MailboxReader(group, life % RANKS) as one,
    ):
        requests = Requests(view, random_, counters, inject)
        while not ending and phase[0] == 0:
            requests.step()
            known = judge.before()
            loads = view.loads()
            for load in loads:
                snapshot = load.snapshot if load.source == "mailbox" else None
                judge.row("view", load.rank, load.state, snapshot, known)
                if load.source == "none" and load.snapshot is not None:
                    tell("a load out of nowhere", rank=load.rank)
            known = judge.before()
            for rank, row in enumerate(ranks.read().tolist()):
                judge.row("group", rank, row[7], row[:4] if row[8] else None, known, row[5])
                counters[USABLE] += row[8]
            known = judge.before()
            last = one.read()
            if last is not None:
                judge.words("one", life % RANKS, last, known)
            known = judge.before()
            state = one.state()
            if state in (RankState.REFUSED, RankState.ABSENT, RankState.SILENT, RankState.CLOSED):
                judge.row("one", life % RANKS, state, None, known)
            counters[READS] += 2 * RANKS + 1
            if inject == "leak-descriptor":
                leaks.append(open("/dev/null"))  # noqa: SIM115  # never closed is what it is for
            elif inject == "leak-memory":
                leaks.append(bytearray(1 << 17))
            time.sleep(random_.uniform(0.01, 0.06))
        if ending:
            return
        done(in_flight=requests.end_all())
        board = view._sources
        while phase[0] == 1 and not ending:  # until the boards of all say so, too
            view.loads()
            if not any(board.view.in_flight) and not any(board.view.owed):
                done(host=0)
                break
            time.sleep(0.02)
        while phase[0] < 3 and not ending:
            time.sleep(0.02)
        if inject == "leak-board":
            board._board = None


def remote(
    shared: Shared, actor: int, life: int, group: str, folder: str, number: int, inject: str, phase: memoryview,
    tell: Callable[..., None], done: Any,
) -> None:  # fmt: skip
    """A frontend elsewhere: it sees no mailbox (it asks for a group that has none) and knows what comes with the batches."""
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ending.append(number))
    random_, counters, judge = random.Random(life), shared.counters(actor), Judge(shared, tell)
    context = zmq.Context()
    last: dict[int, tuple[int, ...]] = {}
    with (
        MsgpackFrontend(context, f"ipc://{folder}/f{number}", engines=RANKS) as front,
        LoadReader(f"{group}-elsewhere", RANKS, board=False, seed=life) as view,
    ):
        requests = Requests(view, random_, counters, inject)
        while not ending and phase[0] == 0:
            requests.step()
            end = time.monotonic() + random_.uniform(0.01, 0.06)
            while (left := end - time.monotonic()) > 0:
                try:
                    rank, batch = front.recv(left)
                except NothingReceived:
                    break
                judge.batch(rank, batch.load)
                last[rank] = tuple(batch.load)
                view.feed(batch)
                counters[FED] += 1
            for load in view.loads():
                if load.source == "mailbox" or (load.snapshot is None) != (load.source == "none"):
                    tell("a remote view has a load that did not come with a batch", rank=load.rank, source=load.source)
                if load.snapshot is not None and load.snapshot not in (last[load.rank], (0, 0, *last[load.rank][2:])):
                    tell("a remote view's load is not the last batch's", rank=load.rank, load=list(load.snapshot))
                counters[READS] += 1
        if not ending:
            done(in_flight=requests.end_all())
        while phase[0] < 3 and not ending:
            try:
                front.recv(0.02)  # its queues must not fill, or the ranks could not end
            except NothingReceived:
                pass
    context.term()
