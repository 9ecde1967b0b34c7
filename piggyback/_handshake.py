"""The handshake's messages: msgpack maps with named keys, HELLO, INIT, READY and the ready response.

The lane has no version or capability exchange of its own, but peers skip keys that they do not know.  Ours is the key
``loadbox``: in INIT ``{abi: 1, tail: true, load_only: true}``, in READY and in the ready response ``{abi: 1, mailbox: name,
epoch: n}``.  A ``loadbox`` entry that is odd, or of another abi, counts as absent: it costs what it would have bought and never
the handshake.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from loadbox.piggyback._errors import WireError, excerpt

__all__ = [
    "ABI",
    "READY_DEFAULTS",
    "Addresses",
    "HandshakeInit",
    "decode_init",
    "decode_map",
    "encode_init",
    "encode_status",
    "ready_response",
]

ABI = 1

# What the ready response says where the engine does not.  A gateway wants every key, and `dtype` as one of its names.
READY_DEFAULTS: dict[str, Any] = {
    "max_model_len": 0,
    "num_gpu_blocks": 0,
    "prefix_granularity": 0,
    "dp_stats_address": None,
    "dtype": "bfloat16",
    "multimodal_encoder_dtype": None,
    "vllm_version": "",
    "world_size": 1,
    "data_parallel_size": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "data_parallel_rank": 0,
    "max_num_seqs": 0,
    "max_num_batched_tokens": 0,
    "instance_id": "",
    "kv_cache_size_tokens": None,
    "kv_cache_max_concurrency": None,
    "kv_events_config": None,
}


class Addresses(msgspec.Struct):
    """Where the frontend has bound its data lanes."""

    inputs: list[str] = []
    outputs: list[str] = []
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


class HandshakeInit(msgspec.Struct):
    """The frontend's INIT: its addresses, and what it advertised under ``loadbox``."""

    addresses: Addresses
    parallel_config: Any = None
    loadbox: Any = None

    def _takes(self, what: str) -> bool:
        offer = self.loadbox
        return isinstance(offer, Mapping) and offer.get("abi") == ABI and offer.get(what) is True

    @property
    def tail(self) -> bool:
        """Whether the frontend said that it reads the load tail."""
        return self._takes("tail")

    @property
    def load_only(self) -> bool:
        """Whether the frontend said that it takes load-only batches."""
        return self._takes("load_only")


_encode = msgspec.msgpack.Encoder().encode
_decode_init = msgspec.msgpack.Decoder(HandshakeInit).decode
_decode_map = msgspec.msgpack.Decoder(dict[str, Any], ext_hook=lambda code, data: None).decode
_UNREADABLE = (ValueError, TypeError, RecursionError, OverflowError)


def encode_status(status: str, loadbox: Mapping[str, Any] | None = None) -> bytes:
    """HELLO or READY."""
    message: dict[str, Any] = {"status": status, "local": True, "headless": True, "parallel_config_hash": None}
    if loadbox is not None:
        message["loadbox"] = loadbox
    return _encode(message)


def encode_init(input_address: str, output_address: str, offer: Mapping[str, Any] | None) -> bytes:
    message: dict[str, Any] = {
        "addresses": Addresses(inputs=[input_address], outputs=[output_address]),
        "parallel_config": {},
    }
    if offer is not None:
        message["loadbox"] = offer
    return _encode(message)


def decode_init(payload: bytes) -> HandshakeInit:
    try:
        init = _decode_init(payload)
    except _UNREADABLE as error:
        raise WireError(f"the frontend's INIT cannot be read: {error} ({excerpt(payload)})") from None
    if not init.addresses.inputs or not init.addresses.outputs:
        raise WireError(
            f"the frontend's INIT names no {'input' if not init.addresses.inputs else 'output'} address: "
            "without both there is nothing to connect to"
        )
    return init


def decode_map(payload: bytes) -> dict[str, Any]:
    """HELLO, READY or a ready response, as the map that it is."""
    try:
        return _decode_map(payload)
    except _UNREADABLE as error:
        raise WireError(f"a handshake message is a map with named keys: {error} ({excerpt(payload)})") from None


def ready_response(ready: object, loadbox: Mapping[str, Any]) -> bytes:
    """The ready response out of what the engine gave: a mapping, or a msgspec struct or dataclass, with any of the keys."""
    given: Any = {} if ready is None else ready
    if not isinstance(given, Mapping):
        try:
            given = msgspec.to_builtins(ready)
        except (TypeError, ValueError) as error:
            raise WireError(f"ready cannot be sent: {error}") from None
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise WireError(f"ready is a mapping (or a struct) with the ready response's keys, not {type(ready).__name__}")
    try:
        return _encode({**READY_DEFAULTS, **given, "loadbox": loadbox})
    except _UNREADABLE as error:
        raise WireError(f"ready holds something that msgpack cannot: {error}") from None
