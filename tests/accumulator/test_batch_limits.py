"""How many rows a batch takes: the vectorised cut against Kafka's rule row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_sink.accumulator.batch_limits import BatchLimits
from kafka_sink.model import TopicPartition
from kafka_sink.records import batch_header, encoder, varint
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.records.record_columns import RecordColumns

NOW = 1_700_000_000_000

rows = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 9, 63, 64, 110, 5000]),
        st.sampled_from([0, 1, 63, 64, 110, 8190, 8192, 30_000]),
        st.sampled_from([NOW, NOW, NOW + 63, NOW + 64, NOW - 64, NOW + 9000, NOW + (1 << 40), 0]),
    ),
    min_size=1,
    max_size=60,
)


def ordered_rows_of(found: list[tuple[int, int, int]]) -> OrderedRows:
    keys = pa.array([b"k" * key for key, _, _ in found], pa.binary())
    values = pa.array([b"v" * value for _, value, _ in found], pa.binary())
    columns = RecordColumns.of(keys, (values,), None)
    stamps = np.array([stamp for _, _, stamp in found], dtype=np.int64)
    return OrderedRows(columns, stamps, [TopicPartition("t", 0)], [0, len(found)])


def record_size(row: tuple[int, int, int], offset: int, base_timestamp: int) -> int:
    key, value, stamp = row
    body = 2 + key + value + len(varint.scalar(key)) + len(varint.scalar(value))
    body += len(varint.scalar(offset)) + len(varint.scalar(stamp - base_timestamp))
    return body + len(varint.scalar(body))


@settings(deadline=None)
@given(rows, st.data())
def test_a_batch_takes_the_rows_that_kafkas_rule_row_by_row_lets_in(
    found: list[tuple[int, int, int]], data: Any
) -> None:
    unit = ordered_rows_of(found)
    start = data.draw(st.integers(0, len(found) - 1))
    stop = data.draw(st.integers(start + 1, len(found)))
    first = data.draw(st.sampled_from([0, 0, 1, 60, 63, 64, 8190, encoder.MAX_RECORDS_PER_BATCH - 2]))
    raw = 0 if first == 0 else data.draw(st.integers(first, first + 200_000))
    factor = data.draw(st.sampled_from([1.0, 0.25 * 1.05, 0.7, 1.05]))
    limits = BatchLimits(
        data.draw(st.sampled_from([128, 1000, 16_384, 100_000, 1 << 20])),
        data.draw(st.sampled_from([None, 50_000, 1 << 22])),
    )
    base = data.draw(st.sampled_from([NOW, found[start][2], 0]))

    expected, size_so_far, count = start, raw, first
    while expected < stop:
        size = record_size(found[expected], count, base)
        fits = size_so_far * factor + size <= limits.write_limit - batch_header.SIZE
        fits &= limits.raw_limit is None or size_so_far + size <= limits.raw_limit
        fits &= count < encoder.MAX_RECORDS_PER_BATCH
        if not fits and count > 0:
            break
        size_so_far += size
        count += 1
        expected += 1

    assert (
        limits.rows_that_fit(
            unit, start, stop, raw_bytes=raw, record_count=first, base_timestamp=base, factor=factor
        )
        == expected
    )


@given(st.integers(0, 1 << 21), st.integers(1, 300))
def test_widths_of_counted_numbers(first: int, count: int) -> None:
    numbers = np.arange(first, first + count)
    expected = [len(varint.scalar(number)) for number in range(first, first + count)]
    for found in (varint.count_widths(first, count), varint.widths(numbers)):
        assert np.broadcast_to(np.asarray(found), count).tolist() == expected
