"""CreateTopics, and DescribeConfigs of a broker, whose defaults it needs before Kafka 2.4 (KIP-464)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kafka.protocol.admin import (
    CreateTopicsRequest,
    CreateTopicsResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
)

from kafka_sink.network.apis import CREATE_TOPICS, DESCRIBE_CONFIGS
from kafka_sink.network.wire import read_response, text_of
from kafka_sink.printable import printable

CREATE_TOPICS_VERSIONS = (2, int(CreateTopicsRequest.max_version))
# The first version in which brokers can choose the numbers of partitions and replicas (KIP-464).
CREATE_TOPICS_BY_DEFAULTS = 4
DESCRIBE_CONFIGS_VERSIONS = (0, int(DescribeConfigsRequest.max_version))
# ConfigResource.Type.BROKER.
_BROKER = 4


# -- CreateTopics -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CreateTopicResponse:
    """The response for the one topic of the request; ``error_message`` is the broker's own."""

    error_code: int
    error_message: str = ""
    throttle_time_ms: int = 0


def encode_create_topic(
    version: int, name: str, partitions: int, replication_factor: int, timeout_ms: int
) -> bytes:
    """Creates one topic; the broker chooses a number given as -1. Versions: CREATE_TOPICS_VERSIONS."""
    topic = CreateTopicsRequest.CreatableTopic(
        version=version,
        name=name,
        num_partitions=partitions,
        replication_factor=replication_factor,
        assignments=[],
        configs=[],
    )
    request = CreateTopicsRequest(version=version, topics=[topic], timeout_ms=timeout_ms, validate_only=False)
    return bytes(request.encode(version=version))


def decode_create_topic(version: int, payload: bytes) -> CreateTopicResponse:
    """``payload`` with its header. Raises ProtocolError."""
    return read_response(CreateTopicsResponse, version, payload, _create_topic)


def _create_topic(response: Any) -> CreateTopicResponse:
    (topic,) = response.topics
    throttle = int(response.throttle_time_ms or 0)
    return CreateTopicResponse(int(topic.error_code), text_of(topic.error_message) or "", throttle)


# -- DescribeConfigs --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BrokerConfigs:
    """The requested settings as texts by name. ``configs`` is empty where ``error_code`` is set."""

    error_code: int
    configs: dict[str, str] = field(default_factory=dict)
    throttle_time_ms: int = 0


def encode_describe_broker(version: int, node_id: int, names: Sequence[str]) -> bytes:
    """Asks one broker for its own settings of these names. The request must go to that broker."""
    resource = DescribeConfigsRequest.DescribeConfigsResource(
        version=version, resource_type=_BROKER, resource_name=str(node_id), configuration_keys=list(names)
    )
    request = DescribeConfigsRequest(
        version=version, resources=[resource], include_synonyms=False, include_documentation=False
    )
    return bytes(request.encode(version=version))


def decode_describe_broker(version: int, payload: bytes) -> BrokerConfigs:
    """``payload`` with its header. Raises ProtocolError."""
    return read_response(DescribeConfigsResponse, version, payload, _configs)


def _configs(response: Any) -> BrokerConfigs:
    (broker,) = response.results
    given = (one for one in broker.configs or () if one.value is not None)
    configs = {printable(one.name): printable(one.value) for one in given}
    return BrokerConfigs(int(broker.error_code), configs, int(response.throttle_time_ms or 0))


REQUESTS: Mapping[int, Any] = {
    CREATE_TOPICS: CreateTopicsRequest,
    DESCRIBE_CONFIGS: DescribeConfigsRequest,
}
DECODERS: Mapping[int, Callable[[int, bytes], Any]] = {
    CREATE_TOPICS: decode_create_topic,
    DESCRIBE_CONFIGS: decode_describe_broker,
}
