"""The real gateway takes what this package sends: tokens, the tail, load-only batches, and the ten-element form."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

pytestmark = pytest.mark.slow

HELD = 1000
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def gateway(launch):
    return launch("always", "always")


@pytest.fixture(scope="module")
def negotiated(launch):
    return launch("negotiated", "negotiated")


def stream(gateway: Any, tokens: int) -> tuple[str, int]:
    """The text of a streaming request, and in how many pieces it came."""
    pieces = []
    with gateway.open("/v1/completions", {"prompt": "hello", "max_tokens": tokens, "stream": True}) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
    return "".join(pieces), sum(bool(piece) for piece in pieces)


class Held:
    """A streaming request that stays in flight, so that the gateway keeps a rank's queue counts."""

    def __init__(self, gateway: Any) -> None:
        self.gateway = gateway
        self.text = ""
        self.thread = threading.Thread(target=self._read)
        self.thread.start()
        gateway.eventually(lambda: self.text)

    def _read(self) -> None:
        with self.gateway.open("/v1/completions", {"prompt": "hello", "max_tokens": HELD, "stream": True}, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    self.text += json.loads(line[6:])["choices"][0]["text"]


@pytest.fixture
def held(gateway):
    """One request in flight on each rank; finished with the test."""
    before = [len(engine.heard("add")) for engine in gateway.engines]
    for engine in gateway.engines:
        engine.set_load(0, 0, 0, 400)
    requests = [Held(gateway), Held(gateway)]
    assert [len(engine.heard("add")) for engine in gateway.engines] == [number + 1 for number in before]
    yield requests
    for engine in gateway.engines:
        engine.set_load(0, 0, 0, 400, finish=True)
    for request in requests:
        request.thread.join(60)
        assert not request.thread.is_alive()


def where(gateway: Any, requests: int) -> list[int]:
    """How many of so many requests, one after another, each rank was given."""
    before = [len(engine.heard("add")) for engine in gateway.engines]
    for _ in range(requests):
        assert gateway.complete(2) == "ab"
    return [len(engine.heard("add")) - number for engine, number in zip(gateway.engines, before, strict=True)]


@pytest.mark.parametrize("which", ["gateway", "negotiated"])
def test_tokens_come_back_for_plain_and_streaming_requests(which, request):
    gateway = request.getfixturevalue(which)
    for tokens in (1, 5, 26):
        assert gateway.complete(tokens) == LETTERS[:tokens]
        assert stream(gateway, tokens) == (LETTERS[:tokens], tokens)
    assert all(engine.heard("add") for engine in gateway.engines)


def test_the_gateways_own_loads_show_the_tail(gateway, held):
    gateway.engines[0].set_load(6, 2, 100, 400)
    gateway.engines[1].set_load(3, 1, 300, 400)
    gateway.eventually(lambda: gateway.loads() == {0: (6, 2, 0.25), 1: (3, 1, 0.75)})
    wanted = {"running_requests": (6, 3), "waiting_requests": (2, 1), "token_usage": (0.25, 0.75)}

    def told() -> bool:
        lines = [line for line in gateway.metrics().splitlines() if line.startswith("smg_engine_")]
        return all(
            any(
                line.startswith(f"smg_engine_{name}{{") and f'dp_rank="{rank}"' in line and line.endswith(f" {value}")
                for line in lines
            )
            for name, values in wanted.items()
            for rank, value in enumerate(values)
        )

    gateway.eventually(told)


def test_it_routes_to_the_less_loaded_rank_and_follows_when_the_loads_swap(gateway, held):
    busy, light = (9, 3, 200, 400), (1, 0, 20, 400)
    for turn in range(4):
        rank = turn % 2
        gateway.engines[1 - rank].set_load(*busy)
        gateway.engines[rank].set_load(*light)
        gateway.eventually(lambda rank=rank: gateway.loads() == {1 - rank: (9, 3, 0.5), rank: (1, 0, 0.05)})
        given = where(gateway, 6)
        assert given[1 - rank] == 0, f"rank {rank} is the lighter one, and the gateway gave {given}"
        assert given[rank] == 6


def test_a_load_only_batch_is_taken(gateway):
    for engine in gateway.engines:
        engine.set_load(1, 0, 100, 400)
    assert sum(where(gateway, 4)) == 4
    gateway.eventually(lambda: [usage for _, _, usage in gateway.loads().values()] == [0.25, 0.25])
    for rank, engine in enumerate(gateway.engines):
        adds, edges = len(engine.heard("add")), len(engine.heard("load-only"))
        engine.set_load(0, 0, 40, 400)
        # No request has come since: only the load-only batch can have said it.
        gateway.eventually(lambda rank=rank: gateway.loads()[rank] == (0, 0, 0.1))
        time.sleep(1.5)
        assert len(engine.heard("load-only")) == edges + 1, "once, at the edge"
        assert len(engine.heard("add")) == adds
    assert gateway.complete(5) == "abcde"
    assert gateway.process.poll() is None


def test_negotiated_ten_element_batches_work_and_carry_no_load(negotiated):
    # This gateway advertises nothing, so it gets ten elements and never a load-only batch.
    assert [engine.heard("connected") for engine in negotiated.engines] == [
        [{"event": "connected", "tail": False, "load_only": False}]
    ] * 2
    for engine in negotiated.engines:
        engine.set_load(5, 5, 100, 400)
    negotiated.engines[0].set_load(50, 5, 200, 400)
    assert where(negotiated, 6) == [3, 3], "it knows nothing of the loads, and ties rotate"
    for engine in negotiated.engines:
        engine.set_load(0, 0, 40, 400)
    time.sleep(2.5)
    assert all(load == (0, 0, 0.0) for load in negotiated.loads().values())
    assert not any(engine.heard("load-only") for engine in negotiated.engines)
    assert negotiated.complete(3) == "abc"
