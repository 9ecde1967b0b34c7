"""What the soak's ranks publish, and what is known of it without the mailbox.

The four numbers of a publish are bound to each other, to the rank, to its life (a number that grows over the whole run) and to
the publish's number in that life.  So a torn read, another rank's value, an older one or one of a former life gives itself away.

A rank's truth is a line of words in memory that all processes share and that has nothing to do with loadbox: what the rank is
about to publish, what it has published, and what is being done to it.  A read is right if it lies between what was completed
before it began and what was begun before it ended.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

RANKS = 16
TRUTH_WORDS = 16
# Words of a rank's truth.  The rank writes the first seven, whoever ends it the other ones.
BEGUN, DONE, FIRST_LIFE, FIRST_NS, EPOCH, EPOCH_LIFE, BEGUN_NS, DOOMED, DEAD_LIFE, DEAD_NS = range(10)
COUNTERS = 8
READS, USABLE, CHOSEN, FINISHED, PUBLISHED, FED = range(6)

_MIX = 0x9E37_79B9_7F4A_7C15


class Value(NamedTuple):
    """Whose publish a load is."""

    rank: int
    life: int
    number: int


def load_of(rank: int, life: int, number: int) -> tuple[int, int, int, int]:
    """The four numbers of a publish.  Something always runs, so a rank that stands still is at work."""
    total = 1 << 50 | rank << 40 | life
    return number, _mixed(rank, life, number) >> 34, _mixed(life, number, rank) % total, total


def value_of(load: tuple[int, int, int, int]) -> Value | None:
    """Whose it is; None if no publish has these numbers: it is torn."""
    number, _, _, total = load
    found = Value(total >> 40 & 0x3FF, total & 0xFF_FFFF_FFFF, number)
    return found if load_of(*found) == tuple(load) else None


def _mixed(*words: int) -> int:
    mixed = 0
    for word in words:
        mixed = (mixed ^ word) * _MIX & (1 << 64) - 1
        mixed ^= mixed >> 29
    return mixed & (1 << 64) - 1


def packed(life: int, number: int) -> int:
    """A life and a number in one word, so that one store changes both."""
    return life << 32 | number


class Shared:
    """Memory that the whole run shares: the truth of each rank, and counters of each process that outlive it."""

    def __init__(self, actors: int) -> None:
        size = 8 * (RANKS * TRUTH_WORDS + actors * COUNTERS)
        self._words = memoryview(mmap.mmap(-1, size)).cast("q")

    def truth(self, rank: int) -> memoryview:
        """The words of a rank's truth."""
        return self._words[rank * TRUTH_WORDS : (rank + 1) * TRUTH_WORDS]

    def counters(self, actor: int) -> memoryview:
        """What a process has done, over all its lives."""
        start = RANKS * TRUTH_WORDS + actor * COUNTERS
        return self._words[start : start + COUNTERS]
