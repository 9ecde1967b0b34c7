"""What the load tail costs on the wire, and what strictness costs a decoder: ratios in one run, each beside its limit.

python benchmarks/bench_piggyback.py
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import zmq
from _measure import ratio, side_by_side
from _results import facts
from rich.console import Console
from rich.table import Table

from loadbox.piggyback import BatchTokenIDOutSlim, MsgpackSendSocket, _batch, decode_batch, encode_batch

REQUESTS = 64
ROUNDS = 1001
ROUND_S = 0.0003
LOAD = (40, 5, 1000, 4000)


class Nowhere:
    """A socket that takes everything at once, so that only what happens before it is timed."""

    def send(self, payload: bytes, flags: int = 0) -> None:
        """Drop it."""


class Bare(msgspec.Struct, array_like=True, tag="BatchTokenIDOutSlim"):
    """The same array as msgspec alone would read it: types, and no other check."""

    rids: list[str]
    output_ids: list[list[int]]
    finished_reasons: list[str]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    cached_tokens: list[int]
    output_token_logprobs_val: list[list[float]]
    output_token_logprobs_idx: list[list[int]]
    engine_index: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_active_pages: int = 0
    kv_total_pages: int = 0


def make_batch(requests: int, seed: int = 1) -> BatchTokenIDOutSlim:
    """One decode step of so many running requests: a token each, no logprobs."""
    dice = random.Random(seed)
    return BatchTokenIDOutSlim(
        rids=[f"{dice.getrandbits(128):032x}" for _ in range(requests)],
        output_ids=[[dice.randrange(128_000)] for _ in range(requests)],
        finished_reasons=["" for _ in range(requests)],
        prompt_tokens=[dice.randrange(1, 8000) for _ in range(requests)],
        completion_tokens=[dice.randrange(1, 1000) for _ in range(requests)],
        cached_tokens=[dice.randrange(4000) for _ in range(requests)],
        output_token_logprobs_val=[[] for _ in range(requests)],
        output_token_logprobs_idx=[[] for _ in range(requests)],
        engine_index=1,
        num_running=LOAD[0],
        num_waiting=LOAD[1],
        kv_active_pages=LOAD[2],
        kv_total_pages=LOAD[3],
    )


def main() -> None:
    """Measure, print one table, and write JSON if asked."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", metavar="FILE", help="also write the figures there")
    arguments = options.parse_args()
    batch = make_batch(REQUESTS)
    payload = encode_batch(batch)
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        ten, fourteen = MsgpackSendSocket(socket, 1, tail="negotiated"), MsgpackSendSocket(socket, 1)
        fourteen.load_fn = lambda: LOAD
        ten._socket = fourteen._socket = Nowhere()
        names = {
            "batch": batch,
            "payload": payload,
            "bare_ten": msgspec.msgpack.decode(encode_batch(batch, load_tail=False), type=_batch._Ten),
            "check": _batch._check_columns,
            "bare_batch": msgspec.msgpack.decode(payload, type=Bare),
            "bare_encode": msgspec.msgpack.Encoder().encode,
            "bare_decode": msgspec.msgpack.Decoder(Bare).decode,
            "encode_batch": encode_batch,
            "decode_batch": decode_batch,
            "ten": ten,
            "fourteen": fourteen,
        }
        t = side_by_side(
            {
                "bare encode": "bare_encode(bare_batch)",
                "bare encode, 10": "check(bare_ten); bare_encode(bare_ten)",
                "encode, 10": "encode_batch(batch, False)",
                "encode, 14": "encode_batch(batch)",
                "send, 10": "ten.send_pyobj(batch)",
                "send, 14": "fourteen.send_pyobj(batch)",
                "bare decode": "bare_decode(payload)",
                "decode": "decode_batch(payload)",
            },
            names,
            rounds=ROUNDS,
            round_s=ROUND_S,
        )
    rows = [
        ("encode_batch, 14 elements", "encode, 14", "encode_batch, 10 elements", "encode, 10", 1.05),
        ("encode_batch, 14 elements", "encode, 14", "a ready ten-element struct, checked", "bare encode, 10", None),
        ("encode_batch, 14 elements", "encode, 14", "bare msgspec, 14 elements", "bare encode", None),
        ("send_pyobj before ZMQ, with load_fn", "send, 14", "send_pyobj, 10 elements", "send, 10", None),
        ("decode_batch", "decode", "bare msgspec decode", "bare decode", 1.10),
    ]
    figures = [
        {"what": what, "median_ns": t[one].median_ns, "against": against, "ratio": ratio(t[one], t[other]), "asked_at_most": limit}
        for what, one, against, other, limit in rows
    ]
    show(figures)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({**facts(requests=REQUESTS), "rows": figures}, indent=1) + "\n")


def show(figures: list[dict[str, Any]]) -> None:
    """Print the table; where more was asked than is reached it says so."""
    table = Table(title=f"piggyback, a batch of {REQUESTS} requests", title_justify="left")
    for name in ("", "median ns", "against", "ratio", "asked", ""):
        table.add_column(name, justify="right" if name in ("median ns", "ratio", "asked") else "left")
    for row in figures:
        limit = row["asked_at_most"]
        verdict = "" if limit is None else "yes" if row["ratio"] <= limit else "NOT REACHED"
        asked = "" if limit is None else f"<= {limit:.2f}"
        table.add_row(row["what"], f"{row['median_ns']:.0f}", row["against"], f"{row['ratio']:.3f}", asked, verdict)
    Console().print(table)


if __name__ == "__main__":
    main()
