"""The engine's output lane: the load of every batch, the terminal batch, the load-only batch at the edge, and what never blocks."""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np
import pytest
import zmq

from loadbox.mailbox import LoadSnapshot
from loadbox.piggyback import ENGINE_CORE_DEAD, MsgpackSendSocket, WireError, decode_batch

BUSY, IDLE = (2, 5, 100, 400), (0, 0, 90, 400)


def hear(pull: zmq.Socket[Any]) -> Any:
    return decode_batch(pull.recv())


def silent(pull: zmq.Socket[Any]) -> bool:
    return not pull.poll(100)


def test_the_load_is_sampled_anew_for_each_batch(lane, batch):
    send, pull = lane()
    numbers = iter(range(1, 4))
    send.load_fn = lambda: (next(numbers), 0, 1, 2)
    for _ in range(3):
        send.send_pyobj(batch())
    assert [hear(pull).num_running for _ in range(3)] == [1, 2, 3]


def test_a_batch_goes_out_under_the_sockets_index(lane, batch):
    send, pull = lane(engine_index=258)
    given = batch(engine_index=7, num_running=9, kv_total_pages=9)
    send.send_pyobj(given, load=LoadSnapshot(*BUSY))
    assert hear(pull) == given
    assert (given.engine_index, given.load) == (258, LoadSnapshot(*BUSY))


def test_a_load_given_with_the_batch_goes_before_load_fn(lane, batch):
    send, pull = lane()
    send.load_fn = lambda: BUSY
    send.send_pyobj(batch(), load=IDLE)
    assert hear(pull).load == IDLE


def test_no_load_fn_yet_is_no_snapshot(lane, batch, counted, caplog):
    send, pull = lane()
    assert send.load_fn is None
    send.send_pyobj(batch(num_running=2, kv_total_pages=4))
    got = hear(pull)
    assert (got.rids, got.load, got.num_running) == (["a"], None, 0)
    send.load_fn = lambda: BUSY
    send.send_pyobj(batch())
    assert hear(pull).load == BUSY
    assert counted() == {}
    assert caplog.text == ""


class OddError(Exception):
    pass


def raises() -> Any:
    raise OddError("the scheduler is not there yet")


class Trap:
    def __iter__(self) -> Any:
        raise OddError("no items")

    def __index__(self) -> int:
        raise OddError("no number")


def test_a_load_fn_that_raises_costs_the_load_alone_and_is_logged_once(lane, batch, counted, caplog):
    send, pull = lane()
    send.load_fn = raises
    for _ in range(3):
        send.send_pyobj(batch())
        got = hear(pull)
        assert (got.output_ids, got.load) == ([[10, 11]], None)
    assert counted() == {"load_fn_errors": 3}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "OddError: the scheduler is not there yet" in caplog.text
    send.load_fn = raises
    send.send_pyobj(batch())
    assert len(caplog.records) == 2, "another load_fn has a warning of its own"


RUBBISH: list[Any] = [
    5, "1234", "abcd", b"1234", bytearray(b"1234"), {}, {1: 1, 2: 2, 3: 3, 4: 4}, {1, 2, 3, 4}, [],
    (1, 2, 3), (1, 2, 3, 4, 5), (None, 0, 0, 1), (1.0, 0, 0, 1), (-1, 0, 0, 1), (0, 0, 5, 4), (True, 0, 0, 1), (1 << 63, 0, 0, 1),
    (0, 0, 0, float("nan")), ("1", "2", "3", "4"), np.array([1.0, 0, 0, 1]), object(),
    Trap(), (Trap(), 0, 0, 1), iter([1, 2]), range(10**12), [(1, 2, 3, 4)],
]  # fmt: skip


@pytest.mark.parametrize("rubbish", RUBBISH, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("how", ["load_fn", "load"])
def test_rubbish_for_a_load_goes_out_as_no_snapshot(rubbish, how, lane, batch, counted, caplog):
    send, pull = lane()
    send.load_fn = lambda: rubbish
    for _ in range(2):
        send.send_pyobj(batch(), load=None if how == "load_fn" else rubbish)
        got = hear(pull)
        assert got.rids == ["a"]
        assert (got.num_running, got.num_waiting, got.kv_active_pages, got.kv_total_pages) == (0, 0, 0, 0)
    assert counted() == {"bad_loads": 2}
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "good", [list(BUSY), np.array(BUSY), LoadSnapshot(*BUSY), iter(BUSY), [np.int64(n) for n in BUSY]], ids=type
)
def test_any_four_integers_are_a_load(good, lane, batch):
    send, pull = lane()
    send.send_pyobj(batch(), load=good)
    assert hear(pull).load == BUSY


def test_an_interrupt_inside_load_fn_is_the_callers(lane, batch):
    send, pull = lane()

    def interrupted() -> Any:
        raise KeyboardInterrupt

    send.load_fn = interrupted
    with pytest.raises(KeyboardInterrupt):
        send.send_pyobj(batch())
    assert silent(pull)


