"""What every file of results says of the run it came from."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

from loadbox.mailbox import _seqlock

__all__ = ["facts"]

_PACKAGES = ("loadbox", "numpy", "pyzmq", "msgspec", "kickmsg", "iceoryx2", "membridge", "redis", "prometheus_client")


def facts(**more: Any) -> dict[str, Any]:
    """The machine, in general terms, and the versions."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    return {
        **more,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "python": platform.python_version(),
        "core": _seqlock.BACKEND,
        "versions": versions,
    }
