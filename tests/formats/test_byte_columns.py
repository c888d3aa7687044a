"""Rows put together from any pieces, in any order, are the pieces' bytes one after the other."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.formats import byte_columns

_BITS = st.integers(0, 64).flatmap(lambda bits: st.integers(0, (1 << bits) - 1))
# The pieces of a column, and each row's bytes.
Column = tuple[list[byte_columns.Piece], list[bytes]]


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


@st.composite
def _columns(draw: st.DrawFn, rows: int) -> Column:
    kind = draw(st.sampled_from(["constant", "varint", "nulls", "fixed", "text"]))
    if kind == "constant":
        content = draw(st.binary(max_size=20))
        return byte_columns.constant(content), [content] * rows
    if kind == "text":
        texts = draw(st.lists(st.one_of(st.none(), st.binary(max_size=20)), min_size=rows, max_size=rows))
        skipped = draw(st.integers(0, 2))
        array = pa.array([b"before"] * skipped + texts, pa.binary()).slice(skipped)
        return [array], [text or b"" for text in texts]
    numbers = draw(st.lists(_BITS, min_size=rows, max_size=rows))
    column = np.array(numbers, dtype=np.uint64)
    if kind == "fixed":
        size = draw(st.integers(1, 8))
        column &= np.uint64((1 << (8 * size)) - 1)
        return [byte_columns.fixed(column, size)], [int(one).to_bytes(size, "little") for one in column]
    nulls = draw(st.lists(st.booleans(), min_size=rows, max_size=rows)) if kind == "nulls" else [False] * rows
    found = byte_columns.varint(column, np.array(nulls, dtype=np.bool_) if kind == "nulls" else None)
    return list(found), [b"" if null else _varint(one) for one, null in zip(numbers, nulls, strict=True)]


@given(st.integers(1, 9).flatmap(lambda rows: st.lists(_columns(rows), min_size=1, max_size=9)))
def test_rows_are_their_pieces(columns: list[Column]) -> None:
    """Catches: a text before a word in the first row, whose edges descend; a word that overwrites another."""
    rows = len(columns[0][1])
    joined = byte_columns.join([piece for pieces, _ in columns for piece in pieces], rows)
    joined.validate(full=True)
    assert [entry or b"" for entry in joined.to_pylist()] == [
        b"".join(contents[row] for _, contents in columns) for row in range(rows)
    ]
