"""A rank's frontends: a connection to each, whose request is whose, and for each the batch with its own requests.

Every frontend has a handshake of its own, so an engine that serves several holds a pair of sockets for each.  The load rides on
every batch, sampled as it is sent; a frontend that has nothing on this rank hears nothing, but for the one load-only batch when the
rank falls idle.  A frontend that does not read its batches loses them, and holds up neither the rank nor the others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import zmq

from loadbox.cli.demo._model import Applied
from loadbox.piggyback import BatchTokenIDOutSlim, GenerateRequest, MsgpackRecvSocket, MsgpackSendSocket

__all__ = ["REFUSED", "Links"]

REFUSED = "abort"

_TOKEN = 0
_FINISHED = "length"
_log = logging.getLogger("loadbox")


class _Open:
    __slots__ = ("completion_tokens", "link", "prompt_tokens", "rid")

    def __init__(self, link: int, rid: str, prompt_tokens: int) -> None:
        self.link = link
        self.rid = rid
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0


class Links:
    """All connections of a rank.  For one thread.

    Two frontends may give two requests the same id, so the scheduler knows each by a number that is given here.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[MsgpackRecvSocket, MsgpackSendSocket]] = []
        self._names: list[int] = []
        self._poller = zmq.Poller()
        self._open: dict[int, _Open] = {}
        self._next = 0
        self._deaf: set[int] = set()

    def add(self, frontend: int, recv: MsgpackRecvSocket, send: MsgpackSendSocket) -> None:
        """Serve another frontend."""
        self._names.append(frontend)
        send.socket.setsockopt(zmq.SNDTIMEO, 0)
        self._poller.register(recv.socket, zmq.POLLIN)
        self._pairs.append((recv, send))

    def wait(self) -> None:
        """Wait until some frontend says something."""
        self._poller.poll()

    def requests(self) -> Iterator[tuple[int, int, int]]:
        """What has come, without waiting: each request's number, prompt tokens and output tokens."""
        for link, (recv, _) in enumerate(self._pairs):
            try:
                while True:
                    request: Any = recv.recv_pyobj(zmq.NOBLOCK)
                    if isinstance(request, GenerateRequest):  # the demo's frontends abort nothing
                        yield self._opened(link, request)
            except zmq.Again:
                pass

    def _opened(self, link: int, request: GenerateRequest) -> tuple[int, int, int]:
        number, self._next = self._next, self._next + 1
        prompt_tokens = len(request.input_ids or ())
        self._open[number] = _Open(link, request.rid, prompt_tokens)
        return number, prompt_tokens, max(request.max_new_tokens or 1, 1)

    def refuse(self, number: int) -> None:
        """Say that a request fits nowhere: it ends without a token."""
        request = self._open.pop(number)
        batch = _empty()
        _add_row(batch, request, [], REFUSED)
        self._send(request.link, batch)

    def send(self, applied: Applied) -> None:
        """Send what an iteration gave, to each frontend its own."""
        batches: dict[int, BatchTokenIDOutSlim] = {}
        for number, done in zip(applied.rids, applied.finished, strict=True):
            request = self._open[number]
            request.completion_tokens += 1
            if request.link not in batches:
                batches[request.link] = _empty()
            _add_row(batches[request.link], request, [_TOKEN], _FINISHED if done else "")
            if done:
                del self._open[number]
        for link, batch in batches.items():
            self._send(link, batch)

    def after_advance(self) -> None:
        """Tell every frontend that the rank is idle, if it has become so and the frontend's last batch said otherwise."""
        for _, send in self._pairs:
            send.after_advance()

    def _send(self, link: int, batch: BatchTokenIDOutSlim) -> None:
        try:
            self._pairs[link][1].send_pyobj(batch)
        except zmq.Again:
            if link not in self._deaf:
                self._deaf.add(link)
                _log.warning("frontend %d does not read its batches, which are dropped", self._names[link])


def _empty() -> BatchTokenIDOutSlim:
    return BatchTokenIDOutSlim([], [], [], [], [], [], [], [])


def _add_row(batch: BatchTokenIDOutSlim, request: _Open, output_ids: list[int], finished_reason: str) -> None:
    batch.rids.append(request.rid)
    batch.output_ids.append(output_ids)
    batch.finished_reasons.append(finished_reason)
    batch.prompt_tokens.append(request.prompt_tokens)
    batch.completion_tokens.append(request.completion_tokens)
    batch.cached_tokens.append(0)
    batch.output_token_logprobs_val.append([])
    batch.output_token_logprobs_idx.append([])
