"""The input lane: ADD and ABORT as real frontends send them, and everything that is neither."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from loadbox.piggyback import AbortRequest, GenerateRequest, MsgpackRecvSocket, WireError
from loadbox.piggyback._requests import decode_frames

pack = msgspec.msgpack.encode
TAG = "TokenizedGenerateReqInput"
# The prefix of eleven elements that a gateway sends.
ADD = [TAG, "r1", None, None, [1, 2, 3], [16, None, [7], 0.5], False, -1, 0, None, True]


@pytest.fixture
def pair(context):
    """An input socket and the bare ROUTER that feeds it."""
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    dealer.setsockopt(zmq.IDENTITY, b"\x01\x00")
    dealer.rcvtimeo = 20_000
    dealer.connect(f"tcp://127.0.0.1:{port}")
    dealer.send(b"here")
    assert router.recv_multipart()[1] == b"here"
    recv = MsgpackRecvSocket(dealer)
    yield recv, lambda *frames: router.send_multipart([b"\x01\x00", *frames])
    recv.close()
    router.close(linger=0)


def test_add_and_abort(pair):
    recv, say = pair
    say(b"\x00", pack(ADD))
    got = recv.recv_pyobj()
    assert got == GenerateRequest("r1", None, None, [1, 2, 3], [16, None, [7], 0.5], False, -1, 0, None, True)
    assert got.max_new_tokens == 16
    assert pack(got) == pack(ADD)
    say(b"\x01", pack(["r1", "r2"]))
    assert recv.recv_pyobj() == AbortRequest(["r1", "r2"])


def test_empty_is_again(pair):
    recv, _ = pair
    with pytest.raises(zmq.Again):
        recv.recv_pyobj(zmq.NOBLOCK)


@pytest.mark.parametrize("size", range(2, 30))
def test_fewer_and_more_elements_than_eleven(pair, size):
    recv, say = pair
    say(b"\x00", pack([*ADD, *["later"] * 30][:size]))
    got = recv.recv_pyobj()
    assert got.rid == "r1"
    assert got.input_ids == ([1, 2, 3] if size > 4 else None)
    assert got.stream is (size > 10)


@pytest.mark.parametrize(("params", "limit"), [([], None), ([None], None), ([0], 0), (["9"], None), ([True], None), ([5, 6], 5)])
def test_max_new_tokens(params, limit):
    assert GenerateRequest("r", sampling_params=params).max_new_tokens == limit


MALFORMED: list[list[bytes]] = [
    [b"\x00"], [b""], [b"", b""], [b"\x02", pack(ADD)], [b"\x00\x00", pack(ADD)], [b"\x00", b""], [b"\x00", pack(ADD)[:-1]],
    [b"\x00", pack(ADD) + b"\x00"], [b"\x00", pack({"rid": "r"})], [b"\x00", pack(["Other", *ADD[1:]])], [b"\x00", pack([TAG])],
    [b"\x00", pack([TAG, None])], [b"\x00", pack([TAG, 5])], [b"\x00", pack([TAG, "r", None, None, ["a"]])],
    [b"\x00", pack([TAG, "r", None, None, [1], {"max_new_tokens": 5}])], [b"\x00", pack(ADD), b"a tensor"],
    [b"\x01", b""], [b"\x01", pack("r1")], [b"\x01", pack([1])], [b"\x01", pack(["a", None])], [b"\x01", pack({"rids": []})],
    [b"\x00", b"\x91" * 100_000], [b"\x01", b"\xdd\xff\xff\xff\xff"],
]  # fmt: skip


def test_malformed_messages_are_dropped_with_one_warning_each(pair, counted, caplog):
    recv, say = pair
    for frames in MALFORMED:
        say(*frames)
    say(b"\x01", pack(["the end"]))
    assert recv.recv_pyobj() == AbortRequest(["the end"])
    assert len(caplog.records) == len(MALFORMED)
    assert counted() == {"bad_requests": len(MALFORMED)}


def test_a_flood_of_malformed_messages_does_not_fill_the_log(pair, counted, caplog):
    recv, say = pair
    for _ in range(300):
        say(b"\x02")
    say(b"\x01", pack(["the end"]))
    assert recv.recv_pyobj() == AbortRequest(["the end"])
    assert counted() == {"bad_requests": 300}
    assert len(caplog.records) == 101
    assert "only counted" in caplog.messages[-1]
    assert not any("only counted" in message for message in caplog.messages[:-1])


def test_a_closed_input_says_so(pair):
    recv, _ = pair
    recv.close()
    for flags in (0, zmq.NOBLOCK):
        with pytest.raises(WireError, match=r"this input socket is closed: connect anew"):
            recv.recv_pyobj(flags)


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_any_frames_are_a_request_or_a_wire_error(frames):
    try:
        got = decode_frames(frames)
    except WireError:
        return
    assert isinstance(got, (AbortRequest, GenerateRequest))


def test_an_engine_may_decode_its_own_adds(pair, caplog):
    recv, say = pair
    recv.decode_add = lambda frames: ("mine", len(frames), msgspec.msgpack.decode(frames[0])[1])
    say(b"\x00", pack(ADD), b"a tensor", b"another")
    say(b"\x00", b"\xc1")
    say(b"\x01", pack(["r1"]))
    assert recv.recv_pyobj() == ("mine", 3, "r1")
    assert recv.recv_pyobj() == AbortRequest(["r1"])
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "request_",
    [None, {"rid": "r"}, GenerateRequest(5), GenerateRequest("r", sampling_params=[object()])],
    ids=["none", "dict", "rid", "params"],
)
def test_what_cannot_be_asked_is_a_wire_error(request_: Any, frontend, engine):
    front = frontend()
    engine(front.handshake_address)
    with pytest.raises(WireError):
        front.add(0, request_)
    for rids in ([None], [5], [b"r"]):
        with pytest.raises(WireError):
            front.abort(0, rids)
