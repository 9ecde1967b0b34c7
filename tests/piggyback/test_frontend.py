"""Both frontends: requests to a chosen rank, batches with their rank, engines that die and come back, and odd messages."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from loadbox.piggyback import (
    ENGINE_CORE_DEAD,
    AbortRequest,
    AsyncMsgpackFrontend,
    EngineUnavailable,
    GenerateRequest,
    HandshakeTimeout,
    MsgpackFrontend,
    NothingReceived,
    WireError,
    encode_batch,
)

pack = msgspec.msgpack.encode


def ask(rid: str = "r1") -> GenerateRequest:
    return GenerateRequest(rid, input_ids=[1, 2, 3], sampling_params=[16], stream=True)


def until(front: Any, what: Any, seconds: float = 20.0) -> None:
    """Let the frontend take messages in until something is so."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, front
        with pytest.raises(TimeoutError):
            front.recv(timeout=0.02)


def address_of(kind: str, tmp_path: Any) -> str:
    return {"tcp": "tcp://127.0.0.1:*", "ipc": f"ipc://{tmp_path}/f"}[kind]


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_requests_go_to_the_chosen_rank_and_batches_come_with_theirs(frontend, engine, batch, transport, tmp_path):
    front = frontend(engines=3, address=address_of(transport, tmp_path), engine_index_base=5)
    ends = [engine(front.handshake_address, 5 + rank) for rank in range(3)]
    for rank in (2, 0, 1):
        front.add(rank, ask(f"r{rank}"))
        recv, send, _ = ends[rank]
        assert recv.recv_pyobj() == ask(f"r{rank}")
        send.send_pyobj(batch([f"r{rank}"]), load=(rank, 0, 1, 10))
        got_rank, got = front.recv(timeout=20)
        assert (got_rank, got.rids, got.engine_index) == (rank, [f"r{rank}"], 5 + rank)
        assert got.load == (rank, 0, 1, 10)
        front.abort(rank, [f"r{rank}", "other"])
        assert recv.recv_pyobj() == AbortRequest([f"r{rank}", "other"])


def test_over_inproc_in_one_context(context, batch):
    from loadbox.piggyback import connect_msgpack_engine

    with MsgpackFrontend(context, "inproc://one-context", engines=1) as front:
        recv, send, _ = connect_msgpack_engine(context, front.handshake_address, engine_index=0, ready={})
        front.add(0, ask())
        assert recv.recv_pyobj() == ask()
        send.send_pyobj(batch())
        assert front.recv(timeout=20)[0] == 0
        recv.close()
        send.close()


def test_batches_of_one_rank_keep_their_order_and_none_is_lost(frontend, engine, batch):
    front = frontend(engines=2)
    ends = [engine(front.handshake_address, rank) for rank in range(2)]
    for number in range(600):
        ends[number % 2][1].send_pyobj(batch([str(number)]))
    got = [front.recv(timeout=20) for _ in range(600)]
    for rank in range(2):
        assert [batch.rids[0] for its, batch in got if its == rank] == [str(number) for number in range(rank, 600, 2)]


def test_recv_says_that_nothing_came(frontend, engine):
    front = frontend()
    engine(front.handshake_address)
    for timeout in (0, 0.02):
        with pytest.raises(TimeoutError, match=r"no batch came within 0") as info:
            front.recv(timeout=timeout)
        assert isinstance(info.value, NothingReceived)
        assert isinstance(info.value, zmq.Again)


@pytest.mark.parametrize("rank", [-1, 2, 1.5, "0", None, True])
def test_a_rank_that_is_none(frontend, rank):
    front = frontend(engines=2)
    with pytest.raises(ValueError, match="ranks 0 to 1"):
        front.add(rank, ask())
    with pytest.raises(ValueError, match="ranks 0 to 1"):
        front.abort(rank, ["a"])


def test_add_waits_for_an_engine_that_is_late_and_no_longer_than_told(frontend):
    front = frontend(ready_timeout=0.1)
    with pytest.raises(HandshakeTimeout, match="rank 0 is absent"):
        front.add(0, ask())
    with pytest.raises(HandshakeTimeout, match="rank 0 is absent"):
        front.wait_ready(0.1)
    front.abort(0, ["a rank that never came has no requests"])


def test_batches_that_come_while_waiting_are_kept(frontend, engine, batch):
    front = frontend(engines=2)
    _, send, _ = engine(front.handshake_address, 0)
    send.send_pyobj(batch(["early"]))
    with pytest.raises(HandshakeTimeout):
        front.wait_ready(0.3)
    engine(front.handshake_address, 1)
    front.wait_ready(20)
    assert front.recv(timeout=20)[1].rids == ["early"]


