"""A frontend's lanes and what they say, without any waiting: both frontends wait in their own way and leave the rest to this.

The frontend binds a handshake ROUTER, an input ROUTER, and an output PULL *for each engine*, whose INIT names its own.  PUSH and
PULL carry no identity, and ``ENGINE_CORE_DEAD`` names nobody: with a lane of its own there is never a doubt which engine it was,
and a nine-element batch, which has no engine index, has its rank too.
"""

from __future__ import annotations

import errno
import os
import struct
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import zmq

from loadbox.piggyback._batch import BatchTokenIDOutSlim, decode_batch
from loadbox.piggyback._engines import EngineInfo, EpochLookup, announced_mailbox
from loadbox.piggyback._errors import EngineUnavailable, WireError
from loadbox.piggyback._handshake import ABI, decode_map, encode_init
from loadbox.piggyback._load import is_int
from loadbox.piggyback._requests import GenerateRequest, encode_abort, encode_add
from loadbox.piggyback._responder import HandshakeResponder
from loadbox.piggyback._send import ENGINE_CORE_DEAD
from loadbox.piggyback._sockets import open_socket, require_io_threads, require_same_process
from loadbox.piggyback._stats import count, log, warn_limited

__all__ = ["Lanes", "RankCallback"]

RankCallback = Callable[[int], object]

# Messages taken from one lane before the next has its turn.
_TURN = 256
_LONG_TURN = 100_000
_NINE_ELEMENTS = 0x99


