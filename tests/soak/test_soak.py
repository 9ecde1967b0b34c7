"""The soak finds what it is there to find: each kind of fault, put in on purpose, and nothing where there is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).resolve().parents[2] / "proof" / "soak" / "run"
FOUND = {
    "torn": "a torn read",
    "wrong-rank": "another rank's load",
    "older": "a load older than what was published before the read began",
    "former-life": "a former life's load",
    "silent-death": "rank 5 ended by itself",
    "leak-descriptor": "descriptors, and had",
    "leak-memory": "has grown by",
    "leak-board": "files are left",
    "forget": "requests in flight after their end",
}


def soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LOADBOX_PURE_PYTHON": ""}
    return subprocess.run(
        [sys.executable, str(SOAK), *arguments], capture_output=True, text=True, timeout=240, env=environment, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("inject", FOUND)
def test_it_finds_what_is_put_in(inject: str) -> None:
    done = soak("--seconds", "6", "--seed", "3", "--quiet", "--inject", inject)
    assert done.returncode == 1, done.stdout + done.stderr
    faults = [line for line in done.stdout.splitlines() if line.startswith("soak: FAULT")]
    assert any(FOUND[inject] in line for line in faults), done.stdout


@pytest.mark.slow
def test_it_finds_nothing_where_nothing_is_and_its_schedule_comes_again() -> None:
    one, two = (soak("--seconds", "6", "--seed", "11") for _ in range(2))
    schedules = [re.findall(r"^ +[\d.]+ s  .*$", done.stdout, re.MULTILINE) for done in (one, two)]
    assert (one.returncode, two.returncode) == (0, 0), one.stdout + two.stdout + one.stderr + two.stderr
    assert schedules[0] == schedules[1]
    assert len(schedules[0]) > 5
