"""A publish that is given the requests themselves, and counts them."""

from __future__ import annotations

import gc
import sys
from collections import deque
from typing import Any

import pytest

OLD = (3, 1, 70, 100)


class Queue(deque[int]):
    """As vLLM's: a deque, whose length can be had from Python as well."""

    def __len__(self) -> int:
        raise AssertionError("Python was asked")


class Counted:
    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length() if callable(self.length) else self.length  # type: ignore[no-any-return]


@pytest.fixture
def pair(box: Any, group: str) -> Any:
    with box.MailboxWriter(group, 0, 2) as writer, box.MailboxReader(group, 0) as reader:
        writer.publish(*OLD)
        yield writer, reader


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (([], deque(), deque()), (0, 0)),
        (([1, 2], deque([1]), deque([1, 2, 3])), (2, 4)),
        (([1] * 1000, Queue([1] * 300), Queue([1])), (1000, 301)),
        ((Queue([1]), (1, 2), {3}), (1, 3)),
        ((Counted(5), {1: 2}, "abc"), (5, 4)),
        ((Counted(sys.maxsize), Counted(sys.maxsize), []), (sys.maxsize, sys.maxsize)),
    ],
    ids=lambda value: None,
)
def test_they_are_counted(pair: Any, sets: tuple[Any, Any, Any], expected: tuple[int, int]) -> None:
    writer, reader = pair
    assert writer._publish_lengths(*sets, 7, 9) is None
    assert reader.read() == (*expected, 7, 9)


def test_it_is_a_publish_like_any(pair: Any) -> None:
    writer, reader = pair
    before = writer._seen()[0]
    writer._publish_lengths([], deque(), deque(), 0, 1)
    assert writer._seen()[0] == before + 2
    assert reader.read() == (0, 0, 0, 1)
    assert reader.age() < 60
    writer._publish_lengths([1], deque(), deque(), 5, 0)
    assert reader.read() is None, "no snapshot"


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("bad", [5, None, True, object(), iter([]), Counted("x"), Counted(1.5)], ids=lambda bad: type(bad).__name__)
def test_what_has_no_length(pair: Any, place: int, bad: Any) -> None:
    writer, reader = pair
    sets: list[Any] = [[], deque(), deque()]
    sets[place] = bad
    with pytest.raises(TypeError):
        writer._publish_lengths(*sets, 7, 9)
    assert reader.read() == OLD


@pytest.mark.parametrize("bad", [(True, 9), (1.0, 9), (None, 9), (-1, 9), (10, 9), (1, 2**63), (1, None)], ids=repr)
def test_pages_are_checked_as_publish_does(pair: Any, bad: tuple[Any, Any]) -> None:
    writer, reader = pair
    with pytest.raises((TypeError, ValueError)) as by_numbers:
        writer.publish(1, 0, *bad)
    with pytest.raises(by_numbers.type) as by_lengths:
        writer._publish_lengths([1], deque(), deque(), *bad)
    assert str(by_lengths.value) == str(by_numbers.value)
    assert reader.read() == OLD


@pytest.mark.parametrize("arguments", [(), ([],), ([], [], []), ([], [], [], 1), ([], [], [], 1, 2, 3)], ids=len)
def test_too_few_and_too_many(pair: Any, arguments: tuple[Any, ...]) -> None:
    writer, reader = pair
    with pytest.raises(TypeError, match="_publish_lengths"):
        writer._publish_lengths(*arguments)
    assert reader.read() == OLD


def test_lengths_that_raise_or_are_none(pair: Any) -> None:
    def fails() -> int:
        raise ZeroDivisionError

    writer, reader = pair
    for bad, kind in ((Counted(fails), ZeroDivisionError), (Counted(-1), ValueError), (Counted(2**70), OverflowError)):
        for place in range(3):
            sets: list[Any] = [[], deque(), deque()]
            sets[place] = bad
            with pytest.raises(kind):
                writer._publish_lengths(*sets, 7, 9)
    with pytest.raises(ValueError, match="num_waiting is"):
        writer._publish_lengths([], Counted(sys.maxsize), Counted(1), 7, 9)
    assert reader.read() == OLD


def test_a_length_that_closes_the_writer(box: Any, group: str) -> None:
    writer = box.MailboxWriter(group, 0)

    def close() -> int:
        writer.close()
        return 1

    with pytest.raises(box.MailboxError, match="closed"):
        writer._publish_lengths([], Counted(close), [], 1, 1)
    with pytest.raises(box.MailboxError, match="closed"):
        writer._publish_lengths([], [], [], 1, 1)


def test_nothing_is_kept(pair: Any) -> None:
    """Neither the requests nor the numbers, in what succeeds and in what fails."""
    writer, _ = pair
    running, waiting, more, active, total = [object()], Queue([1]), deque([1] * 500), 10**6, 10**7
    bad, beyond = Counted("x"), 10**8
    everything: list[Any] = [running, waiting, more, active, total, bad, beyond]

    def work() -> None:
        for _ in range(200):
            writer._publish_lengths(running, waiting, more, active, total)
            for arguments in ((running, waiting, bad, active, total), (running, waiting, more, beyond, total)):
                try:
                    writer._publish_lengths(*arguments)
                except (TypeError, ValueError):
                    pass

    work()
    gc.collect()
    before = [sys.getrefcount(one) for one in everything], sys.getallocatedblocks()
    work()
    gc.collect()
    after = [sys.getrefcount(one) for one in everything], sys.getallocatedblocks()
    assert after[0] == before[0]
    assert abs(after[1] - before[1]) < 100
