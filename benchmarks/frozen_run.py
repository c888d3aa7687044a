"""Spark jobs at a steady rate on a real three-broker cluster, and one broker that freezes in the middle."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from benchmarks import paced_rows
from benchmarks.peers import Contender
from benchmarks.surroundings import rows_in, spark_session
from local_kafka import LocalBroker

PARTITIONS = 12
BROKERS = 3
# A write that goes on for this long after its last row is ended.
GIVE_UP_S = 180


@dataclass(frozen=True)
class Load:
    """Rows per second of all tasks, and seconds of each phase."""

    rate: float = 20_000
    warm: float = 4
    before: float = 6
    frozen: float = 40
    after: float = 8
    tasks: int = 2

    @property
    def seconds(self) -> float:
        return self.warm + self.before + self.frozen + self.after

    @property
    def rows(self) -> int:
        """Rows offered in all."""
        return int(self.rate / self.tasks * self.seconds) * self.tasks


def session(with_jvm_sink: bool, master: str, settings: Mapping[str, str] = MappingProxyType({})) -> Any:
    # Otherwise Spark would gather half a second's rows for a Python sink.
    used = {"spark.sql.execution.arrow.maxRecordsPerBatch": "500", **settings}
    return spark_session(master, used, with_jvm_sink=with_jvm_sink)


def frame_of(spark: Any, load: Load, keyed: bool) -> Any:
    source = paced_rows.paced(load.rate / load.tasks, load.seconds, keyed)
    return spark.range(0, load.tasks, 1, load.tasks).mapInArrow(source, paced_rows.SCHEMA)


@dataclass(frozen=True)
class Run:
    """When a write ended and the broker stalled, in Unix seconds; the partitions that it leads; the error
    that the write raised, if any."""

    froze: float
    thawed: float
    ended: float
    partitions: tuple[int, ...]
    error: str


class Freezer(threading.Thread):
    """Waits for the topic's first rows, then freezes the victim for a while. ``began`` and ``ended`` are Unix
    seconds. Spark's thread is the main one, as it finds Python data sources only there."""

    def __init__(self, cluster: LocalBroker, victim: int, topic: str, load: Load) -> None:
        super().__init__(name="freezer", daemon=True)
        self.began = self.ended = 0.0
        self.given_up = threading.Event()
        self._cluster = cluster
        self._victim = victim
        self._topic = topic
        self._load = load

    def run(self) -> None:
        while not rows_in(self._cluster.bootstrap_servers, self._topic):
            if self.given_up.wait(0.05):
                return
        self.given_up.wait(self._load.warm + self._load.before)
        self.began = time.time()
        self._cluster.freeze(self._victim)
        try:
            self.given_up.wait(self._load.frozen - (time.time() - self.began))
        finally:
            self.ended = time.time()
            self._cluster.thaw(self._victim)


def frozen_run(cluster: LocalBroker, victim: int, one: Contender, frame: Any, topic: str, load: Load) -> Run:
    """Runs a contender, and freezes the victim in the middle."""
    cluster.create_topic(topic, PARTITIONS, 1, {"message.timestamp.type": "LogAppendTime"})
    led = led_by(cluster, topic, victim)
    freezer = Freezer(cluster, victim, topic, load)
    stop = threading.Timer(load.seconds + GIVE_UP_S, frame.sparkSession.sparkContext.cancelAllJobs)
    freezer.start()
    stop.start()
    error = ""
    try:
        one.write(frame, cluster.bootstrap_servers, topic)
    except Exception as raised:  # noqa: BLE001 - that a contender gives up is an outcome
        error = f"{type(raised).__name__}: {str(raised)[:500]}"
    ended = time.time()
    stop.cancel()
    freezer.given_up.set()
    freezer.join()
    if not freezer.began:
        raise RuntimeError(f"{one.name} wrote nothing: {error}")
    return Run(freezer.began, freezer.ended, ended, led, error)


def led_by(cluster: LocalBroker, topic: str, node: int) -> tuple[int, ...]:
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    partitions = admin.list_topics(topic, timeout=10).topics[topic].partitions
    return tuple(sorted(one.id for one in partitions.values() if one.leader == node))


def follower(cluster: LocalBroker) -> int:
    """A broker that is not the active controller, so that the cluster's own fail-over plays no part."""
    command = ("--bootstrap-server", cluster.bootstrap_servers, "describe", "--status")
    status = cluster.run_tool("org.apache.kafka.tools.MetadataQuorumCommand", *command).stdout
    leader = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("LeaderId:"))
    return (leader + 1) % BROKERS
