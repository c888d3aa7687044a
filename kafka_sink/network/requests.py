"""The requests of every task other than Produce, and their responses as the project's own values.

kafka-python encodes and decodes; its objects do not leave this module.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from kafka.protocol import metadata as metadata_api
from kafka.protocol.api_header import RequestHeader
from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest
from kafka.protocol.producer import InitProducerIdRequest, InitProducerIdResponse

from kafka_sink.kafka_errors import LEADER_NOT_AVAILABLE
from kafka_sink.model import NO_LEADER, UNKNOWN_EPOCH, MetadataUpdate, PartitionInfo, TopicMetadata
from kafka_sink.network.apis import API_VERSIONS, INIT_PRODUCER_ID, METADATA, codec_of
from kafka_sink.network.metadata_response import RawPartition, RawTopic, read_metadata
from kafka_sink.network.wire import read_response

# Version 4 is the first that can forbid auto-creation; 10 brings topic ids.
METADATA_VERSIONS = (4, int(MetadataRequest.max_version))
INIT_PRODUCER_ID_VERSIONS = (0, int(InitProducerIdRequest.max_version))
API_VERSIONS_VERSIONS = (0, int(ApiVersionsRequest.max_version))

# Before this version (Kafka 2.4) brokers may send wrong epochs while partitions are reassigned. Kafka's own
# clients ignore those, too (KAFKA-9212).
_FIRST_RELIABLE_EPOCHS = 9
_NO_TOPIC_ID = bytes(16)
ANY_NUMBER = 2**31
# AclOperation.WRITE.
_WRITE_OPERATION = 4


@dataclass(frozen=True, slots=True)
class ApiVersionsResponse:
    """The broker's version range by API key; from a version 0 response where ``error_code`` is set.

    ``features`` are the levels that the cluster has finalized (KIP-584).
    """

    error_code: int
    ranges: dict[int, tuple[int, int]]
    throttle_time_ms: int = 0
    features: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MetadataResponse:
    """A Metadata response; ``error_code`` is about the whole of it (version 13: REBOOTSTRAP_REQUIRED).

    ``unwritable``: topics that this client may not write to, where the request asked for that (KIP-430).
    """

    update: MetadataUpdate
    error_code: int = 0
    throttle_time_ms: int = 0
    controller_id: int = -1
    unwritable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProducerIdResponse:
    """An InitProducerId response; id and epoch are -1 where ``error_code`` is set."""

    error_code: int
    producer_id: int
    producer_epoch: int
    throttle_time_ms: int = 0


# Where each header version has the correlation id: behind the API's key and version.
_CORRELATION = (4, 8)


def encode_header(api_key: int, api_version: int, correlation_id: int, client_id: str) -> bytes:
    """A request header, in the header version that belongs to the API version."""
    header = _header_template(api_key, api_version, client_id)
    begin, end = _CORRELATION
    return header[:begin] + struct.pack(">i", correlation_id) + header[end:]


@lru_cache(maxsize=256)
def _header_template(api_key: int, api_version: int, client_id: str) -> bytes:
    """The header of the correlation id 0. kafka-python takes 60 us for one."""
    header = RequestHeader(
        request_api_key=api_key,
        request_api_version=api_version,
        correlation_id=0,
        client_id=client_id,
    )
    return bytes(header.encode(flexible=codec_of(api_key).REQUESTS[api_key].flexible_version_q(api_version)))


# -- ApiVersions ----------------------------------------------------------------------------------


def encode_api_versions(version: int, software_version: str) -> bytes:
    """The first request on every connection (KIP-35; client name and version: KIP-511)."""
    request = ApiVersionsRequest(
        version=version,
        client_software_name="kafka-chunked",
        client_software_version=software_version,
    )
    return bytes(request.encode(version=version))


def decode_api_versions(version: int, payload: bytes) -> ApiVersionsResponse:
    """``payload`` with its header. A broker too old for the version responds in version 0's format."""
    failed = payload[4:6] != b"\0\0"
    return read_response(metadata_api.ApiVersionsResponse, 0 if failed else version, payload, _api_versions)


def _api_versions(response: Any) -> ApiVersionsResponse:
    ranges = {int(api.api_key): (int(api.min_version), int(api.max_version)) for api in response.api_keys}
    features = {str(one.name): int(one.max_version_level) for one in response.finalized_features or ()}
    return ApiVersionsResponse(
        int(response.error_code), ranges, int(response.throttle_time_ms or 0), features
    )


# -- Metadata -------------------------------------------------------------------------------------


