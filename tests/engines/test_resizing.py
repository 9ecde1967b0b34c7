"""A DP group that grows and shrinks while it is read, as docs/engines.md has it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from loadbox.engines import LoadPublisher
from loadbox.mailbox import GroupReader, RankState
from loadbox.reader import LoadReader


def until(holds: Any) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def start(group: str, rank: int, dp_size: int | None) -> LoadPublisher:
    publisher = LoadPublisher(group, rank, dp_size)
    publisher.publish(rank, 0, 1, 10)
    return publisher


@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
def test_a_group_that_grows_and_shrinks(group: str, told: bool) -> None:
    ranks = [start(group, rank, 2 if told else None) for rank in range(2)]
    with GroupReader(group) as reader, LoadReader(group, seed=1) as view:
        until(lambda: len(reader.read()) == len(view.loads()) == 2)
        out = reader.read()
        ranks += [start(group, rank, 4 if told else None) for rank in range(2, 4)]
        until(lambda: len(reader.read()) == len(view.loads()) == 4)
        with pytest.raises(ValueError, match="the group has grown"):
            reader.read(out)
        until(lambda: reader.read()["num_running"].tolist() == [0, 1, 2, 3])
        until(lambda: all(load.snapshot is not None for load in view.loads()))
        assert {view.choose(f"a{i}") for i in range(40)} == {0, 1, 2, 3}

        for publisher in ranks[2:]:
            publisher.close()
        until(lambda: not reader.read()["usable"][2:].any())
        states = {RankState(int(state)) for state in reader.read()["state"][2:]}
        assert states <= {RankState.CLOSED, RankState.ABSENT}
        assert reader.read()["usable"].tolist() == [True, True, False, False]
        until(lambda: all(load.snapshot is None for load in view.loads()[2:]))
        assert {view.choose(f"b{i}") for i in range(40)} == {0, 1}
    for publisher in ranks[:2]:
        publisher.close()
