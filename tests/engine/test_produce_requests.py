"""How many batches one Produce request takes."""

from __future__ import annotations

import random

import pytest

from kafka_sink.cluster.broker import Broker
from kafka_sink.cluster.partition import BatchState, ProducerBatch
from kafka_sink.engine.accumulator import RecordAccumulator
from kafka_sink.engine.appender import RecordAppender
from kafka_sink.engine.produce_requests import fill_request
from kafka_sink.memory.pool import BufferPool
from kafka_sink.model import CompressionType, TopicPartition
from kafka_sink.records import encoder
from tests.support.brokers import Brokers
from tests.support.partitioners import ordered
from tests.support.queues import settings, teach_ratio
from tests.support.strategy import forced

PARTITIONS = 400
MAX_REQUEST_BYTES = 1 << 20
COMPRESSED = [codec for codec in CompressionType if codec is not CompressionType.NONE]


class Bench:
    """Batches that linger, one a partition; all partitions lead on broker 0."""

    def __init__(self, compression: CompressionType, ratio: float = 1.0) -> None:
        pool = BufferPool(256 << 20, clock_ms=lambda: 0.0)
        options = settings(batch_size=512 << 10, linger_ms=20, compression_type=compression)
        self.broker: Broker = Brokers().of(0)
        self.accumulator = RecordAccumulator(options, forced.allocator(pool, 512 << 10, 4_096))
        self.appender = RecordAppender(self.accumulator, lambda: 0.0, lambda: None)
        teach_ratio(self.accumulator, ratio)

    def append(self, values: list[bytes], partitions: list[int]) -> None:
        self.appender.append(ordered(values, partitions), lambda: None)

    def linger(self, values: list[bytes], each: int) -> None:
        """``each`` of these values to every partition."""
        partitions = [partition for partition in range(PARTITIONS) for _ in range(each)]
        self.append([values[at % len(values)] for at in range(len(partitions))], partitions)

    def request(self) -> list[ProducerBatch]:
        ready, _, _ = self.accumulator.ready(lambda _: self.broker, 1_000)
        if not ready:
            return []
        queues = ready[self.broker]
        taken = fill_request(self.accumulator, self.broker, queues, MAX_REQUEST_BYTES, lambda _: True)
        for batch in taken:
            batch.move_to(BatchState.IN_FLIGHT)
        return taken

    def requests(self) -> list[list[ProducerBatch]]:
        found = []
        while taken := self.request():
            found.append(taken)
        return found


def assert_each_once(requests: list[list[ProducerBatch]]) -> None:
    taken = [batch.topic_partition for request in requests for batch in request]
    assert sorted(taken) == [TopicPartition("t", partition) for partition in range(PARTITIONS)]
    for request in requests:
        assert sum(batch.size for batch in request) <= MAX_REQUEST_BYTES or len(request) == 1


@pytest.mark.parametrize("codec", COMPRESSED, ids=lambda codec: codec.name.lower())
def test_batches_that_shrink_fill_one_request_by_their_size_on_the_wire(codec: CompressionType) -> None:
    """Four mebibytes of rows that compress to a tenth or less, whether that is known yet or not."""
    for ratio in (1.0, 0.05):
        bench = Bench(codec, ratio)
        bench.linger([b"%0100d" % number for number in range(100)], 100)
        requests = bench.requests()
        assert len(requests) == 1
        assert_each_once(requests)


@pytest.mark.parametrize("codec", COMPRESSED, ids=lambda codec: codec.name.lower())
def test_an_estimate_that_was_too_low_sends_back_what_exceeds_the_request(codec: CompressionType) -> None:
    bench = Bench(codec, 0.05)
    chance = random.Random(5)
    bench.linger([chance.randbytes(1_000) for _ in range(100)], 10)
    requests = bench.requests()
    assert len(requests) > 2
    assert_each_once(requests)
    sizes = [sum(batch.size for batch in request) for request in requests[:-1]]
    assert min(sizes) > MAX_REQUEST_BYTES - 20_000


def test_returned_batch_keeps_its_place_and_is_no_longer_in_flight() -> None:
    bench = Bench(CompressionType.LZ4, 0.05)
    chance = random.Random(5)
    noise = [chance.randbytes(1_000) for _ in range(600)]
    bench.append(noise, [0] * 600)
    bench.append(noise, [1] * 600)
    bench.append([b"later"], [1])
    first = bench.request()
    assert [batch.topic_partition.partition for batch in first] == [0]
    queue = bench.accumulator.partition(TopicPartition("t", 1))
    assert (queue.in_flight, queue.batches[0].in_request) == (0, False)
    assert queue.batches[0].state is BatchState.SEALED
    assert [batch.topic_partition.partition for batch in bench.request()] == [1]


def test_a_request_has_no_more_records_than_brokers_may_refuse_one_by_one() -> None:
    bench = Bench(CompressionType.LZ4, 0.01)
    each = encoder.MAX_RECORDS_PER_BATCH // 2
    for partition in range(3):
        bench.append([b""] * each, [partition] * each)
    counts = [[batch.record_count for batch in request] for request in bench.requests()]
    assert counts == [[each, each], [each]]
