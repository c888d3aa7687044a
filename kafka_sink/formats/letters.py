"""The content of rows that do not fit their schema, for dead letters: as JSON, since they have no bytes."""

from __future__ import annotations

import pyarrow as pa

from kafka_sink.errors import SchemaError
from kafka_sink.formats import json_values, words
from kafka_sink.formats.columns import UnfitRowsError, plain, present_only
from kafka_sink.records.arrays import binary_of, null_mask


def letter_values(column: pa.Array) -> pa.Array:
    """Each entry as JSON, null for null; as Python shows it where JSON has none, such as for NaN."""
    column = plain(column)
    nulls = null_mask(column)
    try:
        pieces = present_only(
            column, nulls, lambda present: json_values.of_type(column.type, "").pieces(present, None)
        )
        return words.join(pieces, len(column), nulls)
    except (UnfitRowsError, SchemaError):
        # One row at a time: errors.max bounds how many there are.
        return binary_of(
            [_shown(entry).encode(errors="replace") if entry.is_valid else None for entry in column]
        )


def _shown(entry: pa.Scalar) -> str:
    try:
        return str(entry)
    except (OverflowError, ValueError):
        # Python's dates end with the year 9999.
        return str(pa.repeat(entry, 1).to_string())
