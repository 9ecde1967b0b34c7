"""One file of shared memory, looked at closely: what it is, what it says, and what is odd about it, in words.

Nothing is changed, nothing waits and no link is followed: a FIFO or a device is not even opened.  The content is read, not mapped,
so a file that others cut short meanwhile does no harm.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import NamedTuple

from loadbox.cli import _odd
from loadbox.cli._record import utc
from loadbox.mailbox import MailboxReader, RankState, _attach, _files, _names
from loadbox.mailbox._layout import (
    ABI_MAJOR,
    COPY_A,
    COPY_B,
    EPOCH_LIMIT,
    KIND_BOARD,
    KIND_RANK,
    MAGIC,
    RANK_LIMIT,
    READ_TRIES,
    RECORD,
    RECORD_OFFSET,
    SEQ,
    STATE_CLOSED,
    Header,
)

__all__ = ["Facts", "Record", "examine", "kind_of_name", "started", "state_of"]

_ENOUGH = COPY_B + RECORD.size


class Record(NamedTuple):
    """One copy of a rank's load."""

    num_running: int
    num_waiting: int
    kv_active_pages: int
    kv_total_pages: int
    published_ns: int
    epoch: int


@dataclass
class Facts:
    """What is known of a file; None: not known, or not there."""

    name: str
    """With the leading slash."""
    found: os.stat_result | None = None
    header: Header | None = None
    seq: int | None = None
    copies: tuple[Record, Record] | None = None
    words: list[tuple[int, int]] | None = None
    """A board's: in flight and owed a first token, rank by rank."""
    owner_lock: str | None = None
    """Byte 0: ``"held"``, ``"shared"`` or ``"free"``."""
    epoch_lock: str | None = None
    """The byte at the offset of the epoch, which says that this life goes on."""
    state: str | None = None
    reason: str | None = None
    odd: list[str] = field(default_factory=list)
    """Sentences: what is out of the ordinary, and what to do."""

    @property
    def record(self) -> Record | None:
        """The copy that readers use."""
        return None if self.seq is None or self.copies is None else self.copies[self.seq & 1]


def kind_of_name(name: str) -> tuple[str, str, int | None]:
    """("rank", group, rank), ("board", group, None), or ("other", "", None)."""
    entry = name.removeprefix("/")
    found = _names._rank_of(entry)
    if found is not None:
        return "rank", *found
    return ("board", entry.split(".")[1], None) if _names._BOARD.fullmatch(entry) else ("other", "", None)


def state_of(name: str) -> tuple[str, str | None]:
    """A name's state, and why it is refused.  A board's states are called as a rank's."""
    kind, group, rank = kind_of_name(name)
    if kind == "rank" and rank is not None:
        with MailboxReader(group, rank, liveness_interval=0) as reader:  # a young publish is no proof of life at one look
            state = reader.state()
            return state.name, reader.reason if state is RankState.REFUSED else None
    facts = examine(name)
    return facts.state or "-", facts.reason


def examine(name: str) -> Facts:
    """Look at ``/dev/shm`` + ``name``; FileNotFoundError if nothing has that name, else never an exception."""
    facts = Facts(name)
    kind, group, rank = kind_of_name(name)
    facts.found = os.stat(_names.SHM_DIR + name, follow_symlinks=False)
    if _odd.look_at_file(facts):
        fd = -1
        try:
            fd = _files.open_existing(name, read_only=True)
            _read(facts, fd)
            _ask_locks(facts, fd)
        except FileNotFoundError:
            facts.odd.append("It was removed while it was looked at.")
        except OSError as error:
            facts.odd.append(f"It cannot be read: {error.strerror}. Run as its user ({_files.owner_of(facts.found)}) or as root.")
        finally:
            if fd >= 0:
                os.close(fd)
    _odd.judge_header(facts, kind, rank)
    _odd.judge_life(facts)
    if kind == "rank" and rank is not None:
        with MailboxReader(group, rank, liveness_interval=0) as reader:  # a young publish is no proof of life at one look
            state = reader.state()
            facts.state, facts.reason = state.name, reader.reason if state is RankState.REFUSED else None
            if state is RankState.STALLED:
                _odd.judge_stall(facts)
    elif kind == "board":
        facts.state = _board_state(facts)
    return facts


def _read(facts: Facts, fd: int) -> None:
    header = _attach.read_header(fd)
    if header is None:
        return
    facts.header = header
    if header.magic != MAGIC or header.abi_major != ABI_MAJOR:
        return
    if header.kind == KIND_RANK:
        for _ in range(READ_TRIES):
            page = os.pread(fd, _ENOUGH, 0)
            if len(page) < _ENOUGH:
                return
            facts.seq = int.from_bytes(page[SEQ : SEQ + 8], "little")
            facts.copies = (Record._make(RECORD.unpack_from(page, COPY_A)), Record._make(RECORD.unpack_from(page, COPY_B)))
            if os.pread(fd, 8, SEQ) == page[SEQ : SEQ + 8]:
                return
        facts.odd.append("It is published so fast that the two copies shown here may be of different publishes.")
    elif header.kind == KIND_BOARD:
        data = os.pread(fd, 8 * min(header.capacity, RANK_LIMIT), RECORD_OFFSET)
        words = (int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data) // 8 * 8, 8))
        facts.words = [(word & 0xFFFFFFFF, word >> 32) for word in words]


def _ask_locks(facts: Facts, fd: int) -> None:
    facts.owner_lock = _lock(fd, 0)
    header, record = facts.header, facts.record
    epoch = record.epoch if record is not None else header.epoch if header is not None and facts.words is not None else 0
    if 1 <= epoch < EPOCH_LIMIT:
        facts.epoch_lock = _lock(fd, epoch)


def _lock(fd: int, offset: int) -> str:
    if _files.owner_alive(fd, offset):
        return "held"
    return "shared" if _files.shared_lock_only(fd, offset) else "free"


def _board_state(facts: Facts) -> str:
    header = facts.header
    if facts.odd and facts.words is None:
        half_made = header is not None and header.magic == 0
        return "ABSENT" if half_made or (facts.found is not None and facts.found.st_size == 0) else "REFUSED"
    if facts.epoch_lock == "held":
        return "LIVE"
    return "CLOSED" if header is not None and header.state == STATE_CLOSED else "DEAD"


def started(header: Header) -> str | None:
    """The start of a life, in ISO 8601."""
    return utc(header.start_ns / 1e9) if header.start_ns else None
