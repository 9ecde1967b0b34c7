"""The errors of the lane: one base, a few precise children."""

from __future__ import annotations

import zmq

__all__ = ["EngineUnavailable", "HandshakeTimeout", "NothingReceived", "WireError", "excerpt"]


class WireError(ValueError):
    """Something on the ZMQ lane is not what it has to be.  The message says what was found, where, and what to do."""


class HandshakeTimeout(WireError, TimeoutError):
    """The other side did not finish the handshake within the time limit."""


class EngineUnavailable(WireError):
    """A request cannot be given to that rank now: it said goodbye, its connection is gone, or its queue is full."""


class NothingReceived(zmq.Again, TimeoutError):  # type: ignore[misc]  # both give it a strerror, of types that mypy takes to clash
    """No batch came within ``recv``'s timeout.  A ``TimeoutError``, and a ``zmq.Again`` for loops written for bare sockets."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def __str__(self) -> str:
        return f"no batch came within {self._seconds:g} s"


def excerpt(payload: object) -> str:
    """Size and first bytes of a payload, for an error's text."""
    if not isinstance(payload, (bytes, bytearray)):
        return f"a {type(payload).__name__}"
    return f"{len(payload)} bytes starting {payload[:24].hex()}" if payload else "an empty payload"
