"""The batch on the wire: golden bytes, eras, and what is strict and what is forgiven when bytes or types are bad."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from loadbox.mailbox import LoadSnapshot
from loadbox.piggyback import BatchTokenIDOutSlim, WireError, decode_batch, encode_batch

TAG = "BatchTokenIDOutSlim"
GOLDEN = bytes.fromhex("9eb34261746368546f6b656e49444f7574536c696d91a16191920a0b91a66c656e6774689103910291019190919001020564cd0190")
COLUMNS: list[Any] = [["a"], [[10, 11]], ["length"], [3], [2], [1], [[]], [[]]]
pack = msgspec.msgpack.encode


def golden() -> BatchTokenIDOutSlim:
    return BatchTokenIDOutSlim(["a"], [[10, 11]], ["length"], [3], [2], [1], [[]], [[]], 1, 2, 5, 100, 400)


def elements(*tail: Any, columns: list[Any] = COLUMNS) -> bytes:
    """A batch as another sender would write it: the tag, the columns, and any number of elements after them."""
    return pack([TAG, *columns, *tail])


def load(batch: BatchTokenIDOutSlim) -> tuple[int, int, int, int]:
    return batch.num_running, batch.num_waiting, batch.kv_active_pages, batch.kv_total_pages


def test_golden_bytes():
    assert encode_batch(golden()) == GOLDEN
    assert decode_batch(GOLDEN) == golden()
    assert elements(1, 2, 5, 100, 400) == GOLDEN


def test_golden_bytes_of_the_ten_element_form():
    assert encode_batch(golden(), load_tail=False) == b"\x9a" + GOLDEN[1:-6]


@pytest.mark.parametrize("size", range(9, 15))
def test_missing_elements_at_the_end_read_as_zero(size):
    tail = [1, 2, 5, 100, 400]
    got = decode_batch(elements(*tail[: size - 9]))
    expected = tail[: size - 9] + [0] * (14 - size)
    assert [got.engine_index, *load(got)] == expected
    assert got.output_ids == [[10, 11]]
    assert got.load == (LoadSnapshot(2, 5, 100, 400) if size == 14 else None)


@pytest.mark.parametrize("extra", [[7], [None], ["x", {"a": [1.5]}], [[[[]]]], [0] * 40])
def test_more_elements_than_fourteen_are_skipped(extra):
    assert decode_batch(elements(1, 2, 5, 100, 400, *extra)) == golden()


@pytest.mark.parametrize("size", [0, 1, 5, 8])
def test_fewer_than_nine_elements_is_no_batch(size):
    with pytest.raises(WireError, match="length 9"):
        decode_batch(pack([TAG, *COLUMNS][:size]))


def test_zero_total_pages_is_no_snapshot():
    got = decode_batch(elements(1, 2, 5, 0, 0))
    assert got.load is None
    assert load(got) == (2, 5, 0, 0)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_can_be_decoded(kind):
    assert decode_batch(kind(GOLDEN)) == golden()


def test_every_prefix_is_a_precise_error():
    for era in (GOLDEN, encode_batch(golden(), load_tail=False), elements()):
        for end in range(len(era)):
            with pytest.raises(WireError, match=TAG):
                decode_batch(era[:end])


def test_trailing_bytes_are_an_error():
    with pytest.raises(WireError, match="trailing"):
        decode_batch(GOLDEN + b"\x00")


@pytest.mark.parametrize("tag", ["BatchTokenIDOut", "", None, 0, 1.5, ["BatchTokenIDOutSlim"], b"BatchTokenIDOutSlim"])
def test_another_tag_is_an_error(tag):
    with pytest.raises(WireError):
        decode_batch(pack([tag, *COLUMNS, 1, 2, 5, 100, 400]))


VALUES: dict[str, Any] = {
    "null": None, "true": True, "false": False, "int": 7, "zero": 0, "negative": -1, "int64 + 1": 1 << 63, "uint64": (1 << 64) - 1,
    "float": 1.5, "whole float": 2.0, "nan": float("nan"), "inf": float("inf"), "str": "x",
    "digits": "7", "empty str": "", "bin": b"x", "map": {"a": 1}, "empty map": {}, "ext": msgspec.msgpack.Ext(5, b"x"),
    "list of null": [None], "list of float": [1.5],
    "list of str": ["x"], "list of list": [[]], "list of bool": [True], "list of map": [{}], "deep": [[[[[[]]]]]],
    "two rows": [[], []], "list of uint64": [(1 << 64) - 1], "list of list of str": [["x"]], "list of list of null": [[None]],
    "list of list of float": [[0.5]],
    "list of ext": [msgspec.msgpack.Ext(5, b"x")], "empty list": [],
}  # fmt: skip

# What a column of one row may hold, among the values above.
GOOD = {
    1: {"list of str"},
    2: {"list of list"},
    3: {"list of str"},
    4: {"list of uint64"},
    5: {"list of uint64"},
    6: {"list of uint64"},
    7: {"list of list", "list of list of float"},
    8: {"list of list"},
    9: {"int", "zero"},
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("place", range(1, 10))
def test_every_type_in_every_element_where_tokens_are_at_stake(place, name):
    wire = [TAG, *COLUMNS, 1, 2, 5, 100, 400]
    wire[place] = VALUES[name]
    if name in GOOD[place]:
        got = decode_batch(pack(wire))
        assert msgspec.to_builtins(got)[place] == VALUES[name]
    else:
        with pytest.raises(WireError):
            decode_batch(pack(wire))


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("place", range(10, 14))
def test_every_type_in_every_element_of_the_tail_costs_the_load_alone(place, name, counted, caplog):
    wire = [TAG, *COLUMNS, 1, 2, 5, 0, 400]
    wire[place] = VALUES[name]
    got = decode_batch(pack(wire))
    assert got.rids == ["a"]
    assert got.output_ids == [[10, 11]]
    assert got.engine_index == 1
    if name in ("int", "zero"):
        assert load(got) == tuple(wire[10:])
        assert counted() == {}
    else:
        assert load(got) == (0, 0, 0, 0)
        assert got.load is None
        assert counted() == {"bad_tails": 1}
        assert "engine 1" in caplog.text


@pytest.mark.parametrize(("active", "total"), [(401, 400), (2, 1), ((1 << 63) - 1, 1)])
def test_more_active_pages_than_there_are_is_a_bad_tail(active, total, counted):
    got = decode_batch(elements(1, 2, 5, active, total))
    assert load(got) == (0, 0, 0, 0)
    assert got.output_ids == [[10, 11]]
    assert counted() == {"bad_tails": 1}


def test_a_short_tail_with_a_bad_number_is_a_bad_tail(counted):
    got = decode_batch(elements(1, None))
    assert (got.engine_index, *load(got)) == (1, 0, 0, 0, 0)
    assert counted() == {"bad_tails": 1}


@pytest.mark.parametrize("place", range(8))
def test_columns_of_unequal_length_are_an_error_with_their_names(place):
    columns = [list(column) for column in COLUMNS]
    columns[place] = columns[place] * 2
    with pytest.raises(WireError, match=r"column .* rows for"):
        decode_batch(elements(1, 2, 5, 100, 400, columns=columns))
    with pytest.raises(WireError, match=r"column .* rows for"):
        decode_batch(elements(1, None, 5, 100, 400, columns=columns))
    for tail in (True, False):
        with pytest.raises(WireError, match=r"column .* rows for"):
            encode_batch(BatchTokenIDOutSlim(*columns), load_tail=tail)


def test_a_batch_with_empty_columns_is_a_batch():
    wire = elements(3, 0, 0, 7, 9, columns=[[]] * 8)
    got = decode_batch(wire)
    assert (got.rids, got.engine_index, got.load) == ([], 3, LoadSnapshot(0, 0, 7, 9))
    assert encode_batch(got) == wire


@pytest.mark.parametrize("payload", [None, 1, "text", [], object(), memoryview(bytes(8))[::2]])
def test_what_is_no_buffer_is_a_wire_error(payload):
    with pytest.raises(WireError):
        decode_batch(payload)


def test_lengths_that_lie_are_an_error_and_take_no_memory():
    head = b"\x9e" + pack(TAG)
    for lie in (b"\xdd\xff\xff\xff\xff", b"\xdc\xff\xff", b"\x91\xdb\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"):
        with pytest.raises(WireError):
            decode_batch(head + lie)


def test_endless_nesting_is_an_error():
    with pytest.raises(WireError):
        decode_batch(b"\x9e" + pack(TAG) + b"\x91" * 100_000)


# Writing.


def test_encode_takes_a_batch_only():
    for other in (None, COLUMNS, {"rids": []}):
        with pytest.raises(WireError, match="BatchTokenIDOutSlim"):
            encode_batch(other)


BAD_LOADS: list[tuple[Any, ...]] = [
    (-1, 0, 0, 1), (0, -1, 0, 1), (0, 0, -1, 1), (0, 0, 0, -1), (1 << 63, 0, 0, 1), (0, 0, 0, 1 << 63), (0, 0, 2, 1),
    (1.0, 0, 0, 1), (0, 0.5, 0, 1), (0, 0, None, 1), (0, 0, 0, "1"), (True, 0, 0, 1), (0, 0, 0, np.bool_(True)), ([], 0, 0, 1),
    (0, 0, 0, float("nan")), (0, 0, 0, np.float64(1)), (0, 0, 0, 10**40),
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_LOADS, ids=repr)
def test_a_bad_load_is_written_as_four_zeros(bad, counted):
    batch = BatchTokenIDOutSlim(*COLUMNS, 1, *bad)
    assert encode_batch(batch) == elements(1, 0, 0, 0, 0)
    assert load(batch) == bad, "the caller's batch must be left as it is"
    assert counted() == {"bad_loads": 1}


def test_numpy_integers_are_integers():
    batch = BatchTokenIDOutSlim(*COLUMNS, 1, np.int64(2), np.uint8(5), np.int32(100), np.uint64(400))
    assert encode_batch(batch) == GOLDEN


def test_the_largest_numbers_fit():
    top = (1 << 63) - 1
    batch = BatchTokenIDOutSlim(*COLUMNS, 0xFFFFFFFF, top, top, top, top)
    assert decode_batch(encode_batch(batch)) == batch


@pytest.mark.parametrize("index", [-1, 1 << 32, None, "1", 1.0, True])
@pytest.mark.parametrize("tail", [True, False])
def test_an_engine_index_that_names_nobody_is_not_written(index, tail):
    with pytest.raises(WireError, match="engine_index"):
        encode_batch(BatchTokenIDOutSlim(*COLUMNS, index), load_tail=tail)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("column", [None, 5, [object()], [1 << 70]])
def test_columns_that_cannot_be_written_are_a_wire_error(column, tail):
    with pytest.raises(WireError):
        encode_batch(BatchTokenIDOutSlim(["a"], [[1]], [""], column, [1], [1], [[]], [[]]), load_tail=tail)


# Anything at all.

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
counts = st.integers(0, (1 << 63) - 1)
tokens = st.lists(st.integers(0, 1 << 32), max_size=4)


@st.composite
def batches(draw: st.DrawFn) -> BatchTokenIDOutSlim:
    n = draw(st.integers(0, 4))

    def rows(items: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(items, min_size=n, max_size=n))

    total = draw(counts)
    return BatchTokenIDOutSlim(
        rows(st.text(max_size=8)), rows(tokens), rows(st.sampled_from(["", "stop", "length", "abort"])), rows(counts), rows(counts),
        rows(counts), rows(st.lists(st.floats(allow_nan=False), max_size=3)), rows(tokens), draw(st.integers(0, (1 << 32) - 1)),
        draw(counts), draw(counts), draw(st.integers(0, total)), total,
    )  # fmt: skip


@given(batches())
def test_a_good_batch_comes_back_as_it_went(batch):
    assert decode_batch(encode_batch(batch)) == batch
    ten = decode_batch(encode_batch(batch, load_tail=False))
    assert load(ten) == (0, 0, 0, 0)
    assert (ten.rids, ten.output_ids, ten.engine_index) == (batch.rids, batch.output_ids, batch.engine_index)


@given(batches(), st.lists(anything, max_size=6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_tail_whatever_costs_a_token(batch, tail):
    columns = msgspec.to_builtins(batch)[1:9]
    got = decode_batch(elements(batch.engine_index, *tail, columns=columns))
    assert msgspec.to_builtins(got)[1:10] == [*columns, batch.engine_index]
    four = [*tail[:4], *[0] * (4 - len(tail))]
    plain = all(type(n) is int and 0 <= n < 1 << 63 for n in four) and not (four[2] > four[3] > 0)
    assert list(load(got)) == (four if plain else [0, 0, 0, 0])


@given(st.binary(max_size=200))
@example(b"")
@example(b"ENGINE_CORE_DEAD")
def test_random_bytes_are_a_wire_error(payload):
    with pytest.raises(WireError):
        decode_batch(payload)


@given(st.integers(0, len(GOLDEN) - 1), st.integers(0, 255))
def test_one_flipped_byte_is_a_batch_or_a_wire_error(place, value):
    wire = bytearray(GOLDEN)
    wire[place] = value
    try:
        got = decode_batch(bytes(wire))
    except WireError:
        return
    assert len(got.rids) == len(got.output_ids) == 1
    assert got.kv_total_pages == 0 or got.kv_active_pages <= got.kv_total_pages


@given(anything)
def test_any_other_message_is_a_wire_error(message):
    with pytest.raises(WireError):
        decode_batch(pack(message))


@given(st.lists(anything, max_size=16))
def test_any_other_array_with_the_tag_is_a_wire_error_or_a_batch(items):
    try:
        got = decode_batch(pack([TAG, *items]))
    except WireError:
        return
    assert len({len(column) for column in msgspec.to_builtins(got)[1:9]}) == 1


def test_floats_in_msgpack_of_either_size_are_no_count():
    for encoded in (b"\xca" + struct.pack(">f", 2.0), b"\xcb" + struct.pack(">d", 2.0)):
        got = decode_batch(GOLDEN[:-6] + encoded + GOLDEN[-5:])
        assert load(got) == (0, 0, 0, 0)
        assert got.rids == ["a"]
