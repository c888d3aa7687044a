"""Columns whose buffers do not hold together are errors before anything reads them.

The tests of columns.py damage every type of column that can be written; these show which row is named.
"""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest

from kafka_sink.arrow.soundness import require_sound
from kafka_sink.errors import InvalidRowError


def texts(*offsets: int) -> pa.Array:
    """Texts with these offsets into ten bytes."""
    ends = pa.py_buffer(struct.pack(f"<{len(offsets)}i", *offsets))
    return pa.Array.from_buffers(pa.string(), len(offsets) - 1, [None, ends, pa.py_buffer(b"0123456789")])


@pytest.mark.parametrize(
    "column", [texts(0, 3, 3, 10), pa.array(["a", None]).dictionary_encode(), pa.nulls(3)]
)
def test_a_sound_column_passes(column: pa.Array) -> None:
    require_sound(column, "value")


@pytest.mark.parametrize(("offsets", "row"), [((0, 3, 2, 10), 1), ((0, 3, 11, 10), 1), ((0, 12, 5, 10), 0)])
def test_the_error_names_the_column_and_the_damaged_row(offsets: tuple[int, ...], row: int) -> None:
    with pytest.raises(InvalidRowError, match=f"column 'key' is damaged at row {row} of its batch"):
        require_sound(texts(*offsets), "key")
