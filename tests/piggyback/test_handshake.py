"""The handshake: what each message says, its limit, odd messages, and the keys that the two ends negotiate with."""

from __future__ import annotations

import dataclasses
import logging
import struct
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy
import pytest
import zmq

from loadbox.mailbox import LoadSnapshot, MailboxReader, MailboxWriter
from loadbox.piggyback import HandshakeTimeout, MailboxKey, WireError, connect_msgpack_engine, decode_batch

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
ADDRESSES = {"coordinator_input": None, "coordinator_output": None, "frontend_stats_publish_address": None}
READY_KEYS = {
    "max_model_len", "num_gpu_blocks", "prefix_granularity", "dp_stats_address", "dtype", "multimodal_encoder_dtype",
    "vllm_version",
    "world_size", "data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size",
    "data_parallel_rank", "max_num_seqs", "max_num_batched_tokens", "instance_id", "kv_cache_size_tokens",
    "kv_cache_max_concurrency",
    "kv_events_config",
}  # fmt: skip


class RawFrontend:
    """A frontend made of bare sockets, which says exactly what a test has it say."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.handshake, self.input, self.output = (context.socket(kind) for kind in (zmq.ROUTER, zmq.ROUTER, zmq.PULL))
        self.address, self.input_address, self.output_address = (self._bind(each) for each in self.sockets)
        self.heard: list[Any] = []

    @property
    def sockets(self) -> tuple[zmq.Socket[Any], ...]:
        return self.handshake, self.input, self.output

    def _bind(self, socket: zmq.Socket[Any]) -> str:
        socket.rcvtimeo = 20_000
        return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"

    def init(self, **keys: Any) -> dict[str, Any]:
        addresses = {"inputs": [self.input_address], "outputs": [self.output_address], **ADDRESSES}
        return {"addresses": addresses, "parallel_config": {}, **keys}

    def serve(self, init: Any, hear: bool = True) -> threading.Thread:
        """Answer one HELLO with ``init`` (an object or bytes), then ``hear`` READY and the ready response."""

        def work() -> None:
            identity, hello = self.handshake.recv_multipart()
            self.heard.append((identity, unpack(hello)))
            self.handshake.send_multipart([identity, init if isinstance(init, bytes) else pack(init)])
            for socket in (self.handshake, self.input) if hear else ():
                identity, message = socket.recv_multipart()
                self.heard.append((identity, unpack(message)))

        thread = threading.Thread(target=work)
        thread.start()
        return thread


@pytest.fixture
def raw(context: zmq.Context[Any]) -> Iterator[RawFrontend]:
    made = RawFrontend(context)
    yield made
    for socket in made.sockets:
        socket.close(linger=0)


def test_what_an_engine_says(raw, engine):
    thread = raw.serve(raw.init())
    _, _, init = engine(raw.address, 258, {"max_model_len": 4096, "dtype": "float16", "something_new": 5})
    thread.join()
    (hello_from, hello), (ready_from, ready), (response_from, response) = raw.heard
    assert hello_from == ready_from == response_from == b"\x02\x01"
    assert hello == {"status": "HELLO", "local": True, "headless": True, "parallel_config_hash": None}
    assert ready == {**hello, "status": "READY", "loadbox": {"abi": 1}}
    assert set(response) == READY_KEYS | {"loadbox", "something_new"}
    assert (response["max_model_len"], response["dtype"], response["something_new"]) == (4096, "float16", 5)
    assert response["loadbox"] == {"abi": 1}
    assert (init.tail, init.load_only) == (False, False)
    assert init.addresses.inputs == [raw.input_address]


@pytest.mark.parametrize("how", ["writer", "mapping"])
def test_the_mailbox_is_announced_with_its_epoch(raw, engine, group, how):
    with MailboxWriter(group, 3) as writer:
        thread = raw.serve(raw.init())
        if how == "writer":
            engine(raw.address, mailbox=writer)
        else:
            engine(raw.address, ready={"loadbox": {"mailbox": writer.name, "epoch": writer.epoch}})
        thread.join()
        expected = {"abi": 1, "mailbox": f"/loadbox.{group}.3", "epoch": writer.epoch}
    assert raw.heard[1][1]["loadbox"] == raw.heard[2][1]["loadbox"] == expected


class Ready(msgspec.Struct):
    max_model_len: int = 7
    kv_events_config: dict[str, Any] | None = None


@dataclasses.dataclass
class ReadyToo:
    max_model_len: int = 7


@pytest.mark.parametrize("ready", [{"max_model_len": 7}, Ready(), ReadyToo()], ids=["mapping", "struct", "dataclass"])
def test_ready_may_be_a_mapping_or_a_struct(raw, engine, ready):
    thread = raw.serve(raw.init())
    engine(raw.address, ready=ready)
    thread.join()
    assert raw.heard[2][1]["max_model_len"] == 7
    assert set(raw.heard[2][1]) == READY_KEYS | {"loadbox"}


@pytest.mark.parametrize(
    "ready",
    [5, "ready", [1], {5: 1}, {"x": object()}, {"x": 1 << 70}, {"max_model_len": {1, object()}}],
    ids=[str(n) for n in range(7)],
)
def test_a_ready_that_cannot_be_sent_is_found_before_anything_is_said(context, ready):
    with pytest.raises(WireError, match="ready"):
        connect_msgpack_engine(context, "tcp://127.0.0.1:9", engine_index=0, ready=ready, timeout=20)


ODD_INITS: list[Any] = [
    b"", b"\xc1", [], "INIT", None, {}, {"addresses": None}, {"addresses": []}, {"addresses": {}},
    {"addresses": {"inputs": [], "outputs": ["tcp://127.0.0.1:9"]}},
    {"addresses": {"inputs": ["tcp://127.0.0.1:9"], "outputs": []}}, {"addresses": {"inputs": ["tcp://127.0.0.1:9"]}},
    {"addresses": {"inputs": "tcp://127.0.0.1:9", "outputs": []}},
    {"addresses": {"inputs": [5], "outputs": [5]}}, {"addresses": {"inputs": ["nonsense"], "outputs": ["nonsense"]}},
    {"addresses": {"inputs": ["tcp://127.0.0.1:9"], "outputs": ["nonsense://"]}},
]  # fmt: skip


@pytest.mark.parametrize("init", ODD_INITS, ids=repr)
def test_an_odd_init_is_a_wire_error_and_leaves_no_socket(raw, context, init):
    thread = raw.serve(init, hear=False)
    before = len(context._sockets)
    with pytest.raises(WireError):
        connect_msgpack_engine(context, raw.address, engine_index=0, ready={}, timeout=20)
    assert sum(not socket.closed for socket in context._sockets) <= before
    thread.join()


ODD_OFFERS: list[Any] = [
    None, 5, "tail", [], {}, {"abi": 1}, {"abi": 2, "tail": True, "load_only": True}, {"abi": "1", "tail": True, "load_only": True},
    {"tail": True, "load_only": True}, {"abi": 1, "tail": 1, "load_only": "yes"}, {"abi": 1, "tail": None, "load_only": False},
    {"abi": True, "tail": [True], "load_only": {}},
]  # fmt: skip


@pytest.mark.parametrize("offer", ODD_OFFERS, ids=repr)
def test_an_odd_offer_counts_as_none_and_costs_no_handshake(raw, engine, batch, offer):
    thread = raw.serve(raw.init(loadbox=offer))
    _, send, init = engine(raw.address, tail="negotiated", load_only="always")
    thread.join()
    assert (init.tail, init.load_only) == (False, False)
    send.send_pyobj(batch(), load=(1, 0, 1, 2))
    send.after_advance(load=(0, 0, 1, 2))
    assert raw.output.recv()[0] == 0x9A
    assert not raw.output.poll(50)


@pytest.mark.parametrize("load_only", [True, False])
@pytest.mark.parametrize("tail", [True, False])
def test_what_init_advertises_reaches_the_send_socket(raw, engine, batch, tail, load_only):
    thread = raw.serve(raw.init(loadbox={"abi": 1, "tail": tail, "load_only": load_only, "later": [1]}, later={"x": 1}))
    _, send, init = engine(raw.address, tail="negotiated")
    thread.join()
    assert (init.tail, init.load_only) == (tail, load_only)
    send.send_pyobj(batch(), load=(1, 0, 1, 2))
    send.after_advance(load=(0, 0, 1, 2))
    assert decode_batch(raw.output.recv()).load == (LoadSnapshot(1, 0, 1, 2) if tail else None)
    assert bool(raw.output.poll(200 if tail and load_only else 50)) == (tail and load_only)


# The limit.


def test_nobody_there_is_a_timeout_with_progress_in_the_log(context, caplog):
    with (
        caplog.at_level(logging.INFO, "loadbox"),
        pytest.raises(TimeoutError, match=r"engine 3 had no INIT from tcp://127\.0\.0\.1:9") as info,
    ):
        connect_msgpack_engine(context, "tcp://127.0.0.1:9", engine_index=3, ready={}, timeout=0.4)
    assert isinstance(info.value, (HandshakeTimeout, WireError))
    waits = [record for record in caplog.records if "engine 3 waits for INIT" in record.getMessage()]
    assert len(waits) >= 3, "one line after each slice"
    assert all(socket.closed for socket in context._sockets)


def test_a_frontend_that_listens_and_never_answers_is_a_timeout_too(context, raw):
    with pytest.raises(HandshakeTimeout, match="does it expect this engine index"):
        connect_msgpack_engine(context, raw.address, engine_index=0, ready={}, timeout=0.2)


def test_an_engine_may_come_before_its_frontend(context, frontend, tmp_path):
    address = f"ipc://{tmp_path}/late-{uuid.uuid4().hex[:6]}"
    got: list[Any] = []
    thread = threading.Thread(
        target=lambda: got.extend(connect_msgpack_engine(context, address, engine_index=0, ready={}, timeout=30))
    )
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    front = frontend(address=address)
    thread.join()
    front.wait_ready(20)
    got[0].close()
    got[1].close()


@pytest.mark.parametrize("address", ["nonsense", "tcp://", "tcp://127.0.0.1", "http://127.0.0.1:1", ""])
def test_an_address_that_is_none(context, address):
    with pytest.raises(WireError, match="cannot connect"):
        connect_msgpack_engine(context, address, engine_index=0, ready={}, timeout=20)


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_limit_that_is_none(context, timeout):
    with pytest.raises(ValueError, match="seconds above 0"):
        connect_msgpack_engine(context, "tcp://127.0.0.1:9", engine_index=0, ready={}, timeout=timeout)


@pytest.mark.parametrize("index", [-1, 65536, None, "1", 1.5, True, numpy.True_])
def test_an_index_that_is_none(context, index):
    with pytest.raises(ValueError, match="65535"):
        connect_msgpack_engine(context, "tcp://127.0.0.1:9", engine_index=index, ready={}, timeout=20)


def test_a_closed_context(context):
    other = zmq.Context()
    other.term()
    with pytest.raises(WireError, match="closed"):
        connect_msgpack_engine(other, "tcp://127.0.0.1:9", engine_index=0, ready={}, timeout=20)


# Our frontend's side of it.


def knock(context: zmq.Context[Any], address: str, identity: bytes, *messages: bytes, answer: bool = True) -> list[bytes]:
    """Say things at a handshake lane with bare bytes; gives what came back."""
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.linger = 1000
        socket.connect(address)
        for message in messages:
            socket.send(message)
        return [socket.recv() for _ in range(socket.poll(20_000 if answer else 200))]
    finally:
        socket.close()


HELLO = pack({"status": "HELLO", "local": True, "headless": True, "parallel_config_hash": None})


def test_what_our_frontend_says(context, frontend):
    front = frontend(engines=2)
    first, second = (unpack(*knock(context, front.handshake_address, bytes([index, 0]), HELLO)) for index in (0, 1))
    assert first["loadbox"] == {"abi": 1, "tail": True, "load_only": True}
    assert set(first) == {"addresses", "parallel_config", "loadbox"}
    assert set(first["addresses"]) == {"inputs", "outputs", *ADDRESSES}
    assert first["parallel_config"] == {}
    assert first["addresses"]["inputs"] == second["addresses"]["inputs"]
    assert first["addresses"]["outputs"] != second["addresses"]["outputs"]


def test_an_old_frontend_says_nothing_of_ours(context, frontend):
    front = frontend(advertise=False)
    assert "loadbox" not in unpack(*knock(context, front.handshake_address, b"\x00\x00", HELLO))


@pytest.mark.parametrize(
    "message",
    [b"", b"\xc1", pack([]), pack("HELLO"), pack({}), pack({"status": 5}), pack({"status": "GOODBYE"}), HELLO[:-1]],
    ids=repr,
)
def test_odd_handshake_messages_are_dropped_and_the_next_engine_is_served(context, frontend, engine, message):
    front = frontend()
    assert knock(context, front.handshake_address, b"\x00\x00", message, answer=False) == []
    engine(front.handshake_address)
    front.wait_ready(20)


def test_a_new_life_is_heard_while_the_old_ones_handshake_hangs(context, frontend, engine):
    front = frontend()
    stuck = context.socket(zmq.DEALER)
    stuck.setsockopt(zmq.IDENTITY, b"\x00\x00")
    stuck.linger = 0
    stuck.connect(front.handshake_address)
    stuck.send(HELLO)
    assert stuck.poll(20_000)
    engine(front.handshake_address)
    front.wait_ready(20)
    assert front.engines[0].lives == 2
    stuck.close()


@pytest.mark.parametrize("identity", [b"\x01\x00", b"\x00", b"\x00\x00\x00", b"\xff\xff", b"engine-0"])
def test_a_stranger_gets_no_init(context, frontend, engine, identity):
    front = frontend()
    assert knock(context, front.handshake_address, identity, HELLO, answer=False) == []
    engine(front.handshake_address)
    front.wait_ready(20)
    assert [each.lives for each in front.engines] == [1]


def test_the_ready_response_is_kept_and_proves_the_host(frontend, engine, group):
    def epoch_here(group: str, rank: int) -> int:
        with_reader = MailboxReader(group, rank)
        try:
            with_reader.read()
            return with_reader.epoch
        finally:
            with_reader.close()

    front = frontend(engines=2, mailbox_epoch=epoch_here)
    with MailboxWriter(group, 0) as writer:
        writer.publish(1, 2, 3, 4)
        engine(front.handshake_address, 0, {"max_model_len": 512}, mailbox=writer)
        engine(front.handshake_address, 1, {"loadbox": {"mailbox": writer.name, "epoch": writer.epoch ^ 1}})
        front.wait_ready(20)
        first, second = front.engines
        assert first.ready["max_model_len"] == 512
        assert first.mailbox == MailboxKey(group, 0, writer.epoch)
        assert first.same_host is True
        assert second.same_host is False, "a segment of that name with another epoch proves nothing"
    assert first.same_host is False, "and the proof ends with the segment"


@pytest.mark.parametrize(
    "offer",
    [
        None, 5, [], {}, {"mailbox": "/loadbox.g.0"}, {"epoch": 5}, {"mailbox": 5, "epoch": 5},
        {"mailbox": "/loadbox.g.0", "epoch": 0}, {"mailbox": "/loadbox.g.0", "epoch": True},
        {"mailbox": "/loadbox.g.0", "epoch": 1 << 62}, {"mailbox": "/loadbox.g.0", "epoch": "5"},
        {"mailbox": "/loadbox.../../etc/passwd.0", "epoch": 5}, {"mailbox": "/loadbox.g.-1", "epoch": 5},
        {"mailbox": "", "epoch": 5}, {"mailbox": "/loadbox.g.0", "epoch": 5, "abi": 2},
        {"mailbox": "/loadbox.g.f.0123456789abcdef", "epoch": 5},
    ],
    ids=repr,
)  # fmt: skip
def test_an_odd_announcement_is_no_mailbox_and_costs_no_engine(frontend, engine, offer):
    front = frontend(mailbox_epoch=lambda group, rank: 5)
    engine(front.handshake_address, ready={"loadbox": offer})
    front.wait_ready(20)
    assert front.engines[0].state == "ready"
    assert front.engines[0].mailbox is None
    assert front.engines[0].same_host is None


def test_an_unreadable_ready_response_is_no_registration(context, frontend):
    front = frontend(ready_timeout=0.2)
    init = unpack(*knock(context, front.handshake_address, b"\x00\x00", HELLO))
    for message in (b"", b"\xc1", pack([1]), pack("ready")):
        knock(context, init["addresses"]["inputs"][0], b"\x00\x00", message, answer=False)
    with pytest.raises(HandshakeTimeout, match="rank 0 is greeted"):
        front.wait_ready(0.3)
    knock(context, init["addresses"]["inputs"][0], b"\x05\x00", pack({}), answer=False)
    with pytest.raises(HandshakeTimeout):
        front.wait_ready(0.1)


def test_the_identity_is_the_index_little_endian(context, frontend, engine):
    front = frontend(engines=2, engine_index_base=511)
    engine(front.handshake_address, 512)
    with pytest.raises(HandshakeTimeout, match="rank 0 is absent"):
        front.wait_ready(0.3)
    assert front.engines[1].state == "ready"
    assert struct.pack("<H", front.engines[1].engine_index) == b"\x00\x02"
