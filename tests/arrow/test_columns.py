"""Arrow columns as libraries hand them over: the bytes, numbers and instants stay, whatever their types."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kafka_sink.arrow.columns import ArrowColumns, converter
from kafka_sink.errors import InvalidRowError, SchemaError
from kafka_sink.rows.columns import RowBatch, extract

VALUES = ["a", None, "", "an umlaut: ä, and more than twelve bytes"]
BYTES = [None if value is None else value.encode() for value in VALUES]
NOW_MS = 1_700_000_000_000
UTC = datetime.timezone.utc


def converted(**columns: pa.Array) -> RowBatch:
    """The parts of records that these columns become."""
    batch = pa.record_batch(columns)
    found = ArrowColumns.of(batch.schema, None if "topic" in columns else "t")
    (only,) = found.converted(batch)
    return extract(found.plan, only, NOW_MS)


def bytes_of(chunks: tuple[pa.Array, ...]) -> list[bytes | None]:
    return [value for chunk in chunks for value in chunk.to_pylist()]


@pytest.mark.parametrize(
    "values",
    [
        pa.array(VALUES, pa.string()),
        pa.array(VALUES, pa.large_string()),
        pa.array(VALUES, pa.string_view()),
        pa.array(BYTES, pa.binary()),
        pa.array(BYTES, pa.large_binary()),
        pa.array(BYTES, pa.binary_view()),
        pa.array(VALUES, pa.string()).dictionary_encode(),
        pa.DictionaryArray.from_arrays(
            pa.array([0, None, 1, 2], pa.uint32()),
            pa.array([VALUES[0], VALUES[2], VALUES[3]], pa.string_view()),
        ),
        pa.array(["skipped", *VALUES, "skipped"], pa.string_view()).slice(1, 4),
        pa.ExtensionArray.from_storage(pa.json_(), pa.array(VALUES, pa.string())),
    ],
    ids=lambda values: str(values.type)[:30],
)
def test_values_of_every_type_of_text_and_bytes(values: pa.Array) -> None:
    assert bytes_of(converted(value=values).value) == BYTES


def test_bytes_of_a_fixed_size_and_a_column_of_nulls_and_keys_and_topics_of_views() -> None:
    assert bytes_of(converted(value=pa.array([b"ab", None], pa.binary(2))).value) == [b"ab", None]
    assert bytes_of(converted(value=pa.nulls(2)).value) == [None, None]
    topics, keys = pa.array(["x", "y"], pa.string_view()), pa.array(["k", None], pa.string_view())
    rows = converted(value=pa.array(["v", "w"]), topic=topics, key=keys)
    assert rows.topics == ("x", "y")
    assert rows.key is not None
    assert rows.key.to_pylist() == [b"k", None]


def test_partitions_of_every_integer_type() -> None:
    """Catches: 2^32 + 1 becomes partition 1; one beyond 32 bits stays one that does not exist."""
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
        kind = pa.type_for_alias(name)
        partitions = pa.array([9, 0, None, 7], kind).slice(1)
        rows = converted(value=pa.array(["a", "b", "c"]), partition=partitions)
        assert rows.partition is not None
        assert rows.partition.tolist() == [0, -1, 7], kind
    for kind in (pa.int64(), pa.uint32(), pa.uint64()):
        rows = converted(value=pa.array(["a"]), partition=pa.array([2**32 - 1], kind))
        assert rows.partition is not None
        assert rows.partition.tolist() == [2**31 - 1], kind


def test_timestamps_of_every_unit() -> None:
    """Nanoseconds are floored."""
    instants = [datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), None]
    for unit in ("s", "ms", "us", "ns"):
        timestamps = pa.array([None, *instants], pa.timestamp(unit, "Europe/Berlin")).slice(1)
        rows = converted(value=pa.array(["a", "b"]), timestamp=timestamps)
        assert rows.timestamps_ms is not None
        assert rows.timestamps_ms.tolist() == [1_767_323_045_000, NOW_MS], unit
    timestamps = pa.array([1_999_999, 2_000_000], pa.timestamp("ns", "UTC"))
    rows = converted(value=pa.array(["a", "b"]), timestamp=timestamps)
    assert rows.timestamps_ms is not None
    assert rows.timestamps_ms.tolist() == [1, 2]


def headers_of(column: pa.Array) -> list[Any]:
    rows = converted(value=pa.nulls(len(column), pa.string()), headers=column)
    assert rows.headers is not None
    return [
        None if row is None else [(_text(entry["key"]), entry["value"]) for entry in row]
        for row in rows.headers.to_pylist()
    ]


def _text(key: str | bytes) -> str:
    return key.decode() if isinstance(key, bytes) else key


def test_columns_of_nulls_and_instants_before_1970() -> None:
    """Catches: a null column of Polars that is refused, and nanoseconds that round towards 1970."""
    for name in ("headers", "partition", "timestamp"):
        convert = converter(name, pa.null())
        assert convert is not None
        assert convert(pa.nulls(2)).to_pylist() == [None, None], name
    convert = converter("timestamp", pa.timestamp("ns", "UTC"))
    assert convert is not None
    assert convert(pa.array([-1, 1999], pa.timestamp("ns", "UTC"))).cast(pa.int64()).to_pylist() == [-1, 1]


def header_type(key: pa.DataType, value: pa.DataType) -> pa.DataType:
    return pa.struct([("key", key), ("value", value)])


def test_headers_of_every_type() -> None:
    given = [[("first", b"1")], None, [], [("a", None), ("b", b"2")], [("last", b"3")]]
    entries = [row and [{"key": key, "value": value} for key, value in row] for row in given]
    for kind in (
        pa.list_(header_type(pa.string(), pa.binary())),
        pa.large_list(header_type(pa.string_view(), pa.binary_view())),
        pa.list_(header_type(pa.large_string(), pa.large_binary())),
        pa.list_(pa.struct([("value", pa.binary_view()), ("key", pa.string())])),
        pa.map_(pa.string(), pa.binary()),
    ):
        column = pa.array(given if pa.types.is_map(kind) else entries, kind)
        assert headers_of(column) == given, kind
        assert headers_of(column.slice(1, 3)) == given[1:4], kind


def test_a_null_header_is_still_refused() -> None:
    kind = pa.list_(header_type(pa.string_view(), pa.binary()))
    with pytest.raises(ValueError, match=r"'headers' has a null header in 1 of 2 rows"):
        headers_of(pa.array([[None], [{"key": "k", "value": b"v"}]], kind))


def test_long_batches_are_converted_in_pieces_in_order_and_others_are_not_copied() -> None:
    values = [f"{number:>20}" for number in range(40_000)]
    batch = pa.record_batch({"value": pa.array(values, pa.string_view())})
    pieces = list(ArrowColumns.of(batch.schema, "t").converted(batch))
    assert len(pieces) == 3
    found = [value.decode() for piece in pieces for value in piece.column(0).to_pylist()]
    assert found == values
    large = pa.array(VALUES, pa.large_string())
    batch = pa.record_batch({"other": pa.array([1, 2, 3, 4]), "value": large})
    (only,) = ArrowColumns.of(batch.schema, "t").converted(batch)
    assert only.column(0).buffers()[2].address == large.buffers()[2].address


def test_views_of_entries_that_lie_one_after_the_other_are_not_copied() -> None:
    texts = [f"{number}: longer than a view holds" for number in range(100)]
    views = pa.array(texts).cast(pa.string_view())
    for column, is_copied in (
        (views, False),
        (views.slice(7, 50), False),
        (pa.array([*texts, None]).cast(pa.string_view()), True),
        (pa.array([*texts, "short"]).cast(pa.string_view()), True),
        (pa.concat_arrays([views, views.slice(3)]), True),
        (pa.concat_arrays([views.slice(50, 20), views.slice(0, 3)]), True),
    ):
        (found,) = converted(value=column).value
        assert bytes_of((found,)) == [text and text.encode() for text in column.to_pylist()]
        own = {buffer.address for buffer in column.buffers()[2:]}
        assert (found.buffers()[2].address not in own) == is_copied


_LONG = "y" * 60_000
_KINDS = {
    "views": lambda texts: pa.array(texts, pa.string_view()),
    "a dictionary": lambda texts: pa.array(texts).dictionary_encode(),
    "a dictionary of views": lambda texts: pa.DictionaryArray.from_arrays(
        pa.array([texts.index(text) for text in texts]), pa.array(texts, pa.string_view())
    ),
}


@pytest.mark.parametrize("part", ["value", "key", "headers"])
@pytest.mark.parametrize("kind", _KINDS)
def test_rows_that_share_long_values_are_converted_in_small_pieces(part: str, kind: str) -> None:
    """Catches: 1 GB for 16,000 rows that share 60 kB, and offsets of 32 bits that wrap beyond 2 GiB."""
    # More than a piece's 8 MiB in all, and a row that is larger than that.
    texts = [f"{number}{_LONG}" for number in range(300)] + ["z" * 9_000_000, "a"]
    column = _KINDS[kind](texts)
    if part == "headers":
        ends = pa.array(range(len(texts) + 1), pa.int32())
        entries = pa.StructArray.from_arrays([pa.array(["h"] * len(texts)), column], ["key", "value"])
        column = pa.ListArray.from_arrays(ends, entries)
    batch = pa.record_batch({"value": pa.nulls(len(texts)), part: column})
    found = []
    for piece in ArrowColumns.of(batch.schema, "t").converted(batch):
        own = piece.column(part)
        own = own.flatten().flatten()[1] if part == "headers" else own
        contents = [content.decode() for content in own.cast(pa.binary()).to_pylist()]
        assert sum(map(len, contents)) <= 8 << 20 or len(contents) == 1
        found += contents
    assert found == texts


def test_dictionaries_beyond_a_piece_are_read_with_nulls_and_in_any_order() -> None:
    dictionary = pa.array([f"{number}{_LONG}" for number in range(200)], pa.string_view())
    places = pa.array([199, None, 3, 4, 5, 100, 3], pa.int16())
    batch = pa.record_batch({"value": pa.DictionaryArray.from_arrays(places, dictionary)})
    found = [
        value
        for piece in ArrowColumns.of(batch.schema, "t").converted(batch)
        for value in piece[0].to_pylist()
    ]
    wanted = [None if place is None else f"{place}{_LONG}".encode() for place in places.to_pylist()]
    assert found == wanted


def buffers_of(kind: pa.DataType, *buffers: Any) -> pa.Array:
    """Three entries, unchecked."""
    return pa.Array.from_buffers(kind, 3, [None, *(pa.py_buffer(buffer) for buffer in buffers)])


def int32s(*numbers: Any) -> Any:
    return np.array(numbers, dtype=np.int32)


def indexed(*places: int, dictionary: pa.Array) -> pa.DictionaryArray:
    kind = pa.dictionary(pa.int32(), dictionary.type)
    return pa.DictionaryArray.from_buffers(kind, 3, [None, pa.py_buffer(int32s(*places))], dictionary)


def damaged(kind: str) -> Iterator[tuple[pa.Array, str]]:
    """Texts or bytes, and where they are damaged."""
    is_text = kind == "text"
    short, large = (pa.string(), pa.large_string()) if is_text else (pa.binary(), pa.large_binary())
    view = pa.string_view() if is_text else pa.binary_view()
    one = pa.array(["a"], short)
    beyond = buffers_of(short, int32s(0, 2_000_000_000, 3, 6), b"abcdef")
    yield buffers_of(short, int32s(0, 5, 2, 6), b"abcdef"), "row 1"
    yield beyond, "row 0"
    yield buffers_of(large, np.array([0, 1, 1 << 50, 3]), b"abc"), "row 1"
    yield buffers_of(view, int32s([1, 97, 0, 0], [1, 98, 0, 0], [-5, 0, 0, 0])), "row 2"
    yield buffers_of(view, int32s([1, 97, 0, 0], [2_000_000_000, 97, 0, 0], [1, 98, 0, 0])), "row 1"
    for dictionary in (one, one.cast(view)):
        for index in (7, -7):
            yield (
                indexed(0, index, 0, dictionary=dictionary),
                rf"row 1 .*\(index {index} in a dictionary of 1\)",
            )
    yield indexed(0, 1, 2, dictionary=beyond), "Offset invariant"
    if is_text:
        yield pa.ExtensionArray.from_storage(pa.json_(), beyond), "row 0"


@pytest.mark.parametrize("part", ["value", "key", "topic", "headers"])
@pytest.mark.parametrize("kind", ["text", "bytes"])
def test_damaged_columns_are_errors_that_name_column_and_row(part: str, kind: str) -> None:
    """Catches: offsets, lengths and indices by which the process reads memory that is not the column's."""
    for column, words in damaged(kind):
        given = column
        if part == "headers":
            entries = pa.StructArray.from_arrays([pa.array(["h"] * 3), column], ["key", "value"])
            given = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), entries)
        batch = pa.record_batch({"value": pa.nulls(3, pa.string()), part: given})
        found = ArrowColumns.of(batch.schema, None if part == "topic" else "t")
        with pytest.raises(InvalidRowError, match=f"column '{part}' is damaged.*{words}"):
            list(found.converted(batch))
    # Values and keys may be any bytes.
    invalid = pa.array([b"\xff"]).view(pa.string())
    assert bytes_of(converted(value=invalid).value) == [b"\xff"]


