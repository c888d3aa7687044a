"""How many ordered rows a batch takes, by Kafka's rule row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_sink import varint
from kafka_sink.cluster.partition import ProducerBatch
from kafka_sink.cluster.topic_limits import TopicLimits
from kafka_sink.memory.buffer import PieceBuffer
from kafka_sink.model import CompressionType, TopicPartition
from kafka_sink.records import batch_header, encoder
from kafka_sink.records.compression import codec_for
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.records.record_columns import RecordColumns
from tests.support.queues import partition_of

LZ4 = codec_for(CompressionType.LZ4, None)
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
    body = 2 + key + value + len(varint.signed(key)) + len(varint.signed(value))
    body += len(varint.signed(offset)) + len(varint.signed(stamp - base_timestamp))
    return body + len(varint.signed(body))


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
    ratio = data.draw(st.sampled_from([1.0, 0.25, 0.7, 1 / 1.05]))
    factor = ratio * 1.05
    limits = TopicLimits("t", data.draw(st.sampled_from([128, 1000, 16_384, 100_000, 1 << 20])), LZ4)
    limits.raw_limit = data.draw(st.sampled_from([None, 50_000, 1 << 22]))
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

    batch = ProducerBatch(
        PieceBuffer(), None, CompressionType.NONE, ratio, base, partition_of(TopicPartition("t", 0)), 0.0
    )
    batch.raw_bytes, batch.record_count = raw, first
    assert limits.rows_that_fit(unit, start, stop, batch) == expected
    if first == raw == 0 and base == found[start][2]:
        limits.ratio = ratio
        assert limits.rows_that_fit(unit, start, stop) == expected
