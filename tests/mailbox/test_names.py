"""Names and numbers that are passed in: what is allowed works, the rest is refused with the rule and before anything is made."""

from __future__ import annotations

import math
import os
import socket
from typing import Any

import numpy
import pytest

LONGEST = "Az09_-" + "x" * 42  # with the 16 digits that make it this test's own: 64
ARABIC_ONE = "\N{ARABIC-INDIC DIGIT ONE}"
BAD_GROUPS = [
    "",
    "x" * 65,
    ".",
    "..",
    "a.b",
    "a/b",
    "/a",
    "../a",
    "a b",
    " a",
    "a ",
    "a\n",
    "a\0",
    "é",
    ARABIC_ONE,
    "\udc80",
    "*",
    "a:b",
]
BAD_MODES = [0, 0o400, 0o200, 0o040, 0o660, 0o620, 0o602, 0o666, 0o700, 0o601, 0o1600, 0o4600, 0o2640, 0o100600, -1, -(10**400)]
NO_STR = [None, 3, b"a", True, ("a",)]
NO_INT = [None, 1.0, "1", b"1", True, False, numpy.bool_(True), math.nan, numpy.float64(2)]
HUGE = 10**400


@pytest.fixture(autouse=True)
def _nothing_is_made(group: str) -> Any:
    yield
    assert not [entry for entry in os.listdir("/dev/shm") if entry.startswith(f"loadbox.{group}")]


def kinds(box: Any) -> list[Any]:
    return [
        lambda group, rank=0, **options: box.MailboxWriter(group, rank, **options),
        lambda group, rank=0, **options: box.MailboxReader(group, rank, **options),
        lambda group, rank=0, **options: box.GroupReader(group, **options),
    ]


@pytest.mark.parametrize("bad", BAD_GROUPS)
def test_bad_groups_are_refused_with_the_rule(box: Any, bad: str) -> None:
    for make in kinds(box):
        with pytest.raises(ValueError, match=r"^group .* cannot name a DP group: use 1 to 64 of A-Z a-z 0-9 _ and -$"):
            make(bad)


@pytest.mark.parametrize("bad", NO_STR)
def test_groups_that_are_no_text(box: Any, bad: Any) -> None:
    for make in kinds(box):
        with pytest.raises(TypeError, match=f"^group must be a str, not {type(bad).__name__}$"):
            make(bad)


def test_the_longest_name_works(box: Any, group: str) -> None:
    group = LONGEST + group[2:]
    assert len(group) == 64
    with box.MailboxReader(group, 65535) as reader, box.MailboxWriter(group, 65535, 65536) as writer:
        assert writer.name == reader.name == f"/loadbox.{group}.65535"
        assert os.path.exists("/dev/shm" + writer.name)
        writer.publish(1, 2, 3, 4)
        assert reader.read() == (1, 2, 3, 4)
        assert group in box.list_groups()
    with box.MailboxWriter(group, 1) as writer, box.GroupReader(group) as ranks:
        writer.publish(1, 2, 3, 4)
        assert ranks.read()["num_waiting"].tolist() == [0, 2]
    assert group not in box.list_groups()


@pytest.mark.parametrize("short", ["-", "_", "0", "A"])
def test_groups_of_one_character_are_names(box: Any, short: str) -> None:
    with box.MailboxReader(short, 0) as reader:  # only read: others may have such a group
        assert reader.name == f"/loadbox.{short}.0"
        reader.state()


@pytest.mark.parametrize("bad", [-1, 65536, 1 << 64, -HUGE])
def test_ranks_out_of_range(box: Any, group: str, bad: int) -> None:
    for make in kinds(box)[:2]:
        with pytest.raises(ValueError, match=r"^rank -?\d+ is out of range: use 0 to 65535$"):
            make(group, bad)


@pytest.mark.parametrize("bad", NO_INT)
def test_ranks_and_sizes_that_are_no_ints(box: Any, group: str, bad: Any) -> None:
    for make in kinds(box)[:2]:
        with pytest.raises(TypeError, match=f"^rank must be an int, not {type(bad).__name__}$"):
            make(group, bad)
    if bad is None:
        return
    for make in (kinds(box)[0], kinds(box)[2]):
        with pytest.raises(TypeError, match=f"^dp_size must be an int, not {type(bad).__name__}$"):
            make(group, dp_size=bad)


