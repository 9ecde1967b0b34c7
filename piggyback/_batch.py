"""The output batch on the wire: one positional msgpack array, its three eras, and what is strict and what is forgiven.

An array of 9 elements is the oldest form, 10 add ``engine_index``, 14 add the load tail.  The list only ever grows at its end:
missing elements at the end read as their defaults, and more than 14 are skipped.

    0 tag   1 rids   2 output_ids   3 finished_reasons   4 prompt_tokens   5 completion_tokens   6 cached_tokens
    7 output_token_logprobs_val   8 output_token_logprobs_idx   9 engine_index   10-13 the load

Elements 0 to 9 say whose tokens these are: anything wrong there is a ``WireError`` for the whole batch, and so are columns of
unequal length.  Elements 10 to 13 are only the load: anything wrong there reads as four zeros, "no snapshot", and is counted.
The good case is one typed decode.  Only when that fails is the batch read a second time with the tail left as raw bytes: if it
can be read like that, the tail alone was bad.
"""

from __future__ import annotations

from copy import copy
from typing import Annotated

import msgspec
from msgspec import Meta

from loadbox.mailbox import LoadSnapshot
from loadbox.piggyback._errors import WireError, excerpt
from loadbox.piggyback._load import INT64_MAX, NO_SNAPSHOT, Tail, check_tail, is_plain
from loadbox.piggyback._stats import count, warn_limited

__all__ = ["BatchTokenIDOutSlim", "decode_batch", "encode_batch", "encode_ten", "encode_whole", "load_only_batch"]

_TAG = "BatchTokenIDOutSlim"
_Count = Annotated[int, Meta(ge=0, le=INT64_MAX)]
_Index = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]


class _Ten(msgspec.Struct, array_like=True, tag=_TAG):
    """Elements 0 to 9: the form before the load tail, and the beginning of every later one."""

    rids: list[str]
    output_ids: list[list[int]]
    finished_reasons: list[str]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    cached_tokens: list[int]
    output_token_logprobs_val: list[list[float]]
    output_token_logprobs_idx: list[list[int]]
    engine_index: _Index = 0


class BatchTokenIDOutSlim(_Ten, tag=_TAG):
    """What one scheduler iteration gives out: parallel columns, row i of each belonging to ``rids[i]``.

    By position: ``rids``, ``output_ids`` (the new tokens of each request), ``finished_reasons`` (``""``, ``"stop"``, ``"length"``
    or ``"abort"``), ``prompt_tokens``, ``completion_tokens`` and ``cached_tokens`` (of the request so far),
    ``output_token_logprobs_val`` and ``output_token_logprobs_idx`` (``[]`` for requests that did not ask), ``engine_index`` (base
    index + dp rank), and the rank's load: ``num_running``, ``num_waiting``, ``kv_active_pages``, ``kv_total_pages``, where a total
    of 0 is *no snapshot*.  A batch with empty columns carries a load and nothing else.  Nothing is checked when an instance is
    made; ``encode_batch`` and ``decode_batch`` check.  A plain mutable object: threads that share one must agree among themselves.
    """

    num_running: _Count = 0
    num_waiting: _Count = 0
    kv_active_pages: _Count = 0
    kv_total_pages: _Count = 0

    @property
    def load(self) -> LoadSnapshot | None:
        """The load that came with the batch, or None if it brought no snapshot."""
        if self.kv_total_pages == 0:
            return None
        return LoadSnapshot(self.num_running, self.num_waiting, self.kv_active_pages, self.kv_total_pages)


class _RawTail(_Ten, tag=_TAG):
    """The same elements with a tail that may be anything, for reading a batch whose tail is bad."""

    num_running: msgspec.Raw = msgspec.Raw()
    num_waiting: msgspec.Raw = msgspec.Raw()
    kv_active_pages: msgspec.Raw = msgspec.Raw()
    kv_total_pages: msgspec.Raw = msgspec.Raw()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(BatchTokenIDOutSlim).decode
_decode_raw_tail = msgspec.msgpack.Decoder(_RawTail).decode
# Everything that msgspec raises for bytes or objects that it cannot use; nesting past the interpreter's limit is a RecursionError.
_UNREADABLE = (ValueError, TypeError, BufferError, RecursionError, OverflowError)


def encode_batch(batch: BatchTokenIDOutSlim, load_tail: bool = True) -> bytes:
    """Encode a batch: fourteen elements, or the ten of the form before the load tail with ``load_tail=False``.

    A load that no peer could read (negative, not an int, past int64, more active pages than there are) goes out as four
    zeros and is counted in ``wire_stats().bad_loads``.  Columns of unequal length, an engine index outside 0 to 2**32 - 1 and items
    that msgpack cannot hold are a ``WireError``: a peer would lose the batch's tokens.  Items of the wrong type (a rid that is an
    int) are the caller's to avoid; they are not looked at one by one.  Any thread may call it.
    """
    if not isinstance(batch, BatchTokenIDOutSlim):
        raise WireError(f"encode_batch takes a BatchTokenIDOutSlim, not {type(batch).__name__}")
    if not load_tail:
        return encode_ten(batch)
    if is_plain(batch.num_running, batch.num_waiting, batch.kv_active_pages, batch.kv_total_pages):
        return encode_whole(batch)
    try:
        good = check_tail((batch.num_running, batch.num_waiting, batch.kv_active_pages, batch.kv_total_pages))
    except (TypeError, ValueError) as error:
        count("bad_loads")
        warn_limited("bad-load", "loadbox: a batch's load was refused and goes out as no snapshot: %s", error)
        good = NO_SNAPSHOT
    batch = copy(batch)
    batch.num_running, batch.num_waiting, batch.kv_active_pages, batch.kv_total_pages = good
    return encode_whole(batch)


