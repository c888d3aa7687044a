"""A few rounds of chaos in every run, and the proof that a round can fail. ``make chaos`` runs many."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kafka_sink.cluster.broker import Broker
from kafka_sink.cluster.partition import Partition
from kafka_sink.engine.batch import ProducerBatch
from kafka_sink.engine.response_classifier import Verdict
from kafka_sink.engine.responses import ResponseHandler
from local_kafka import LocalBroker
from tests.chaos.history import KEYS, Attempt, Invariant, check
from tests.chaos.rounds import RoundReport, await_in_sync, read, run_round, strike
from tests.chaos.schedule import BACKOFFS, Event, Fault, Schedule, Worker, draw
from tests.support.proxy import ProxyCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.chaos
_ROWS = 2_000
_SPARK_TASKS = 2
_PATIENT = {"request.timeout.ms": 2_000, "delivery.timeout.ms": 90_000}


@pytest.mark.parametrize("fault", [Fault.KILL, Fault.FREEZE, None], ids=lambda f: f.name if f else "WIRE")
def test_rounds_keep_every_promise(cluster3: LocalBroker, fault: Fault | None) -> None:
    schedule = draw(11, fault)
    report = run_round(cluster3, schedule, f"chaos-{fault.name if fault else 'wire'}", _PATIENT)
    assert not report.violations, str(report)
    assert not report.failures
    assert report.retries > 0, "nothing was hit"
    assert sum(report.faults.values()) == len(schedule.wire) + len(schedule.brokers)


def test_a_round_through_spark(spark: SparkSession, cluster3: LocalBroker) -> None:
    """Job after job while a broker is frozen, killed and restarted and connections break."""
    topic, partitions = "chaos-spark", 6
    cluster3.create_topic(topic, partitions, config={"min.insync.replicas": 2})
    schedule = draw(23, Fault.FREEZE_KILL, wire=4)
    attempts: list[Attempt] = []
    with ProxyCluster(cluster3.bootstrap_servers) as proxies:
        faults = threading.Thread(target=strike, args=(cluster3, proxies, schedule), name="chaos-faults")
        # The first job starts the workers. Jobs stay in this thread: Spark finds no data source from another.
        while not attempts or faults.is_alive():
            first = len(attempts)
            _spark_job(spark, proxies.bootstrap_servers, topic, first)
            attempts.extend(Attempt(part, first + part, 0, _ROWS, True) for part in range(_SPARK_TASKS))
            if first == 0:
                faults.start()
    await_in_sync(cluster3, topic)
    assert len(attempts) >= 2 * _SPARK_TASKS, "no job ran beside the faults"
    violations = check(attempts, read(cluster3.bootstrap_servers, topic, partitions))
    assert not violations, str(violations)


def _spark_job(spark: SparkSession, bootstrap_servers: str, topic: str, first_task: int) -> None:
    """As ``key_of`` and ``value_of`` make rows, in SQL."""
    options = {f"kafka.{name}": str(value) for name, value in {**_PATIENT, **BACKOFFS}.items()}
    rows = spark.range(0, _SPARK_TASKS * _ROWS, 1, _SPARK_TASKS).selectExpr(
        f"{first_task} + id div {_ROWS} AS task", f"id % {_ROWS} AS number"
    )
    (
        rows.selectExpr(
            f"concat('k', number % {KEYS}) AS key",
            "concat(task, ' 0 ', number, ' ', repeat('x', cast(number * 7 % 90 AS int))) AS value",
        )
        .write.format("kafka-chunked")
        .mode("append")
        .option("kafka.bootstrap.servers", bootstrap_servers)
        .option("topic", topic)
        .options(**options)
        .save()
    )


# -- that it can fail ------------------------------------------------------------------------------------

_STEADY = Worker(
    units=100,
    unit_rows=30,
    pause_ms=10,
    options=(
        *BACKOFFS.items(),
        *_PATIENT.items(),
        ("client.id", "proof"),
        ("linger.ms", 0),
        ("batch.size", 600),
        ("max.in.flight.requests.per.connection", 5),
    ),
)
# Each of three partitions has another leader, so broker 0 leads one.
_PROOF = Schedule(0, 3, brokers=(), wire=(), workers=(_STEADY,), strict=False)
_SWALLOWED = replace(_PROOF, wire=tuple(Event(250, Fault.SWALLOW, 0, 0, 2) for _ in range(3)))
_LOST_IN_FLIGHT = replace(_PROOF, wire=(Event(600, Fault.LOSE, 0, 500),) * 4)


def broken(report: RoundReport) -> set[Invariant]:
    assert not report.failures
    return set(report.violations.counts)


def test_without_idempotence_a_swallowed_response_doubles_rows_and_does_nothing_else(
    cluster3: LocalBroker,
) -> None:
    report = run_round(cluster3, _SWALLOWED, "proof", {"enable.idempotence": "false"})
    assert report.retries > 0
    # Of a row that is there twice, fewer offsets are reported than there are.
    found = broken(report)
    assert Invariant.ONCE in found
    assert found <= {Invariant.ONCE, Invariant.REPORTED}


def _insert_last(self: Partition, batch: ProducerBatch) -> None:
    """The bug: what comes back from a broken connection goes behind what has not been sent yet."""
    self.batches.append(batch)


def _call_it_written(
    self: ResponseHandler, batch: ProducerBatch, broker: Broker, _outcome: Verdict, now_ms: float
) -> None:
    """The bug: whatever ends a request acknowledges its batches."""
    self._succeed([(batch, -1, -1)], broker, now_ms)


@pytest.mark.parametrize(
    ("owner", "method", "bug", "found"),
    [
        (Partition, "insert", _insert_last, Invariant.ORDERED),
        (ResponseHandler, "_apply", _call_it_written, Invariant.PRESENT),
    ],
    ids=["retries go last", "failures count as written"],
)
def test_injected_bugs_are_caught(
    cluster3: LocalBroker,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    bug: object,
    found: Invariant,
) -> None:
    monkeypatch.setattr(owner, method, bug)
    report = run_round(cluster3, _LOST_IN_FLIGHT, f"bug-{found.name}", {"enable.idempotence": "false"})
    assert found in broken(report)
