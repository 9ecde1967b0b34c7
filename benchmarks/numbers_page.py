"""Write the tables of docs/numbers.md from the files of results, so that the page says what was measured.

python benchmarks/numbers_page.py
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE / "peers"))
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "numbers.md"


def load(name: str) -> dict[str, Any]:
    """One file of results."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def time_of(ns: float | None) -> str:
    """A time, in the unit that fits, to three digits."""
    if ns is None:
        return "-"
    for unit, size in (("ms", 1e6), ("µs", 1e3)):
        if ns >= size:
            return f"{ns / size:,.3g} {unit}" if ns < 1e9 else f"{ns / 1e6:,.0f} ms"
    return f"{ns:.0f} ns"


def table(headings: list[str], rows: list[list[str]], left: int = 1) -> str:
    """Markdown; the first ``left`` columns are words."""
    rule = ["---"] * left + ["---:"] * (len(headings) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [headings, rule, *rows])


def machine() -> str:
    """What it was measured on."""
    found = load("mailbox")
    versions = ", ".join(f"{name} {version}" for name, version in {**found["versions"], **load("peers")["versions"]}.items())
    return f"{found['cores']} cores, {found['machine']}, {found['system']}, CPython {found['python']}; {versions}."


def ratios() -> str:
    """The quick set."""
    rows = []
    for name in ("mailbox", "engines", "piggyback", "reader"):
        for row in load(name)["rows"]:
            limit = row.get("asked_at_most")
            rows.append(
                [row["what"], time_of(row["median_ns"]), row["against"], f"{row['ratio']:.2f}", f"{limit:g}" if limit else ""]
            )
    return table(["call", "median", "against", "ratio", "asked, at most"], rows)


def times_of(figure: float | None, own: float) -> str:
    """A peer's time, and how many times loadbox's."""
    ratio = 1.0 if figure is None else figure / own
    times = f" ({ratio:,.0f}x)" if ratio >= 100 else f" ({ratio:.2g}x)"
    return time_of(figure) + ("" if ratio == 1.0 else times)


def peers() -> str:
    """Times and the ratio to loadbox's."""
    figures = load("peers")["figures"]
    own = figures["LoadboxC"]
    columns = ("publish_ns", "publish_loaded_p99_ns", "read_ns", "read_loaded_p99_ns", "read_all_ns")
    rows = []
    for peer in figures.values():
        cells = [times_of(peer[column], own[column]) for column in columns]
        torn = f"{peer['torn']:,} of {peer['reads']:,}" if peer["torn"] else "none"
        rows.append([peer["name"], *cells, torn])
    headings = ["", "publish", "with a busy reader, p99", "read", "with a busy writer, p99", "read of 64 ranks", "torn reads"]
    return table(headings, rows)


def paced() -> str:
    """The same peers when they are read at a router's pace."""
    from peers_report import PACED

    figures = load("peers")["figures"]
    own = figures["LoadboxC"]
    rows = [[peer["name"], *(times_of(peer[column], own[column]) for column in PACED)] for peer in figures.values()]
    return table(["", *PACED.values()], rows)


def faults() -> str:
    """What is left when a side dies or stops."""

    def words(counts: dict[str, int]) -> str:
        return ", ".join(word if len(counts) == 1 else f"{word} {n} of {sum(counts.values())}" for word, n in counts.items())

    rows = [
        [peer["name"], *(words(peer[key]) for key in ("after_kill", "after_stop", "after_reader_stop"))]
        for peer in load("peers")["figures"].values()
    ]
    return table(["", "writer killed: a reader gets", "writer stopped: a reader gets", "reader stopped: the writer"], rows, left=4)


def verdict() -> str:
    """Where loadbox is ahead as it should be, and where it is not."""
    from peers_report import verdicts

    found = verdicts(load("peers")["figures"])
    behind = [f"* {what}: {ratio:.2f} times loadbox's; the aim was {asked:g}" for what, ratio, asked, met in found if not met]
    sentence = f"Ahead by what was aimed at in {len(found) - len(behind)} of {len(found)} comparisons with peers that do not tear"
    return f"{sentence}." if not behind else f"{sentence}. Not in:\n\n" + "\n".join(behind)


def latency() -> str:
    """Distributions."""
    keys = ("median", "p99", "p999", "maximum")
    rows = [[row["call"], row["beside"], *(time_of(row[key]) for key in keys)] for row in load("latency")["rows"]]
    return table(["call", "beside", "median", "p99", "p99.9", "longest"], rows, left=2)


def propagation() -> str:
    """From the start of a publish to another process."""
    keys = ("least", "p50", "p99", "p99.9")
    rows = [[name, *(time_of(row[key]) for key in keys)] for name, row in load("propagation")["rows"].items()]
    return table(["", *keys], rows)


def staleness() -> str:
    """What a router reads when it decides."""
    keys = {
        "age, p50": "age, ms, p50",
        "age, p99": "p99",
        "requests off, mean": "requests off, mean",
        "pages off, mean": "KV pages off, %, mean",
        "waits, p50": "waits, ms, p50",
    }
    rows = [[name, *(f"{row[key]:.1f}" for key in keys)] for name, row in load("staleness")["rows"].items()]
    return table(["", *keys.values()], rows)


def vllm() -> str:
    """What an iteration of vLLM's scheduler costs more."""

    def more(median: float, low: float, high: float) -> str:
        return f"{(median - 1) * 100:+.1f} ({(low - 1) * 100:+.1f} to {(high - 1) * 100:+.1f})"

    rows = [
        [
            row["measured"], row["mode"], str(row["batch"]), time_of(row["own_ns"]), more(*row["mailbox_ratio"]),
            more(*row["control_ratio"]), "{} ({} to {})".format(*(f"{ns / 1e3:.1f}" for ns in row["cost_ns"])),
        ]
        for row in load("vllm")["rows"]
    ]  # fmt: skip
    headings = ["of what", "scheduling", "batch", "without", "mailbox, % (95 %)", "control, % (95 %)", "mailbox, µs (95 %)"]
    return table(headings, rows, left=2)


PARTS = (machine, ratios, peers, paced, faults, verdict, latency, propagation, staleness, vllm)


def filled(text: str) -> str:
    """The page with every part between its marks."""
    for part in PARTS:
        mark = re.compile(rf"(<!-- {part.__name__} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, times = mark.subn(lambda found, part=part: f"{found[1]}{part()}\n{found[2]}", text)
        if times != 1:
            sys.exit(f"docs/numbers.md has {times} places for {part.__name__}")
    return text


def main() -> None:
    """Write the page."""
    PAGE.write_text(filled(PAGE.read_text()))


if __name__ == "__main__":
    main()