def encode_metadata(
    version: int, topics: tuple[str, ...], allow_auto_create: bool, operations: bool = False
) -> bytes:
    """Asks for these topics only; without topics, for the brokers alone. Versions: METADATA_VERSIONS.

    ``operations``: also asks what this client may do with the topics (KIP-430, from version 8 on).
    """
    rows = [
        MetadataRequest.MetadataRequestTopic(version=version, topic_id=None, name=name) for name in topics
    ]
    request = MetadataRequest(
        version=version,
        topics=rows,
        allow_auto_topic_creation=allow_auto_create,
        include_cluster_authorized_operations=False,
        include_topic_authorized_operations=operations,
    )
    return bytes(request.encode(version=version))


def decode_metadata(version: int, payload: bytes, most_topics: int = ANY_NUMBER) -> MetadataResponse:
    """``payload`` with its header. Raises ProtocolError, also for more topics than ``most_topics``."""
    response = read_metadata(version, payload, most_topics)
    topics = []
    errors: dict[str, int] = {}
    for topic in response.topics:
        if topic.name is None:
            continue  # only an unknown topic id has no name, and requests name topics
        if topic.error_code:
            errors[topic.name] = topic.error_code
            continue
        metadata = _topic(topic.name, topic, version >= _FIRST_RELIABLE_EPOCHS)
        if metadata is None:
            errors[topic.name] = LEADER_NOT_AVAILABLE
        else:
            topics.append(metadata)
    return MetadataResponse(
        MetadataUpdate(response.nodes, tuple(topics), errors, response.cluster_id),
        response.error_code,
        response.throttle_time_ms,
        response.controller_id,
        tuple(topic.name for topic in response.topics if topic.name is not None and _is_unwritable(topic)),
    )


def _is_unwritable(topic: RawTopic) -> bool:
    return topic.operations is not None and not topic.operations >> _WRITE_OPERATION & 1


def _topic(name: str, topic: RawTopic, reliable_epochs: bool) -> TopicMetadata | None:
    """None where partitions are missing: rows could go to partitions that the topic does not have."""
    partitions = sorted(topic.partitions)
    if not partitions or any(at != one.number for at, one in enumerate(partitions)):
        return None
    return TopicMetadata(
        name=name,
        topic_id=None if topic.topic_id == _NO_TOPIC_ID else topic.topic_id,
        partitions=tuple(_partition(name, partition, reliable_epochs) for partition in partitions),
    )


def _partition(topic: str, partition: RawPartition, reliable_epochs: bool) -> PartitionInfo:
    epoch = partition.leader_epoch if reliable_epochs else None
    leaderless = partition.error_code == LEADER_NOT_AVAILABLE
    return PartitionInfo(
        topic,
        partition.number,
        NO_LEADER if leaderless else partition.leader,
        UNKNOWN_EPOCH if epoch is None else epoch,
    )


# -- InitProducerId -------------------------------------------------------------------------------


def encode_init_producer_id(
    version: int,
    producer_id: int,
    producer_epoch: int,
    transactional_id: str | None = None,
    # Brokers read it for transactional producers only. Kafka's own client sends the largest value.
    transaction_timeout_ms: int = 2**31 - 1,
) -> bytes:
    """Asks for a producer id.

    Without a transactional id a broker ignores the id and epoch given here, and assigns a new id with epoch 0
    each time (TransactionCoordinator.handleInitProducerId). With a transactional id it fences the producer
    that had it before, and ends that producer's open transaction.
    """
    request = InitProducerIdRequest(
        version=version,
        transactional_id=transactional_id,
        transaction_timeout_ms=transaction_timeout_ms,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
    )
    return bytes(request.encode(version=version))


def decode_init_producer_id(version: int, payload: bytes) -> ProducerIdResponse:
    """``payload`` with its header. Raises ProtocolError."""
    return read_response(InitProducerIdResponse, version, payload, _producer_id)


def _producer_id(response: Any) -> ProducerIdResponse:
    return ProducerIdResponse(
        int(response.error_code),
        int(response.producer_id),
        int(response.producer_epoch),
        int(response.throttle_time_ms or 0),
    )


REQUESTS: Mapping[int, Any] = {
    METADATA: MetadataRequest,
    API_VERSIONS: ApiVersionsRequest,
    INIT_PRODUCER_ID: InitProducerIdRequest,
}
DECODERS: Mapping[int, Callable[[int, bytes], Any]] = {
    METADATA: decode_metadata,
    API_VERSIONS: decode_api_versions,
    INIT_PRODUCER_ID: decode_init_producer_id,
}
