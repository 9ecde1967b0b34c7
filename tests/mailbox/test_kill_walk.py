"""A writer is killed, or stopped, at every point of what it does: readers see whole snapshots, and the next writer takes over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

V1, V2, V3 = [11, 23, 35, 4711], [12, 25, 38, 4718], [13, 27, 41, 4725]
IDLE1, IDLE2 = [0, 0, 35, 4711], [0, 0, 38, 4718]
Answer = tuple[str, Any]

# What lies there when the operation begins; "" is nothing.
FRESH, PUBLISHED, ODD, EVEN, TORN, HALF_MADE, CLOSED = "", "published", "odd", "even", "torn", "half-made", "closed"

STEPS = [  # the C core: every step of it, and every line of the Python code around it
    ("c", "step", "publish", FRESH),
    ("c", "step", "create", FRESH),
    ("c", "step", "create", HALF_MADE),
    ("c", "step", "create", CLOSED),
    ("c", "step", "close", FRESH),
    ("c", "line", "create", FRESH),
    ("c", "line", "create", PUBLISHED),
    ("c", "line", "close", FRESH),
]
LINES = [  # the twin: every line; where only what it stores matters, every line of its core
    ("py", "line", "publish", FRESH),
    ("py", "line", "create", FRESH),
    ("py", "line", "create", PUBLISHED),
    ("py", "store", "create", ODD),
    ("py", "store", "create", EVEN),
    ("py", "store", "create", HALF_MADE),
    ("py", "store", "create", CLOSED),
    ("py", "line", "close", FRESH),
]
# The fewest points that a walk may have: the words that the operation stores at least.
FEWEST = {"publish": 14, "create": 2 * 14, "close": 11}


class Walker:
    """The program walker.py, running."""

    def __init__(self, armed: dict[str, str]) -> None:
        self.has_c = bool(armed["LOADBOX_KILL_CORE"])
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import walker; walker.main()"], env={**os.environ, **armed}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def walk(self, group: str, which: tuple[str, str, str, str], **more: Any) -> Walk:
        backend, kind, operation, leftover = which
        if backend == "c" and not self.has_c:
            pytest.skip("LOADBOX_TEST_WITHOUT_C is set: the C core is not tested")
        job = {"group": group, "backend": backend, "kind": kind, "operation": operation, "leftover": leftover, "signal": "KILL"}
        job.update(more)
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps(job), file=self.process.stdin, flush=True)
        points = []
        while (line := self.process.stdout.readline()) != "end\n":
            if not line:
                pytest.fail(f"the walker ended:\n{self.process.communicate()[1]}")
            points.append(json.loads(line))
        return Walk(job, points)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def walker(armed: dict[str, str]) -> Iterator[Walker]:
    program = Walker(armed)
    yield program
    program.end()


class Walk:
    """What one run through an operation has shown."""

    def __init__(self, job: dict[str, Any], points: list[dict[str, Any]]) -> None:
        self.points = points
        self.operation, self.leftover, self.stops = job["operation"], job["leftover"], job["signal"] == "STOP"
        self.old, self.new = (IDLE1, IDLE2) if job.get("idle") else (V1, V2)
        if "stall_after" in job:  # too short for this machine to be sure of LIVE
            for point in self.points:
                for moment, seen in _moments(point):
                    for who in ["fresh"] if moment == "stalled" else ["attached", "fresh"]:
                        seen[who] = ["LIVE" if part == "STALLED" else part for part in seen[who]]

    def rounds(self) -> list[list[dict[str, Any]]]:
        """The points, by leftover: each round begins at point 0 and ends with the operation done."""
        rounds: list[list[dict[str, Any]]] = []
        for point in self.points:
            if point["at"] == 0:
                rounds.append([])
            rounds[-1].append(point)
        return rounds

    def check(self) -> None:
        assert not self.faults()
        for points in self.rounds():
            assert [point["done"] for point in points] == [False] * (len(points) - 1) + [True]

    def faults(self) -> list[str]:
        """What is not as it must be, in words."""
        found = [fault for point in self.points for fault in self._torn(point)]
        found += [fault for point in self.points for fault in self._sequence(point)]
        if not found:
            found += [fault for point in self.points for fault in self._taken_over(point)]
            for points in self.rounds():
                if self.stops:
                    found += self._in_order(points, "stopped", self._alive(points[0]))
                else:
                    found += self._in_order(points, "dead", self._dead(points[0]))
        return found

    def _torn(self, point: dict[str, Any]) -> list[str]:
        """Readers of every kind say the same at every moment, and give a value that was published, or none."""
        faults = []
        for moment, seen in _moments(point):
            for who in ("attached", "fresh"):
                state, value, _, row_state, row_value = seen[who]
                if value not in (None, self.old, self.new, V3):
                    faults.append(f"point {point['at']}, {moment}: {who} reads {value} in {state}: torn")
                if value is not None and state not in ("LIVE", "STALLED", "DEAD"):
                    faults.append(f"point {point['at']}, {moment}: {who} gives {value} in {state}")
                if (row_state, row_value) != (state, value if state in ("LIVE", "STALLED") else None):
                    faults.append(f"point {point['at']}, {moment}: {who}'s row is {row_state} {row_value}, not {state} {value}")
        return faults

    def _sequence(self, point: dict[str, Any]) -> list[str]:
        """It never goes back on the same inode, and nobody but a closer takes the inode away."""
        faults = []
        inode = seq = 0
        for moment, seen in _moments(point):
            if seen["inode"] == inode and seen["seq"] < seq:
                faults.append(f"point {point['at']}, {moment}: the sequence went back from {seq} to {seen['seq']}")
            if inode and seen["inode"] != inode and moment != "closed" and self.operation != "close":
                faults.append(f"point {point['at']}, {moment}: inode {inode} was replaced")
            inode, seq = seen["inode"], seen["seq"]
        return faults

    def _taken_over(self, point: dict[str, Any]) -> list[str]:
        """The next writer is SILENT under an epoch of its own, then LIVE, then gone."""
        epoch = point["epoch"]
        expected = {
            "opened": (["SILENT", None, epoch], ["SILENT", None, epoch]),
            "published": (["LIVE", V3, epoch], ["LIVE", V3, epoch]),
            "closed": (["CLOSED", None, epoch], ["ABSENT", None, 0]),
        }
        faults = [f"point {point['at']}: the epoch stayed" for who in ("attached", "fresh") if point["dead"][who][2] == epoch]
        for moment, (attached, fresh) in expected.items():
            for who, answer in (("attached", attached), ("fresh", fresh)):
                if point[moment][who][:3] != answer:
                    faults.append(f"point {point['at']}, {moment}: {who} says {point[moment][who]}, not {answer}")
        if point["closed"]["inode"]:
            faults.append(f"point {point['at']}: the name is still there after close")
        return faults

    def _dead(self, point: dict[str, Any]) -> list[Answer]:
        """What readers may say of a dead writer, in the order in which later deaths may be told."""
        if self.operation == "publish":
            return [("DEAD", self.old), ("DEAD", self.new)]
        if self.operation == "close":
            return [("DEAD", self.old), ("DEAD", None), ("CLOSED", None), ("ABSENT", None)]
        return [self._before(point), ("DEAD", None)]

    def _alive(self, point: dict[str, Any]) -> list[Answer]:
        """As ``_dead``, of a writer that is only stopped: its forerunner's numbers are never given for its own."""
        if self.operation == "publish":
            return [("LIVE", self.old), ("LIVE", self.new)]
        if self.operation == "close":
            return [("LIVE", self.old), ("SILENT", None), ("CLOSED", None), ("ABSENT", None)]
        return [self._before(point), ("SILENT", None)]

    def _before(self, point: dict[str, Any]) -> Answer:
        """What readers said before a creator came."""
        answer = (point["before"]["fresh"][0], point["before"]["fresh"][1])
        if self.leftover in (PUBLISHED, ODD, EVEN, TORN):
            assert answer in (("DEAD", V1), ("DEAD", V2))
        else:
            assert answer == ("CLOSED" if self.leftover == CLOSED else "ABSENT", None)
        return answer

    def _in_order(self, points: list[dict[str, Any]], moment: str, answers: list[Answer]) -> list[str]:
        """Later points tell later answers; the first and the last come up."""
        faults = []
        for who in ("attached", "fresh"):
            told = [(point[moment][who][0], point[moment][who][1]) for point in points if moment in point]
            faults += [f"{moment}, {who}: {answer} at point {at}" for at, answer in enumerate(told) if answer not in answers]
            places = [answers.index(answer) for answer in told if answer in answers]
            if places != sorted(places):
                faults.append(f"{moment}, {who}: answers out of order: {told}")
            last = answers[-2:] if self.operation == "close" else answers[-1:]  # to the attached, what was closed stays CLOSED
            if told[0] != answers[0] or told[-1] not in last:
                faults.append(f"{moment}, {who}: from {told[0]} to {told[-1]}")
        return faults


