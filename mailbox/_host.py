"""Facts about this process's host that a segment's header records: the boot, and whose clock it is."""

from __future__ import annotations

import os

__all__ = ["boot_id", "time_ns_inode"]


def boot_id() -> bytes:
    """This boot's id, 16 bytes in the order written; zeros where the kernel does not tell it."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return bytes.fromhex(file.read(64).decode("ascii").strip().replace("-", ""))[:16].ljust(16, b"\0")
    except (OSError, ValueError):
        return bytes(16)


def time_ns_inode() -> int:
    """Inode of this process's time namespace, within which CLOCK_MONOTONIC is one clock; 0 where it cannot be read."""
    try:
        return os.stat("/proc/self/ns/time").st_ino
    except OSError:
        return 0
