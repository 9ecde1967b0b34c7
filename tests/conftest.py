"""What every test may use: both twins of the mailbox, group names of one's own, and helpers in other processes."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

PREFIX = "loadbox.mailbox"


def _import_twin() -> ModuleType:
    """A second copy of the package, on the pure-Python twin, beside the one that runs on C."""
    mine = {name: module for name, module in sys.modules.items() if name == PREFIX or name.startswith(PREFIX + ".")}
    for name in mine:
        del sys.modules[name]
    before = os.environ.get("LOADBOX_PURE_PYTHON")
    os.environ["LOADBOX_PURE_PYTHON"] = "1"
    try:
        twin = importlib.import_module(PREFIX)
    finally:
        if before is None:
            del os.environ["LOADBOX_PURE_PYTHON"]
        else:
            os.environ["LOADBOX_PURE_PYTHON"] = before
        for name in [name for name in sys.modules if name == PREFIX or name.startswith(PREFIX + ".")]:
            del sys.modules[name]
        sys.modules.update(mine)
        sys.modules["loadbox"].mailbox = mine[PREFIX]  # type: ignore[attr-defined]
    return twin


C = importlib.import_module(PREFIX)
PY = _import_twin()
BOXES = {"c": C, "py": PY}
assert PY._seqlock.BACKEND == "py"


@pytest.fixture(params=["c", "py"])
def box(request: pytest.FixtureRequest) -> Any:
    """``loadbox.mailbox`` on the C core, then on its pure-Python twin; ``box.backend`` is "c" or "py"."""
    module = BOXES[request.param]
    if module._seqlock.BACKEND != request.param:
        if os.environ.get("LOADBOX_TEST_WITHOUT_C"):
            pytest.skip("LOADBOX_TEST_WITHOUT_C is set: the C core is not tested")
        pytest.fail("the C core is not installed; set LOADBOX_TEST_WITHOUT_C=1 if this machine has no compiler")
    module.backend = request.param
    return module


@pytest.fixture(scope="session")
def twins() -> dict[str, Any]:
    """``loadbox.mailbox`` on both cores, by "c" and "py"; on the twin alone where the C core is not tested."""
    if C._seqlock.BACKEND != "c":
        assert os.environ.get("LOADBOX_TEST_WITHOUT_C"), "the C core is not installed"
        return {"py": PY}
    return dict(BOXES)


def sweep(group: str) -> None:
    """Remove whatever a test left under a group's name."""
    for entry in os.listdir("/dev/shm"):
        if entry.startswith(f"loadbox.{group}."):
            path = os.path.join("/dev/shm", entry)
            (os.rmdir if os.path.isdir(path) and not os.path.islink(path) else os.unlink)(path)


@pytest.fixture
def group() -> Iterator[str]:
    """A group's name that nobody else has; its segments are removed afterwards."""
    name = f"t-{uuid.uuid4().hex[:16]}"
    yield name
    sweep(name)


@pytest.fixture
def groups() -> Iterator[Callable[[], str]]:
    """As ``group``, for tests that need several."""
    names: list[str] = []

    def make() -> str:
        names.append(f"t-{uuid.uuid4().hex[:16]}")
        return names[-1]

    yield make
    for name in names:
        sweep(name)


class Children:
    """Python programs in processes of their own, on a chosen twin, none of which outlives the test."""

    def __init__(self) -> None:
        self.running: list[subprocess.Popen[str]] = []

    def start(self, code: str, *args: object, backend: str = "c", **options: Any) -> subprocess.Popen[str]:
        """Run ``code`` with ``sys.argv[1:] = args``; its stdin, stdout and stderr are pipes of text."""
        env = {**os.environ, **options.pop("env", {})}
        env["LOADBOX_PURE_PYTHON"] = "1" if backend == "py" else ""
        options.setdefault("stdin", subprocess.PIPE)
        child = subprocess.Popen(
            [sys.executable, "-u", "-c", textwrap.dedent(code), *map(str, args)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **options,
        )  # fmt: skip
        self.running.append(child)
        return child

    def run(self, code: str, *args: object, backend: str = "c", **options: Any) -> str:
        """Run ``code`` to its end and give what it printed; fails the test, with its stderr, if it did not end well."""
        child = self.start(code, *args, backend=backend, **options)
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0, f"exit code {child.returncode}\n{out}\n{err}"
        return out

    def end(self) -> None:
        for child in self.running:
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout, child.stderr):
                if stream is not None:
                    stream.close()


@pytest.fixture
def children() -> Iterator[Children]:
    """Processes of the test's own, ended with it."""
    family = Children()
    yield family
    family.end()


def wait_line(child: subprocess.Popen[str], expected: str | None = None) -> str:
    """The child's next line; fails with its stderr if it ended instead or said something else."""
    assert child.stdout is not None
    line = child.stdout.readline().rstrip("\n")
    if (not line and child.poll() is not None) or (expected is not None and line != expected):
        child.kill()
        pytest.fail(f"expected {expected!r}, got {line!r}\n{child.communicate()[1]}")
    return line


@pytest.fixture
def open_files() -> Iterator[Callable[[], int]]:
    """Counts this process's descriptors of files: not the sockets, which another test's threads may be closing still."""

    def count() -> int:
        gc.collect()
        found = 0
        for fd in os.listdir("/proc/self/fd"):
            try:
                found += os.readlink(f"/proc/self/fd/{fd}").startswith("/")
            except FileNotFoundError:  # the listing's own
                pass
        return found

    gc.collect()  # what an earlier test's views hold still
    gc.freeze()  # and a collection is one of what this test makes, not of all that thousands of tests have left
    yield count
    gc.unfreeze()