def _moments(point: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(moment, seen) for moment, seen in point.items() if isinstance(seen, dict)]


def name(which: tuple[str, ...]) -> str:
    return "-".join(part for part in which if part)


@pytest.mark.parametrize("which", STEPS + LINES, ids=name)
def test_killed_at_every_point(which: tuple[str, str, str, str], walker: Walker, group: str) -> None:
    walk = walker.walk(group, which)
    walk.check()
    if which[:3] != ("c", "line", "close"):
        assert len(walk.points) > FEWEST[which[2]]


def test_killed_at_every_step_of_adopting_every_death(walker: Walker, group: str) -> None:
    walk = walker.walk(group, ("c", "step", "create", TORN), every=True)
    walk.check()
    assert len(walk.rounds()) >= 13
    assert {len(points) > 14 + 6 for points in walk.rounds()} == {True}


@pytest.mark.slow
def test_killed_at_every_line_of_adopting_every_death(walker: Walker, group: str) -> None:
    walk = walker.walk(group, ("py", "store", "create", TORN), every=True)
    walk.check()
    assert len(walk.rounds()) >= 13
    assert {len(points) > 14 + 6 for points in walk.rounds()} == {True}


@pytest.mark.parametrize("leftover", [ODD, EVEN])
@pytest.mark.parametrize(("backend", "kind"), [("c", "step"), ("py", "store")])
def test_the_walk_finds_a_missing_repair(backend: str, kind: str, leftover: str, walker: Walker, group: str) -> None:
    walk = walker.walk(group, (backend, kind, "create", leftover), without_repair=True, take_over=False)
    faults = walk.faults()
    assert [fault for fault in faults if fault.endswith(": torn")]


