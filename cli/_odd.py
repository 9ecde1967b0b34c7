"""What is out of the ordinary about a file of shared memory, in sentences, with what to do.  For ``loadbox inspect``."""

from __future__ import annotations

import os
import stat
import time
from typing import TYPE_CHECKING

from loadbox.mailbox import _attach, _files, _names
from loadbox.mailbox._host import boot_id, time_ns_inode
from loadbox.mailbox._layout import (
    ABI_MAJOR,
    ABI_MINOR,
    KIND_BOARD,
    KIND_RANK,
    MAGIC,
    MAGIC_SWAPPED,
    RANK_LIMIT,
    RECORD_OFFSET,
    SEGMENT_SIZE,
    STATE_CLOSED,
    STATE_OPEN,
    Header,
)
from loadbox.mailbox._slot_py import odd_record

if TYPE_CHECKING:
    from loadbox.cli._examine import Facts, Record

__all__ = ["judge_header", "judge_life", "judge_stall", "look_at_file"]

_HALF_MADE = (
    "Its creator is at work this very moment, or died before it was done. The next writer finishes it; loadbox clean removes it."
)
_OTHER_CLOCK = "readers give an age that is an upper bound."


def look_at_file(facts: Facts) -> bool:
    """Judge the file from outside; whether it may be opened."""
    found = facts.found
    assert found is not None
    if not stat.S_ISREG(found.st_mode):
        target = ""
        if stat.S_ISLNK(found.st_mode):
            try:
                target = f" to {os.readlink(_names.SHM_DIR + facts.name)!r}, which was not followed"
            except OSError:
                pass
        facts.odd.append(
            f"{_sentence(_files.odd(found, 0))}{target}. It was not opened; readers refuse it, and so do writers: remove it."
        )
        return False
    reason = _files.odd(found, 0)
    if reason:
        facts.odd.append(f"{_sentence(reason)}. Readers and writers refuse it: only its owner may be able to change it; remove it.")
    distrusted = _attach._distrusted(found)
    if distrusted:
        facts.odd.append(f"{_sentence(distrusted)}; until then readers of this user refuse it.")
    if found.st_size == 0:
        facts.odd.append(f"It is empty. {_HALF_MADE}")
    elif found.st_size < SEGMENT_SIZE:
        facts.odd.append(
            f"It is {found.st_size} bytes long, shorter than a segment's {SEGMENT_SIZE}: readers and writers refuse it."
        )
    elif found.st_blocks * 512 < found.st_size:
        facts.odd.append(
            f"It is sparse: {found.st_blocks * 512} of {found.st_size} bytes have memory behind them. Reading a hole through a "
            "mapping kills the reader when /dev/shm is full, so readers refuse a file that is all hole. loadbox allocates what it "
            "makes: something else made this one."
        )
    return True


def _sentence(words: str | None) -> str:
    return (words or "")[:1].upper() + (words or "")[1:]


def judge_header(facts: Facts, kind: str, rank: int | None) -> None:
    header, odd = facts.header, facts.odd
    if header is None:
        return
    if header.magic == 0:
        odd.append(f"Its magic is 0: it is half made. {_HALF_MADE}")
    elif header.magic == MAGIC_SWAPPED:
        odd.append("It was written by a machine of the other byte order: nothing here can read it.")
    elif header.magic != MAGIC:
        odd.append(f"It is no segment of loadbox: it starts with {header.magic.to_bytes(8, 'little')!r}. loadbox never touches it.")
    elif header.abi_major != ABI_MAJOR:
        odd.append(
            f"Its ABI is {header.abi_major}.{header.abi_minor}, this program's is {ABI_MAJOR}.{ABI_MINOR}: what follows its first "
            "words is not known here. Update the older of the two; a writer of this version that takes the rank replaces it."
        )
    else:
        _judge_words(header, odd, kind, rank)


