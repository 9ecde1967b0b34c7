"""The frontend's handshake lane, answered from a thread of its own.

An engine may say HELLO at any time, also while the frontend is busy elsewhere or waits for something else, and it waits for
its INIT.  The answer needs nothing but the addresses, so a small thread gives it.  The thread owns the handshake ROUTER; what it
hears it passes on over an inproc pair to the thread that uses the frontend, so that no state is shared.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping
from typing import Any

import zmq

from loadbox.piggyback._errors import WireError
from loadbox.piggyback._handshake import decode_map
from loadbox.piggyback._sockets import open_socket
from loadbox.piggyback._stats import log, warn_limited

__all__ = ["HandshakeResponder"]


class HandshakeResponder(threading.Thread):
    """Answers each HELLO with that engine's INIT; sends ``[status, identity, payload]`` for HELLO and READY to ``bell_address``.

    A message on the bell ends it, and so does the end of the context.
    """

    def __init__(self, context: zmq.Context[Any], address: str, bell_address: str) -> None:
        super().__init__(name="loadbox-handshake", daemon=True)
        # A shadow, so that destroy() of the caller's context does not close these sockets under this thread: it ends them by ETERM.
        shadow: zmq.Context[Any] = zmq.Context.shadow(context)
        self._inits: Mapping[bytes, bytes] = {}
        self._router: zmq.Socket[Any] = open_socket(shadow, zmq.ROUTER)
        self._bell: zmq.Socket[Any] = open_socket(shadow, zmq.PAIR)
        try:
            # An engine that comes back before its old connection was seen to end is the one to talk to.
            self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._router.bind(address)
            self._bell.setsockopt(zmq.SNDHWM, 0)
            self._bell.connect(bell_address)
        except BaseException:
            self.abandon()
            raise
        self.endpoint: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def serve(self, inits: Mapping[bytes, bytes]) -> None:
        """Start answering, with one INIT for each identity."""
        self._inits = inits
        self.start()

    def abandon(self) -> None:
        """Close what ``run`` would have closed, if it never started."""
        self._router.close(linger=0)
        self._bell.close(linger=0)

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._bell in ready:
                    break
                self._answer(self._router.recv_multipart())
        except zmq.ZMQError as error:
            if error.errno not in (zmq.ETERM, zmq.ENOTSOCK):
                log.exception("loadbox: the handshake lane has ended; engines that come now get no INIT")
        finally:
            self._router.close()
            self._bell.close(linger=0)

    def _answer(self, frames: list[bytes]) -> None:
        identity, payload = frames[0], frames[-1]
        try:
            status = decode_map(payload).get("status")
        except WireError as error:
            warn_limited("handshake", "loadbox: dropping a handshake message: %s", error)
            return
        if identity not in self._inits:
            what = f"engine {struct.unpack('<H', identity)[0]}" if len(identity) == 2 else f"identity {identity.hex()}"
            warn_limited(
                "handshake-stranger",
                "loadbox: %s knocked, none of this frontend's %d engines; compare the base index and the number of engines",
                what,
                len(self._inits),
            )
            return
        if status == "HELLO":
            # Passed on before INIT leaves, so that the HELLO is heard of before anything that this life says afterwards.
            self._bell.send_multipart([b"HELLO", identity, payload])
            try:
                self._router.send_multipart([identity, self._inits[identity]], zmq.NOBLOCK)
            except zmq.Again:
                warn_limited("handshake-full", "loadbox: an engine that says HELLO does not read its INIT")
        elif status == "READY":
            self._bell.send_multipart([b"READY", identity, payload])
        else:
            warn_limited("handshake", "loadbox: dropping a handshake message with status %r", status)
