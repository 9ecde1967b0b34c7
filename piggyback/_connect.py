"""The engine's side of the handshake: HELLO, INIT, READY, the ready response, and the two data lanes."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from typing import Any, Protocol

import zmq

from loadbox.piggyback._errors import HandshakeTimeout, WireError
from loadbox.piggyback._handshake import ABI, HandshakeInit, decode_init, encode_status, ready_response
from loadbox.piggyback._recv import MsgpackRecvSocket
from loadbox.piggyback._send import LoadOnlyMode, MsgpackSendSocket, TailMode, check_modes
from loadbox.piggyback._sockets import check_index, open_socket, require_io_threads
from loadbox.piggyback._stats import log

__all__ = ["connect_msgpack_engine"]

# A frontend may register a worker many minutes late; an operator wants a sign now and then.
_SLICE = 30.0


class _Mailbox(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def epoch(self) -> int: ...


def connect_msgpack_engine(
    context: zmq.Context[Any],
    handshake_address: str,
    *,
    engine_index: int,
    ready: object,
    tail: TailMode = "always",
    load_only: LoadOnlyMode = "negotiated",
    timeout: float = 600,
    mailbox: _Mailbox | None = None,
) -> tuple[MsgpackRecvSocket, MsgpackSendSocket, HandshakeInit]:
    """Connect one engine to the frontend that has bound, or will bind, ``handshake_address``.

    ``ready`` is what the frontend learns about the engine: a mapping (or a msgspec struct) with any of ``max_model_len``,
    ``num_gpu_blocks``, ``dtype``, ``data_parallel_size``, ``data_parallel_rank`` and the other keys of the ready response; the rest
    is filled in.  ``mailbox`` is this rank's ``MailboxWriter``, whose name and epoch are announced: a frontend that finds them
    is on the same host.  ``tail`` and ``load_only`` are as in ``MsgpackSendSocket``.

    Gives the input socket, the output socket and the frontend's INIT, all for one thread.  Waits at most ``timeout`` seconds for
    INIT, in slices, with a line in the log after each; then ``HandshakeTimeout`` (a ``TimeoutError``).  ``WireError`` if
    INIT is malformed or if the context was inherited over a fork; ``ValueError`` for an index that does not fit two bytes.  No
    socket is left open on an error.  An engine that comes back calls it anew; so does one whose frontend was restarted.
    """
    check_modes(tail, load_only)
    identity = struct.pack("<H", check_index(engine_index))
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout!r}; it is a number of seconds above 0")
    announcement = _announcement(ready, mailbox)
    response = ready_response(ready, announcement)
    require_io_threads(context)

    opened: list[zmq.Socket[Any]] = []
    try:
        handshake = _dial(context, zmq.DEALER, handshake_address, identity, opened)
        handshake.send(encode_status("HELLO"))
        init = decode_init(_await_init(handshake, handshake_address, engine_index, timeout))
        handshake.send(encode_status("READY", announcement))
        requests = _dial(context, zmq.DEALER, init.addresses.inputs[0], identity, opened)
        requests.send(response)
        output = _dial(context, zmq.PUSH, init.addresses.outputs[0], None, opened)
        # READY may still be queued: the socket's linger lets it leave.
        handshake.close()
        recv = MsgpackRecvSocket(requests)
        send = MsgpackSendSocket(output, engine_index, tail=tail, load_only=load_only)
    except BaseException:
        for socket in opened:
            socket.close(linger=0)
        raise
    send.advertised(tail=init.tail, load_only=init.load_only)
    log.info(
        "loadbox: engine %d is connected to %s (load tail: %s, load-only batches: %s)",
        engine_index,
        handshake_address,
        "yes" if send._sends_tail else "no",
        "yes" if send._sends_load_only else "no",
    )
    return recv, send, init


def _dial(
    context: zmq.Context[Any], kind: int, address: str, identity: bytes | None, opened: list[zmq.Socket[Any]]
) -> zmq.Socket[Any]:
    socket: zmq.Socket[Any] = open_socket(context, kind)
    opened.append(socket)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        raise WireError(f"cannot connect to {address!r}: {error}; it looks like tcp://127.0.0.1:30500 or ipc:///path") from error
    return socket


def _announcement(ready: object, mailbox: _Mailbox | None) -> dict[str, Any]:
    if mailbox is not None:
        return {"abi": ABI, "mailbox": mailbox.name, "epoch": mailbox.epoch}
    given = ready.get("loadbox") if isinstance(ready, Mapping) else None
    return {"abi": ABI, **given} if isinstance(given, Mapping) else {"abi": ABI}


def _await_init(handshake: zmq.Socket[Any], address: str, engine_index: int, timeout: float) -> bytes:
    started = time.monotonic()
    piece = min(_SLICE, timeout / 4)
    while True:
        waited = time.monotonic() - started
        left = timeout - waited
        if left <= 0:
            raise HandshakeTimeout(
                f"engine {engine_index} had no INIT from {address} within {timeout:g} s; is a frontend bound there, "
                "and does it expect this engine index?"
            )
        if handshake.poll(max(1, round(min(piece, left) * 1000))):
            frames: list[bytes] = handshake.recv_multipart()
            return frames[-1]
        log.info("loadbox: engine %d waits for INIT from %s (%.0f s so far)", engine_index, address, time.monotonic() - started)