def test_engine_dead_is_told_with_its_rank_and_the_batches_before_it_are_kept(frontend, engine, batch):
    front = frontend(engines=3)
    ends = [engine(front.handshake_address, rank) for rank in range(3)]
    front.wait_ready(20)
    dead: list[int] = []
    front.on_dead = dead.append
    ends[1][1].send_pyobj(batch(["last words"]))
    ends[1][1].send_engine_dead()
    assert front.recv(timeout=20)[1].rids == ["last words"]
    until(front, lambda: dead)
    assert dead == [1]
    assert [each.state for each in front.engines] == ["ready", "dead", "ready"]
    with pytest.raises(EngineUnavailable, match="rank 1 said that it is going away"):
        front.add(1, ask())
    front.abort(1, ["gone"])
    front.add(2, ask())
    assert ends[2][0].recv_pyobj() == ask()


@pytest.mark.parametrize("goodbye", [True, False])
def test_an_engine_that_comes_back_is_served_again(frontend, engine, batch, goodbye, caplog):
    front = frontend(engines=2)
    told: list[tuple[str, int]] = []
    front.on_dead = lambda rank: told.append(("dead", rank))
    front.on_ready = lambda rank: told.append(("ready", rank))
    engine(front.handshake_address, 0)
    for life in range(1, 4):
        recv, send, _ = engine(front.handshake_address, 1, {"instance_id": f"life {life}"})
        until(front, lambda life=life: front.engines[1].ready.get("instance_id") == f"life {life}")
        front.add(1, ask(f"r{life}"))
        assert recv.recv_pyobj() == ask(f"r{life}")
        send.send_pyobj(batch([f"r{life}"]))
        assert front.recv(timeout=20) == (1, batch([f"r{life}"], engine_index=1))
        if goodbye:
            send.send_engine_dead()
            until(front, lambda: front.engines[1].state == "dead")
        recv.close()
        send.close()
        assert front.engines[1].lives == life
    lives = [("ready", 1), ("dead", 1)] * 3
    assert [each for each in told if each[1] == 1] == (lives if goodbye else lives[:-1])
    assert told.count(("ready", 0)) == 1
    assert ("engine 1 came back" in caplog.text) is not goodbye


def test_an_engine_that_returns_while_its_former_self_is_still_connected(frontend, engine, batch):
    front = frontend()
    old_recv, old_send, _ = engine(front.handshake_address)
    front.wait_ready(20)
    recv, send, _ = engine(front.handshake_address)
    until(front, lambda: front.engines[0].lives == 2 and front.engines[0].state == "ready")
    front.add(0, ask())
    assert recv.recv_pyobj() == ask(), "the new life gets the request"
    with pytest.raises(zmq.Again):
        old_recv.recv_pyobj(zmq.NOBLOCK)
    send.send_pyobj(batch())
    assert front.recv(timeout=20)[0] == 0
    old_send.close()


def test_the_goodbye_of_a_former_life_does_not_fall_upon_the_next(frontend, engine):
    front = frontend()
    _, old, _ = engine(front.handshake_address)
    front.wait_ready(20)
    # Nothing is taken in between: the goodbye, HELLO and the ready response are all found at once.
    old.send_engine_dead()
    old.close()
    time.sleep(0.1)
    recv, _, _ = engine(front.handshake_address)
    time.sleep(0.1)
    until(front, lambda: front.engines[0].lives == 2)
    front.add(0, ask())
    assert recv.recv_pyobj() == ask()


def test_a_connection_that_is_gone_is_told_and_not_waited_for(frontend, engine):
    front = frontend(engines=2)
    recv, send, _ = engine(front.handshake_address, 0)
    front.add(0, ask())
    assert recv.recv_pyobj() == ask()
    recv.close()
    send.close()

    def gone() -> bool:
        try:
            front.add(0, ask())
        except EngineUnavailable as error:
            return "connection to rank 0 is gone" in str(error)
        return False

    until(front, gone)
    front.abort(0, ["nobody hears it"])


def test_an_engine_that_does_not_read_holds_nobody_up(frontend, engine):
    front = frontend(engines=2)
    engine(front.handshake_address, 0)
    other, _, _ = engine(front.handshake_address, 1)
    heavy = GenerateRequest("r", input_ids=[70_000] * 20_000)

    def flood(say: Any, *arguments: Any) -> None:
        for _ in range(5000):
            say(*arguments)

    with pytest.raises(EngineUnavailable, match="rank 0 does not read its requests"):
        flood(front.add, 0, heavy)
    with pytest.raises(EngineUnavailable, match="does not read"):
        flood(front.abort, 0, ["r"])
    front.add(1, ask())
    assert other.recv_pyobj() == ask()


# Odd messages, with bare sockets in the engine's place.


