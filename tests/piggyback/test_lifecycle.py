"""Forks, exits and peers that vanish: nothing here may hang."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import msgspec
import pytest
import zmq

from loadbox.piggyback import BatchTokenIDOutSlim, GenerateRequest, MsgpackFrontend, WireError, connect_msgpack_engine

PREPARE = """
    import os, sys, time
    import zmq
    from loadbox.piggyback import *
    from loadbox.piggyback import _sockets
    _sockets._SIGN_OF_LIFE_MS = 500
    def batch(): return BatchTokenIDOutSlim(["a"], [[1]], [""], [1], [1], [0], [[]], [[]])
    def error(call):
        try:
            call()
        except WireError as problem:
            return str(problem)
        return "no error"
"""

FORKED = (
    PREPARE
    + """
    context = zmq.Context()
    front = MsgpackFrontend(context, "tcp://127.0.0.1:*", engines=1)
    recv, send, init = connect_msgpack_engine(context, front.handshake_address, engine_index=0, ready={}, load_only="always")
    front.wait_ready(20)
    send.send_pyobj(batch(), load=(1, 0, 1, 2))
    print(front.recv(20)[0])
    child = os.fork()
    if child == 0:
        print(error(lambda: connect_msgpack_engine(context, front.handshake_address, engine_index=0, ready={})))
        print(error(lambda: MsgpackFrontend(context, "tcp://127.0.0.1:*", engines=1)))
        for call in (lambda: front.recv(0), lambda: front.add(0, None), lambda: front.abort(0, []), lambda: front.wait_ready(0),
                     lambda: recv.recv_pyobj(), lambda: send.send_pyobj(batch())):
            assert "over a fork" in error(call), call
        send.after_advance(load=(0, 0, 1, 2)); send.send_engine_dead(); send.close(); recv.close(); front.close()
        own = zmq.Context()
        with MsgpackFrontend(own, "tcp://127.0.0.1:*", engines=1) as mine:
            r, s, _ = connect_msgpack_engine(own, mine.handshake_address, engine_index=0, ready={})
            s.send_pyobj(batch()); print("child", mine.recv(20)[0]); r.close(); s.close()
        own.term()
        sys.exit(0)
    print("exit", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    send.send_pyobj(batch(), load=(1, 0, 1, 2))
    print("parent", front.recv(20)[0])
    send.close(); recv.close(); front.close(); context.term()
    """
)


def test_a_forked_child_is_told_and_the_parent_goes_on(children):
    first, *middle, child, end, parent = children.run(FORKED).splitlines()
    assert len(middle) == 2
    assert all("inherited over a fork" in line and "make a new zmq.Context()" in line for line in middle)
    assert [first, child, end, parent] == ["0", "child 0", "exit 0", "parent 0"]


UNCLOSED = (
    PREPARE
    + """
    context = zmq.Context()
    front = MsgpackFrontend(context, "tcp://127.0.0.1:*", engines=1)
    recv, send, init = connect_msgpack_engine(context, front.handshake_address, engine_index=0, ready={})
    front.wait_ready(20)
    front.add(0, GenerateRequest("unread"))
    for _ in range(50):
        send.send_pyobj(batch())
    print("leaving", flush=True)
    if sys.argv[1] == "raise":
        raise SystemExit(3)
    if sys.argv[1] == "destroy":
        context.destroy()
    if sys.argv[1] == "delete":
        del recv, send, front
        context.term()
    """
)


@pytest.mark.parametrize("how", ["return", "raise", "destroy", "delete"])
def test_a_process_that_closes_nothing_ends(children, how):
    child = children.start(UNCLOSED, how)
    out, err = child.communicate(timeout=60)
    assert (out, child.returncode) == ("leaving\n", 3 if how == "raise" else 0), err


DEAD_PEER = (
    PREPARE
    + """
    context = zmq.Context()
    recv, send, init = connect_msgpack_engine(context, sys.argv[1], engine_index=0, ready={}, timeout=30)
    print("connected", flush=True)
    sys.stdin.readline()
    send.socket.setsockopt(zmq.SNDTIMEO, 100)
    try:
        for _ in range(100_000):
            send.send_pyobj(batch(), load=(1, 0, 1, 2))
        print("never full")
    except zmq.Again:
        print("full", flush=True)
    send.after_advance(load=(0, 0, 1, 2))
    send.send_engine_dead()
    send.close(); recv.close()
    began = time.monotonic()
    context.term()
    print("ended" if time.monotonic() - began < 30 else "slow")
    """
)


def test_an_engine_whose_frontend_is_gone_ends_with_its_queue_full(children, context, tmp_path):
    address = f"ipc://{tmp_path}/gone"
    front = MsgpackFrontend(context, address, engines=1)
    child = children.start(DEAD_PEER, address)
    assert child.stdout is not None
    assert child.stdout.readline() == "connected\n", child.communicate()[1]
    front.close()
    out, err = child.communicate(input="go\n", timeout=90)
    assert (out, child.returncode) == ("full\nended\n", 0), err


def ends(context: zmq.Context[Any]) -> bool:
    """Whether the context's end comes, and not only when a peer reads at last."""
    thread = threading.Thread(target=context.term, daemon=True)
    thread.start()
    thread.join(30)
    return not thread.is_alive()


def test_a_frontend_with_unread_requests_ends(context):
    own = zmq.Context()
    front = MsgpackFrontend(own, "tcp://127.0.0.1:*", engines=1)
    recv, send, _ = connect_msgpack_engine(context, front.handshake_address, engine_index=0, ready={}, timeout=20)

    def flood() -> None:
        for _ in range(5000):
            front.add(0, GenerateRequest("unread", input_ids=[70_000] * 20_000))

    with pytest.raises(WireError, match="queue is full"):
        flood()
    front.close()
    assert ends(own)
    recv.close()
    send.close()


def test_an_engine_whose_frontend_vanished_in_the_handshake_ends(context):
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    own = zmq.Context()
    errors: list[Exception] = []

    def connect() -> None:
        try:
            recv, send, _ = connect_msgpack_engine(own, f"tcp://127.0.0.1:{port}", engine_index=0, ready={}, timeout=20)
        except Exception as error:
            errors.append(error)
            return
        send.send_pyobj(BatchTokenIDOutSlim([], [], [], [], [], [], [], []))
        recv.close()
        send.close()

    thread = threading.Thread(target=connect)
    thread.start()
    identity, _ = router.recv_multipart()
    # Nobody will ever listen there, so the registration and the batch cannot leave.
    nowhere = {"inputs": ["tcp://127.0.0.1:9"], "outputs": ["tcp://127.0.0.1:9"]}
    router.send_multipart([identity, msgspec.msgpack.encode({"addresses": nowhere})])
    thread.join(30)
    assert not errors
    router.close(linger=0)
    assert ends(own)


ENGINE = (
    PREPARE
    + """
    context = zmq.Context()
    recv, send, init = connect_msgpack_engine(context, sys.argv[1], engine_index=int(sys.argv[2]), ready={}, timeout=30)
    while True:
        request = recv.recv_pyobj()
        send.send_pyobj(BatchTokenIDOutSlim([request.rid], [[1]], ["stop"], [1], [1], [0], [[]], [[]]), load=(1, 0, 1, 2))
    """
)


def answer(front: MsgpackFrontend, rank: int, rid: str) -> Any:
    front.add(rank, GenerateRequest(rid, input_ids=[1]))
    return front.recv(timeout=30)


def test_an_engine_that_is_killed_comes_back_and_the_other_never_notices(children, context):
    with MsgpackFrontend(context, "tcp://127.0.0.1:*", engines=2) as front:
        dead: list[int] = []
        front.on_dead = dead.append
        first, second = (children.start(ENGINE, front.handshake_address, rank) for rank in range(2))
        front.wait_ready(30)
        for life in range(3):
            assert answer(front, 0, f"a{life}")[1].rids == [f"a{life}"]
            os.kill(first.pid, signal.SIGKILL)
            first.wait()
            assert answer(front, 1, f"b{life}")[1].rids == [f"b{life}"]
            first = children.start(ENGINE, front.handshake_address, 0)
            end = time.monotonic() + 30
            while front.engines[0].lives < life + 2 or front.engines[0].state != "ready":
                assert time.monotonic() < end, front
                with pytest.raises(TimeoutError):
                    front.recv(timeout=0.05)
        assert dead == [0, 0, 0]
        assert front.engines[1].lives == 1
        assert second.poll() is None


def test_an_engine_that_is_stopped_holds_the_frontend_up_in_nothing(children, context):
    with MsgpackFrontend(context, "tcp://127.0.0.1:*", engines=2) as front:
        first, _ = (children.start(ENGINE, front.handshake_address, rank) for rank in range(2))
        front.wait_ready(30)
        os.kill(first.pid, signal.SIGSTOP)
        try:
            front.add(0, GenerateRequest("held"))
            for number in range(20):
                assert answer(front, 1, str(number))[0] == 1
        finally:
            os.kill(first.pid, signal.SIGCONT)
        rank, got = front.recv(timeout=30)
        assert (rank, got.rids) == (0, ["held"])


def test_a_frontend_that_is_dropped_unclosed_lets_go_of_its_address(context):
    front = MsgpackFrontend(context, "tcp://127.0.0.1:*", engines=1)
    address = front.handshake_address
    del front
    end = time.monotonic() + 20
    while True:
        try:
            # ZMQ closes sockets in a thread of its own, a moment later.
            with MsgpackFrontend(context, address, engines=1) as again:
                assert again.handshake_address == address
                return
        except WireError:
            assert time.monotonic() < end


def test_a_context_that_ends_under_the_handshake_thread_ends_it(context):
    other = zmq.Context()
    front = MsgpackFrontend(other, "tcp://127.0.0.1:*", engines=1)
    thread = front._lanes._responder
    other.destroy(linger=0)
    thread.join(20)
    assert not thread.is_alive()
    front.close()


def test_a_hundred_lives_leave_no_descriptor_behind(context):
    def life() -> None:
        with MsgpackFrontend(context, "tcp://127.0.0.1:*", engines=1) as front:
            recv, send, _ = connect_msgpack_engine(context, front.handshake_address, engine_index=0, ready={}, timeout=20)
            front.wait_ready(20)
            recv.close()
            send.close()

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    life()
    before = descriptors()
    for _ in range(100):
        life()
    end = time.monotonic() + 20
    while descriptors() > before + 10:
        assert time.monotonic() < end, (before, descriptors())
        time.sleep(0.05)


def test_a_failed_connect_can_be_tried_again(context):
    with MsgpackFrontend(context, "tcp://127.0.0.1:*", engines=1) as front:
        with pytest.raises(WireError):
            connect_msgpack_engine(context, front.handshake_address, engine_index=9, ready={}, timeout=0.2)
        recv, send, _ = connect_msgpack_engine(context, front.handshake_address, engine_index=0, ready={}, timeout=20)
        recv.close()
        send.close()