@pytest.mark.parametrize("wrong", [5, "load", (1, 2, 3, 4)])
def test_a_load_fn_is_a_callable(wrong, lane):
    send, _ = lane()
    with pytest.raises(TypeError, match="callable"):
        send.load_fn = wrong


def test_a_batch_that_would_lose_its_tokens_is_refused_and_the_next_goes_out(lane, batch):
    send, pull = lane()
    with pytest.raises(WireError, match="column output_ids has 2 rows for 1 rids"):
        send.send_pyobj(batch(output_ids=[[1], [2]]))
    send.send_pyobj(batch())
    assert hear(pull).rids == ["a"]


def test_what_is_no_batch_is_dropped_with_one_warning_a_type(lane, batch, counted, caplog):
    send, pull = lane()
    for reply in ({}, "reply", {}, None):
        send.send_pyobj(reply)
    send.send_pyobj(batch())
    assert hear(pull).rids == ["a"]
    assert counted() == {"dropped_replies": 4}
    assert [record.args[1] for record in caplog.records] == ["dict", "str", "NoneType"]


# The terminal batch and the edge.


def test_one_load_only_batch_at_the_edge_and_none_after_it(lane, batch, counted):
    send, pull = lane(load_only="always")
    load = BUSY
    send.load_fn = lambda: load
    send.send_pyobj(batch(finished="stop"))
    send.after_advance()
    assert hear(pull).load == BUSY
    assert silent(pull), "a busy rank has nothing to correct"
    load = IDLE
    send.after_advance()
    last = hear(pull)
    assert (last.rids, last.engine_index, last.load) == ([], 1, IDLE)
    for _ in range(50):
        send.after_advance()
    assert silent(pull), "never a heartbeat"
    assert counted() == {"load_only_sent": 1}
    load = BUSY
    send.send_pyobj(batch())
    load = IDLE
    send.after_advance()
    assert [hear(pull).load, hear(pull).load] == [BUSY, IDLE], "each new edge is said"


def test_a_terminal_batch_that_says_the_truth_needs_no_correction(lane, batch):
    send, pull = lane(load_only="always")
    send.load_fn = lambda: IDLE
    send.send_pyobj(batch(finished="stop"), load=IDLE)
    send.after_advance()
    assert hear(pull).load == IDLE
    assert silent(pull)


def test_pages_freed_after_the_terminal_batch_are_said(lane, batch):
    send, pull = lane(load_only="always")
    send.load_fn = lambda: (0, 0, 60, 400)
    send.send_pyobj(batch(finished="stop"), load=(0, 0, 100, 400))
    send.after_advance()
    assert [hear(pull).load, hear(pull).load] == [(0, 0, 100, 400), (0, 0, 60, 400)]


def test_after_advance_takes_a_load_too(lane, batch):
    send, pull = lane(load_only="always")
    send.send_pyobj(batch(), load=BUSY)
    send.after_advance()
    send.after_advance(load=IDLE)
    assert [hear(pull).load, hear(pull).load] == [BUSY, IDLE]
    assert silent(pull)


def test_a_rank_that_never_spoke_has_nothing_to_correct(lane):
    send, pull = lane(load_only="always")
    send.load_fn = lambda: IDLE
    send.after_advance()
    assert silent(pull)


def test_the_truth_follows_a_last_batch_that_had_no_snapshot(lane, batch):
    send, pull = lane(load_only="always")
    send.send_pyobj(batch(finished="stop"))
    send.load_fn = lambda: IDLE
    send.after_advance()
    assert [hear(pull).load, hear(pull).load] == [None, IDLE]


@pytest.mark.parametrize("load_fn", [raises, lambda: (0, 0, 0, 0), lambda: (0, 0, -1, 5), lambda: None])
def test_an_unknown_load_is_never_said_to_be_idle(load_fn, lane, batch):
    send, pull = lane(load_only="always")
    send.send_pyobj(batch(), load=BUSY)
    send.load_fn = load_fn
    send.after_advance()
    assert hear(pull).load == BUSY
    assert silent(pull)


@pytest.mark.parametrize(
    ("tail", "load_only", "advertised", "elements", "edge"),
    [
        ("always", "negotiated", (False, False), 14, False),
        ("always", "negotiated", (True, False), 14, False),
        ("always", "negotiated", (False, True), 14, True),
        ("always", "negotiated", (True, True), 14, True),
        ("always", "always", (False, False), 14, True),
        ("always", "never", (True, True), 14, False),
        ("negotiated", "negotiated", (False, False), 10, False),
        ("negotiated", "negotiated", (False, True), 10, False),
        ("negotiated", "negotiated", (True, False), 14, False),
        ("negotiated", "negotiated", (True, True), 14, True),
        ("negotiated", "always", (False, False), 10, False),
        ("negotiated", "always", (True, False), 14, True),
        ("negotiated", "never", (True, True), 14, False),
    ],
)
def test_who_gets_a_tail_and_who_a_load_only_batch(tail, load_only, advertised, elements, edge, lane, batch):
    send, pull = lane(tail=tail, load_only=load_only)
    send.advertised(tail=advertised[0], load_only=advertised[1])
    send.send_pyobj(batch(), load=BUSY)
    assert pull.recv()[0] == 0x90 + elements
    send.after_advance(load=IDLE)
    if edge:
        assert hear(pull).rids == []
    assert silent(pull)


