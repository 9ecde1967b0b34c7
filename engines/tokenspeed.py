"""TokenSpeed on the mailbox: a sink for its load reporter, and a store for its load queries and its DP controller.

**The writing side.**  TokenSpeed's event loop feeds a ``LoadReporter``, whose sink has ``observe(values)`` and ``close()``.  One
line in ``create_load_reporter`` (in ``tokenspeed.runtime.engine.load_snapshot``), where it has made a sink, adds the mailbox, with
``import loadbox.engines.tokenspeed`` above::

    publisher = loadbox.engines.tokenspeed.with_mailbox(publisher, endpoint, dp_rank, enabled=enabled)

Ranks that do not own request I/O are not enabled, and get no mailbox.

**The reading side.**  ``MailboxLoadStore`` has the contract of ``LoadSnapshotStore``, and answers from the mailboxes: where one of
those is made, make one of these.

Contracts as of TokenSpeed 0.1.1, against whose classes the tests run.  Nothing of TokenSpeed is imported before it is needed.
"""

from __future__ import annotations

import os
import re
from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from loadbox.engines._publisher import LoadPublisher
from loadbox.mailbox import GroupReader, RankState

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["MailboxLoadStore", "MailboxSink", "group_of", "with_mailbox"]

_ARRIVED_NS = 100_000_000
"""A rank that publishes so long after a request was sent to it counts the request: it takes in all that has come before it samples
its load, a few milliseconds later, in every round."""

LoadValues = tuple[int, int, int, int, int]
"""What its reporter observes: running, waiting, active pages, active and cached pages, all pages."""


class _Sink(Protocol):
    def observe(self, values: LoadValues, /) -> None: ...
    def close(self) -> None: ...


class _Budget(Protocol):
    reservations: dict[int, int]

    def update_budget(self, loads: list[Any], reset_rank: int | None = None) -> None: ...


def group_of(endpoint: str) -> str:
    """The group's name: LOADBOX_GROUP, or made of the endpoint of the load snapshots, which all parts of one server know.

    ``tcp://127.0.0.1:5004`` gives ``tokenspeed-127-0-0-1-5004``.
    """
    given = os.environ.get("LOADBOX_GROUP")
    if given:
        return given
    if not endpoint:
        raise ValueError("an empty endpoint tells no server from another; set LOADBOX_GROUP")
    return "tokenspeed-" + re.sub(r"[^A-Za-z0-9_]+", "-", endpoint.partition("://")[2] or endpoint)[-53:].strip("-")


class MailboxSink:
    """A sink for TokenSpeed's ``LoadReporter`` that publishes to the rank's mailbox, and holds the load for the piggyback.

    Nothing that goes wrong with the mailbox reaches the event loop: see ``LoadPublisher``.

    Args:
        group: the mailboxes' group; ``group_of`` makes one.
        dp_rank: this rank, its attention DP rank.
        dp_size: ranks in the group, if known.
        then: another sink, which sees every observation too; what it raises passes.
        mode: permission bits, as of ``MailboxWriter``.

    Threads: one, the event loop's.  Fork: a child's observations are dropped.
    """

    def __init__(
        self, group: str, dp_rank: int, dp_size: int | None = None, *, then: _Sink | None = None, mode: int = 0o600
    ) -> None:
        self.publisher = LoadPublisher(group, dp_rank, dp_size, mode=mode)
        self._publish = self.publisher.publish
        self._then = then
        self._values: LoadValues = (0, 0, 0, 0, 0)

    def observe(self, values: LoadValues) -> None:
        """Publish (running, waiting, active pages, active and cached pages, all pages); the cached ones can be had at once, and
        are left out."""
        try:
            running, waiting, active, _, total = values
        except Exception as error:
            self.publisher.drop(error)
        else:
            self._values = values
            self._publish(running, waiting, active, total)
        if self._then is not None:
            self._then.observe(values)

    def load(self) -> tuple[int, int, int, int]:
        """(running, waiting, active pages, all pages) as last observed: a ``load_fn`` for ``MsgpackSendSocket``.

        Four zeros, no snapshot, before the first observation.
        """
        running, waiting, active, _, total = self._values
        return running, waiting, active, total

    def close(self) -> None:
        """Say CLOSED.  Idempotent."""
        self.publisher.close()
        if self._then is not None:
            self._then.close()


def with_mailbox(
    publisher: _Sink, endpoint: str, dp_rank: int, *, enabled: bool, dp_size: int | None = None, mode: int = 0o600
) -> _Sink:
    """Put a ``MailboxSink`` before the sink that TokenSpeed chose; give that one back alone on ranks that do not report.

    ``mode`` has the file's permission bits, as of ``MailboxWriter``: 0o640 lets its group read, too.

    Never raises an ``Exception``: an engine without a mailbox has its own sink all the same.
    """
    if not enabled:
        return publisher
    try:
        group = group_of(endpoint)
    except Exception:
        group = endpoint  # which names no group either, as LoadPublisher will say
    return MailboxSink(group, dp_rank, dp_size, then=publisher, mode=mode)


