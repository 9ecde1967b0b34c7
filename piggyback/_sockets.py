"""ZMQ manners that both ends share: bounded linger, sockets that are never asyncio ones by accident, contexts that are alive.

Linger.  ZMQ's default keeps a process at ``context.term()`` for as long as a dead peer does not read.  Every socket here lingers
for at most ``LINGER_MS``: long enough for the last batch and ``ENGINE_CORE_DEAD`` to leave, short enough for an exit.

Fork.  A context's I/O threads stay in the parent.  In a child its sockets can be made, connected and written to, and nothing ever
happens: a handshake would wait for its whole time limit.  So the context is asked for a sign of life first.
"""

from __future__ import annotations

import errno
import os
import uuid
from operator import index
from typing import Any

import zmq

from loadbox.piggyback._errors import WireError
from loadbox.piggyback._load import is_int

__all__ = ["LINGER_MS", "adopt", "check_index", "if_closed", "open_socket", "require_io_threads", "require_same_process"]

LINGER_MS = 1000
_SIGN_OF_LIFE_MS = 10_000
_FOR_A_SIGN_OF_LIFE = 8  # descriptors: two sockets, a listener, both ends of a connection, and some to spare


def open_socket(context: zmq.Context[Any], kind: int, socket_class: type[zmq.Socket[Any]] = zmq.Socket) -> Any:
    """A socket of that context with bounded linger; a plain one even if the context is asyncio's."""
    try:
        socket = context.socket(kind, socket_class=socket_class)
    except zmq.ZMQError as error:
        if error.errno != errno.EMFILE:
            raise
        raise _no_descriptors() from error
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    return socket


def _no_descriptors() -> WireError:
    return WireError("this process has too many open files for another ZMQ socket: raise its limit (ulimit -n)")


def _require_descriptors(count: int) -> None:
    """WireError if there are not so many left: without them ZMQ's own threads fail in silence, as if they were not there."""
    taken: list[int] = []
    try:
        for _ in range(count):
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise _no_descriptors() from error
    finally:
        for fd in taken:
            os.close(fd)


def adopt(socket: Any) -> Any:
    """A caller's socket with its endless linger bounded; the plain socket beneath, if it is asyncio's."""
    if socket.getsockopt(zmq.LINGER) < 0:
        socket.setsockopt(zmq.LINGER, LINGER_MS)
    return socket if type(socket) is zmq.Socket else zmq.Socket.shadow(socket)


def require_io_threads(context: zmq.Context[Any]) -> None:
    """WireError if the context cannot do anything in this process (inherited over a fork)."""
    if not isinstance(context, zmq.Context):
        raise TypeError(f"context must be a zmq.Context, not {type(context).__name__}")
    if context.closed:
        raise WireError("the ZMQ context is closed; make a new zmq.Context()")
    if context.get(zmq.IO_THREADS) == 0:
        return
    # A message to itself through the kernel: with I/O threads at work it is there in a millisecond or two.
    address = f"ipc://@loadbox-{uuid.uuid4().hex}"
    _require_descriptors(_FOR_A_SIGN_OF_LIFE)
    one, other = open_socket(context, zmq.PAIR), open_socket(context, zmq.PAIR)
    try:
        one.bind(address)
        other.connect(address)
        other.send(b"")
        alive = one.poll(_SIGN_OF_LIFE_MS)
    finally:
        one.close(linger=0)
        other.close(linger=0)
    if not alive:
        raise WireError(
            "the ZMQ context does nothing in this process: it was inherited over a fork, and its threads stayed in the parent; "
            "make a new zmq.Context() in the child"
        )


def require_same_process(pid: int, what: str) -> None:
    """WireError in a forked child; its copy of a ZMQ socket must not be used."""
    if os.getpid() != pid:
        raise WireError(f"this {what} was made in process {pid} and came here over a fork; connect anew in this process")


def if_closed(socket: zmq.Socket[Any], what: str, error: zmq.ZMQError) -> Exception:
    """A WireError that says that the socket is closed, if that is why ZMQ raised; else the error itself."""
    if socket.closed or error.errno == zmq.ENOTSOCK:
        return WireError(f"this {what} is closed: connect anew with connect_msgpack_engine()")
    return error


def check_index(engine_index: object) -> int:
    """The engine index as an int that fits its two-byte identity; ValueError else."""
    if not (is_int(engine_index) and 0 <= (number := index(engine_index)) <= 0xFFFF):
        raise ValueError(f"engine_index is {engine_index!r}; it is an int from 0 to 65535 (base index + dp rank)")
    return number
