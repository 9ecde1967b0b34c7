"""What a way of telling a rank's load looks like to the harness."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

__all__ = ["Load", "Missing", "Peer", "Publish", "Read", "ReadAll"]

Load = tuple[int, int, int, int]
Publish = Callable[[int, int, int, int], object]
Read = Callable[[], "Load | None"]
ReadAll = Callable[[], object]


class Missing(Exception):
    """The peer cannot run here; says what is missing."""


class Peer:
    """One way of telling loads.  ``place`` is a name of its own, which both sides are given."""

    name: ClassVar[str]
    guarded: ClassVar[bool] = True
    """Claims never to give a torn value."""
    quick: ClassVar[bool] = False
    """Runs in CI."""
    many: ClassVar[bool] = True
    """Can be measured with many ranks."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.kept: list[object] = []

    @classmethod
    def require(cls) -> None:
        """Raise Missing if it cannot run here."""

    def prepare(self, ranks: int) -> None:
        """What must be there before either side starts; called once, in the harness."""

    def writer(self, rank: int, ranks: int) -> Publish:
        """The scheduler's end."""
        raise NotImplementedError

    def reader(self, rank: int, ranks: int) -> Read:
        """A frontend's end, for one rank."""
        raise NotImplementedError

    def reader_of_all(self, ranks: int) -> ReadAll:
        """A frontend's end for all ranks: in one call if the peer has one, else one read after the other."""
        reads = [self.reader(rank, ranks) for rank in range(ranks)]

        def read_all() -> list[Load | None]:
            return [read() for read in reads]

        return read_all

    def clean(self) -> None:
        """Remove what was made, whoever died."""
