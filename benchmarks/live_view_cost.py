"""The cost of the live view: processor time of a report in its task and in the coordinator, and of the pages.

    python -m benchmarks.live_view_cost

A task reports once a second. The numbers are for a task that has written to 100 topics over 20 brokers, and
for an application with 100 such tasks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kafka_sink.clock import ROWS, TaskActivity, monotonic_ms
from kafka_sink.cluster.partition import Partition
from kafka_sink.cluster.topic_limits import TopicLimits
from kafka_sink.coordinator.live.application import ApplicationMetrics
from kafka_sink.coordinator.live.messages import ReportChannel, TaskIdentity, TaskReport
from kafka_sink.coordinator.live.prometheus import exposition
from kafka_sink.coordinator.schema import decode, encode
from kafka_sink.model import TopicPartition
from kafka_sink.options import parse
from kafka_sink.task.producer import Producer
from tests.support.written_batches import written_batch

TOPICS, BROKERS, TASKS, REPEATS = 100, 20, 100, 300


def processor_us(call: Callable[[], object], repeats: int) -> float:
    """Microseconds of this thread's processor time for one call."""
    started = time.thread_time()
    for _ in range(repeats):
        call()
    return (time.thread_time() - started) / repeats * 1e6


def busy_producer() -> Producer:
    """A producer whose task has written to all topics and brokers."""
    producer = Producer(parse({"kafka.bootstrap.servers": "127.0.0.1:1"}).options)
    producer.begin()
    for number in range(20 * TOPICS):
        topic = f"orders-of-region-{number % TOPICS}"
        place = Partition(TopicPartition(topic, number // TOPICS), TopicLimits(topic, 16_384))
        producer.accumulator.deliveries.on_acknowledged([written_batch(place, 1000, 100_000, 30_000, number)])
        counts = producer.cluster.broker(number % BROKERS).counts
        counts.requests += 1
        counts.latency_ms += 12.0
        counts.latency_buckets[2] += 1
    return producer


def measure(repeats: int = REPEATS) -> dict[str, float]:
    """Processor time in microseconds, and its share of one core's second."""
    producer = busy_producer()
    try:
        channel = ReportChannel(producer.report, lambda: 0.0, interval_ms=0.0)

        def report() -> bytes:
            message = channel.next_message(1000.0)
            assert message is not None
            return encode(message)

        reports = []
        for task in range(TASKS):
            channel.begin(TaskIdentity("write", task, host="host"))
            reports.append(report())
        channel.begin(TaskIdentity("write", 0, host="host"))
        report_us = processor_us(report, repeats)
    finally:
        producer.close(abort=True)
    metrics = ApplicationMetrics()
    numbers = iter(range(1_000_000))

    def receive() -> None:
        message = decode(reports[next(numbers) % TASKS])
        assert isinstance(message, TaskReport)
        metrics.on_report(message, monotonic_ms())

    receive_us = processor_us(receive, repeats)
    activity = TaskActivity(monotonic_ms)

    def wait() -> None:
        with activity.waiting(ROWS):
            pass

    seconds = iter(range(1, 1_000_000))
    found = {
        "report_us": report_us,
        "report_bytes": float(len(reports[0])),
        "receive_us": receive_us,
        "sample_us": processor_us(lambda: metrics.sample(next(seconds) * 1_000.0), 50),
        "snapshot_us": processor_us(lambda: metrics.snapshot(monotonic_ms()), 50),
        "metrics_us": processor_us(lambda: exposition(metrics.snapshot(monotonic_ms())), 20),
        "activity_us": processor_us(wait, 20_000),
    }
    found["task_core_share"] = report_us / 1e6
    # Reports of all tasks, a sample, and two snapshots a second for clients.
    of_coordinator = TASKS * receive_us + found["sample_us"] + 2 * found["snapshot_us"]
    found["coordinator_core_share"] = of_coordinator / 1e6
    found["job_share"] = (TASKS * report_us + of_coordinator) / (TASKS * 1e6)
    return {name: round(value, 6) for name, value in found.items()}


def main() -> None:
    for name, value in measure().items():
        print(f"{name:24} {value:,.6g}")


if __name__ == "__main__":
    main()
