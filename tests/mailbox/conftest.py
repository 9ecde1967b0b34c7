"""Looking at, and into, a segment from outside."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

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
