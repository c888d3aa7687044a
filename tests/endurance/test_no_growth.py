"""Producers that open, send, meet faults and close, over and over, leave nothing behind.

80 cycles and 12 micro-batches in a usual run; ``make endurance`` runs 2,000 and 1,000.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kafka_sink.errors import BufferExhaustedError, KafkaSinkError, MetadataTimeoutError
from kafka_sink.memory.pool import BufferPool
from kafka_sink.model import TaskResult
from kafka_sink.options import parse
from kafka_sink.task.producer import LIVE_PRODUCERS, Producer
from kafka_sink.task.producer_cache import PRODUCERS
from kafka_sink.task.worker_parts import POOLS
from local_kafka import LocalBroker
from tests.support import footprint
from tests.support.effort import EFFORT, tries
from tests.support.fake_broker import PRODUCE, FakeCluster
from tests.support.fake_replies import SWALLOWED, Refuse, error
from tests.support.processes import below, command_of
from tests.support.scripted_cluster import TOPIC, rows, send, sender_threads, task, task_options
from tests.support.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

pytestmark = pytest.mark.timeout(1200)

CYCLES_PER_CLUSTER = 20
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
# A producer that is not let go of is hundreds of objects and 100 kB and more.
OBJECTS_PER_CYCLE = 25
BYTES_PER_CYCLE = 4096
FEW = {"buffer_memory": 32_768, "batch_size": 16_384, "max_block_ms": 20}
# What allocators keep for themselves, whatever the number of cycles.
SLACK_BYTES = 12 << 20
# Spark's workers cannot be asked to release what Arrow keeps.
WORKER_SLACK_BYTES = SLACK_BYTES + footprint.ARROW_SEGMENT_BYTES


class Cycles:
    """Tasks of all kinds on scripted clusters, each with the memory pools looked at afterwards."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.kinds: list[Callable[[FakeCluster], None]] = [
            self.flushes,
            self.opens_and_closes,
            self.is_refused_for_a_while,
            self.loses_connections,
            self.is_split,
            self.is_refused_for_good,
            self.raises,
            self.runs_out_of_memory,
        ]

    def run(self, count: int) -> None:
        for _ in range(-(-count // CYCLES_PER_CLUSTER)):
            with FakeCluster({TOPIC: 4}, brokers=2, max_message_bytes=40_000) as cluster:
                for kind in itertools.islice(itertools.cycle(self.kinds), CYCLES_PER_CLUSTER):
                    kind(cluster)
                    self.seen[kind.__name__] += 1
                    self.check(cluster)
                    cluster.requests.clear()
                PRODUCERS.close()
        assert sender_threads() == []
        assert not LIVE_PRODUCERS

    def check(self, cluster: FakeCluster) -> None:
        usual = parse(task_options(cluster)).options.buffer_memory
        for memory in (usual, FEW["buffer_memory"]):
            metrics = POOLS.allocator("incremental", memory, 16_384).pool.metrics()
            assert (metrics.buffer_available_bytes, metrics.heap_bytes) == (metrics.buffer_total_bytes, 0)
            kept = metrics.allocated_bytes, metrics.waiting_threads, metrics.full_strategy_bytes
            assert kept == (0, 0, 0)

    def writes(self, cluster: FakeCluster) -> TaskResult:
        some = [rows(0, self.chance.randrange(1, 300), partition) for partition in range(4)]
        return send(cluster, *some, compression_type=self.chance.choice(CODECS), batch_size=100_000)

    def flushes(self, cluster: FakeCluster) -> None:
        for _ in range(3):
            assert self.writes(cluster).records

    def opens_and_closes(self, cluster: FakeCluster) -> None:
        PRODUCERS.close()
        self.flushes(cluster)
        PRODUCERS.close()

    def is_refused_for_a_while(self, cluster: FakeCluster) -> None:
        cluster.script(PRODUCE, error(6), error(19), error(5))
        assert self.writes(cluster).retries

    def loses_connections(self, cluster: FakeCluster) -> None:
        cluster.script(PRODUCE, Refuse(disconnect=True), SWALLOWED)
        assert self.writes(cluster).retries

    def is_split(self, cluster: FakeCluster) -> None:
        assert send(cluster, rows(0, 2000), batch_size=200_000, linger_ms=1000).splits

    def is_refused_for_good(self, cluster: FakeCluster) -> None:
        cluster.script(PRODUCE, error(87))
        with pytest.raises(KafkaSinkError):
            self.writes(cluster)

    def raises(self, cluster: FakeCluster) -> None:
        def run() -> None:
            with task(cluster, batch_size=100_000) as producer:
                producer.send(rows(0, 100))
                raise ValueError("the task's own")

        with pytest.raises(ValueError, match="the task's own"):
            run()

    def runs_out_of_memory(self, cluster: FakeCluster) -> None:
        def run() -> None:
            with task(cluster, **FEW) as producer:
                # max.block.ms bounds the look-up of the topic too, which a busy machine may not do in time.
                until(lambda: is_known(producer), "the topic's metadata")
                # Nobody takes what the task sends.
                cluster.freeze(0)
                for _ in range(1000):
                    producer.send(rows(0, 500))

        with pytest.raises(BufferExhaustedError):
            run()
        cluster.thaw(0)


def is_known(producer: Producer) -> bool:
    """Whether a row was taken, for which the topic must be known."""
    try:
        producer.send(rows(0, 1))
    except MetadataTimeoutError:
        return False
    return True


def objects_and_footprint() -> tuple[int, footprint.Footprint]:
    for _ in range(3):
        gc.collect()
    footprint.release_arrow()
    return len(gc.get_objects()), footprint.of_process(os.getpid())


def producers_and_pools() -> list[Producer | BufferPool]:
    gc.collect()
    return [found for found in gc.get_objects() if isinstance(found, Producer | BufferPool)]


def test_cycles_leave_nothing_behind() -> None:
    count = tries(80)
    # Of earlier tests.
    others = len(producers_and_pools())
    cycles = Cycles(seed=1)
    # What libraries keep for themselves they have then: measured after 40 cycles 2,000 grew by 47 MiB, after
    # 500 by nothing.
    cycles.run(max(2 * CYCLES_PER_CLUSTER, count // 4))
    objects, before = objects_and_footprint()
    started = time.monotonic()
    cycles.run(count)
    more_objects, after = objects_and_footprint()
    print(
        f"{count} cycles in {time.monotonic() - started:.0f} s: objects {objects} -> {more_objects}, "
        f"threads {before.threads} -> {after.threads}, files {before.files} -> {after.files}, sockets "
        f"{before.sockets} -> {after.sockets}, private MiB {before.private_bytes / 2**20:.1f} -> "
        f"{after.private_bytes / 2**20:.1f}"
    )
    assert len(producers_and_pools()) <= others
    # What earlier tests closed may have ended only now.
    assert after.threads <= before.threads
    assert after.files <= before.files
    assert after.sockets <= before.sockets
    assert more_objects - objects < OBJECTS_PER_CYCLE * count
    assert after.private_bytes - before.private_bytes < SLACK_BYTES + BYTES_PER_CYCLE * count
    assert min(cycles.seen.values()) >= count // len(cycles.kinds)


def python_workers(of: int) -> set[int]:
    """Spark's, which do the tasks; their daemon is one of them."""
    return {pid for pid in below(of) if "pyspark.daemon" in command_of(pid)}


def test_micro_batches_leave_nothing_behind(spark: SparkSession, broker: LocalBroker, tmp_path: Path) -> None:
    count = 12 if EFFORT <= 1 else 1000
    broker.create_topic("endurance", 4)
    frame = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", 200)
        .option("numPartitions", 2)
        .load()
    )
    query = (
        frame.selectExpr("cast(value as string) as key", "cast(timestamp as string) as value")
        .writeStream.format("kafka-chunked")
        .option("kafka.bootstrap.servers", broker.bootstrap_servers)
        .option("topic", "endurance")
        .option("log.summary", "false")
        .option("checkpointLocation", str(tmp_path))
        .trigger(processingTime="0 seconds")
        .start()
    )
    try:
        until_batch(query, count // 2)
        before = {pid: footprint.of_process(pid) for pid in python_workers(os.getpid())}
        until_batch(query, count)
        still = python_workers(os.getpid()) & before.keys()
        after = {pid: footprint.of_process(pid) for pid in still}
    finally:
        query.stop()
    assert after
    for pid, held in after.items():
        print(f"worker {pid} after {count // 2} and {count} micro-batches: {before[pid]} {held}")
        assert (held.threads, held.sockets) <= (before[pid].threads + 1, before[pid].sockets + 1)
        assert held.private_bytes - before[pid].private_bytes < WORKER_SLACK_BYTES + 20_000 * count


def until_batch(query: StreamingQuery, number: int) -> None:

    def has_come() -> bool:
        assert query.isActive, query.exception()
        return bool((query.lastProgress or {"batchId": -1})["batchId"] >= number)

    until(has_come, f"micro-batch {number}", within_s=240 + number, poll_s=0.1)
