"""Avro's bytes are those of confluent-kafka's serializer, whatever the columns."""

from __future__ import annotations

import decimal
import io
import json
import uuid
from typing import Any

import fastavro
import pyarrow as pa
import pytest

from kafka_sink.errors import SchemaError
from kafka_sink.formats import avro, avro_schema, byte_columns
from kafka_sink.formats.columns import UnfitRowsError
from tests.support.avro_cases import field, record


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


_MICROS = {"type": "long", "logicalType": "timestamp-micros"}
_NANOS = {"type": "long", "logicalType": "timestamp-nanos"}
_DECIMAL = {"logicalType": "decimal", "precision": 12, "scale": 3}
_FIXED_DECIMAL = {"type": "fixed", "name": "D", "size": 6, **_DECIMAL}
_ENUM = {"type": "enum", "name": "Size", "symbols": ["S", "M", "L"]}
_INTS = {"type": "array", "items": "int"}
_INNER = {"type": "record", "name": "Inner", "fields": [field("z", "string", default="d"), field("y", "int")]}
_MANY = [{"type": "record", "name": f"R{number}", "fields": []} for number in range(70)]
_TINY = pa.dictionary(pa.int8(), pa.string())


# The schema's fields, the columns, their rows.
@pytest.mark.parametrize(
    ("fields", "kind", "rows"),
    [
        # Columns go to fields by name, in the schema's order; fields without a column get their default.
        (
            [
                field("y", "long"),
                field("d", ["null", "string"], default=None),
                field("e", _ENUM, default="M"),
                field("l", _INTS, default=[1, -2]),
                field("m", {"type": "map", "values": "boolean"}, default={"k": True}),
                field("i", _INNER, default={"y": 3}),
                field("x", "string"),
            ],
            {"x": pa.string(), "y": pa.int32()},
            [("a", 1), ("", -(1 << 31))],
        ),
        # Null last, only a value, several branches.
        (
            [
                field("a", ["string", "null"]),
                field("b", ["long"]),
                field("c", ["null", "boolean", "double", {"type": "array", "items": ["null", "long"]}]),
            ],
            {"a": pa.string(), "b": pa.int64(), "c": pa.list_(pa.int64())},
            [(None, 1, [None, 2]), ("x", -1, None)],
        ),
        # Wider numbers, and numbers as what their logical type says.
        (
            [field("f", "double"), field("g", "float"), field("t", _MICROS), field("n", "null")],
            {"f": pa.int32(), "g": pa.int16(), "t": pa.int64(), "n": pa.null()},
            [(7, -3, 5, None)],
        ),
        (
            [
                field("s", _ENUM),
                field("o", ["null", "n.Size"]),
                field("f", {"type": "fixed", "name": "F", "size": 3}),
            ],
            {"s": pa.string(), "o": _TINY, "f": pa.binary()},
            [("L", "S", b"abc"), ("S", None, b"\0\0\0")],
        ),
        (
            [field("d", _FIXED_DECIMAL)],
            {"d": pa.decimal128(9, 2)},
            [(decimal.Decimal(text),) for text in ("0.01", "-0.01", "1234567.89", "-1234567.89")],
        ),
        # A record that names itself ends where the columns do.
        (
            [field("v", "int"), field("next", ["null", "n.Row"], default=None)],
            {"v": pa.int32(), "next": pa.struct([("v", pa.int32())])},
            [(1, {"v": 2}), (1, None)],
        ),
        # A null beside a branch behind many, whose number takes two bytes.
        (
            [field("x", [*_MANY, "string", "null"])],
            {"x": pa.string()},
            [("a",), (None,)],
        ),
    ],
)
def test_given_schemas(fields: list[Any], kind: dict[str, pa.DataType], rows: list[tuple[Any, ...]]) -> None:
    given = [dict(zip(kind, row, strict=True)) for row in rows]
    schema = record(*fields)
    assert _encoded(schema, pa.array(given, pa.struct(list(kind.items())))) == _by_fastavro(schema, given)


