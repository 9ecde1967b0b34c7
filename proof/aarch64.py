"""Are the barriers of the latch in the instructions that a compiler makes of loadbox.h for AArch64, in the order that it needs?

x86-64 keeps most orders by itself and would never show that one is missing, so the instructions for AArch64 are read instead: each
way through a function is followed, every access to the segment is found by its address, and what the processor must not reorder
is derived from the rules of the architecture: it keeps everything before a store-release, everything after a load-acquire, and
what a barrier stands between.  Dependencies count for nothing here, though the processor keeps them too.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

FUNCTIONS = """
#include "loadbox.h"
void publish(lbx_segment *s, const lbx_words *v) { lbx_publish(s, v); }
int read_(const lbx_segment *s, uint64_t *seq, lbx_words *v) { return lbx_read(s, seq, v); }
void repair(lbx_segment *s) { lbx_repair(s); }
"""


class Unexpected(Exception):
    """The code does what no form of the latch does, or what this check does not know."""


# ---- instructions ---------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """What the check sees of an instruction: an access to a word of the segment, or a barrier."""

    kind: str  # "load", "store", "barrier"
    order: str  # "plain", "acquire", "release"; of a barrier: "full", "load", "store"
    word: str = ""  # "seq", "a0" to "a5", "b0" to "b5"


WORDS = {128: "seq"} | {136 + 8 * i: f"a{i}" for i in range(6)} | {192 + 8 * i: f"b{i}" for i in range(6)}
ACCESSES = {
    "ldr": ("load", "plain"), "ldur": ("load", "plain"), "ldp": ("load", "plain"),
    "ldar": ("load", "acquire"), "ldapr": ("load", "acquire"), "ldapur": ("load", "acquire"),
    "str": ("store", "plain"), "stur": ("store", "plain"), "stp": ("store", "plain"),
    "stlr": ("store", "release"), "stlur": ("store", "release"),
}  # fmt: skip
BARRIERS = {"ish": "full", "sy": "full", "ishld": "load", "ld": "load", "ishst": "store", "st": "store"}
JUMPS = re.compile(r"b|b\.?(eq|ne|cs|hs|cc|lo|mi|pl|hi|ls|ge|lt|gt|le)|cbz|cbnz|tbz|tbnz")
WITHOUT_RESULT = ("cmp", "cmn", "tst", "ccmp", "prfm", "nop", "hint", "bti", "paciasp", "autiasp")
MOST_VISITS = 2  # of one instruction on one way: a second time round the loop shows all that a further one could


def function(assembly: str, name: str) -> list[str]:
    """The instructions and labels of a function, without directives and comments."""
    lines = [line.split("//")[0].strip() for line in assembly.split("\n")]
    start = lines.index(f"{name}:") + 1
    end = next(i for i in range(start, len(lines)) if lines[i].startswith(".size"))
    return [line for line in lines[start:end] if line and (line.endswith(":") or not line.startswith("."))]


def ways(code: list[str]) -> Iterator[list[Step]]:
    """Every way through a function whose first argument, x0, is the segment."""
    labels = {line[:-1]: i for i, line in enumerate(code) if line.endswith(":")}
    work: list[tuple[int, dict[str, int], list[Step], tuple[int, ...]]] = [(0, {"x0": 0}, [], ())]
    while work:
        at, segment, steps, visited = work.pop()
        if visited.count(at) >= MOST_VISITS:
            continue
        line, visited = code[at], (*visited, at)
        name, _, rest = line.partition("\t") if "\t" in line else line.partition(" ")
        operands = [operand.strip() for operand in re.findall(r"\[[^]]*\]!?|[^,\s][^,]*", rest)]
        if name == "ret":
            yield steps
        elif line.endswith(":"):
            work.append((at + 1, segment, steps, visited))
        elif JUMPS.fullmatch(name):
            work.append((labels[operands[-1]], segment, steps, visited))
            if name != "b":
                work.append((at + 1, segment, steps, visited))
        elif name == "csel":  # both choices are ways of their own
            for source in operands[1:3]:
                work.append((at + 1, moved(segment, operands[0], segment.get(source)), steps, visited))
        else:
            after, more = effect(name, operands, segment)
            work.append((at + 1, after, [*steps, *more], visited))


def moved(segment: dict[str, int], register: str, offset: int | None) -> dict[str, int]:
    """``segment``, the registers that point into it, after one was written; w3 is the lower half of x3, q3 is another register."""
    if register[0] not in "xw":
        return segment
    after = {known: value for known, value in segment.items() if known[1:] != register[1:]}
    return after if offset is None else {**after, register: offset}


def effect(name: str, operands: list[str], segment: dict[str, int]) -> tuple[dict[str, int], list[Step]]:
    """What a plain instruction does to the registers that point into the segment, and to the segment."""
    if name in ("dmb", "dsb"):
        return segment, [Step("barrier", BARRIERS[operands[0]])]
    if any(operand.startswith("[") for operand in operands):
        if name not in ACCESSES:
            raise Unexpected(f"an instruction that this check does not know: {name} {operands}")
        kind, order = ACCESSES[name]
        where = operands[2 if name in ("ldp", "stp") else 1 :]
        if len(where) != 1 or not where[0].endswith("]"):
            raise Unexpected(f"an address that this check does not know: {where}")
        base, _, index = where[0][1:-1].partition(",")
        registers = operands[: -len(where)]
        steps = []
        if base in segment:
            if any(register[0] != "x" for register in registers):
                raise Unexpected(f"not one access of 8 bytes a word: {name} {operands}")
            first = segment[base] + int(index.strip(" #") or "0", 0)
            steps = [Step(kind, order, WORDS[first + 8 * i]) for i in range(len(registers))]
        for register in registers if kind == "load" else []:
            segment = moved(segment, register, None)
        return segment, steps
    if name in WITHOUT_RESULT:
        return segment, []
    offset = None
    if name == "mov":
        offset = segment.get(operands[1])
    elif name == "add" and operands[1] in segment and re.fullmatch(r"#?\d+", operands[2]) and len(operands) == 3:
        offset = segment[operands[1]] + int(operands[2].strip("#"))
    return moved(segment, operands[0], offset), []


# ---- order ----------------------------------------------------------------------------------------------------------------


def ordered(steps: list[Step]) -> Callable[[int, int], bool]:
    """``ordered(steps)(i, j)``: must every other processor see step i before step j?"""

    def kept(i: int, j: int) -> bool:
        if steps[j].order == "release" or steps[i].order == "acquire":
            return True
        between = {step.order for step in steps[i + 1 : j] if step.kind == "barrier"}
        kinds = (steps[i].kind, steps[j].kind)
        if "load" in between and kinds[0] == "load":
            return True
        return "full" in between or ("store" in between and kinds == ("store", "store"))

    accesses = [i for i, step in enumerate(steps) if step.kind != "barrier"]
    before: dict[int, set[int]] = {i: set() for i in accesses}
    for i, j in combinations(accesses, 2):  # j in ascending order for each i, so what precedes i is complete
        if kept(i, j):
            before[j] |= {i} | before[i]
    return lambda i, j: i in before[j]


class Look:
    """One way through a function, and the faults that are found with it."""

    def __init__(self, name: str, steps: list[Step]) -> None:
        self.name, self.steps = name, steps
        self.before = ordered(steps)
        self.faults: list[str] = []

    def need(self, truth: bool, what: str) -> None:
        """It is a fault if this is not true."""
        if not truth:
            self.faults.append(f"{self.name}: {what}")

    def at(self, kind: str, words: str) -> list[int]:
        """Where words are accessed: "seq", "a" (all six of copy A) or "b"."""
        return [i for i, step in enumerate(self.steps) if step.kind == kind and step.word.startswith(words)]

    def whole(self, kind: str, copy: str) -> list[int]:
        """Where the six words of a copy are accessed, each once."""
        found = self.at(kind, copy)
        words = sorted(self.steps[i].word for i in found)
        self.need(words == [f"{copy}{i}" for i in range(6)], f"not one {kind} a word of copy {copy}")
        return found

    def in_order(self, first: list[int], then: list[int], what: str) -> None:
        """It is a fault if the processor may swap any of these with any of those."""
        self.need(all(i < j and self.before(i, j) for i in first for j in then), f"{what}, not ordered")


def check_publish(steps: list[Step]) -> list[str]:
    """Faults of one way through lbx_publish."""
    look = Look("publish", [Step("store", "plain", "earlier"), *steps])  # the copy B of the publish before
    seq, a, b = look.at("store", "seq"), look.whole("store", "a"), look.whole("store", "b")
    look.need(len(seq) == 2, f"{len(seq)} stores of the sequence")
    if not look.faults:
        for i, which in zip(seq, ("first", "second"), strict=True):
            look.need(look.steps[i].order == "release", f"the {which} store of the sequence is no release")
        look.in_order([0], seq[:1], "the publish before, then the first store of the sequence")
        look.in_order(seq[:1], a, "the first store of the sequence, then copy A")
        look.in_order(a, seq[1:], "copy A, then the second store of the sequence")
        look.in_order(seq[1:], b, "the second store of the sequence, then copy B")
    return look.faults


def check_read(steps: list[Step]) -> list[str]:
    """Faults of one way through lbx_read, which may try more than once."""
    faults = []
    looks = [i for i, step in enumerate(steps) if step.word == "seq"]
    for start, end in zip(looks[::2], [*looks[2::2], len(steps)], strict=True):
        look = Look("read", steps[start:end])
        copies = {step.word[0] for step in look.steps if step.word and step.word != "seq"}
        seq = look.at("load", "seq")
        look.need(not look.at("store", ""), "it stores")
        look.need(len(seq) == 2, "no second look at the sequence")
        look.need(len(copies) == 1, f"it reads {len(copies)} copies")
        words = look.whole("load", copies.pop()) if copies else []
        look.need(look.steps[0].order == "acquire", "the first look at the sequence is no acquire")
        look.in_order(seq[:1], words, "the first look at the sequence, then the words")
        look.in_order(words, seq[1:], "the words, then the second look at the sequence")
        faults += look.faults
    return faults if looks else ["read: it never looks at the sequence"]


def check_repair(steps: list[Step]) -> list[str]:
    """Faults of one way through lbx_repair, of an odd or of an even sequence."""
    look = Look("repair", steps)
    source = {step.word[0] for step in steps if step.kind == "load" and step.word != "seq"}
    look.need(source in ({"a"}, {"b"}), f"it copies from {sorted(source)}")
    if not look.faults:
        copy_from, copy_to = ("b", "a") if source == {"b"} else ("a", "b")
        seq, words, loads = look.at("load", "seq"), look.whole("store", copy_to), look.whole("load", copy_from)
        look.need(len(seq) == 1 and steps[seq[0]].order == "acquire", "the look at the sequence is no acquire")
        fenced = Step("barrier", "full") in steps[seq[0] : min(words, default=0)]
        look.need(fenced, "no barrier between the look at the sequence and the first store")
        look.in_order(seq, loads + words, "the look at the sequence, then the words")
        last = look.at("store", "seq")
        look.need(len(last) == (copy_to == "a"), f"{len(last)} stores of the sequence after repairing copy {copy_to}")
        look.need(all(steps[i].order == "release" for i in last), "the store of the sequence is no release")
        look.in_order(words, last, "the words, then the store of the sequence")
    return look.faults


CHECKS = {"publish": check_publish, "read_": check_read, "repair": check_repair}


def faults(compiler: list[str], header: str, folder: Path) -> list[str]:
    """Compile a header and say what is wrong with its instructions."""
    (folder / "loadbox.h").write_text(header)
    (folder / "functions.c").write_text(FUNCTIONS)
    command = [*compiler, "-std=c11", "-S", "-fno-asynchronous-unwind-tables", "-o", "-", "functions.c"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the header cannot be compiled:\n{done.stderr}")
    found: list[str] = []
    for name, check in CHECKS.items():
        try:
            all_ways = list(ways(function(done.stdout, name)))
        except Unexpected as error:
            found.append(f"{name.strip('_')}: {error}")
            continue
        if not all_ways:
            found.append(f"{name.strip('_')}: no way through it was found")
        found += [fault for way in all_ways for fault in check(way)]
        copies = {step.word[0] for way in all_ways for step in way if step.kind == "load"}
        if name != "publish":
            found += [f"{name.strip('_')}: it never reads copy {copy}" for copy in sorted({"a", "b"} - copies)]
    return found
