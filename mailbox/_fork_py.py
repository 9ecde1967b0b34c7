"""What owners and readers in pure Python do in a forked child.  (The C core does the same from ``pthread_atfork``.)"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["enlist"]


class _Forked(Protocol):
    def _after_fork(self) -> None:
        """Make every lock anew, which a thread may hold that the child does not have; an owner is none any more."""


_family: weakref.WeakSet[_Forked] = weakref.WeakSet()


def enlist(core: _Forked) -> None:
    """Have ``core._after_fork()`` called in every child that ``os.fork`` makes while ``core`` lives."""
    _family.add(core)


def _in_child() -> None:
    for core in list(_family):
        core._after_fork()


os.register_at_fork(after_in_child=_in_child)
