"""What may be published, and what is a time.  Both twins come here with whatever is not four plain ints in range, so their errors
are one.
"""

from __future__ import annotations

import math
from numbers import Real
from operator import index

__all__ = ["BOOLS", "FIELDS", "check_load", "check_seconds"]

FIELDS = ("num_running", "num_waiting", "kv_active_pages", "kv_total_pages")
_INT64_MAX = (1 << 63) - 1
BOOLS = ("bool", "bool_")  # Python's, and numpy's, which has an __index__ before numpy 2


def _to_int(field: str, value: object) -> int:
    if type(value).__name__ in BOOLS:
        raise TypeError(f"{field} must be an int, not bool; the mailbox keeps its old value")
    try:
        number = index(value)  # type: ignore[arg-type]  # whatever has no __index__ is what this is here to find
    except TypeError:
        raise TypeError(f"{field} must be an int, not {type(value).__name__}; the mailbox keeps its old value") from None
    if not 0 <= number <= _INT64_MAX:
        raise ValueError(f"{field} is {number}, outside 0 to 2**63 - 1; the mailbox keeps its old value")
    return number


def check_load(
    num_running: object, num_waiting: object, kv_active_pages: object, kv_total_pages: object, /
) -> tuple[int, int, int, int]:
    """Give the four numbers back as ints that a record can hold.

    Takes anything with ``__index__`` but bool.  TypeError for other types, ValueError for a negative, for more than int64 holds
    and for more active pages than there are (a total of 0 is "no snapshot" and says nothing of the others).
    """
    load = (
        _to_int(FIELDS[0], num_running),
        _to_int(FIELDS[1], num_waiting),
        _to_int(FIELDS[2], kv_active_pages),
        _to_int(FIELDS[3], kv_total_pages),
    )
    if load[2] > load[3] > 0:
        raise ValueError(
            f"kv_active_pages is {load[2]} of kv_total_pages {load[3]}: more pages in use than there are; "
            "the mailbox keeps its old value"
        )
    return load


def check_seconds(what: str, seconds: float, *, forever: bool = True) -> float:
    """Give ``seconds`` back as a float, 0 or more; TypeError or ValueError otherwise.  ``forever``: inf is allowed."""
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise TypeError(f"{what} must be a number of seconds, not {type(seconds).__name__}")
    try:
        number = float(seconds)
    except OverflowError:
        number = math.inf if seconds > 0 else -math.inf
    if not number >= 0 or (number == math.inf and not forever):
        raise ValueError(f"{what} is {number}: use a number of seconds, 0 or more")
    return number
