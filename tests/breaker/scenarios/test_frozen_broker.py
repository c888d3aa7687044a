"""One of three real brokers freezes while a task writes: its partitions are muted, the others go on."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pyarrow as pa

from kafka_sink.model import TaskResult
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer import Producer
from kafka_sink.task.producer_cache import task_producer
from local_kafka import LocalBroker
from tests.support.scripted_cluster import PATIENCE_S
from tests.support.slow_machine import Stalls
from tests.support.topics import moved_in, numbers_in
from tests.support.waiting import repeat_until

ROWS = 500
PARTITIONS = 6
WARM_S = 1.0
WARM_BATCHES = 20
FROZEN_S = 3.0


def keyless(number: int) -> pa.RecordBatch:
    start = number * ROWS
    values = [b"%d:" % n + b"x" * 200 for n in range(start, start + ROWS)]
    return pa.record_batch({"value": pa.array(values, pa.binary())})


def write(
    cluster: LocalBroker, topic: str, work: Callable[[Producer], None], **options: object
) -> TaskResult:
    raw = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "topic": topic, "kafka.batch.size": "16384"}
    raw |= {f"kafka.{name.replace('_', '.')}": str(value) for name, value in options.items()}
    with task_producer(parse(raw).options, ColumnPlan.of([("value", "binary")], topic)) as producer:
        work(producer)
        return producer.finish()


def test_keyless_rows_flow_on_while_a_broker_is_frozen(cluster3: LocalBroker) -> None:
    """Catches: a task that stalls with the frozen broker, rows lost or doubled or out of order after it."""
    topic = "frozen-keyless"
    cluster3.create_topic(topic, PARTITIONS, replication_factor=1)
    taken: list[float] = []
    muted_after: list[float] = []

    def work(producer: Producer) -> None:
        gate = producer.breaker
        assert gate is not None
        number = 0

        def send_one() -> None:
            nonlocal number
            producer.send(keyless(number))
            number += 1
            taken.append(time.monotonic())

        def send_until(condition: Callable[[], bool]) -> None:
            repeat_until(condition, send_one, within_s=PATIENCE_S, pause_s=0.01)

        acknowledged = producer.sender.deliveries
        begun = time.monotonic()
        # What is usual must be known: new brokers take their time at first, on a busy machine a long one.
        send_until(
            lambda: (
                [one.batches >= WARM_BATCHES for one in acknowledged.partitions()] == [True] * PARTITIONS
                and time.monotonic() > begun + WARM_S
            )
        )
        victim = cluster3_leader(producer, topic)
        cluster3.freeze(victim)
        started = time.monotonic()
        try:
            send_until(lambda: bool(gate.mutes))
            muted_after.append(time.monotonic() - started)
            before = acknowledged.counts().records
            held = producer.accumulator.held_bytes(gate.mutes)
            send_until(
                lambda: (
                    acknowledged.counts().records > before + 50 * ROWS
                    and time.monotonic() > started + FROZEN_S
                )
            )
            assert producer.accumulator.held_bytes(gate.mutes) <= held
        finally:
            cluster3.thaw(victim)
            thawed, lost_s = time.monotonic(), stalls.total_s
        send_until(lambda: not gate.mutes)
        assert time.monotonic() - thawed < 5.0 + stalls.total_s - lost_s
        sent.append(number * ROWS)

    sent: list[int] = []
    with Stalls() as stalls:
        result = write(cluster3, topic, work)
    assert muted_after[0] < 4.0 + stalls.total_s
    pauses = [later - earlier for earlier, later in itertools.pairwise(taken)]
    assert max(pauses) < 2.0 + 2 * stalls.longest_s
    assert result.records == sent[0]
    assert result.breaker_trips >= 1
    found = numbers_in(cluster3.bootstrap_servers, topic, PARTITIONS)
    assert sorted(n for numbers in found.values() for n in numbers) == list(range(sent[0]))
    late = [moved_in(numbers) for numbers in found.values()]
    assert sum(map(len, late)) <= result.metrics["record-moved-total"], "rows that were sent keep their order"


def cluster3_leader(producer: Producer, topic: str) -> int:
    """Who leads partition 0."""
    metadata = producer.cluster.topic(topic)
    assert metadata is not None
    return metadata.partitions[0].leader
