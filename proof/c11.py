"""Decide a litmus file by brute force: can its `exists` clause come true under the C11 memory model?

For machines without herd7.  It knows just what the files here use: C programs of relaxed, acquire and release loads and stores,
release and acquire fences, and `if (register == constant)`.  It tries every candidate execution: every value for each load, every
store with that value for it to read from, every order of the stores to one location.  A candidate is real if, in the terms of
"Repairing Sequential Consistency in C/C++11" (Lahav et al., 2017), without its sequentially consistent part,

    hb = (sb | sw)+ has no cycle         sb: program order, initial stores first; sw: a release store, or a release fence before
                                         a store, with an acquire load that reads from it, or an acquire fence after such a load
    hb ; eco has no cycle                eco = (rf | mo | fr)+: reads-from, stores to a location in order, read before overwritten
    sb | rf has no cycle                 no value out of thin air

There are no read-modify-writes, so a release sequence is its first store alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import permutations, product
from typing import NamedTuple

INITIAL = -1


class Event(NamedTuple):
    """A load (R), a store (W) or a fence (F) of a thread, with the value that it reads or writes."""

    kind: str
    order: str
    location: str = ""
    value: int = 0
    thread: int = INITIAL


class Branch(NamedTuple):
    """if (register == value) then ... else ..."""

    register: str
    value: int
    then: list[Statement]
    otherwise: list[Statement]


class Load(NamedTuple):
    """register = load(location)"""

    register: str
    location: str
    order: str


class Let(NamedTuple):
    """register = constant"""

    register: str
    value: int


Statement = Branch | Load | Let | Event
Run = tuple[list[Event], dict[str, int]]
Relation = list[set[int]]

_STORE = re.compile(r"atomic_store_explicit\((\w+),(\d+),memory_order_(\w+)\);")
_LOAD = re.compile(r"(?:int )?(\w+) = atomic_load_explicit\((\w+),memory_order_(\w+)\);")
_FENCE = re.compile(r"atomic_thread_fence\(memory_order_(\w+)\);")
_LET = re.compile(r"int (\w+) = (\d+);")
_IF = re.compile(r"if \((\w+) == (\d+)\) \{")


def _block(lines: list[str]) -> tuple[list[Statement], str]:
    """The statements up to the end of a block, taken off ``lines``, and the line that ends it."""
    found: list[Statement] = []
    while lines:
        line = lines.pop(0).strip()
        if line.startswith("}"):
            return found, line
        if match := _IF.fullmatch(line):
            then, end = _block(lines)
            otherwise = _block(lines)[0] if "else" in end else []
            found.append(Branch(match[1], int(match[2]), then, otherwise))
        elif match := _STORE.fullmatch(line):
            found.append(Event("W", match[3], match[1], int(match[2])))
        elif match := _LOAD.fullmatch(line):
            found.append(Load(match[1], match[2], match[3]))
        elif match := _FENCE.fullmatch(line):
            found.append(Event("F", match[1]))
        elif match := _LET.fullmatch(line):
            found.append(Let(match[1], int(match[2])))
        else:
            raise ValueError(f"a litmus test has a line that is not understood: {line}")
    return found, ""


def _stores(statements: list[Statement]) -> Iterator[Event]:
    for statement in statements:
        if isinstance(statement, Branch):
            yield from _stores(statement.then + statement.otherwise)
        elif isinstance(statement, Event) and statement.kind == "W":
            yield statement


def _runs(
    statements: list[Statement], values: dict[str, set[int]], registers: dict[str, int], events: list[Event]
) -> Iterator[Run]:
    """All ways through a thread, whatever its loads may read."""
    if not statements:
        yield events, registers
        return
    first, rest = statements[0], statements[1:]
    if isinstance(first, Branch):
        taken = first.then if registers[first.register] == first.value else first.otherwise
        yield from _runs(taken + rest, values, registers, events)
    elif isinstance(first, Let):
        yield from _runs(rest, values, {**registers, first.register: first.value}, events)
    elif isinstance(first, Load):
        for value in values[first.location]:
            read = Event("R", first.order, first.location, value)
            yield from _runs(rest, values, {**registers, first.register: value}, [*events, read])
    else:
        yield from _runs(rest, values, registers, [*events, first])


def _closure(relation: Iterable[set[int]]) -> Relation:
    result = [set(after) for after in relation]
    changed = True
    while changed:
        changed = False
        for after in result:
            more = set().union(*(result[event] for event in after)) - after
            if more:
                after |= more
                changed = True
    return result


def _cyclic(relation: Relation) -> bool:
    return any(event in after for event, after in enumerate(relation))


class Execution:
    """The events of one way through all threads; what follows from a choice of reads-from and of store orders."""

    def __init__(self, initial: dict[str, int], threads: list[list[Event]]) -> None:
        self.events = [Event("W", "initial", location, value) for location, value in initial.items()]
        for number, events in enumerate(threads):
            self.events += [event._replace(thread=number) for event in events]
        self.all = range(len(self.events))
        self.sb = [{b for b in self.all if self._before(a, b)} for a in self.all]
        self.reads = [i for i in self.all if self.events[i].kind == "R"]
        self.writes = {
            name: [i for i in self.all if (self.events[i].kind, self.events[i].location) == ("W", name)] for name in initial
        }

    def _before(self, a: int, b: int) -> bool:
        one, other = self.events[a].thread, self.events[b].thread
        return (one == other != INITIAL and a < b) or (one == INITIAL != other)

    def _fences(self, order: str, thread: int, low: int, high: int) -> list[int]:
        return [i for i in range(low, high) if self.events[i][:2] == ("F", order) and self.events[i].thread == thread]

    def _synchronised(self, read: int, write: int) -> Iterator[tuple[int, int]]:
        r, w = self.events[read], self.events[write]
        if w.thread in (INITIAL, r.thread):
            return
        releases = self._fences("release", w.thread, 0, write) + ([write] if w.order == "release" else [])
        acquires = self._fences("acquire", r.thread, read, len(self.events)) + ([read] if r.order == "acquire" else [])
        yield from product(releases, acquires)

    def possible(self) -> bool:
        """Is there a choice that makes it a real execution?"""
        readable = [
            [w for w in self.writes[self.events[r].location] if self.events[w].value == self.events[r].value] for r in self.reads
        ]
        return any(self._possible(dict(zip(self.reads, chosen, strict=True))) for chosen in product(*readable))

    def _possible(self, rf: dict[int, int]) -> bool:
        hb = [set(after) for after in self.sb]
        causes = [set(after) for after in self.sb]
        for read, write in rf.items():
            causes[write].add(read)
            for release, acquire in self._synchronised(read, write):
                hb[release].add(acquire)
        hb = _closure(hb)
        if _cyclic(hb) or _cyclic(_closure(causes)):
            return False
        orders = [[(first, *rest) for rest in permutations(others)] for first, *others in self.writes.values()]
        return any(self._coherent(hb, rf, mo) for mo in product(*orders))

    def _coherent(self, hb: Relation, rf: dict[int, int], mo: tuple[tuple[int, ...], ...]) -> bool:
        eco: Relation = [set() for _ in self.all]
        for order in mo:
            for place, write in enumerate(order):
                later = set(order[place + 1 :])
                readers = {read for read, source in rf.items() if source == write}
                eco[write] |= later | readers
                for read in readers:
                    eco[read] |= later
        eco = _closure(eco)
        return not any(a in eco[b] for a in self.all for b in hb[a])


def weakened(text: str) -> Iterator[tuple[str, str]]:
    """Each form of a litmus file with one store or load made relaxed, or one fence left out: (what was weakened, its text)."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if re.search("memory_order_(release|acquire)", line):
            weaker = "" if "fence" in line else re.sub("memory_order_(release|acquire)", "memory_order_relaxed", line)
            done = "without" if not weaker else "relaxed"
            yield f"{done} {line.strip()}", "\n".join([*lines[:number], weaker, *lines[number + 1 :]])


