"""The wire code of the released tokenspeed, run as it is; only its neighbours that need a GPU stack are stood in for.

    python tokenspeed_peer.py FOLDER codec            lines of "kind hex" in, lines of JSON out
    python tokenspeed_peer.py FOLDER engine ADDRESS INDEX

FOLDER holds the unpacked wheel.  ``zmq_msgpack``, ``zmq_wire``, ``io_struct`` and ``sampling_params`` are the real ones.
"""

from __future__ import annotations

import json
import sys
import types
from typing import Any


def stand_in(name: str, **attributes: Any) -> None:
    """A module of that name which has these attributes and no others."""
    module = types.ModuleType(name)
    module.__dict__.update(attributes, __path__=[])
    sys.modules[name] = module


def load(folder: str) -> Any:
    import msgspec

    sys.path.insert(0, folder)

    class Nothing(msgspec.Struct):
        pass

    class Setting:
        def __getattr__(self, name: str) -> Setting:
            return self

        def get(self) -> bool:
            return False

    stand_in("torch", Tensor=type("Tensor", (), {}), dtype=type("dtype", (), {}))
    stand_in("tokenspeed.runtime.utils")
    stand_in("tokenspeed.runtime.utils.env", envs=Setting())
    stand_in("tokenspeed.runtime.multimodal")
    stand_in("tokenspeed.runtime.multimodal.inputs", MultimodalInputs=Nothing)
    from tokenspeed.runtime.engine import io_struct, zmq_msgpack, zmq_wire

    assert zmq_msgpack.__file__.startswith(folder), zmq_msgpack.__file__
    return io_struct, zmq_msgpack, zmq_wire


def codec(io_struct: Any, zmq_wire: Any) -> None:
    import msgspec

    decoders = {
        "batch": lambda data: io_struct.MsgpackDecoder(io_struct.BatchTokenIDOutSlim).decode([data]),
        "init": zmq_wire.decode_init,
        "status": msgspec.msgpack.Decoder(zmq_wire.WireReadyMessage).decode,
        "ready": msgspec.msgpack.Decoder(zmq_wire.WireEngineCoreReadyResponse).decode,
        "add": lambda data: zmq_wire.decode_request_frames([b"\x00", data])[0],
        "abort": lambda data: zmq_wire.decode_request_frames([b"\x01", data]),
    }
    for line in sys.stdin:
        kind, _, data = line.partition(" ")
        got = decoders[kind](bytes.fromhex(data))
        items = got if isinstance(got, list) else [got]
        fields = [{name: getattr(item, name) for name in item.__struct_fields__} for item in items]
        wire = [msgspec.msgpack.encode(item, enc_hook=str).hex() for item in items]
        print(json.dumps({"fields": fields, "wire": wire}, default=str), flush=True)


def engine(io_struct: Any, zmq_msgpack: Any, zmq_wire: Any, address: str, index: int) -> None:
    """An engine of that release: answers every request with one batch of one token, and says its load as that release does."""
    import zmq

    context = zmq.Context()
    recv, send = zmq_msgpack.connect_msgpack_engine(
        context, address, index, zmq_wire.WireEngineCoreReadyResponse(max_model_len=77, data_parallel_rank=index), 1000,
        enable_output_logprobs=False, supports_prompt_logprobs=False,
    )  # fmt: skip
    send.set_load_snapshot(3, 1, 10 + index, 40)
    while True:
        request = recv.recv_pyobj()
        if isinstance(request, io_struct.AbortReq):
            if request.rid == "the end":
                break
            continue
        rows: dict[str, Any] = {"rids": [request.rid], "output_ids": [[len(request.input_ids)]], "finished_reasons": ["stop"]}
        rows |= {name: [1] for name in ("prompt_tokens", "completion_tokens", "cached_tokens")}
        rows |= {name: [[]] for name in ("output_token_logprobs_val", "output_token_logprobs_idx")}
        tail = dict(zip(("num_running", "num_waiting", "kv_active_pages", "kv_total_pages"), send._load_snapshot, strict=True))
        slim = io_struct.BatchTokenIDOutSlim(**rows, engine_index=index, **tail)
        send._socket.send_multipart(send._encoder.encode(slim))
    send.send_engine_dead()
    recv.close()
    send.close()
    context.term()


if __name__ == "__main__":
    structs, transport, wire = load(sys.argv[1])
    print("loaded", flush=True)
    if sys.argv[2] == "codec":
        codec(structs, wire)
    else:
        engine(structs, transport, wire, sys.argv[3], int(sys.argv[4]))
