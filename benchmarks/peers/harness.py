"""Measures one peer: what its calls take, alone and under load, what it tears, and what is left when a side dies or stops."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from _measure import at_a_pace, distribution  # the folder above has no package
from peer import Peer

__all__ = ["Effort", "Figures", "measure"]

_PUBLISH = "call(17, 34, 51, 68)"
_READ = "call()"
CHILD = Path(__file__).with_name("child.py")
HANGS_S = 1.5
"""A read or a publish that takes longer than this, beside a stopped process, counts as hanging."""


@dataclass(frozen=True)
class Effort:
    """How long to look."""

    round_s: float = 0.05
    rounds: int = 3
    torn_s: float = 1.0
    trials: int = 4
    ranks: int = 64
    paced: int = 6


@dataclass
class Figures:
    """What was seen of one peer.  Times in ns; None: it has no such call, or it could not be measured."""

    name: str
    guarded: bool
    publish_ns: float | None = None
    publish_loaded_ns: float | None = None
    publish_loaded_p99_ns: float | None = None
    read_ns: float | None = None
    read_p99_ns: float | None = None
    read_loaded_ns: float | None = None
    read_loaded_p99_ns: float | None = None
    read_all_ns: float | None = None
    paced_10_ns: float | None = None
    paced_150_ns: float | None = None
    paced_all_1_ns: float | None = None
    paced_all_10_ns: float | None = None
    paced_all_150_ns: float | None = None
    paced_idle_150_ns: float | None = None
    torn: int = 0
    reads: int = 0
    after_kill: dict[str, int] = field(default_factory=dict)
    after_stop: dict[str, int] = field(default_factory=dict)
    after_reader_stop: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For the results."""
        return asdict(self)


def _environment(kind: type[Peer]) -> dict[str, str]:
    return {**os.environ, "LOADBOX_PURE_PYTHON": "1" if kind.__name__ == "LoadboxPython" else "", "PYTHONWARNINGS": "ignore"}


@contextlib.contextmanager
def _child(kind: type[Peer], role: str, place: str, ranks: int, argument: object = 0) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(CHILD), kind.__name__, role, place, str(ranks), str(argument)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment(kind),
    )  # fmt: skip
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        if said != "ready\n":
            process.kill()
            raise RuntimeError(f"{kind.name}, {role}: {said}{process.communicate()[1]}")
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def _draining(process: subprocess.Popen[str]) -> Iterator[list[int]]:
    """Takes in the counts that a child prints, so that its pipe never fills; the last one is in the list."""
    seen = [0]
    assert process.stdout is not None
    stream = process.stdout

    def drain() -> None:
        with contextlib.suppress(ValueError):  # closed
            for line in stream:
                if line.strip().isdigit():
                    seen[0] = int(line)

    thread = threading.Thread(target=drain, daemon=True)
    thread.start()
    yield seen
    process.kill()
    thread.join(timeout=10)


def _timed(call: Callable[..., object], statement: str, effort: Effort) -> tuple[float, float]:
    """(median, p99) in ns."""
    found = distribution(call, statement, seconds=effort.round_s, rounds=effort.rounds)
    return found.median, found.maximum if found.p99 is None else found.p99


def _torn(found: Any) -> bool:
    a, b, c, d = found
    return not (b == 2 * a and c == 3 * a and d == 4 * a)


