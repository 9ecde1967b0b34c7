"""``vllm serve -dp 2`` with a tiny model on the CPU: mailboxes, a client that steers by them, and sudden ends.

Everything is polled for, never waited for at a moment: on two cores vLLM can keep this process from running for a second.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loadbox.cli.demo._children import Children
from loadbox.cli.demo.vllm._requests import Request
from loadbox.cli.demo.vllm._server import RANKS, Server
from loadbox.mailbox import MailboxReader, RankState
from loadbox.reader import LoadReader

pytestmark = pytest.mark.slow

START_LIMIT_S = 300.0
LIMIT_S = 120.0


class Watch:
    """Looks at the ranks' mailboxes again and again, and remembers."""

    def __init__(self, group: str) -> None:
        self.readers = [MailboxReader(group, rank) for rank in range(RANKS)]
        self.lives: list[list[tuple[RankState, int]]] = [[] for _ in self.readers]
        """Of each rank: every change of (state, epoch)."""
        self.most = [0] * RANKS
        self.fullest = [0.0] * RANKS

    def look(self) -> None:
        for rank, reader in enumerate(self.readers):
            state = reader.state()
            if not self.lives[rank] or self.lives[rank][-1] != (state, reader.epoch):
                self.lives[rank].append((state, reader.epoch))
            self.most[rank] = max(self.most[rank], self.requests(rank))
            load = reader.read() if state is RankState.LIVE else None
            self.fullest[rank] = max(self.fullest[rank], load.kv_active_pages / load.kv_total_pages if load else 0.0)

    def requests(self, rank: int) -> int:
        reader = self.readers[rank]
        load = reader.read() if reader.state() is RankState.LIVE else None
        return load.num_running + load.num_waiting if load else 0

    def all_idle(self) -> bool:
        return all(reader.state() is RankState.LIVE and reader.read() == (0, 0, 0, 128) for reader in self.readers)

    def states(self) -> set[RankState]:
        return {reader.state() for reader in self.readers}

    def close(self) -> None:
        for reader in self.readers:
            reader.close()


@pytest.fixture
def watch(group: str) -> Iterator[Watch]:
    made = Watch(group)
    yield made
    made.close()


