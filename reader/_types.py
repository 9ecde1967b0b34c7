"""What a view gives: a rank's load with its origin, and the one error of choosing."""

from typing import Literal, NamedTuple

from loadbox.mailbox import LoadSnapshot, RankState

__all__ = ["NoRankAvailable", "RankLoad"]


class NoRankAvailable(LookupError):
    """No rank may be chosen: none is known, or all are excluded, dead or gone.  The message says which."""


class RankLoad(NamedTuple):
    """One rank as a view sees it.

    ``snapshot`` is what the rank reported, None where nothing usable is known: a load is usable exactly if it is not None.
    ``source`` says where it came from.  ``state`` is the mailbox's, whatever the source.  ``age`` is seconds since the report left
    the rank (mailbox) or came in (piggyback), None if not known.  ``in_flight`` and ``owed`` are this view's own dispatches to the
    rank: requests, and those of them without a first token.
    """

    rank: int
    snapshot: LoadSnapshot | None
    source: Literal["mailbox", "piggyback", "none"]
    state: RankState
    age: float | None
    in_flight: int
    owed: int
