"""The pure-Python twin of ``_core_c.c``: the same two functions, the same decisions, for machines without a compiler."""

from __future__ import annotations

from itertools import repeat

from loadbox.reader._view import COUNT_LIMIT, INPUT_COLUMNS, NEVER_NS, VIEW_COLUMNS

__all__ = ["cold_set", "input_columns", "merge", "view_columns"]

view_columns, input_columns = VIEW_COLUMNS, INPUT_COLUMNS

FIRST_TOKEN_WEIGHT = 3
AGE_LIMIT_NS = 500_000_000
LIVE = 2
CHANGED, SEEN, RANK_SHIFT = 1, 2, 2

_V = {name: place for place, name in enumerate(VIEW_COLUMNS)}
_I = {name: place for place, name in enumerate(INPUT_COLUMNS)}
_ROW = 7  # words in a row of GroupReader; the last is rank, state, usable
_LOW = (1 << 32) - 1


def merge(
    view: bytearray, inputs: bytearray, rows: memoryview, own: memoryview, boards: list[memoryview], now_ns: int, last_ns: int, /
) -> int:
    """Fill the view from what is known.

    ``rows``: the words of what GroupReader read before ``now_ns``; ``own``, ``boards``: words of the dispatch boards; ``last_ns``:
    before the last look.  Gives CHANGED if a mailbox's epoch or state is another than the one dealt with (that rank's row is not
    filled), and SEEN if dispatches are counted as unseen that a report now knows.
    """
    v, s = memoryview(view).cast("q"), memoryview(inputs).cast("q")
    words, mine = rows.tolist(), own.tolist()
    n = len(v) // len(VIEW_COLUMNS)
    others, others_owed = [0] * n, [0] * n
    for board in boards:
        for i, word in zip(range(n), board.tolist(), strict=False):
            others[i] += word & _LOW
            others_owed[i] += word >> 32
    flags, last = 0, -1
    for i in range(n):
        at, to, of = i * _ROW, i * len(VIEW_COLUMNS), i * len(INPUT_COLUMNS)
        running, waiting, active, total, published_ns, epoch, tail = words[at : at + _ROW]
        state, usable = tail >> 32 & 0xFF, tail >> 40 & 0xFF
        if epoch != s[of + _I["epoch"]] or state != s[of + _I["state"]]:
            flags |= CHANGED
            continue
        if usable:
            if published_ns != s[of + _I["published_ns"]]:
                if s[of + _I["same_clock"]] and published_ns <= now_ns:
                    s[of + _I["bound_ns"]] = published_ns
                else:
                    s[of + _I["bound_ns"]] = last_ns if s[of + _I["published_ns"]] else NEVER_NS
                s[of + _I["published_ns"]] = published_ns
            reported_ns = s[of + _I["bound_ns"]]
            believed, mailbox = int(state == LIVE), 1
        elif s[of + _I["pig_total"]]:
            running, waiting, active, total, reported_ns = s[of + _I["pig_running"] : of + _I["pig_ns"] + 1]
            believed, mailbox = 1, 0
        else:
            running = waiting = active = total = believed = mailbox = 0
            reported_ns = NEVER_NS
        in_flight, owed, theirs = mine[i] & _LOW, mine[i] >> 32, others_owed[i]
        if reported_ns != s[of + _I["report_ns"]] or theirs < s[of + _I["others_owed"]]:
            s[of + _I["report_ns"]] = reported_ns
            s[of + _I["others_owed"]] = theirs
        unseen = s[of + _I["unseen"]]
        if unseen and s[of + _I["oldest_ns"]] <= reported_ns:
            flags |= SEEN if last >= 0 else SEEN | i << RANK_SHIFT
            if last >= 0:
                s[last * len(INPUT_COLUMNS) + _I["next_seen"]] = i
            s[of + _I["next_seen"]] = -1
            last = i
        row = (
            running, waiting, active, total, reported_ns,
            in_flight + others[i], owed + theirs, unseen + theirs - s[of + _I["others_owed"]], in_flight,
            believed, mailbox, s[of + _I["available"]],
        )  # fmt: skip
        for place, word in zip(range(to, to + len(row)), row, strict=True):
            v[place] = word
    return flags


def cold_set(view: bytearray, now_ns: int, own_rate: float, first: float, second: float, /) -> int:
    """Choose by the rule of ``_cold_set.py``; ``first`` and ``second``, 0 <= x < 1, draw the two ties.  -1: no rank is allowed."""
    if not (0 <= first < 1 and 0 <= second < 1):
        raise ValueError("the draws must be 0 or more and less than 1")
    words = memoryview(view).cast("q").tolist()
    running, waiting, _, _, reported_ns, in_flight, owed, unseen, own, usable, mailbox, allowed = (
        words[place :: len(VIEW_COLUMNS)] for place in range(len(VIEW_COLUMNS))
    )
    n = len(running)
    if not any(allowed):
        return -1
    loads = []
    known = foreign = reported = visible = mine = age = 0
    for i in range(n):
        batch, queue, sent = min(running[i], COUNT_LIMIT), min(waiting[i], COUNT_LIMIT), in_flight[i]
        late = queue + (unseen[i] if usable[i] else 0)
        load = max(sent, batch + late) + FIRST_TOKEN_WEIGHT * max(owed[i], late)
        loads.append(load)
        if usable[i]:
            known += 1
            foreign += load - sent - FIRST_TOKEN_WEIGHT * owed[i]
            reported += batch + queue
            visible += sent
            mine += own[i]
            if batch or queue or not mailbox[i]:
                since = now_ns - reported_ns[i]
                # A report from the future says nothing of its age.
                age += since if 0 <= since <= AGE_LIMIT_NS else AGE_LIMIT_NS
    if 0 < known < n:
        presumed = 1 + -(-foreign // known)
        loads = [load if believed else load + presumed for load, believed in zip(loads, usable, strict=True)]
    candidates = [i for i in range(n) if allowed[i]]
    edge = sorted(map(loads.__getitem__, candidates))[
        min(_cold_ranks(reported - visible, mine, own_rate, age, known), len(candidates)) - 1
    ]
    cold = [i for i in candidates if loads[i] <= edge]
    weight = [in_flight[i] + FIRST_TOKEN_WEIGHT * owed[i] for i in cold]
    ties = [i for i, sent, least in zip(cold, weight, repeat(min(weight)), strict=False) if sent == least]
    if len(ties) == 1:
        return ties[0]
    one, other = int(first * len(ties)), int(second * (len(ties) - 1))
    other += other >= one
    return ties[one] if loads[ties[one]] <= loads[ties[other]] else ties[other]


def _cold_ranks(excess: int, own: int, own_rate: float, age_ns: int, known: int) -> int:
    """1 + floor(2 M)."""
    if not own or excess <= 0:
        return 1
    return 1 + int(2.0 * (excess / own) * own_rate * (age_ns / known / 1e9))
