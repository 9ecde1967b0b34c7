"""Frontends of both kinds behind one face, engines that are closed with the test, and counters that start from zero."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
import zmq.asyncio

from loadbox.piggyback import (
    AsyncMsgpackFrontend,
    BatchTokenIDOutSlim,
    MsgpackFrontend,
    MsgpackSendSocket,
    WireStats,
    _stats,
    connect_msgpack_engine,
    wire_stats,
)


class Blocking:
    """An ``AsyncMsgpackFrontend`` in a loop of its own, called as the synchronous one is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.frontend = AsyncMsgpackFrontend(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.frontend, name)
        if name not in ("add", "abort", "recv", "wait_ready"):
            return value
        return lambda *args, **kwargs: self.loop.run_until_complete(value(*args, **kwargs))

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("on_dead", "on_ready"):
            setattr(self.frontend, name, value)
        else:
            self.__dict__[name] = value

    def close(self) -> None:
        self.frontend.close()
        self.loop.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    """A context whose end the test does not survive if a socket was left open."""
    with zmq.Context() as made:
        yield made


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def frontend(context: zmq.Context[Any], kind: str) -> Iterator[Callable[..., Any]]:
    """Makes frontends (of the kind that the test runs with) on a free port, closed with the test."""
    made: list[Any] = []
    asyncios: list[zmq.asyncio.Context] = []

    def make(engines: int = 1, address: str = "tcp://127.0.0.1:*", **options: Any) -> Any:
        if kind == "sync":
            made.append(MsgpackFrontend(context, address, engines=engines, **options))
        else:
            asyncios.append(zmq.asyncio.Context())
            made.append(Blocking(asyncios[-1], address, engines=engines, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
    for each in asyncios:
        each.term()


@pytest.fixture
def engine(context: zmq.Context[Any]) -> Iterator[Callable[..., Any]]:
    """Connects engines, closed with the test."""
    sockets: list[Any] = []

    def connect(address: str, engine_index: int = 0, ready: object = None, timeout: float = 20, **options: Any) -> Any:
        recv, send, init = connect_msgpack_engine(
            context, address, engine_index=engine_index, ready=ready or {}, timeout=timeout, **options
        )
        sockets.extend((recv, send))
        return recv, send, init

    yield connect
    for socket in sockets:
        socket.close()


@pytest.fixture
def lane(context: zmq.Context[Any]) -> Iterator[Callable[..., tuple[MsgpackSendSocket, zmq.Socket[Any]]]]:
    """Makes a send socket and the bare PULL that hears it, without a handshake."""
    sockets: list[zmq.Socket[Any]] = []

    def make(engine_index: int = 1, **options: Any) -> tuple[MsgpackSendSocket, zmq.Socket[Any]]:
        pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        sockets.extend((pull, push))
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        push.connect(f"tcp://127.0.0.1:{port}")
        pull.rcvtimeo = 20_000
        return MsgpackSendSocket(push, engine_index, **options), pull

    yield make
    for socket in sockets:
        socket.close(linger=0)


@pytest.fixture
def counted() -> Callable[[], dict[str, int]]:
    """Gives what the wire's counters grew by since the test began; those that did not are left out."""
    before = wire_stats()

    def grown() -> dict[str, int]:
        now: WireStats = wire_stats()
        return {name: new - old for name, old, new in zip(now._fields, before, now, strict=True) if new != old}

    return grown


@pytest.fixture(autouse=True)
def _talkative() -> None:
    """Forget which warnings were given already: each test may see its own."""
    _stats._warned.clear()
    _stats._each.clear()


def make_batch(rids: list[str] | None = None, finished: str = "", **fields: Any) -> BatchTokenIDOutSlim:
    rids = ["a"] if rids is None else rids
    n = len(rids)
    columns: dict[str, Any] = {
        "rids": rids,
        "output_ids": [[10, 11] for _ in rids],
        "finished_reasons": [finished] * n,
        "prompt_tokens": [3] * n,
        "completion_tokens": [2] * n,
        "cached_tokens": [1] * n,
        "output_token_logprobs_val": [[] for _ in rids],
        "output_token_logprobs_idx": [[] for _ in rids],
    }
    return BatchTokenIDOutSlim(**{**columns, **fields})


@pytest.fixture
def batch() -> Callable[..., BatchTokenIDOutSlim]:
    """Makes a batch: one request ``a`` with two tokens, unless told otherwise."""
    return make_batch
