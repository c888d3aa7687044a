"""The metadata cache that a task has."""

from __future__ import annotations

from kafka_sink.options import parse
from kafka_sink.task.producer import Producer


def test_only_public_certificate_authorities_require_confirmed_nodes() -> None:
    tls = {"kafka.security.protocol": "SSL"}
    for raw, strict in [({}, False), (tls, True), ({**tls, "kafka.ssl.ca.location": "/nowhere"}, False)]:
        producer = Producer(parse({"kafka.bootstrap.servers": "127.0.0.1:1", **raw}).options)
        producer.close()
        assert producer.cluster.confirmed_nodes_only is strict
