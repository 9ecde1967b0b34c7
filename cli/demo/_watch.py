"""Following a run: who has ended, when the next replay may start, and what is shown meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from loadbox.cli.demo._children import Child, Children, Line
from loadbox.cli.demo._observe import Observer, Picture
from loadbox.cli.demo._view import View

__all__ = ["Watch"]

_TICK_S = 0.05
_HEAD_START_S = 0.05
_STILL_AT = 0.7


class Watch:
    """Watches the ranks and the frontends, and gives the frontends their orders: ``start TIME`` and ``gone RANK``."""

    def __init__(self, children: Children, ranks: list[Child], frontends: list[Child], observer: Observer, view: View) -> None:
        self._children = children
        self._ranks = ranks
        self._frontends = frontends
        self._observer = observer
        self._view = view
        self._next = 0

    def follow(self, stopped: Callable[[], bool]) -> Picture:
        """Follow the run until no frontend is left or ``stopped``; a picture of its middle, or the last one."""
        middle: Picture | None = None
        while not stopped() and any(child.ended() is None for child in self._frontends):
            self.listen(self._children.lines(_TICK_S))
            if stopped():
                break
            self._notice_ends()
            self._start_next_replay()
            if self._view.due():
                picture = self._observer.picture()
                self._view.show(picture)
                first = picture.replays[0].all
                if middle is None and first.total and first.sent >= _STILL_AT * first.total:
                    middle = picture
        self.listen(self._children.lines(_TICK_S))
        last = self._observer.picture()
        self._view.show(last)
        return middle or last

    def listen(self, lines: Iterable[Line]) -> None:
        """Take in what the children wrote."""
        for line in lines:
            words = self._observer.take(line)
            if words is not None:
                self._view.say(words)

    def _notice_ends(self) -> None:
        for rank, child in enumerate(self._ranks):
            how = child.ended()
            if how and not child.noticed:
                child.noticed = True
                self._order(f"gone {rank}")
                self._view.say(f"rank {rank} (pid {child.pid}) {how}: the requests that it had are lost")
        for number, child in enumerate(self._frontends):
            how = child.ended()
            if how and not child.noticed:
                child.noticed = True
                if child.process.returncode:
                    self._observer.frontend_gone(number)
                    self._view.say(f"frontend {number} (pid {child.pid}) {how}: its requests are lost")

    def _start_next_replay(self) -> None:
        """All start together, and only when all have ended the replay before."""
        living = [number for number, child in enumerate(self._frontends) if child.ended() is None]
        reports = [self._observer.frontends.get(number) for number in living]
        if reports and all(report is not None and report.waits_for == self._next for report in reports):
            self._order(f"start {time.monotonic() + _HEAD_START_S}")
            self._next += 1

    def _order(self, line: str) -> None:
        for child in self._frontends:
            child.order(line)
