"""Old and new at either end: a frontend with a fixed ten-element tuple, engines of every era, and either order of upgrading."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from loadbox.mailbox import LoadSnapshot

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
BUSY, IDLE = (2, 5, 100, 400), (0, 0, 90, 400)
FixedTen = tuple[
    str, list[str], list[list[int]], list[str], list[int], list[int], list[int], list[list[float]], list[list[int]], int
]  # fmt: skip


class OldFrontend:
    """A frontend from before the load tail: it advertises nothing and decodes ten elements exactly."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.sockets = [context.socket(kind) for kind in (zmq.ROUTER, zmq.ROUTER, zmq.PULL)]
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in self.sockets]
        for socket in self.sockets:
            socket.rcvtimeo = 20_000
        self.address, *self.data = (f"tcp://127.0.0.1:{port}" for port in ports)

    def greet(self) -> None:
        handshake, requests, _ = self.sockets
        identity, _ = handshake.recv_multipart()
        addresses = {"inputs": [self.data[0]], "outputs": [self.data[1]], "coordinator_input": None, "coordinator_output": None}
        handshake.send_multipart(
            [identity, pack({"addresses": {**addresses, "frontend_stats_publish_address": None}, "parallel_config": {}})]
        )
        assert unpack(handshake.recv_multipart()[1])["status"] == "READY"
        requests.recv_multipart()

    def recv(self) -> Any:
        return msgspec.msgpack.decode(self.sockets[2].recv(), type=FixedTen)

    def silent(self) -> bool:
        return not self.sockets[2].poll(100)


@pytest.fixture
def old_frontend(context: zmq.Context[Any]) -> Iterator[OldFrontend]:
    made = OldFrontend(context)
    yield made
    for socket in made.sockets:
        socket.close(linger=0)


class OldEngine:
    """An engine from before the load tail (ten elements) or before the engine index (nine), with bare sockets."""

    def __init__(self, context: zmq.Context[Any], address: str, index: int, elements: int) -> None:
        self.index, self.elements = index, elements
        identity = bytes([index, 0])
        handshake, self.requests, self.output = (context.socket(kind) for kind in (zmq.DEALER, zmq.DEALER, zmq.PUSH))
        for socket in (handshake, self.requests):
            socket.setsockopt(zmq.IDENTITY, identity)
            socket.rcvtimeo = 20_000
        handshake.connect(address)
        status = {"local": True, "headless": True, "parallel_config_hash": None}
        handshake.send(pack({"status": "HELLO", **status}))
        addresses = unpack(handshake.recv())["addresses"]
        handshake.send(pack({"status": "READY", **status}))
        self.requests.connect(addresses["inputs"][0])
        self.requests.send(pack({"max_model_len": 5}))
        self.output.connect(addresses["outputs"][0])
        handshake.close(linger=1000)

    def send(self, rid: str) -> None:
        wire = ["BatchTokenIDOutSlim", [rid], [[10, 11]], [""], [3], [2], [1], [[]], [[]], self.index]
        self.output.send(pack(wire[: self.elements]))

    def close(self) -> None:
        self.requests.close(linger=0)
        self.output.close(linger=0)


def connect(engine: Any, old_frontend: OldFrontend, **options: Any) -> Any:
    thread = threading.Thread(target=old_frontend.greet)
    thread.start()
    ends = engine(old_frontend.address, **options)
    thread.join()
    return ends


@pytest.mark.parametrize("load_only", ["negotiated", "always", "never"])
def test_engine_upgraded_first_then_the_frontend(old_frontend, frontend, engine, batch, load_only):
    # First the engine alone is new, and its frontend can read ten elements and nothing else.
    _, send, init = connect(engine, old_frontend, tail="negotiated", load_only=load_only)
    assert (init.tail, init.load_only) == (False, False)
    send.load_fn = lambda: BUSY
    send.send_pyobj(batch())
    assert old_frontend.recv() == ("BatchTokenIDOutSlim", ["a"], [[10, 11]], [""], [3], [2], [1], [[]], [[]], 0)
    send.load_fn = lambda: IDLE
    send.after_advance()
    assert old_frontend.silent(), "a ten-element peer never gets a load-only batch"
    # Then the frontend is new too, and the same setting sends it the tail.
    front = frontend()
    _, send, _ = engine(front.handshake_address, tail="negotiated", load_only=load_only)
    send.load_fn = lambda: BUSY
    send.send_pyobj(batch())
    assert front.recv(timeout=20)[1].load == LoadSnapshot(*BUSY)
    send.load_fn = lambda: IDLE
    send.after_advance()
    if load_only == "never":
        with pytest.raises(TimeoutError):
            front.recv(timeout=0.1)
    else:
        assert front.recv(timeout=20)[1].load == LoadSnapshot(*IDLE)


@pytest.mark.parametrize("elements", [9, 10])
def test_frontend_upgraded_first_then_the_engines_one_by_one(context, frontend, engine, batch, elements):
    front = frontend(engines=2)
    old = [OldEngine(context, front.handshake_address, rank, elements) for rank in range(2)]
    front.wait_ready(20)
    for rank in range(2):
        old[rank].send(f"old {rank}")
        got_rank, got = front.recv(timeout=20)
        assert (got_rank, got.rids, got.engine_index, got.load) == (rank, [f"old {rank}"], rank, None)
    old[1].close()
    _, send, init = engine(front.handshake_address, 1, tail="negotiated")
    assert init.tail
    send.send_pyobj(batch(["new"]), load=BUSY)
    assert front.recv(timeout=20)[1].load == LoadSnapshot(*BUSY)
    old[0].send("still old")
    assert front.recv(timeout=20) == (0, batch(["still old"], engine_index=0))
    old[0].close()


def test_without_negotiation_a_fixed_ten_element_decoder_fails(old_frontend, engine, batch):
    # What tail="negotiated" is there for: were this not so, the tests above would show nothing.
    _, send, _ = connect(engine, old_frontend)
    send.send_pyobj(batch(), load=BUSY)
    with pytest.raises(msgspec.ValidationError, match="length 10"):
        old_frontend.recv()


def test_an_engine_of_a_later_era_is_read(context, frontend):
    front = frontend()
    later = OldEngine(context, front.handshake_address, 0, 10)
    front.wait_ready(20)
    later.output.send(pack(["BatchTokenIDOutSlim", ["a"], [[10]], [""], [3], [2], [1], [[]], [[]], 0, *BUSY, "later", [1.5], None]))
    assert front.recv(timeout=20)[1].load == LoadSnapshot(*BUSY)
    later.close()