class _Row(NamedTuple):
    """A row of ``GroupReader.read``, which see."""

    num_running: int
    num_waiting: int
    kv_active_pages: int
    kv_total_pages: int
    published_ns: int
    epoch: int
    rank: int
    state: int
    usable: bool


class MailboxLoadStore:
    """TokenSpeed's ``LoadSnapshotStore`` on mailboxes: nobody has to send it anything, and it is as new as the last iteration.

    A rank is *fresh* while its mailbox is LIVE: the owner lives, and its snapshot is younger than ``stall_after`` or says idle.
    Unlike a message, an idle rank's snapshot does not expire, and a dead rank's does at once.  ``num_used_pages`` and ``num_pages``
    count the active pages, without the cached ones, which the mailbox does not have.

    Args:
        group: the mailboxes' group; ``group_of`` makes one.
        dp_size: ranks in the group, all of which must be fresh for ``project_loads``.
        budget: a ``DPBudget`` to be kept up to date by ``is_complete_fresh``, which the controller asks before every dispatch.
        stall_after: seconds, as of ``MailboxReader``.

    Raises:
        ValueError, TypeError, MailboxUnsupported: as ``GroupReader``.

    Threads: calls are to be serialised by the caller.
    asyncio: no method waits.
    """

    def __init__(self, group: str, dp_size: int, *, budget: _Budget | None = None, stall_after: float = 5.0) -> None:
        self._dp_size = dp_size
        self._reader = GroupReader(group, dp_size, stall_after=stall_after)
        self._rows = self._reader.read()
        self._valid_for_ms = int(stall_after * 1000)
        self._budget = budget
        self._epochs: dict[int, int] = {}
        self._sent: list[deque[int]] = [deque() for _ in range(dp_size)]  # when each reservation was made, ns
        self._looked_ns = monotonic_ns()

    def accept(self, snapshot: object) -> bool:
        """False: snapshots that are sent are not needed, nor taken."""
        return False

    def fresh_snapshots(self) -> list[Any]:
        """A ``LoadSnapshot`` of TokenSpeed's for every rank that is fresh now, in the ranks' order.

        ``epoch`` is the mailbox's, in hex; ``sequence`` the time of its publish, ns of CLOCK_MONOTONIC.
        """
        from tokenspeed.runtime.engine.io_struct import LoadSnapshot

        return [
            LoadSnapshot(
                f"{row.epoch:016x}", row.published_ns, row.rank, row.num_running, row.num_waiting, row.kv_active_pages,
                row.kv_active_pages, row.kv_total_pages, self._valid_for_ms,
            )
            for row in self._fresh()
        ]  # fmt: skip

    def project_loads(self) -> list[Any]:
        """A ``GetLoadReqOutput`` of TokenSpeed's for every rank; empty unless all are fresh."""
        return self._project(self._fresh())

    def is_complete_fresh(self) -> bool:
        """Whether every rank is fresh now.  Brings the budget up to date, if there is one."""
        rows = self._fresh()
        complete = len(rows) == self._dp_size
        if self._budget is not None and complete:
            self._update(self._budget, rows)
        return complete

    def close(self) -> None:
        """Let go of the mailboxes.  Idempotent."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _update(self, budget: _Budget, rows: list[_Row]) -> None:
        # The budget takes a reservation back when a rank's requests have grown.  Fed by messages it sees every growth; asked only
        # before a dispatch, it would miss the requests that came and went between, and keep their reservations for ever.
        now = monotonic_ns()
        for row in rows:
            new = budget.reservations.get(row.rank, 0) - len(self._sent[row.rank])
            if new > 0:  # the controller dispatches right after it has looked; what it pins to a rank may be younger
                self._sent[row.rank].extend([self._looked_ns] + [now] * (new - 1))
        loads = self._project(rows)
        for row in rows:
            if self._epochs.get(row.rank, row.epoch) != row.epoch:
                budget.update_budget(loads, reset_rank=row.rank)
            self._epochs[row.rank] = row.epoch
        budget.update_budget(loads)
        for row in rows:
            sent = self._sent[row.rank]
            while len(sent) > budget.reservations[row.rank]:
                sent.popleft()
            while sent and row.published_ns - sent[0] >= _ARRIVED_NS:
                sent.popleft()
                budget.reservations[row.rank] -= 1
        self._looked_ns = now

    def _fresh(self) -> list[_Row]:
        rows = self._reader.read(self._rows)
        return [row for row in map(_Row._make, rows.tolist()) if row.state == RankState.LIVE]

    def _project(self, rows: list[_Row]) -> list[Any]:
        if len(rows) != self._dp_size:
            return []
        from tokenspeed.runtime.engine.io_struct import GetLoadReqOutput

        return [
            GetLoadReqOutput(
                dp_rank=row.rank,
                num_reqs=row.num_running + row.num_waiting,
                num_waiting_reqs=row.num_waiting,
                num_pages=row.kv_active_pages,
            )
            for row in rows
        ]