def expected(text: str) -> str:
    """ "Never" or "Sometimes", as the file's comment says."""
    return str(re.findall(r"Expected: (Never|Sometimes)\b", text)[0])


def decide(text: str) -> str:
    """ "Never" or "Sometimes": can the clause of this litmus file come true?"""
    text = re.sub(r"\(\*.*?\*\)", "", text, flags=re.DOTALL)
    initial = {name: int(value) for name, value in re.findall(r"\[(\w+)\]=(\d+)", text)}
    bodies = re.findall(r"^P\d+ \([^)]*\) \{\n(.*?)\n\}$", text, re.DOTALL | re.MULTILINE)
    threads = [_block([line for line in body.split("\n") if line.strip()])[0] for body in bodies]
    clause = text[text.index("exists") + len("exists") :]
    wanted = re.sub(r"(\d+):(\w+)=(\d+)", r"r[\1]['\2'] == \3", clause.replace("/\\", " and ").replace("\\/", " or "))
    condition = compile(" ".join(wanted.split()), "exists", "eval")
    values = {name: {value} for name, value in initial.items()}
    for thread in threads:
        for store in _stores(thread):
            values[store.location].add(store.value)
    for runs in product(*(list(_runs(thread, values, {}, [])) for thread in threads)):
        registers = [found for _, found in runs]
        if eval(condition, {"r": registers}) and Execution(initial, [events for events, _ in runs]).possible():
            return "Sometimes"
    return "Never"
