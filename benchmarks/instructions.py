"""Instructions of a bare publish and a bare read, counted by callgrind: the same whatever else the machine does.

    python benchmarks/instructions.py [--header FOLDER] [--update]

Compares with the figures in results/instructions.json, and fails if one has grown by more than 5 %.  They hold for the compiler
that they were made with; with another one it says so and compares nothing.  ``--update`` writes them anew.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
FIGURES = HERE / "results" / "instructions.json"
LIMIT = 1.05
CALLS = 100_000


def compiler() -> str:
    """Name, version and machine; the figures are for these."""
    said = subprocess.run(["cc", "--version"], check=True, capture_output=True, text=True).stdout.splitlines()[0]
    return f"{said}, {platform.machine()}"


def counted(program: str, what: str, calls: int) -> int:
    """Instructions of a whole run."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", program, "count", what, str(calls)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if found is None:
        raise RuntimeError(f"valgrind did not say what it collected: {done.stderr}")
    return int(found[1])


def count(header: Path) -> dict[str, float]:
    """Instructions a call, its loop and its call included."""
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/floor"
        command = ["cc", "-O2", "-std=gnu11", f"-I{header}", str(HERE / "floor.c"), "-o", program, "-pthread"]
        subprocess.run(command, check=True)
        return {what: (counted(program, what, CALLS) - counted(program, what, 0)) / CALLS for what in ("publish", "read")}


def main() -> None:
    """Count and compare."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--header", type=Path, default=HERE.parent / "mailbox", metavar="FOLDER", help="where loadbox.h is")
    options.add_argument("--update", action="store_true", help="write the committed figures anew")
    arguments = options.parse_args()
    for tool in ("cc", "valgrind"):
        if shutil.which(tool) is None:
            sys.exit(f"NOTHING was counted: {tool} is not installed")
    found = count(arguments.header)
    if arguments.update:
        FIGURES.write_text(json.dumps({"compiler": compiler(), "instructions_a_call": found}, indent=1) + "\n")
        return
    kept = json.loads(FIGURES.read_text())
    same = kept["compiler"] == compiler()
    for what, instructions in found.items():
        before = kept["instructions_a_call"][what]
        print(f"{what}: {instructions:.2f} instructions a call, {before:.2f} with {kept['compiler']}")
    if not same:
        print(f"NOTHING was compared: this is {compiler()}")
        return
    grown = [what for what, instructions in found.items() if instructions > LIMIT * kept["instructions_a_call"][what]]
    if grown:
        sys.exit(f"more than 5 % over the committed figures: {', '.join(grown)}; make it faster, or say why not with --update")


if __name__ == "__main__":
    main()
