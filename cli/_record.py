"""Looks as JSON objects: what is not known is null."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from loadbox.cli._survey import GroupLook, RankLook

__all__ = ["host_record", "rank_record", "to_json", "utc"]


def utc(seconds: float | None) -> str | None:
    """A Unix time in ISO 8601, to the millisecond; None stays None."""
    if seconds is None:
        return None
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):  # a header may say anything
        return None


def rank_record(look: RankLook) -> dict[str, Any]:
    """One rank.  The epoch is a string: it has up to 62 bits, and many readers of JSON keep 53."""
    load = look.snapshot
    return {
        "rank": look.rank,
        "state": look.state.name,
        "usable": look.usable,
        "num_running": None if load is None else load.num_running,
        "num_waiting": None if load is None else load.num_waiting,
        "kv_active_pages": None if load is None else load.kv_active_pages,
        "kv_total_pages": None if load is None else load.kv_total_pages,
        "age_s": look.age_s,
        "publishes": look.publishes,
        "publishes_per_s": look.publishes_per_s,
        "in_flight": look.in_flight,
        "epoch": None if look.epoch is None else str(look.epoch),
        "started": utc(look.started_s),
        "pid": look.pid,
        "uid": look.uid,
        "reason": look.reason,
    }


def host_record(groups: Sequence[GroupLook], now_s: float) -> dict[str, Any]:
    """Everything that was seen in one look."""
    return {
        "time": utc(now_s),
        "host": socket.gethostname(),
        "groups": [
            {
                "group": group.group,
                "dp_size": group.dp_size,
                "frontends": group.frontends,
                "ranks": [rank_record(look) for look in group.ranks],
            }
            for group in groups
        ],
    }


def to_json(record: Any) -> str:
    """As JSON, for people and programs."""
    return json.dumps(record, indent=2, ensure_ascii=False)
