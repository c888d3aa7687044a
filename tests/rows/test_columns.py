"""Arrow batches as Spark sends them, seen as record parts: nothing copied, errors without content."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.errors import InvalidRowError, SchemaError
from kafka_sink.records.arrays import lengths, null_mask
from kafka_sink.rows.columns import ColumnPlan, RowBatch, extract

NOW_MS = 1_700_000_000_123
HEADER = pa.struct([("key", pa.string()), ("value", pa.binary())])
LARGE_HEADER = pa.struct([("key", pa.large_string()), ("value", pa.large_binary())])
TEXT_TYPES = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]
SECRET = "payload-do-not-show"


def read(**columns: pa.Array) -> RowBatch:
    """Extract from a batch of these columns; the topic is t unless there is a column for it."""
    columns.setdefault("value", pa.array([b"v"] * max(map(len, columns.values())), pa.binary()))
    names = list(columns)
    place = {"topic_column" if name == "topic" else name: index for index, name in enumerate(names)}
    plan = ColumnPlan(topic=None if "topic" in columns else "t", **place)
    return extract(plan, pa.record_batch(list(columns.values()), names=names), NOW_MS)


def addresses(array: pa.Array) -> list[int | None]:
    return [None if buffer is None else buffer.address for buffer in array.buffers()]


def refused(**columns: pa.Array) -> str:
    with pytest.raises(InvalidRowError) as caught:
        read(**columns)
    assert SECRET not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("arrow_type", TEXT_TYPES, ids=str)
def test_values_and_keys_are_bytes_over_sparks_buffers(arrow_type: pa.DataType) -> None:
    # pyarrow gives an array of a single type for both, and slices share their parent's buffers.
    whole = pa.array([b"a", None, b"", b"dd", b"e"], pa.binary()).cast(arrow_type)
    sliced = whole.slice(1, 3)
    rows = read(key=sliced, value=sliced)
    for part in (rows.key, *rows.value):
        assert part is not None
        assert part.type in (pa.binary(), pa.large_binary())
        assert part.to_pylist() == [None, b"", b"dd"]
        assert addresses(part) == addresses(sliced)
        assert lengths(part).tolist() == [0, 0, 2]
        assert null_mask(part).tolist() == [True, False, False]


def test_parts_that_no_row_has_are_none() -> None:
    rows = read(
        key=pa.nulls(2, pa.string()),
        value=pa.nulls(2, pa.binary()),
        headers=pa.nulls(2, pa.list_(HEADER)),
        partition=pa.nulls(2, pa.int32()),
    )
    assert (rows.key, rows.headers, rows.partition, rows.timestamps_ms) == (None, None, None, None)
    assert rows.value[0].null_count == 2
    assert (rows.topics, rows.topic_index) == (("t",), None)
    assert read(value=pa.nulls(3)).value[0].type == pa.binary(), "a column without a type of its own"
    # Nor has a batch without rows.
    columns = {
        "key": pa.array([], pa.large_string()),
        "value": pa.array([], pa.string()),
        "timestamp": pa.array([], pa.timestamp("us", "UTC")),
        "headers": pa.array([], pa.list_(HEADER)),
        "partition": pa.array([], pa.int32()),
    }
    rows = read(**columns)
    assert rows.num_rows == 0
    assert lengths(rows.value[0]).tolist() == []
    assert listed(rows.timestamps_ms) == []
    assert rows.topics == ("t",)
    assert read(**columns, topic=pa.array([], pa.string())).topics == ()


def listed(array: npt.NDArray[np.integer] | None) -> list[int]:
    assert array is not None
    return list(array.tolist())


def test_timestamps_floor_to_milliseconds_and_null_is_now() -> None:
    """Whatever stands at a null."""
    micros = [0, 999, 1000, 1_700_000_000_123_999, None, -1, -1000]
    column = pa.array(micros, pa.timestamp("us", "Europe/Berlin"))
    expected = [0, 0, 1, 1_700_000_000_123, NOW_MS, -1, -1]
    assert listed(read(timestamp=column).timestamps_ms) == expected
    assert listed(read(timestamp=column.slice(2, 4)).timestamps_ms) == expected[2:6]
    data = pa.py_buffer(np.array([-5_000_000, 7_000], dtype=np.int64))
    column = pa.Array.from_buffers(pa.timestamp("us", "UTC"), 2, [pa.py_buffer(b"\x02"), data])
    assert listed(read(timestamp=column).timestamps_ms) == [NOW_MS, 7]
    message = refused(timestamp=pa.array([5, -1001, None, -1, -10_000_000], pa.timestamp("us", "UTC")))
    assert message.startswith("column 'timestamp' is before 1970 in 2 of 5 rows")


def test_other_arrow_types_are_named_and_not_misread() -> None:
    with pytest.raises(SchemaError, match=r"timestamp\[ms"):
        read(timestamp=pa.array([1], pa.timestamp("ms", "UTC")))
    with pytest.raises(SchemaError, match="'value' has the Arrow type int64"):
        read(value=pa.array([1]))


def test_partitions() -> None:
    column = pa.array([7, None, 0, 2**31 - 1], pa.int32())
    assert listed(read(partition=column).partition) == [7, -1, 0, 2**31 - 1]
    assert listed(read(partition=column.slice(1, 2)).partition) == [-1, 0]
    # Java refuses -1 too: it is not another way to say null.
    message = refused(partition=pa.array([0, -1, None, -7], pa.int32()))
    assert "column 'partition' is negative in 2 of 4 rows" in message
    # The value under a null means nothing.
    data = pa.py_buffer(np.array([-9, 4], dtype=np.int32))
    column = pa.Array.from_buffers(pa.int32(), 2, [pa.py_buffer(b"\x02"), data])
    assert listed(read(partition=column).partition) == [-1, 4]


@pytest.mark.parametrize(("entry", "list_type"), [(HEADER, pa.list_), (LARGE_HEADER, pa.large_list)])
def test_headers_pass_as_they_are(
    entry: pa.DataType, list_type: Callable[[pa.DataType], pa.DataType]
) -> None:
    headers = [[("a", b"1"), ("a", b"2")], None, [], [("", None)]]
    column = pa.array([None, *headers, [("z", b"z")]], list_type(entry)).slice(1, 4)
    rows = read(headers=column)
    assert rows.headers is not None
    assert rows.headers.equals(column)
    assert addresses(rows.headers) == addresses(column)


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ([[(None, SECRET.encode())], [("a", None), (None, None)], None], "a header without a key in 2 of 3"),
        ([[None], [("a", SECRET.encode())]], "a null header in 1 of 2"),
    ],
)
def test_headers_need_keys(headers: list[object], text: str) -> None:
    column = pa.array(headers, pa.list_(HEADER))
    assert f"column 'headers' has {text}" in refused(headers=column)
    # The same rows cut away are nobody's concern.
    more = pa.array([*headers, [("a", b"")]], pa.list_(HEADER))
    assert read(headers=more.slice(len(headers))).headers is not None


def test_topics_are_numbered_in_order_of_appearance() -> None:
    for kind in (pa.string(), pa.large_string()):
        rows = read(topic=pa.array(["x", "b", "a", "b", "a", "a"], kind).slice(1))
        assert rows.topics == ("b", "a")
        assert rows.topic_index is not None
        assert rows.topic_index.dtype == np.int32
        assert rows.topic_index.tolist() == [0, 1, 0, 1, 1]
        one = read(topic=pa.array(["only"] * 3, kind))
        assert (one.topics, one.topic_index) == (("only",), None)


def _binary_of(kind: pa.DataType) -> pa.DataType:
    return pa.large_binary() if kind == pa.large_string() else pa.binary()


@pytest.mark.parametrize("of_keys", [pa.string(), pa.binary(), pa.large_binary()])
def test_a_header_key_that_is_no_utf8_is_refused(of_keys: pa.DataType) -> None:
    """Python's clients fail to read the whole batch of messages with it."""
    kind = pa.list_(pa.struct([("key", of_keys), ("value", pa.binary())]))
    given = [b"\xff", b"good", "gr\u00fc\u00df".encode(), b"a\xc3"]
    binary = pa.large_binary() if of_keys == pa.large_binary() else pa.binary()
    keys = pa.array(given, binary).view(of_keys)
    entries = pa.StructArray.from_arrays([keys, pa.array([b"1", None, b"3", b"4"])], ["key", "value"])
    headers = pa.ListArray.from_arrays(pa.array([0, 0, 1, 2, 4], pa.int32()), entries).cast(kind)
    assert "a header whose key is not valid UTF-8 in 2 of 4 rows" in refused(headers=headers)
    assert "a header whose key is not valid UTF-8 in 1 of 2 rows" in refused(headers=headers.slice(2))
    assert read(headers=headers.slice(2, 1)).headers is not None


