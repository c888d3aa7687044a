"""How the records of a refused batch are shared out; that the pieces' bytes are right is tested elsewhere."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Sequence
from unittest.mock import patch

import pyarrow as pa
import pytest
from kafka.record.default_records import DefaultRecord, DefaultRecordBatch

from kafka_sink import varint
from kafka_sink.cluster.partition import BatchState, ProducerBatch
from kafka_sink.engine.accumulator import RecordAccumulator
from kafka_sink.engine.appender import RecordAppender
from kafka_sink.engine.splitting import _records, split_batch, take_out
from kafka_sink.errors import KafkaSinkError
from kafka_sink.memory.pool import BufferPool
from kafka_sink.model import CompressionType, PartitionMetadata, TopicPartition
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.rows.columns import extract
from tests.support.partitioners import plain_partitioner
from tests.support.queues import settings
from tests.support.strategy import forced
from tests.support.taken_records import values_of
from tests.support.topic_metadata import topic_of

BATCH_SIZE = 1_000
each_codec = pytest.mark.parametrize("codec", list(CompressionType), ids=lambda codec: codec.name.lower())
TOPICS = {"t": topic_of("t", None, (PartitionMetadata("t", 0, 0, 0),))}
PARTITIONER = plain_partitioner()


class Refused:
    """One batch of these values, as large as need be."""

    def __init__(
        self,
        values: list[bytes],
        codec: CompressionType = CompressionType.NONE,
        times: list[int] | None = None,
        memory: int = 1 << 20,
    ) -> None:
        self.pool = BufferPool(memory, clock_ms=lambda: 0.0)
        self.allocator = forced.allocator(self.pool, 1_000, 128)
        options = settings(batch_size=memory, compression_type=codec)
        accumulator = RecordAccumulator(options, self.allocator)
        appender = RecordAppender(accumulator, lambda: 0.0, lambda: None)
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
        appender.append(PARTITIONER.order(rows, TOPICS, 5), lambda: None)
        appender.flush()
        (self.batch,) = accumulator.partition(TopicPartition("t", 0)).batches
        self.values = values

    def split(self, batch_size: int = BATCH_SIZE) -> list[ProducerBatch]:
        pieces = split_batch(self.batch, batch_size)
        assert sum(piece.record_count for piece in pieces) == len(self.values)
        assert all(piece.state is BatchState.SEALED and piece.record_count for piece in pieces)
        return pieces

    def held(self) -> int:
        metrics = self.pool.metrics()
        return metrics.used_bytes + metrics.heap_bytes

    def exhaust(self) -> None:
        """Neither the pool nor the heap has any memory left."""
        rest = self.pool.metrics().buffer_available_bytes // 128
        assert self.pool.try_take(self.pool.arena(128), rest) is not None
        self.pool.heap_limit_bytes = 0


def records_of(pieces: list[ProducerBatch]) -> list[DefaultRecord]:
    """As kafka-python reads them: offsets restart in each piece, and timestamps count from its first row."""
    for piece in pieces:
        piece.write_header()
    return [record for piece in pieces for record in DefaultRecordBatch(b"".join(piece.buffer.views()))]


def test_pieces_of_a_large_batch_keep_to_the_limit_and_are_about_equally_large() -> None:
    for size in (0, 1, 20, 300):
        refused = Refused([b"v" * size] * 600)
        sizes = [piece.size for piece in refused.split()]
        record = refused.batch.raw_bytes // 600 + 2
        assert BATCH_SIZE // 2 <= min(sizes) <= max(sizes) <= BATCH_SIZE
        assert min(sizes) >= max(sizes) * 3 // 4 - record


@each_codec
def test_pieces_of_a_compressed_batch_hold_batch_size_of_raw_bytes(codec: CompressionType) -> None:
    pieces = Refused([b"v" * 40] * 400, codec).split()
    assert len(pieces) > (10 if codec is CompressionType.NONE else 1)
    # Small batches shrink less than the large one did.
    assert max(piece.size for piece in pieces) <= 2 * BATCH_SIZE


def test_a_batch_within_batch_size_is_halved() -> None:
    """Catches: two halves filled one after the other, which left a third piece of one record."""
    refused = Refused([b"v" * 20] * 20)
    assert refused.batch.size <= BATCH_SIZE
    assert [piece.record_count for piece in refused.split()] == [10, 10]
    for sizes in [(20,) * 3, (20,) * 21, (300, 300, 1), (1, 300, 300), (400, 1, 1, 400)]:
        assert len(Refused([b"v" * size for size in sizes]).split()) == 2, sizes
    # Every split makes at least two batches.
    for sizes in [(0, 0), (0, 5_000), (5_000, 0), (5_000, 5_000, 0)]:
        for batch_size in (1, BATCH_SIZE, 1 << 20):
            refused = Refused([b"v" * size for size in sizes])
            assert len(refused.split(batch_size)) >= 2, (sizes, batch_size)


def test_pieces_keep_their_rows_order_and_place() -> None:
    refused = Refused([b"<%d>" % index for index in range(600)])
    refused.batch.ordinal = (7,)
    refused.batch.created_ms = 4_321.0
    pieces = refused.split()
    data = b"".join(view for piece in pieces for view in piece.buffer.views())
    places = [data.index(b"<%d>" % index) for index in range(600)]
    assert places == sorted(places)
    assert [piece.ordinal for piece in pieces] == [(7, index) for index in range(len(pieces))]
    # delivery.timeout.ms counts from the first row on.
    assert {piece.created_ms for piece in pieces} == {4_321.0}


@pytest.mark.usefixtures("allocation_strategy")
def test_a_piece_that_cannot_be_made_holds_nothing() -> None:
    refused = Refused([b"v" * 40] * 400)
    before = refused.held()
    seal, left = ProducerBatch.seal, [True, True, False]

    def failing(batch: ProducerBatch) -> None:
        seal(batch)
        if not left.pop(0):
            raise MemoryError

    with patch.object(ProducerBatch, "seal", failing), pytest.raises(MemoryError):
        refused.split()
    assert refused.held() == before


@each_codec
def test_another_reader_finds_every_row_with_its_timestamp(codec: CompressionType) -> None:
    values = [b"%d" % index for index in range(300)]
    times = [1_700_000_000_000 + (index * 7919) % 4_001 * 1_000 for index in range(300)]
    found = []
    for piece in Refused(values, codec, times).split():
        records = records_of([piece])
        assert [record.offset for record in records] == list(range(piece.record_count))
        assert max(record.timestamp for record in records) == piece.max_timestamp
        found += [(record.value, record.timestamp) for record in records]
    assert found == list(zip(values, times, strict=True))


@pytest.mark.usefixtures("allocation_strategy")
@each_codec
def test_a_split_takes_no_memory_that_others_have(codec: CompressionType) -> None:
    """KAFKA-20576: where a split needs memory of its own, a pool full of batches that are too large never
    empties. Here neither the pool nor the heap has any left."""
    chance = random.Random(3)
    refused = Refused([chance.randbytes(20) + bytes(20) for _ in range(2_000)], codec)
    refused.exhaust()
    before, own = refused.held(), refused.batch.buffer.capacity
    pieces = refused.split(refused.batch.size // 6)
    assert len(pieces) >= 6
    # Headers of pieces, and what smaller blocks shrink less.
    assert refused.held() - before <= own // 4
    assert [record.value for record in records_of(pieces)] == refused.values
    for piece in pieces:
        assert refused.held() >= before
        piece.buffer.release()
    # The batch itself goes last, as its request refers to it until then.
    refused.batch.buffer.release()
    assert refused.held() == before - own


@pytest.mark.usefixtures("allocation_strategy")
@each_codec
def test_pieces_of_pieces_stay_within_the_memory_of_the_first_batch(codec: CompressionType) -> None:
    chance = random.Random(4)
    refused = Refused([chance.randbytes(20) + bytes(20) for _ in range(2_000)], codec)
    own = refused.batch.buffer.capacity
    batches = [refused.batch]
    for _ in range(4):
        parents = batches
        batches = [piece for batch in parents for piece in split_batch(batch, batch.size // 2 + 100)]
        for parent in parents:
            parent.buffer.release()
    assert refused.held() <= own * 2
    assert [record.value for record in records_of(batches)] == refused.values
    for batch in batches:
        batch.buffer.release()
    assert refused.held() == 0


@pytest.mark.usefixtures("allocation_strategy")
@each_codec
@pytest.mark.parametrize(
    "positions",
    [(0, 7, 8, 1_000, 1_999), range(2_000), range(1_999)],
    ids=["some", "all", "all but the last"],
)
def test_remaining_records_reuse_the_memory_of_their_batch(
    codec: CompressionType, positions: Sequence[int]
) -> None:
    """One refused record needed the whole batch raw in memory beside it."""
    chance = random.Random(5)
    times = [1_700_000_000_000 + chance.randrange(10**9) for _ in range(2_000)]
    refused = Refused([b"%d" % number + bytes(30) for number in range(2_000)], codec, times)
    refused.exhaust()
    before, own = refused.held(), refused.batch.buffer.capacity
    pieces, records = take_out(refused.batch, positions, 1 << 20)
    assert values_of(records) == [refused.values[position] for position in positions]
    assert records.timestamps_ms == [times[position] for position in positions]
    assert refused.held() - before <= own // 4
    left = records_of(pieces)
    kept = [position for position in range(2_000) if position not in positions]
    assert [record.value for record in left] == [refused.values[position] for position in kept]
    assert [record.timestamp for record in left] == [times[position] for position in kept]
    refused.batch.buffer.release()
    for piece in pieces:
        piece.buffer.release()
    assert refused.held() == before - own


def test_a_batch_is_read_and_written_block_by_block() -> None:
    """Rows that shrink a lot: raw they take a hundred times the batch's memory."""
    values = [b"%d" % (number // 1_000) + bytes(1_000) for number in range(12_000)]
    refused = Refused(values, CompressionType.LZ4, memory=16 << 20)
    assert refused.batch.raw_bytes > 50 * refused.batch.size
    # The cache of varints is no memory of the batch: fill it first, as other tests also may.
    for number in range(5_000):
        varint.signed(number)
    tracemalloc.start()
    pieces, _ = take_out(refused.batch, [6_000], 1 << 20)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The pieces have a chunk of a mebibyte. The rest are the blocks that are being read and written.
    assert peak < refused.batch.raw_bytes // 8
    assert [piece.record_count for piece in pieces] == [11_999]


def test_a_record_across_many_blocks_costs_no_more_than_its_bytes() -> None:
    """Two records of 16 MiB took 7 s of the sender's thread: each block joined all blocks before it again."""
    content = bytes(16 << 20)
    fields = b"\0" + varint.signed(3) + varint.signed(0) + content
    record = varint.signed(len(fields)) + fields
    raw = memoryview(record * 2)
    blocks = [raw[at : at + 8_192] for at in range(0, len(raw), 8_192)]
    started_s = time.thread_time()
    found = [(timestamp, body == content, size) for timestamp, body, size in _records(blocks)]
    assert time.thread_time() - started_s < 2, "a join for each block takes ten"
    assert found == [(3, True, len(record))] * 2


def test_records_are_found_wherever_blocks_end() -> None:
    bodies = [b"v" * size for size in (0, 1, 5, 62, 63, 64, 65, 300, 0, 20_000, 2)]
    fields = [b"\0" + varint.signed(at * 1_000) + varint.signed(at) + body for at, body in enumerate(bodies)]
    raw = b"".join(varint.signed(len(one)) + one for one in fields)
    for block in (1, 2, 3, 7, 64, 1_000_000):
        blocks = [part for at in range(0, len(raw), block) for part in (raw[at : at + block], b"")]
        found = [(timestamp, bytes(body)) for timestamp, body, _ in _records(blocks)]
        assert found == [(at * 1_000, body) for at, body in enumerate(bodies)], block


def test_a_batch_that_lost_records_is_not_split() -> None:
    """Catches: rows that are in no piece, and in no count."""
    refused = Refused([b"v" * 20] * 20)
    refused.batch.record_count = 21
    with pytest.raises(KafkaSinkError, match=r"of 21 records decodes to 20$"):
        refused.split()
