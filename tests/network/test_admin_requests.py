"""Requests about topics and settings are byte for byte as kafka-python encodes them by Kafka's schemas.

What comes of their responses is in test_apis.py.
"""

from __future__ import annotations

from kafka.protocol.admin import CreateTopicsRequest, DescribeConfigsRequest

from kafka_sink.network import apis
from kafka_sink.network.admin_requests import encode_create_topic, encode_describe_broker
from tests.support.schema_requests import LONG, each, encoded


@each(apis.CREATE_TOPICS)
def test_create_topic(version: int) -> None:
    of = CreateTopicsRequest.CreatableTopic
    configs: list[tuple[tuple[str, str], ...]] = [(), (("retention.ms", "-1"), (LONG, ""))]
    for config in configs:
        topic = of(
            name=LONG,
            num_partitions=-1,
            replication_factor=3,
            assignments=[],
            configs=[of.CreatableTopicConfig(name=name, value=value) for name, value in config],
        )
        fields = {"topics": [topic], "timeout_ms": 7, "validate_only": False}
        assert encode_create_topic(version, LONG, -1, 3, 7, config) == encoded(
            CreateTopicsRequest, version, **fields
        )


@each(apis.DESCRIBE_CONFIGS)
def test_describe_broker(version: int) -> None:
    resource = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=4, resource_name="12", configuration_keys=["a", LONG]
    )
    fields = {"resources": [resource], "include_synonyms": False, "include_documentation": False}
    assert encode_describe_broker(version, 12, ["a", LONG]) == encoded(
        DescribeConfigsRequest, version, **fields
    )