def test_topics_that_are_refused() -> None:
    message = refused(topic=pa.array(["a", None, None]))
    # Begins as in spark-sql-kafka-0-10_2.13 4.1.1, which then advises the option that overrides the column.
    assert message == (
        "The Kafka message data sent to the producer contains a null topic. Give such rows one, as in "
        "coalesce(topic, 'orders'): the option 'topic' would replace the topics of all rows "
        "(column 'topic' is null in 2 of 3 rows)"
    )
    # Kafka does not take these.
    for name in ("", "..", "größe", f"a {SECRET}", SECRET * 20):
        assert "in 2 of 3 rows" in refused(topic=pa.array([name, "good", name]))
    # Spark's cast of binary to string keeps any bytes.
    for kind in (pa.string(), pa.large_string()):
        names = pa.array([b"good", b"\xff\xfe", b"bad\xc3", None], _binary_of(kind)).view(kind)
        message = refused(topic=names.slice(0, 3))
        assert message.startswith("column 'topic' has an invalid topic name in 2 of 3 rows")


texts = st.lists(st.none() | st.binary(max_size=5), max_size=30)
places = st.integers(0, 30)


@given(rows=texts, cut=st.tuples(places, places), kind=st.sampled_from(TEXT_TYPES[2:]))
def test_lengths_and_nulls_of_any_slice(
    rows: list[bytes | None], cut: tuple[int, int], kind: pa.DataType
) -> None:
    array = pa.array(rows, kind).slice(*cut)
    expected = array.to_pylist()
    assert lengths(array).tolist() == [len(row or b"") for row in expected]
    assert null_mask(array).tolist() == [row is None for row in expected]


def test_null_entries_may_span_bytes() -> None:
    offsets = pa.py_buffer(np.array([0, 3, 7], dtype=np.int32))
    array = pa.Array.from_buffers(pa.binary(), 2, [pa.py_buffer(b"\x01"), offsets, pa.py_buffer(b"abcdefg")])
    assert array.to_pylist() == [b"abc", None]
    assert lengths(array).tolist() == [3, 0]
