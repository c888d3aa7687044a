"""Encoded tables against a plain encoder, record by record. test_batch_header asks Java."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_sink import varint
from kafka_sink.records import encoder
from kafka_sink.records.encoder import RowRange
from kafka_sink.records.record_columns import RecordColumns
from tests.support.encoder_limits import small_limits

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
NOW = 1_700_000_000_000


def field(data: bytes | None) -> bytes:
    return varint.signed(-1) if data is None else varint.signed(len(data)) + data


def record(row: dict[str, Any], offset: int, delta: int) -> bytes:
    body = b"\0" + varint.signed(delta) + varint.signed(offset) + field(row["key"]) + field(row["value"])
    headers = row["headers"] or []
    body += varint.signed(len(headers))
    for header in headers:
        body += field(header["key"].encode()) + field(header["value"])
    return varint.signed(len(body)) + body


def columns_of(rows: list[dict[str, Any]], chunks: int, kind: pa.DataType) -> RecordColumns:
    keys = pa.array([row["key"] for row in rows], kind)
    headers = pa.array([row["headers"] for row in rows], HEADERS)
    edges = np.linspace(0, len(rows), chunks + 1).astype(int).tolist()
    values = [pa.array([row["value"] for row in rows[a:b]], kind) for a, b in pairwise(edges)]
    return RecordColumns.of(
        None if keys.null_count == len(keys) else keys,
        values,
        None if headers.null_count == len(headers) else headers,
    )


def check(
    rows: list[dict[str, Any]],
    order: list[int] | None,
    timestamps: list[int] | int,
    runs: list[RowRange],
    kind: pa.DataType = pa.binary(),  # noqa: B008 - immutable
) -> None:
    columns = columns_of(rows, 1 + len(rows) % 3, kind)
    if order is not None:
        columns = columns.ordered(np.array(order))
    times = timestamps if isinstance(timestamps, int) else np.array(timestamps, dtype=np.int64)
    encoded = encoder.encode(columns, times, runs)
    for run, part in zip(runs, encoded, strict=True):
        expected = b"".join(
            record(
                rows[row if order is None else order[row]],
                run.base_offset + row - run.start,
                (timestamps if isinstance(timestamps, int) else timestamps[row]) - run.base_timestamp,
            )
            for row in range(run.start, run.stop)
        )
        assert bytes(part[:]) == expected
        cuts = range(0, len(part), max(97, len(part) // 64))
        assert all(bytes(part[cut : 2 * cut]) == expected[cut : 2 * cut] for cut in cuts)


def runs_of(chance: random.Random, count: int, number: int) -> list[RowRange]:
    edges = sorted({0, count, *(chance.randrange(1, max(count, 2)) for _ in range(number - 1))})
    offsets = [0, 1, 60, 63, 64, 8100, 8191, 8192, 16_300, 70_000, encoder.MAX_RECORDS_PER_BATCH - count]
    return [
        RowRange(start, stop, chance.choice(offsets), NOW - chance.choice([0, 1, 64, 10_000, -5]))
        for start, stop in pairwise(edges)
    ]


SIZES: dict[str, Callable[[random.Random], int | None]] = {
    "equal": lambda chance: 10,
    "short": lambda chance: chance.randrange(40),
    "long": lambda chance: chance.randrange(64, 200),
    "any": lambda chance: chance.choice([0, 1, 50, 63, 64, 200, 8191, 8192]),
    "null": lambda chance: chance.choice([None, 3]),
}


@pytest.mark.parametrize("values", SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_records_of_any_shape(values: str, seed: int) -> None:
    # Ranges of a few rows, too, and rows that are sliced or joined as large ones are.
    with small_limits(ranges=seed > 0, sliced=seed % 2 == 1, joined=seed == 2) if seed else nullcontext():
        for keys in (None, *SIZES):
            check_any(random.Random(f"{keys} {values} {seed}"), keys, values)


def check_any(chance: random.Random, keys: str | None, values: str) -> None:
    def some(sizes: str) -> bytes | None:
        size = SIZES[sizes](chance)
        return None if size is None else chance.randbytes(size)

    count = chance.choice([1, 2, 700])
    headers = chance.random() < 0.3
    rows = [
        {
            "key": None if keys is None else some(keys),
            "value": some(values),
            "headers": [{"key": "h", "value": some("null")}] if headers and chance.random() < 0.5 else None,
        }
        for _ in range(count)
    ]
    order = chance.sample(range(count), count) if chance.random() < 0.7 else None
    timestamps = NOW if chance.random() < 0.7 else [NOW + chance.randrange(-70, 70) for _ in rows]
    kind = chance.choice([pa.binary(), pa.large_binary()])
    check(rows, order, timestamps, runs_of(chance, count, chance.choice([1, 1, 4, 30])), kind)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=30), st.integers(0, 9000), st.integers(0, 70))
def test_lengths_that_cross_a_varints_width(sizes: list[int], offset: int, delta: int) -> None:
    rows = [{"key": b"k" * 5, "value": b"v" * size, "headers": None} for size in sizes]
    with small_limits(ranges=True):
        check(rows, None, NOW, [RowRange(0, len(rows), offset, NOW - delta)])


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_part_of_the_rows_is_encoded_as_the_whole(is_ordered: bool) -> None:
    chance = random.Random(5)
    rows = [
        {"key": b"k%05d" % n, "value": b"v" * chance.randrange(70, 90), "headers": None} for n in range(5000)
    ]
    columns, order = columns_of(rows, 2, pa.binary()), np.arange(len(rows))
    if is_ordered:
        order = np.array(chance.sample(range(len(rows)), len(rows)))
        columns = columns.ordered(order)
    for start, stop in ((0, 4000), (1000, 5000), (17, 19), (4999, 5000)):
        (encoded,) = encoder.encode(columns.slice(start, stop), NOW, [RowRange(0, stop - start, 7, NOW)])
        expected = [record(rows[order[row]], 7 + row - start, 0) for row in range(start, stop)]
        assert bytes(encoded[:]) == b"".join(expected)


def test_values_of_one_length_are_in_the_matrix_unless_they_are_scattered() -> None:
    """Catches: two copies where one is enough, or numpy's slow copy of scattered values; a value of another
    row at the edge of a range or a chunk."""
    rows = [{"key": None, "value": b"v%09d" % n, "headers": None} for n in range(2000)]
    runs = [RowRange(0, 900, 8000, NOW), RowRange(900, 2000, 50, NOW)]
    numbers = np.arange(len(rows))
    scattered = numbers.reshape(2, -1).T.reshape(-1)
    for order, is_inline in ((None, True), (np.roll(numbers, 700), True), (scattered, False)):
        columns = columns_of(rows, 3, pa.binary())
        heads = encoder.by_ranges(columns if order is None else columns.ordered(order), NOW, runs)
        assert heads is not None
        assert heads.has_values is is_inline
        check(rows, None if order is None else order.tolist(), NOW, runs)


def test_keys_that_are_alike_and_short_travel_with_the_numbers() -> None:
    """Two parts a record instead of four."""
    rows = [{"key": b"k%05d" % n, "value": b"v%d" % n, "headers": None} for n in range(2000)]
    runs = [RowRange(0, 2000, 0, NOW)]
    inline = encoder.by_ranges(columns_of(rows, 1, pa.binary()), NOW, runs)
    assert inline is not None
    assert inline.middle is None
    rows[7]["key"] = b"longer than the others"
    apart = encoder.by_ranges(columns_of(rows, 1, pa.binary()), NOW, runs)
    assert apart is not None
    assert apart.middle is not None
