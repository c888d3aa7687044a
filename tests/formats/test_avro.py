"""Avro's bytes are those of confluent-kafka's serializer, whatever the columns."""

from __future__ import annotations

import decimal
import io
import json
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given

from kafka_sink.errors import SchemaError
from kafka_sink.formats import avro, avro_schema, byte_columns
from kafka_sink.formats.columns import UnfitRowsError
from tests.support.avro_cases import field, record, tables


def _by_fastavro(schema: str, rows: list[Any]) -> list[bytes]:
    parsed = fastavro.parse_schema(json.loads(schema))
    found = []
    for row in rows:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, parsed, row)
        found.append(out.getvalue())
    return found


def _encoded(schema: str, column: pa.Array) -> list[bytes]:
    encoder = avro.encoder(avro_schema.read(schema), column.type, "")
    joined: list[bytes] = byte_columns.join(encoder.pieces(column, None), len(column)).to_pylist()
    return joined


@given(tables())
def test_bytes_are_fastavros(table: tuple[pa.StructArray, list[dict[str, Any]]]) -> None:
    column, rows = table
    schema = avro_schema.derived(pa.field("", column.type), "com.example.Row")
    assert _encoded(schema, column) == _by_fastavro(schema, rows)


_MICROS = {"type": "long", "logicalType": "timestamp-micros"}
_FIXED_DECIMAL = {
    "type": "fixed",
    "name": "D",
    "size": 6,
    "logicalType": "decimal",
    "precision": 12,
    "scale": 3,
}
_ENUM = {"type": "enum", "name": "Size", "symbols": ["S", "M", "L"]}
_INNER = {"type": "record", "name": "Inner", "fields": [field("z", "string", default="d"), field("y", "int")]}


@pytest.mark.parametrize(
    ("schema", "kind", "rows"),
    [
        # Columns go to fields by name, in the schema's order; fields without a column get their default.
        (
            record(
                field("y", "long"),
                field("d", ["null", "string"], default=None),
                field("e", _ENUM, default="M"),
                field("l", {"type": "array", "items": "int"}, default=[1, -2]),
                field("m", {"type": "map", "values": "boolean"}, default={"k": True}),
                field("i", _INNER, default={"y": 3}),
                field("x", "string"),
            ),
            [("x", pa.string()), ("y", pa.int32())],
            [{"x": "a", "y": 1}, {"x": "", "y": -(1 << 31)}],
        ),
        # Null last, only a value, several branches.
        (
            record(
                field("a", ["string", "null"]),
                field("b", ["long"]),
                field("c", ["null", "boolean", "double", {"type": "array", "items": ["null", "long"]}]),
            ),
            [("a", pa.string()), ("b", pa.int64()), ("c", pa.list_(pa.int64()))],
            [{"a": None, "b": 1, "c": [None, 2]}, {"a": "x", "b": -1, "c": None}],
        ),
        # Wider numbers, and numbers as what their logical type says.
        (
            record(field("f", "double"), field("g", "float"), field("t", _MICROS), field("n", "null")),
            [("f", pa.int32()), ("g", pa.int16()), ("t", pa.int64()), ("n", pa.null())],
            [{"f": 7, "g": -3, "t": 5, "n": None}],
        ),
        (
            record(
                field("s", _ENUM),
                field("o", ["null", "n.Size"]),
                field("f", {"type": "fixed", "name": "F", "size": 3}),
            ),
            [("s", pa.string()), ("o", pa.dictionary(pa.int8(), pa.string())), ("f", pa.binary())],
            [{"s": "L", "o": "S", "f": b"abc"}, {"s": "S", "o": None, "f": b"\0\0\0"}],
        ),
        (
            record(field("d", _FIXED_DECIMAL)),
            [("d", pa.decimal128(9, 2))],
            [{"d": decimal.Decimal(text)} for text in ("0.01", "-0.01", "1234567.89", "-1234567.89")],
        ),
        # A record that names itself ends where the columns do.
        (
            record(field("v", "int"), field("next", ["null", "n.Row"], default=None)),
            [("v", pa.int32()), ("next", pa.struct([("v", pa.int32())]))],
            [{"v": 1, "next": {"v": 2}}, {"v": 1, "next": None}],
        ),
    ],
)
def test_given_schemas(schema: str, kind: list[Any], rows: list[dict[str, Any]]) -> None:
    assert _encoded(schema, pa.array(rows, pa.struct(kind))) == _by_fastavro(schema, rows)


