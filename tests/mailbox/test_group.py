"""All ranks in one array."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest

FIELDS = ["num_running", "num_waiting", "kv_active_pages", "kv_total_pages", "published_ns", "epoch", "rank", "state", "usable"]


def test_dtype(box: Any, group: str) -> None:
    with box.GroupReader(group, 2) as reader:
        rows = reader.read()
        assert list(rows.dtype.names) == FIELDS
        assert [rows.dtype[name].str for name in FIELDS] == ["<i8"] * 5 + ["<u8", "<i4", "|i1", "|b1"]
        assert [rows.dtype.fields[name][1] for name in FIELDS] == [0, 8, 16, 24, 32, 40, 48, 52, 53]
        assert rows.dtype.itemsize == 56
        assert rows.dtype == reader.dtype


def test_every_state_is_a_row(box: Any, group: str) -> None:
    State = box.RankState
    with box.GroupReader(group, 6, liveness_interval=0) as reader:
        writers = [box.MailboxWriter(group, rank, 6) for rank in range(4)]
        for rank in (0, 2, 3):
            writers[rank].publish(rank + 1, rank, rank, 9)
        out = reader.read()
        writers[2]._detach()
        writers[3].close()
        with open(f"/dev/shm/loadbox.{group}.5", "wb") as file:
            file.write(b"x" * 4096)
        assert reader.read(out) is out
        assert [State(state).name for state in out["state"]] == ["LIVE", "SILENT", "DEAD", "CLOSED", "ABSENT", "REFUSED"]
        assert list(out["usable"]) == [True] + [False] * 5
        assert list(out["rank"]) == list(range(6))
        assert list(out["epoch"][:3]) == [writer.epoch for writer in writers[:3]]
        assert tuple(out[0])[:4] == (1, 0, 0, 9)
        for rank in range(1, 6):
            assert tuple(out[rank])[:4] == (0, 0, 0, 0)
        assert "no segment of loadbox" in reader.reason(5)
        assert [reader.reason(rank) for rank in range(5)] == [None] * 5
        for bad in (-1, 6):
            with pytest.raises(IndexError):
                reader.reason(bad)
        for writer in writers:
            writer.close()


def test_ranks_are_found_without_dp_size(box: Any, group: str) -> None:
    with box.GroupReader(group, liveness_interval=0) as reader:
        assert len(reader.read()) == 0
        with box.MailboxWriter(group, 2) as two:
            two.publish(1, 1, 1, 1)
            rows = reader.read()
            assert list(rows["state"]) == [0, 0, box.RankState.LIVE]
            with box.MailboxWriter(group, 0, 5) as zero:
                zero.publish(2, 2, 2, 2)
                out = reader.read()
                assert list(out["usable"]) == [True, False, True, False, False]
                with box.MailboxWriter(group, 70) as far:
                    far.publish(3, 3, 3, 3)
                    with pytest.raises(ValueError, match="5 rows for 71 ranks"):
                        reader.read(out)
                    assert reader.read()["usable"][70]
                assert len(reader.read()) == 71  # it never shrinks


def test_a_dp_size_that_grows_in_a_later_life(box: Any, group: str) -> None:
    with box.GroupReader(group, liveness_interval=0) as reader:
        with box.MailboxWriter(group, 0, 2):
            assert len(reader.read()) == 2
        with box.MailboxWriter(group, 0, 4):
            assert len(reader.read()) == 4


def test_out(box: Any, group: str) -> None:
    with box.MailboxWriter(group, 0, 1) as writer, box.GroupReader(group, 1) as reader:
        writer.publish(1, 2, 3, 4)
        longer = np.zeros(3, reader.dtype)
        longer["usable"] = True
        longer["num_running"] = 77
        assert reader.read(out=longer) is longer
        assert list(longer["usable"]) == [True, False, False]
        assert list(longer["num_running"]) == [1, 0, 0]
        assert list(longer["rank"]) == [0, 1, 2]
        for bad, error in [
            (np.zeros(0, reader.dtype), ValueError),
            (np.zeros(4, reader.dtype)[::2], ValueError),
            (np.zeros((2, 2), reader.dtype), ValueError),
            (np.zeros(4), TypeError),
            ([1, 2], TypeError),
            (bytearray(560), TypeError),
        ]:
            with pytest.raises(error):
                reader.read(bad)
        frozen = np.zeros(1, reader.dtype)
        frozen.flags.writeable = False
        with pytest.raises(ValueError, match="writeable"):
            reader.read(frozen)
        with pytest.raises(TypeError):
            reader.read(longer, longer)
        with pytest.raises(TypeError):
            reader.read(into=longer)
        assert reader.read(None)["num_running"][0] == 1
        rows = [reader.read() for _ in range(3)]
        assert len({row.ctypes.data for row in rows}) == 3  # arrays that were handed out are not written to again


def test_rows_outlive_the_reader(box: Any, group: str) -> None:
    with box.MailboxWriter(group, 0, 1) as writer:
        writer.publish(1, 2, 3, 4)
        reader = box.GroupReader(group, 1)
        out = reader.read()
        row = out[0]
        reader.close()
        reader.close()
        assert tuple(row)[:4] == (1, 2, 3, 4)
        with pytest.raises(box.MailboxError, match="closed"):
            reader.read(out)


def test_quiet_rows_follow_every_change(box: Any, group: str) -> None:
    """The quick path of an unchanged rank must not outlive a publish, a death or a restart."""
    with box.GroupReader(group, 3, liveness_interval=0) as reader:
        writers = [box.MailboxWriter(group, rank, 3) for rank in range(3)]
        out = reader.read()
        for i in range(1, 200):
            writers[i % 3].publish(i, 0, 0, 1)
            for _ in range(2):
                reader.read(out)
                assert out["num_running"][i % 3] == i
        before = out["num_running"].copy()
        writers[0]._detach()
        reader.read(out)
        assert list(out["num_running"]) == [0, before[1], before[2]]
        writers[0] = box.MailboxWriter(group, 0, 3)
        writers[0].publish(5, 0, 0, 1)
        reader.read(out)
        assert out["num_running"][0] == 5
        for writer in writers:
            writer.close()


def test_threads_share_a_reader_while_ranks_come(box: Any, group: str) -> None:
    writers: list[Any] = []
    stop = threading.Event()
    wrong: list[Any] = []
    with box.GroupReader(group, liveness_interval=0) as reader:

        def read() -> None:
            out = reader.read()
            while not stop.is_set():
                try:
                    reader.read(out)
                except ValueError:
                    out = reader.read()
                for row in out:
                    if row["usable"] and (row["num_running"] != row["rank"] + 1 or row["kv_total_pages"] != 9):
                        wrong.append(row.copy())

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for rank in range(130):
            writers.append(box.MailboxWriter(group, rank))
            writers[-1].publish(rank + 1, 0, 0, 9)
        stop.set()
        for thread in threads:
            thread.join()
        assert not wrong
        assert list(reader.read()["num_running"]) == list(range(1, 131))
    for writer in writers:
        writer.close()


def test_a_hook_that_fails_is_heard_and_leaves_the_reader_usable(box: Any, group: str) -> None:
    class Broken(box.GroupReader):  # type: ignore[misc,name-defined]
        broken = True

        def _find(self, rank: int) -> Any:
            if self.broken:
                raise KeyboardInterrupt
            return super()._find(rank)

    with box.MailboxWriter(group, 0, 1) as writer, Broken(group, 1, liveness_interval=0) as reader:
        writer.publish(1, 2, 3, 4)
        with pytest.raises(KeyboardInterrupt):
            reader.read()
        reader.broken = False
        assert reader.read()["usable"][0]


def test_two_hundred_ranks(box: Any, group: str) -> None:
    writers = [box.MailboxWriter(group, rank, 200) for rank in range(200)]
    for rank, writer in enumerate(writers):
        writer.publish(rank, 1, 2, 3)
    with box.GroupReader(group) as reader:
        rows = reader.read()
        assert list(rows["num_running"]) == list(range(200))
        assert rows["usable"].all()
    for writer in writers:
        writer.close()
    assert not [entry for entry in os.listdir("/dev/shm") if group in entry]
