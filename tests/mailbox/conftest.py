"""Looking at, and into, a segment from outside."""

from __future__ import annotations

import mmap
import os
import shlex
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def words() -> Iterator[Callable[[str], memoryview]]:
    """``words(name)``: the segment's memory as 512 writable int64, by itself and without any of loadbox's rules."""
    opened: list[tuple[memoryview, mmap.mmap]] = []

    def look_into(name: str) -> memoryview:
        with open("/dev/shm" + name, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 4096)
        view = memoryview(memory).cast("q")
        opened.append((view, memory))
        return view

    yield look_into
    for view, memory in opened:
        view.release()
        memory.close()


HERE = Path(__file__).parent
SOURCES = HERE.parent.parent / "mailbox"


@pytest.fixture(scope="session")
def kill_core(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a C core with kill points, built for this session; "" where the C core is not tested."""
    if os.environ.get("LOADBOX_TEST_WITHOUT_C"):
        return ""
    path = tmp_path_factory.mktemp("kill_points") / ("_seqlock_c" + sysconfig.get_config_vars()["EXT_SUFFIX"])
    compiler = shlex.split(os.environ.get("CC", "") or sysconfig.get_config_vars().get("CC", "") or "cc")
    subprocess.run(
        [
            *compiler, "-shared", "-fPIC", "-O2", "-std=c11", "-D_GNU_SOURCE", "-DLBX_KILL_POINTS", "-fvisibility=hidden",
            "-pthread", f"-I{sysconfig.get_path('include')}", *map(str, sorted(SOURCES.glob("*.c"))), "-o", str(path),
        ],
        check=True,
    )  # fmt: skip
    return str(path)


@pytest.fixture(scope="session")
def armed(kill_core: str) -> dict[str, str]:
    """The environment of a child that imports ``killpoints``; its ``LOADBOX_KILL_CORE`` is ``kill_core``."""
    return {"PYTHONPATH": str(HERE), "OPENBLAS_NUM_THREADS": "1", "LOADBOX_KILL_CORE": kill_core}
