"""What a check found, and how grave it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["Finding", "Level", "fault", "fine", "warning"]


class Level(IntEnum):
    """How grave; the largest of all is the exit code."""

    OK = 0
    WARNING = 1
    """It works, but less well than it could, or something is to be looked at."""
    FAULT = 2
    """Mailboxes do not work here."""


@dataclass(frozen=True)
class Finding:
    """One check's result, in sentences."""

    check: str
    level: Level
    found: str
    advice: str = ""


def fine(check: str, found: str) -> Finding:
    return Finding(check, Level.OK, found)


def warning(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Level.WARNING, found, advice)


def fault(check: str, found: str, advice: str) -> Finding:
    return Finding(check, Level.FAULT, found, advice)
