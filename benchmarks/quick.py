"""The quick set: every benchmark that gives ratios, and the floor, in one table.

python benchmarks/quick.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

HERE = Path(__file__).resolve().parent
SETS: dict[str, list[str]] = {"mailbox": [], "engines": [], "piggyback": [], "reader": ["--quick"]}


def rows_of(name: str, options: list[str]) -> list[dict[str, Any]]:
    """Run one benchmark, without its own tables."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, str(HERE / f"bench_{name}.py"), "--json", file.name, *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows: list[dict[str, Any]] = json.loads(Path(file.name).read_text())["rows"]
        return rows


def table_of(rows: list[dict[str, Any]]) -> tuple[Table, int]:
    """One table, and how many of the ratios are not as asked."""
    table = Table(title="ratios of medians, side by side in one run", title_justify="left")
    for heading in ("call", "ns", "against", "ratio", "asked", ""):
        table.add_column(heading, justify="right" if heading in ("ns", "ratio", "asked") else "left")
    missed = 0
    for row in rows:
        limit = row.get("asked_at_most")
        met = limit is None or row["ratio"] <= limit
        missed += not met
        asked = "" if limit is None else f"<= {limit:g}"
        verdict = "" if limit is None else "yes" if met else "NOT REACHED"
        table.add_row(row["what"], f"{row['median_ns']:,.0f}", row["against"], f"{row['ratio']:.2f}", asked, verdict)
    return table, missed


def main() -> None:
    """Run everything and print the table."""
    rows: list[dict[str, Any]] = []
    for name, options in track(SETS.items(), description="measuring", console=Console(stderr=True), transient=True):
        rows += rows_of(name, options)
    table, missed = table_of(rows)
    console = Console(width=None if Console().is_terminal else 150)
    console.print(table)
    console.print("everything that was asked is reached" if not missed else f"NOT REACHED: {missed}")


if __name__ == "__main__":
    main()
