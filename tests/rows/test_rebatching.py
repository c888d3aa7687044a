"""Tables of about 2 MiB: every row once and in order, and no row waits longer than linger allows."""

from __future__ import annotations

import math
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_sink.rows import rebatching
from kafka_sink.rows.rebatching import (
    GATHERED_BATCH_BYTES,
    ROW_BYTES,
    TARGET_TABLE_BYTES,
    WIDE_TARGET_TABLE_BYTES,
    Rebatcher,
)
from kafka_sink.spark_application import LARGE_ROW_BYTES

LINGER_MS = 20


def batch(sizes: list[int], kind: pa.DataType | None = None, start: int = 0) -> pa.RecordBatch:
    """Rows with values of these sizes, numbered from ``start``."""
    values = pa.array([b"x" * size for size in sizes], kind or pa.binary())
    return pa.record_batch([pa.array(range(start, start + len(sizes))), values], names=["number", "value"])


def builder(
    target_bytes: int = TARGET_TABLE_BYTES, linger_ms: float = LINGER_MS, columns: tuple[int, ...] = (1,)
) -> Rebatcher:
    made = Rebatcher(columns, linger_ms=linger_ms)
    made.target_bytes = target_bytes
    return made


# Batches are then cut by the target size alone, whatever their rows' size.
without_large_rows = patch.object(rebatching, "LARGE_ROW_BYTES", math.inf)


def numbers(units: list[pa.RecordBatch]) -> list[int]:
    return [number for unit in units for number in unit.column(0).to_pylist()]


def size_of(unit: pa.RecordBatch) -> int:
    return sum(len(value) + ROW_BYTES for value in unit.column(1).to_pylist())


@without_large_rows
def test_a_large_batch_goes_at_once_in_even_slices_that_share_its_memory() -> None:
    units = builder(1000)
    large = batch([100 - ROW_BYTES] * 45)
    found = units.offer(large, 0)
    assert [unit.num_rows for unit in found] == [12, 11, 11, 11]
    assert numbers(found) == list(range(45))
    assert units.is_empty
    for unit in found:
        assert unit.column(1).chunk(0).buffers()[2].address == large.column(1).buffers()[2].address
    # One of just a unit is not cut.
    assert [unit.num_rows for unit in builder(1000).offer(batch([100 - ROW_BYTES] * 10), 0)] == [10]
    assert [unit.num_rows for unit in builder(1000).offer(batch([100 - ROW_BYTES] * 14), 0)] == [14]
    assert [unit.num_rows for unit in builder(1000).offer(batch([100 - ROW_BYTES] * 16), 0)] == [8, 8]


@without_large_rows
def test_small_batches_wait_for_each_other_until_they_are_a_unit() -> None:
    units = builder(10_000 + 5 * GATHERED_BATCH_BYTES)
    for index in range(4):
        assert units.offer(batch([2000 - ROW_BYTES], start=index), index) == []
    assert units.deadline_ms() == LINGER_MS, "the first row gathered sets the deadline"
    (unit,) = units.offer(batch([2000 - ROW_BYTES], start=4), 5)
    assert numbers([unit]) == [0, 1, 2, 3, 4]
    assert units.is_empty
    assert units.deadline_ms() == math.inf


@without_large_rows
def test_gathered_rows_go_when_linger_has_passed() -> None:
    units = builder()
    units.offer(batch([1]), 100)
    assert units.take(100 + LINGER_MS - 0.001) == []
    assert numbers(units.take(100 + LINGER_MS)) == [0]
    # A late batch takes those before it along.
    units.offer(batch([1]), 200)
    assert numbers(units.offer(batch([1], start=1), 300)) == [0, 1]
    units.offer(batch([1]), 400)
    assert numbers(units.offer(batch([]), 500)) == [0], "an empty batch is no reason to wait on"


