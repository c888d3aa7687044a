"""Which brokers are in the producer's rack."""

from __future__ import annotations

import pytest

from kafka_sink.cluster.client_rack import ClientRack
from kafka_sink.errors import ConfigurationError
from kafka_sink.model import Node
from kafka_sink.options import parse


def test_brokers_of_the_rack_are_near_and_without_a_rack_no_broker_is() -> None:
    nodes = {0: Node(0, "a", 1, "eu-1a"), 1: Node(1, "b", 1, "eu-1b"), 2: Node(2, "c", 1)}
    rack = ClientRack("eu-1b", lambda: nodes)
    assert rack.brokers() == {1}
    assert [rack.is_other(node_id) for node_id in (0, 1, 2, 3)] == [True, False, False, False]
    assert not ClientRack("", lambda: nodes).brokers()
    needs = r"kafka\.partitioner\.rack\.aware=true needs kafka\.client\.rack"
    with pytest.raises(ConfigurationError, match=needs):
        parse({"kafka.bootstrap.servers": "h:1", "topic": "t", "kafka.partitioner.rack.aware": "true"})
