"""One rank as a reader sees it, in Python.  The twin of ``_core_slot.c``: same rules, same order, same words.

What a look does.  At most every ``liveness_interval`` it asks for the file behind the mapping: a file without a name is an
orphan, its writer may still be publishing into it, so the name is opened anew.  Where the directory's watch (``_watch_py.py``) says
that no name has changed since, that is enough, for up to twenty times as long.  Then it reads the sequence; while that stands
still, everything known stays true.  When it has moved, the record is read through the latch.

Whether the owner lives is asked of the kernel only when the last proof of life (a publish, or the lock seen held) is
``liveness_interval`` old: a rank that publishes is never asked about, a dead one is told within that interval.
"""

from __future__ import annotations

import errno
import mmap
import os
from time import monotonic_ns
from typing import TYPE_CHECKING

from loadbox.mailbox import _files
from loadbox.mailbox._attach import NO_NAME
from loadbox.mailbox._layout import (
    COPY_A,
    COPY_B,
    DP_SIZE,
    EPOCH_LIMIT,
    READ_TRIES,
    RECORD,
    SEGMENT_SIZE,
    SEQ,
    STATE,
    STATE_CLOSED,
    TIME_NS_INODE,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from loadbox.mailbox._watch_py import Watch

__all__ = ["FULL_CHECK", "NOTHING", "Slot", "odd_record"]

ABSENT, SILENT, LIVE, STALLED, DEAD, CLOSED, REFUSED = range(7)
NOTHING = (0, 0, 0, 0, 0, 0)
_LONG_AGO = -(1 << 62)
FULL_CHECK = 20  # intervals for which the directory's word is enough


def odd_record(words: tuple[int, int, int, int, int, int]) -> bool:
    """Could no writer have published this?  As ``lbx_words_valid``."""
    running, waiting, active, total, published_ns, epoch = words
    return min(running, waiting, active, total, published_ns) < 0 or active > total > 0 or not 1 <= epoch < EPOCH_LIMIT


class Slot:
    """A rank's mapping, its last whole record and what follows from it.  Times are CLOCK_MONOTONIC, ns."""

    __slots__ = (
        "asked_ns", "bound_ns", "dp_size", "fd", "file_seen", "first_seen_ns", "full_check_ns", "have", "identity", "last_look_ns",
        "lost", "memory", "my_time_ns", "name_seen", "nameless", "next_check_ns", "odd", "owner_seen_ns", "phase_ns", "reason",
        "same_clock", "seq", "unasked", "view", "words",
    )  # fmt: skip

    def __init__(self, phase_ns: int = 0) -> None:
        self.phase_ns = phase_ns  # the first checks are this much early: so those of many ranks do not all fall into one read
        self.fd = -1
        self.memory: mmap.mmap | None = None
        self.next_check_ns = 0
        self.full_check_ns = 0  # until then the directory's word is enough
        self.file_seen = self.name_seen = 0  # its generations in which the file, and the name, were last looked at
        self.nameless = False  # then there was no such name
        self.my_time_ns = 0
        self._forget()
        self.reason: str | None = None

    def __del__(self) -> None:
        self.drop()

    def _forget(self) -> None:
        self.identity = (0, 0)
        self.have = False
        self.seq = 0
        self.words = NOTHING
        self.dp_size = 0
        self.bound_ns: int | None = None  # the publish was not earlier than this; None: nothing is known of its time
        self.first_seen_ns = 0
        self.last_look_ns: int | None = None
        self.same_clock = False
        self.odd = False
        self._forget_owner()

    def _forget_owner(self) -> None:
        self.owner_seen_ns = _LONG_AGO
        self.asked_ns = _LONG_AGO
        self.lost = False
        self.unasked = False

    @property
    def attached(self) -> bool:
        """Is there a mapping?"""
        return self.memory is not None

    def bind(self, fd: int, my_time_ns: int) -> None:
        """Map what ``fd`` opens and own the descriptor; OSError leaves the slot as it was, and the descriptor with the caller."""
        memory = _files.map_shared(fd, SEGMENT_SIZE, mmap.PROT_READ)
        self.drop()
        self.fd, self.memory = fd, memory
        self.view = memoryview(memory).cast("q")
        self.my_time_ns = my_time_ns
        found = os.fstat(fd)
        self.identity = (found.st_dev, found.st_ino)
        self.reason = None

    def drop(self) -> None:
        """Let go of the mapping and of what was read from it."""
        if self.memory is not None:
            self.view.release()
            self.memory.close()
            self.memory = None
        if self.fd >= 0:
            _files.let_go(self.fd)
            self.fd = -1
        self._forget()

    def look(self, now: int, interval_ns: int, find: Callable[[], tuple[int, str | None, int]], watch: Watch | None = None) -> bool:
        """Bring the slot up to date; True if its record changed.  Without a watch, every check asks for the file itself."""
        changed = False
        if now >= self.next_check_ns:
            self.next_check_ns = now + interval_ns - (0 if self.next_check_ns else self.phase_ns)
            generation = watch.generation() if watch is not None else 0
            if watch is None or not self._unchanged(now, generation):
                self.full_check_ns = now + FULL_CHECK * interval_ns - FULL_CHECK // 2 * self.phase_ns
                changed = self._check(find, generation)
        if self.memory is None:
            return changed
        seq = self.view[SEQ // 8]
        if self.have and seq == self.seq:
            self.last_look_ns = now
            return changed
        for _ in range(READ_TRIES):
            words = RECORD.unpack_from(self.memory, COPY_B if seq & 1 else COPY_A)
            again = self.view[SEQ // 8]
            if again == seq:
                self._accept(seq, words, now)
                return True
            seq = again
        return changed

    def _unchanged(self, now: int, generation: int) -> bool:
        """Does the directory's word do?  It tells of names, not of a descriptor or a size: not for too long."""
        if now >= self.full_check_ns:
            return False
        if self.memory is not None and not self.lost and not self._closed():
            return self.file_seen == generation
        return (self.memory is not None or self.nameless) and self.name_seen == generation

    def _check(self, find: Callable[[], tuple[int, str | None, int]], generation: int) -> bool:
        gone, named = None, False
        if self.memory is not None:
            try:
                found = os.fstat(self.fd)
            except OSError as error:
                gone = f"its descriptor was closed by another part of this program: {error.strerror}"
            else:
                if (found.st_dev, found.st_ino) != self.identity:
                    gone = "its descriptor was closed by another part of this program and given to another file"
                elif found.st_size < SEGMENT_SIZE:
                    gone = f"it shrank to {found.st_size} bytes"
                elif found.st_nlink:
                    self.file_seen = generation
                    if not self.lost and not self._closed():
                        return False
                    # Its owner is gone.  If the file was renamed or linked, it has a name still, and the next owner another file.
                    named = True
            if gone:
                if "descriptor" in gone:
                    self.fd = -1  # not ours to close any more
                self.drop()
        fd, reason, my_time_ns = find()
        self.file_seen = self.name_seen = generation
        self.nameless = fd == NO_NAME
        if self._mapped(fd) if fd >= 0 else named and self.memory is not None:  # nobody has taken its place
            if fd >= 0:
                os.close(fd)
            return False
        if fd >= 0:
            try:
                self.bind(fd, my_time_ns)
            except OSError as error:
                os.close(fd)
                reason = f"it cannot be mapped: {error.strerror}"
            else:
                return True
        if reason is None and self._says_closed():
            return False  # its owner closed it and took the name away: that stays what is known
        self.drop()
        self.reason = reason
        return True

    def _mapped(self, fd: int) -> bool:
        found = os.fstat(fd)
        return self.memory is not None and (found.st_dev, found.st_ino) == self.identity

    def _accept(self, seq: int, words: tuple[int, int, int, int, int, int], now: int) -> None:
        assert self.memory is not None
        new_life = not self.have or words[5] != self.words[5]
        if new_life:
            self._forget_owner()
        if new_life or not self.words[3]:
            # The header is written before the first publish of a life, so what is read now belongs to this record.
            writers = self.view[TIME_NS_INODE // 8]
            self.same_clock = writers != 0 and writers == self.my_time_ns
            self.dp_size = self.view[DP_SIZE // 8]
        # The same publish under another number: a writer is in the middle of its next one, or an adopter has repaired a dead one's.
        # Neither makes it younger, and the repair is no sign of this life.
        published_ns = words[4]
        if new_life or published_ns != self.words[4]:
            if self.same_clock and (published_ns <= now or published_ns <= monotonic_ns()):
                self.bound_ns = published_ns
            else:
                self.bound_ns = self.last_look_ns  # None at first sight
        self.have, self.seq, self.words = True, seq, words
        self.first_seen_ns = self.last_look_ns = now
        self.odd = odd_record(words)
        self.reason = f"its record is none that a writer publishes ({', '.join(map(str, words))})" if self.odd else None

    def state(self, now: int, interval_ns: int, stall_ns: int) -> int:
        """The rank's state at ``now``, asking for the owner's lock if the last proof of life is too old."""
        if self.memory is None:
            return REFUSED if self.reason else ABSENT
        if self.odd:
            return REFUSED
        if not self.have:
            return SILENT
        if self._closed():
            return CLOSED
        proof_ns = max(self.owner_seen_ns, _LONG_AGO if self.bound_ns is None else self.bound_ns)
        if now - max(proof_ns, self.asked_ns) >= interval_ns:
            self._ask(now)
        if self.unasked:
            return REFUSED
        if self.lost and self.asked_ns >= proof_ns:
            return DEAD
        if not self.words[3]:
            return SILENT
        if self.seq & 1 and now - self.first_seen_ns > stall_ns:
            return STALLED  # stopped in the middle of a publish
        if (self.words[0] or self.words[1]) and now - (self.first_seen_ns if self.bound_ns is None else self.bound_ns) > stall_ns:
            return STALLED
        return LIVE

    def _closed(self) -> bool:
        # Read anew each time: an adopter says "no snapshot" under its own epoch before it opens what its forerunner closed.
        return self.memory is not None and self.have and not self.words[3] and self.view[STATE // 8] == STATE_CLOSED

    def _says_closed(self) -> bool:
        """As ``_closed``, by what stands there now: it was closed and its name taken away since the last look."""
        if self.memory is None or self.view[STATE // 8] != STATE_CLOSED:
            return False
        seq = self.view[SEQ // 8]
        return not self.view[(COPY_B if seq & 1 else COPY_A) // 8 + 3] and self.view[SEQ // 8] == seq

    def _ask(self, now: int) -> None:
        self.asked_ns = now - (self.phase_ns if self.asked_ns == _LONG_AGO else 0)
        try:
            lost = not _files.owner_alive(self.fd, self.words[5])
            if lost and not self.lost and not self._mapped(self.fd):
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        except OSError as error:
            self.unasked, self.reason = True, f"its owner's lock cannot be asked for: {error.strerror}"
            if error.errno == errno.EBADF:  # another file was asked: no death; the next check opens anew
                self.full_check_ns = 0
            return
        if self.unasked:
            self.unasked, self.reason = False, None
        self.lost = lost
        if not lost:
            self.owner_seen_ns = self.asked_ns

    def age_ns(self, now: int) -> int | None:
        """Nanoseconds since the publish, or an upper bound where the writer's clock is not ours; None if not known."""
        if self.memory is None or self.odd or not self.words[3] or self.bound_ns is None:
            return None
        return max(0, now - self.bound_ns)

    @property
    def snapshot(self) -> bool:
        """Is there a snapshot to be read (in LIVE, STALLED and DEAD)?"""
        return self.memory is not None and not self.odd and not self.unasked and self.words[3] > 0
