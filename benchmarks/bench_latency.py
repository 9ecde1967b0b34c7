"""What each call takes, as a distribution: idle, beside a writer at 1 kHz or at full speed, and beside 1, 8 and 64 readers.

python benchmarks/bench_latency.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _measure import Distribution, distribution
from _results import facts
from rich.console import Console
from rich.table import Table

from loadbox.mailbox import GroupReader, MailboxReader, MailboxWriter
from loadbox.reader import LoadReader

SIZES = (8, 64, 256, 1024)
WRITER = """
import sys, time
from loadbox.mailbox import MailboxWriter
group, pause = sys.argv[1], float(sys.argv[2])
writers = [MailboxWriter(group, rank, int(sys.argv[3])) for rank in range(int(sys.argv[3]))]
for writer in writers:
    writer.publish(7, 3, 12345, 99999)
print("up", flush=True)
publish = writers[0].publish
i = 0
while True:
    i += 1
    publish(i & 1023, 3, 12345, 99999)
    if pause:
        time.sleep(pause)
"""
READER = """
import sys
from loadbox.mailbox import MailboxReader
readers = [MailboxReader(sys.argv[1], 0).read for _ in range(int(sys.argv[2]))]
readers[0]()
print("up", flush=True)
while True:
    for read in readers:
        read()
"""


@contextlib.contextmanager
def beside(program: str, *arguments: object) -> Iterator[None]:
    """Another process at work."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        yield
    finally:
        child.kill()
        child.communicate()


def publishing(group: str, seconds: float) -> Iterator[tuple[str, str, Distribution]]:
    """Publish, alone and beside readers."""
    with MailboxWriter(group, 0, 1) as writer:
        statement = "call(7, 3, 12345, 99999)"
        yield "publish", "idle", distribution(writer.publish, statement, seconds=seconds)
        for processes, readers in ((1, 1), (8, 1), (8, 8)):
            with contextlib.ExitStack() as stack:
                for _ in range(processes):
                    stack.enter_context(beside(READER, group, readers))
                title = f"{processes * readers} reader{'s' if processes * readers > 1 else ''}"
                yield "publish", title, distribution(writer.publish, statement, seconds=seconds)


def reading(group: str, seconds: float) -> Iterator[tuple[str, str, Distribution]]:
    """Reads of one rank and of groups, and choices, beside a writer."""
    for title, pause in (("writer at 1 kHz", 0.001), ("writer at full speed", 0)):
        with beside(WRITER, group, pause, 1), MailboxReader(group, 0) as reader:
            yield "read", title, distribution(reader.read, "call()", seconds=seconds)
    with MailboxWriter(group, 0, 1) as writer, MailboxReader(group, 0) as reader:
        writer.publish(7, 3, 12345, 99999)
        yield "read", "idle", distribution(reader.read, "call()", seconds=seconds)
    for size in SIZES:
        for title, pause in (("writer at 1 kHz", 0.001), ("writer at full speed", 0.0)):
            with beside(WRITER, f"{group}-{size}", pause, size), GroupReader(f"{group}-{size}", size) as ranks:
                out = ranks.read()
                yield f"group read, {size}", title, distribution(lambda: ranks.read(out), "call()", seconds=seconds)  # noqa: B023
    for size in SIZES:
        with (
            beside(WRITER, f"{group}-{size}", 0.001, size),
            LoadReader(f"{group}-{size}", size, seed=1, board=False) as view,
        ):
            ids = map(str, itertools.count())

            def choose() -> None:
                request = next(ids)  # noqa: B023
                view.choose(request)
                view.finished(request)

            yield f"choose and finish, {size}", "writer at 1 kHz", distribution(choose, "call()", seconds=seconds)


def clock(seconds: float) -> Iterator[tuple[str, str, Distribution]]:
    """Nothing, timed as the others are."""
    yield "two looks at the clock", "-", distribution(lambda: None, "pass", seconds=seconds)


def main() -> None:
    """Measure, print the table, and write JSON if asked."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="short rounds")
    options.add_argument("--json", metavar="FILE", help="also write the figures there")
    arguments = options.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    seconds = 0.1 if arguments.quick else 1.0
    group = f"bench-{os.getpid()}"
    table = Table(
        title="ns a call",
        title_justify="left",
        caption="less what two looks at the clock take at the median; their own tail, the last row, is in all",
    )
    for name in ("call", "beside", "median", "p99", "p99.9", "max"):
        table.add_column(name, justify="left" if name in ("call", "beside") else "right")
    rows: list[dict[str, Any]] = []
    try:
        for call, title, found in itertools.chain(publishing(group, seconds), reading(group, seconds), clock(seconds)):
            times = (found.median, found.p99, found.p999, found.maximum)
            table.add_row(call, title, *("-" if ns is None else f"{ns:,.0f}" for ns in times))
            rows.append({"call": call, "beside": title, **asdict(found)})
    finally:
        for path in Path("/dev/shm").glob(f"loadbox.{group}*"):
            path.unlink()
    Console(width=110).print(table)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({**facts(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
