"""One engine process for the gateway tests: a scheduler without a model, which says the load that it is told to say.

    python engine.py HANDSHAKE_ADDRESS ENGINE_INDEX TAIL LOAD_ONLY

It answers each request with the letters a, b, c, ... as tokens (byte b is token b + OFFSET), one a batch, up to max_new_tokens.
A request for HELD tokens or more stays in flight: it gets its first token, and another one each time that the load is set.
Lines of JSON on stdin set the load, or finish what is held; events go to stdout as lines of JSON.
"""

from __future__ import annotations

import json
import select
import sys
import time
from typing import Any

import zmq

from loadbox.piggyback import AbortRequest, BatchTokenIDOutSlim, GenerateRequest, connect_msgpack_engine, wire_stats

OFFSET = 3
HELD = 1000
READY = {
    "max_model_len": 2048, "num_gpu_blocks": 400, "prefix_granularity": 16, "dtype": "bfloat16", "vllm_version": "loadbox-test",
    "world_size": 2, "data_parallel_size": 2, "max_num_seqs": 64, "max_num_batched_tokens": 2048, "kv_cache_size_tokens": 6400,
}  # fmt: skip


def say(event: str, **facts: Any) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


class Request:
    """One request in flight."""

    def __init__(self, prompt: int, limit: int) -> None:
        self.prompt, self.limit, self.sent = prompt, limit, 0
        self.due = True

    def advance(self) -> int:
        """The next token."""
        self.sent += 1
        self.due = self.limit < HELD
        return OFFSET + ord("a") + (self.sent - 1) % 26


def step(running: dict[str, Request]) -> BatchTokenIDOutSlim:
    """One decode step: a token for every request that is due; finished ones leave."""
    now = {rid: request for rid, request in running.items() if request.due}
    tokens = [[request.advance()] for request in now.values()]
    for rid, request in now.items():
        if request.sent >= request.limit:
            del running[rid]
    return BatchTokenIDOutSlim(
        rids=list(now),
        output_ids=tokens,
        finished_reasons=["length" if request.sent >= request.limit else "" for request in now.values()],
        prompt_tokens=[request.prompt for request in now.values()],
        completion_tokens=[request.sent for request in now.values()],
        cached_tokens=[0 for _ in now],
        output_token_logprobs_val=[[] for _ in now],
        output_token_logprobs_idx=[[] for _ in now],
    )


def main(address: str, index: str, tail: Any, load_only: Any) -> None:
    context = zmq.Context()
    ready = {**READY, "data_parallel_rank": int(index), "instance_id": f"engine-{index}"}
    recv, send, init = connect_msgpack_engine(
        context, address, engine_index=int(index), ready=ready, tail=tail, load_only=load_only, timeout=90
    )
    say("connected", tail=init.tail, load_only=init.load_only)
    load = (0, 0, 0, 400)
    send.load_fn = lambda: load
    running: dict[str, Request] = {}
    poller = zmq.Poller()
    poller.register(recv.socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while True:
        poller.poll(0 if any(request.due for request in running.values()) else 1000)
        if select.select([sys.stdin], [], [], 0)[0]:
            line = sys.stdin.readline()
            if not line:
                break
            order = json.loads(line)
            load = tuple(order["load"])
            for request in running.values():
                request.due = True
                if order.get("finish"):
                    request.limit = request.sent + 1
            say("load", load=load)
        try:
            while True:
                request = recv.recv_pyobj(zmq.NOBLOCK)
                if isinstance(request, AbortRequest):
                    for rid in request.rids:
                        running.pop(rid, None)
                    say("abort", rids=request.rids)
                elif isinstance(request, GenerateRequest):
                    say("add", rid=request.rid, limit=request.max_new_tokens)
                    running[request.rid] = Request(len(request.input_ids or ()), request.max_new_tokens or 4)
        except zmq.Again:
            pass
        if any(request.due for request in running.values()):
            send.send_pyobj(step(running))
            time.sleep(0.005)
        before = wire_stats().load_only_sent
        send.after_advance()
        if wire_stats().load_only_sent != before:
            say("load-only", load=load)
    send.send_engine_dead()
    recv.close()
    send.close()
    context.term()


if __name__ == "__main__":
    main(*sys.argv[1:])
