"""The brute-force checker of litmus files (proof/c11.py) against shapes whose answer under C11 is known."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "proof" / "c11.py"
SPEC = importlib.util.spec_from_file_location("c11", SOURCE)
assert SPEC
assert SPEC.loader
c11 = sys.modules["c11"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(c11)

RELAXED, ACQUIRE, RELEASE = "relaxed", "acquire", "release"


def store(location: str, value: int, order: str = RELAXED) -> str:
    return f"atomic_store_explicit({location},{value},memory_order_{order});"


def load(register: str, location: str, order: str = RELAXED) -> str:
    return f"int {register} = atomic_load_explicit({location},memory_order_{order});"


def fence(order: str) -> str:
    return f"atomic_thread_fence(memory_order_{order});"


def litmus(threads: list[list[str]], clause: str) -> str:
    bodies = [f"P{n} (atomic_int* x, atomic_int* y) {{\n" + "\n".join(lines) + "\n}\n" for n, lines in enumerate(threads)]
    return "C test\n{ [x]=0; [y]=0; }\n\n" + "\n".join(bodies) + f"\nexists ({clause})\n"


X, Y = store("x", 1), store("y", 1)
MESSAGE = "1:a=1 /\\ 1:b=0"
SHAPES = {
    "message passing": ([[X, store("y", 1, RELEASE)], [load("a", "y", ACQUIRE), load("b", "x")]], MESSAGE, "Never"),
    "its store relaxed": ([[X, Y], [load("a", "y", ACQUIRE), load("b", "x")]], MESSAGE, "Sometimes"),
    "its load relaxed": ([[X, store("y", 1, RELEASE)], [load("a", "y"), load("b", "x")]], MESSAGE, "Sometimes"),
    "by fences": ([[X, fence(RELEASE), Y], [load("a", "y"), fence(ACQUIRE), load("b", "x")]], MESSAGE, "Never"),
    "fence too early": ([[fence(RELEASE), X, Y], [load("a", "y"), fence(ACQUIRE), load("b", "x")]], MESSAGE, "Sometimes"),
    "fence too late": ([[X, fence(RELEASE), Y], [load("a", "y"), load("b", "x"), fence(ACQUIRE)]], MESSAGE, "Sometimes"),
    "store buffering": (
        [[store("x", 1, RELEASE), load("a", "y", ACQUIRE)], [store("y", 1, RELEASE), load("b", "x", ACQUIRE)]],
        "0:a=0 /\\ 1:b=0",
        "Sometimes",
    ),
    "load buffering": ([[load("a", "x"), Y], [load("b", "y"), X]], "0:a=1 /\\ 1:b=1", "Never"),
    "reads of one word": ([[X], [load("a", "x"), load("b", "x")]], MESSAGE, "Never"),
    "stores to one word": ([[X, store("x", 2)], [load("a", "x"), load("b", "x")]], "1:a=2 /\\ 1:b=1", "Never"),
    "a message passed on": (
        [[X], [load("a", "x"), store("y", 1, RELEASE)], [load("b", "y", ACQUIRE), load("c", "x")]],
        "1:a=1 /\\ 2:b=1 /\\ 2:c=0",
        "Never",
    ),
    "independent readers": (
        [[X], [Y], [load("a", "x", ACQUIRE), load("b", "y", ACQUIRE)], [load("c", "y", ACQUIRE), load("d", "x", ACQUIRE)]],
        "2:a=1 /\\ 2:b=0 /\\ 3:c=1 /\\ 3:d=0",
        "Sometimes",
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_known_shapes(shape: str) -> None:
    threads, clause, answer = SHAPES[shape]
    assert c11.decide(litmus(threads, clause)) == answer


def test_a_branch_is_taken_by_what_was_read() -> None:
    reader = [load("a", "y", ACQUIRE), "int b = 9;", "if (a == 1) {", "b = atomic_load_explicit(x,memory_order_relaxed);", "}"]
    writer = [X, store("y", 1, RELEASE)]
    assert c11.decide(litmus([writer, reader], "1:a=1 /\\ 1:b=1")) == "Sometimes"
    assert c11.decide(litmus([writer, reader], "1:a=1 /\\ 1:b=9")) == "Never"
    assert c11.decide(litmus([writer, reader], "1:a=0 /\\ 1:b=9")) == "Sometimes"


def test_what_is_not_understood_is_no_verdict() -> None:
    with pytest.raises(ValueError, match="not understood: atomic_exchange"):
        c11.decide(litmus([["atomic_exchange_explicit(x,1,memory_order_relaxed);"]], "0:a=0"))
