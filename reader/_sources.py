"""Looking: the mailboxes of the group and the boards of the other frontends, brought into one view."""

from __future__ import annotations

import logging
import os
from time import monotonic_ns
from typing import TYPE_CHECKING

import numpy

from loadbox.mailbox import GroupReader, MailboxError, MailboxUnsupported, _attach, _files
from loadbox.mailbox._host import time_ns_inode
from loadbox.mailbox._names import list_groups, segment_name
from loadbox.reader._board import Board
from loadbox.reader._boards import Boards
from loadbox.reader._core import CHANGED, RANK_SHIFT, merge
from loadbox.reader._ledger import Ledger
from loadbox.reader._ranks import Ranks
from loadbox.reader._view import Inputs, View

if TYPE_CHECKING:
    from typing import Literal

__all__ = ["Sources"]

_ROW_WORDS = 7  # of GroupReader.dtype: epoch is the sixth, and rank, state and usable share the last
_INTERVAL_NS = 100_000_000
_PATIENCE_NS = 30_000_000_000
"""A group of which nothing is known for so long may be misspelt."""
_log = logging.getLogger("loadbox")


class Sources:
    """The view of one frontend, and all that it is made of.  The caller serialises.

    ``look`` brings ``view`` up to date; it and the tables are replaced by larger ones when more ranks appear.
    """

    __slots__ = (
        "_board", "_group", "_last_ns", "_next_boards_ns", "_orphan", "_others", "_reader", "_row_words", "_rows", "_told",
        "_unknown_until_ns", "_wants_board", "inputs", "ledger", "ranks", "view", "words",
    )  # fmt: skip

    def __init__(self, group: str, dp_size: int | None, board: Literal["auto"] | bool) -> None:
        self._group = group
        self._wants_board: Literal["auto"] | bool = board
        self._orphan = False
        self._told: set[str] = set()
        self._last_ns = self._next_boards_ns = 0
        self._unknown_until_ns: int | None = monotonic_ns() + _PATIENCE_NS
        self._board: Board | None = None
        self._others = Boards(group, self.tell)
        self._reader: GroupReader | None = None
        try:
            self._reader = GroupReader(group, dp_size)
        except MailboxUnsupported as error:
            self.tell(f"the view of {group} goes on without mailboxes: {error}")
        self.view, self.inputs = View(0), Inputs(0)
        self.ledger = Ledger(self.inputs, memoryview(bytearray()))
        self.ranks = Ranks(self.inputs, self.ledger)
        try:
            self.grow(dp_size or (len(self._reader.read()) if self._reader else 0))
        except BaseException:
            self.close()
            raise
        self._wants_board = board and "auto"  # later, when it grows or in a forked child, nobody expects a view to raise

    def tell(self, sentence: str) -> None:
        """Log a sentence once, and not more than a hundred of them."""
        if sentence not in self._told and len(self._told) < 100:
            self._told.add(sentence)
            _log.warning("%s", sentence)

    def grow(self, n: int) -> None:
        """Make room for ``n`` ranks; what is known of the present ones stays."""
        inputs = Inputs(n)
        inputs.copy_from(self.inputs)
        self.inputs, self.view = inputs, View(n)
        if self._reader is not None:
            self._rows = numpy.zeros(n, self._reader.dtype)
            self._row_words = self._rows.view(numpy.int64).data
        else:
            self._row_words = memoryview(bytearray(n * _ROW_WORDS * 8)).cast("q")
        self._take_words()

    def _take_words(self) -> None:
        """Own a board with room for all ranks, if one is wanted and can be had; else keep the words to ourselves."""
        n = self.view.n
        if self._board is None or self._board.capacity < n:
            old, self._board = self._board, None
            if old is not None:
                old.close()
            if self._wants_board:
                try:
                    self._board = Board(self._group, n)
                except MailboxError as error:
                    if self._wants_board is True:
                        raise
                    self.tell(f"the view of {self._group} goes on without a dispatch board: {error}")
            self.words = self._board.words if self._board else memoryview(bytearray(8 * n)).cast("Q")
        self.ledger.move(self.inputs, self.words)
        self.ranks.move(self.inputs, self.ledger)

    def look(self) -> View:
        """Bring the view up to now, and give it.  Waits for nobody."""
        before_ns = monotonic_ns()
        if self._reader is not None:
            while True:
                try:
                    self._reader.read(self._rows)
                    break
                except ValueError:  # the group has grown, and may do so again meanwhile
                    self.grow(len(self._reader.read()))
        view = self.view
        view.now_ns = now_ns = monotonic_ns()
        if now_ns >= self._next_boards_ns:
            self._look_around(now_ns)
        view.own_rate = self.ledger.rate(now_ns)
        words, others, last_ns = self.words, self._others.words, self._last_ns
        found = merge(view.table, self.inputs.table, self._row_words, words, others, now_ns, last_ns)
        while found & CHANGED:
            self._mailboxes_changed()
            found = merge(view.table, self.inputs.table, self._row_words, words, others, now_ns, last_ns)
        if found:
            self._reports_came(found >> RANK_SHIFT)
        self._last_ns = before_ns
        return view

    def _look_around(self, now_ns: int) -> None:
        """What takes system calls, and is done at most every 0.1 s: the boards of the others, and one's own after a fork."""
        self._next_boards_ns = now_ns + _INTERVAL_NS
        if self._orphan:
            self._orphan = False
            self._take_words()
        if self._unknown_until_ns is not None:
            self._miss_the_group(now_ns, self._unknown_until_ns)
        if self._wants_board:
            self._others.look(self._board.name if self._board else None)

    def _miss_the_group(self, now_ns: int, until_ns: int) -> None:
        """Say once that nobody has shown up: nothing else would tell a misspelt name from an engine that is still to come."""
        if self.ranks.any_known() or (self._reader is not None and self._rows["state"].any()):
            self._unknown_until_ns = None
        elif now_ns >= until_ns:
            self._unknown_until_ns = None
            there = ", ".join(list_groups()[:8]) or "none"
            self.tell(f"nothing is known of group {self._group} yet: no mailbox on this host and no batch; groups here: {there}")

    def _mailboxes_changed(self) -> None:
        inputs = self.inputs
        for rank in range(self.view.n):
            epoch = self._row_words[rank * _ROW_WORDS + 5]
            state = self._row_words[rank * _ROW_WORDS + 6] >> 32 & 0xFF
            if epoch != inputs.epoch[rank] or state != inputs.state[rank]:
                self.ranks.observed(rank, epoch, state, epoch != 0 and self._same_clock(rank))

    def _same_clock(self, rank: int) -> bool:
        """Do the writer's times of CLOCK_MONOTONIC compare with ours?  The rows do not say, so its header is asked, once a life."""
        mine = time_ns_inode()
        try:
            fd = _files.open_existing(segment_name(self._group, rank), read_only=True)
        except OSError:
            return False
        try:
            header = _attach.read_header(fd)
        finally:
            os.close(fd)
        return header is not None and mine != 0 and header.time_ns_inode == mine

    def _reports_came(self, rank: int) -> None:
        """Reports know of dispatches, from ``rank`` on, that were counted as unseen: count them no longer."""
        inputs, view = self.inputs, self.view
        while rank >= 0:
            view.unseen[rank] -= self.ledger.reported(rank, view.reported_ns[rank])
            rank = inputs.next_seen[rank]

    def forked(self) -> None:
        """In a forked child: nothing that was dispatched is this process's, and the board is its parent's."""
        board, self._board = self._board, None
        if board is not None:
            board.disown()
        self.words = memoryview(bytearray(8 * self.view.n)).cast("Q")
        self.ledger = Ledger(self.inputs, self.words)
        self.ranks.move(self.inputs, self.ledger)
        self._orphan, self._next_boards_ns = True, 0  # the next look makes a board of the child's own

    def close(self) -> None:
        """Remove the board and let go of everything."""
        if self._board is not None:
            self._board.close()
        self._others.close()
        if self._reader is not None:
            self._reader.close()
