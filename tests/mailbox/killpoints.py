"""Both twins, with points at which a process may die or stop: for programs of their own, which import this by path.

A point of the C core is a step between two of its stores, in a build of its own (LBX_KILL_POINTS).  A point of Python code is a
line of loadbox.mailbox about to run: each store of the twin, each system call of the files, is a line.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

PACKAGE = "loadbox.mailbox"
CORE = "loadbox.mailbox._seqlock_c"


class _Finder:
    """Gives the build with kill points where the installed core would be found."""

    def __init__(self, path: str) -> None:
        self.path = path

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self.path) if name == CORE else None


def load(core: str) -> dict[str, ModuleType]:
    """``loadbox.mailbox`` on the C core at the path ``core``, if there is one, and on its twin, by backend."""
    boxes = {}
    if core:
        sys.meta_path.insert(0, _Finder(core))
        boxes["c"] = _import(pure="")
    boxes["py"] = _import(pure="1")
    for backend, box in boxes.items():
        assert box._seqlock.BACKEND == backend
    return boxes


def _import(pure: str) -> ModuleType:
    for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
        del sys.modules[name]
    os.environ["LOADBOX_PURE_PYTHON"] = pure
    return importlib.import_module(PACKAGE)


def arm(box: ModuleType, kind: str, at: int, what: signal.Signals) -> None:
    """Make this process die (SIGKILL) or stop (SIGSTOP) at its ``at``-th point from now, counted from 0.

    ``kind``: "step" of the C core, "line" of loadbox.mailbox, or "store", a line of the twin's core alone.
    """
    if kind == "step":
        core = box._seqlock._core
        (core._kill_at if what == signal.SIGKILL else core._stop_at)(at)
        return
    folder = os.path.dirname(str(box.__file__))
    core = box._seqlock._core.__file__
    left = at

    def in_line(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if event == "line":
            if left == 0:
                os.kill(os.getpid(), what)
            left -= 1
        return in_line

    def in_call(frame: FrameType, event: str, arg: object) -> Any:
        path = frame.f_code.co_filename
        return in_line if (path == core if kind == "store" else os.path.dirname(path) == folder) else None

    sys.settrace(in_call)


def disarm(box: ModuleType, kind: str) -> None:
    """Run on without points."""
    if kind == "step":
        box._seqlock._core._kill_at(-1)
    else:
        sys.settrace(None)
