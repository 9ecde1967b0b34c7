"""The engine's output lane: every batch leaves with a fresh load, and nothing that the load adds can hold the scheduler up.

What may block and what may not.  A token batch is never dropped and never overtaken, so when the frontend reads too slowly, or is
gone, and the socket's high-water mark is full, ``send_pyobj`` waits for room, as a bare PUSH socket would: that wait is the
tokens' own, and a caller who wants another bargain sets SNDHWM or SNDTIMEO on ``.socket``.  All that is there for the load's sake
never waits: the tail rides inside a message that goes anyway, a load-only batch and ``ENGINE_CORE_DEAD`` are tried once without
blocking, and close lingers for a bounded time.  A load-only batch that finds no room stays due, and the next ``after_advance``
says it, if it is still true.

The terminal batch.  The last batch before a rank goes idle is the last that a frontend hears for hours.  A load sampled before
its finishes are applied would stand as "busy" all that time.  Hence ``send_pyobj(batch, load=...)`` for a load that already
reflects the batch's own finishes, and ``after_advance``, which sends one batch with empty columns when the rank is idle and the
last tail said otherwise.  It compares with what was last said, so silence means "unchanged" and there is no heartbeat.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import zmq

from loadbox.piggyback._batch import BatchTokenIDOutSlim, encode_ten, encode_whole, load_only_batch
from loadbox.piggyback._load import NO_SNAPSHOT, Tail, check_tail
from loadbox.piggyback._sockets import adopt, check_index, if_closed, require_same_process
from loadbox.piggyback._stats import count, log

__all__ = ["ENGINE_CORE_DEAD", "LoadOnlyMode", "MsgpackSendSocket", "TailMode", "check_modes"]

ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"

TailMode = Literal["always", "negotiated"]
LoadOnlyMode = Literal["negotiated", "always", "never"]


def check_modes(tail: str, load_only: str) -> None:
    if tail not in get_args(TailMode):
        raise ValueError(f'tail is {tail!r}; it is "always" or "negotiated"')
    if load_only not in get_args(LoadOnlyMode):
        raise ValueError(f'load_only is {load_only!r}; it is "negotiated", "always" or "never"')


class MsgpackSendSocket:
    """The output PUSH socket, sending ``BatchTokenIDOutSlim`` under this engine's index with the load in its tail.

    ``tail="always"`` sends fourteen elements; ``"negotiated"`` sends ten until the frontend has advertised that it reads more.
    ``load_only="negotiated"`` sends load-only batches to a frontend that advertised them, ``"always"`` to any that gets tails,
    ``"never"`` to none.  ``connect_msgpack_engine`` passes the advertisement on; for a socket made by hand, ``advertised`` does.
    One thread at a time (the scheduler's).  A forked child gets a ``WireError`` from ``send_pyobj`` and silence from the rest.
    """

    def __init__(
        self,
        zmq_socket: zmq.Socket[Any],
        engine_index: int = 0,
        *,
        tail: TailMode = "always",
        load_only: LoadOnlyMode = "negotiated",
    ) -> None:
        check_modes(tail, load_only)
        self._engine_index = check_index(engine_index)
        self._given = zmq_socket
        self._socket = adopt(zmq_socket)
        self._pid = os.getpid()
        self._tail_mode = tail
        self._load_only_mode = load_only
        self._load_fn: Callable[[], Iterable[int]] | None = None
        self._complained: set[str] = set()
        self._said: Tail | None = None
        self.advertised(tail=False, load_only=False)

    def advertised(self, *, tail: bool, load_only: bool) -> None:
        """Take note of what the frontend said that it reads: the load tail, load-only batches."""
        self._sends_tail = self._tail_mode == "always" or tail
        self._sends_load_only = self._sends_tail and (
            self._load_only_mode == "always" or (self._load_only_mode == "negotiated" and load_only)
        )

    @property
    def load_fn(self) -> Callable[[], Iterable[int]] | None:
        """Where each batch's load comes from: a callable that gives (running, waiting, active pages, total pages).

        None until the scheduler exists; until then batches go out with no snapshot.  It is called in the thread that sends,
        once for each batch, and at the edge for a load-only batch.  If it raises, or gives what ``MailboxWriter.publish``
        would refuse, that batch goes out with no snapshot: logged once until another one is bound, always counted.
        """
        return self._load_fn

    @load_fn.setter
    def load_fn(self, load_fn: Callable[[], Iterable[int]] | None) -> None:
        if load_fn is not None and not callable(load_fn):
            raise TypeError(f"load_fn is a callable or None, not {type(load_fn).__name__}")
        self._load_fn = load_fn
        self._complained -= {"load_fn", "load"}

    @property
    def socket(self) -> zmq.Socket[Any]:
        """The ZMQ socket, for its options (SNDHWM, SNDTIMEO, LINGER)."""
        return self._given

    @property
    def engine_index(self) -> int:
        """The index under which every batch goes out: base index + dp rank."""
        return self._engine_index

    def send_pyobj(self, batch: BatchTokenIDOutSlim, *, load: Iterable[int] | None = None) -> None:
        """Send a batch with ``load``, or with what ``load_fn`` says now.

        The batch's own ``engine_index`` and load are not read but overwritten: afterwards it stands as it was sent.
        For a batch that finishes requests the load must be the one *after* these finishes: four ints as in ``load_fn``.  Waits
        for room when the high-water mark is full; with SNDTIMEO set on the socket ``zmq.Again`` says that the batch was not sent.
        Raises ``WireError`` for a batch that would lose its tokens at the other end (columns of unequal length), or if the socket
        is closed.  Objects that are no batch have no reader on this lane: dropped, with one warning for each type.
        """
        require_same_process(self._pid, "output socket")
        if not isinstance(batch, BatchTokenIDOutSlim):
            count("dropped_replies")
            self._complain(type(batch).__name__, "dropping a %s: only output batches go out on this lane", type(batch).__name__)
            return
        batch.engine_index = self._engine_index
        if not self._sends_tail:
            self._send(encode_ten(batch))
            return
        tail = self._sample(load)
        batch.num_running, batch.num_waiting, batch.kv_active_pages, batch.kv_total_pages = tail
        self._send(encode_whole(batch))
        self._said = tail

    def _send(self, payload: bytes) -> None:
        try:
            self._socket.send(payload)
        except zmq.ZMQError as error:
            raise if_closed(self._given, "output socket", error) from None

    def after_advance(self, *, load: Iterable[int] | None = None) -> None:
        """Say that this rank has become idle, if it has and the last tail sent said otherwise; call it once an iteration.

        The load is ``load``, or what ``load_fn`` says now, after the iteration's finishes.  Sends at most one load-only batch
        and never blocks or raises: without room it stays due for the next call.  A rank that never sent a tail has nothing to
        correct; one whose last batch had to go out with no snapshot has.
        """
        if not self._sends_load_only or self._said is None or os.getpid() != self._pid:
            return
        if load is None and self._load_fn is None:
            return
        tail = self._sample(load)
        if tail[0] or tail[1] or not tail[3] or tail == self._said:
            return
        try:
            self._socket.send(load_only_batch(self._engine_index, tail), zmq.NOBLOCK)
        except zmq.Again:
            return
        except zmq.ZMQError as error:
            self._complain("load-only", "a load-only batch could not be sent: %s", error)
            return
        self._said = tail
        count("load_only_sent")

    def send_engine_dead(self) -> None:
        """Tell the frontend that this engine is going away; tried once, never blocks, never raises."""
        if os.getpid() != self._pid:
            return
        try:
            self._socket.send(ENGINE_CORE_DEAD, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.warning("loadbox: engine %d could not say that it is going away: %s", self._engine_index, error)

    def close(self) -> None:
        """Close the socket; what is queued has a second to leave.  Idempotent; in a forked child this does nothing."""
        if os.getpid() == self._pid:
            self._given.close()

    def _sample(self, load: Iterable[int] | None) -> Tail:
        if load is None:
            if self._load_fn is None:
                return NO_SNAPSHOT
            try:
                load = self._load_fn()
            except Exception as error:
                count("load_fn_errors")
                self._complain("load_fn", "load_fn raised %s: %s; batches go out with no snapshot", type(error).__name__, error)
                return NO_SNAPSHOT
        try:
            return check_tail(load)
        # A load may be any object, and what its iteration or __index__ raises is the load's affair and not the batch's.
        except Exception as error:
            count("bad_loads")
            self._complain("load", "a load was refused, and batches go out with no snapshot: %s", error)
            return NO_SNAPSHOT

    def _complain(self, what: str, message: str, *args: object) -> None:
        if what not in self._complained:
            self._complained.add(what)
            log.warning(f"loadbox: engine %d: {message}", self._engine_index, *args)

    def __repr__(self) -> str:
        return f"<MsgpackSendSocket engine_index={self._engine_index} tail={self._tail_mode} load_only={self._load_only_mode}>"
