"""A simulated frontend: loadbox's own bookkeeping, merging and choosers, with the simulation's reports and its clock.

``loadbox.reader.LoadReader`` does the same with shared memory and a real clock; only the reading is replaced here.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from loadbox.mailbox import RankState
from loadbox.reader._chooser import make_chooser
from loadbox.reader._core import CHANGED, RANK_SHIFT, SEEN, merge
from loadbox.reader._ledger import Ledger
from loadbox.reader._ranks import Ranks
from loadbox.reader._view import Inputs, View

_ROW_WORDS = 7  # as GroupReader has them: four numbers, published_ns, epoch, and rank | state | usable in one


def nanoseconds(seconds: float) -> int:
    """A simulated time as loadbox wants it."""
    return round(seconds * 1e9)


class Frontend:
    """One frontend's view of the ranks and its chooser."""

    def __init__(self, ranks: int, chooser: str, kv_pages: int, rng: random.Random) -> None:
        self._kv_pages = kv_pages
        self._rng = rng
        self._chooser = make_chooser(chooser)
        self.words = memoryview(bytearray(8 * ranks)).cast("Q")
        """This frontend's word for each rank, as its dispatch board would have it."""
        self.others: list[memoryview] = []
        """The boards of the other frontends that this one can see."""
        self._inputs, self._view = Inputs(ranks), View(ranks)
        self._ledger = Ledger(self._inputs, self.words)
        self._ranks = Ranks(self._inputs, self._ledger)
        self._rows = np.zeros((ranks, _ROW_WORDS), np.int64)
        self._row_words = self._rows.reshape(-1).data
        self._ranks_heard = np.full(ranks, -1.0)
        self._last_ns = 0

    def see_mailboxes(self, loads: np.ndarray[Any, Any]) -> None:
        """All mailboxes are there, with these loads; each rank's first life, open from the start."""
        rows = self._rows
        rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] = loads["running"], loads["waiting"], loads["pages"], self._kv_pages
        rows[:, 4] = np.rint(loads["at"] * 1e9)
        rows[:, 5] = 1
        rows[:, 6] = np.arange(len(rows)) | int(RankState.LIVE) << 32 | 1 << 40

    def hear_batches(self, loads: np.ndarray[Any, Any]) -> None:
        """These loads came on the last batches; ``at`` is when they left."""
        for rank in np.nonzero(loads["at"] > self._ranks_heard)[0].tolist():
            at, running, waiting, pages = loads[rank].tolist()
            self._ranks_heard[rank] = at
            self._ranks.heard(rank, (running, waiting, pages, self._kv_pages), nanoseconds(at))

    def choose(self, request: int, now: float) -> int:
        """Look, choose and book."""
        view, inputs, ledger = self._view, self._inputs, self._ledger
        view.now_ns = now_ns = nanoseconds(now)
        view.own_rate = ledger.rate(now_ns)
        found = self._merge()
        if found & CHANGED:  # only at the first look: nobody restarts here
            for rank, row in enumerate(self._rows.tolist()):
                self._ranks.observed(rank, row[5], RankState.LIVE, True)
            found = self._merge()
        rank = found >> RANK_SHIFT if found & SEEN else -1
        while rank >= 0:
            view.unseen[rank] -= ledger.reported(rank, view.reported_ns[rank])
            rank = inputs.next_seen[rank]
        self._last_ns = now_ns
        chosen = self._chooser.pick(view, self._rng)
        ledger.book(str(request), chosen, self._ranks.lives[chosen], now_ns)
        return chosen

    def _merge(self) -> int:
        view = self._view
        return merge(view.table, self._inputs.table, self._row_words, self.words, self.others, view.now_ns, self._last_ns)

    def first_token(self, request: int) -> None:
        """The first token has come in."""
        self._ledger.first_token(str(request))

    def finished(self, request: int) -> None:
        """The last token has come in."""
        emptied = self._ledger.finished(str(request))
        if emptied >= 0:
            self._ranks.idle(emptied)
