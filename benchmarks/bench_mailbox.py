"""The mailbox against unprotected memory, side by side in one run: ratios of medians, and what was asked of them.

    python benchmarks/bench_mailbox.py [--json FILE]

Every statement runs once in each of many short rounds, in turn, so that a noisy machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import statistics
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _measure import Timing, at_a_pace, distribution, ratio, side_by_side
from _results import facts
from rich.console import Console
from rich.table import Table

from loadbox.mailbox import GroupReader, MailboxReader, MailboxWriter, _seqlock

HERE = Path(__file__).resolve().parent
READERS = 8
READER = """
import sys
from loadbox.mailbox import MailboxReader
reader = MailboxReader(sys.argv[1], 0)
print(reader.read(), flush=True)
read = reader.read
while True:
    read()
"""


def floor(*arguments: object) -> dict[str, Any] | None:
    """Run the C program on loadbox.h alone; None where there is no compiler."""
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "floor")
        command = ["cc", "-O2", "-std=gnu11", f"-I{HERE.parent / 'mailbox'}", str(HERE / "floor.c"), "-o", program, "-pthread"]
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        done = subprocess.run([program, *map(str, arguments)], check=True, capture_output=True, text=True)
        result: dict[str, Any] = json.loads(done.stdout)
        return result


def calls(group: str) -> dict[str, Timing]:
    """Publish, read and group reads beside pack_into and unpack_from on a mapping that nobody guards."""
    writer = MailboxWriter(group, 0, 1)
    writer.publish(7, 3, 12345, 99999)
    reader = MailboxReader(group, 0)
    writers = [writer]
    names: dict[str, Any] = {"struct": struct, "mm": mmap.mmap(-1, 4096), "w": writer, "r": reader}
    names.update(a=7, b=3, c=12345, d=99999)
    statements = {
        "pack_into": 'struct.pack_into("<4q", mm, 0, a, b, c, d)',
        "unpack_from": 'struct.unpack_from("<4q", mm, 0)',
        "publish": "w.publish(a, b, c, d)",
        "read": "r.read()",
        "publish, read": "w.publish(a, b, c, d); r.read()",
    }
    for size in (8, 64, 256, 1024):
        ranks = [MailboxWriter(f"{group}-{size}", rank, size) for rank in range(size)]
        for rank in ranks:
            rank.publish(7, 3, 12345, 99999)
        writers += ranks
        names[f"g{size}"] = GroupReader(f"{group}-{size}")
        names[f"o{size}"] = names[f"g{size}"].read()
        statements[f"group {size}"] = f"g{size}.read(o{size})"
    try:
        return side_by_side(statements, names)
    finally:
        for each in writers:
            each.close()


Row = tuple[str, float, str, float, "float | None"]


def above_the_floor(called: dict[str, float], bare: dict[str, Any] | None, trip: dict[str, Any] | None) -> list[Row]:
    """How far calls from Python are from the bare latch, and from one cache line's way to another core and back."""
    rows: list[Row] = []
    for what, ns in called.items():
        if bare:
            rows.append((f"{what}, from Python", ns, "the bare latch in C", ns / bare[what.split(",")[0]], None))
        if trip and trip["round_trip"]:
            rows.append((f"{what}, from Python", ns, "a cache line's round trip", ns / trip["round_trip"], None))
    if trip and trip["round_trip"]:
        rows.append(("a cache line to another core and back", trip["round_trip"], "same", 1.0, None))
    return rows


