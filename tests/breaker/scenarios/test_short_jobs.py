"""Short keyless jobs that begin while a broker is frozen: what was never sent to it goes elsewhere."""

from __future__ import annotations

import logging
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pytest

from kafka_sink.errors import DeliveryError
from kafka_sink.model import TaskResult
from kafka_sink.network import apis, requests
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer import Producer
from kafka_sink.task.producer_cache import PRODUCERS, task_producer
from local_kafka import LocalBroker
from tests.support.fake_broker import FakeCluster
from tests.support.scripted_cluster import TOPIC, written
from tests.support.sink_time import slow_time
from tests.support.topics import moved_in, numbers_in
from tests.support.waiting import until

PARTITIONS = 6
ROWS = 2_000
FROZEN = 1
SHORT = {"kafka.delivery.timeout.ms": "3000", "kafka.request.timeout.ms": "2900"}
BREAKER = "kafka.producer.circuit.breaker."


def options(bootstrap: str, topic: str, **more: str) -> dict[str, str]:
    raw = {
        "kafka.bootstrap.servers": bootstrap,
        "topic": topic,
        "kafka.batch.size": "16384",
        "kafka.delivery.timeout.ms": "20000",
        "kafka.request.timeout.ms": "5000",
        # A connection then counts as silent after 0.4 s.
        f"{BREAKER}slow.request.min.ms": "100",
    }
    return raw | more


def ask_for_producer_id(address: str) -> None:
    """Returns once this broker has given one.

    A broker gets producer ids from the controller, a thousand at a time. One that has none yet and whose
    controller is frozen gives none before the next controller is elected.
    """
    host, _, port = address.rpartition(":")
    header = requests.encode_header(apis.INIT_PRODUCER_ID, 1, 1, "test")
    request = header + requests.encode_init_producer_id(1, -1, -1)
    with socket.create_connection((host, int(port)), 60) as connection:
        connection.settimeout(60)

        def is_given() -> bool:
            connection.sendall(struct.pack(">i", len(request)) + request)
            with connection.makefile("rb") as responses:
                (size,) = struct.unpack(">i", responses.read(4))
                # Correlation id and throttle time come before the error code.
                return struct.unpack_from(">h", responses.read(size), 8) == (0,)

        until(is_given, "a producer id", poll_s=0.05)


@contextmanager
def new_worker(raw: dict[str, str], plan: ColumnPlan) -> Iterator[Producer]:
    """A task without connections from an earlier one, and without a coordinator."""
    PRODUCERS.close()
    with task_producer(parse(raw).options, plan) as producer:
        yield producer


def write(raw: dict[str, str], first: int, count: int = ROWS) -> TaskResult:
    """Rows without a key; both readers of logs find their numbers."""
    values = [b"%d:<%d>" % (number, number) + b"x" * 200 for number in range(first, first + count)]
    with new_worker(raw, ColumnPlan.of([("value", "binary")], raw["topic"])) as producer:
        producer.send(pa.record_batch({"value": pa.array(values, pa.binary())}))
        return producer.finish()


def test_rows_that_were_never_sent_leave_a_frozen_broker(caplog: pytest.LogCaptureFixture) -> None:
    """Catches: a broker that accepts connections and says nothing more, which counted as connected."""
    with FakeCluster({TOPIC: PARTITIONS}, brokers=3) as cluster:
        raw = options(cluster.bootstrap_servers, TOPIC)
        cluster.freeze(FROZEN)
        with caplog.at_level(logging.WARNING, "kafka_sink"):
            results = [write(raw, job * ROWS) for job in range(3)]
        found = [number for partition in range(PARTITIONS) for number in written(cluster, partition)]
        assert sorted(found) == list(range(3 * ROWS))
        assert not any(written(cluster, partition) for partition in range(FROZEN, PARTITIONS, 3))
        late = [moved_in(written(cluster, partition)) for partition in range(PARTITIONS)]
    moved = sum(int(result.metrics["record-moved-total"]) for result in results)
    lines = [one.getMessage() for one in caplog.records if "(not written yet) from" in one.getMessage()]
    assert 0 < sum(map(len, late)) <= moved
    assert sum(int(line.split()[1]) for line in lines) == moved
    assert all("no connection to it was ready within" in line for line in lines)


def test_rows_with_keys_and_partitions_stay_where_they_belong() -> None:
    plan = ColumnPlan.of([("key", "binary"), ("value", "binary"), ("partition", "int")], TOPIC)
    with FakeCluster({TOPIC: PARTITIONS}, brokers=3) as cluster:
        raw = options(cluster.bootstrap_servers, TOPIC, **SHORT)
        cluster.freeze(FROZEN)
        table = pa.table(
            {
                "key": pa.array([b"%d" % number for number in range(50)] + [None] * 6, pa.binary()),
                "value": pa.array([b"<1>"] * 56, pa.binary()),
                "partition": pa.array([None] * 50 + [FROZEN] * 6, pa.int32()),
            }
        )
        with slow_time() as sinks, new_worker(raw, plan) as producer:
            producer.send(table)
            until(lambda: producer.accumulator.incomplete <= 2, "the others are written")
            sinks.go_on()
            with pytest.raises(DeliveryError, match="has muted broker"):
                producer.finish()
            assert producer.metrics()["record-moved-total"] == 0


@pytest.mark.timeout(240)
def test_short_jobs_outlive_a_stopped_process(cluster3: LocalBroker) -> None:
    """SIGSTOP: the kernel goes on accepting connections for the broker."""
    topic = "short-jobs"
    cluster3.create_topic(topic, PARTITIONS, replication_factor=1)
    for address in cluster3.bootstrap_servers.split(","):
        ask_for_producer_id(address)
    # A job whose rows stay with the frozen broker fails, however long this is; brokers may be slow meanwhile.
    raw = options(cluster3.bootstrap_servers, topic, **{"kafka.delivery.timeout.ms": "60000"})
    write(raw, 0)
    jobs, moved = 1, 0.0
    cluster3.freeze(FROZEN)
    try:
        frozen = time.monotonic()
        # Until the cluster gives it up, after the broker's session of 5 s, and some time beyond.
        while time.monotonic() < frozen + 9.0 or jobs < 8:
            moved += write(raw, jobs * ROWS).metrics["record-moved-total"]
            jobs += 1
    finally:
        cluster3.thaw(FROZEN)
    write(raw, jobs * ROWS)
    assert moved > 0
    found = numbers_in(cluster3.bootstrap_servers, topic)
    assert sorted(n for numbers in found.values() for n in numbers) == list(range((jobs + 1) * ROWS))
