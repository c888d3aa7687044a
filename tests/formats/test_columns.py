"""Columns in few Arrow types: decimals as bytes, lists with nulls, and rows that are marked."""

from __future__ import annotations

import decimal
from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.formats import columns
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
    found = columns.decimal_bytes(column, np.full(len(column), 17), 17).to_pylist()
    assert found == [number.to_bytes(17, "big", signed=True) for number in unscaled[skipped:]]


@given(st.lists(UNSCALED, min_size=1, max_size=9))
def test_decimals_in_few_bytes(unscaled: list[int]) -> None:
    column = decimals(unscaled)
    sizes = columns.decimal_sizes(column)
    found = columns.decimal_bytes(column, sizes, 16).to_pylist()
    assert [int.from_bytes(content, "big", signed=True) for content in found] == unscaled
    # Avro takes as few bytes as hold it, but for negative powers of two.
    assert list(sizes) == [abs(number).bit_length() // 8 + 1 for number in unscaled]


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
    lists = pa.array([[1], [], [2, 3], [4]])
    with pytest.raises(UnfitRowsError, match=r"field 'x' is wrong") as caught:
        columns.joined_entries(lists, lambda _: columns.reject(wrong, "x", "is wrong") or [])
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