def test_timestamps_of_other_units_belong_to_the_one_that_they_lie_in() -> None:
    schema = record(field("t", {"type": "long", "logicalType": "timestamp-millis"}))
    column = pa.array([{"t": -1}, {"t": 1999}], pa.struct([("t", pa.int64())]))
    micros = pa.StructArray.from_arrays([column.field(0).cast(pa.timestamp("us", "UTC"))], ["t"])
    assert _encoded(schema, micros) == [b"\x01", b"\x02"]


_OTHER_DEFAULT = (field("x", "int"), field("y", "int", default="z"))


@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ([field("x", "int")], {"x": pa.int64()}, "'x' has the type int64, but the schema requires int"),
        ([field("x", "int")], {"y": pa.int32()}, "requires field 'x', for which there is no column"),
        ([field("x", "int")], {"X": pa.int32()}, "found 'X', and names are case-sensitive"),
        ([field("x", "int")], {"x": pa.int32(), "y": pa.int32()}, "column 'y' is not a field"),
        ([field("x", _MICROS)], {"x": pa.timestamp("us")}, "column 'x'"),
        ([field("x", _FIXED_DECIMAL)], {"x": pa.decimal128(12, 4)}, r"decimal\(12,3\)"),
        ([field("x", ["null", "int", "string"])], {"x": pa.float64()}, r"\[null, int, string\]"),
        ([field("x", _INNER)], {"x": pa.struct([("y", pa.string())])}, "column 'x.y'"),
        ([field("x", _INTS)], {"x": pa.list_(pa.string())}, r"column 'x\[\]'"),
        ([field("x", "nowhere")], {"x": pa.int32()}, "neither it nor a reference defines"),
        (_OTHER_DEFAULT, {"x": pa.int32()}, "default of field 'y'"),
        (None, {"x": pa.int32()}, "is not JSON.*'value.schema'.*not the path of its file"),
    ],
)
def test_planning_reports_columns_that_do_not_fit_the_schema(
    fields: Any, kind: dict[str, pa.DataType], said: str
) -> None:
    schema = "{" if fields is None else record(*fields)
    with pytest.raises(SchemaError, match=said):
        avro.encoder(avro_schema.read(schema), pa.struct(list(kind.items())), "")


_LISTS = pa.map_(pa.string(), pa.list_(pa.int32()))


@pytest.mark.parametrize(
    ("schema", "kind", "rows", "said"),
    [
        ("int", pa.int32(), [1, None], "field 'x' is null"),
        (_ENUM, pa.string(), ["S", "XXL"], "is not a symbol"),
        ({"type": "fixed", "name": "F", "size": 2}, pa.binary(), [b"ab", b"a"], "2 bytes"),
        (
            ["null", {"type": "map", "values": _INTS}],
            _LISTS,
            [None, [("a", [1]), ("b", [2, None])]],
            r"field 'x\{\}\[\]' is null",
        ),
        # The end of time in a finer unit.
        (["null", _NANOS], pa.timestamp("us", "UTC"), [None, 253402214400000000], "is too far from 1970"),
    ],
)
def test_rows_that_do_not_fit_are_marked(schema: Any, kind: pa.DataType, rows: list[Any], said: str) -> None:
    column = pa.array([{"x": row} for row in rows], pa.struct([("x", kind)]))
    with pytest.raises(UnfitRowsError, match=said) as caught:
        _encoded(record(field("x", schema)), column)
    assert str(caught.value).startswith("field 'x")
    assert caught.value.rows.tolist() == [False, True]


def test_uuids_are_texts_or_bytes_as_the_schema_wants() -> None:
    given = [uuid.UUID(int=1), None, uuid.UUID(int=2**127)]
    column = pa.array([one and one.bytes for one in given], pa.uuid())
    for kind, rows in (
        ("string", [one and str(one) for one in given]),
        ({"type": "string", "logicalType": "uuid"}, given),
        ("bytes", [one and one.bytes for one in given]),
        ({"type": "fixed", "name": "U", "size": 16}, [one and one.bytes for one in given]),
    ):
        schema = json.dumps(["null", kind])
        assert _encoded(schema, column) == _by_fastavro(schema, rows), kind
        assert _encoded(schema, column.slice(2)) == _by_fastavro(schema, rows[2:]), kind
