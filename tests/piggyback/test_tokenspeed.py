"""Against the wire code of the released tokenspeed 0.1.1: our bytes there, its bytes here, and its engine on our frontend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loadbox.piggyback import BatchTokenIDOutSlim, GenerateRequest, decode_batch, encode_batch
from loadbox.piggyback._handshake import encode_init, encode_status, ready_response
from loadbox.piggyback._requests import encode_abort, encode_add

pytestmark = pytest.mark.slow

PEER = Path(__file__).with_name("tokenspeed_peer.py")
OURS = {"abi": 1, "mailbox": "/loadbox.llama-0.3", "epoch": (1 << 62) - 1}


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the peer; ended with the module."""
    folder = os.path.abspath(os.environ.get("LOADBOX_TOKENSPEED", "none"))
    if not os.path.isdir(os.path.join(folder, "tokenspeed")):
        pytest.skip("tokenspeed 0.1.1 is not unpacked in $LOADBOX_TOKENSPEED; `make tokenspeed` does it")
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, str(PEER), folder, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "loaded\n"
        return child

    yield begin
    for child in started:
        child.kill()
        child.communicate()


@pytest.fixture(scope="module")
def theirs(start: Callable[..., subprocess.Popen[str]]) -> Callable[[str, bytes], list[dict[str, Any]]]:
    """What the released structs make of a payload: its fields, and the bytes that they write again."""
    child = start("codec")
    assert child.stdin is not None
    assert child.stdout is not None

    def ask(kind: str, payload: bytes) -> list[dict[str, Any]]:
        child.stdin.write(f"{kind} {payload.hex()}\n")
        child.stdin.flush()
        answer = json.loads(child.stdout.readline())
        return [{**fields, "wire": bytes.fromhex(wire)} for fields, wire in zip(answer["fields"], answer["wire"], strict=True)]

    return ask


def golden() -> BatchTokenIDOutSlim:
    return BatchTokenIDOutSlim(["a"], [[10, 11]], ["length"], [3], [2], [1], [[]], [[]], 1, 2, 5, 100, 400)


def test_batches_are_the_same_bytes_at_either_end(theirs):
    (got,) = theirs("batch", encode_batch(golden()))
    assert got.pop("wire") == encode_batch(golden())
    assert got == msgspec.structs.asdict(golden())
    assert decode_batch(theirs("batch", encode_batch(golden()))[0]["wire"]) == golden()


def test_the_ten_element_form_is_read_with_zeros(theirs):
    (got,) = theirs("batch", encode_batch(golden(), load_tail=False))
    assert (got["rids"], got["engine_index"], got["num_running"], got["kv_total_pages"]) == (["a"], 1, 0, 0)


def test_a_load_only_batch_is_read(theirs):
    (got,) = theirs("batch", encode_batch(BatchTokenIDOutSlim([], [], [], [], [], [], [], [], 1, 0, 0, 5, 9)))
    assert (got["rids"], got["kv_active_pages"]) == ([], 5)


def test_our_keys_in_init_are_skipped(theirs):
    init = encode_init("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", {"abi": 1, "tail": True, "load_only": True})
    (got,) = theirs("init", init)
    assert "127.0.0.1:1" in str(got["addresses"])
    assert "127.0.0.1:2" in str(got["addresses"])
    deeper = msgspec.msgpack.encode({**msgspec.msgpack.decode(init), "later": {"a": [1, {"b": 1 << 63}]}})
    assert theirs("init", deeper) == [got]


def test_our_keys_in_ready_and_the_ready_response_are_skipped(theirs):
    (got,) = theirs("status", encode_status("READY", OURS))
    assert (got["status"], got["local"], got["headless"], got["parallel_config_hash"]) == ("READY", True, True, None)
    assert theirs("status", encode_status("HELLO"))[0]["wire"] == encode_status("HELLO")
    (plain,) = theirs("ready", ready_response({"max_model_len": 5}, OURS))
    assert plain["max_model_len"] == 5
    # What their struct writes with every field at its default is what ours fills in: the same keys and the same values.
    defaults = msgspec.msgpack.decode(theirs("ready", msgspec.msgpack.encode({}))[0]["wire"])
    mine = msgspec.msgpack.decode(ready_response({}, {"abi": 1}))
    assert mine.pop("loadbox") == {"abi": 1}
    assert mine == defaults


def test_requests_are_read(theirs):
    add = encode_add(GenerateRequest("r1", input_ids=[1, 2], sampling_params=[16, None, None, 0.5], stream=True))
    (got,) = theirs("add", add[1])
    assert (got["rid"], got["input_ids"], got["stream"], got["validation_error"]) == ("r1", [1, 2], True, None)
    assert [each["rid"] for each in theirs("abort", encode_abort(["r1", "r2"])[1])] == ["r1", "r2"]


def test_two_released_engines_on_our_frontend(start, frontend):
    front = frontend(engines=2)
    dead: list[int] = []
    front.on_dead = dead.append
    for rank in range(2):
        start("engine", front.handshake_address, str(rank))
    front.wait_ready(60)
    assert [each.ready["max_model_len"] for each in front.engines] == [77, 77]
    assert [each.mailbox for each in front.engines] == [None, None]
    for rank in (1, 0, 1):
        front.add(rank, GenerateRequest(f"r{rank}", input_ids=[1] * (rank + 5), sampling_params=[4]))
        got_rank, got = front.recv(timeout=60)
        assert (got_rank, got.rids, got.output_ids) == (rank, [f"r{rank}"], [[rank + 5]])
        assert got.load == (3, 1, 10 + rank, 40)
    front.abort(1, ["r1", "the end"])
    while not dead:
        with pytest.raises(TimeoutError):
            front.recv(timeout=0.1)
    assert dead == [1]
