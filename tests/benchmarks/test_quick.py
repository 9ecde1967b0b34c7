"""The quick benchmarks run, and the count of instructions finds a slower latch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

pytestmark = pytest.mark.slow  # `make instructions` runs them


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *map(str, arguments)], capture_output=True, text=True, timeout=200
    )


def test_instructions(tmp_path: Path) -> None:
    if shutil.which("valgrind") is None:
        if os.environ.get("LOADBOX_REQUIRE_C"):
            pytest.fail("valgrind is not installed")
        pytest.skip("valgrind is not installed")
    header = (ROOT / "mailbox" / "loadbox.h").read_text()
    same = run("instructions.py")
    assert same.returncode == 0, same.stderr
    if "NOTHING was compared" in same.stdout:
        pytest.skip(same.stdout)
    twice = "    lbx_words_store(&s->b, v);\n}"
    assert header.count(twice) == 1
    (tmp_path / "loadbox.h").write_text(header.replace(twice, "    lbx_words_store(&s->b, v);\n" + twice))
    slower = run("instructions.py", "--header", tmp_path)
    assert slower.returncode == 1
    assert "more than 5 % over the committed figures: publish;" in slower.stderr


@pytest.mark.parametrize("script", ["bench_propagation.py", "bench_staleness.py"])
def test_a_benchmark_runs(tmp_path: Path, script: str) -> None:
    done = run(script, "--quick", "--json", tmp_path / "found.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["rows"]
    assert found["versions"]["loadbox"]


def test_staleness_is_as_it_must_be(tmp_path: Path) -> None:
    """Sooner told is less wrong, and who is asked between two iterations keeps the asker waiting."""
    run("bench_staleness.py", "--quick", "--json", tmp_path / "found.json")
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    off = [rows[way]["requests off, mean"] for way in ("mailbox", "coordinator", "every ten", "scrape")]
    assert off == sorted(off)
    assert off[0] < off[1]
    assert rows["mailbox"]["age, p99"] < rows["piggyback"]["age, p99"]
    assert rows["poll"]["waits, p50"] > 0 == rows["mailbox"]["waits, p99"]
