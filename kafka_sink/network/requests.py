"""Protocol messages other than the Produce body, through kafka-python's codecs.

What its decoders raise on a malformed answer becomes ProtocolError here, at the boundary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kafka.protocol.api_header import RequestHeader
from kafka.protocol.metadata import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    MetadataRequest,
    MetadataResponse,
)
from kafka.protocol.producer import InitProducerIdRequest, InitProducerIdResponse, ProduceRequest

from kafka_sink.cluster.metadata import MetadataUpdate
from kafka_sink.errors import ProtocolError
from kafka_sink.model import Node, PartitionInfo, TopicMetadata

PRODUCE = 0
METADATA = 3
API_VERSIONS = 18
INIT_PRODUCER_ID = 22

# Version 4 is the first that can forbid auto-creation; 10 brings topic ids.
METADATA_VERSIONS = (4, int(MetadataRequest.max_version))
INIT_PRODUCER_ID_VERSIONS = (0, min(5, int(InitProducerIdRequest.max_version)))
API_VERSIONS_VERSIONS = (0, min(4, int(ApiVersionsRequest.max_version)))

_REQUESTS: dict[int, Any] = {
    PRODUCE: ProduceRequest,
    METADATA: MetadataRequest,
    API_VERSIONS: ApiVersionsRequest,
    INIT_PRODUCER_ID: InitProducerIdRequest,
}
_RESPONSES: dict[int, Any] = {
    METADATA: MetadataResponse,
    API_VERSIONS: ApiVersionsResponse,
    INIT_PRODUCER_ID: InitProducerIdResponse,
}
_NO_TOPIC_ID = bytes(16)


@dataclass(frozen=True, slots=True)
class ProducerIdAnswer:
    """InitProducerId's answer."""

    error_code: int
    producer_id: int
    producer_epoch: int


def encode_header(api_key: int, api_version: int, correlation_id: int, client_id: str) -> bytes:
    """A request header of the version that the API version asks for."""
    header = RequestHeader(
        request_api_key=api_key,
        request_api_version=api_version,
        correlation_id=correlation_id,
        client_id=client_id,
    )
    return bytes(header.encode(flexible=_REQUESTS[api_key].flexible_version_q(api_version)))


def response_header_size(api_key: int, api_version: int, payload: memoryview) -> int:
    """Bytes before the body: the correlation id and, in flexible versions, tagged fields (none sent)."""
    if api_key == API_VERSIONS or not _REQUESTS[api_key].flexible_version_q(api_version):
        return 4
    if len(payload) < 5 or payload[4] != 0:
        raise ProtocolError("a response header carries tagged fields, which no broker sends")
    return 5


def encode_api_versions(version: int, software_version: str) -> bytes:
    """The request every connection starts with."""
    request = ApiVersionsRequest(
        version=version,
        client_software_name="kafka-chunked",
        client_software_version=software_version,
    )
    return bytes(request.encode(version=version))


def encode_metadata(version: int, topics: tuple[str, ...], allow_auto_create: bool) -> bytes:
    """Metadata for these topics only."""
    rows = [
        MetadataRequest.MetadataRequestTopic(version=version, topic_id=None, name=name) for name in topics
    ]
    request = MetadataRequest(
        version=version,
        topics=rows,
        allow_auto_topic_creation=allow_auto_create,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=False,
    )
    return bytes(request.encode(version=version))


def encode_init_producer_id(version: int, producer_id: int, producer_epoch: int) -> bytes:
    """Asks for a producer id, or with an id and epoch (from version 3) for the epoch after it."""
    request = InitProducerIdRequest(
        version=version,
        transactional_id=None,
        transaction_timeout_ms=60_000,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
    )
    return bytes(request.encode(version=version))


def decode(api_key: int, api_version: int, body: memoryview) -> Any:
    """A response body as kafka-python's object. Raises ProtocolError for anything it cannot read."""
    try:
        return _RESPONSES[api_key].decode(bytes(body), version=api_version)
    except Exception as error:  # whatever a decoder makes of garbage
        raise ProtocolError(f"an answer to API {api_key} v{api_version} cannot be read: {error!r}") from error


def api_ranges(response: Any) -> dict[int, tuple[int, int]]:
    """The broker's version range by API key. Raises ProtocolError where the answer is an error."""
    if response.error_code:
        raise ProtocolError(f"ApiVersions failed with error {response.error_code}")
    return {int(api.api_key): (int(api.min_version), int(api.max_version)) for api in response.api_keys}


def metadata_update(response: Any) -> MetadataUpdate:
    """A Metadata answer in the project's own values; topics with an error have no metadata."""
    nodes = tuple(Node(int(b.node_id), str(b.host), int(b.port), b.rack) for b in response.brokers)
    topics = []
    errors: dict[str, int] = {}
    for topic in response.topics:
        if topic.error_code:
            errors[topic.name] = int(topic.error_code)
            continue
        topics.append(_topic(topic))
    return MetadataUpdate(nodes, tuple(topics), errors, getattr(response, "cluster_id", None))


def _topic(topic: Any) -> TopicMetadata:
    topic_id = getattr(topic, "topic_id", None)
    raw_id = topic_id.bytes if topic_id is not None and hasattr(topic_id, "bytes") else topic_id
    partitions = sorted(topic.partitions, key=lambda partition: partition.partition_index)
    if [int(partition.partition_index) for partition in partitions] != list(range(len(partitions))):
        raise ProtocolError(f"the metadata of topic {topic.name!r} skips partitions")
    return TopicMetadata(
        name=topic.name,
        topic_id=None if not raw_id or raw_id == _NO_TOPIC_ID else bytes(raw_id),
        partitions=tuple(
            PartitionInfo(
                topic.name,
                int(partition.partition_index),
                int(partition.leader_id),
                int(getattr(partition, "leader_epoch", -1) if partition.leader_epoch is not None else -1),
            )
            for partition in partitions
        ),
    )


def init_producer_id(response: Any) -> ProducerIdAnswer:
    """An InitProducerId answer in the project's own values."""
    return ProducerIdAnswer(
        int(response.error_code), int(response.producer_id), int(response.producer_epoch)
    )