def _judge_words(header: Header, odd: list[str], kind: str, rank: int | None) -> None:
    if header.abi_minor > ABI_MINOR:
        odd.append(
            f"Its ABI is {header.abi_major}.{header.abi_minor}, newer than {ABI_MAJOR}.{ABI_MINOR}: "
            "it may say more than is shown here."
        )
    kinds = {KIND_RANK: "rank", KIND_BOARD: "board"}
    if kinds.get(header.kind) != kind and kind != "other":
        odd.append(
            f"Its kind is {header.kind} ({kinds.get(header.kind, 'unknown')}), and its name is a {kind}'s: readers refuse it."
        )
    if header.record_offset != RECORD_OFFSET:
        odd.append(f"Its record is said to be at {header.record_offset}, not {RECORD_OFFSET}: readers refuse it.")
    if rank is not None and header.kind == KIND_RANK and header.rank != rank:
        odd.append(f"It speaks for rank {header.rank}, and its name says {rank}: readers refuse it.")
    if header.dp_size > RANK_LIMIT:
        odd.append(f"Its dp_size {header.dp_size} is past {RANK_LIMIT}: readers refuse it.")
    elif 0 < header.dp_size <= header.rank and header.kind == KIND_RANK:
        odd.append(f"Its rank {header.rank} is not in a group of {header.dp_size}.")
    if header.boot_id not in (bytes(16), boot_id()):
        odd.append("It is of another boot, or of another host: readers call it ABSENT. loadbox clean removes it.")
    if header.state not in (STATE_OPEN, STATE_CLOSED):
        odd.append(f"Its state is {header.state}, neither open ({STATE_OPEN}) nor closed ({STATE_CLOSED}).")
    if header.time_ns_inode == 0:
        odd.append(f"Its writer could not tell its time namespace: {_OTHER_CLOCK}")
    elif header.time_ns_inode != time_ns_inode():
        odd.append(
            "Its writer lives in another time namespace: its clock is another one, and readers give an age that is an upper bound."
        )


def judge_life(facts: Facts) -> None:
    header, odd, record = facts.header, facts.odd, facts.record
    if header is None or header.magic != MAGIC or header.abi_major != ABI_MAJOR:
        return
    alive = facts.epoch_lock == "held"
    if facts.owner_lock == "shared":
        odd.append(
            "Another process holds a shared lock on byte 0, which no reader of loadbox takes: as long as it does, no new writer "
            "can adopt this file. A running writer is not disturbed. lslocks shows the lock."
        )
    told = record is not None or facts.words is not None
    if facts.owner_lock == "free" and not alive and header.state != STATE_CLOSED and told:
        who, then = (
            ("scheduler", "The next writer of the rank adopts it")
            if record is not None
            else ("frontend", "The next frontend of the group removes it")
        )
        odd.append(
            f"Nobody owns it: its {who} (pid {header.owner_pid}) is gone and did not close. What it says are last words. "
            f"{then}, and loadbox clean removes it."
        )
    if facts.owner_lock == "held" and not alive and told and (record is None or record.epoch or facts.seq):
        odd.append("Somebody owns it, but not the life that its record is of: a new writer is taking it over this very moment.")
    if facts.owner_lock == "free" and alive:
        odd.append("The byte of its epoch is locked, and byte 0 is not: something other than loadbox made this lock.")
    if header.state == STATE_CLOSED:
        odd.append(
            "It says closed, and its name is still there: its owner could not remove it. The next writer takes it; "
            "loadbox clean removes it."
        )
    if record is not None and facts.copies is not None and facts.seq is not None:
        _judge_record(facts.seq, record, facts.copies, header, odd, alive)


def judge_stall(facts: Facts) -> None:
    assert facts.header is not None
    pid = facts.header.owner_pid
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            stopped = file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        stopped = False
    why = (
        f"process {pid} is stopped (kill -CONT {pid} lets it go on)"
        if stopped
        else "its scheduler hangs, or one step takes that long"
    )
    facts.odd.append(f"It has work, and has published nothing for more than five seconds: {why}.")


def _judge_record(seq: int, record: Record, copies: tuple[Record, Record], header: Header, odd: list[str], alive: bool) -> None:
    if seq & 1:
        odd.append(
            "Its sequence is odd: "
            + (
                "its writer is in the middle of a publish, which takes nanoseconds, or was stopped there. Look again: if the "
                "number stands, it is stopped."
                if alive
                else "its writer died in the middle of a publish."
            )
            + " Readers use copy B, which is whole; a new writer repairs copy A first."
        )
    elif copies[0] != copies[1]:
        odd.append(
            "Copies A and B differ: "
            + ("its writer is about to write copy B." if alive else "its writer died before copy B was written.")
            + " Readers use copy A, which is whole."
        )
    if seq and odd_record((*record,)):
        odd.append("The record that readers use is none that a writer of loadbox publishes: they refuse it.")
    elif seq and record.kv_total_pages == 0:
        odd.append(
            "There is no snapshot: "
            + ("nothing has been published in this life yet." if alive else "its owner closed, or never published.")
        )
    if header.time_ns_inode == time_ns_inode() and record.published_ns > time.monotonic_ns():
        odd.append(f"Its time of publish is ahead of this machine's clock: {_OTHER_CLOCK}")
