"""Batches are cut so that no piece grows large when it becomes bytes."""

from __future__ import annotations

import pyarrow as pa
import pytest

from kafka_sink.arrow.pieces import CONVERTED_ROWS, decoded, entry_bytes, pieces
from kafka_sink.errors import RecordTooLargeError


@pytest.mark.parametrize(
    ("column", "sizes"),
    [
        (pa.array(["ä", None, "abc"]), [2, 0, 3]),
        (pa.array([b"", b"x" * 20, None], pa.binary_view()), [0, 20, 0]),
        (pa.array(["aa", "b", "aa"]).dictionary_encode(), [2, 1, 2]),
        (pa.array([["a", "bcd"], [], None]), [4, 0, 0]),
        (pa.array([{"text": "ab", "number": 1}]), [2]),
        (pa.array([1, 2]), [0, 0]),
    ],
)
def test_the_bytes_of_each_entry_are_known_before_a_conversion(column: pa.Array, sizes: list[int]) -> None:
    assert entry_bytes(column).tolist() == sizes
    assert entry_bytes(column.slice(1)).tolist() == sizes[1:]


def test_rows_that_share_a_large_value_are_cut_into_small_pieces() -> None:
    value = pa.array([b"x" * 1_000_000])
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * 40, pa.int8()), value)
    cut = list(pieces(pa.record_batch({"value": shared}), [0]))
    assert sum(piece.num_rows for piece in cut) == 40
    assert max(piece.num_rows for piece in cut) <= 8


def test_small_rows_are_cut_by_their_number() -> None:
    batch = pa.record_batch({"value": ["x"] * (CONVERTED_ROWS + 1)})
    assert [piece.num_rows for piece in pieces(batch, [0])] == [CONVERTED_ROWS, 1]


def test_a_row_beyond_any_request_is_an_error() -> None:
    value = pa.array([b"x" * 1_000_000])
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * 2_200, pa.int8()), value)
    row = pa.ListArray.from_arrays(pa.array([0, 2_200], pa.int32()), shared)
    with pytest.raises(RecordTooLargeError, match="a row has 2,200,000,000 bytes"):
        list(pieces(pa.record_batch({"value": row}), [0]))


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a"]).dictionary_encode(),
        pa.array(["a"], pa.string_view()),
        pa.array(
            [[{"key": "k", "value": b"v"}]],
            pa.list_(pa.struct([("key", pa.string_view()), ("value", pa.binary_view())])),
        ),
    ],
    ids=["dictionary", "view", "headers of views"],
)
def test_an_empty_batch_is_one_empty_piece(column: pa.Array) -> None:
    """Polars hands over such a batch for a frame without rows. Catches: an unknown bound times no rows."""
    batch = pa.record_batch({"value": column}).slice(1)
    assert [piece.num_rows for piece in pieces(batch, [0])] == [0]


def test_a_large_dictionary_of_which_no_entry_is_used_becomes_an_empty_column() -> None:
    large = pa.array(["x" * 1_000_000] * 9, pa.string_view())
    column = pa.DictionaryArray.from_arrays(pa.array([], pa.int8()), large)
    assert decoded(column, lambda part: part.cast(pa.string())).to_pylist() == []
