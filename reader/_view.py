"""What a chooser is shown, and what that is made from: tables of int64, one row a rank.

A table is one block of memory, so that the C core reads it without a conversion; every column is also a ``memoryview`` that Python
code indexes like a list (``view.running[3] = 7``).  Nothing here looks at a clock: all times are ns of one monotonic clock, and
they come in from outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    Column = memoryview

__all__ = ["COUNT_LIMIT", "INPUT_COLUMNS", "NEVER_NS", "VIEW_COLUMNS", "Inputs", "Table", "View"]

VIEW_COLUMNS = (
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

INPUT_COLUMNS = (
    # The mailbox's life that has been dealt with; another number in the mailbox asks for attention.
    "epoch", "state",
    "same_clock",  # 1: the writer's clock is this process's
    "published_ns",  # the last publish seen, by the writer's clock
    "bound_ns",  # and a time of our clock that it was not earlier than
    "available",  # may be chosen: not dead, not gone
    # The last piggyback, total 0: none; and a time that it was not earlier than.
    "pig_running", "pig_waiting", "pig_active", "pig_total", "pig_ns",
    # This frontend's dispatches later than the report: how many, and the time of the first.
    "unseen", "oldest_ns",
    "next_seen",  # of a rank whose report knows some of those: the next such rank, -1 if it is the last
    # The report that the next number belongs to; and the first tokens that other frontends were owed then, or fewer if it fell
    # since.
    "report_ns", "others_owed",
)  # fmt: skip

NEVER_NS = -(1 << 62)
"""``reported_ns`` of a rank that has not reported, or whose clock tells nothing: as old as can be."""

COUNT_LIMIT = 1 << 32
"""Reported counts of requests are cut off here in the rule, so that no sum overflows or loses a digit as a double."""


class Table:
    """``n`` rows of zeros with named columns."""

    __slots__ = ("n", "table")

    columns: tuple[str, ...]

    def __init__(self, n: int) -> None:
        self.n = n
        self.table = bytearray(n * len(self.columns) * 8)
        words = memoryview(self.table).cast("q")
        for place, column in enumerate(self.columns):
            setattr(self, column, words[place :: len(self.columns)])

    def copy_from(self, other: Table) -> None:
        """Take over the rows of a shorter table of the same kind."""
        self.table[: len(other.table)] = other.table


class View(Table):
    """The state of ``n`` ranks as one frontend sees it, at ``now_ns``.

    Every rank starts unknown (``usable`` 0), without dispatches, and allowed.  ``own_rate`` is this frontend's own dispatch rate,
    requests a second.
    """

    __slots__ = (*VIEW_COLUMNS, "now_ns", "own_rate")
    columns = VIEW_COLUMNS

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
        super().__init__(n)
        self.now_ns = 0
        self.own_rate = 0.0
        for rank in range(n):
            self.allowed[rank] = 1
            self.reported_ns[rank] = NEVER_NS

    @property
    def candidates(self) -> Sequence[int]:
        """The ranks that may be chosen."""
        return [rank for rank, allowed in enumerate(self.allowed) if allowed]


class Inputs(Table):
    """What is kept of each rank between two looks.  Every rank starts ABSENT, unheard of, and available."""

    __slots__ = INPUT_COLUMNS
    columns = INPUT_COLUMNS

    epoch: Column
    state: Column
    same_clock: Column
    published_ns: Column
    bound_ns: Column
    available: Column
    pig_running: Column
    pig_waiting: Column
    pig_active: Column
    pig_total: Column
    pig_ns: Column
    unseen: Column
    oldest_ns: Column
    next_seen: Column
    report_ns: Column
    others_owed: Column

    def __init__(self, n: int) -> None:
        super().__init__(n)
        for rank in range(n):
            self.available[rank] = 1
            self.bound_ns[rank] = self.report_ns[rank] = NEVER_NS
