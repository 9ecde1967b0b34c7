"""Names that lead elsewhere than they did: renamed, linked, or many more than there are ranks."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from loadbox.mailbox import _attach as c_attach
from loadbox.mailbox import _group as c_group


def both(box: Any, group: str) -> tuple[Any, Any]:
    return box.MailboxReader(group, 0, liveness_interval=0), box.GroupReader(group, 1, liveness_interval=0)


def seen(readers: tuple[Any, Any]) -> list[tuple[str, int]]:
    """(state, num_running) as either reader has them."""
    one, ranks = readers
    state, load = one.state(), one.read()
    row = ranks.read()[0]
    return [(state.name, load.num_running if load else 0), (type(state)(row["state"]).name, int(row["num_running"]))]


@pytest.mark.parametrize("end", ["close", "die"])
@pytest.mark.parametrize("how", ["link", "rename"])
def test_a_rank_is_found_again_when_its_old_segment_still_has_a_name(box: Any, group: str, how: str, end: str) -> None:
    """An old segment that somebody linked or renamed keeps a name for ever; readers of it must see the next writer all the same."""
    path = f"/dev/shm/loadbox.{group}.0"
    elsewhere = f"/dev/shm/loadbox.{group}.kept"
    old = box.MailboxWriter(group, 0, start_wait=0)
    old.publish(1, 0, 0, 1)
    readers = both(box, group)
    assert seen(readers) == [("LIVE", 1)] * 2
    getattr(os, how)(path, elsewhere)
    old.publish(2, 0, 0, 1)
    assert seen(readers) == [("LIVE", 2)] * 2  # it lives, and nobody else has the name
    if end == "close":
        old.close()
        assert seen(readers) == [("CLOSED", 0)] * 2
    else:
        old._detach()
        assert seen(readers) == [("DEAD", 2), ("DEAD", 0)]
    if os.path.exists(path):
        os.unlink(path)
    with box.MailboxWriter(group, 0, start_wait=0) as new:
        new.publish(3, 0, 0, 1)
        assert seen(readers) == [("LIVE", 3)] * 2
    for reader in readers:
        reader.close()


def test_threads_that_share_a_new_reader_ask_for_the_right_names(box: Any, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may name its segments in the middle of this one's naming: each rank is asked for under its own name."""
    attach = c_attach if box.backend == "c" else box._attach
    module = c_group if box.backend == "c" else box._group
    asked: list[tuple[str, int]] = []
    named, meanwhile = module.segment_name, []
    with box.GroupReader(group, 9, liveness_interval=0) as ranks:

        def name(group: str, rank: int) -> str:
            if not meanwhile:
                meanwhile.append(threading.Thread(target=ranks._find, args=(5,)))
                meanwhile[0].start()
                meanwhile[0].join()
            return str(named(group, rank))

        monkeypatch.setattr(module, "segment_name", name)
        monkeypatch.setattr(attach, "find", lambda name, rank: (asked.append((name, rank)), (-1, None, 0))[1])
        ranks.read()
        assert meanwhile
        assert sorted({rank for _, rank in asked}) == list(range(9))
        assert [pair for pair in asked if pair[0] != f"/loadbox.{group}.{pair[1]}"] == []


def test_ranks_that_nobody_made_are_not_looked_for_one_by_one(box: Any, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header may say that its group has 65,536 ranks: what is not in the folder is not opened."""
    attach = c_attach if box.backend == "c" else box._attach
    asked: list[int] = []
    find = attach.find
    monkeypatch.setattr(attach, "find", lambda name, rank: (asked.append(rank), find(name, rank))[1])
    with box.MailboxWriter(group, 7, 65536) as writer, box.GroupReader(group) as ranks:
        writer.publish(1, 2, 3, 4)
        rows = ranks.read()
        assert len(rows) == 65536
        assert rows["usable"].nonzero()[0].tolist() == [7]
        assert asked == [7] or len(asked) < 100
