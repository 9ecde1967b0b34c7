"""What a user could pick instead of loadbox, side by side in one run.

    python benchmarks/peers [--quick] [--passes N] [--json FILE]

Every peer runs in processes of its own, ``--passes`` times in turn; figures are medians over the passes.  Peers that are not
installed are left out with a word; ``make peers`` and ``make bench-full`` install them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from catalogue import PEERS, peer_named
from harness import Effort, measure  # which adds the folder above to the path
from peer import Missing
from peers_report import show

HERE = Path(__file__).resolve().parent


def one(name: str, effort: Effort, seed: int) -> dict[str, Any]:
    """One pass of one peer, in this process."""
    try:
        return measure(peer_named(name), effort, seed).as_dict()
    except Missing as missing:
        return {"missing": str(missing)}


def in_a_process(name: str, effort: Effort, seed: int) -> dict[str, Any]:
    """One pass of one peer in a process of its own; what goes wrong there is a word, too."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(HERE),
        "--one",
        name,
        "--seed",
        str(seed),
        "--effort",
        json.dumps(asdict(effort)),
    ]
    env = {**os.environ, "LOADBOX_PURE_PYTHON": "1" if name == "LoadboxPython" else ""}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    except subprocess.TimeoutExpired:
        return {"missing": "it did not end within 300 s"}
    if done.returncode:
        return {"missing": f"it failed: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def together(passes: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the times, sums of the counts."""
    merged: dict[str, Any] = {}
    for key, first in passes[0].items():
        values = [each[key] for each in passes if each[key] is not None]
        if isinstance(first, dict):
            merged[key] = {word: sum(each.get(word, 0) for each in values) for word in sorted({w for each in values for w in each})}
        elif key.endswith("_ns"):
            merged[key] = statistics.median(values) if values else None
        elif key in ("torn", "reads"):
            merged[key] = sum(values)
        else:
            merged[key] = first
    return merged


def main() -> None:
    """Measure, print the table, and write JSON if asked."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--quick", action="store_true", help="only the closest peers and the unprotected ones, one pass, few trials"
    )
    options.add_argument("--passes", type=int, default=2, metavar="N")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--json", metavar="FILE", help="also write the figures there")
    options.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    options.add_argument("--effort", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.one, Effort(**json.loads(arguments.effort)), arguments.seed)))
        return
    effort = Effort(trials=2, paced=4) if arguments.quick else Effort(trials=4, paced=10)
    kinds = [kind for kind in PEERS if kind.quick or not arguments.quick]
    passes: dict[str, list[dict[str, Any]]] = {kind.__name__: [] for kind in kinds}
    missing: dict[str, str] = {}
    for turn in range(1 if arguments.quick else arguments.passes):
        for kind in kinds:
            if kind.__name__ in missing:
                continue
            print(f"pass {turn + 1}: {kind.name}", file=sys.stderr, flush=True)
            found = in_a_process(kind.__name__, effort, arguments.seed + turn)
            if "missing" in found:
                missing[kind.__name__] = found["missing"]
            else:
                passes[kind.__name__].append(found)
    figures = {name: together(each) for name, each in passes.items() if each}
    show(figures, {peer_named(name).name: why for name, why in missing.items()})
    if arguments.json:
        from _results import facts  # of the folder above, which the harness has put on the path

        made_with = facts(seed=arguments.seed, passes=arguments.passes)
        Path(arguments.json).write_text(json.dumps({**made_with, "missing": missing, "figures": figures}, indent=1) + "\n")
    if "LoadboxC" not in figures:
        sys.exit("loadbox itself could not be measured")


if __name__ == "__main__":
    main()
