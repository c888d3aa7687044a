"""Attempts that Spark kills, through real Spark: nothing arrives once it has let go of them."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from kafka_sink import register
from local_kafka import LocalBroker
from tests.support.proxy import ProxyCluster
from tests.support.topics import log_ends, save
from tests.support.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 2
PATIENCE_S = 60.0
ROWS = 300_000
# 600 bytes a row: at the proxy's 1 MB/s far more than a job waits for.
VALUE = "concat(id, '-', repeat(md5(string(id)), 18))"
# An executor's JVM that waits for its worker does not notice an interrupt. Then its monitor ends the worker:
# it looks every 2 s and waits spark.python.task.killTimeout, 2 s more.
JVM_NOTICES_S = 4.5
JVM_NOTICES_AT_LATEST_S = 30.0


@pytest.fixture
def throttled(broker: LocalBroker) -> Iterator[str]:
    """The broker behind a line of 1 MB/s, with a broker's own receive buffer."""
    with ProxyCluster(broker.bootstrap_servers) as proxies:
        proxies[0].receive_buffer(102_400)
        proxies[0].slow(0.0, 32_768, 32.0)
        yield proxies.bootstrap_servers


def await_standstill(rows: Callable[[], int]) -> None:
    """Once the JVM has let go nothing more comes. What the tasks hold would take a minute."""
    seen = [(time.monotonic(), rows())]

    def settled() -> bool:
        now, found = time.monotonic(), rows()
        if found != seen[-1][1]:
            seen.append((now, found))
        return now - seen[0][0] >= JVM_NOTICES_S and now - seen[-1][0] >= 1.5

    until(settled, "no more rows come", JVM_NOTICES_AT_LATEST_S, poll_s=0.1)


def test_after_a_cancelled_job_nothing_more_is_written(
    spark: SparkSession, broker: LocalBroker, topic: str, throttled: str
) -> None:
    ended = threading.Event()

    def job() -> None:
        register(spark)
        spark.sparkContext.setJobGroup("killed", "", interruptOnCancel=True)
        frame = spark.range(0, ROWS, 1, 2).selectExpr(f"{VALUE} AS value")
        options = {"kafka.bootstrap.servers": throttled, "topic": topic, "kafka.compression.type": "none"}
        try:
            save(frame, options)
        except Exception:  # noqa: BLE001 - Spark's class for it differs by version
            ended.set()

    thread = threading.Thread(target=job)
    thread.start()

    def written() -> int:
        return sum(log_ends(broker.bootstrap_servers, topic))

    until(lambda: written() >= 2000, "the rows come", PATIENCE_S, poll_s=0.02)
    spark.sparkContext.cancelJobGroup("killed")
    await_standstill(written)
    thread.join(PATIENCE_S)
    assert ended.is_set()


def test_workers_know_their_socket(spark: SparkSession) -> None:
    """executor_socket rests on how PySpark's worker is written: this says when that changes."""

    def found(batches: Iterator[object]) -> Iterator[object]:
        import pyarrow as pa

        from kafka_sink.spark.executor_connection import executor_socket

        for _ in batches:
            descriptor = executor_socket()
            is_connected = False
            if descriptor is not None:
                with socket.socket(fileno=os.dup(descriptor)) as one:
                    is_connected = bool(one.getpeername() or one.getsockname())
            yield pa.record_batch({"found": pa.array([is_connected])})

    frame = spark.range(0, 2, 1, 2).mapInArrow(found, "found boolean")
    assert [row.found for row in frame.collect()] == [True, True]