def test_timestamps_of_other_units_belong_to_the_one_that_they_lie_in() -> None:
    schema = record(field("t", {"type": "long", "logicalType": "timestamp-millis"}))
    column = pa.array([{"t": -1}, {"t": 1999}], pa.struct([("t", pa.int64())]))
    micros = pa.StructArray.from_arrays([column.field(0).cast(pa.timestamp("us", "UTC"))], ["t"])
    assert _encoded(schema, micros) == [b"\x01", b"\x02"]


@pytest.mark.parametrize(
    ("schema", "kind", "said"),
    [
        (
            record(field("x", "int")),
            [("x", pa.int64())],
            "column 'x' has the type int64, and the schema wants int",
        ),
        (record(field("x", "int")), [("y", pa.int32())], "requires field 'x', for which there is no column"),
        (record(field("x", "int")), [("X", pa.int32())], "found 'X', and names are case-sensitive"),
        (record(field("x", "int")), [("x", pa.int32()), ("y", pa.int32())], "column 'y' is no field"),
        (record(field("x", _MICROS)), [("x", pa.timestamp("us"))], "column 'x'"),
        (record(field("x", _FIXED_DECIMAL)), [("x", pa.decimal128(12, 4))], r"decimal\(12,3\)"),
        (record(field("x", ["null", "int", "string"])), [("x", pa.float64())], r"\[null, int, string\]"),
        (record(field("x", _INNER)), [("x", pa.struct([("y", pa.string())]))], "column 'x.y'"),
        (
            record(field("x", {"type": "array", "items": "int"})),
            [("x", pa.list_(pa.string()))],
            r"column 'x\[\]'",
        ),
        (record(field("x", "nowhere")), [("x", pa.int32())], "neither it nor a reference defines"),
        (
            record(field("x", "int"), field("y", "int", default="z")),
            [("x", pa.int32())],
            "default of field 'y'",
        ),
        ("{", [("x", pa.int32())], "is not JSON"),
    ],
)
def test_what_does_not_fit_is_named_at_planning(schema: str, kind: list[Any], said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        avro.encoder(avro_schema.read(schema), pa.struct(kind), "")


@pytest.mark.parametrize(
    ("schema", "kind", "rows", "said"),
    [
        (record(field("x", "int")), [("x", pa.int32())], [1, None], "field 'x' is null"),
        (record(field("x", _ENUM)), [("x", pa.string())], ["S", "XXL"], "is no symbol"),
        (
            record(field("x", {"type": "fixed", "name": "F", "size": 2})),
            [("x", pa.binary())],
            [b"ab", b"a"],
            "2 bytes",
        ),
        (
            record(field("x", ["null", {"type": "map", "values": {"type": "array", "items": "int"}}])),
            [("x", pa.map_(pa.string(), pa.list_(pa.int32())))],
            [None, [("a", [1]), ("b", [2, None])]],
            r"field 'x\{\}\[\]' is null",
        ),
        # The end of time in a finer unit.
        (
            record(field("x", ["null", {"type": "long", "logicalType": "timestamp-nanos"}])),
            [("x", pa.timestamp("us", "UTC"))],
            [None, 253402214400000000],
            "field 'x' is too far from 1970",
        ),
    ],
)
def test_rows_that_do_not_fit_are_marked(schema: str, kind: list[Any], rows: list[Any], said: str) -> None:
    column = pa.array([{"x": row} for row in rows], pa.struct(kind))
    with pytest.raises(UnfitRowsError, match=said) as caught:
        _encoded(schema, column)
    assert caught.value.rows.tolist() == [False, True]


def test_a_null_beside_a_branch_behind_many() -> None:
    """Catches: branches whose number takes two bytes."""
    records = [{"type": "record", "name": f"R{number}", "fields": []} for number in range(70)]
    schema = record(field("x", [*records, "string", "null"]))
    rows = [{"x": "a"}, {"x": None}]
    assert _encoded(schema, pa.array(rows)) == _by_fastavro(schema, rows)
