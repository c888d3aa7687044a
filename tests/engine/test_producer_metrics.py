"""Metrics by Kafka's names: what they count, where they are, that the page about them names them all."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kafka_sink
from kafka_sink.engine.deliveries import Deliveries, TaskDeliveries, task_metrics
from kafka_sink.errors import BufferExhaustedError
from kafka_sink.memory.pool import BufferPool
from kafka_sink.model import TopicPartition
from kafka_sink.options import parse
from kafka_sink.task.producer import Producer
from kafka_sink.transactions.task_attempt import INIT_TIME_METRIC, SEND_OFFSETS_TIME_METRIC
from tests.support.allocators import incremental_allocator
from tests.support.queues import partition_of
from tests.support.written_batches import written_batch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def acknowledge(deliveries: TaskDeliveries, raw: int, wire: int) -> None:
    deliveries.acknowledged([written_batch(partition_of(TopicPartition("t", 0)), 1, raw, wire, 0)])


def test_totals_and_averages_are_of_one_task() -> None:
    now = [0.0]
    pool = BufferPool(1 << 20, 16_384, clock_ms=lambda: now[0])
    allocator = incremental_allocator(pool, 1 << 19)

    def exhaust() -> None:
        with pytest.raises(BufferExhaustedError):
            allocator.open(1 << 20, 0)

    held = allocator.try_open(900_000)
    assert held is not None
    exhaust()
    held.release()
    allocator.begin()
    before = pool.metrics()
    assert before.max_used_bytes == 0
    held = allocator.try_open(20_000)
    assert held is not None
    exhaust()
    deliveries = TaskDeliveries()
    acknowledge(deliveries, 1000, 561)
    acknowledge(deliveries, 100, 161)
    deliveries.count(splits=2, moved=5)
    deliveries.sent([10.0, 40.0])
    deliveries.sent([])
    found = task_metrics(pool.metrics(), before, deliveries.counts())
    assert found["buffer-exhausted-total"] == 1
    assert found["buffer-used-bytes-max"] == 32_768
    assert found["buffer-saved-bytes-max"] == (1 << 19) - 32_768
    assert found["buffer-available-bytes"] == (1 << 20) - 32_768
    assert (found["batch-size-avg"], found["batch-size-max"]) == (361, 561)
    # The header is not what compression works on.
    assert found["compression-rate-avg"] == pytest.approx((0.5 + 1.0) / 2)
    assert (found["batch-split-total"], found["record-moved-total"]) == (2, 5)
    assert (found["record-queue-time-avg"], found["record-queue-time-max"]) == (25.0, 40.0)
    assert found["record-size-avg"] == deliveries.counts().raw_bytes / 2
    assert deliveries.counts().requests == 2


def test_nothing_acknowledged_yet() -> None:
    pool = BufferPool(1000, 100, clock_ms=lambda: 0.0).metrics()
    found = task_metrics(pool, pool, Deliveries())
    assert (found["batch-size-avg"], found["compression-rate-avg"]) == (0.0, 0.0)


def test_the_page_names_every_metric_and_no_other() -> None:
    producer = Producer(parse({"kafka.bootstrap.servers": "127.0.0.1:1"}).options)
    names = {*producer.metrics(), INIT_TIME_METRIC, SEND_OFFSETS_TIME_METRIC}
    producer.close()
    section = PAGE.read_text().split("## Metrics of a producer")[1].split("\n## ")[0]
    assert set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", section)) == names


def test_asking_where_no_task_has_run_loads_nothing() -> None:
    ask = "import sys, kafka_sink; assert kafka_sink.producer_metrics() == []; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
    assert "producer_metrics" in kafka_sink.__all__
