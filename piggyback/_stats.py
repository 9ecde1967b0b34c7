"""What the lane let pass or dropped, counted for the process, and warnings that cannot flood a log."""

from __future__ import annotations

import logging
import threading
import time
from typing import NamedTuple

__all__ = ["WireStats", "count", "log", "warn_each", "warn_limited", "wire_stats"]

log = logging.getLogger("loadbox")

_WARN_EVERY = 60.0
_EACH = 100
_lock = threading.Lock()


class WireStats(NamedTuple):
    """Counters of this process since it started; all only grow."""

    bad_tails: int
    """Batches whose tokens were good and whose load tail was not: decoded with four zeros (no snapshot)."""
    bad_batches: int
    """Messages that a frontend dropped because they were no batch or came from no engine of its own."""
    bad_loads: int
    """Loads that were refused on the sending side: the batch went out with four zeros."""
    load_fn_errors: int
    """Exceptions out of a ``load_fn``: the batch went out with four zeros."""
    load_only_sent: int
    """Load-only batches sent."""
    bad_requests: int
    """Malformed messages that an engine dropped from its input lane."""
    dropped_replies: int
    """Objects given to ``send_pyobj`` that are not output batches, dropped."""


_counts = dict.fromkeys(WireStats._fields, 0)
_warned: dict[str, tuple[float, int]] = {}
_each: dict[str, tuple[float, int]] = {}


def count(name: str) -> None:
    with _lock:
        _counts[name] += 1


def wire_stats() -> WireStats:
    """Give the counters of this process as they are now.  Any thread may call it; a forked child goes on from its parent's."""
    with _lock:
        return WireStats(**_counts)


def warn_limited(key: str, message: str, *args: object) -> None:
    """Log a warning, at most one a minute under the same key; the next one says how many were held back."""
    now = time.monotonic()
    with _lock:
        last, held = _warned.get(key, (-_WARN_EVERY, 0))
        if now - last < _WARN_EVERY:
            _warned[key] = (last, held + 1)
            return
        _warned[key] = (now, 0)
    log.warning(message + (f" ({held} more like this were not logged)" if held else ""), *args)


def warn_each(key: str, message: str, *args: object) -> None:
    """Log a warning for each, up to a hundred a minute under the same key; then one that says that the others are only counted."""
    now = time.monotonic()
    with _lock:
        since, said = _each.get(key, (now, 0))
        if now - since >= _WARN_EVERY:
            since, said = now, 0
        _each[key] = (since, said + 1)
    if said < _EACH:
        log.warning(message, *args)
    elif said == _EACH:
        log.warning(message + " (more like this are only counted, for up to a minute)", *args)
