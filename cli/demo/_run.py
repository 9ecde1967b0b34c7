"""The supervisor of a run: starts the ranks and the frontend, watches and shows them, and leaves nothing behind."""

from __future__ import annotations

import io
import re
import shutil
import signal
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import msgspec
from rich.console import Console, Group, RenderableType

from loadbox.cli.demo import _reports
from loadbox.cli.demo._children import Child, Children, Line
from loadbox.cli.demo._observe import Observer, Picture
from loadbox.cli.demo._options import Options
from loadbox.cli.demo._summary import print_summary, summary
from loadbox.cli.demo._trace import Request
from loadbox.cli.demo._view import LiveView, PlainView, View, draw
from loadbox.mailbox import _names, _segment

__all__ = ["DemoError", "run"]

_TICK_S = 0.05
_SOCKET_PATH_LIMIT = 80
_STILL_AT = 0.7
_STILL_WIDTH = 90


class DemoError(Exception):
    """The demo cannot start or go on; the message says why."""


class _Stop:
    """The signal that ends the run, once it has come; a flag, so that nothing is torn up half-way."""

    number = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number


@contextmanager
def _signals() -> Iterator[_Stop]:
    stop = _Stop()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _private_directory() -> Iterator[str]:
    base = tempfile.gettempdir()
    # A socket's path has at most 107 characters.
    path = tempfile.mkdtemp(prefix="loadbox-demo-", dir=base if len(base) < _SOCKET_PATH_LIMIT else "/tmp")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _check_group_is_free(options: Options) -> None:
    for rank in _names.list_ranks(options.group):
        kept = _segment.clean(_names.segment_name(options.group, rank), dry_run=True)
        if kept is not None:
            raise DemoError(f"group {options.group} is in use: rank {rank} has a mailbox, and {kept}; choose another --group")


def _clean(options: Options) -> None:
    """Remove what ranks that were killed left in shared memory."""
    for rank in range(options.ranks):
        _segment.clean(_names.segment_name(options.group, rank))


def _watch(children: Children, ranks: list[Child], frontend: Child, observer: Observer, view: View, stop: _Stop) -> Picture:
    """Follow the run until the frontend is done or a signal comes; a picture of its middle, or the last one."""
    middle: Picture | None = None
    while not stop.number and frontend.ended() is None:
        _listen(children.lines(_TICK_S), observer, view)
        for rank, child in enumerate(ranks):
            how = child.ended()
            if how and not child.noticed and not stop.number:
                child.noticed = True
                frontend.order(str(rank))
                view.say(f"rank {rank} (pid {child.pid}) {how}: the requests that it had are lost")
        if view.due():
            picture = observer.picture()
            view.show(picture)
            if middle is None and picture.phases and picture.phases[0].sent >= _STILL_AT * picture.phases[0].total:
                middle = picture
    how = frontend.ended()
    _listen(children.lines(_TICK_S), observer, view)
    last = observer.picture()
    view.show(last)
    if how and frontend.process.returncode and not stop.number:
        raise DemoError(f"the frontend {how}, so the demo cannot go on")
    return middle or last


def _listen(lines: Iterable[Line], observer: Observer, view: View) -> None:
    for line in lines:
        words = observer.take(line)
        if words is not None:
            view.say(words)


def _save(path: Path, content: RenderableType) -> None:
    canvas = Console(record=True, width=_STILL_WIDTH, force_terminal=True, color_system="truecolor", file=io.StringIO())
    canvas.print(content, highlight=False)
    # Without rich's web fonts, since a picture loads nothing; with the spaces that some viewers leave out.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", canvas.export_svg(title="loadbox demo"), flags=re.DOTALL)
    path.write_text(picture.replace("<svg ", '<svg xml:space="preserve" ', 1), encoding="utf-8")


def run(options: Options, arrivals: list[Request], console: Console, *, plain: bool, still: Path | None = None) -> int:
    """Run the demo and print its summary; the exit code.

    Args:
        options: without the directory, which is made here.
        arrivals: what to replay.
        console: where to show it.
        plain: lines in place of a live table.
        still: write a picture (SVG) of the table and the summary to this file.
    """
    _check_group_is_free(options)
    with _signals() as stop, ExitStack() as stack:
        directory = stack.enter_context(_private_directory())
        options = msgspec.structs.replace(options, directory=directory)
        Path(directory, _reports.ARRIVALS).write_bytes(msgspec.json.encode(arrivals))
        stack.callback(_clean, options)
        children = stack.enter_context(Children())
        told = msgspec.json.encode(options).decode()
        ranks = [children.start(f"rank {n}", "loadbox.cli.demo._engine", str(n), told) for n in range(options.ranks)]
        frontend = children.start("frontend", "loadbox.cli.demo._frontend", told)
        observer = Observer(options, ranks)
        stack.callback(observer.close)
        with PlainView(console) if plain else LiveView(console) as view:
            picture = _watch(children, ranks, frontend, observer, view, stop)
            _listen(children.stop(), observer, view)
        print_summary(console, observer)
        if still is not None:
            _save(still, Group(draw(picture), "", summary(observer)))
    if stop.number:
        console.print(f"Stopped by {signal.Signals(stop.number).name}.", highlight=False)
        return 128 + stop.number
    return 0
