"""How the records of a refused batch are shared out; that the pieces' bytes are right is tested elsewhere."""

from __future__ import annotations

import pyarrow as pa
import pytest
from kafka.record.default_records import DefaultRecordBatch

from kafka_sink.accumulator.batch_limits import BatchRoom
from kafka_sink.accumulator.buffer_pool import BufferPool
from kafka_sink.accumulator.producer_batch import BatchState, ProducerBatch
from kafka_sink.accumulator.record_accumulator import AccumulatorSettings, RecordAccumulator
from kafka_sink.accumulator.record_appender import RecordAppender
from kafka_sink.errors import BufferExhaustedError
from kafka_sink.model import CompressionType, PartitionInfo, TopicMetadata, TopicPartition
from kafka_sink.records import batch_header
from kafka_sink.records.compression import codec_for
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.rows.columns import extract
from kafka_sink.rows.ordering import ordered_rows_of
from kafka_sink.rows.partitioner import Partitioner
from kafka_sink.sending.splitting import split_batch
from tests.support.strategy import forced

pytestmark = pytest.mark.both_strategies

BATCH_SIZE = 1_000
TOPICS = {"t": TopicMetadata("t", None, (PartitionInfo("t", 0, 0, 0),))}
PARTITIONER = Partitioner(
    room=lambda *_: BatchRoom(None, 100), ignore_keys=False, adaptive=False, random=lambda: 0.5
)


class Refused:
    """One batch of these values, as large as need be."""

    def __init__(
        self,
        values: list[bytes],
        codec: CompressionType = CompressionType.NONE,
        times: list[int] | None = None,
        **options: int,
    ) -> None:
        self.pool = BufferPool(1 << 20, 128, clock_ms=lambda: 0.0, **options)
        self.allocator = forced.allocator(self.pool, 1_000, 128)
        settings = AccumulatorSettings(
            batch_size=1 << 20,
            linger_ms=0,
            max_block_ms=0,
            delivery_timeout_ms=10_000,
            buffer_memory=1 << 20,
            compression=codec,
            guarantee_order=False,
        )
        accumulator = RecordAccumulator(settings, self.allocator)
        appender = RecordAppender(accumulator, codec_for(codec, None), lambda: 0.0, lambda: None)
        stamps = [stamp * 1_000 for stamp in times or [5] * len(values)]
        rows = extract(
            ColumnPlan.of([("value", "binary"), ("timestamp", "timestamp")], "t"),
            pa.record_batch(
                {
                    "value": pa.array(values, pa.binary()),
                    "timestamp": pa.array(stamps, pa.timestamp("us", tz="UTC")),
                }
            ),
            5,
        )
        appender.append(
            ordered_rows_of(rows, TOPICS, PARTITIONER, lambda topic, count: [0] * count, 5), lambda: None
        )
        appender.flush()
        (self.batch,) = accumulator._queues.queue(TopicPartition("t", 0)).batches
        self.values = values

    def split(self, batch_size: int = BATCH_SIZE) -> list[ProducerBatch]:
        pieces = split_batch(self.batch, batch_size, self.allocator)
        assert sum(piece.record_count for piece in pieces) == len(self.values)
        assert all(piece.state is BatchState.SEALED and piece.record_count for piece in pieces)
        return pieces

    def held(self) -> int:
        metrics = self.pool.metrics()
        return metrics.used_bytes + metrics.heap_bytes


@pytest.mark.parametrize("size", [0, 1, 20, 300])
def test_pieces_of_a_large_batch_are_filled_up_to_batch_size(size: int) -> None:
    refused = Refused([b"v" * size] * 600)
    pieces = refused.split()
    assert max(piece.size for piece in pieces) <= BATCH_SIZE
    # All but the last are about full: a record is one byte shorter where its offset is.
    record = refused.batch.raw_bytes // 600 + 2
    assert min(piece.size for piece in pieces[:-1]) >= BATCH_SIZE * 9 // 10 - record


@pytest.mark.parametrize("codec", list(CompressionType), ids=lambda codec: codec.name.lower())
def test_pieces_of_a_compressed_batch_hold_batch_size_of_raw_bytes(codec: CompressionType) -> None:
    pieces = Refused([b"v" * 40] * 400, codec).split()
    assert len(pieces) > 10
    assert max(piece.raw_bytes for piece in pieces) <= BATCH_SIZE - batch_header.SIZE


def test_a_batch_within_batch_size_is_halved() -> None:
    refused = Refused([b"v" * 20] * 20)
    assert refused.batch.size <= BATCH_SIZE
    assert [piece.record_count for piece in refused.split()] == [10, 10]


@pytest.mark.parametrize("sizes", [(0, 0), (0, 5_000), (5_000, 0), (5_000, 5_000, 0)])
def test_every_split_makes_at_least_two_batches(sizes: tuple[int, ...]) -> None:
    for batch_size in (1, BATCH_SIZE, 1 << 20):
        refused = Refused([b"v" * size for size in sizes])
        assert len(refused.split(batch_size)) >= 2


def test_pieces_keep_their_rows_order_and_place() -> None:
    refused = Refused([b"<%d>" % index for index in range(600)])
    refused.batch.ordinal = (7,)
    refused.batch.created_ms = 4_321.0
    pieces = refused.split()
    data = b"".join(view for piece in pieces for view in piece.buffer.views())
    assert [data.index(b"<%d>" % index) for index in range(600)] == sorted(
        data.index(b"<%d>" % index) for index in range(600)
    )
    assert [piece.ordinal for piece in pieces] == [(7, index) for index in range(len(pieces))]
    # delivery.timeout.ms counts from the first row on.
    assert {piece.created_ms for piece in pieces} == {4_321.0}


def test_a_split_that_finds_no_memory_holds_none() -> None:
    refused = Refused([b"v" * 40] * 400, heap_limit_bytes=3_000)
    left = refused.pool.metrics().buffer_available_bytes // 128
    taken = refused.pool.try_take(refused.pool.arena(128), left - 20)
    assert taken is not None
    before = refused.held()
    with pytest.raises(BufferExhaustedError):
        refused.split()
    assert refused.held() == before
    assert refused.batch.state is BatchState.SEALED
    refused.pool.give(refused.pool.arena(128), taken)
    assert len(refused.split()) > 10


def test_a_piece_that_cannot_be_made_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Refused([b"v" * 40] * 400)
    before = refused.held()
    seal = ProducerBatch.seal
    sealed: list[ProducerBatch] = []

    def failing(batch: ProducerBatch) -> None:
        seal(batch)
        sealed.append(batch)
        if len(sealed) == 3:
            raise MemoryError

    monkeypatch.setattr(ProducerBatch, "seal", failing)
    with pytest.raises(MemoryError):
        refused.split()
    assert refused.held() == before


@pytest.mark.parametrize("codec", list(CompressionType), ids=lambda codec: codec.name.lower())
def test_another_reader_finds_every_row_with_its_timestamp(codec: CompressionType) -> None:
    """kafka-python's: offsets restart in each piece, and timestamps count from its first row."""
    values = [b"%d" % index for index in range(300)]
    times = [1_700_000_000_000 + (index * 7919) % 4_001 * 1_000 for index in range(300)]
    found = []
    for piece in Refused(values, codec, times).split():
        piece.write_header()
        data = b"".join(piece.buffer.views())
        records = list(DefaultRecordBatch(data))
        assert [record.offset for record in records] == list(range(piece.record_count))
        assert max(record.timestamp for record in records) == piece.max_timestamp
        found += [(record.value, record.timestamp) for record in records]
    assert found == list(zip(values, times, strict=True))