def test_lists_whose_offsets_are_damaged_are_errors() -> None:
    entries = pa.array([{"key": "h", "value": b"v"}] * 2, header_type(pa.string(), pa.binary()))
    for ends in ([0, 900_000_000, 1, 2], [0, 2, 1, 2]):
        kind, given = pa.list_(entries.type), [None, pa.py_buffer(int32s(*ends))]
        batch = pa.record_batch(
            {"value": pa.nulls(3), "headers": pa.Array.from_buffers(kind, 3, given, children=[entries])}
        )
        with pytest.raises(InvalidRowError, match="column 'headers' is damaged"):
            list(ArrowColumns.of(batch.schema, "t").converted(batch))


def test_unwritable_columns_are_refused_with_a_remedy() -> None:
    value = ("value", pa.string())
    mistakes: list[tuple[list[tuple[str, pa.DataType]], str]] = [
        ([("Value", pa.string())], "'value' not found .found 'Value', and names are case-sensitive"),
        ([("a", pa.string()), ("b", pa.int8())], "columns a, b: rename one to 'value', or create it"),
        ([("value", pa.int64())], "unsupported type int64. value must be text or binary"),
        ([("value", pa.struct([("a", pa.int8())]))], "to_json"),
        (
            [value, ("timestamp", pa.timestamp("us"))],
            "timestamp must be a timestamp with a time zone. Without a zone it is ambiguous",
        ),
        ([value, ("timestamp", pa.date32())], "unsupported type date32"),
        ([value, ("partition", pa.float64())], "partition must be an integer"),
        ([value, ("headers", pa.list_(pa.string()))], "headers must be a list of structs"),
        ([value, value], "two columns 'value'"),
        ([("value", pa.opaque(pa.binary(16), "hugeint", "DuckDB"))], "unsupported type hugeint of DuckDB"),
        ([value, ("key", pa.opaque(pa.string(), "geo", "pg"))], "key attribute unsupported type geo of pg"),
        ([value, ("key", pa.bool8())], r"unsupported type arrow\.bool8"),
    ]
    for fields, words in mistakes:
        with pytest.raises(SchemaError, match=words):
            ArrowColumns.of(pa.schema(fields), "t")
    # An extension type that pyarrow does not know.
    hidden = pa.field("value", pa.binary(16), metadata={"ARROW:extension:name": "a.number"})
    with pytest.raises(SchemaError, match=r"unsupported type a\.number"):
        ArrowColumns.of(pa.schema([hidden]), "t")
    with pytest.raises(SchemaError, match="topic option required when no 'topic' attribute is present"):
        ArrowColumns.of(pa.schema([value]), None)


def test_columns_that_look_as_if_they_were_meant_are_told() -> None:
    schema = pa.schema([("value", pa.string()), ("Key", pa.string()), ("topic", pa.string())])
    key, topic = ArrowColumns.of(schema, "t").warnings
    assert "the column 'Key' is ignored" in key
    assert "the column 'topic' is ignored, because the option 'topic' is 't'" in topic
