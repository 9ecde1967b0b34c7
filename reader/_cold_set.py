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

if TYPE_CHECKING:
    from random import Random

    from loadbox.reader._view import View

__all__ = ["ColdSet", "pick"]

FIRST_TOKEN_WEIGHT = 3
AGE_LIMIT_NS = 500_000_000


class ColdSet:
    """The cold-set rule, as this module's head has it."""

    def pick(self, view: View, rng: Random) -> int:
        """Choose an allowed rank; there must be one."""
        return pick(view, rng.random(), rng.random())


def pick(view: View, first: float, second: float) -> int:
    """Choose; ``first`` and ``second``, 0 <= x < 1, draw the two ties."""
    running, waiting = view.running.tolist(), view.waiting.tolist()
    in_flight, owed, usable = view.in_flight.tolist(), view.owed.tolist(), view.usable.tolist()
    unseen = view.unseen.tolist()
    loads = []
    known = foreign = 0
    for i, believed in enumerate(usable):
        sent = in_flight[i]
        late = waiting[i] + (unseen[i] if believed else 0)
        load = max(sent, running[i] + late) + FIRST_TOKEN_WEIGHT * max(owed[i], late)
        loads.append(load)
        if believed:
            known += 1
            foreign += load - sent - FIRST_TOKEN_WEIGHT * owed[i]
    if 0 < known < view.n:
        presumed = 1 + -(-foreign // known)
        loads = [load if believed else load + presumed for load, believed in zip(loads, usable, strict=True)]
    candidates = view.candidates
    edge = sorted(loads[i] for i in candidates)[min(cold_ranks(view), len(candidates)) - 1]
    weight = {i: in_flight[i] + FIRST_TOKEN_WEIGHT * owed[i] for i in candidates if loads[i] <= edge}
    least = min(weight.values())
    ties = [i for i in candidates if weight.get(i) == least]
    one, other = two_of(len(ties), first, second)
    return ties[one] if loads[ties[one]] <= loads[ties[other]] else ties[other]


def cold_ranks(view: View) -> int:
    """1 + floor(2 M): how many ranks may be the least loaded one."""
    reported = in_flight = own = age = known = 0
    for i in range(view.n):
        if view.usable[i]:
            queued = view.running[i] + view.waiting[i]
            known += 1
            reported += queued
            in_flight += view.in_flight[i]
            own += view.own[i]
            if queued or not view.mailbox[i]:
                since = view.now_ns - view.reported_ns[i]
                # A report from the future says nothing of its age.
                age += since if 0 <= since <= AGE_LIMIT_NS else AGE_LIMIT_NS
    if not own or reported <= in_flight:
        return 1
    return 1 + int(2.0 * ((reported - in_flight) / own) * view.own_rate * (age / known / 1e9))


def two_of(count: int, first: float, second: float) -> tuple[int, int]:
    """Two different places among ``count``, each pair equally likely; the same place twice if there is but one."""
    one = int(first * count)
    if count == 1:
        return 0, 0
    other = int(second * (count - 1))
    return one, other + (other >= one)
