"""The input lane: ADD, one positional generate request, and ABORT, a plain list of request ids.

A message is ``[type byte, msgpack payload, *aux]``.  The payload of an ADD is an array of which eleven elements are read; those
that a frontend appends are skipped, and missing ones at the end read as their defaults.  Sampling parameters are an untagged
array of their own that only the engine understands: it is carried as it is, element 0 being ``max_new_tokens``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from loadbox.piggyback._errors import WireError, excerpt

__all__ = ["AbortRequest", "GenerateRequest", "decode_frames", "encode_abort", "encode_add"]

ADD = b"\x00"
ABORT = b"\x01"


class GenerateRequest(msgspec.Struct, array_like=True, tag="TokenizedGenerateReqInput"):
    """A request to generate, as the frontend sends it: tokens in, and an engine's own sampling parameters.

    ``input_ids`` are the prompt's token ids.  ``sampling_params`` is the engine's positional array as it stands on the wire
    (``msgspec.convert`` makes an engine's own struct of it).
    """

    rid: str
    http_worker_ipc: str | None = None
    input_text: str | None = None
    input_ids: list[int] | None = None
    sampling_params: list[Any] = []
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    stream: bool = False

    @property
    def max_new_tokens(self) -> int | None:
        """How many tokens at most, or None where the request leaves that to the engine."""
        limit = self.sampling_params[0] if self.sampling_params else None
        return limit if type(limit) is int else None


class AbortRequest(msgspec.Struct, frozen=True):
    """Requests that the frontend no longer wants: one message's ``rids``."""

    rids: list[str]


_encode = msgspec.msgpack.Encoder().encode
_decode_add = msgspec.msgpack.Decoder(GenerateRequest).decode
_decode_abort = msgspec.msgpack.Decoder(list[str]).decode


def encode_add(request: GenerateRequest) -> list[bytes]:
    if not isinstance(request, GenerateRequest):
        raise WireError(f"an ADD takes a GenerateRequest, not {type(request).__name__}")
    if not isinstance(request.rid, str):
        raise WireError(f"a request's rid is a str, not {type(request.rid).__name__}")
    try:
        return [ADD, _encode(request)]
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"request {request.rid!r} holds something that msgpack cannot: {error}") from None


def encode_abort(rids: Iterable[str]) -> list[bytes]:
    wanted = [rids] if isinstance(rids, str) else list(rids)
    for rid in wanted:
        if not isinstance(rid, str):
            raise WireError(f"an ABORT takes request ids, which are str, not {type(rid).__name__}")
    return [ABORT, _encode(wanted)]


def decode_frames(frames: Sequence[bytes]) -> GenerateRequest | AbortRequest:
    """Decode one message of the input lane; ``WireError`` says what is wrong with a malformed one."""
    if len(frames) < 2:
        raise WireError(f"a request is a type byte and a payload, and this has {len(frames)} frame(s)")
    kind, payload = frames[0], frames[1]
    if kind not in (ADD, ABORT):
        raise WireError(f"type byte {kind[:8].hex() or '(empty)'} is neither ADD (00) nor ABORT (01)")
    if len(frames) > 2:
        raise WireError(f"{len(frames) - 2} frame(s) follow the payload, and only an engine's own decode_add could use them")
    try:
        if kind == ADD:
            return _decode_add(payload)
        return AbortRequest(_decode_abort(payload))
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise WireError(f"the payload is no {'ADD' if kind == ADD else 'ABORT'}: {error} ({excerpt(payload)})") from None
