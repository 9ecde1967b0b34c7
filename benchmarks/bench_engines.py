"""What an engine pays for the promise that nothing of the mailbox reaches it: ratios in one run.

python benchmarks/bench_engines.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from _measure import ratio, side_by_side
from _results import facts
from rich.console import Console
from rich.table import Table

from loadbox.engines import LoadPublisher
from loadbox.engines.tokenspeed import MailboxSink
from loadbox.mailbox import MailboxWriter


def main() -> None:
    """Measure, print the table, and write JSON if asked."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", metavar="FILE", help="also write the figures there")
    arguments = options.parse_args()
    group = f"bench-engines-{os.getpid()}"
    with MailboxWriter(group, 0) as writer, LoadPublisher(group, 1) as publisher:
        sink = MailboxSink(group, 2)
        names = {"publish": writer.publish, "safely": publisher.publish, "observe": sink.observe}
        load = "17, 3, 4200, 25000"
        timings = side_by_side(
            {
                "bare": f"publish({load})",
                "LoadPublisher.publish": f"safely({load})",
                "MailboxSink.observe (TokenSpeed)": "observe((17, 3, 4200, 4300, 25000))",
            },
            names,
            rounds=201,
            round_s=0.001,
        )
        sink.close()
    table = Table("call", "ns", "of MailboxWriter.publish", title="Adapters: the cost of an iteration's publish")
    bare = timings.pop("bare")
    table.add_row("MailboxWriter.publish", f"{bare.median_ns:.0f}", "1")
    rows = []
    for name, timing in timings.items():
        table.add_row(name, f"{timing.median_ns:.0f}", f"{ratio(timing, bare):.2f}")
        against = "MailboxWriter.publish"
        rows.append({"what": name, "median_ns": timing.median_ns, "against": against, "ratio": ratio(timing, bare)})
    Console().print(table)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({**facts(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