@without_large_rows
def test_rows_and_batches_count_beside_their_bytes() -> None:
    values = pa.nulls(1_000_000, pa.binary())
    found = builder().offer(
        pa.record_batch([pa.array(np.arange(1_000_000)), values], names=["number", "value"]), 0
    )
    assert {unit.num_rows for unit in found} == {125_000}
    # Many tiny batches cost more than their bytes.
    units = builder()
    gathered = 0
    while not units.offer(batch([1]), 0):
        gathered += 1
    assert gathered < TARGET_TABLE_BYTES / GATHERED_BATCH_BYTES


@without_large_rows
@pytest.mark.parametrize("list_type", [pa.list_, pa.large_list])
def test_headers_count(list_type: type) -> None:
    entry = pa.struct([("key", pa.string()), ("value", pa.binary())])
    # Rows of none among rows of ten: the slices must follow the bytes, not the rows.
    headers = pa.array([None] * 7 + [[]] * 50 + [[("k", b"x" * 99)] * 10] * 50, list_type(entry)).slice(7)
    rows = pa.record_batch([pa.array([b""] * 100, pa.binary()), headers], names=["value", "headers"])
    found = builder(10_000, 0, (0, 1)).offer(rows, 0)
    assert 4 <= len(found) <= 7
    assert found[0].num_rows >= 55
    assert max(unit.num_rows for unit in found[1:]) <= 13


@without_large_rows
def test_a_slice_counts_for_itself_alone() -> None:
    whole = batch([0] * 500 + [100_000] + [0] * 500)
    units = builder(10_000)
    assert units.offer(whole.slice(0, 2), 0) == []
    assert not units.is_empty
    assert numbers(units.offer(whole.slice(500, 1), 0)) == [0, 1, 500]
    assert units.offer(whole.slice(600, 2), 0) == []


small_sizes = st.lists(st.integers(0, 300) | st.integers(0, 3000), max_size=40)


@without_large_rows
@settings(deadline=None)
@given(
    offers=st.lists(st.tuples(small_sizes, st.integers(0, 30)), max_size=20),
    kind=st.sampled_from([pa.binary(), pa.large_binary()]),
    linger_ms=st.sampled_from([0, 20, 1e9]),
)
def test_every_row_once_in_order_and_in_time(
    offers: list[tuple[list[int], int]], kind: pa.DataType, linger_ms: float
) -> None:
    units = builder(5000, linger_ms)
    found: list[pa.RecordBatch] = []
    now, count = 0, 0
    for sizes, pause in offers:
        now += pause
        found += units.offer(batch(sizes, kind, start=count), now)
        count += len(sizes)
        assert units.is_empty == (units.deadline_ms() == math.inf)
        assert units.deadline_ms() > now, "rows are gathered past their time"
    found += units.finish()
    assert numbers(found) == list(range(count))
    assert all(unit.num_rows for unit in found)
    for unit in found:
        largest = max(len(value) for value in unit.column(1).to_pylist())
        assert size_of(unit) <= 1.5 * 5000 + largest + ROW_BYTES


@without_large_rows
def test_units_widen_where_they_fall_into_many_runs_and_shrink_again() -> None:
    units = builder()
    half = batch([TARGET_TABLE_BYTES // 2] * 2)
    assert len(units.offer(half, 0)) == 1
    units.adapt(1000)
    assert units.offer(half, 0) == [], "a wide unit waits for more"
    assert [unit.num_rows for unit in units.offer(batch([WIDE_TARGET_TABLE_BYTES]), 0)] == [2, 1]
    units.adapt(4)
    assert len(units.offer(half, 0)) == 1


def test_slices_are_wide_where_rows_are_large() -> None:
    units = Rebatcher((1,), linger_ms=0)
    small, large = batch([LARGE_ROW_BYTES // 2] * 40_000), batch([LARGE_ROW_BYTES] * 40_000)
    assert len(units.offer(small, 0)) == round(size_of(small) / TARGET_TABLE_BYTES) == 5
    assert len(units.offer(large, 0)) == round(size_of(large) / WIDE_TARGET_TABLE_BYTES) == 3
