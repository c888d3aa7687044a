"""Schemas in Avro are read within bounds, and those derived of columns are valid to others."""

from __future__ import annotations

import json
import math
from typing import Any

import pyarrow as pa
import pytest

from kafka_sink.errors import SchemaError
from kafka_sink.formats import avro, avro_schema, byte_columns
from tests.support.avro_cases import field, record


def _doubling(levels: int) -> dict[str, Any]:
    """A record whose default has twice the parts with each level."""
    kind: dict[str, Any] = {"type": "record", "name": "R0", "fields": [field("a", "int", default=1)]}
    for level in range(1, levels):
        fields = [field("a", kind, default={}), field("b", f"R{level - 1}", default={})]
        kind = {"type": "record", "name": f"R{level}", "fields": fields}
    return kind


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("[" * 100_000, "cannot be read"),
        (record(1), "cannot be read"),
        (record(field("x", {"type": "fixed", "name": "F", "size": "many"})), "cannot be read"),
        (record(field("x", {"type": "fixed", "name": "F", "size": math.inf})), "cannot be read"),
        (record(field("x", "int"), field("y", "Row", default={"x": 1})), "does not have the field's type"),
        (record(field("x", "int"), field("y", "float", default=1e300)), "does not have the field's type"),
        (record(field("x", "int"), field("y", "int", default=1 << 31)), "does not have the field's type"),
        (record(field("x", "int"), field("y", "long", default=1e300)), "does not have the field's type"),
        (record(field("x", "int"), field("y", _doubling(30), default={})), "too often"),
    ],
)
def test_no_schema_costs_more_than_a_second(schema: str, said: str) -> None:
    """Catches: errors of Python, and defaults without an end."""
    with pytest.raises(SchemaError, match=said):
        avro.encoder(avro_schema.read(schema), pa.struct([("x", pa.int32())]), "")


@pytest.mark.parametrize("size", [0, 2, 1 << 30])
def test_a_decimal_is_written_as_a_fixed_of_no_unreasonable_size(size: int) -> None:
    """Catches: a schema that made each row a gigabyte, and Python's own error for a fixed without bytes."""
    kind = {"type": "fixed", "name": "D", "size": size, "logicalType": "decimal", "precision": 5, "scale": 2}
    with pytest.raises(SchemaError, match=f"the schema's fixed of {size} bytes at 'x' is too small"):
        avro.encoder(avro_schema.read(json.dumps(kind)), pa.decimal128(5, 2), "x")


def test_references_define_names() -> None:
    inner = json.dumps({"type": "record", "name": "Inner", "namespace": "o", "fields": [field("y", "int")]})
    schema = avro_schema.read(record(field("x", "o.Inner")), [("inner", inner)])
    column = pa.array([{"x": {"y": 4}}], pa.struct([("x", pa.struct([("y", pa.int32())]))]))
    assert byte_columns.join(avro.encoder(schema, column.type, "").pieces(column, None), 1).to_pylist() == [
        b"\x08"
    ]
