"""A frontend's view: every rank's load from the best source there is, its own dispatches, and the choice of a rank."""

from loadbox.reader._load_reader import LoadReader
from loadbox.reader._types import NoRankAvailable, RankLoad

__all__ = ["LoadReader", "NoRankAvailable", "RankLoad"]