def test_a_frontend_that_takes_its_word_back_gets_no_load_only_batch(lane, batch):
    send, pull = lane(tail="negotiated", load_only="always")
    send.advertised(tail=True, load_only=True)
    send.send_pyobj(batch(), load=BUSY)
    send.advertised(tail=False, load_only=False)
    send.after_advance(load=IDLE)
    send.send_pyobj(batch(), load=BUSY)
    assert [pull.recv()[0], pull.recv()[0]] == [0x9E, 0x9A]
    send.after_advance(load=IDLE)
    assert silent(pull)


@pytest.mark.parametrize("wrong", [{"tail": "never"}, {"tail": None}, {"load_only": True}, {"load_only": "sometimes"}])
def test_modes_that_there_are_not(wrong, lane):
    with pytest.raises(ValueError, match="it is"):
        lane(**wrong)


@pytest.mark.parametrize("index", [-1, 65536, None, "1", 1.0, True])
def test_an_index_that_fits_no_identity(index, lane):
    with pytest.raises(ValueError, match="65535"):
        lane(engine_index=index)


# A peer that does not read.


@pytest.fixture
def full(context, batch):
    """A send socket whose high-water mark is full: its peer is not there."""
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.SNDHWM, 2)
    push.setsockopt(zmq.SNDTIMEO, 50)
    push.connect("tcp://127.0.0.1:9")
    send = MsgpackSendSocket(push, 1, load_only="always")
    sent = 0
    try:
        while sent < 100:
            send.send_pyobj(batch(), load=BUSY)
            sent += 1
    except zmq.Again:
        pass
    assert 0 < sent < 100
    push.setsockopt(zmq.SNDTIMEO, -1)
    yield send
    push.close(linger=0)


def test_nothing_that_is_sent_for_the_loads_sake_waits_for_room(full, caplog):
    # With SNDTIMEO at -1 each of these would block for ever, were it not sent without waiting.
    full.after_advance(load=IDLE)
    full.send_engine_dead()
    assert "engine 1 could not say that it is going away" in caplog.text


def test_tokens_wait_for_room_and_are_told_apart_from_sent_ones(full, batch):
    full.socket.setsockopt(zmq.SNDTIMEO, 50)
    with pytest.raises(zmq.Again):
        full.send_pyobj(batch(), load=BUSY)


def test_a_load_only_batch_without_room_stays_due(context, batch):
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    try:
        for socket in (pull, push):
            socket.setsockopt(zmq.SNDHWM, 1)
            socket.setsockopt(zmq.RCVHWM, 1)
        address = f"inproc://due-{os.getpid()}"
        pull.bind(address)
        push.connect(address)
        pull.rcvtimeo = 20_000
        send = MsgpackSendSocket(push, 1, load_only="always")
        send.send_pyobj(batch(), load=BUSY)
        send.send_pyobj(batch(), load=BUSY)
        send.after_advance(load=IDLE)
        assert [hear(pull).load, hear(pull).load] == [BUSY, BUSY]
        assert silent(pull), "it had no room"
        send.after_advance(load=IDLE)
        assert hear(pull).load == IDLE
        # Due, and overtaken by the truth: what is no longer true is not said.
        send.send_pyobj(batch(), load=BUSY)
        send.send_pyobj(batch(), load=BUSY)
        send.after_advance(load=IDLE)
        assert [hear(pull).load, hear(pull).load] == [BUSY, BUSY]
        send.after_advance(load=BUSY)
        assert silent(pull)
    finally:
        pull.close(linger=0)
        push.close(linger=0)


def test_a_closed_socket_costs_the_scheduler_no_exception_but_for_tokens(lane, batch, caplog):
    send, _ = lane(load_only="always")
    send.send_pyobj(batch(), load=BUSY)
    send.close()
    send.close()
    for _ in range(3):
        send.after_advance(load=IDLE)
    assert len(caplog.records) == 1
    send.send_engine_dead()
    for tail in ({}, {"load": BUSY}):
        with pytest.raises(WireError, match=r"this output socket is closed: connect anew"):
            send.send_pyobj(batch(), **tail)


def test_engine_dead_is_one_raw_frame(lane):
    send, pull = lane()
    send.send_engine_dead()
    assert pull.recv_multipart() == [ENGINE_CORE_DEAD] == [b"ENGINE_CORE_DEAD"]


def test_logging_is_under_one_name(lane, batch, caplog):
    send, _ = lane()
    with caplog.at_level(logging.DEBUG):
        send.send_pyobj(batch(), load="rubbish")
    assert {record.name for record in caplog.records} == {"loadbox"}
