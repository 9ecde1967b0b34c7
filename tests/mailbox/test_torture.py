"""A writer flat out, readers at full speed in processes of their own, C and Python on either side: no read is ever torn.

Every load is (n, 2n+1, 3n+2, 7n+5) and n only grows, so that words of two publishes never go together.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

import pytest

DIFFERENT = 2000  # so many publishes must have been seen at least: a writer that stands still cannot be torn

# Without a step of Python between two publishes.  "gentle": bursts and pauses of some microseconds, both random; the twin's read
# takes one, and finds no gap between the publishes of the C core.
WRITER = """
    import collections, itertools, random, sys, time
    from loadbox.mailbox import MailboxWriter

    group, gentle, chance = sys.argv[1], sys.argv[2] == "gentle", random.Random(int(sys.argv[3]))
    writer = MailboxWriter(group, 0, 1)
    count = itertools.count
    publishes = itertools.starmap(writer.publish, zip(count(1), count(3, 2), count(5, 3), count(12, 7)))
    next(publishes)
    print("ready", flush=True)
    while True:
        collections.deque(itertools.islice(publishes, chance.randrange(1, 40) if gentle else 1000), maxlen=0)
        if gentle:
            end = time.perf_counter_ns() + chance.randrange(8000)
            while time.perf_counter_ns() < end:
                pass
"""

JUDGE = """
    import json, sys, time

    group, wanted, different = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    started = time.monotonic()
    reads = fresh = last_n = 0
    torn = []

    def judge(n, waiting, active, total):
        global fresh, last_n
        fresh += 1
        if (waiting, active, total) != (2 * n + 1, 3 * n + 2, 7 * n + 5) or n < last_n:
            torn.append((last_n, n, waiting, active, total))
        last_n = n

    def enough():
        return len(torn) > 10 or (reads >= wanted and fresh >= different) or time.monotonic() - started > float(sys.argv[4])

    def done():
        print(json.dumps({"reads": reads, "fresh": fresh, "torn": torn}))
"""

READERS = {
    "MailboxReader": """
    from loadbox.mailbox import MailboxReader

    reader = MailboxReader(group, 0)
    read = reader.read
    last = None
    while not enough():
        for _ in range(10_000):
            snapshot = read()
            if snapshot is not last:
                judge(*snapshot)
                last = snapshot
        reads += 10_000
    done()
""",
    "GroupReader": """
    import struct
    from loadbox.mailbox import GroupReader, RankState

    reader = GroupReader(group, 1, stall_after=float("inf"))
    out = reader.read()
    memory = memoryview(out.view("u1"))
    unpack = struct.Struct("<6qib?").unpack_from
    first = unpack(memory)
    published = 0
    read, last = reader.read, None
    while not enough():
        for _ in range(10_000):
            read(out)
            row = memory.tobytes()
            if row != last:
                *load, published_ns, epoch, rank, state, usable = unpack(row)
                judge(*load)
                if published_ns < published or (epoch, rank, state, usable) != (first[5], 0, RankState.LIVE, True):
                    torn.append((published_ns - published, epoch, rank, state, usable))
                last, published = row, published_ns
        reads += 10_000
    done()
""",
}

# What the latch is there for: copy A as it lies there, without a look at the sequence.
WEAKENED = """
    import mmap

    with open(f"/dev/shm/loadbox.{group}.0", "rb") as file:
        words = memoryview(mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)).cast("q")
    last = None
    while not enough():
        for _ in range(10_000):
            load = words[17:21].tolist()
            if load != last:
                judge(*load)
                last = load
        reads += 10_000
    done()
"""


def torture(
    children: Any, group: str, backends: tuple[str, str], readers: dict[str, str], reads: int, seconds: float
) -> list[dict[str, Any]]:
    """Let all ``readers`` read at once; what each saw."""
    if "c" in backends and os.environ.get("LOADBOX_TEST_WITHOUT_C"):
        pytest.skip("LOADBOX_TEST_WITHOUT_C is set: the C core is not tested")
    seed = random.randrange(1 << 32)
    print(f"seed {seed}", file=sys.stderr)  # shown if the test fails
    writer = children.start(WRITER, group, "gentle" if backends[1] == "py" else "flat out", seed, backend=backends[0])
    assert writer.stdout.readline() == "ready\n"
    programs = [
        children.start(JUDGE + program, group, wanted(backends, reader, reads), DIFFERENT, seconds, backend=backends[1])
        for reader, program in readers.items()
    ]
    results = []
    for program in programs:
        out, err = program.communicate()
        assert program.returncode == 0, err
        results.append(json.loads(out))
    assert writer.poll() is None, writer.communicate()[1]
    return results


def wanted(backends: tuple[str, str], reader: str, reads: int) -> int:
    """The twin's GroupReader takes several microseconds a read: a fifth of the reads is its share."""
    return reads // 5 if (backends[1], reader) == ("py", "GroupReader") else reads


PAIRS = pytest.mark.parametrize(
    "backends", [("c", "c"), ("c", "py"), ("py", "c"), ("py", "py")], ids=lambda pair: "-to-".join(pair)
)


def check(children: Any, group: str, backends: tuple[str, str], reads: int, seconds: float) -> None:
    results = torture(children, group, backends, READERS, reads, seconds)
    for reader, result in zip(READERS, results, strict=True):
        assert result["torn"] == []
        assert result["reads"] >= wanted(backends, reader, reads)
        assert result["fresh"] >= DIFFERENT


@PAIRS
def test_a_million_reads(backends: tuple[str, str], children: Any, group: str) -> None:
    check(children, group, backends, 1_000_000, seconds=100)


@pytest.mark.slow
@PAIRS
def test_ten_million_reads(backends: tuple[str, str], children: Any, group: str) -> None:
    check(children, group, backends, 10_000_000, seconds=200)


@pytest.mark.parametrize("writer", ["c", "py"])
def test_without_the_latch_it_tears(writer: str, children: Any, group: str) -> None:
    [result] = torture(children, group, (writer, "c"), {"weakened": WEAKENED}, 1 << 62, seconds=60)
    assert len(result["torn"]) > 10
    assert result["fresh"] > 10