def until(watch: Watch, holds: Callable[[], object], server: Server | None = None, limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while True:
        watch.look()
        if holds():
            return
        if server is not None:
            assert server.ended() is None, server.ended()
        assert time.monotonic() < end, f"{[reader.state() for reader in watch.readers]} {server.last_lines() if server else ''}"
        time.sleep(0.01)


def finish(watch: Watch, server: Server, requests: list[Request]) -> None:
    until(watch, lambda: all(request.done for request in requests), server)
    assert [request.error for request in requests] == [None] * len(requests)
    until(watch, watch.all_idle, server)


def served(server: Server) -> list[int]:
    """Requests that each engine of the server has served, as vLLM itself counts them."""
    counts = [0] * RANKS
    for line in (server.get("/metrics", 30.0) or "").splitlines():
        found = re.match(r'vllm:request_success_total\{.*engine="(\d+)".*\} ([0-9.e+]+)$', line)
        if found:
            counts[int(found[1])] += round(float(found[2]))
    return counts


def test_a_server_of_two_ranks(model: Path, group: str, tmp_path: Path, watch: Watch) -> None:
    assert watch.states() == {RankState.ABSENT}
    with Children() as children:
        server = Server(children, tmp_path, model, group)
        until(watch, lambda: watch.states() == {RankState.LIVE} and server.healthy(), server, START_LIMIT_S)
        for line in children.lines(1.0):
            server.take(line.data)
        assert watch.all_idle()

        # Each mailbox moves with its own requests.
        for rank in range(RANKS):
            watch.most = [0] * RANKS
            requests = [Request(server.port, rank, 300) for _ in range(8)]
            until(watch, lambda rank=rank: watch.most[rank] > 0, server)  # type: ignore[misc] # the default binds it
            finish(watch, server, requests)
            assert 0 < watch.most[rank] <= 8
            assert watch.most[1 - rank] == 0
        assert served(server) == [8, 8]

        # A client that steers by the mailboxes reaches the idle rank, whichever that is.
        for busy in range(RANKS):
            idle = 1 - busy
            watch.fullest = [0.0] * RANKS
            before = served(server)
            with LoadReader(group, RANKS) as reader:
                work = [Request(server.port, reader.choose(f"work {n}", 40, pinned=busy), 900) for n in range(20)]
                until(watch, lambda busy=busy: watch.requests(busy) >= 10, server)  # type: ignore[misc] # as above
                chosen = [reader.choose(f"steered {n}", 40) for n in range(4)]
                assert chosen == [idle] * 4
                steered = [Request(server.port, rank, 300) for rank in chosen]
                until(watch, lambda idle=idle: watch.requests(idle) > 0, server)  # type: ignore[misc] # as above
                finish(watch, server, [*work, *steered])
            after = served(server)
            assert after[idle] - before[idle] == 4
            assert watch.fullest[busy] > 0.9, "the long requests fill the KV cache"

        # Clients that hang up.
        hung = [Request(server.port, 1, 1900) for _ in range(3)]
        until(watch, lambda: watch.requests(1) > 0, server)
        for request in hung:
            request.abort()
        until(watch, watch.all_idle, server)

        assert (Request(server.port, 7, 5).wait() or "").startswith("400"), "a rank that is not there"
        lives = [life[-1] for life in watch.lives]
        server.kill()
        until(watch, lambda: watch.states() == {RankState.DEAD})
        assert [life[-2] for life in watch.lives] == lives
        assert [reader.read() for reader in watch.readers] == [(0, 0, 0, 128)] * RANKS, "last words"
    for life in watch.lives:
        states = [state for state, _ in life]
        assert states[0] is RankState.ABSENT
        assert set(states) <= {RankState.ABSENT, RankState.SILENT, RankState.LIVE, RankState.DEAD}
        assert states.count(RankState.DEAD) == 1


def start_demo(group: str, output: Path) -> subprocess.Popen[bytes]:
    with open(output, "wb") as file:
        return subprocess.Popen(
            [os.path.join(os.path.dirname(sys.executable), "loadbox"), "demo", "--engine", "vllm", "--plain", "--group", group],
            stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def everyone() -> Iterator[tuple[int, int, bytes]]:
    """Pid, process group, and command line with environment, of every process that is no zombie."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, _, of_group, *_ = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
            if state != "Z":
                told = (Path("/proc", pid, what).read_bytes() for what in ("cmdline", "environ"))
                yield int(pid), int(of_group), b" ".join(told)
        except (OSError, ValueError):
            continue


def families(group: str) -> set[int]:
    """Process groups of those who were told the group, in whatever way: of the demo with its keeper, and of the servers."""
    return {of_group for _, of_group, command in everyone() if group.encode() in command} - {os.getpgid(0)}


def living(some: set[int]) -> list[bytes]:
    """The processes of those groups, whatever they call themselves."""
    return [command for _, of_group, command in everyone() if of_group in some]


def test_the_demo_from_end_to_end(group: str, tmp_path: Path, watch: Watch) -> None:
    """What it claims is seen from here, too."""
    output = tmp_path / "output"
    demo = start_demo(group, output)
    seen: set[int] = set()
    try:
        while demo.poll() is None:
            seen |= families(group)
            next_look = time.monotonic() + 1.0
            until(watch, lambda: demo.poll() is not None or time.monotonic() > next_look)  # noqa: B023 # called at once
    finally:
        demo.kill()
        demo.wait()
    text = output.read_text()
    assert demo.returncode == 0, text
    for words in ("all 2 ranks are LIVE", "reached the idle rank 1", "both ranks are DEAD", "under new epochs"):
        assert words in text, text
    for rank, life in enumerate(watch.lives):
        epochs = [epoch for state, epoch in life if state is RankState.LIVE]
        assert len(set(epochs)) == 2, life
        assert RankState.DEAD in [state for state, epoch in life if epoch == epochs[0]], life
        assert watch.most[rank] > 0
    assert len(seen) == 3, "the demo's own, and two servers'"
    assert not living(seen)
    assert not [name for name in os.listdir("/dev/shm") if group in name]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_the_demo_is_ended_and_leaves_no_server(group: str, tmp_path: Path, number: signal.Signals, watch: Watch) -> None:
    output = tmp_path / "output"
    demo = start_demo(group, output)
    try:
        until(watch, lambda: len(families(group)) == 2)
        seen = families(group)
        demo.send_signal(number)
        code = demo.wait(60)
        until(watch, lambda: not living(seen))
    finally:
        demo.kill()
        demo.wait()
    assert code == (-number if number == signal.SIGKILL else 128 + number), output.read_text()
    assert not [name for name in os.listdir("/dev/shm") if group in name]
