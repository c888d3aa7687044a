"""With TLS and the system's trust, the coordinator's word alone leads no row to a broker."""

from __future__ import annotations

import pytest

from kafka_sink.metadata.cluster_metadata import ClusterMetadata
from kafka_sink.metadata.topic_state import MetadataSnapshot, TopicSnapshot
from kafka_sink.model import MetadataUpdate, Node, PartitionInfo, TopicMetadata, TopicPartition
from kafka_sink.options import parse
from kafka_sink.task.producer import Producer

FORGED, REAL = Node(1, "evil.example", 9093), Node(1, "broker.example", 9093)
TOPIC = TopicMetadata.of("t", bytes([7] * 16), (PartitionInfo("t", 0, 1, 3),))


def cluster(*, confirmed_only: bool) -> ClusterMetadata:
    times = {"max_age_ms": 300_000, "idle_ms": 300_000, "retry_backoff_ms": 100, "retry_backoff_max_ms": 1000}
    made = ClusterMetadata(lambda: 0.0, lambda: None, lambda: "", lambda: 0.5, **times)
    made.confirmed_nodes_only = confirmed_only
    return made


def hint(node: Node) -> MetadataSnapshot:
    return MetadataSnapshot((TopicSnapshot(TOPIC, 0.0),), (node,), 0.0, "c")


def address(view: ClusterMetadata) -> str | None:
    leader = view.leader(TopicPartition("t", 0))
    nodes = view.nodes()
    return None if leader is None or leader.leader not in nodes else nodes[leader.leader].host


def test_an_address_that_no_broker_has_named_is_not_taken() -> None:
    """Catches: rows acknowledged by a broker of whoever knows the coordinator's secret."""
    view = cluster(confirmed_only=True)
    assert view.import_hints(hint(FORGED), 0.0) == 0
    assert address(view) is None
    view.on_response(MetadataUpdate((REAL,), (TOPIC,), {}, "c"), ("t",), 1.0)
    assert view.import_hints(hint(FORGED), 2.0) == 0
    assert view.nodes()[1] == REAL
    assert view.import_hints(hint(REAL), 3.0) == 1
    assert address(view) == "broker.example"


def test_elsewhere_certificates_or_nothing_tell_brokers_apart() -> None:
    view = cluster(confirmed_only=False)
    assert view.import_hints(hint(FORGED), 0.0) == 1
    assert address(view) == "evil.example"


@pytest.mark.parametrize(
    ("given", "strict"),
    [
        ({}, False),
        ({"kafka.security.protocol": "SSL"}, True),
        ({"kafka.security.protocol": "SSL", "kafka.ssl.ca.location": "/nowhere"}, False),
    ],
)
def test_it_goes_by_the_options(given: dict[str, str], strict: bool) -> None:
    producer = Producer(parse({"kafka.bootstrap.servers": "127.0.0.1:1", **given}).options)
    try:
        assert producer.cluster.confirmed_nodes_only is strict
    finally:
        producer.close()
