"""How long after the start of a publish another process sees the value: the mailbox, and each lane of the piggyback.

    python benchmarks/bench_propagation.py [--quick] [--json FILE]

The value is the time of CLOCK_MONOTONIC at which its publish began.  The mailbox's reader looks without pause, on another core if
there is one; a frontend that reads on demand waits for nothing, so this is the most that a look can be behind.  The lanes' reader
blocks on its socket and decodes a batch of 64 requests, as a frontend does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import zmq
from _results import facts
from bench_piggyback import make_batch
from rich.console import Console
from rich.table import Table

from loadbox.mailbox import MailboxReader
from loadbox.piggyback import decode_batch

MAILBOX = """
import os, sys, time
from loadbox.mailbox import MailboxWriter
try:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
except OSError:
    pass
writer = MailboxWriter(sys.argv[1], 0, 1)
print("up", flush=True)
pause = float(sys.argv[2])
while True:
    time.sleep(pause)
    writer.publish(time.monotonic_ns(), 0, 1, 2)
"""
LANE = """
import sys, time
import zmq
sys.path.insert(0, sys.argv[3])
from bench_piggyback import make_batch
from loadbox.piggyback import MsgpackSendSocket
socket = zmq.Context().socket(zmq.PUSH)
socket.connect(sys.argv[1])
send = MsgpackSendSocket(socket)
batch = make_batch(64)
print("up", flush=True)
pause = float(sys.argv[2])
while True:
    time.sleep(pause)
    send.send_pyobj(batch, load=(time.monotonic_ns(), 0, 1, 2))
"""
PAUSE_S = 0.001


@contextlib.contextmanager
def _child(program: str, *arguments: object) -> Any:
    child = subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        yield
    finally:
        child.kill()
        child.communicate()


def mailbox(seconds: float) -> list[int]:
    """ns from the start of a publish to a read that has it, in another process."""
    group = f"bench-{os.getpid()}"
    mine = os.sched_getaffinity(0)
    taken = []
    try:
        os.sched_setaffinity(0, {min(mine)})
        with _child(MAILBOX, group, PAUSE_S), MailboxReader(group, 0) as reader:
            read, clock = reader.read, time.monotonic_ns
            last = None
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                for _ in range(1000):
                    found = read()
                    if found is not last:
                        seen = clock()
                        if last is not None and found is not None:
                            taken.append(seen - found[0])
                        last = found
    finally:
        os.sched_setaffinity(0, mine)
        for path in Path("/dev/shm").glob(f"loadbox.{group}.*"):
            path.unlink()
    return taken


def lane(transport: str, seconds: float) -> list[int]:
    """ns from the start of a send, with its load sampled, to the decoded batch in another process."""
    make_batch(1)  # the child imports it from here
    taken = []
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.linger = 0
        if transport == "tcp":
            address = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        else:
            address = f"ipc://{folder}/lane"
            socket.bind(address)
        with _child(LANE, address, PAUSE_S, Path(__file__).resolve().parent):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if socket.poll(1000):
                    batch = decode_batch(socket.recv())
                    taken.append(time.monotonic_ns() - batch.num_running)
    return taken[10:]


def summary(taken: list[int]) -> dict[str, Any]:
    """Quantiles, and the curve that the plot draws."""
    taken = sorted(taken)

    def quantile(part: float) -> float:
        return float(taken[min(len(taken) - 1, int(len(taken) * part))])

    figures: dict[str, Any] = {"samples": len(taken), "least": quantile(0), "p50": quantile(0.5), "p99": quantile(0.99)}
    return {**figures, "p99.9": quantile(0.999), "most": quantile(1), "curve": [quantile(i / 200) for i in range(200)]}


def main() -> None:
    """Measure, print the table, and write JSON if asked."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="a second each")
    options.add_argument("--json", metavar="FILE", help="also write the figures there")
    arguments = options.parse_args()
    seconds = 1.0 if arguments.quick else 10.0
    found = {
        "mailbox": summary(mailbox(seconds)),
        "piggyback, ipc": summary(lane("ipc", seconds)),
        "piggyback, tcp": summary(lane("tcp", seconds)),
    }
    table = Table(title="µs from the start of a publish until another process has the value", title_justify="left")
    for name in ("", "least", "p50", "p99", "p99.9", "most", "samples"):
        table.add_column(name, justify="right" if name else "left")
    for name, figures in found.items():
        times = (f"{figures[key] / 1000:,.2f}" for key in ("least", "p50", "p99", "p99.9", "most"))
        table.add_row(name, *times, f"{figures['samples']:,}")
    Console(width=100).print(table)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({**facts(), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