def encode_whole(batch: BatchTokenIDOutSlim) -> bytes:
    """Encode the fourteen elements of a batch whose load was checked."""
    _check_columns(batch)
    return _pack(batch)


def encode_ten(batch: BatchTokenIDOutSlim) -> bytes:
    """Encode the ten elements of the form before the load tail."""
    _check_columns(batch)
    return _pack(_Ten(*_first_ten(batch)))


def _first_ten(
    batch: _Ten,
) -> tuple[list[str], list[list[int]], list[str], list[int], list[int], list[int], list[list[float]], list[list[int]], int]:
    return (
        batch.rids,
        batch.output_ids,
        batch.finished_reasons,
        batch.prompt_tokens,
        batch.completion_tokens,
        batch.cached_tokens,
        batch.output_token_logprobs_val,
        batch.output_token_logprobs_idx,
        batch.engine_index,
    )


def _pack(wire: _Ten) -> bytes:
    try:
        return _encode(wire)
    except _UNREADABLE as error:
        raise WireError(f"a batch of {len(wire.rids)} requests holds something that msgpack cannot: {error}") from None


def load_only_batch(engine_index: int, tail: Tail) -> bytes:
    """A batch with empty columns, which says nothing but the load."""
    return _encode(BatchTokenIDOutSlim([], [], [], [], [], [], [], [], engine_index, *tail))


def decode_batch(payload: bytes | bytearray | memoryview) -> BatchTokenIDOutSlim:
    """Decode one output payload of any era (9, 10, 14 elements, or more).

    Raises ``WireError``, naming the place, for anything that is not a whole batch with good columns: another tag, truncated or
    trailing bytes, a wrong type in elements 0 to 9, columns of unequal length.  A tail with a wrong type, a float, a negative or
    huge number, or more active pages than there are reads as four zeros (no snapshot) and is counted in
    ``wire_stats().bad_tails``; the tokens stay.  Any thread may call it.
    """
    try:
        batch = _decode(payload)
    except msgspec.ValidationError as error:
        return _decode_forgiving(payload, error)
    except _UNREADABLE as error:
        raise _not_a_batch(payload, error) from None
    _check_columns(batch)
    if batch.kv_active_pages > batch.kv_total_pages > 0:
        _drop_tail(batch, f"{batch.kv_active_pages} active of {batch.kv_total_pages} pages")
    return batch


def _decode_forgiving(payload: bytes | bytearray | memoryview, first: msgspec.ValidationError) -> BatchTokenIDOutSlim:
    try:
        raw = _decode_raw_tail(payload)
    except _UNREADABLE as error:
        raise _not_a_batch(payload, error) from None
    batch = BatchTokenIDOutSlim(*_first_ten(raw))
    _check_columns(batch)
    _drop_tail(batch, str(first))
    return batch


def _drop_tail(batch: BatchTokenIDOutSlim, why: str) -> None:
    batch.num_running = batch.num_waiting = batch.kv_active_pages = batch.kv_total_pages = 0
    count("bad_tails")
    warn_limited(
        f"bad-tail-{batch.engine_index}",
        "loadbox: engine %d sent a batch with an unreadable load, which reads as no snapshot: %s; look at that engine's version",
        batch.engine_index,
        why,
    )


def _check_columns(batch: BatchTokenIDOutSlim) -> None:
    engine_index = batch.engine_index
    try:
        rows = len(batch.rids)
        if (
            len(batch.output_ids)
            == len(batch.finished_reasons)
            == len(batch.prompt_tokens)
            == len(batch.completion_tokens)
            == len(batch.cached_tokens)
            == len(batch.output_token_logprobs_val)
            == len(batch.output_token_logprobs_idx)
            == rows
            and type(engine_index) is int
            and 0 <= engine_index <= 0xFFFFFFFF
        ):
            return
        lengths = {name: len(getattr(batch, name)) for name in BatchTokenIDOutSlim.__struct_fields__[:8]}
    except TypeError as error:
        raise WireError(f"a batch's columns are lists, one item a request: {error}") from None
    for name, length in lengths.items():
        if length != rows:
            raise WireError(f"column {name} has {length} rows for {rows} rids: nobody could tell whose tokens are whose")
    raise WireError(f"engine_index is {engine_index!r}, not an int from 0 to 2**32 - 1: nobody could tell whose batch this is")


def _not_a_batch(payload: object, error: Exception) -> WireError:
    return WireError(f"not a {_TAG}: {error} (in {excerpt(payload)}); drop it, and look at the version of whoever sent it")
