"""The harness of the peers' benchmark: that it sees what it is there to see, on loadbox and on memory that nobody guards."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # `make peers` runs them

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
MODULES = ("peer", "memory", "libraries", "messages", "catalogue", "harness", "peers_report")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The benchmark's modules, which are no package."""
    monkeypatch.syspath_prepend(str(FOLDER))
    modules = {name: importlib.import_module(name) for name in MODULES}
    yield SimpleNamespace(**modules)
    for name in MODULES:
        del sys.modules[name]


def tiny(harness: ModuleType) -> Any:
    return harness.Effort(round_s=0.005, rounds=1, torn_s=0.3, trials=1, ranks=3, paced=1)


@pytest.mark.parametrize("name", ["LoadboxC", "UnprotectedMmap"])
def test_a_peer_is_measured(peers: SimpleNamespace, name: str) -> None:
    before = set(os.listdir("/dev/shm"))
    kind = peers.catalogue.peer_named(name)
    figures = peers.harness.measure(kind, tiny(peers.harness), 1)
    for column in (*peers.peers_report._COLUMNS, *peers.peers_report.PACED):
        assert getattr(figures, column) > 0, column
    assert figures.reads > 1000
    if figures.guarded:
        assert figures.torn == 0
    for seen in (figures.after_kill, figures.after_stop, figures.after_reader_stop):
        assert sum(seen.values()) == 1
    assert figures.after_reader_stop == {"goes on": 1}
    assert not [name for name in set(os.listdir("/dev/shm")) - before if f"lbx-{os.getpid()}-" in name]


def test_a_torn_value_is_seen(peers: SimpleNamespace) -> None:
    assert not peers.harness._torn((3, 6, 9, 12))
    for torn in ((4, 6, 9, 12), (3, 8, 9, 12), (3, 6, 12, 12), (3, 6, 9, 16), (0, 6, 9, 12)):
        assert peers.harness._torn(torn)


def test_what_hangs_is_seen_to_hang(peers: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of the locked peer, while the lock is held for ever."""
    import fcntl

    monkeypatch.setattr(peers.harness, "HANGS_S", 0.0)
    kind = peers.catalogue.peer_named("LockedSharedMemory")
    with peers.harness._place(kind, 1) as peer:
        peer.writer(0, 1)(1, 2, 3, 4)
        fd = os.open(f"/dev/shm/{peer.place}", os.O_RDWR)
        try:
            monkeypatch.setattr(peers.harness, "HANGS_S", 27.0)
            assert peers.harness._classify(kind, peer.place, 1) == "last value"
            monkeypatch.setattr(peers.harness, "HANGS_S", -1.0)
            fcntl.flock(fd, fcntl.LOCK_EX)
            assert peers.harness._classify(kind, peer.place, 1) == "hangs"
        finally:
            os.close(fd)


def test_who_is_missing_is_left_out_with_a_word(peers: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADBOX_PEER_SGLANG", "/nonexistent")
    with pytest.raises(peers.peer.Missing, match="SGLang's wheel is not unpacked"):
        peers.harness.measure(peers.catalogue.peer_named("SGLang"), tiny(peers.harness), 1)
    done = subprocess.run(
        [sys.executable, str(FOLDER), "--one", "SGLang", "--effort", "{}"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "LOADBOX_PEER_SGLANG": "/nonexistent"},
    )  # fmt: skip
    assert done.stdout == '{"missing": "SGLang\'s wheel is not unpacked in $LOADBOX_PEER_SGLANG"}\n'


def test_the_verdict(peers: SimpleNamespace) -> None:
    columns = (*peers.peers_report._COLUMNS, *peers.peers_report.PACED)
    own = dict.fromkeys(columns, 100.0) | {"name": "loadbox", "guarded": True}
    sglang = dict.fromkeys(columns, 4100.0) | {"name": "SGLang load snapshot", "guarded": True}
    slow = dict.fromkeys(columns, 99.0) | {"name": "other", "guarded": True}
    torn = dict.fromkeys(columns, 1.0) | {"name": "torn", "guarded": False}
    found = peers.peers_report.verdicts({"LoadboxC": own, "SGLang": sglang, "Other": slow, "Torn": torn})
    verdict = {what: met for what, _, _, met in found}
    assert verdict["SGLang load snapshot: publish"]
    assert not verdict["SGLang load snapshot: read of 64 ranks"], "41 times, 100 asked"
    assert not any(met for what, met in verdict.items() if what.startswith("other"))
    assert not verdict["other: 64 ranks every 150 ms"]
    assert verdict["SGLang load snapshot: 64 ranks every 150 ms"]
    assert not any(what.startswith("torn") for what in verdict)
