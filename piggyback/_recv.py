"""The engine's input lane."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import zmq

from loadbox.piggyback._requests import AbortRequest, GenerateRequest, decode_frames
from loadbox.piggyback._sockets import adopt, if_closed, require_same_process
from loadbox.piggyback._stats import count, warn_each

__all__ = ["MsgpackRecvSocket"]


class MsgpackRecvSocket:
    """The input DEALER with the ``recv_pyobj`` that a scheduler's drain loop calls.

    One thread at a time.  A forked child gets a ``WireError``.  ``decode_add`` may be set to an engine's own decoder: it is
    given the frames of an ADD after its type byte (payload and aux frames) and returns whatever the engine wants handed out.
    """

    def __init__(self, zmq_socket: zmq.Socket[Any]) -> None:
        self._given = zmq_socket
        self._socket = adopt(zmq_socket)
        self._pid = os.getpid()
        self.decode_add: Callable[[list[bytes]], Any] | None = None

    @property
    def socket(self) -> zmq.Socket[Any]:
        """The ZMQ socket, for polling and for its options."""
        return self._given

    def recv_pyobj(self, flags: int = 0) -> GenerateRequest | AbortRequest | Any:
        """Give the next request or abort; waits unless ``flags`` has ``zmq.NOBLOCK``, and raises ``zmq.Again`` when there is none.

        Malformed messages are dropped, counted in ``wire_stats().bad_requests`` and never raised.  Each has a warning, up to a
        hundred a minute: a flood must not fill the log.  ``WireError`` if the socket is closed.
        """
        require_same_process(self._pid, "input socket")
        while True:
            try:
                frames = self._socket.recv_multipart(flags)
            except zmq.ZMQError as error:
                raise if_closed(self._given, "input socket", error) from None
            try:
                if self.decode_add is not None and frames[0] == b"\x00" and len(frames) > 1:
                    return self.decode_add(frames[1:])
                return decode_frames(frames)
            # An engine's own decoder may raise anything, and no message from outside may end the scheduler's loop.
            except Exception as error:
                count("bad_requests")
                sizes = [len(frame) for frame in frames]
                warn_each("request", "loadbox: dropping a malformed request of %s bytes: %s", sizes, error)

    def close(self) -> None:
        """Close the socket; in a forked child this does nothing."""
        if os.getpid() == self._pid:
            self._given.close()

    def __repr__(self) -> str:
        return f"<MsgpackRecvSocket{' closed' if self._given.closed else ''}>"
