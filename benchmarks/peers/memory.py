"""Shared memory: loadbox, what the standard library and numpy give, and a lock."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import mmap
import os
import struct
from multiprocessing import resource_tracker, shared_memory
from typing import Any

import numpy
from peer import Load, Peer, Publish, Read, ReadAll

__all__ = ["LoadboxC", "LoadboxPython", "LockedSharedMemory", "NumpyMemmap", "UnprotectedMmap"]

_FOUR = struct.Struct("<4q")


class LoadboxC(Peer):
    name = "loadbox"
    quick = True

    def writer(self, rank: int, ranks: int) -> Publish:
        from loadbox.mailbox import MailboxWriter

        writer = MailboxWriter(self.place, rank, ranks)
        self.kept.append(writer)
        return writer.publish

    def reader(self, rank: int, ranks: int) -> Read:
        from loadbox.mailbox import MailboxReader

        return MailboxReader(self.place, rank).read

    def reader_of_all(self, ranks: int) -> ReadAll:
        from loadbox.mailbox import GroupReader

        reader = GroupReader(self.place, ranks)
        out = reader.read()
        return lambda: reader.read(out)

    def clean(self) -> None:
        for writer in self.kept:
            writer.close()  # type: ignore[attr-defined]
        for path in glob.glob(f"/dev/shm/loadbox.{self.place}.*"):
            os.unlink(path)


class LoadboxPython(LoadboxC):
    """The pure-Python twin, in processes that were told so."""

    name = "loadbox, pure Python"


class UnprotectedMmap(Peer):
    name = "mmap + struct, unprotected"
    guarded = False
    quick = True

    @property
    def path(self) -> str:
        return f"/dev/shm/{self.place}"

    def prepare(self, ranks: int) -> None:
        with open(self.path, "wb") as file:
            file.truncate(64 * ranks)

    def _map(self) -> mmap.mmap:
        with open(self.path, "r+b") as file:
            return mmap.mmap(file.fileno(), 0)

    def writer(self, rank: int, ranks: int) -> Publish:
        memory = self._map()
        pack_into, at = _FOUR.pack_into, 64 * rank
        return lambda a, b, c, d: pack_into(memory, at, a, b, c, d)

    def reader(self, rank: int, ranks: int) -> Read:
        memory = self._map()
        unpack_from, at = _FOUR.unpack_from, 64 * rank
        return lambda: unpack_from(memory, at)

    def clean(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


class NumpyMemmap(UnprotectedMmap):
    name = "numpy memmap, unprotected"

    def _rows(self, ranks: int) -> Any:
        return numpy.memmap(self.path, numpy.int64, "r+", shape=(ranks, 8))

    def writer(self, rank: int, ranks: int) -> Publish:
        row = self._rows(ranks)[rank, :4]

        def publish(a: int, b: int, c: int, d: int) -> None:
            row[:] = (a, b, c, d)

        return publish

    def reader(self, rank: int, ranks: int) -> Read:
        row = self._rows(ranks)[rank, :4]
        return lambda: row.tolist()

    def reader_of_all(self, ranks: int) -> ReadAll:
        rows = self._rows(ranks)
        return lambda: rows[:, :4].copy()


class LockedSharedMemory(Peer):
    """``multiprocessing.shared_memory`` under an exclusive flock, which processes that are not each other's children can share."""

    name = "shared_memory + lock"
    made = False

    def prepare(self, ranks: int) -> None:
        self.kept.append(shared_memory.SharedMemory(self.place, create=True, size=64 * ranks))
        self.made = True

    def _open(self) -> tuple[Any, int]:
        memory = shared_memory.SharedMemory(self.place)
        if not self.made:  # else this is the process that made it: every other would remove it for all when it ends
            resource_tracker.unregister(memory._name, "shared_memory")  # type: ignore[attr-defined]
        self.kept.append(memory)
        return memory.buf, os.open(f"/dev/shm/{self.place}", os.O_RDWR)

    def writer(self, rank: int, ranks: int) -> Publish:
        buffer, fd = self._open()
        pack_into, at, flock = _FOUR.pack_into, 64 * rank, fcntl.flock

        def publish(a: int, b: int, c: int, d: int) -> None:
            flock(fd, fcntl.LOCK_EX)
            try:
                pack_into(buffer, at, a, b, c, d)
            finally:
                flock(fd, fcntl.LOCK_UN)

        return publish

    def reader(self, rank: int, ranks: int) -> Read:
        buffer, fd = self._open()
        unpack_from, at, flock = _FOUR.unpack_from, 64 * rank, fcntl.flock

        def read() -> Load:
            flock(fd, fcntl.LOCK_SH)
            try:
                return unpack_from(buffer, at)  # type: ignore[return-value]  # four, by the format
            finally:
                flock(fd, fcntl.LOCK_UN)

        return read

    def clean(self) -> None:
        self.kept[0].unlink()  # type: ignore[attr-defined]
