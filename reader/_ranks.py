"""What has become of each rank: which life of it is meant, whether it may be chosen, and what its last piggyback said.

Epochs decide what is old.  A mailbox under another epoch is another life of the rank: what was sent to the former one is lost, and
a piggyback from before is forgotten.  A mailbox that turns DEAD or CLOSED takes the rank out of the choice, and so does ``gone``;
a batch that comes in later brings it back (batches carry no epoch, so a late one of a former life does too, until the rank is
declared gone again), and a new life does.

Pure: no clock and no file; what the mailbox says comes in as arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadbox.mailbox import RankState
from loadbox.reader._view import NEVER_NS

if TYPE_CHECKING:
    from loadbox.reader._ledger import Ledger
    from loadbox.reader._view import Inputs

__all__ = ["Ranks"]

_ENDED = frozenset((RankState.DEAD, RankState.CLOSED))
_ALIVE = frozenset((RankState.SILENT, RankState.LIVE, RankState.STALLED))


class Ranks:
    """The lives of the ranks of ``inputs``, whose columns it keeps but for the ledger's.

    ``lives[rank]`` is the life (a mailbox's epoch) that a request sent now goes to, 0 if not known.
    """

    __slots__ = ("_gone", "_heard", "_inputs", "_last_life", "_ledger", "lives")

    def __init__(self, inputs: Inputs, ledger: Ledger) -> None:
        self.lives: list[int] = []
        self._last_life: list[int] = []
        self._gone: list[bool] = []
        self._heard: list[bool] = []
        self.move(inputs, ledger)

    def move(self, inputs: Inputs, ledger: Ledger) -> None:
        """Go on with other tables, of as many ranks or more."""
        more = inputs.n - len(self.lives)
        self.lives += [0] * more
        self._last_life += [0] * more
        self._gone += [False] * more
        self._heard += [False] * more
        self._inputs, self._ledger = inputs, ledger

    def observed(self, rank: int, epoch: int, state: int, same_clock: bool) -> None:
        """The mailbox of a rank shows another epoch or state; ``same_clock``: its writer's clock is ours."""
        inputs = self._inputs
        ended = state in _ENDED and inputs.state[rank] not in _ENDED
        inputs.epoch[rank], inputs.state[rank] = epoch, state
        self.lives[rank] = epoch if state in _ALIVE else 0
        if epoch and epoch != self._last_life[rank]:
            ended = ended or self._last_life[rank] != 0
            self._ledger.new_life(rank)
            self._last_life[rank] = epoch
            if state in _ALIVE:
                self._gone[rank] = False
            inputs.same_clock[rank], inputs.published_ns[rank], inputs.bound_ns[rank] = same_clock, 0, NEVER_NS
        if ended:
            self._forget(rank)
        self._settle(rank)

    def heard(self, rank: int, load: tuple[int, int, int, int] | None, left_ns: int) -> None:
        """A batch came in that left the rank at ``left_ns`` or later, with a load, or without."""
        inputs = self._inputs
        if load is not None:
            inputs.pig_running[rank], inputs.pig_waiting[rank], inputs.pig_active[rank], inputs.pig_total[rank] = load
            inputs.pig_ns[rank] = left_ns
            if not self._ledger.in_flight(rank):
                self.idle(rank)
        self._heard[rank], self._gone[rank] = True, False
        self._settle(rank)

    def any_known(self) -> bool:
        """Has any rank ever shown itself, by a mailbox of whatever state or by a batch?"""
        return any(self._heard) or any(self._last_life) or any(self._inputs.state)

    def idle(self, rank: int) -> None:
        """Nothing is in flight there any more: of its own quiescence a frontend knows best, whatever the last batch said."""
        self._inputs.pig_running[rank] = self._inputs.pig_waiting[rank] = 0

    def gone(self, rank: int) -> None:
        """The engine behind a rank is gone, and what it had in flight."""
        self._ledger.drop(rank)
        self._forget(rank)
        self._gone[rank] = True
        self._settle(rank)

    def back(self, rank: int) -> bool:
        """The caller says that the rank is not gone.  Gives whether it may be chosen: not if its mailbox says that it ended."""
        self._gone[rank] = False
        self._settle(rank)
        return bool(self._inputs.available[rank])

    def _forget(self, rank: int) -> None:
        self._heard[rank] = False
        self._inputs.pig_total[rank] = 0

    def _settle(self, rank: int) -> None:
        ended = self._inputs.state[rank] in _ENDED and not self._heard[rank]
        self._inputs.available[rank] = not (self._gone[rank] or ended)