def at_a_routers_pace(group: str) -> list[Row]:
    """A group read every 10 and every 150 ms against one after the other: cold caches, and looks whether writers live are due."""
    rows: list[Row] = []
    for size in (8, 64, 256):
        with contextlib.ExitStack() as stack:
            for rank in range(size):
                stack.enter_context(MailboxWriter(f"{group}-{size}", rank, size)).publish(7, 3, 12345, 99999)
            reader = stack.enter_context(GroupReader(f"{group}-{size}", size))
            out = reader.read()
            hot = distribution(lambda: reader.read(out), "call()").median  # noqa: B023
            for every_s, calls in ((0.01, 200), (0.15, 20)):
                ns = statistics.median(
                    at_a_pace(lambda: reader.read(out), every_s=every_s, calls=calls // 5)  # noqa: B023
                    for _ in range(5)
                )
                rows.append((f"group read, {size} ranks, every {every_s * 1e3:.0f} ms", ns, "without pause", ns / hot, None))
    return rows


def publish_under_readers(group: str) -> tuple[float, float]:
    """Median ns of a publish with no reader, and with READERS processes that read without pause."""
    with MailboxWriter(group, 0, 1) as writer:
        writer.publish(7, 3, 12345, 99999)
        names = {"w": writer}
        alone = side_by_side({"publish": "w.publish(7, 3, 12345, 99999)"}, names)["publish"].median_ns
        command = [sys.executable, "-c", READER, group]
        readers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(READERS)]
        try:
            for child in readers:
                assert child.stdout is not None
                child.stdout.readline()
            return alone, side_by_side({"publish": "w.publish(7, 3, 12345, 99999)"}, names)["publish"].median_ns
        finally:
            for child in readers:
                child.kill()
                child.communicate()


def main() -> None:
    """Measure, print one table, and write JSON if asked."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", metavar="FILE", help="also write the figures there")
    arguments = options.parse_args()
    group = f"bench-{os.getpid()}"
    t = calls(group)
    rows: list[Row] = [
        ("publish", t["publish"].median_ns, "pack_into", ratio(t["publish"], t["pack_into"]), 0.65),
        ("read, unchanged", t["read"].median_ns, "unpack_from", ratio(t["read"], t["unpack_from"]), 0.3),
    ]
    new = ratio(t["publish, read"], t["unpack_from"], minus=t["publish"])
    rows.append(("read, each a new snapshot", t["publish, read"].median_ns - t["publish"].median_ns, "unpack_from", new, 1.2))
    for size, limit in ((8, None), (64, 6.0), (256, 20.0), (1024, None)):
        timing = t[f"group {size}"]
        rows.append((f"group read, {size} ranks", timing.median_ns, "unpack_from", ratio(timing, t["unpack_from"]), limit))
    bare = floor("latch")
    if bare:
        for prefix, how in (("", "called"), ("inlined_", "inlined")):
            copy = bare[f"{prefix}copy_48_bytes"]
            for what in ("publish", "read"):
                ns = bare[prefix + what]
                rows.append((f"bare latch in C, {what}, {how}", ns, "48-byte copy", ns / copy, None if prefix else 3.0))
    called = {"publish": t["publish"].median_ns, "read, each a new snapshot": rows[2][1]}
    rows += above_the_floor(called, bare, floor("trip"))
    rows += at_a_routers_pace(f"{group}-pace")
    alone, crowded = publish_under_readers(f"{group}-crowd")
    rows.append((f"publish, {READERS} readers at full speed", crowded, "publish alone", crowded / alone, None))
    line = floor("contend", 1, READERS)
    if line:
        rows.append((f"bare cache line in C, {READERS} readers", line["bare_line"], "same", 1.0, None))
        rows.append((f"bare latch in C, {READERS} readers", line["latch"], "bare line", line["latch"] / line["bare_line"], None))
    show(rows, t)
    if arguments.json:
        fields = ("what", "median_ns", "against", "ratio", "asked_at_most")
        figures = [dict(zip(fields, row, strict=True)) for row in rows]
        Path(arguments.json).write_text(json.dumps({**facts(), "rows": figures}, indent=1) + "\n")


def show(rows: list[Row], t: dict[str, Timing]) -> None:
    """Print the table; where more was asked than is reached it says so."""
    base = f"pack_into {t['pack_into'].median_ns:.0f} ns, unpack_from {t['unpack_from'].median_ns:.0f} ns"
    table = Table(title=f"mailbox, core {_seqlock.BACKEND!r} ({base})", title_justify="left")
    for name, justify in (
        ("", "left"),
        ("median ns", "right"),
        ("against", "left"),
        ("ratio", "right"),
        ("asked", "right"),
        ("", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for what, ns, against, value, limit in rows:
        verdict = "" if limit is None else "yes" if value <= limit else "NOT REACHED"
        table.add_row(what, f"{ns:.1f}", against, f"{value:.2f}", "" if limit is None else f"<= {limit:g}", verdict)
    Console().print(table)


if __name__ == "__main__":
    main()
