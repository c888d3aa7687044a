"""The sink's V2 bytes against Kafka's own: equal uncompressed, and read back alike in every codec."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from kafka_sink.cluster.partition import BatchState, ProducerBatch
from kafka_sink.memory.pool import BufferPool
from kafka_sink.model import CompressionType, TopicPartition
from kafka_sink.records import batch_header, encoder
from kafka_sink.records.batch_header import ProducerSequence
from kafka_sink.records.compression import codec_for
from kafka_sink.records.encoder import RowRange
from kafka_sink.records.record_columns import RecordColumns
from kafka_sink.rows.murmur2 import murmur2, partitions_for
from local_kafka import LocalBroker
from tests.support.allocators import full_allocator, incremental_allocator
from tests.support.encoder_limits import small_limits
from tests.support.java_oracle import Batch, JavaOracle, Row
from tests.support.queues import partition_of

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


@pytest.fixture(scope="module")
def oracle(broker: LocalBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaOracle]:
    with JavaOracle(broker, tmp_path_factory.mktemp("oracle")) as running:
        yield running


def columns_of(rows: tuple[Row, ...], *, large: bool) -> RecordColumns:
    kind = pa.large_binary() if large else pa.binary()
    keys = pa.array([row.key for row in rows], kind)
    values = pa.array([row.value for row in rows], kind)
    headers = None
    if any(row.headers for row in rows):
        pairs = [[{"key": k.decode(), "value": v} for k, v in row.headers] or None for row in rows]
        headers = pa.array(pairs, HEADERS)
    return RecordColumns.of(None if keys.null_count == len(keys) else keys, (values,), headers)


def encode_batch(
    batch: Batch, compression: CompressionType = CompressionType.NONE, pieces: int = 1, *, full: bool = False
) -> bytes:
    """The bytes the accumulator would send, appended in ``pieces`` runs."""
    pool = BufferPool(64 << 20, clock_ms=lambda: 0.0)
    buffer = (full_allocator(pool, 4096) if full else incremental_allocator(pool, 1024)).open(
        batch_header.SIZE + 64, 0
    )
    base, home = batch.rows[0].timestamp, partition_of(TopicPartition("t", 0))
    made = ProducerBatch(buffer, codec_for(compression, None), compression, 1.0, base, home, 0.0)
    if batch.producer_id >= 0:
        made.assign_sequence(ProducerSequence(batch.producer_id, batch.producer_epoch, batch.base_sequence))
    edges = np.linspace(0, len(batch.rows), pieces + 1).astype(int).tolist()
    made.held = True
    for start, stop in pairwise(edges):
        rows = batch.rows[start:stop]
        if not rows:
            continue
        times = np.array([row.timestamp for row in rows], dtype=np.int64)
        columns = columns_of(rows, large=start % 2 == 1)
        (records,) = encoder.encode(columns, times, [RowRange(0, len(rows), start, base)])
        assert buffer.grow(made.projected_size_with(len(records)))
        made.append(records, len(rows), int(times.max()))
    made.move_to(BatchState.CLOSED)
    made.seal()
    made.write_header()
    return b"".join(made.buffer.views())


def random_batch(chance: random.Random, count: int) -> Batch:
    now = chance.choice([0, 1_700_000_000_000])
    spread = chance.choice([0, 50, 10**6, 10**12])
    long_key, long_value = 9000 if count < 20 else 5, 8191 if count < 50 else 40
    rows = tuple(
        Row(
            max(0, now + chance.randint(-spread, spread)),
            chance.choice([None, b"", chance.randbytes(chance.choice([1, 10, 70, long_key]))]),
            chance.choice([None, b"", chance.randbytes(chance.choice([5, 63, 64, 110, long_value]))]),
            tuple(
                (chance.choice(["", "h", "ключ", "x" * 100]).encode(), chance.choice([None, b"", b"v" * 70]))
                for _ in range(chance.choice([0, 0, 0, 1, 3, 70 if count < 50 else 0]))
            ),
        )
        for _ in range(count)
    )
    if chance.random() < 0.5:
        return Batch(rows)
    return Batch(rows, chance.randrange(2**62), chance.randrange(2**15), chance.randrange(2**31))


def cases(seed: int) -> list[Batch]:
    chance = random.Random(seed)
    counts = [1] * 10 + [2, 3, 63, 64, 65, 127, 128, 129] + [chance.randrange(1, 300) for _ in range(12)]
    batches = [random_batch(chance, count) for count in counts]
    batches.append(Batch(tuple(Row(5, None, None) for _ in range(10_000)), 7, 0, 2**31 - 5000))
    batches.append(Batch((Row(1, b"big", bytes(900_000)),)))
    batches.append(Batch((Row(2**62, b"k", b"v"), Row(0, b"k", b"v"))))
    return batches


def test_uncompressed_bytes_equal_javas(oracle: JavaOracle) -> None:
    batches = cases(0) + cases(1)[:-3]
    for number, (batch, expected) in enumerate(zip(batches, oracle.build(batches), strict=True)):
        for pieces in (1, 3):
            assert encode_batch(batch, pieces=pieces) == expected, f"case {number} in {pieces} pieces"
        assert encode_batch(batch, full=True) == expected


@pytest.mark.parametrize("compression", list(CompressionType))
def test_java_reads_every_codec(oracle: JavaOracle, compression: CompressionType) -> None:
    batches = cases(100 + compression)
    encoded = [encode_batch(batch, compression, pieces=1 + n % 4) for n, batch in enumerate(batches)]
    decoded = oracle.read(encoded)
    assert decoded == batches
    assert {batch.codec for batch in decoded} == {int(compression)}


@pytest.mark.parametrize("compression", list(CompressionType))
def test_bytes_do_not_depend_on_pieces_or_strategy(compression: CompressionType) -> None:
    """Blocks are cut at fixed raw offsets, so how rows came in leaves no trace."""
    for batch in cases(7)[::2]:
        whole = encode_batch(batch, compression)
        # As large rows are.
        with small_limits(sliced=True):
            assert encode_batch(batch, compression, pieces=3) == whole
        assert encode_batch(batch, compression, pieces=5) == whole
        assert encode_batch(batch, compression, pieces=2, full=True) == whole


def test_keys_land_where_java_puts_them(oracle: JavaOracle) -> None:
    chance = random.Random(3)
    keys = [chance.randbytes(length) for length in range(70)] + [chance.randbytes(5000), b"", b"a" * 100_001]
    keys += [chance.randbytes(chance.randrange(40)) for _ in range(3000)]
    expected = oracle.murmur2(keys)
    for kind in (pa.binary(), pa.large_binary()):
        assert murmur2(pa.array(keys, kind)).tolist() == expected
        assert murmur2(pa.array([b"pad", *keys, b"pad"], kind).slice(1, len(keys))).tolist() == expected
    positive = [hashed & 0x7FFFFFFF for hashed in expected]
    assert partitions_for(pa.array(keys), 7).tolist() == [hashed % 7 for hashed in positive]
