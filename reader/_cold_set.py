"""The default rule: among the ranks that may well be the least loaded, the one that this frontend has sent the least.

A scheduler's snapshot is true but late, and other frontends see it too: if all of them send the next request to the rank that looks
best, it is the worst by the time they arrive.  So the rule keeps two things apart.

*How loaded is a rank?*  What it reported, and what was sent there later than the report, but never less than what is known to be
in flight there; and a request without its first token counts four times, because its prefill is still to come::

    unseen_i = dispatches to i later than its report
    owed_i   = max(in flight without a first token, waiting_i + unseen_i)
    load_i   = max(in flight, running_i + waiting_i + unseen_i) + 3 * owed_i

*How far can that be trusted?*  Requests that the ranks report but nobody visible sent come from frontends that cannot be seen.  If
they are ``x`` times one's own, they dispatch ``x`` times one's own rate, and since the reports were made they have sent about::

    M = max(0, sum(running + waiting) - sum(in flight)) / sum(own) * own rate * mean age of the reports

requests that no report shows.  Any rank whose load is at most the ``(1 + floor(2 M))``-th smallest may be the least loaded one.
Among these the choice goes by what cannot herd, one's own dispatches (each completion is seen by one frontend): the least
``in flight + 3 * owed``, and of two random ties the one with the smaller load.  Ages count 0.5 s at most; an idle mailbox
counts as fresh, since an idle scheduler publishes nothing; with nothing of one's own in flight M is 0.

*A rank without a usable report* takes part through its dispatches alone: it is taken to bear, beside them, one request more than
what the known ranks bear on average beside theirs.  So it never wins for being unknown, yet gets its first requests (a rank that
only reports by piggyback would otherwise never report), and where nobody has reported all are filled evenly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadbox.reader import _core

if TYPE_CHECKING:
    from random import Random

    from loadbox.reader._view import View

__all__ = ["ColdSet", "two_of"]


class ColdSet:
    """The cold-set rule, as this module's head has it."""

    def pick(self, view: View, rng: Random) -> int:
        """Choose an allowed rank; -1 if there is none."""
        return _core.cold_set(view.table, view.now_ns, view.own_rate, rng.random(), rng.random())


def two_of(count: int, first: float, second: float) -> tuple[int, int]:
    """Two different places among ``count``, each pair equally likely; the same place twice if there is but one."""
    if count == 1:
        return 0, 0
    one, other = int(first * count), int(second * (count - 1))
    return one, other + (other >= one)