@pytest.fixture
def pusher(context):
    """Bare PUSH sockets on a rank's output lane, found as an engine finds it."""
    sockets = []

    def connect(front: Any, rank: int = 0) -> zmq.Socket[Any]:
        dealer, push = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
        dealer.setsockopt(zmq.IDENTITY, bytes([rank, 0]))
        dealer.connect(front.handshake_address)
        dealer.send(pack({"status": "HELLO"}))
        assert dealer.poll(20_000)
        push.connect(msgspec.msgpack.decode(dealer.recv())["addresses"]["outputs"][0])
        sockets.extend((dealer, push))
        return push

    yield connect
    for socket in sockets:
        socket.close(linger=0)


def test_odd_messages_on_the_output_lane_cost_themselves_alone(frontend, pusher, batch, counted, caplog):
    front = frontend(engines=2)
    push = pusher(front, 1)
    good = encode_batch(batch(engine_index=1))
    odd = [
        b"",
        b"\x00",
        b"ENGINE_CORE_DEAD ",
        b"engine_core_dead",
        good[:-1],
        good + b"\x00",
        pack(["BatchTokenIDOut"]),
        b"\xc1" * 50,
    ]
    for payload in odd:
        push.send(payload)
    push.send(encode_batch(batch(engine_index=7)))
    push.send_multipart([good, b"an aux frame"])
    assert front.recv(timeout=20) == (1, batch(engine_index=1))
    assert counted() == {"bad_batches": len(odd) + 1}
    assert 1 <= len(caplog.records) <= 2, "warnings of one kind are held back"


def test_a_nine_element_batch_has_the_rank_of_its_lane(frontend, pusher, batch):
    front = frontend(engines=3, engine_index_base=0)
    push = pusher(front, 2)
    columns = msgspec.to_builtins(batch())[1:9]
    push.send(pack(["BatchTokenIDOutSlim", *columns]))
    rank, got = front.recv(timeout=20)
    assert (rank, got.engine_index, got.load) == (2, 2, None)


def test_a_goodbye_of_an_engine_that_never_registered_is_no_news(frontend, pusher):
    front = frontend()
    dead: list[int] = []
    front.on_dead = dead.append
    pusher(front).send(ENGINE_CORE_DEAD)
    with pytest.raises(TimeoutError):
        front.recv(timeout=0.2)
    assert dead == []


def test_callbacks_that_raise_are_logged_and_end_nothing(frontend, engine, batch, caplog):
    front = frontend(engines=2)

    def odd(rank: int) -> None:
        raise RuntimeError(f"no idea about rank {rank}")

    front.on_dead = front.on_ready = odd
    _, first, _ = engine(front.handshake_address, 0)
    _, second, _ = engine(front.handshake_address, 1)
    front.wait_ready(20)
    first.send_engine_dead()
    second.send_pyobj(batch())
    assert front.recv(timeout=20)[0] == 1
    until(front, lambda: front.engines[0].state == "dead")
    assert caplog.text.count("on_ready raised") == 2
    assert caplog.text.count("on_dead raised") == 1


# Making and closing.


@pytest.mark.parametrize("engines", [0, -1, 1.5, None, "2", True])
def test_a_number_of_engines_that_is_none(context, engines):
    with pytest.raises(ValueError, match="number of ranks"):
        MsgpackFrontend(context, "tcp://127.0.0.1:*", engines=engines)


@pytest.mark.parametrize("base", [-1, 65535])
def test_indices_that_do_not_fit(context, base):
    with pytest.raises(ValueError, match="two bytes"):
        MsgpackFrontend(context, "tcp://127.0.0.1:*", engines=2, engine_index_base=base)


@pytest.mark.parametrize("address", ["", "nonsense", "tcp://192.0.2.1:5", "ipc:///no/such/folder/x", "ipc:///tmp/" + "x" * 120])
def test_an_address_that_cannot_be_bound_is_a_wire_error_and_leaves_nothing(context, address):
    with pytest.raises(WireError, match="cannot bind"):
        MsgpackFrontend(context, address, engines=2)
    assert all(socket.closed for socket in context._sockets)


def test_an_address_without_a_port_is_told_what_one_looks_like(context):
    for address in ("5555", "tcp://127.0.0.1", ""):
        with pytest.raises(WireError, match=r"use tcp://HOST:PORT \(PORT may be \*\) or ipc://PATH$"):
            MsgpackFrontend(context, address, engines=1)


@pytest.mark.parametrize("bad", [None, "tcp://127.0.0.1:*"])
def test_what_is_no_context(bad):
    with pytest.raises(TypeError, match=r"^context must be a zmq.Context, not (NoneType|str)$"):
        MsgpackFrontend(bad, "tcp://127.0.0.1:*", engines=1)


