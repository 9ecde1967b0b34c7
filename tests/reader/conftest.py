"""What the reader's tests share: both cores, batches, and waiting for what comes by itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

from loadbox.reader import LoadReader, _core, _core_py, _sources

try:
    from loadbox.reader import _core_c
except ImportError:
    _core_c = None  # type: ignore[assignment]


def core_module(name: str) -> ModuleType:
    if name == "py":
        return _core_py
    if _core_c is None:
        if os.environ.get("LOADBOX_TEST_WITHOUT_C"):
            pytest.skip("LOADBOX_TEST_WITHOUT_C is set: the C core is not tested")
        pytest.fail("the reader's C core is not installed; set LOADBOX_TEST_WITHOUT_C=1 if this machine has no compiler")
    return _core_c


@pytest.fixture(params=["c", "py"])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The reader's core, in C and then in Python, put into use."""
    return put_into_use(core_module(request.param), monkeypatch)


@pytest.fixture
def c_core(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The core in C alone, put into use."""
    return put_into_use(core_module("c"), monkeypatch)


def put_into_use(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(_core, "cold_set", module.cold_set)
    monkeypatch.setattr(_sources, "merge", module.merge)
    return module


@dataclass
class Batch:
    """A decoded batch, as far as a view looks at it."""

    engine_index: int = 0
    rids: list[str] = field(default_factory=list)
    output_ids: list[list[int]] = field(default_factory=list)
    finished_reasons: list[str] = field(default_factory=list)
    num_running: Any = 0
    num_waiting: Any = 0
    kv_active_pages: Any = 0
    kv_total_pages: Any = 0

    @classmethod
    def of(cls, rank: int, load: tuple[Any, Any, Any, Any] = (0, 0, 0, 0), **requests: str) -> Batch:
        """``Batch.of(1, (2, 0, 5, 100), a="", b="stop")``: a token each for a and b, and b's end."""
        return cls(rank, list(requests), [[7] for _ in requests], list(requests.values()), *load)


@pytest.fixture
def view_of() -> Iterator[Callable[..., LoadReader]]:
    """Makes views that are closed at the end."""
    made: list[LoadReader] = []

    def make(*args: Any, **options: Any) -> LoadReader:
        options.setdefault("seed", 7)
        made.append(LoadReader(*args, **options))
        return made[-1]

    yield make
    for view in made:
        view.close()


class Kit:
    """What a test asks of a view, and how it waits."""

    Batch = Batch

    @staticmethod
    def in_flight(view: LoadReader) -> list[int]:
        return [load.in_flight for load in view.loads()]

    @staticmethod
    def owed(view: LoadReader) -> list[int]:
        return [load.owed for load in view.loads()]

    @staticmethod
    def on_the_host(view: LoadReader) -> list[int]:
        """In flight with the other frontends' boards counted in."""
        view.loads()
        return list(view._sources.view.in_flight.tolist())

    @staticmethod
    def spread(view: LoadReader, count: int, name: str = "r", **options: Any) -> list[int]:
        """Choose for ``count`` new requests; how many each rank got."""
        got = [0] * len(view.loads())
        for i in range(count):
            got[view.choose(f"{name}{i}", **options)] += 1
        return got

    @staticmethod
    def until(true: Callable[[], Any], seconds: float = 20.0) -> Any:
        """Wait for something that comes by itself; fails if it does not."""
        end = time.monotonic() + seconds
        while not (value := true()):
            if time.monotonic() > end:
                pytest.fail("it did not come about")
            time.sleep(0.005)
        return value


@pytest.fixture
def kit() -> type[Kit]:
    return Kit
