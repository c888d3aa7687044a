"""DescribeConfigs of a broker, whose defaults CreateTopics needs before Kafka 2.4 (KIP-464)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kafka.protocol.admin import DescribeConfigsRequest, DescribeConfigsResponse

from kafka_sink.network.wire import read_response

DESCRIBE_CONFIGS = 32
DESCRIBE_CONFIGS_VERSIONS = (0, int(DescribeConfigsRequest.max_version))
# ConfigResource.Type.BROKER.
_BROKER = 4


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
    configs = {str(one.name): str(one.value) for one in broker.configs or () if one.value is not None}
    return BrokerConfigs(int(broker.error_code), configs, int(response.throttle_time_ms or 0))
