"""The choosers, by name.  Each is pure: it sees a ``View`` and a source of random numbers, and names a rank.

``cold-set`` is the default; the others are what it is compared with, and simple enough to be predicted.  Ties are always drawn,
never broken by the rank's number: a fixed order piles requests up on the first ranks.  A rank without a usable report never wins
for that: where a rule reads reports, it counts as full as the fullest known rank, and what was sent there on top.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from loadbox.reader._cold_set import ColdSet, two_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from loadbox.reader._view import View

__all__ = ["CHOOSERS", "Chooser", "make_chooser"]


class Chooser(Protocol):
    """A rule that chooses a rank."""

    def pick(self, view: View, rng: Random) -> int:
        """Choose an allowed rank; -1 if there is none."""


class _Scored:
    """Take the lowest score; ties are drawn."""

    def score(self, view: View) -> Sequence[float]:
        raise NotImplementedError

    def pick(self, view: View, rng: Random) -> int:
        candidates = view.candidates
        if not candidates:
            return -1
        scores = self.score(view)
        least = min(scores[i] for i in candidates)
        ties = [i for i in candidates if scores[i] == least]
        return ties[int(rng.random() * len(ties))]


def _unknown_last(view: View, scores: list[float]) -> list[float]:
    """Count ranks without a usable report as full as the fullest known one, and what was sent there on top."""
    worst = max((score for score, usable in zip(scores, view.usable, strict=True) if usable), default=0)
    rows = zip(scores, view.usable, view.in_flight, strict=True)
    return [score if usable else max(score, worst + sent) for score, usable, sent in rows]


class Own(_Scored):
    """The fewest requests in flight from this frontend alone; no report is looked at."""

    def score(self, view: View) -> Sequence[float]:
        return view.own.tolist()


class Least(_Scored):
    """The fewest requests running and waiting by the snapshot alone: the simplest rule, and it herds."""

    def score(self, view: View) -> Sequence[float]:
        return _unknown_last(view, [r + w for r, w in zip(view.running, view.waiting, strict=True)])


class Vllm(_Scored):
    """vLLM's published score, ``4 * waiting + running``; as there, one's own dispatches since the report count as waiting."""

    def score(self, view: View) -> Sequence[float]:
        rows = zip(view.running, view.waiting, view.unseen, view.usable, strict=True)
        return _unknown_last(view, [4 * (w + (u if usable else 0)) + r for r, w, u, usable in rows])


class Smg(_Scored):
    """The gateway SMG's score: requests, plus six times the waiting ones by how far the KV cache is more than half full."""

    def score(self, view: View) -> Sequence[float]:
        full = (active / total if total else 0.0 for active, total in zip(view.kv_active, view.kv_total, strict=True))
        rows = zip(view.running, view.waiting, view.own, full, strict=True)
        return _unknown_last(view, [max(own, w + r) + w * 6 * max(0.0, kv - 0.5) for r, w, own, kv in rows])


class PowerOfTwo:
    """The less loaded of two ranks drawn at random, by requests in flight or reported, whichever are more."""

    def pick(self, view: View, rng: Random) -> int:
        candidates = view.candidates
        if not candidates:
            return -1
        rows = zip(view.running, view.waiting, view.unseen, view.in_flight, view.usable, strict=True)
        loads = _unknown_last(view, [max(sent, r + w + (u if usable else 0)) for r, w, u, sent, usable in rows])
        one, other = two_of(len(candidates), rng.random(), rng.random())
        return min(candidates[one], candidates[other], key=loads.__getitem__)


class RoundRobin:
    """Each rank in turn, from a random one on."""

    def __init__(self) -> None:
        self._last: int | None = None

    def pick(self, view: View, rng: Random) -> int:
        candidates = view.candidates
        if not candidates:
            return -1
        if self._last is None:
            self._last = candidates[int(rng.random() * len(candidates))]
        else:
            self._last = next((i for i in candidates if i > self._last), candidates[0])
        return self._last


CHOOSERS: dict[str, type[Chooser]] = {
    "cold-set": ColdSet,
    "least": Least,
    "own": Own,
    "p2c": PowerOfTwo,
    "round-robin": RoundRobin,
    "smg": Smg,
    "vllm": Vllm,
}


def make_chooser(name: str) -> Chooser:
    """A new chooser of that name; ValueError if there is none."""
    try:
        return CHOOSERS[name]()
    except (KeyError, TypeError):
        raise ValueError(f"there is no chooser {name!r}: use one of {', '.join(CHOOSERS)}") from None
