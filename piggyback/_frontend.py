"""The two frontends: one set of lanes, and two ways of waiting for it."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable
from types import TracebackType
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from loadbox.piggyback._batch import BatchTokenIDOutSlim
from loadbox.piggyback._engines import EngineInfo, EpochLookup
from loadbox.piggyback._errors import HandshakeTimeout, NothingReceived
from loadbox.piggyback._lanes import Lanes, RankCallback
from loadbox.piggyback._requests import GenerateRequest

__all__ = ["AsyncMsgpackFrontend", "MsgpackFrontend"]

T = TypeVar("T")
# Work that yields the moment until which it wants to wait for a message (None: without limit), and is sent whether one came.
Waits = Generator["float | None", bool, T]


class _Frontend:
    """What both frontends have in common: everything but the waiting."""

    _socket_class: type[zmq.Socket[Any]]
    _poller_class: type[zmq.Poller]

    def __init__(
        self,
        context: zmq.Context[Any],
        handshake_address: str,
        engines: int,
        *,
        engine_index_base: int = 0,
        ready_timeout: float = 30.0,
        mailbox_epoch: EpochLookup | None = None,
        advertise: bool = True,
        advertise_host: str | None = None,
    ) -> None:
        self._ready_timeout = ready_timeout
        self._lanes = Lanes(
            context,
            handshake_address,
            engines,
            engine_index_base=engine_index_base,
            advertise=advertise,
            advertise_host=advertise_host,
            mailbox_epoch=mailbox_epoch,
            socket_class=self._socket_class,
        )
        self._poller = self._poller_class()
        for socket in self._lanes.pollable:
            self._poller.register(socket, zmq.POLLIN)

    @property
    def handshake_address(self) -> str:
        """Where engines knock; with the port that was chosen, if a wildcard was asked for."""
        return self._lanes.handshake_address

    @property
    def engines(self) -> tuple[EngineInfo, ...]:
        """What is known of each engine, by rank; as of the last call that took messages in."""
        return self._lanes.engines

    @property
    def on_dead(self) -> RankCallback | None:
        """Called with a rank when its engine says ``ENGINE_CORE_DEAD``, or when it says HELLO anew without having said so.

        It runs inside ``recv``, ``add``, ``abort`` or ``wait_ready``, in their thread.  Whatever that rank had in flight is lost,
        and the load that it last sent says nothing any more.  What the callable raises is logged.
        """
        return self._lanes.on_dead

    @on_dead.setter
    def on_dead(self, callback: RankCallback | None) -> None:
        self._lanes.on_dead = callback

    @property
    def on_ready(self) -> RankCallback | None:
        """Called with a rank when its engine has registered and takes requests, the first time and each time it comes back."""
        return self._lanes.on_ready

    @on_ready.setter
    def on_ready(self, callback: RankCallback | None) -> None:
        self._lanes.on_ready = callback

    def _receiving(self, timeout: float | None) -> Waits[tuple[int, BatchTokenIDOutSlim]]:
        lanes = self._lanes
        lanes.require_usable()
        deadline = _deadline(timeout)
        while not lanes.batches:
            lanes.pump()
            if not lanes.batches and not (yield deadline):
                raise NothingReceived(timeout or 0.0)
        return lanes.batches.popleft()

    def _registering(self, ranks: Iterable[int], timeout: float | None) -> Waits[None]:
        engines = [self._lanes.engines[rank] for rank in ranks]
        deadline = _deadline(timeout)
        while True:
            self._lanes.pump()
            late = [engine for engine in engines if engine.state in ("absent", "greeted")]
            if not late:
                return
            if not (yield deadline):
                states = ", ".join(f"rank {engine.rank} is {engine.state}" for engine in late)
                raise HandshakeTimeout(f"no registration at {self.handshake_address} within {timeout or 0.0:g} s: {states}")

    def _adding(self, rank: int, request: GenerateRequest) -> Waits[None]:
        engine = self._lanes.engine(rank)
        yield from self._registering([engine.rank], self._ready_timeout)
        self._lanes.add(engine, request)

    def _abort(self, rank: int, rids: Iterable[str]) -> None:
        engine = self._lanes.engine(rank)
        self._lanes.pump()
        self._lanes.abort(engine, rids)

    def __del__(self) -> None:
        if hasattr(self, "_lanes"):
            self._lanes.close()

    def __repr__(self) -> str:
        states = " ".join(f"{engine.rank}:{engine.state}" for engine in self._lanes.engines)
        return f"<{type(self).__name__} {self.handshake_address} {states}>"


class MsgpackFrontend(_Frontend):
    """The frontend's end of the lane for N engines, synchronous.

    Binds ``handshake_address`` (``tcp://host:port``, ``tcp://host:*``, ``ipc://path``) and the data lanes beside it, and answers
    engines from then on, also while nobody calls: no order of starting is asked for.  Ranks are 0 to ``engines`` - 1; rank r is
    the engine with index ``engine_index_base`` + r.  INIT advertises the load tail and load-only batches
    (``advertise=False``: nothing, as an old frontend).  ``advertise_host`` is the host that engines are told when the address is
    a wildcard one.  ``mailbox_epoch(group, rank)`` gives the epoch of the mailbox found on this host, for ``EngineInfo.same_host``.

    One thread at a time, as with ZMQ sockets; only the answers to HELLO come from a thread of its own.  In a forked child every
    call is a ``WireError``.  Close it before the context; a context manager.
    """

    _socket_class = zmq.Socket
    _poller_class = zmq.Poller

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until every engine has registered or died; ``HandshakeTimeout`` after ``timeout`` seconds.

        Batches that come meanwhile are kept for ``recv``.
        """
        self._run(self._registering(range(len(self.engines)), timeout))

    def add(self, rank: int, request: GenerateRequest) -> None:
        """Give a request to a rank.  Waits up to ``ready_timeout`` for an engine that has not registered yet.

        Raises ``HandshakeTimeout`` if it does not, ``EngineUnavailable`` if it is dead, its connection gone or its queue full
        (never waits for those), ``WireError`` for what cannot be encoded and ``ValueError`` for a rank that is none.
        """
        self._run(self._adding(rank, request))

    def abort(self, rank: int, rids: Iterable[str]) -> None:
        """Tell a rank to drop these requests; a rank that is gone has none.  ``EngineUnavailable`` if its queue is full."""
        self._abort(rank, rids)

    def recv(self, timeout: float | None = None) -> tuple[int, BatchTokenIDOutSlim]:
        """Give the next batch and its rank; waits at most ``timeout`` seconds (None: without limit), then ``NothingReceived``.

        Load-only batches are given out like others, with empty columns.  Unreadable messages are dropped, counted and logged.
        """
        return self._run(self._receiving(timeout))

    def close(self) -> None:
        """Close every lane; what is queued has a second to leave.  Idempotent."""
        self._lanes.close()

    def _run(self, work: Waits[T]) -> T:
        try:
            deadline = next(work)
            while True:
                deadline = work.send(bool(self._poller.poll(_left_ms(deadline))))
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]

    def __enter__(self) -> MsgpackFrontend:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class AsyncMsgpackFrontend(_Frontend):
    """``MsgpackFrontend`` for asyncio: the same, with ``await`` before ``wait_ready``, ``add``, ``abort`` and ``recv``.

    The context may be a ``zmq.Context`` or a ``zmq.asyncio.Context``.  Use it in one event loop; several of its tasks may call
    it, and a cancelled call loses no batch.  ``on_dead`` and ``on_ready`` are plain callables, called in the loop's thread.
    """

    _socket_class = zmq.asyncio.Socket
    _poller_class = zmq.asyncio.Poller

    async def wait_ready(self, timeout: float | None = None) -> None:
        """As ``MsgpackFrontend.wait_ready``."""
        await self._run(self._registering(range(len(self.engines)), timeout))

    async def add(self, rank: int, request: GenerateRequest) -> None:
        """As ``MsgpackFrontend.add``."""
        await self._run(self._adding(rank, request))

    async def abort(self, rank: int, rids: Iterable[str]) -> None:
        """As ``MsgpackFrontend.abort``."""
        self._abort(rank, rids)

    async def recv(self, timeout: float | None = None) -> tuple[int, BatchTokenIDOutSlim]:
        """As ``MsgpackFrontend.recv``."""
        return await self._run(self._receiving(timeout))

    def close(self) -> _Done:
        """Close every lane; what is queued has a second to leave.  Idempotent; done at once, with ``await`` or without."""
        self._lanes.close()
        return _Done()

    async def _run(self, work: Waits[T]) -> T:
        try:
            deadline = next(work)
            while True:
                events = await self._poller.poll(_left_ms(deadline))  # type: ignore[misc]  # pyzmq types it as a list
                deadline = work.send(bool(events))
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]

    async def __aenter__(self) -> AsyncMsgpackFrontend:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Done:
    """Something to await that is over already."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _left_ms(deadline: float | None) -> int | None:
    """Rounded up, so that the last millisecond is waited for and not spun through."""
    return None if deadline is None else max(0, math.ceil((deadline - time.monotonic()) * 1000))
