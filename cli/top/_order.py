"""In which order ranks are shown, and what a key does about it.  Pure: no terminal, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from loadbox.cli._survey import RankLook
from loadbox.mailbox import RankState

__all__ = ["ORDERS", "Order"]


@dataclass(frozen=True)
class _Key:
    letter: str
    largest_first: bool
    value: Callable[[RankLook], Any]
    """None: not known; such ranks come last, whichever way round."""


def _kv(look: RankLook) -> float | None:
    return None if look.snapshot is None else look.snapshot.kv_active_pages / look.snapshot.kv_total_pages


def _up(look: RankLook) -> float | None:
    gone = look.state in (RankState.DEAD, RankState.CLOSED)
    return None if gone or look.started_s is None else -look.started_s


ORDERS = {
    "group": _Key("g", False, lambda look: look.group),
    "state": _Key("s", True, lambda look: look.state),
    "running": _Key("r", True, lambda look: look.snapshot and look.snapshot.num_running),
    "waiting": _Key("w", True, lambda look: look.snapshot and look.snapshot.num_waiting),
    "kv": _Key("k", True, _kv),
    "age": _Key("a", True, lambda look: look.age_s),
    "iterations": _Key("i", True, lambda look: look.publishes_per_s),
    "flight": _Key("f", True, lambda look: look.in_flight),
    "up": _Key("u", True, _up),
    "pid": _Key("p", False, lambda look: look.pid),
    "owner": _Key("o", False, lambda look: look.uid),
}
_LETTERS = {key.letter: name for name, key in ORDERS.items()}


@dataclass(frozen=True)
class Order:
    """By which column, and whether the other way round than that column usually goes."""

    name: str = "group"
    reverse: bool = False

    @property
    def largest_first(self) -> bool:
        """Whether large values are on top now."""
        return ORDERS[self.name].largest_first is not self.reverse

    def press(self, key: str) -> Order:
        """The order after a key: a column's letter chooses it, the same again or ``-`` turns it round; others do nothing."""
        name = _LETTERS.get(key)
        if key == "-" or name == self.name:
            return replace(self, reverse=not self.reverse)
        return self if name is None else Order(name)

    def sort(self, looks: Iterable[RankLook]) -> list[RankLook]:
        """Sorted by the column, equal ones by group and rank, unknown ones last."""
        value = ORDERS[self.name].value
        ranks = sorted(looks, key=lambda look: (look.group, look.rank))
        if self.name == "group":
            return ranks[::-1] if self.reverse else ranks
        known = [look for look in ranks if value(look) is not None]
        unknown = [look for look in ranks if value(look) is None]
        return sorted(known, key=value, reverse=self.largest_first) + unknown