class Lanes:
    """The sockets, the engines and the decoded batches.  ``pump`` takes in whatever has come; nothing here waits."""

    def __init__(
        self,
        context: zmq.Context[Any],
        handshake_address: str,
        engines: int,
        *,
        engine_index_base: int,
        advertise: bool,
        advertise_host: str | None,
        mailbox_epoch: EpochLookup | None,
        socket_class: type[zmq.Socket[Any]],
    ) -> None:
        if isinstance(engines, bool) or not isinstance(engines, int) or engines < 1:
            raise ValueError(f"engines is {engines!r}; it is the number of ranks, at least 1")
        if not 0 <= engine_index_base <= 0x10000 - engines:
            raise ValueError(f"engine indices {engine_index_base} to {engine_index_base + engines - 1} do not fit two bytes")
        require_io_threads(context)
        self.pid = os.getpid()
        self.closed = False
        self.context = context
        self.base = engine_index_base
        self.engines = tuple(EngineInfo(rank, engine_index_base + rank, _epoch_lookup=mailbox_epoch) for rank in range(engines))
        self.batches: deque[tuple[int, BatchTokenIDOutSlim]] = deque()
        self.on_dead: RankCallback | None = None
        self.on_ready: RankCallback | None = None
        self._rank_of = {struct.pack("<H", engine.engine_index): engine.rank for engine in self.engines}
        self._socket_class = socket_class
        self.pollable: list[zmq.Socket[Any]] = []
        self._responder: HandshakeResponder | None = None
        try:
            self._bind(handshake_address, advertise, advertise_host)
        except BaseException:
            self.close()
            raise

    def _bind(self, handshake_address: str, advertise: bool, advertise_host: str | None) -> None:
        bell_address = f"inproc://loadbox-bell-{uuid.uuid4().hex}"
        self._bell = self._open(zmq.PAIR)
        self._bell.setsockopt(zmq.RCVHWM, 0)
        self._bell.bind(bell_address)
        try:
            self._responder = HandshakeResponder(self.context, handshake_address, bell_address)
        except zmq.ZMQError as error:
            advice = (
                "; use tcp://HOST:PORT (PORT may be *) or ipc://PATH"
                if error.errno in (errno.EINVAL, errno.EPROTONOSUPPORT)
                else ""
            )
            raise WireError(f"cannot bind the handshake lane to {handshake_address!r}: {error.strerror}{advice}") from error
        self.handshake_address = self._responder.endpoint
        self._input = self._open(zmq.ROUTER)
        self._input.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # Without it a request to an engine whose connection is gone would vanish without a word.
        self._input.setsockopt(zmq.ROUTER_MANDATORY, 1)
        input_address = self._bind_beside(self._input, "in", advertise_host)
        offer = {"abi": ABI, "tail": True, "load_only": True} if advertise else None
        self._outputs: list[zmq.Socket[Any]] = []
        inits: dict[bytes, bytes] = {}
        for identity, rank in self._rank_of.items():
            output = self._open(zmq.PULL)
            self._outputs.append(output)
            inits[identity] = encode_init(input_address, self._bind_beside(output, f"out{rank}", advertise_host), offer)
        self._responder.serve(inits)

    def _open(self, kind: int) -> Any:
        """A socket of which the frontend's poller sees the given class, and this class a plain one that never returns a future."""
        socket = open_socket(self.context, kind, self._socket_class)
        self.pollable.append(socket)
        return socket if type(socket) is zmq.Socket else zmq.Socket.shadow(socket)

    def _bind_beside(self, socket: zmq.Socket[Any], suffix: str, advertise_host: str | None) -> str:
        """Bind a data lane beside the handshake lane, and give the address that engines are told."""
        scheme, _, rest = self.handshake_address.partition("://")
        try:
            if scheme != "tcp":
                socket.bind(f"{self.handshake_address}-{suffix}")
                return socket.getsockopt_string(zmq.LAST_ENDPOINT)
            host = rest.rpartition(":")[0]
            told = advertise_host or host
            if told in ("0.0.0.0", "*", "[::]"):
                raise WireError(f"{self.handshake_address} is every interface: say with advertise_host where engines connect to")
            socket.bind(f"tcp://{host}:*")
            port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        except zmq.ZMQError as error:
            raise WireError(f"cannot bind a data lane beside {self.handshake_address}: {error}") from error
        return f"tcp://{told}:{port}"

    # Incoming.

    def pump(self) -> None:
        """Take in what has come on every lane.

        The last word of a former life must not fall upon the next one, nor a registration be heard before its HELLO.  What
        came first in time is therefore collected last and looked at first: goodbyes, then greetings, then registrations.
        """
        self.require_usable()
        registrations = _collect(self._input)
        greetings = _collect(self._bell)
        # A goodbye may stand behind many batches.
        turn = _LONG_TURN if greetings else _TURN
        for rank, output in enumerate(self._outputs):
            for frames in _collect(output, turn):
                self._on_output(rank, frames)
        for kind, identity, payload in greetings:
            self._on_handshake(self.engines[self._rank_of[identity]], kind, payload)
        for frames in registrations:
            self._on_input(frames)

    def _on_output(self, lane: int, frames: list[bytes]) -> None:
        payload = frames[0]
        if payload == ENGINE_CORE_DEAD:
            # From an engine in the middle of its handshake it can only be a former life's: this one has no such lane yet.
            if self.engines[lane].state == "ready":
                self._gone(self.engines[lane])
            return
        try:
            batch = decode_batch(payload)
        except WireError as error:
            count("bad_batches")
            warn_limited(f"bad-batch-{lane}", "loadbox: dropping a message on rank %d's output lane: %s", lane, error)
            return
        if payload[0] == _NINE_ELEMENTS:
            batch.engine_index = self.base + lane
        rank = batch.engine_index - self.base
        if not 0 <= rank < len(self.engines):
            count("bad_batches")
            warn_limited(
                f"foreign-batch-{lane}",
                "loadbox: dropping a batch on rank %d's output lane that names engine %d, none of %d to %d",
                lane,
                batch.engine_index,
                self.base,
                self.base + len(self.engines) - 1,
            )
            return
        self.batches.append((rank, batch))

    def _on_handshake(self, engine: EngineInfo, kind: bytes, payload: bytes) -> None:
        if kind == b"HELLO":
            if engine.state in ("greeted", "ready"):
                log.warning("loadbox: engine %d came back; what it had in flight is lost", engine.engine_index)
                self._gone(engine)
            engine.state = "greeted"
            engine.lives += 1
            engine.ready, engine.mailbox = {}, None
        elif engine.state == "greeted":
            engine.mailbox = announced_mailbox(decode_map(payload))

    def _on_input(self, frames: list[bytes]) -> None:
        rank = self._rank_of.get(frames[0])
        if rank is None:
            warn_limited("input-stranger", "loadbox: identity %s on the input lane is no engine of this frontend", frames[0].hex())
            return
        engine = self.engines[rank]
        try:
            engine.ready = decode_map(frames[-1])
        except WireError as error:
            warn_limited(f"ready-{rank}", "loadbox: rank %d registered with something unreadable: %s", rank, error)
            return
        engine.mailbox = announced_mailbox(engine.ready) or engine.mailbox
        engine.state = "ready"
        self._call("on_ready", self.on_ready, rank)

    def _gone(self, engine: EngineInfo) -> None:
        engine.state = "dead"
        self._call("on_dead", self.on_dead, engine.rank)

    def _call(self, name: str, callback: RankCallback | None, rank: int) -> None:
        if callback is None:
            return
        try:
            callback(rank)
        # The caller's code may raise anything, and the messages behind this one are still to be read.
        except Exception:
            log.exception("loadbox: %s raised for rank %d", name, rank)

    # Outgoing.

    def engine(self, rank: int) -> EngineInfo:
        if not is_int(rank) or not 0 <= rank < len(self.engines):
            raise ValueError(f"rank is {rank!r}; this frontend has ranks 0 to {len(self.engines) - 1}")
        return self.engines[rank]

    def add(self, engine: EngineInfo, request: GenerateRequest) -> None:
        if engine.state == "dead":
            raise EngineUnavailable(f"rank {engine.rank} said that it is going away; give the request to another rank")
        self._send(engine, encode_add(request))

    def abort(self, engine: EngineInfo, rids: Iterable[str]) -> None:
        frames = encode_abort(rids)
        if engine.state == "ready":
            self._send(engine, frames, must_arrive=False)

    def _send(self, engine: EngineInfo, frames: list[bytes], must_arrive: bool = True) -> None:
        try:
            self._input.send_multipart([struct.pack("<H", engine.engine_index), *frames], zmq.NOBLOCK)
        except zmq.Again as error:
            raise EngineUnavailable(f"rank {engine.rank} does not read its requests: its queue is full") from error
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if must_arrive:
                raise EngineUnavailable(
                    f"the connection to rank {engine.rank} is gone; give the request to another rank"
                ) from error

    def require_usable(self) -> None:
        require_same_process(self.pid, "frontend")
        if self.closed:
            raise WireError("this frontend is closed")

    def close(self) -> None:
        """Stop the handshake thread and close every socket.  Idempotent; in a forked child this does nothing."""
        if self.closed or os.getpid() != self.pid:
            return
        self.closed = True
        responder = self._responder
        if responder is not None and responder.is_alive():
            try:
                self._bell.send(b"", zmq.NOBLOCK)
                responder.join(5)
            except zmq.ZMQError:
                pass
        elif responder is not None:
            responder.abandon()
        for socket in self.pollable:
            socket.close()


def _collect(socket: zmq.Socket[Any], turn: int = _TURN) -> list[list[bytes]]:
    messages: list[list[bytes]] = []
    try:
        while len(messages) < turn:
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
    except zmq.Again:
        pass
    return messages
