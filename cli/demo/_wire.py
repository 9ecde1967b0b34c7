"""How requests reach the ranks and tokens come back: small msgpack messages over ZMQ, in the run's private directory.

It has the shape of ``loadbox.piggyback``: the engine gets a ``recv`` with ``recv_pyobj(flags)`` (``zmq.Again`` when empty) and a
``send`` with ``send_pyobj(batch)``; the frontend has ``add(rank, request)`` and ``recv(timeout)``.  A ROUTER takes each request to
its rank's DEALER; the ranks push their outputs into one PULL.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import zmq

__all__ = ["REFUSED", "STOP", "AddRequest", "FrontendSocket", "Outputs", "RecvSocket", "SendSocket", "connect_engine"]

STOP = "length"
REFUSED = "refused"

_RECONNECT_MS = 20

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"


class AddRequest(msgspec.Struct, array_like=True):
    """A request for a rank; the demo sends lengths in place of tokens."""

    rid: int
    prompt_tokens: int
    output_tokens: int


class Outputs(msgspec.Struct, array_like=True):
    """What one iteration gave, in columns: requests that got a token, and why each ended (None: it goes on).

    A request that was ``REFUSED`` got no token.
    """

    rids: list[int] = []
    finished_reasons: list[str | None] = []


def _address(directory: str, lane: str) -> str:
    return f"ipc://{directory}/{lane}"


class RecvSocket:
    """The engine's incoming lane."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._decode = msgspec.msgpack.Decoder(AddRequest).decode

    def recv_pyobj(self, flags: int = 0) -> AddRequest:
        """The next request; waits for one, or raises ``zmq.Again`` with ``flags=zmq.NOBLOCK``."""
        return self._decode(self._socket.recv(flags))


class SendSocket:
    """The engine's outgoing lane."""

    def __init__(self, socket: Socket, rank: int) -> None:
        self._socket = socket
        self._rank = b"%d" % rank
        self._encode = msgspec.msgpack.Encoder().encode

    def send_pyobj(self, batch: Outputs) -> None:
        """Send what an iteration gave."""
        self._socket.send_multipart([self._rank, self._encode(batch)])


def connect_engine(context: Context, directory: str, rank: int) -> tuple[RecvSocket, SendSocket]:
    """Connect a rank's two lanes and say that it is ready."""
    requests, outputs = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    for socket in (requests, outputs):
        socket.linger = 0
        socket.reconnect_ivl = _RECONNECT_MS
    requests.identity = b"%d" % rank
    requests.connect(_address(directory, "requests"))
    outputs.connect(_address(directory, "outputs"))
    requests.send(b"ready")
    return RecvSocket(requests), SendSocket(outputs, rank)


class FrontendSocket:
    """The frontend's end of both lanes.  For one thread."""

    def __init__(self, context: Context, directory: str) -> None:
        self._requests, self._outputs = context.socket(zmq.ROUTER), context.socket(zmq.PULL)
        for socket in (self._requests, self._outputs):
            socket.linger = 0
            socket.rcvhwm = socket.sndhwm = 0
        self._requests.router_mandatory = True
        self._requests.bind(_address(directory, "requests"))
        self._outputs.bind(_address(directory, "outputs"))
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Outputs).decode

    def ready(self, timeout: float) -> int | None:
        """The next rank that says it is ready, or None after ``timeout`` seconds."""
        if not self._requests.poll(int(timeout * 1000)):
            return None
        return int(self._requests.recv_multipart()[0])

    def add(self, rank: int, request: AddRequest) -> bool:
        """Send a request to a rank without waiting; False if the rank cannot be reached."""
        try:
            self._requests.send_multipart([b"%d" % rank, self._encode(request)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def recv(self, timeout: float = 0.0) -> tuple[int, Outputs] | None:
        """The next rank's outputs, or None after ``timeout`` seconds (whole milliseconds)."""
        try:
            if timeout and not self._outputs.poll(int(timeout * 1000)):
                return None
            rank, payload = self._outputs.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return int(rank), self._decode(payload)
