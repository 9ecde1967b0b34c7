"""The view that a frontend embeds."""

from __future__ import annotations

import os
import random
import threading
import weakref
from time import monotonic_ns
from typing import TYPE_CHECKING, Literal, Protocol

from loadbox.mailbox import LoadSnapshot, MailboxError, RankState
from loadbox.mailbox._check import check_load
from loadbox.mailbox._layout import RANK_LIMIT
from loadbox.mailbox._names import check_dp_size, check_group, check_int
from loadbox.reader._chooser import make_chooser
from loadbox.reader._sources import Sources
from loadbox.reader._types import NoRankAvailable, RankLoad
from loadbox.reader._view import NEVER_NS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["LoadReader"]

TRANSIT_NS = 1_000_000
"""A piggyback left its rank this long before it came in, or later: 1 ms."""

_STATES = tuple(RankState)
_tuple = tuple.__new__
_readers: weakref.WeakSet[LoadReader] = weakref.WeakSet()


class _Batch(Protocol):
    """What ``feed`` needs of a decoded batch: the columns of ``BatchTokenIDOutSlim``."""

    @property
    def rids(self) -> Sequence[str]: ...
    @property
    def output_ids(self) -> Sequence[Sequence[int]]: ...
    @property
    def finished_reasons(self) -> Sequence[str]: ...
    @property
    def engine_index(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def kv_active_pages(self) -> int: ...
    @property
    def kv_total_pages(self) -> int: ...


class LoadReader:
    """A frontend's view of a DP group: every rank's load, its own dispatches, and the choice of a rank for a request.

    For each rank it takes the best source there is: the mailbox, if one of the group is on this host and usable; else the last
    batch that came from the rank with a load (``feed``); else nothing.  It switches by itself as they come and go, and never lets
    a report erase a dispatch that the report cannot know.  ``docs/routing.md`` explains the rule.

    Args:
        group: as the mailboxes' writers have it.
        dp_size: ranks in the group.  None: as many as are seen, in mailboxes and in batches.
        chooser: "cold-set" (the default), "own", "p2c", "least", "vllm", "smg" or "round-robin".
        board: "auto": publish this frontend's dispatches to the others on this host and count theirs, where that can be done;
            True: raise where it cannot; False: do neither.
        engine_index_base: the engine index of rank 0 in batches.
        seed: of the draws between ties; None: from the system.

    Raises:
        ValueError, TypeError: bad arguments.
        MailboxError: ``board=True`` and the board cannot be made; ``errno`` says why.

    Where mailboxes are not supported the view goes on with what is fed to it.  After ``close``, ``choose`` and ``loads`` raise
    ``MailboxError``; reports and events are ignored.
    Threads: may be shared, calls are serialised by a lock; not from a signal handler.
    Fork: a child's view starts without dispatches, and with a board and draws of its own.
    asyncio: no method waits, call them in the loop.
    """

    __slots__ = ("__weakref__", "_base", "_chooser", "_dp_size", "_group", "_lock", "_open", "_random", "_sources")

    def __init__(
        self,
        group: str,
        dp_size: int | None = None,
        *,
        chooser: str = "cold-set",
        board: Literal["auto"] | bool = "auto",
        engine_index_base: int = 0,
        seed: int | None = None,
    ) -> None:
        self._open = False
        self._group = check_group(group)
        self._dp_size = check_dp_size(dp_size)
        self._chooser = make_chooser(chooser)
        if board not in ("auto", True, False):
            raise ValueError(f"board is {board!r}: use 'auto', True or False")
        self._base = check_int("engine_index_base", engine_index_base)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._sources = Sources(group, self._dp_size, board)
        self._open = True
        _readers.add(self)

    def choose(self, request_id: str, prompt_tokens: int = 0, *, pinned: int | None = None, exclude: Collection[int] = ()) -> int:
        """Choose a rank for a request and book the dispatch there, as of now.

        Args:
            request_id: not in flight already; it names the request until it is finished.
            prompt_tokens: its length, for choosers that weigh it; none of the present ones does.
            pinned: the rank to be taken (where its prefix is cached, say), unless it ended.  Also tells the view that a
                rank which ``rank_gone`` declared gone is back.
            exclude: ranks not to be taken.

        Raises:
            ValueError: the id is in flight, or ``pinned`` is not a rank of the group.
            TypeError: ``pinned`` is no int, or ``exclude`` no collection of them.
            NoRankAvailable: nothing is left to choose; nothing is booked.
        """
        with self._lock:
            if not self._open:
                raise MailboxError("this view is closed")
            sources = self._sources
            if request_id in sources.ledger.requests:
                raise ValueError(
                    f"request {request_id!r} is in flight on rank {sources.ledger.rank_of(request_id)}: finish it first"
                )
            view = sources.look()
            if pinned is not None:
                rank = self._pinned(check_int("pinned", pinned), exclude)
            else:
                try:
                    for excluded in exclude:
                        if 0 <= excluded < view.n:
                            view.allowed[excluded] = 0
                except TypeError:
                    raise _no_ranks(exclude) from None
                rank = self._chooser.pick(view, self._random)
                if rank < 0:
                    raise self._none_available(exclude)
            sources.ledger.book(request_id, rank, sources.ranks.lives[rank], view.now_ns)
            return rank

    def _pinned(self, rank: int, exclude: Collection[int]) -> int:
        sources = self._sources
        n = sources.view.n
        if not 0 <= rank < n:
            if rank >= 0 and self._dp_size is None:
                raise NoRankAvailable(f"rank {rank} is pinned, but only {n} ranks of group {self._group} are known: give dp_size")
            raise ValueError(f"pinned is {rank}, but group {self._group} has the ranks 0 to {n - 1}")
        try:
            excluded = rank in exclude
        except TypeError:
            raise _no_ranks(exclude) from None
        if excluded:
            raise NoRankAvailable(f"rank {rank} is pinned and excluded: choose without pinned")
        if not sources.ranks.back(rank):
            state = RankState(sources.inputs.state[rank]).name
            raise NoRankAvailable(f"rank {rank} of group {self._group} is pinned, but it is {state}: choose without pinned")
        return rank

    def _none_available(self, exclude: Collection[int]) -> NoRankAvailable:
        sources = self._sources
        n = sources.view.n
        if not n:
            return NoRankAvailable(f"no rank of group {self._group} is known yet: give dp_size, or wait for a mailbox or a batch")
        barred = sum(rank in exclude for rank in range(n))
        left = [f"{rank} {RankState(sources.inputs.state[rank]).name}" for rank in range(n) if rank not in exclude]
        others = f"; ended or declared gone: {', '.join(left[:8])}{', ...' if len(left) > 8 else ''}" if left else ""
        return NoRankAvailable(f"none of the {n} ranks of group {self._group} may be chosen: {barred} excluded{others}")

    def feed(self, batch: _Batch) -> None:
        """Take in a decoded batch: the rank's load, and first tokens and finishes of this view's own requests.

        ``batch.engine_index - engine_index_base`` is the rank.  A batch from an engine outside the group is left out.  A load that
        no scheduler can have (or the four zeros of "no snapshot") leaves the last one standing; requests of others are ignored.
        """
        now_ns = monotonic_ns()
        try:
            rank = batch.engine_index - self._base
        except AttributeError:
            raise TypeError(
                f"feed takes a decoded batch, as MsgpackFrontend.recv and decode_batch give it, not {type(batch).__name__}"
            ) from None
        with self._lock:
            if not self._open:
                return
            sources = self._sources
            if not 0 <= rank < sources.view.n:
                if not 0 <= rank < (self._dp_size or RANK_LIMIT):
                    sources.tell(f"batches of engine {batch.engine_index} are left out: group {self._group} has no rank {rank}")
                    return
                sources.grow(rank + 1)
            ledger = sources.ledger
            for request_id, ids, reason in zip(batch.rids, batch.output_ids, batch.finished_reasons, strict=False):
                if ledger.rank_of(request_id) == rank:
                    if reason:
                        self._finish(request_id)
                    elif ids:
                        ledger.first_token(request_id)
            sources.ranks.heard(rank, _load_of(batch), now_ns - TRANSIT_NS)

    def first_token(self, request_id: str) -> None:
        """The first token of a request has come, by a transport that is not fed.  Idempotent; unknown ids are ignored."""
        with self._lock:
            if self._open:
                self._sources.ledger.first_token(request_id)

    def finished(self, request_id: str) -> None:
        """A request has ended, in whatever way: finished, aborted, failed.  Idempotent; unknown ids are ignored."""
        with self._lock:
            if self._open:
                self._finish(request_id)

    def _finish(self, request_id: str) -> None:
        emptied = self._sources.ledger.finished(request_id)
        if emptied >= 0:
            self._sources.ranks.idle(emptied)

    def rank_gone(self, rank: int) -> None:
        """The engine behind a rank is gone (``ENGINE_CORE_DEAD``, a lost process), and what this view had in flight there.

        The rank is not chosen again until it shows life: a mailbox under another epoch, a batch, or a request that is pinned
        to it.  To leave a living rank out for a while, use ``exclude``.  ValueError if it is not a rank of the group; without a
        ``dp_size`` any may be, and nothing happens for one that was never seen.
        """
        with self._lock:
            if not self._open:
                return
            rank = check_int("rank", rank)
            known = self._sources.view.n
            if not 0 <= rank < (self._dp_size or RANK_LIMIT):
                raise ValueError(f"rank is {rank}, but group {self._group} has {known} ranks")
            if rank < known:
                self._sources.ranks.gone(rank)

    def loads(self) -> list[RankLoad]:
        """Every rank as it is known now, the list's place being the rank.  Books nothing and waits for nobody."""
        with self._lock:
            if not self._open:
                raise MailboxError("this view is closed")
            sources = self._sources
            view = sources.look()
            now_ns = view.now_ns
            numbers = zip(view.running, view.waiting, view.kv_active, view.kv_total, strict=True)
            others = zip(view.mailbox, view.reported_ns, sources.inputs.state, sources.words, strict=False)
            loads = []
            for rank, (load, (mailbox, reported_ns, state, word)) in enumerate(zip(numbers, others, strict=True)):
                snapshot, source, age = None, "none", None
                if load[3]:
                    snapshot = _tuple(LoadSnapshot, load)
                    source = "mailbox" if mailbox else "piggyback"
                    if reported_ns != NEVER_NS:
                        age = (now_ns - reported_ns - (0 if mailbox else TRANSIT_NS)) / 1e9
                loads.append(_tuple(RankLoad, (rank, snapshot, source, _STATES[state], age, word & 0xFFFFFFFF, word >> 32)))
            return loads

    def close(self) -> None:
        """Remove the board and let go of all mappings.  Idempotent."""
        with self._lock:
            if self._open:
                self._open = False
                self._sources.close()

    def _forked(self) -> None:
        self._lock = threading.Lock()  # the old one may be held by a thread that the child does not have
        if self._open:
            self._random = random.Random()
            self._sources.forked()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if self._open:
            self._open = False
            self._sources.close()

    def __repr__(self) -> str:
        return f"<LoadReader {self._group} ranks={self._sources.view.n}{'' if self._open else ' closed'}>"


def _load_of(batch: _Batch) -> tuple[int, int, int, int] | None:
    try:
        load = check_load(batch.num_running, batch.num_waiting, batch.kv_active_pages, batch.kv_total_pages)
    except (TypeError, ValueError):
        return None
    return load if load[3] else None


def _after_fork_in_child() -> None:
    for reader in list(_readers):
        reader._forked()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _no_ranks(exclude: object) -> TypeError:
    return TypeError(f"exclude must be a collection of ranks, as in exclude={{0}}, not {exclude!r}")
