"""The four numbers of a tail: what may go out, and what a tail that came in is worth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from operator import index
from typing import SupportsIndex, TypeGuard

__all__ = ["INT64_MAX", "NO_SNAPSHOT", "Tail", "check_tail", "is_int", "is_plain"]

Tail = tuple[int, int, int, int]

INT64_MAX = (1 << 63) - 1
NO_SNAPSHOT: Tail = (0, 0, 0, 0)
_FIELDS = ("num_running", "num_waiting", "kv_active_pages", "kv_total_pages")


def is_plain(running: object, waiting: object, active: object, total: object) -> bool:
    """Whether these are four plain ints that may go out as they are: the common case in a few compares, once for each batch."""
    return (
        type(running) is int
        and type(waiting) is int
        and type(active) is int
        and type(total) is int
        and 0 <= running <= INT64_MAX
        and 0 <= waiting <= INT64_MAX
        and 0 <= active <= total <= INT64_MAX
    )


def check_tail(load: object) -> Tail:
    """Give a load back as four ints that a peer can read; TypeError or ValueError say what is wrong with it.

    A tuple of four plain ints in range comes back as the same object.

    The rules are those of the mailbox: anything with ``__index__`` but bool, 0 to 2**63 - 1, no more active pages than there are
    (a total of 0 means "no snapshot" and says nothing of the others).  A real gateway loses the tokens of the whole batch
    over one null, float or negative number here, so nothing is clamped and nothing is guessed.
    """
    if type(load) is tuple and len(load) == 4 and is_plain(*load):
        return load
    # Bytes would iterate as numbers, and sets and mappings in an order that means nothing.
    if not isinstance(load, Iterable) or isinstance(load, (str, bytes, bytearray, Set, Mapping)):
        raise TypeError(f"a load is four ints ({', '.join(_FIELDS)}), not {type(load).__name__}")
    try:
        running, waiting, active, total = load
    except ValueError:
        raise ValueError(f"a load is four ints ({', '.join(_FIELDS)}), and this {type(load).__name__} has not four items") from None
    numbers = (
        _to_int(_FIELDS[0], running),
        _to_int(_FIELDS[1], waiting),
        _to_int(_FIELDS[2], active),
        _to_int(_FIELDS[3], total),
    )
    if numbers[2] > numbers[3] > 0:
        raise ValueError(f"kv_active_pages is {numbers[2]} of kv_total_pages {numbers[3]}: more pages in use than there are")
    return numbers


def is_int(value: object) -> TypeGuard[SupportsIndex]:
    """Whether this can be a count or a number of something: anything with ``__index__`` but bool."""
    # By name, because numpy's bool has __index__ in old releases, and is no more a count than Python's.
    return type(value).__name__ not in ("bool", "bool_") and hasattr(value, "__index__")


def _to_int(field: str, value: object) -> int:
    if not is_int(value):
        raise TypeError(f"{field} must be an int, not {type(value).__name__}")
    number = index(value)
    if not 0 <= number <= INT64_MAX:
        raise ValueError(f"{field} is {number}, outside 0 to 2**63 - 1")
    return number
