"""All checks, one after the other; one that cannot be made never hides the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loadbox.cli.doctor._finding import Finding, Level, fault
from loadbox.cli.doctor._machine import MACHINE
from loadbox.cli.doctor._segments import SEGMENTS
from loadbox.cli.doctor._selftest import SELFTEST

__all__ = ["examine_all"]

Check = Callable[[], Finding]


def examine_all(machine: Sequence[Check] = MACHINE, live: Sequence[Check] = (*SEGMENTS, *SELFTEST)) -> list[Finding]:
    """The findings, in the order of the checks.  Where there is no core that works, nothing can be read and no more is checked."""
    findings = [_made(check) for check in machine]
    if any(each.check == "core" and each.level is Level.FAULT for each in findings):
        return findings
    return findings + [_made(check) for check in live]


def _made(check: Check) -> Finding:
    try:
        return check()
    except Exception as error:
        name = check.__name__.replace("_", " ")
        return fault(name, f"This check failed itself: {type(error).__name__}: {error}.", "Please report it.")
