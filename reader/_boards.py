"""The boards of the other frontends: found, trusted, believed while their owners live, and read.

Only looking takes system calls, and it is done at most once an interval; between two looks the words are read in place.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, NamedTuple

from loadbox.mailbox import _attach, _files
from loadbox.mailbox._host import boot_id
from loadbox.mailbox._layout import ABI_MAJOR, EPOCH_LIMIT, KIND_BOARD, MAGIC, RECORD_OFFSET, SEGMENT_SIZE
from loadbox.mailbox._watch_py import Watch
from loadbox.reader._board import board_names

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Boards"]

_PATIENCE = 10  # looks after which a name that led to nothing believable is tried again


class _Other(NamedTuple):
    fd: int
    words: memoryview
    epoch: int


class Boards:
    """What the other frontends of a group on this host have dispatched.

    ``words`` holds one read-only memoryview a living frontend, of as many words as its board has; a rank past its end is 0.
    ``told`` is called with a sentence, once a name, for a file that is there and cannot be believed.
    """

    __slots__ = ("_group", "_listed", "_names", "_others", "_skipped", "_told", "_watch", "words")

    def __init__(self, group: str, told: Callable[[str], None]) -> None:
        self._group = group
        self._told = told
        self._others: dict[str, _Other] = {}
        self._skipped: dict[str, int] = {}
        self._watch = Watch()
        self._listed = 0  # the directory's generation in which there were these names
        self._names: frozenset[str] = frozenset()
        self.words: list[memoryview] = []

    def look(self, own_name: str | None) -> None:
        """Drop the boards whose owners are gone and attach new ones.  A few system calls a board."""
        for name, other in list(self._others.items()):
            if not _lives(other):
                self._drop(name)
        names = self._there()
        self._skipped = {name: left - 1 for name, left in self._skipped.items() if left and name in names}
        for name in names - self._others.keys() - self._skipped.keys() - {own_name}:
            self._attach(name)
        self.words = [other.words for other in self._others.values()]

    def _there(self) -> frozenset[str]:
        """The names of boards; a directory that has not changed is not listed again."""
        self._watch.again()
        generation = self._watch.generation()
        if generation != self._listed:
            self._names = frozenset(board_names(self._group))
            self._listed = generation
        return self._names

    def _attach(self, name: str) -> None:
        fd = -1
        try:
            fd = _files.open_existing(name, read_only=True)
            found = os.fstat(fd)
            reason = _files.odd(found, SEGMENT_SIZE) or _attach._distrusted(found)
            if reason is None and found.st_size and found.st_blocks == 0:
                reason = "it is a hole without memory behind it"
            if reason:
                self._skip(name, reason)
                return
            header = _attach.read_header(fd)
            if header is None or header.magic == 0:
                return  # being made
            if header.magic != MAGIC or header.abi_major != ABI_MAJOR or header.kind != KIND_BOARD:
                self._skip(name, f"it is no dispatch board of ABI {ABI_MAJOR}")
            elif not 0 < header.capacity <= (found.st_size - RECORD_OFFSET) // 8:
                self._skip(name, f"its capacity is said to be {header.capacity}, in {found.st_size} bytes")
            elif header.record_offset != RECORD_OFFSET or not 0 < header.epoch < EPOCH_LIMIT:
                self._skip(name, "its header is none that a frontend writes")
            elif header.boot_id not in (bytes(16), boot_id()) or not _files.owner_alive(fd, header.epoch):
                self._skip(name, None)
            else:
                end = RECORD_OFFSET + 8 * header.capacity
                memory = _files.map_shared(fd, end, mmap.PROT_READ)
                self._others[name] = _Other(fd, memoryview(memory)[RECORD_OFFSET:end].cast("Q"), header.epoch)
                fd = -1
        except OSError as error:
            self._skip(name, None if isinstance(error, FileNotFoundError) else f"it cannot be opened: {error.strerror}")
        finally:
            if fd >= 0:
                os.close(fd)

    def _skip(self, name: str, reason: str | None) -> None:
        self._skipped[name] = _PATIENCE
        if reason:
            self._told(f"the dispatch board /dev/shm{name} is left out: {reason}")

    def _drop(self, name: str) -> None:
        # The words may be in use by no one: the view's lock is held.  The mapping goes with its last reference.
        os.close(self._others.pop(name).fd)

    def close(self) -> None:
        """Let go of all."""
        for name in list(self._others):
            self._drop(name)
        self.words = []


def _lives(other: _Other) -> bool:
    try:
        return os.fstat(other.fd).st_nlink > 0 and _files.owner_alive(other.fd, other.epoch)
    except OSError:
        return False
