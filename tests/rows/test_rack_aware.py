"""Keyless rows in the producer's rack (KIP-1123). Catches: rows for another zone without need, and rows that
avoid their zone's last way out."""

from __future__ import annotations

import logging

import pyarrow as pa
import pytest

from kafka_sink.cluster.metadata import ClientRack
from kafka_sink.errors import ConfigurationError
from kafka_sink.model import Node, PartitionMetadata, TopicMetadata, TopicPartition
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.rows.columns import extract
from kafka_sink.rows.partitioner import BatchCapacity, Partitioner
from kafka_sink.task.producer import Producer
from local_kafka import LocalBroker

PLAN = ColumnPlan.of([("value", "binary")], "t")
# Partitions 0 to 5, led by brokers 0, 1, 2, 0, 1, 2.
TOPIC = TopicMetadata.of("t", None, tuple(PartitionMetadata("t", number, number % 3) for number in range(6)))
VALUES = pa.record_batch({"value": pa.array([b"x" * 100] * 2000, pa.binary())})


def partitions(
    near: frozenset[int], muted: frozenset[int] = frozenset(), unavailable: frozenset[int] = frozenset()
) -> set[int]:
    chosen = iter(range(1_000_000))
    partitioner = Partitioner(
        capacity=lambda *_: BatchCapacity(None, 5000),
        loads=lambda topic, count: [0] * count,
        ignore_keys=False,
        adaptive=True,
        random=lambda: next(chosen) * 0.317 % 1,
    )
    ordered = partitioner.order(
        extract(PLAN, VALUES, 0),
        {"t": TOPIC},
        0,
        unavailable,
        {TopicPartition("t", number) for number in muted},
        near,
    )
    return {place.partition for place in ordered.partitions}


def test_rows_stay_in_the_rack_while_it_has_a_leader_that_takes_them() -> None:
    assert partitions(near=frozenset()) == {0, 1, 2, 3, 4, 5}
    assert partitions(near=frozenset({1})) == {1, 4}
    assert partitions(near=frozenset({1}), muted=frozenset({4})) == {1}
    assert partitions(near=frozenset({1}), muted=frozenset({1, 4})) == {0, 2, 3, 5}
    assert partitions(near=frozenset({1}), unavailable=frozenset({1})) == {0, 2, 3, 5}
    assert partitions(near=frozenset({9})) == {0, 1, 2, 3, 4, 5}


def test_the_rack_comes_from_the_option_or_from_the_executors_environment(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nodes = {0: Node(0, "a", 1, "eu-1a"), 1: Node(1, "b", 1, "eu-1b"), 2: Node(2, "c", 1)}
    rack = ClientRack("${env:ZONE}", lambda: nodes, {"ZONE": "eu-1b"})
    assert rack.brokers() == ClientRack("eu-1b", lambda: nodes, {}).brokers() == {1}
    assert [rack.is_other(node_id) for node_id in (0, 1, 2, 3)] == [True, False, False, False]
    with caplog.at_level(logging.WARNING):
        assert not ClientRack("${env:ZONE}", lambda: nodes, {}).brokers()
    assert "no variable ZONE" in caplog.text


def test_rack_awareness_needs_a_rack() -> None:
    with pytest.raises(
        ConfigurationError, match=r"kafka\.partitioner\.rack\.aware=true needs kafka\.client\.rack"
    ):
        parse({"kafka.bootstrap.servers": "h:1", "topic": "t", "kafka.partitioner.rack.aware": "true"})


def test_bytes_stay_in_the_rack_of_a_real_cluster(cluster3: LocalBroker) -> None:
    cluster3.create_topic("rack-aware", 6)
    for aware in (True, False):
        producer = Producer(
            parse(
                {
                    "kafka.bootstrap.servers": cluster3.bootstrap_servers,
                    "topic": "rack-aware",
                    "kafka.client.rack": "rack-1",
                    "kafka.partitioner.rack.aware": str(aware).lower(),
                    "coordinator.enabled": "false",
                }
            ).options
        )
        try:
            producer.begin()
            producer.plan = PLAN
            for _ in range(30):
                producer.send(VALUES)
            counts = producer.finish()
        finally:
            producer.close()
        assert counts.records == 30 * VALUES.num_rows
        share = counts.other_rack_bytes / counts.sent_bytes
        assert share == 0 if aware else share > 0.3
