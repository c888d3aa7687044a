"""The content of rows that do not fit their schema, for dead letters: as JSON, since they have no bytes."""

from __future__ import annotations

import json

import pyarrow as pa

from kafka_sink.records.arrays import binary_of


def letter_values(column: pa.Array) -> pa.Array:
    """Each entry as JSON, null for null. One row at a time: errors.max bounds how many there are."""
    return binary_of([None if entry is None else _text(entry) for entry in column.to_pylist()])


def _text(entry: object) -> bytes:
    return json.dumps(entry, default=str, ensure_ascii=False).encode(errors="replace")
