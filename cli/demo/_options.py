"""What a run of the demo is told, as its processes hand it on."""

from __future__ import annotations

import msgspec

__all__ = ["Options"]


class Options(msgspec.Struct, frozen=True):
    """One run: its group, its ranks, and how fast its time goes."""

    group: str
    ranks: int
    speed_up: float
    seed: int
    trace: str
    """Where the requests come from, to be shown."""
    rate: float
    """Requests a second, as a multiple of the trace's."""
    directory: str = ""
    """The run's private directory: sockets, and the requests to replay."""
