"""The piggyback: slim output batches over ZMQ that carry each scheduler's load, for both ends of the lane."""

try:
    from loadbox.piggyback._batch import BatchTokenIDOutSlim, decode_batch, encode_batch
    from loadbox.piggyback._connect import connect_msgpack_engine
    from loadbox.piggyback._engines import EngineInfo, MailboxKey
    from loadbox.piggyback._errors import EngineUnavailable, HandshakeTimeout, NothingReceived, WireError
    from loadbox.piggyback._frontend import AsyncMsgpackFrontend, MsgpackFrontend
    from loadbox.piggyback._handshake import HandshakeInit
    from loadbox.piggyback._recv import MsgpackRecvSocket
    from loadbox.piggyback._requests import AbortRequest, GenerateRequest
    from loadbox.piggyback._send import ENGINE_CORE_DEAD, MsgpackSendSocket
    from loadbox.piggyback._stats import WireStats, wire_stats
except ModuleNotFoundError as error:
    if error.name not in ("msgspec", "zmq"):
        raise
    raise ModuleNotFoundError(f"loadbox.piggyback needs {error.name}: pip install 'loadbox[piggyback]'", name=error.name) from None

__all__ = [
    "ENGINE_CORE_DEAD",
    "AbortRequest",
    "AsyncMsgpackFrontend",
    "BatchTokenIDOutSlim",
    "EngineInfo",
    "EngineUnavailable",
    "GenerateRequest",
    "HandshakeInit",
    "HandshakeTimeout",
    "MailboxKey",
    "MsgpackFrontend",
    "MsgpackRecvSocket",
    "MsgpackSendSocket",
    "NothingReceived",
    "WireError",
    "WireStats",
    "connect_msgpack_engine",
    "decode_batch",
    "encode_batch",
    "wire_stats",
]