def _classify(kind: type[Peer], place: str, ranks: int) -> str:
    """What a reader in a process of its own gets now."""
    try:
        done = subprocess.run(
            [sys.executable, str(CHILD), kind.__name__, "once", place, str(ranks), "0"],
            capture_output=True, text=True, timeout=HANGS_S + 3, env=_environment(kind),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "hangs"
    if done.returncode != 0:
        return "error"
    found = json.loads(done.stdout)
    if found is None:
        return "nothing"
    return "torn" if _torn(found) else "last value"


@contextlib.contextmanager
def _place(kind: type[Peer], ranks: int) -> Iterator[Peer]:
    peer = kind(f"lbx-{os.getpid()}-{random.getrandbits(32):08x}")
    peer.prepare(ranks)
    try:
        yield peer
    finally:
        peer.clean()


def measure(kind: type[Peer], effort: Effort, seed: int) -> Figures:
    """All figures of one peer.  Raises Missing if it cannot run here."""
    kind.require()
    figures = Figures(kind.name, kind.guarded)
    dice = random.Random(seed)
    _calls(kind, effort, figures)
    _paced(kind, effort, figures)
    _faults(kind, effort, dice, figures)
    return figures


def _calls(kind: type[Peer], effort: Effort, figures: Figures) -> None:
    with _place(kind, 1) as peer:
        publish = peer.writer(0, 1)
        publish(1, 2, 3, 4)
        figures.publish_ns, _ = _timed(publish, _PUBLISH, effort)
        with _child(kind, "read", peer.place, 1) as reader, _draining(reader):
            figures.publish_loaded_ns, figures.publish_loaded_p99_ns = _timed(publish, _PUBLISH, effort)
    for hertz in (1000, 0):
        with _place(kind, 1) as peer, _child(kind, "write", peer.place, 1, hertz) as writer, _draining(writer):
            read = peer.reader(0, 1)
            end = time.monotonic() + 5
            while read() is None and time.monotonic() < end:
                time.sleep(0.001)
            if hertz:
                figures.read_ns, figures.read_p99_ns = _timed(read, _READ, effort)
                continue
            figures.read_loaded_ns, figures.read_loaded_p99_ns = _timed(read, _READ, effort)
            end = time.monotonic() + effort.torn_s
            while time.monotonic() < end:
                found = read()
                if found is not None:
                    figures.reads += 1
                    figures.torn += _torn(found)
    if not kind.many:
        return
    with _place(kind, effort.ranks) as peer:
        writers = [peer.writer(rank, effort.ranks) for rank in range(effort.ranks)]
        for each in writers:
            each(17, 34, 51, 68)
        read_all = peer.reader_of_all(effort.ranks)
        read_all()
        figures.read_all_ns, _ = _timed(read_all, _READ, effort)


def _paced(kind: type[Peer], effort: Effort, figures: Figures) -> None:
    """Reads at a router's pace: between two of them the caches grow cold, and whatever a reader does now and then falls due."""
    ranks = effort.ranks if kind.many else 1
    for hertz in (100, 0):
        with _place(kind, ranks) as peer, _child(kind, "write-all", peer.place, ranks, hertz):
            one, every = peer.reader(0, ranks), peer.reader_of_all(ranks) if kind.many else None
            end = time.monotonic() + 5
            while one() is None and time.monotonic() < end:
                time.sleep(0.001)
            if not hertz:
                figures.paced_idle_150_ns = _at(every, 150, effort)
                continue
            figures.paced_10_ns, figures.paced_150_ns = _at(one, 10, effort), _at(one, 150, effort)
            figures.paced_all_1_ns, figures.paced_all_10_ns = _at(every, 1, effort), _at(every, 10, effort)
            figures.paced_all_150_ns = _at(every, 150, effort)


def _at(read: Callable[[], object] | None, every_ms: int, effort: Effort) -> float | None:
    """Mean ns, as the median of three, in which what else the machine ran for a moment does not count."""
    if read is None:
        return None
    read()
    before = time.monotonic()
    read()
    slow = (time.monotonic() - before) * 1000 > every_ms  # it cannot be read at that pace: few calls will do
    calls = effort.paced + (0 if slow else effort.paced * 15 // every_ms)
    return statistics.median(at_a_pace(read, every_s=every_ms / 1000, calls=calls) for _ in range(3))


def _faults(kind: type[Peer], effort: Effort, dice: random.Random, figures: Figures) -> None:
    kill, stop, reader_stop = Counter[str](), Counter[str](), Counter[str]()
    for _ in range(effort.trials):
        with _place(kind, 1) as peer, _child(kind, "write", peer.place, 1, 0) as writer, _draining(writer) as published:
            with _child(kind, "read", peer.place, 1) as reader, _draining(reader):
                time.sleep(0.1 + dice.random() / 10)
                os.kill(reader.pid, signal.SIGSTOP)
                before = published[0]
                end = time.monotonic() + HANGS_S
                while published[0] <= before + 64 and time.monotonic() < end:
                    time.sleep(0.01)
                reader_stop["goes on" if published[0] > before else "hangs"] += 1
            time.sleep(dice.random() / 20)
            os.kill(writer.pid, signal.SIGSTOP)
            stop[_classify(kind, peer.place, 1)] += 1
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()
            kill[_classify(kind, peer.place, 1)] += 1
    figures.after_kill, figures.after_stop, figures.after_reader_stop = dict(kill), dict(stop), dict(reader_stop)
