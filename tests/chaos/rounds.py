"""One round: producers under load on three real brokers, faults, and the check of what the log holds then."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
from confluent_kafka.admin import AdminClient

from kafka_sink.errors import KafkaSinkError
from kafka_sink.options import SinkOptions, parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer_cache import PRODUCERS, task_producer
from local_kafka import LocalBroker
from tests.chaos.history import Attempt, Invariant, Record, Violations, check, key_of, value_of
from tests.chaos.injector import Injector
from tests.chaos.schedule import Fault, Schedule, Worker
from tests.support.proxy import ProxyCluster
from tests.support.topics import messages
from tests.support.waiting import until

# delivery.timeout.ms is the longest bound of a task; then there is the machine's own slowness.
_PATIENCE_S = 150.0
_SYNC_PATIENCE_S = 120.0
_MAX_TASKS = 400


@dataclass
class Load:
    """Producers' tasks, and what they did, in the order of their attempts; each worker's own are in order."""

    plan: ColumnPlan
    stop: threading.Event = field(default_factory=threading.Event)
    attempts: list[Attempt] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    retries: int = 0
    requests: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards what was done

    def work(self, index: int, worker: Worker, options: SinkOptions) -> None:
        """Task after task, each until an attempt is acknowledged, as Spark retries them."""
        for number in range(_MAX_TASKS):
            attempts = itertools.count()
            while not self._attempt(index, worker, options, index * 10_000 + number, next(attempts)):
                pass
            if self.stop.is_set():
                return
        self.stop.wait()

    def _attempt(self, index: int, worker: Worker, options: SinkOptions, task: int, attempt: int) -> bool:
        """Whether it was acknowledged."""
        result = None
        try:
            with task_producer(options, self.plan) as producer:
                for unit in range(worker.units):
                    producer.send(ordered_rows_of(task, attempt, unit * worker.unit_rows, worker.unit_rows))
                    self.stop.wait(worker.pause_ms / 1000)
                result = producer.finish()
        except KafkaSinkError as error:
            with self.lock:
                self.failures[f"{type(error).__name__}: {error}"] += 1
        rows = worker.units * worker.unit_rows
        with self.lock:
            self.attempts.append(Attempt(index, task, attempt, rows, result is not None, result))
            if result is not None:
                self.retries += result.retries
                self.requests += result.requests
        return result is not None


@dataclass(frozen=True)
class RoundReport:
    """What a round did and found. ``rows``: acknowledged ones; ``seconds``: while the load ran."""

    schedule: Schedule
    violations: Violations
    rows: int
    attempts: int
    failures: Counter[str]
    retries: int
    requests: int
    faults: Counter[Fault]
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.rows:,} rows, {self.attempts} task attempts ({self.failures.total()} failed), "
            f"{self.requests} requests, {self.retries} retries, {self.faults.total()} faults, "
            f"{self.seconds:.1f} s: " + (f"BROKEN {self.violations}" if self.violations else "ok")
        )


def ordered_rows_of(task: int, attempt: int, start: int, count: int) -> pa.RecordBatch:
    """Rows start .. start+count-1 of an attempt."""
    numbers = range(start, start + count)
    return pa.record_batch(
        {
            "key": pa.array([key_of(number) for number in numbers], pa.binary()),
            "value": pa.array([value_of(task, attempt, number) for number in numbers], pa.binary()),
        }
    )


def run_round(
    cluster: LocalBroker, schedule: Schedule, topic: str, overrides: Mapping[str, object] | None = None
) -> RoundReport:
    """Runs producers until all faults are over, and compares the topic with their results.

    ``overrides`` are producer options that win over the schedule's.
    """
    cluster.create_topic(topic, schedule.partitions, config={"min.insync.replicas": 2})
    load = Load(ColumnPlan.of([("key", "binary"), ("value", "binary")], topic))
    with ProxyCluster(cluster.bootstrap_servers) as proxies:
        workers = [
            threading.Thread(
                target=load.work,
                args=(index, worker, _options(worker, proxies, topic, overrides or {})),
                name=f"chaos-worker-{index}",
                daemon=True,
            )
            for index, worker in enumerate(schedule.workers)
        ]
        started = time.monotonic()
        for thread in workers:
            thread.start()
        done = strike(cluster, proxies, schedule)
        load.stop.set()
        hung = _join(workers)
        seconds = time.monotonic() - started
        PRODUCERS.close()
    await_in_sync(cluster, topic)
    with load.lock:
        violations = check(load.attempts, read(cluster.bootstrap_servers, topic))
        for name in hung:
            violations.add(Invariant.ENDS, name)
        return RoundReport(
            schedule,
            violations,
            sum(attempt.rows for attempt in load.attempts if attempt.acknowledged),
            len(load.attempts),
            load.failures,
            load.retries,
            load.requests,
            done,
            seconds,
        )


def strike(cluster: LocalBroker, proxies: ProxyCluster, schedule: Schedule) -> Counter[Fault]:
    """Both tracks at once; returns when all is over and healed, with what was done."""
    injector = Injector(cluster, proxies)
    wire = threading.Thread(target=injector.run, args=(schedule.wire,), name="chaos-wire")
    wire.start()
    try:
        injector.run(schedule.brokers)
        wire.join()
    finally:
        injector.heal()
    return injector.done


def _options(
    worker: Worker, proxies: ProxyCluster, topic: str, overrides: Mapping[str, object]
) -> SinkOptions:
    raw = {f"kafka.{name}": str(value) for name, value in (dict(worker.options) | dict(overrides)).items()}
    return parse({**raw, "kafka.bootstrap.servers": proxies.bootstrap_servers, "topic": topic}).options


def _join(workers: list[threading.Thread]) -> list[str]:
    """The names of those that do not end."""
    deadline = time.monotonic() + _PATIENCE_S
    for thread in workers:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in workers if thread.is_alive()]


def await_in_sync(cluster: LocalBroker, topic: str) -> None:
    """Until every partition has a leader and all replicas: the next round starts from a whole cluster."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    last: list[object] = [None]

    def is_in_sync() -> bool:
        try:
            parts = admin.list_topics(topic, timeout=5).topics[topic].partitions.values()
        except Exception as error:  # noqa: BLE001 - KafkaException while brokers come back
            last[0] = error
            return False
        last[0] = {part.id: part.isrs for part in parts}
        return bool(parts) and all(
            part.leader >= 0 and len(part.isrs) == len(part.replicas) for part in parts
        )

    until(is_in_sync, lambda: f"{topic} in sync: {last[0]}", _SYNC_PATIENCE_S, poll_s=0.1)


def read(bootstrap_servers: str, topic: str) -> Iterator[Record]:
    """The topic's whole content, by an independent client, in offset order in each partition."""
    for message in messages(bootstrap_servers, topic):
        yield Record(message.partition(), message.offset(), message.key(), message.value())  # type: ignore[arg-type]
