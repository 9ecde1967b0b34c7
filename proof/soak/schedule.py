"""What is done to whom and when: drawn from a seed before anything starts, printed, and the same again for the same seed."""

from __future__ import annotations

import random
from typing import NamedTuple

__all__ = ["FAULTS_A_SECOND", "Fault", "draw"]

FAULTS_A_SECOND = 4.0
# kill: SIGKILL, and another life after `pause`.  stop: SIGSTOP for `pause`.  kill-stopped: both, the next life starting at once.
# close: SIGTERM, upon which it closes in order.  rival: a second writer of a living rank.  clean: `loadbox clean`'s work.
_RANK = ("kill", "kill", "stop", "stop", "kill-stopped", "close", "close", "rival")
_FRONTEND = ("kill", "kill", "stop", "close")


class Fault(NamedTuple):
    """One thing that is done."""

    at: float
    what: str
    actor: int
    pause: float

    def __str__(self) -> str:
        return f"{self.at:8.3f} s  {self.what:12}  actor {self.actor:2}  {self.pause:.3f} s"


def draw(seed: int, seconds: float, ranks: int, actors: int, spared: frozenset[int]) -> list[Fault]:
    """The schedule: actors 0 to ``ranks`` - 1 are ranks, the others frontends; the spared are stopped at most."""
    random_ = random.Random(seed)
    faults = []
    at = random_.expovariate(FAULTS_A_SECOND)
    while at < seconds:
        actor = random_.randrange(actors)
        what = random_.choice(_RANK if actor < ranks else _FRONTEND)
        pause = random_.choice((0.0, random_.uniform(0.0, 0.3), random_.uniform(0.0, 1.5)))
        if actor in spared and what != "rival":
            what = "stop"
        if random_.random() < 0.03:
            what = "clean"
        faults.append(Fault(at, what, actor, pause))
        at += random_.expovariate(FAULTS_A_SECOND)
    return faults
