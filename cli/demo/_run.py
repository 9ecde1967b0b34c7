"""The supervisor of a run: starts the ranks and the frontends, watches and shows them, and leaves nothing behind."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import msgspec
from rich.console import Console, Group

from loadbox.cli._show import save_svg
from loadbox.cli.demo import _reports
from loadbox.cli.demo._children import Children
from loadbox.cli.demo._observe import Observer
from loadbox.cli.demo._options import Options
from loadbox.cli.demo._summary import print_summary, summary
from loadbox.cli.demo._trace import Request, split
from loadbox.cli.demo._view import LiveView, PlainView, draw
from loadbox.cli.demo._watch import Watch
from loadbox.mailbox import _names, _segment

__all__ = ["DemoError", "private_directory", "run", "signals"]

_HERE = "loadbox.cli.demo"
_SOCKET_PATH_LIMIT = 70
_STILL_WIDTH = 90


class DemoError(Exception):
    """The demo cannot start or go on; the message says why."""


class _Stop:
    """The signal that ends the run, once it has come; a flag, so that nothing is torn up half-way."""

    number = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number


@contextmanager
def signals() -> Iterator[_Stop]:
    """Ctrl-C and its like end the run by a flag."""
    stop = _Stop()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def private_directory() -> Iterator[str]:
    """A directory for the run, removed after it."""
    base = tempfile.gettempdir()
    # A socket's path has at most 107 characters.
    path = tempfile.mkdtemp(prefix="loadbox-demo-", dir=base if len(base) < _SOCKET_PATH_LIMIT else "/tmp")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _segments(options: Options) -> list[str]:
    """What lies in shared memory under the names that the run is going to use."""
    mine = [f"/loadbox.{group}." for group in (options.group, options.remote_group)]
    return [name for name in _names.list_names() if name.startswith(tuple(mine))]


def _check_group_is_free(options: Options) -> None:
    for name in _segments(options):
        kept = _segment.clean(name, dry_run=True)
        if kept is not None:
            raise DemoError(f"group {options.group} is in use: /dev/shm{name} is there, and {kept}; choose another --group")


def _clean(options: Options) -> None:
    """Remove what processes that were killed left in shared memory."""
    for name in _segments(options):
        _segment.clean(name)


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
    with signals() as stop, ExitStack() as stack:
        directory = stack.enter_context(private_directory())
        options = msgspec.structs.replace(options, directory=directory)
        Path(directory, _reports.ARRIVALS).write_bytes(msgspec.json.encode(split(arrivals, options.frontends, options.seed)))
        stack.callback(_clean, options)
        children = stack.enter_context(Children())
        told = msgspec.json.encode(options).decode()
        frontends = [children.start(f"frontend {n}", f"{_HERE}._frontend", str(n), told) for n in range(options.frontends)]
        ranks = [children.start(f"rank {n}", f"{_HERE}._engine", str(n), told) for n in range(options.ranks)]
        observer = Observer(options, ranks)
        stack.callback(observer.close)
        with PlainView(console) if plain else LiveView(console) as view:
            watch = Watch(children, ranks, frontends, observer, view)
            picture = watch.follow(lambda: stop.number != 0)
            if not stop.number and all(child.process.returncode for child in frontends):
                raise DemoError("no frontend is left, so the demo cannot go on")
            watch.listen(children.stop())
        print_summary(console, observer)
        if still is not None:
            save_svg(still, Group(draw(picture), "", summary(observer)), title="loadbox demo", width=_STILL_WIDTH)
    if stop.number:
        console.print(f"Stopped by {signal.Signals(stop.number).name}.", highlight=False)
        return 128 + stop.number
    return 0
