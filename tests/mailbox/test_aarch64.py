"""The barriers of the latch on AArch64: proof/aarch64.py passes the header, and finds fault with each weakened copy of it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import loadbox.mailbox

SOURCE = Path(__file__).parents[2] / "proof" / "aarch64.py"
SPEC = importlib.util.spec_from_file_location("aarch64", SOURCE)
assert SPEC
assert SPEC.loader
aarch64 = sys.modules["aarch64"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(aarch64)

HEADER = Path(loadbox.mailbox.__file__).with_name("loadbox.h")
GCC = ["aarch64-linux-gnu-gcc"]
CLANG = ["clang", "--target=aarch64-linux-gnu", "-isystem", "/usr/aarch64-linux-gnu/include"]
COMPILERS = {
    "gcc-O2": [*GCC, "-O2"],
    "gcc-O3": [*GCC, "-O3"],
    "gcc-armv8.4": [*GCC, "-O2", "-march=armv8.4-a"],
    "clang-O2": [*CLANG, "-O2"],
    "clang-rcpc": [*CLANG, "-O2", "-march=armv8.4-a+rcpc"],
}


def need(tool: str) -> None:
    if shutil.which(tool):
        return
    missing = f"{tool} is not installed: THE BARRIERS ARE NOT CHECKED (Debian: apt install gcc-aarch64-linux-gnu clang)"
    if os.environ.get("LOADBOX_REQUIRE_C", "") not in ("", "0"):
        pytest.fail(missing)
    pytest.skip(missing)


@pytest.mark.parametrize("name", COMPILERS)
def test_every_barrier_is_there(name: str, tmp_path: Path) -> None:
    need(COMPILERS[name][0])
    assert aarch64.faults(COMPILERS[name], HEADER.read_text(), tmp_path) == []


class Change(NamedTuple):
    """What is weakened: in a function of the header, the ``nth`` occurrence of ``old``; and the fault that must be found."""

    function: str
    old: str
    new: str
    fault: str
    nth: int = 0


RELEASE_FENCE = "__atomic_thread_fence(__ATOMIC_RELEASE);"
ACQUIRE_FENCE = "__atomic_thread_fence(__ATOMIC_ACQUIRE);"
COMPILER_FENCE = "__atomic_signal_fence(__ATOMIC_SEQ_CST);"
STORE_A, STORE_B = "lbx_words_store(&s->a, v);", "lbx_words_store(&s->b, v);"
FIRST_STORE = "lbx_store_release(&s->seq, q + 1);"
LAST_WORD = "__atomic_store_n(&to->epoch, from->epoch, __ATOMIC_RELAXED);"
HALVES = "((volatile uint32_t *)(void *)&to->epoch)[0] = 1; ((volatile uint32_t *)(void *)&to->epoch)[1] = 0;"
PLAIN_COPY = "{ memcpy(to, from, sizeof *to); return;"
WORDS_AND_FENCE = r"(lbx_words_load\(v, .*?\);)\s*" + re.escape(ACQUIRE_FENCE)

SEQ_THEN_A = "publish: the first store of the sequence, then copy A, not ordered"
SEQ_THEN_B = "publish: the second store of the sequence, then copy B, not ordered"
NOT_ALL_A = "publish: not one store a word of copy a"
WORDS_THEN_LOOK = "read: the words, then the second look at the sequence, not ordered"
TORN_WORDS = "not one access of 8 bytes a word"

WEAKER = {
    "first store relaxed": Change(
        "lbx_publish",
        "lbx_store_release",
        "lbx_store",
        "publish: the publish before, then the first store of the sequence, not ordered",
    ),
    "first store no release": Change(
        "lbx_publish",
        FIRST_STORE,
        f"{RELEASE_FENCE} lbx_store(&s->seq, q + 1);",
        "publish: the first store of the sequence is no release",
    ),
    "second store relaxed": Change(
        "lbx_publish",
        "lbx_store_release",
        "lbx_store",
        "publish: copy A, then the second store of the sequence, not ordered",
        nth=1,
    ),
    "first fence removed": Change("lbx_publish", RELEASE_FENCE, "", SEQ_THEN_A),
    "second fence removed": Change("lbx_publish", RELEASE_FENCE, "", SEQ_THEN_B, nth=1),
    "first fence of loads": Change("lbx_publish", RELEASE_FENCE, ACQUIRE_FENCE, SEQ_THEN_A),
    "second fence of the compiler": Change("lbx_publish", RELEASE_FENCE, COMPILER_FENCE, SEQ_THEN_B, nth=1),
    "copy A forgotten": Change("lbx_publish", STORE_A, "", NOT_ALL_A),
    "copy B forgotten": Change("lbx_publish", STORE_B, "", "publish: not one store a word of copy b"),
    "copy A twice": Change("lbx_publish", STORE_B, STORE_A, NOT_ALL_A),
    "one store of the sequence": Change("lbx_publish", FIRST_STORE, "", "publish: 1 stores of the sequence"),
    "a word forgotten": Change("lbx_words_store", LAST_WORD, "", NOT_ALL_A),
    "a word in halves": Change("lbx_words_store", LAST_WORD, HALVES, f"publish: {TORN_WORDS}"),
    "words stored by memcpy": Change("lbx_words_store", "{", PLAIN_COPY, f"publish: {TORN_WORDS}"),
    "words read by memcpy": Change("lbx_words_load", "{", PLAIN_COPY, f"read: {TORN_WORDS}"),
    "every release relaxed": Change("lbx_store_release", "_RELEASE", "_RELAXED", "repair: the store of the sequence is no release"),
    "every acquire relaxed": Change("lbx_load_acquire", "_ACQUIRE", "_RELAXED", "repair: the look at the sequence is no acquire"),
    "reader's acquire relaxed": Change(
        "lbx_try_read", "lbx_load_acquire", "lbx_load", "read: the first look at the sequence, then the words, not ordered"
    ),
    "reader's fence removed": Change("lbx_try_read", ACQUIRE_FENCE, "", WORDS_THEN_LOOK),
    "reader's fence too early": Change("lbx_try_read", WORDS_AND_FENCE, rf"{ACQUIRE_FENCE} \1", WORDS_THEN_LOOK),
    "no second look": Change("lbx_try_read", "lbx_load(&s->seq) == q", "1", "read: no second look at the sequence"),
    "readers of one copy": Change("lbx_try_read", "&s->b", "&s->a", "read: it never reads copy b"),
    "repair's acquire relaxed": Change(
        "lbx_repair", "lbx_load_acquire", "lbx_load", "repair: the look at the sequence is no acquire"
    ),
    "repair's fence removed": Change(
        "lbx_repair", RELEASE_FENCE, "", "repair: no barrier between the look at the sequence and the first store"
    ),
    "repair's store relaxed": Change(
        "lbx_repair", "lbx_store_release", "lbx_store", "repair: the words, then the store of the sequence, not ordered"
    ),
    "repair's store forgotten": Change("lbx_repair", FIRST_STORE, "", "repair: 0 stores of the sequence after repairing copy a"),
    "repair of odd sequences only": Change("lbx_repair", "if (q & 1)", "if (1)", "repair: it never reads copy a"),
}


def weaker(header: str, change: Change) -> str:
    """The header with one thing changed; fails if it is not there any more."""
    found = re.search(rf"static inline [^;{{}}]*\b{change.function}\(.*?(?:\n}}|}})\n", header, re.DOTALL)
    assert found, f"the header has no {change.function}"
    pattern = change.old if change.old == WORDS_AND_FENCE else re.escape(change.old)
    places = list(re.finditer(pattern, found[0]))
    assert len(places) > change.nth, f"{change.function} has no {change.old!r} to weaken: change this test with the header"
    place = places[change.nth]
    new = place.expand(change.new) if change.old == WORDS_AND_FENCE else change.new
    return header[: found.start() + place.start()] + new + header[found.start() + place.end() :]


@pytest.mark.parametrize("name", WEAKER)
def test_a_weakened_header_is_found_out(name: str, tmp_path: Path) -> None:
    need(GCC[0])
    found = aarch64.faults([*GCC, "-O2"], weaker(HEADER.read_text(), WEAKER[name]), tmp_path)
    assert WEAKER[name].fault in [re.sub(r"(8 bytes a word):.*", r"\1", fault) for fault in found]


def test_what_the_processor_keeps_in_order() -> None:
    step = aarch64.Step
    plain, release = step("store", "plain", "a0"), step("store", "release", "seq")
    load, acquire = step("load", "plain", "a1"), step("load", "acquire", "seq")
    full, loads, stores = (step("barrier", order) for order in ("full", "load", "store"))
    for steps, kept in [
        ([plain, release], True), ([release, plain], False), ([acquire, load], True), ([load, acquire], False),
        ([plain, full, load], True), ([plain, stores, plain], True), ([plain, loads, plain], False),
        ([load, loads, plain], True), ([load, stores, plain], False), ([plain, plain], False), ([load, load], False),
    ]:  # fmt: skip
        assert aarch64.ordered(steps)(0, len(steps) - 1) is kept, steps
    # Order is passed on: before the release, and the release before what follows the barrier.
    assert aarch64.ordered([load, release, full, plain])(0, 3)


def test_an_instruction_that_is_not_known_is_no_silent_pass() -> None:
    code = ["add\tx3, x0, 128", "swp\tx1, x2, [x3]", "ret"]
    with pytest.raises(aarch64.Unexpected, match="does not know: swp"):
        list(aarch64.ways(code))
