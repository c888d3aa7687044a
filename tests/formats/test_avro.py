"""Avro's bytes are those of confluent-kafka's serializer, whatever the columns."""

from __future__ import annotations

import io
import json
from typing import Any

import fastavro
import pyarrow as pa
from hypothesis import given

from kafka_sink.formats import avro, avro_schema, words
from tests.formats.avro_cases import tables


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
    joined: list[bytes] = words.join(encoder.pieces(column, None), len(column)).to_pylist()
    return joined


@given(tables())
def test_bytes_are_fastavros(table: tuple[pa.StructArray, list[dict[str, Any]]]) -> None:
    column, rows = table
    schema = avro_schema.derived(list(column.type), "com.example.Row")
    assert _encoded(schema, column) == _by_fastavro(schema, rows)