STOPS = [
    ("c", "step", "create", FRESH),
    ("c", "step", "create", ODD),
    ("c", "step", "create", CLOSED),
    ("c", "line", "create", EVEN),
    ("c", "step", "close", FRESH),
    ("py", "store", "create", FRESH),
    ("py", "store", "create", ODD),
    ("py", "store", "create", CLOSED),
    ("py", "store", "close", FRESH),
]


@pytest.mark.parametrize("which", STOPS, ids=name)
def test_stopped_at_every_point(which: tuple[str, str, str, str], walker: Walker, group: str) -> None:
    walk = walker.walk(group, which, signal="STOP")
    walk.check()
    expected = ("CLOSED", None) if which[2] == "close" else ("SILENT", None)
    for point in walk.points:
        assert tuple(point["finished"]["attached"][:2]) == expected  # it went on as if nothing had been


@pytest.mark.parametrize("idle", [False, True], ids=["busy", "idle"])
@pytest.mark.parametrize(("backend", "kind"), [("c", "step"), ("py", "store")])
def test_stopped_in_the_middle_of_a_publish(backend: str, kind: str, idle: bool, walker: Walker, group: str) -> None:
    walk = walker.walk(group, (backend, kind, "publish", FRESH), signal="STOP", stall_after=0.01, idle=idle)
    walk.check()
    states = set()
    for point in walk.points[:-1]:
        at, later = point["stopped"]["attached"], point["stalled"]["attached"]
        odd = point["stalled"]["seq"] % 2
        assert later == ["STALLED" if odd or not idle else "LIVE", at[1], at[2], later[0], at[1]]
        assert point["finished"]["attached"][:2] == ["LIVE", walk.new]
        states.add((odd, later[0]))
    assert len(states) == 2
