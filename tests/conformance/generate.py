#!/usr/bin/env python3
"""Make the conformance set of ABI 1: images of segments, and bytes of the wire, with what each must read as.

    python tests/conformance/generate.py

Written once, for ABI 1.  Nothing here imports loadbox: the set says what was promised, not what some version does.  Every later
version must read these files; a new promise gets new files, and none of these is ever changed.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).parent
SIZE = 4096
MAGIC = b"LOADBOX\0"
EPOCH, OTHER_EPOCH = 0x1234_5678_9ABC_DEF0, 77
OLD, NEW = (3, 2, 50, 100), (11, 7, 90, 100)
OLD_NS, NEW_NS = 1_000_000_000, 1_000_000_500
LARGEST = (1 << 63) - 1
RANK, DP_SIZE = 3, 8


def header(**words: Any) -> bytes:
    """The first 128 bytes.  Boot and clock are "not known", so that the images read alike on every machine."""
    values = {
        "magic": MAGIC, "abi_major": 1, "abi_minor": 0, "kind": 1, "record_offset": 128, "rank": RANK, "dp_size": DP_SIZE,
        "owner_pid": 4242, "start_ns": 1_700_000_000_000_000_000, "state": 1, "boot_id": bytes(16), "time_ns_inode": 0,
        "capacity": 0, "epoch": 0, "reserved": 0,
    }  # fmt: skip
    assert set(words) <= set(values)
    return struct.pack("<8s9Q16s4Q", *{**values, **words}.values())


def record(load: tuple[int, int, int, int], published_ns: int, epoch: int = EPOCH) -> tuple[int, ...]:
    return (*load, published_ns, epoch)


def segment(seq: int, a: tuple[int, ...], b: tuple[int, ...], size: int = SIZE, beyond: bytes = b"", **words: Any) -> bytes:
    """Header, line A with the sequence, line B, and what lies beyond them."""
    lines = struct.pack("<Q6q8x6q", seq, *a, *b)
    return (header(**words) + lines + beyond).ljust(size, b"\0")


def publishing(steps: int) -> bytes:
    """A publish of NEW over OLD that was cut off after so many of its fourteen stores."""
    words = [20, *record(OLD, OLD_NS), *record(OLD, OLD_NS)]  # seq, A, B
    new = record(NEW, NEW_NS)
    stores = [(0, 21), *((1 + i, word) for i, word in enumerate(new)), (0, 22), *((7 + i, word) for i, word in enumerate(new))]
    for place, word in stores[:steps]:
        words[place] = word
    return segment(words[0], tuple(words[1:7]), tuple(words[7:]))


def images() -> dict[str, tuple[bytes, dict[str, Any]]]:
    """name: (bytes, what it must read as)."""
    old, new, none = record(OLD, OLD_NS), record(NEW, NEW_NS), record((0, 0, 0, 0), OLD_NS)
    idle = record((0, 0, 10, 100), OLD_NS)
    live = {"locked": [EPOCH], "state": "LIVE", "load": OLD, "epoch": EPOCH}
    refused = {"locked": [EPOCH], "state": "REFUSED", "load": None}
    swapped = struct.pack(">8Q", *struct.unpack("<8Q", header()[:64]))
    found: dict[str, tuple[bytes, dict[str, Any]]] = {
        "live": (segment(20, old, old), live),
        "live_idle": (segment(20, idle, idle), {**live, "load": (0, 0, 10, 100)}),
        "live_largest": (
            segment(20, *[record((LARGEST, LARGEST, LARGEST, LARGEST), OLD_NS)] * 2), {**live, "load": (LARGEST,) * 4},
        ),
        "live_even_b_is_behind": (segment(22, new, old), {**live, "load": NEW}),
        "live_odd_a_is_torn": (segment(21, (*NEW[:2], *old[2:]), old), live),
        "stalled": (segment(20, old, old), {**live, "state": "STALLED", "stall_after": 0}),
        "stalled_in_the_middle": (segment(21, (*NEW[:2], *old[2:]), old), {**live, "state": "STALLED", "stall_after": 0}),
        "silent": (segment(2, none, none), {**live, "state": "SILENT", "load": None}),
        "silent_after_adoption": (
            segment(42, record((0, 0, 0, 0), OLD_NS, OTHER_EPOCH), record((0, 0, 0, 0), OLD_NS, OTHER_EPOCH)),
            {"locked": [OTHER_EPOCH], "state": "SILENT", "load": None, "epoch": OTHER_EPOCH},
        ),
        "dead": (segment(20, old, old), {"locked": [], "state": "DEAD", "load": OLD, "epoch": EPOCH}),
        "dead_and_being_adopted": (
            segment(20, old, old), {"locked": [OTHER_EPOCH], "state": "DEAD", "load": OLD, "epoch": EPOCH},
        ),
        "closed": (segment(22, none, none, state=2), {"locked": [], "state": "CLOSED", "load": None, "epoch": EPOCH}),
        "newer_minor": (segment(20, old, old, beyond=b"\x5a" * 512, abi_minor=7, reserved=9), live),
        "newer_minor_and_longer": (segment(20, old, old, size=8192, beyond=b"\x5a" * 6000, abi_minor=9, capacity=1), live),
        "newer_major": (segment(20, old, old, abi_major=2), {**refused, "reason": "ABI is 2"}),
        "another_kind": (segment(20, old, old, kind=3), {**refused, "reason": "kind 3"}),
        "another_rank": (segment(20, old, old, rank=RANK + 1), {**refused, "reason": "rank 4"}),
        "another_record_offset": (segment(20, old, old, record_offset=256), {**refused, "reason": "256"}),
        "another_byte_order": (swapped.ljust(SIZE, b"\0"), {**refused, "reason": "byte order"}),
        "another_magic": (b"ELSEBOX\0".ljust(SIZE, b"\x01"), {**refused, "reason": "no segment of loadbox"}),
        "another_boot": (
            segment(20, old, old, boot_id=bytes(range(1, 17))), {"locked": [EPOCH], "state": "ABSENT", "load": None},
        ),
        "more_active_than_total": (
            segment(20, *[record((1, 1, 101, 100), OLD_NS)] * 2), {**refused, "epoch": EPOCH, "reason": "none that a writer"},
        ),
        "negative": (
            segment(20, *[record((-1, 1, 1, 100), OLD_NS)] * 2), {**refused, "epoch": EPOCH, "reason": "none that a writer"},
        ),
        "half_made": (bytes(SIZE), {"locked": [], "state": "ABSENT", "load": None}),
        "magic_not_yet_stored": (segment(2, none, none, magic=bytes(8)), {"locked": [EPOCH], "state": "ABSENT", "load": None}),
        "empty": (b"", {"locked": [], "state": "ABSENT", "load": None}),
        "short": (segment(20, old, old)[:1024], {**refused, "reason": "1024 bytes"}),
    }  # fmt: skip
    for steps in range(15):
        expected = NEW if steps >= 8 else OLD  # the eighth store is the second of the sequence
        found[f"killed_after_{steps:02}_stores"] = (
            publishing(steps), {"locked": [], "state": "DEAD", "load": expected, "epoch": EPOCH},
        )  # fmt: skip
    return found


def boards() -> dict[str, tuple[bytes, dict[str, Any]]]:
    """Dispatch boards: a word a rank, in flight in its low half, owed a first token in its high half."""
    words = struct.pack("<4Q", 2 | 1 << 32, 0, 5, (1 << 32) - 1 | 3 << 32)
    whole = {"locked": [EPOCH], "in_flight": [2, 0, 5, (1 << 32) - 1], "owed": [1, 0, 0, 3]}
    none = {"locked": [EPOCH], "in_flight": [0] * 4, "owed": [0] * 4}
    board = {"kind": 2, "rank": 0, "dp_size": 0, "epoch": EPOCH}
    return {
        "board": ((header(**board, capacity=496) + words).ljust(SIZE, b"\0"), whole),
        "board_longer": ((header(**board, capacity=1008, abi_minor=3) + words).ljust(2 * SIZE, b"\0"), whole),
        "board_of_fewer_ranks": (
            (header(**board, capacity=2) + words).ljust(SIZE, b"\0"),
            {**whole, "in_flight": [2, 0, 0, 0], "owed": [1, 0, 0, 0]},
        ),
        "board_dead": ((header(**board, capacity=496) + words).ljust(SIZE, b"\0"), {**none, "locked": []}),
        "board_newer_major": ((header(**board, capacity=496, abi_major=2) + words).ljust(SIZE, b"\0"), none),
        "board_too_small_for_its_capacity": ((header(**board, capacity=497) + words).ljust(SIZE, b"\0"), none),
    }


def wire() -> dict[str, Any]:
    """Messages of every era and what they must read as; ``make``: what must come out of the encoder of today, too."""
    pack = msgspec.msgpack.encode
    columns = [["a", "b"], [[10, 11], []], ["", "length"], [3, 4], [2, 9], [1, 0], [[], [-0.5]], [[], [7]]]
    tag = "BatchTokenIDOutSlim"
    names = ["rids", "output_ids", "finished_reasons", "prompt_tokens", "completion_tokens", "cached_tokens",
             "output_token_logprobs_val", "output_token_logprobs_idx"]  # fmt: skip
    whole = dict(zip(names, columns, strict=True))
    numbers = ["engine_index", "num_running", "num_waiting", "kv_active_pages", "kv_total_pages"]

    def batch(*tail: Any, reads: tuple[int, ...], make: bool = False, of: dict[str, Any] = whole) -> dict[str, Any]:
        return {
            "bytes": pack([tag, *of.values(), *tail]).hex(),
            "reads": {**of, **dict(zip(numbers, reads, strict=True))},
            "make": make,
        }

    init = {
        "addresses": {"inputs": ["tcp://h:1"], "outputs": ["tcp://h:2"], "coordinator_input": None, "coordinator_output": None,
                      "frontend_stats_publish_address": None},
        "parallel_config": {},
    }  # fmt: skip
    status = {"status": "HELLO", "local": True, "headless": True, "parallel_config_hash": None}
    offer = {"abi": 1, "tail": True, "load_only": True}
    mailbox = {"abi": 1, "mailbox": "/loadbox.llama-0.3", "epoch": EPOCH}
    return {
        "batches": {
            "nine": batch(reads=(0, 0, 0, 0, 0)),
            "ten": batch(5, reads=(5, 0, 0, 0, 0), make=True),
            "fourteen": batch(5, *OLD, reads=(5, *OLD), make=True),
            "fourteen_largest": batch(5, *[LARGEST] * 4, reads=(5, *[LARGEST] * 4), make=True),
            "no_snapshot": batch(5, 0, 0, 0, 0, reads=(5, 0, 0, 0, 0), make=True),
            "load_only": batch(5, 0, 0, 10, 100, reads=(5, 0, 0, 10, 100), make=True, of={name: [] for name in names}),
            "longer": batch(5, *OLD, "later", {"k": [1]}, None, reads=(5, *OLD)),
            "bad_tail_negative": batch(5, -1, 2, 3, 4, reads=(5, 0, 0, 0, 0)),
            "bad_tail_null": batch(5, None, 2, 3, 4, reads=(5, 0, 0, 0, 0)),
            "bad_tail_float": batch(5, 1.5, 2, 3, 4, reads=(5, 0, 0, 0, 0)),
            "bad_tail_too_many_pages": batch(5, 1, 2, 101, 100, reads=(5, 0, 0, 0, 0)),
        },
        "inits": {
            "without_an_offer": {"bytes": pack(init).hex(), "tail": False, "load_only": False, "offer": None},
            "with_an_offer": {"bytes": pack({**init, "loadbox": offer}).hex(), "tail": True, "load_only": True, "offer": offer},
            "of_a_later_abi": {"bytes": pack({**init, "loadbox": {**offer, "abi": 2}}).hex(), "tail": False, "load_only": False},
            "with_more_keys": {
                "bytes": pack({**init, "later": 1, "loadbox": {**offer, "later": 1}}).hex(), "tail": True, "load_only": True,
            },
        },
        "statuses": {
            "hello": {"bytes": pack(status).hex(), "status": "HELLO", "loadbox": None, "mailbox": None},
            "ready": {
                "bytes": pack({**status, "status": "READY", "loadbox": mailbox}).hex(), "status": "READY", "loadbox": mailbox,
                "mailbox": ["llama-0", 3, EPOCH],
            },
        },
        "requests": {
            "add": {
                "frames": ["00", pack(["TokenizedGenerateReqInput", "r1", None, None, [1, 2, 3], [16, None], False, -1, 0, None,
                                       True]).hex()],
                "rid": "r1", "input_ids": [1, 2, 3], "max_new_tokens": 16, "stream": True, "make": True,
            },
            "add_longer": {
                "frames": ["00", pack(["TokenizedGenerateReqInput", "r1", None, None, [1], [16], False, -1, 0, None, True, "x",
                                       {"later": 1}]).hex()],
                "rid": "r1", "input_ids": [1], "max_new_tokens": 16, "stream": True, "make": False,
            },
            "abort": {"frames": ["01", pack(["r1", "r2"]).hex()], "rids": ["r1", "r2"], "make": True},
        },
        "engine_dead": b"ENGINE_CORE_DEAD".hex(),
    }  # fmt: skip


def main() -> None:
    """Write the files.  An image is stored without the zeros at its end; the index has its size."""
    (HERE / "images").mkdir(exist_ok=True)
    index: dict[str, Any] = {"abi": [1, 0], "rank": RANK, "ranks": {}, "boards": {}}
    for kind, made in (("ranks", images()), ("boards", boards())):
        for name, (data, expected) in made.items():
            (HERE / "images" / f"{name}.bin").write_bytes(data.rstrip(b"\0"))
            index[kind][name] = {"size": len(data), **expected}
    (HERE / "index.json").write_text(json.dumps(index, indent=1) + "\n")
    (HERE / "wire.json").write_text(json.dumps(wire(), indent=1) + "\n")


if __name__ == "__main__":
    main()
