"""Peers that come as packages; each runs as it was released."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib
import os
import struct
import sys
import types
from pathlib import Path
from typing import Any

from peer import Load, Missing, Peer, Publish, Read, ReadAll

__all__ = ["Iceoryx2", "Kickmsg", "Membridge", "SGLang"]

_FOUR = struct.Struct("<4q")


def _need(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Missing(f"{package} is not installed ({error})") from None


class SGLang(Peer):
    """SGLang's load snapshot: its module as it is in the wheel; what that imports for other purposes is stood in for."""

    name = "SGLang load snapshot"
    quick = True

    @classmethod
    def module(cls) -> Any:
        if "sglang.srt.managers.load_snapshot" in sys.modules:
            return sys.modules["sglang.srt.managers.load_snapshot"]
        folder = Path(os.environ.get("LOADBOX_PEER_SGLANG", "none"))
        if not (folder / "sglang/srt/managers/load_snapshot.py").exists():
            raise Missing("SGLang's wheel is not unpacked in $LOADBOX_PEER_SGLANG")

        class Standing(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return None

        for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
            package = types.ModuleType(name)
            package.__path__ = [str(folder / name.replace(".", "/"))]
            sys.modules[name] = package
        for name in ("sglang.srt.environ", "sglang.srt.runtime_context", "sglang.srt.utils", "sglang.srt.utils.network"):
            sys.modules[name] = Standing(name)
            sys.modules[name].__path__ = []
        return importlib.import_module("sglang.srt.managers.load_snapshot")

    @classmethod
    def require(cls) -> None:
        cls.module()

    @property
    def path(self) -> str:
        return self.module().shm_path_for(self.place)  # type: ignore[no-any-return]

    def writer(self, rank: int, ranks: int) -> Publish:
        module = self.module()
        writer = module.ShmLoadSnapshotWriter(self.path, ranks, rank)
        snapshot = module.LoadSnapshot

        def publish(a: int, b: int, c: int, d: int) -> None:
            writer.write(snapshot(dp_rank=rank, num_running_reqs=a, num_waiting_reqs=b, num_used_tokens=c, max_total_num_tokens=d))

        return publish

    def reader(self, rank: int, ranks: int) -> Read:
        reader = self.module().ShmLoadSnapshotReader(self.path, ranks)

        def read() -> Load | None:
            found = reader.read(rank)
            if found is None:
                return None
            return found.num_running_reqs, found.num_waiting_reqs, found.num_used_tokens, found.max_total_num_tokens

        return read

    def reader_of_all(self, ranks: int) -> ReadAll:
        return self.module().ShmLoadSnapshotReader(self.path, ranks).read_all  # type: ignore[no-any-return]

    def clean(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


class Kickmsg(Peer):
    name = "kickmsg Blackboard"
    quick = True

    @classmethod
    def require(cls) -> None:
        _need("kickmsg", "kickmsg")

    def _board(self) -> Any:
        import kickmsg

        config = kickmsg.BlackboardConfig()
        board = kickmsg.Blackboard.open_or_create("loadbox-bench", self.place, config)
        self.kept.append(board)
        return board

    def writer(self, rank: int, ranks: int) -> Publish:
        writer = self._board().declare(f"rank{rank}")
        self.kept.append(writer)
        write, pack = writer.write, _FOUR.pack
        return lambda a, b, c, d: write(pack(a, b, c, d))

    def reader(self, rank: int, ranks: int) -> Read:
        read, unpack = self._board().observe(f"rank{rank}").read, _FOUR.unpack

        def read_one() -> Load | None:
            found = read()
            return unpack(found.data) if found else None  # type: ignore[return-value]  # four, by the format

        return read_one

    def reader_of_all(self, ranks: int) -> ReadAll:
        return self._board().read_all  # type: ignore[no-any-return]

    def clean(self) -> None:
        import kickmsg

        self.kept.clear()
        kickmsg.Blackboard.unlink("loadbox-bench", self.place)


class Iceoryx2(Peer):
    name = "iceoryx2 blackboard"
    many = False  # one writer port a service: so many ranks would be so many services

    @classmethod
    def require(cls) -> None:
        _need("iceoryx2", "iceoryx2")

    class Value(ctypes.Structure):
        _fields_ = [(name, ctypes.c_int64) for name in "abcd"]  # as ctypes wants it

    def _service(self, creates: int | None) -> Any:
        import iceoryx2 as iox2

        iox2.set_log_level(iox2.LogLevel.Fatal)
        node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
        self.kept.append(node)
        builder = node.service_builder(iox2.ServiceName.new(self.place))
        if creates is None:
            return builder.blackboard_opener(ctypes.c_uint64).open()
        creator = builder.blackboard_creator(ctypes.c_uint64)
        for rank in range(creates):
            creator = creator.add(ctypes.c_uint64(rank), self.Value())
        return creator.max_readers(64).create()

    def prepare(self, ranks: int) -> None:
        self.kept.append(self._service(ranks))

    def writer(self, rank: int, ranks: int) -> Publish:
        service = self._service(None)
        port = service.writer_builder().create()
        entry = port.entry(ctypes.c_uint64(rank), self.Value)
        self.kept += [service, port, entry]
        value, update = self.Value, entry.update_with_copy
        return lambda a, b, c, d: update(value(a, b, c, d))

    def reader(self, rank: int, ranks: int) -> Read:
        service = self._service(None)
        port = service.reader_builder().create()
        entry = port.entry(ctypes.c_uint64(rank), self.Value)
        self.kept += [service, port, entry]
        get, unpack = entry.get, _FOUR.unpack
        return lambda: unpack(get().data)  # type: ignore[return-value]  # four, by the format

    def clean(self) -> None:
        self.kept.clear()


class Membridge(Peer):
    name = "membridge (rw lock)"

    @classmethod
    def require(cls) -> None:
        _need("membridge", "membridge")

    def prepare(self, ranks: int) -> None:
        import membridge

        with contextlib.suppress(OSError):
            membridge.SharedMemory.remove(f"/{self.place}")
        memory = membridge.SharedMemory.create(f"/{self.place}", 64 * ranks + 64)
        self.kept += [memory, memory.map()]

    def _map(self) -> Any:
        import membridge

        memory = membridge.SharedMemory.open(f"/{self.place}")
        self.kept.append(memory)
        return memory.map()

    def writer(self, rank: int, ranks: int) -> Publish:
        write, pack, at = self._map().write, _FOUR.pack, 64 * rank
        return lambda a, b, c, d: write(pack(a, b, c, d), at)

    def reader(self, rank: int, ranks: int) -> Read:
        read, unpack, at = self._map().read_range, _FOUR.unpack, 64 * rank
        return lambda: unpack(read(at, 32))  # type: ignore[return-value]  # four, by the format

    def clean(self) -> None:
        for path in glob.glob(f"/dev/shm/{self.place}"):
            os.unlink(path)