def test_numpys_ints_are_ints(box: Any, group: str) -> None:
    rank, size = numpy.int32(1), numpy.uint8(2)
    with (
        box.MailboxWriter(group, rank, size) as writer,
        box.MailboxReader(group, rank) as reader,
        box.GroupReader(group, size) as ranks,
    ):
        assert writer.name == reader.name == f"/loadbox.{group}.1"
        assert len(ranks.read()) == 2
    with box.MailboxWriter(group, 0, mode=numpy.int64(0o640)) as writer:
        assert os.stat("/dev/shm" + writer.name).st_mode & 0o777 == 0o640


@pytest.mark.parametrize(("rank", "dp_size"), [(0, 0), (0, -1), (3, 3), (3, 1), (0, 65537), (65535, 65535), (0, HUGE)])
def test_sizes_that_the_rank_is_not_in(box: Any, group: str, rank: int, dp_size: int) -> None:
    why = rf" for rank {rank} \(ranks count from 0\)" if 0 < dp_size <= rank else ""
    with pytest.raises(
        ValueError, match=rf"^dp_size -?\d+ is out of range{why}: use {rank + 1} to 65536, or None if it is not known$"
    ):
        box.MailboxWriter(group, rank, dp_size)


@pytest.mark.parametrize("bad", [0, -1, 65537, HUGE])
def test_sizes_that_no_group_has(box: Any, group: str, bad: int) -> None:
    with pytest.raises(ValueError, match=r"^dp_size -?\d+ is out of range: use 1 to 65536"):
        box.GroupReader(group, bad)


@pytest.mark.parametrize("bad", BAD_MODES)
def test_modes_that_others_could_write_with_or_nobody_use(box: Any, group: str, bad: int) -> None:
    with pytest.raises(ValueError, match=r"^mode -?0o\d+ is not allowed: use 0o600, 0o640, 0o604 or 0o644 "):
        box.MailboxWriter(group, 0, mode=bad)


def test_a_mode_in_the_wrong_notation_is_known(box: Any, group: str) -> None:
    with pytest.raises(ValueError, match=r"^mode 0o1200 is not allowed \(did you mean 0o640\?\): use 0o600"):
        box.MailboxWriter(group, 0, mode=640)


@pytest.mark.parametrize("bad", NO_INT)
def test_modes_that_are_no_ints(box: Any, group: str, bad: Any) -> None:
    with pytest.raises(TypeError, match=f"^mode must be an int, not {type(bad).__name__}$"):
        box.MailboxWriter(group, 0, mode=bad)


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o604, 0o644])
def test_modes_are_what_the_file_gets(box: Any, group: str, mode: int, umask: int) -> None:
    before = os.umask(umask)
    try:
        with box.MailboxWriter(group, 0, mode=mode) as writer:
            assert os.stat("/dev/shm" + writer.name).st_mode & 0o7777 == mode
    finally:
        os.umask(before)


def test_a_later_life_may_have_another_mode(box: Any, group: str) -> None:
    for mode in (0o600, 0o644, 0o600):
        writer = box.MailboxWriter(group, 0, mode=mode)
        assert os.stat("/dev/shm" + writer.name).st_mode & 0o777 == mode
        writer._detach()  # as death would, without a farewell
    assert box._segment.clean(writer.name) is None


BAD_SECONDS = [math.nan, -1, -1e-9, -math.inf]
NO_SECONDS = ["1", None, True, False, b"1", 1j, [1]]
GOOD_SECONDS = [0, 0.0, 1e-12, 3, 2.5, numpy.float64(1.5), numpy.float32(1.5), numpy.int64(2)]
TIMES = [(1, "stall_after"), (2, "stall_after"), (1, "liveness_interval"), (2, "liveness_interval"), (0, "start_wait")]


@pytest.mark.parametrize("bad", BAD_SECONDS)
@pytest.mark.parametrize(("kind", "what"), TIMES)
def test_times_out_of_range(box: Any, group: str, kind: int, what: str, bad: float) -> None:
    with pytest.raises(ValueError, match=f"^{what} is {float(bad)}: use a number of seconds, 0 or more$"):
        kinds(box)[kind](group, **{what: bad})


