"""`_ranks.c`, compiled when it is needed and loaded by ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shlex
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rank_model import LOAD_DTYPE, Event, PythonRanks, RankParams, check_request

SOURCE = Path(__file__).with_name("_ranks.c")
FLAGS = ("-O2", "-std=c11", "-ffp-contract=off", "-shared", "-fPIC")  # no fused multiply-add: Python has none

_EVENT = np.dtype([("at", "f8"), ("request", "i8"), ("kind", "i8")])


class _Params(ctypes.Structure):
    _fields_ = [(name, ctypes.c_double) for name in ("base_s", "prefill_s", "attention_s", "decode_s", "context_s")] + [
        (name, ctypes.c_int64) for name in ("chunk_tokens", "max_running", "kv_pages", "page_tokens", "publish_early")
    ]


@functools.cache
def library() -> Any:
    """The compiled model, or None (with a warning) on a machine without a C compiler."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join((compiler, *FLAGS)).encode()).hexdigest()[:16]
    with tempfile.TemporaryDirectory(prefix="loadbox-ranks-") as folder:
        target = Path(folder, f"ranks-{key}.so")
        try:
            subprocess.run([compiler, *FLAGS, "-o", str(target), str(SOURCE)], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            detail = getattr(error, "stderr", "") or error
            logging.getLogger(__name__).warning("the C model could not be compiled, plain Python runs instead: %s", detail)
            return None
        lib = ctypes.CDLL(str(target))  # the mapping outlives the file
    i, d, p = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
    for name, result, arguments in (
        ("ranks_new", p, (i, i, i, i, p)), ("ranks_free", None, (p,)), ("ranks_submit", ctypes.c_int, (p, i, i, i, d, i, i)),
        ("ranks_advance", i, (p, d)), ("ranks_events", p, (p,)), ("ranks_mailbox", p, (p,)), ("ranks_rare", p, (p,)),
        ("ranks_piggyback", ctypes.c_int, (p, i, d, p)), ("ranks_totals", None, (p, p)),
    ):  # fmt: skip
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def _view(address: int, dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
    memory = (ctypes.c_char * (dtype.itemsize * count)).from_address(address)
    return np.frombuffer(memoryview(memory), dtype)


class CRanks:
    """Ranks in C; the same doors as ``rank_model.PythonRanks``."""

    def __init__(self, ranks: int, frontends: int, requests: int, params: RankParams, rare_every: int = 10) -> None:
        self._lib = library()
        if self._lib is None:
            raise RuntimeError("there is no C compiler; use PythonRanks")
        self._p = params
        names = [entry[0] for entry in _Params._fields_]
        given = _Params(*(getattr(params, name) for name in names))
        self._cluster = self._lib.ranks_new(ranks, frontends, requests, rare_every, ctypes.byref(given))
        if not self._cluster:
            raise MemoryError
        self._requests = requests
        self._mailbox: np.ndarray[Any, Any] = _view(self._lib.ranks_mailbox(self._cluster), LOAD_DTYPE, ranks)
        self._rare: np.ndarray[Any, Any] = _view(self._lib.ranks_rare(self._cluster), LOAD_DTYPE, ranks)
        self._rides = np.zeros(ranks, LOAD_DTYPE)

    def submit(self, rank: int, request: int, frontend: int, reach: float, prompt: int, output: int) -> None:
        """A request that will be at a rank at ``reach``; times must not fall."""
        check_request(self._p, prompt, output)
        if not 0 <= rank < len(self._mailbox) or not 0 <= request < self._requests:
            raise ValueError(f"rank {rank} or request {request} is out of range")
        if not self._lib.ranks_submit(self._cluster, rank, request, frontend, reach, prompt, output):
            raise MemoryError

    def advance(self, until: float) -> list[Event]:
        """Run every rank through its boundaries at or before ``until``."""
        count = self._lib.ranks_advance(self._cluster, until)
        if count < 0:
            raise MemoryError
        if not count:
            return []
        return list(map(Event._make, _view(self._lib.ranks_events(self._cluster), _EVENT, count).tolist()))

    def mailbox(self) -> np.ndarray[Any, Any]:
        """Of each rank the load at its last boundary; ``LOAD_DTYPE``, to be read before the next ``advance``."""
        return self._mailbox

    def rare(self) -> np.ndarray[Any, Any]:
        """The same, of a rank that publishes only every so many iterations, and when it runs out of work."""
        return self._rare

    def piggyback(self, frontend: int, sent: float) -> np.ndarray[Any, Any]:
        """Of each rank the newest load that left for a frontend by ``sent``, ``at`` = -1 if there was none."""
        if not self._lib.ranks_piggyback(self._cluster, frontend, sent, self._rides.ctypes.data):
            raise RuntimeError("piggybacks are on the wire for too many iterations")
        return self._rides

    def totals(self) -> list[tuple[int, int, int, int, int]]:
        """Of each rank: iterations, preemptions, free pages, running, waiting (with those on their way)."""
        rows = np.zeros((len(self._mailbox), 5), "i8")
        self._lib.ranks_totals(self._cluster, rows.ctypes.data)
        return [tuple(row) for row in rows.tolist()]

    def close(self) -> None:
        """Give the memory back."""
        if self._cluster:
            self._lib.ranks_free(self._cluster)
            self._cluster = None
            del self._mailbox, self._rare


def make_ranks(ranks: int, frontends: int, requests: int, params: RankParams, rare_every: int = 10) -> CRanks | PythonRanks:
    """Ranks in C where that can be compiled, otherwise in Python."""
    kind = CRanks if library() is not None else PythonRanks
    return kind(ranks, frontends, requests, params, rare_every)
