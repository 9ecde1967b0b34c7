"""Has a name come or gone since the last look?  The twin of ``_core_watch.c``: same rules, same order.

A group's reader has to notice, for each of its ranks, when the name leads elsewhere, comes, or goes.  Asking for each file costs a
system call and more a rank, and at a router's pace nearly all of what a read costs; but every such change is one of the directory,
and one ``stat`` tells whether there was any.  So the directory is asked once a read, and the files only when it has changed.

A change in the same tick of the clock as the last one leaves the same time behind.  So a time is believed to mean "nothing has
changed since" only if it was well in the past, by the file systems' own clock read before the ``stat``.  What the directory cannot
tell (a descriptor that another part of the program closed, a file that shrank) is found by asking each file all the same, at every
twentieth of its turns or sooner.
"""

from __future__ import annotations

import os
import time

from loadbox.mailbox._names import SHM_DIR

__all__ = ["Watch"]

_CLOCK = 5
"""CLOCK_REALTIME_COARSE, from which Linux takes the times of files; Python has no name for it."""
_SETTLED_NS = 20_000_000
"""Longer than a tick of the clock, 10 ms at the most."""


class Watch:
    """A number that grows whenever a name may have come or gone.  It asks at most once between two calls of ``again``."""

    __slots__ = ("_asked", "_generation", "_settled", "_stamp")

    def __init__(self) -> None:
        self._generation = 0
        self._asked = self._settled = False
        self._stamp = (0, 0, 0, 0)

    def again(self) -> None:
        """Ask anew when asked next."""
        self._asked = False

    def generation(self) -> int:
        """The number; while it stays the same, every name leads where it led."""
        if self._asked:
            return self._generation
        self._asked = True
        before = time.clock_gettime_ns(_CLOCK)  # before the stat: whatever changes after it is not stamped earlier
        try:
            found = os.stat(SHM_DIR)
        except OSError:
            self._settled = False
            self._generation += 1
            return self._generation
        stamp = (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
        if not self._settled or stamp != self._stamp:
            self._generation += 1
        self._stamp = stamp
        self._settled = before - max(found.st_mtime_ns, found.st_ctime_ns) > _SETTLED_NS
        return self._generation
