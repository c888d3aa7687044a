"""Rows that keep their partition while it is muted: others go first, a share of the memory, then a wait."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from kafka_sink.engine.accumulator import RecordAccumulator
from kafka_sink.engine.appender import MutedMemoryLimit, RecordAppender
from kafka_sink.errors import DeliveryError
from kafka_sink.memory.pool import BufferPool
from kafka_sink.model import NO_LEADER, CompressionType, PartitionMetadata, TopicPartition
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.rows.columns import extract
from kafka_sink.rows.murmur2 import partitions_for
from kafka_sink.rows.partitioner import choices_of
from tests.support.allocators import incremental_allocator
from tests.support.partitioners import plain_partitioner
from tests.support.queues import settings
from tests.support.topic_metadata import topic_of

PLAN = ColumnPlan.of([("key", "binary"), ("value", "binary"), ("partition", "int")], "t")
COUNT = 6
TOPICS = {"t": topic_of("t", None, tuple(PartitionMetadata("t", i, 0, 0) for i in range(COUNT)))}
P = [TopicPartition("t", index) for index in range(COUNT)]
LIMIT = 10_000


def unit(
    partitions: list[int | None],
    muted: set[TopicPartition] | None = None,
    *,
    keys: list[bytes | None] | None = None,
    spread: bool = False,
    size: int = 100,
) -> OrderedRows:
    partitioner = plain_partitioner(200, spread_keys=spread)
    values = [b"<%d>" % number + b"x" * size for number in range(len(partitions))]
    batch = pa.record_batch(
        {
            "key": pa.array(keys or [None] * len(partitions), pa.binary()),
            "value": pa.array(values, pa.binary()),
            "partition": pa.array(partitions, pa.int32()),
        }
    )
    return partitioner.order(extract(PLAN, batch, 0), TOPICS, 0, muted=muted or set())


class Bench:
    def __init__(self) -> None:
        self.now = 0.0
        self.avoided: set[TopicPartition] = set()
        self.order: list[int] = []
        allocator = incremental_allocator(BufferPool(1 << 20, clock_ms=lambda: self.now), 128)
        options = settings(batch_size=1_024, delivery_timeout_ms=1_000, compression_type=CompressionType.NONE)
        self.accumulator = RecordAccumulator(options, allocator)
        breaker: Any = self
        limit = MutedMemoryLimit(self.accumulator, LIMIT, breaker, lambda: self.now)
        self.appender = RecordAppender(self.accumulator, lambda: self.now, lambda: None, limit)
        enqueue = self.accumulator.enqueue

        def noting(queue, batch):  # type: ignore[no-untyped-def]
            self.order.append(queue.id.partition)
            enqueue(queue, batch)

        self.accumulator.enqueue = noting  # type: ignore[method-assign]

    def explain(self, partition: TopicPartition) -> str:
        return f"{partition} rests"

    def append(self, one: OrderedRows, check: Callable[[], None] = lambda: None) -> None:
        self.appender.append(one, check)

    def rows(self, partition: int) -> list[int]:
        batches = self.accumulator.partition(P[partition]).batches
        data = b"".join(bytes(view) for batch in batches for view in batch.buffer.views())
        return [int(number) for number in re.findall(rb"<(\d+)>", data)]


def test_rows_of_healthy_partitions_go_first() -> None:
    bench = Bench()
    bench.avoided = {P[0], P[2], P[3]}
    bench.append(unit([0, 1, 2, 3, 4, 5]))
    assert bench.order == [1, 4, 5, 0, 2, 3]
    assert [bench.rows(p) for p in range(COUNT)] == [[0], [1], [2], [3], [4], [5]]
    # A table puts muted partitions last, and keeps the order in each.
    ordered = unit([0, 1, 2, 0, 1, 2, 0], {P[0], P[1]})
    assert ordered.partitions == [P[2], P[0], P[1]]
    bench = Bench()
    bench.append(ordered)
    assert [bench.rows(p) for p in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]


def test_past_the_share_rows_wait_until_the_mute_ends(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.avoided = {P[0]}
    bench.append(unit([0] * 60))
    assert bench.accumulator.memory_of(bench.avoided) <= LIMIT
    looked: list[float] = []

    def check() -> None:
        looked.append(bench.now)
        bench.now += 100
        if len(looked) == 5:
            assert bench.rows(1) == list(range(1, 100, 2)), "the healthy rows of the same unit are through"
            assert len(bench.rows(0)) == 60
            bench.avoided = set()

    with caplog.at_level(logging.WARNING, "kafka_sink"):
        bench.append(unit([0, 1] * 50), check)
    assert len(bench.rows(0)) == 110
    assert len(looked) >= 5
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "t-0 rests" in messages[0]
    assert "kafka.partitioner.spread.keys.when.muted=true" in messages[0]
    assert "kafka.delivery.timeout.ms = 1000 ms" in messages[0]


def test_a_first_run_may_exceed_the_share_and_the_next_waits_for_delivery_timeout() -> None:
    bench = Bench()
    bench.avoided = {P[0], P[1]}
    bench.append(unit([0] * 200))
    assert bench.accumulator.memory_of(bench.avoided) > LIMIT

    def check() -> None:
        bench.now += 100

    with pytest.raises(
        DeliveryError, match=r"rows for t-1 waited for kafka\.delivery\.timeout\.ms = 1000 ms .*rests"
    ):
        bench.append(unit([1]), check)
    assert bench.rows(1) == []
    # A task that is lost waits no longer.
    bench = Bench()
    bench.avoided = {P[0]}
    bench.append(unit([0] * 200))

    def lost() -> None:
        raise DeliveryError("lost")

    with pytest.raises(DeliveryError, match="lost"):
        bench.append(unit([0]), lost)


def test_keyless_rows_leave_muted_partitions_alone() -> None:
    free: list[int | None] = [None] * 60
    chosen = {p.partition for p in unit(free, {P[0], P[1], P[4]}).partitions}
    assert chosen <= {2, 3, 5}
    assert len(chosen) > 1
    everything = {p.partition for p in unit(free, set(P)).partitions}
    assert len(everything) > 1, "all muted is as none muted"
    # Keys of a muted partition without a leader are spread.
    infos = [PartitionMetadata("t", partition, 1 if partition else NO_LEADER) for partition in range(2)]
    topic = topic_of("t", None, tuple(infos))
    found = choices_of(topic, (), {P[0]}, ())
    assert (found.available, found.muted) == ((1,), (0,))


def test_keys_keep_their_partition_unless_they_are_spread() -> None:
    keys: list[bytes | None] = [b"k%d" % (number % 40) for number in range(400)]
    free: list[int | None] = [None] * 400
    home = partitions_for(pa.array(keys, pa.binary()), COUNT).tolist()
    bench = Bench()
    bench.append(unit(free, {P[0], P[1]}, keys=keys))
    for partition in range(COUNT):
        assert bench.rows(partition) == [row for row in range(400) if home[row] == partition]
    bench = Bench()
    bench.append(unit(free, {P[0], P[1]}, keys=keys, spread=True))
    assert bench.rows(0) == bench.rows(1) == []
    where: dict[bytes | None, set[int]] = {}
    for partition in range(2, COUNT):
        rows = bench.rows(partition)
        assert set(rows) >= {row for row in range(400) if home[row] == partition}, "healthy ones stay"
        for row in rows:
            where.setdefault(keys[row], set()).add(partition)
        moved = [row for row in rows if home[row] < 2]
        assert moved == sorted(moved)
        assert moved
    assert all(len(partitions) == 1 for partitions in where.values()), "equal keys stay together"
    # Rows with a partition column are never spread.
    keys = [b"k%d" % number for number in range(50)]
    bench = Bench()
    bench.append(unit([0] * 50, {P[0]}, keys=keys, spread=True))
    assert len(bench.rows(0)) == 50