@pytest.mark.parametrize("bad", NO_SECONDS)
@pytest.mark.parametrize(("kind", "what"), TIMES)
def test_times_that_are_no_numbers(box: Any, group: str, kind: int, what: str, bad: Any) -> None:
    with pytest.raises(TypeError, match=f"^{what} must be a number of seconds, not {type(bad).__name__}$"):
        kinds(box)[kind](group, **{what: bad})


def test_a_scheduler_does_not_wait_for_ever(box: Any, group: str) -> None:
    with pytest.raises(ValueError, match=r"^start_wait is inf: use a number of seconds, 0 or more$"):
        box.MailboxWriter(group, 0, start_wait=math.inf)


@pytest.mark.parametrize("good", GOOD_SECONDS)
def test_times_that_a_writer_takes(box: Any, group: str, good: Any) -> None:
    with box.MailboxWriter(group, 0, start_wait=good):
        pass


@pytest.mark.parametrize("good", [*GOOD_SECONDS, 1e300, HUGE, math.inf])
def test_times_that_readers_take(box: Any, group: str, good: Any) -> None:
    with box.MailboxWriter(group, 5, start_wait=0) as writer:
        writer.publish(0, 0, 0, 1)
        with box.MailboxReader(group, 5, stall_after=good, liveness_interval=good) as reader:
            assert reader.state().name == "LIVE"
            assert reader.state().name == "LIVE"
        with box.GroupReader(group, stall_after=good, liveness_interval=good) as ranks:
            assert ranks.read()["usable"].tolist() == [False] * 5 + [True]
            assert ranks.read()["usable"].tolist() == [False] * 5 + [True]


def test_arguments_that_do_not_exist(box: Any, group: str) -> None:
    for make in kinds(box):
        with pytest.raises(TypeError, match="rankk"):
            make(group, rankk=1)
    with pytest.raises(TypeError):
        box.MailboxWriter(group, 0, None, 0o600)  # mode is to be named
    with pytest.raises(TypeError):
        box.MailboxReader(group, 0, 5.0)


def test_list_groups(box: Any, groups: Any) -> None:
    one, other, dead, board, strange = (groups() for _ in range(5))
    assert not {one, other, dead, board, strange} & set(box.list_groups())
    with box.MailboxWriter(one, 0), box.MailboxWriter(one, 7), box.MailboxWriter(other, 0):
        box.MailboxWriter(dead, 65535)._detach()
        for end in ("00", "65536", "99999", "100000", "-1", "1.2", "1 ", "", "f.0123456789ABCDEF", ARABIC_ONE):
            with open(f"/dev/shm/loadbox.{strange}.{end}", "xb"):
                pass
        with open(f"/dev/shm/loadbox.{board}.f.0123456789abcdef", "xb"):
            pass
        found = box.list_groups()
        assert found == sorted(set(found))
        assert {one, other, dead, board, strange} & set(found) == {one, other, dead}
        listed = [name for name in box._names.list_names() if name.split(".")[1] in (one, other, dead, board, strange)]
        assert set(listed) == {"/loadbox." + end for end in (f"{one}.0", f"{one}.7", f"{other}.0", f"{dead}.65535")} | {
            f"/loadbox.{board}.f.0123456789abcdef"
        }
        with box.GroupReader(strange) as ranks:
            assert len(ranks.read()) == 0
    assert {one, other, dead} & set(box.list_groups()) == {dead}


def test_names_that_are_no_files_are_listed_and_refused(box: Any, group: str) -> None:
    """A name is a name, whatever lies behind it: seen in the list, and judged when it is read."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/dev/shm/loadbox.{group}.0")
    try:
        assert group in box.list_groups()
        with box.GroupReader(group) as ranks, box.GroupReader(group, 1) as told:
            assert len(ranks.read()) == 0  # nobody trustworthy says that there is a rank
            assert told.read()["state"].tolist() == [6]
    finally:
        os.unlink(f"/dev/shm/loadbox.{group}.0")
