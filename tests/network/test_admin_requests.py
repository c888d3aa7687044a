"""Requests about topics and settings are byte for byte as kafka-python encodes them by Kafka's schemas.

What comes of their responses is in test_apis.py.
"""

from __future__ import annotations

from kafka.protocol.admin import CreateTopicsRequest, DescribeConfigsRequest

from kafka_sink.network import apis
from kafka_sink.network.admin_requests import encode_create_topic, encode_describe_broker
from tests.support.schema_requests import LONG, same


def test_create_topic() -> None:
    configs: list[list[tuple[str, str]]] = [[], [("retention.ms", "-1"), (LONG, "")]]
    for config in configs:
        same(
            apis.CREATE_TOPICS,
            lambda version, config=config: encode_create_topic(version, LONG, -1, 3, 7, config),
            CreateTopicsRequest,
            topics=[(LONG, -1, 3, [], config)],
            timeout_ms=7,
            validate_only=False,
        )


def test_describe_broker() -> None:
    same(
        apis.DESCRIBE_CONFIGS,
        lambda version: encode_describe_broker(version, 12, ["a", LONG]),
        DescribeConfigsRequest,
        resources=[(4, "12", ["a", LONG])],
        include_synonyms=False,
        include_documentation=False,
    )
