"""Columns in few Arrow types: decimals as bytes, lists with nulls, and rows that are marked."""

from __future__ import annotations

import decimal
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.formats import byte_columns, columns
from kafka_sink.formats.columns import UnfitRowsError
from tests.support.avro_cases import LEAVES

UNSCALED = st.one_of(
    st.integers(-(10**38) + 1, 10**38 - 1),
    st.integers(0, 126).flatmap(lambda n: st.sampled_from([1 << n, -(1 << n), (1 << n) - 1])),
)


def decimals(unscaled: Iterable[int]) -> pa.Array:
    return pa.array(map(decimal.Decimal, unscaled), pa.decimal128(38, 0))


@given(st.lists(UNSCALED, max_size=9), st.integers(0, 2))
def test_decimals_in_a_given_size(unscaled: list[int], skipped: int) -> None:
    column = decimals(unscaled).slice(skipped)
    found = byte_columns.join(list(columns.big_endian(column, 17)), len(column)).to_pylist()
    assert found == [number.to_bytes(17, "big", signed=True) for number in unscaled[skipped:]]


@given(st.lists(st.tuples(UNSCALED, st.booleans()), min_size=1, max_size=9))
def test_decimals_in_few_bytes_after_their_number(cases: list[tuple[int, bool]]) -> None:
    """A null has no byte, whatever lies behind it."""
    nulls = np.array([null for _, null in cases])
    pieces = columns.minimal(decimals(number for number, _ in cases), nulls, lambda sizes: sizes.astype("u8"))
    found = byte_columns.join(pieces, len(cases)).to_pylist()
    for content, (number, null) in zip(found, cases, strict=True):
        if null:
            assert content == b""
            continue
        assert content[0] == len(content) - 1 <= 17
        assert int.from_bytes(content[1:], "big", signed=True) == number
        # Avro takes as few bytes as hold it, but for negative powers of two.
        assert len(content) - 2 <= (number if number >= 0 else -number).bit_length() // 8


def test_a_null_list_may_span_elements_that_mean_nothing() -> None:
    spans = pa.ListArray.from_arrays(
        pa.array([0, 2, 4, 5], pa.int32()), pa.array([1, 2, 3, 4, 5]), mask=pa.array([False, True, False])
    )
    counts, (children,) = columns.entries(spans)
    assert list(counts) == [2, 0, 1]
    assert children.to_pylist() == [1, 2, 5]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", None, "a"]).dictionary_encode(),
        pa.array(["a", None], pa.large_string()),
        pa.array([b"ab", None], pa.binary(2)),
        pa.array([[1, 2], None], pa.list_(pa.int64(), 2)),
        *[pa.nulls(2, kind) for kind in LEAVES],
    ],
    ids=lambda column: str(column.type),
)
def test_plain_columns_have_the_same_entries(column: pa.Array) -> None:
    found = columns.plain(column)
    assert found.type == columns.plain_type(column.type)
    assert columns.plain_type(found.type) == found.type
    assert found.to_pylist() == column.to_pylist()


def test_an_error_about_entries_marks_the_rows_that_have_them() -> None:
    wrong = np.array([False, False, True, False])
    counts = np.array([1, 0, 2, 1])
    with pytest.raises(UnfitRowsError, match=r"field 'x' is wrong") as caught:
        columns.of_rows(counts, lambda: columns.reject(wrong, "x", "is wrong"))
    assert caught.value.rows.tolist() == [False, False, True, False]


def test_text_that_is_none_is_marked() -> None:
    column = pa.Array.from_buffers(pa.string(), 2, pa.array([b"ok", b"\xff"]).buffers())
    with pytest.raises(UnfitRowsError, match="is no text") as caught:
        columns.require_utf8(column, "x", "is no text")
    assert caught.value.rows.tolist() == [False, True]


def test_a_slice_of_fixed_size_lists_becomes_a_valid_list() -> None:
    """Catches: Arrow's own cast, which makes an invalid array here. Reading it ends the process."""
    structs = pa.array([{"a": None}] * 6, pa.struct([("a", pa.null())]))
    column = pa.FixedSizeListArray.from_arrays(structs, 2, mask=pa.array([False, False, True])).slice(1)
    plain = columns.plain(column)
    plain.validate(full=True)
    assert plain.to_pylist() == column.to_pylist()
