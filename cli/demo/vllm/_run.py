"""The vLLM demo: what it does with the server, step by step, and what has to be seen before the next."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from loadbox.cli._survey import RankLook, Survey
from loadbox.cli.demo._children import Children
from loadbox.cli.demo._run import DemoError, private_directory, signals
from loadbox.cli.demo.vllm._requests import Request
from loadbox.cli.demo.vllm._screen import Scene, Screen
from loadbox.cli.demo.vllm._server import RANKS, Server
from loadbox.cli.demo.vllm._tiny_llama import make_tiny_llama
from loadbox.mailbox import RankState, _names, _segment
from loadbox.reader import LoadReader

__all__ = ["run"]

_TICK_S = 0.03
_START_LIMIT_S = 300.0
_STEP_LIMIT_S = 120.0


class _Stopped(Exception):
    """A signal has come."""


class _Demo:
    """One run: the server, its ranks as a third process sees them, and the steps."""

    def __init__(self, group: str, folder: Path, children: Children, screen: Screen, stopped: Callable[[], bool]) -> None:
        self.scene = Scene(group)
        self.server: Server | None = None
        self.survey = Survey((group,))
        self._folder = folder
        self._children = children
        self._screen = screen
        self._stopped = stopped
        self._start = time.monotonic()

    # Watching

    def look(self) -> list[RankLook]:
        """The ranks as their mailboxes are now."""
        found = {look.rank: look for each in self.survey.look() for look in each.ranks}
        ranks = [found.get(rank) or RankLook(self.scene.group, rank, RankState.ABSENT) for rank in range(RANKS)]
        self.scene.ranks = ranks
        self.scene.elapsed_s = time.monotonic() - self._start
        return ranks

    def until(self, doing: str, holds: Callable[[list[RankLook]], bool], limit_s: float = _STEP_LIMIT_S) -> list[RankLook]:
        """Look and show, again and again, until it holds; the ranks as they were then."""
        self.scene.doing = doing
        end = time.monotonic() + limit_s
        while True:
            for line in self._children.lines(_TICK_S):
                if self.server is not None and line.child is self.server.child:
                    self.server.take(line.data)
            if self._stopped():
                raise _Stopped
            ranks = self.look()
            if holds(ranks):
                return ranks
            if self._screen.due():
                self._screen.show(self.scene)
            ended = self.server.ended() if self.server is not None else None
            if ended:
                raise DemoError(ended)
            if time.monotonic() > end:
                last = self.server.last_lines() if self.server is not None else ""
                raise DemoError(f"this has not come in {limit_s:.0f} s: {doing}; vLLM wrote last:\n{last}")

    def shown(self, text: str) -> None:
        """A step is over: this has been seen."""
        self.scene.shown.append(text)
        self._screen.show(self.scene)

    # The steps

    def start(self, model: Path, *, by_variable: bool) -> list[RankLook]:
        """A server, until it serves and all its ranks have a mailbox."""
        self.server = server = Server(self._children, self._folder, model, self.scene.group, by_variable=by_variable)
        how = f"LOADBOX_GROUP={self.scene.group}" if by_variable else f"--additional-config with loadbox_group {self.scene.group}"
        start = time.monotonic()
        ranks = self.until(
            f"vllm serve -dp {RANKS} starts, {how}; a minute or two",
            lambda ranks: all(look.state is RankState.LIVE for look in ranks) and server.healthy(),
            _START_LIMIT_S,
        )
        self.shown(f"vLLM serves after {time.monotonic() - start:.0f} s, and all {RANKS} ranks are LIVE and idle ({how})")
        return ranks

    def send(self, rank: int, tokens: int, count: int) -> list[Request]:
        """Requests for a rank."""
        assert self.server is not None
        return [Request(self.server.port, rank, tokens) for _ in range(count)]

    def finish(self, requests: list[Request]) -> None:
        """Until the requests have ended, well, and all ranks say that they are idle."""
        self.until("the requests finish", lambda ranks: all(request.done for request in requests))
        errors = [request.error for request in requests if request.error]
        if errors:
            raise DemoError(f"{len(errors)} of {len(requests)} requests failed, one with: {errors[0]}")
        self.until("all ranks become idle", lambda ranks: all(_idle(look) for look in ranks))

    def own_requests(self) -> None:
        """Each mailbox moves with its own rank's requests, and with no other's."""
        for rank in range(RANKS):
            requests = self.send(rank, 300, 6)
            most = [0] * RANKS

            def seen(ranks: list[RankLook], most: list[int] = most, rank: int = rank, requests: list[Request] = requests) -> bool:
                for look in ranks:
                    most[look.rank] = max(most[look.rank], _running(look))
                return most[rank] > 0 and all(request.done for request in requests)

            self.until(f"6 requests for rank {rank}", seen)
            self.finish(requests)
            if not 0 < most[rank] <= 6 or sum(most) != most[rank]:
                raise DemoError(f"rank {rank} got 6 requests, and running at most were {most}")
            said = f"its mailbox said up to {most[rank]} running, the other's none, and 0 when they were over"
            self.shown(f"6 requests for rank {rank}: {said}")

    def steer(self) -> None:
        """A client that goes by the mailboxes avoids the busy rank."""
        with LoadReader(self.scene.group, RANKS) as reader:
            # One frontend sends all of it: it would have to reckon with more of what it does not see to have been sent.
            busy = [request for number in range(24) for request in self.send(reader.choose(f"long {number}", 40, pinned=0), 900, 1)]
            self.until("24 long requests for rank 0", lambda ranks: _running(ranks[0]) >= 10 and _idle(ranks[1]))
            chosen = [reader.choose(f"steered {number}", 40) for number in range(4)]
            if chosen != [1] * 4:
                raise DemoError(f"the idle rank is 1, and these were chosen: {chosen}")
            steered = [request for rank in chosen for request in self.send(rank, 100, 1)]
            self.until("4 requests go by the mailboxes, to rank 1", lambda ranks: all(request.done for request in steered))
            probe = self.send(0, 100, 1)[0]
            self.finish([*busy, *steered, probe])
        mean = sum(request.seconds or 0.0 for request in steered) / 4
        self.shown(
            f"4 of 4 requests that went by the mailboxes reached the idle rank 1: {mean:.1f} s each; "
            f"one like them for rank 0 took {probe.seconds or 0.0:.1f} s"
        )

    def kill(self, before: list[RankLook]) -> None:
        """SIGKILL to all of the server."""
        server = self.server
        assert server is not None
        requests = self.send(0, 900, 4)
        self.until("4 requests for rank 0", lambda ranks: _running(ranks[0]) > 0)
        self.server = None  # its end is no mishap
        start = time.monotonic()
        server.kill()
        self.until("vLLM is killed", lambda ranks: all(look.state is RankState.DEAD for look in ranks))
        took = time.monotonic() - start
        self.until("its clients notice", lambda ranks: all(request.done for request in requests))
        self.shown(f"kill -9 of the whole server: {took * 1e3:.0f} ms later both ranks are DEAD, and nobody takes them for idle")

    def take_over(self, model: Path, before: list[RankLook]) -> None:
        """A new server in the same group."""
        after = self.start(model, by_variable=True)
        if {look.epoch for look in before} & {look.epoch for look in after}:
            raise DemoError("a new server has the epoch of the one that was killed")
        requests = [request for rank in range(RANKS) for request in self.send(rank, 50, 2)]
        self.finish(requests)
        self.shown("the new server has taken the same mailboxes over, under new epochs, and served 2 requests on each rank")


def _running(look: RankLook) -> int:
    return look.snapshot.num_running + look.snapshot.num_waiting if look.snapshot else 0


def _idle(look: RankLook) -> bool:
    return look.snapshot is not None and look.snapshot[:3] == (0, 0, 0)


def run(group: str, console: Console, *, plain: bool) -> int:
    """Run the demo; the exit code."""
    for name in _segments(group):
        kept = _segment.clean(name, dry_run=True)
        if kept is not None:
            raise DemoError(f"group {group} is in use: /dev/shm{name} is there, and {kept}; choose another --group")
    with signals() as stop, ExitStack() as stack:
        folder = Path(stack.enter_context(private_directory()))
        model = folder / "model"
        make_tiny_llama(model)
        stack.callback(lambda: [_segment.clean(name) for name in _segments(group)])
        children = stack.enter_context(Children())
        screen = stack.enter_context(Screen(console, plain=plain))
        demo = _Demo(group, folder, children, screen, lambda: stop.number != 0)
        stack.callback(demo.survey.close)
        try:
            before = demo.start(model, by_variable=False)
            demo.own_requests()
            demo.steer()
            demo.kill(before)
            demo.take_over(model, before)
            demo.scene.doing = "done; vLLM is stopped"
        except _Stopped:
            demo.scene.doing = "stopped"
        screen.show(demo.scene)
    return 128 + stop.number if stop.number else 0


def _segments(group: str) -> list[str]:
    return [name for name in _names.list_names() if name.startswith(f"/loadbox.{group}.")]
