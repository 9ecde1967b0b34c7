"""docs/numbers.md says what the results say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_filled_from_the_results() -> None:
    program = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import numbers_page
text = numbers_page.PAGE.read_text()
sys.exit(text != numbers_page.filled(text))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"run benchmarks/numbers_page.py\n{done.stderr}"
