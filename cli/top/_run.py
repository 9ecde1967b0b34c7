"""The loop of ``loadbox top``, and its one plain snapshot."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from rich.console import Console, ConsoleDimensions
from rich.live import Live

from loadbox.cli._survey import GroupLook, Survey
from loadbox.cli.top._order import Order
from loadbox.cli.top._table import Screen, draw
from loadbox.cli.top._terminal import Terminal

__all__ = ["run", "snapshot"]

_LINGER_S = 10.0
_RATE_PAUSE_S = 0.5
_SCROLL = {"up": -1.0, "down": 1.0, "home": -math.inf, "end": math.inf}


def snapshot(groups: Collection[str], *, rates: bool = True) -> tuple[list[GroupLook], float]:
    """One look, and its Unix time; with ``rates`` the second of two, half a second apart: it has publishes a second."""
    survey = Survey(groups)
    try:
        looks = survey.look()
        if rates and looks:
            time.sleep(_RATE_PAUSE_S)
            looks = survey.look()
        return looks, time.time()
    finally:
        survey.close()


def run(groups: Collection[str], order: Order, interval_s: float, console: Console) -> None:
    """Show ranks as they change, at the terminal that stdin and stdout are, until q or a signal."""
    survey = Survey(groups, linger_s=_LINGER_S)
    live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    screen = Screen(survey.look(), time.time(), order, only=groups)
    try:
        with Terminal(sys.stdin.fileno(), _quietly(live.start), _quietly(live.stop)) as terminal:
            due = time.monotonic() + min(interval_s, _RATE_PAUSE_S)
            while True:
                console.size = _size()
                screen = replace(screen, width=console.size.width, height=console.size.height).scrolled(0)
                live.update(draw(screen), refresh=True)
                for key in terminal.keys(max(0.0, due - time.monotonic())):
                    if key in ("q", "Q", "quit"):
                        return
                    screen = _pressed(screen, key)
                if time.monotonic() >= due:
                    due = time.monotonic() + interval_s
                    if not screen.paused:
                        screen = replace(screen, groups=survey.look(), now_s=time.time())
    except OSError:
        if console.file.writable() and sys.stdin.isatty():
            raise
    finally:
        survey.close()


def _size() -> ConsoleDimensions:
    """The terminal's size now: COLUMNS and LINES in the environment, which rich would follow, know of no resizing."""
    columns, lines = os.get_terminal_size(sys.stdout.fileno())
    return ConsoleDimensions(columns or 80, lines or 24)


def _quietly(act: Callable[[], None]) -> Callable[[], None]:
    """For a terminal that may be gone: what cannot be written to it any more does no harm."""

    def do() -> None:
        try:
            act()
        except OSError:
            pass

    return do


def _pressed(screen: Screen, key: str) -> Screen:
    if key == " ":
        return replace(screen, paused=not screen.paused)
    if key in _SCROLL:
        return screen.scrolled(_SCROLL[key])
    if key in ("page up", "page down"):
        return screen.scrolled(screen.page if key == "page down" else -screen.page)
    return replace(screen, order=screen.order.press(key))
