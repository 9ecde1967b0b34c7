"""What a chooser is shown: one row of words a rank, and two numbers about this frontend.

The rows are one block of memory, so that the C core reads it without a conversion; every column is also a ``memoryview`` of int64
that Python code indexes like a list (``view.running[3] = 7``).  Nothing here looks at a clock: all times are ns of one monotonic
clock, and they come in from outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    Column = memoryview

__all__ = ["COLUMNS", "NEVER_NS", "View"]

COLUMNS = (
    # What the rank reported; four zeros if there is nothing to be believed.
    "running", "waiting", "kv_active", "kv_total",
    "reported_ns",  # when that left the rank: dispatches later than this are not in it
    # What this frontend, and the others on its host if they have boards, sent there.
    "in_flight",  # requests
    "owed",  # those of them without a first token
    "unseen",  # those of them that the report cannot know
    "own",  # in_flight of this frontend alone; the same number where there is no board
    # What kind of report it is, 1 or 0.
    "usable",  # may be believed: LIVE, or a piggyback; a STALLED rank's old numbers are in the row, but not usable
    "mailbox",  # an idle report of a mailbox is as good as a fresh one, an idle piggyback is not
    "allowed",  # may be chosen
)  # fmt: skip
"""The words of a row, in their order; ``_pick_core.h`` has the same."""

NEVER_NS = -(1 << 62)
"""``reported_ns`` of a rank that has not reported, or whose clock tells nothing: as old as can be."""


class View:
    """The state of ``n`` ranks as one frontend sees it, at ``now_ns``.

    Every rank starts unknown (``usable`` 0), without dispatches, and allowed.  ``own_rate`` is this frontend's own dispatch rate,
    requests a second.
    """

    __slots__ = (*COLUMNS, "n", "now_ns", "own_rate", "table")

    running: Column
    waiting: Column
    kv_active: Column
    kv_total: Column
    reported_ns: Column
    in_flight: Column
    owed: Column
    unseen: Column
    own: Column
    usable: Column
    mailbox: Column
    allowed: Column

    def __init__(self, n: int) -> None:
        self.n = n
        self.now_ns = 0
        self.own_rate = 0.0
        self.table = bytearray(n * len(COLUMNS) * 8)
        words = memoryview(self.table).cast("q")
        for place, column in enumerate(COLUMNS):
            setattr(self, column, words[place :: len(COLUMNS)])
        for rank in range(n):
            self.allowed[rank] = 1
            self.reported_ns[rank] = NEVER_NS

    @property
    def candidates(self) -> Sequence[int]:
        """The ranks that may be chosen."""
        return [rank for rank, allowed in enumerate(self.allowed) if allowed]