@pytest.mark.parametrize("missing", ["msgspec", "zmq"])
def test_without_its_extra_it_says_what_to_install(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; import loadbox.piggyback"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert f"loadbox.piggyback needs {missing}: pip install 'loadbox[piggyback]'" in done.stderr.splitlines()[-1]


def test_a_port_in_use(context):
    front = MsgpackFrontend(context, "tcp://127.0.0.1:*", engines=1)
    with front, pytest.raises(WireError, match="cannot bind the handshake lane"):
        MsgpackFrontend(context, front.handshake_address, engines=1)


def test_every_interface_needs_a_host_to_tell(context, engine):
    with pytest.raises(WireError, match="advertise_host"):
        MsgpackFrontend(context, "tcp://0.0.0.0:*", engines=1)
    with MsgpackFrontend(context, "tcp://0.0.0.0:*", engines=1, advertise_host="127.0.0.1") as front:
        port = front.handshake_address.rpartition(":")[2]
        _, _, init = engine(f"tcp://127.0.0.1:{port}")
        assert init.addresses.inputs[0].startswith("tcp://127.0.0.1:")
        front.wait_ready(20)


def test_closed_is_closed(context):
    front = MsgpackFrontend(context, "tcp://127.0.0.1:*", engines=1)
    front.close()
    front.close()
    for call in (
        lambda: front.recv(timeout=0),
        lambda: front.add(0, ask()),
        lambda: front.abort(0, []),
        lambda: front.wait_ready(0),
    ):
        with pytest.raises(WireError, match="closed"):
            call()


def test_closed_is_closed_for_asyncio_too(context):
    async def scene() -> None:
        front = AsyncMsgpackFrontend(context, "tcp://127.0.0.1:*", engines=1)
        await front.close()
        front.close()
        for call in (front.recv(timeout=0), front.add(0, ask()), front.abort(0, []), front.wait_ready(0)):
            with pytest.raises(WireError, match="closed"):
                await call

    asyncio.run(scene())


def test_asyncio_serves_tasks_side_by_side_and_a_cancelled_recv_loses_nothing(context, batch):
    from loadbox.piggyback import connect_msgpack_engine

    async def scene() -> None:
        with zmq.asyncio.Context() as made:
            async with AsyncMsgpackFrontend(made, "tcp://127.0.0.1:*", engines=1) as front:
                recv, send, _ = await asyncio.to_thread(
                    connect_msgpack_engine, context, front.handshake_address, engine_index=0, ready={}
                )
                for number in range(20):
                    waiting = asyncio.create_task(front.recv())
                    await asyncio.sleep(0)
                    if number % 2:
                        send.send_pyobj(batch([str(number)]))
                        await asyncio.sleep(0.002)
                    waiting.cancel()
                    try:
                        got = [await waiting]
                    except asyncio.CancelledError:
                        got = [] if number % 2 == 0 else [await front.recv(timeout=20)]
                    if number % 2:
                        assert got[0][1].rids == [str(number)]
                reader = asyncio.create_task(front.recv(timeout=20))
                await asyncio.gather(*(front.add(0, ask(str(n))) for n in range(10)))
                assert sorted(recv.recv_pyobj().rid for _ in range(10)) == [str(n) for n in range(10)]
                send.send_pyobj(batch())
                assert (await reader)[0] == 0
                ticks = 0
                beat = asyncio.create_task(front.recv(timeout=0.3))
                while not beat.done():
                    await asyncio.sleep(0.01)
                    ticks += 1
                with pytest.raises(NothingReceived):
                    await beat
                assert ticks > 3, "waiting in recv leaves the loop to others"
                await front.close()
                recv.close()
                send.close()

    asyncio.run(scene())


def test_asyncio_on_a_plain_context(context, engine, batch):
    async def scene() -> None:
        async with AsyncMsgpackFrontend(context, "tcp://127.0.0.1:*", engines=1) as front:
            _, send, _ = await asyncio.to_thread(engine, front.handshake_address)
            await front.wait_ready(20)
            send.send_pyobj(batch())
            assert (await front.recv(timeout=20))[0] == 0
            send.send_engine_dead()
            with pytest.raises(TimeoutError):
                await front.recv(timeout=0.3)
            assert front.engines[0].state == "dead"

    asyncio.run(scene())


def test_an_engine_on_an_asyncio_context(frontend, batch):
    from loadbox.piggyback import connect_msgpack_engine

    with zmq.asyncio.Context() as made:
        front = frontend()
        recv, send, _ = connect_msgpack_engine(made, front.handshake_address, engine_index=0, ready={}, timeout=20)
        send.send_pyobj(batch())
        assert front.recv(timeout=20)[0] == 0
        front.add(0, ask())
        assert recv.recv_pyobj() == ask()
        recv.close()
        send.close()
