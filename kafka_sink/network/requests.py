"""Requests other than Produce, and their answers as the project's own values.

kafka-python encodes and decodes; its objects do not leave this module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kafka.protocol.admin import DescribeConfigsRequest
from kafka.protocol.admin.topics import CreateTopicsRequest, CreateTopicsResponse
from kafka.protocol.api_header import RequestHeader
from kafka.protocol.metadata import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    MetadataRequest,
    MetadataResponse,
)
from kafka.protocol.producer import InitProducerIdRequest, InitProducerIdResponse, ProduceRequest
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from kafka_sink.kafka_errors import LEADER_NOT_AVAILABLE
from kafka_sink.model import NO_LEADER, UNKNOWN_EPOCH, MetadataUpdate, Node, PartitionInfo, TopicMetadata
from kafka_sink.network import config_requests, transaction_requests
from kafka_sink.network.wire import read_response

PRODUCE = 0
METADATA = 3
SASL_HANDSHAKE = 17
API_VERSIONS = 18
CREATE_TOPICS = 19
INIT_PRODUCER_ID = 22
SASL_AUTHENTICATE = 36

# Version 4 is the first that can forbid auto-creation; 10 brings topic ids.
METADATA_VERSIONS = (4, int(MetadataRequest.max_version))
INIT_PRODUCER_ID_VERSIONS = (0, int(InitProducerIdRequest.max_version))
CREATE_TOPICS_VERSIONS = (2, int(CreateTopicsRequest.max_version))
# The first that leaves numbers of partitions and replicas to the broker (KIP-464).
CREATE_TOPICS_BY_DEFAULTS = 4
API_VERSIONS_VERSIONS = (0, int(ApiVersionsRequest.max_version))

API_NAMES = {
    PRODUCE: "Produce",
    METADATA: "Metadata",
    SASL_HANDSHAKE: "SaslHandshake",
    API_VERSIONS: "ApiVersions",
    CREATE_TOPICS: "CreateTopics",
    INIT_PRODUCER_ID: "InitProducerId",
    SASL_AUTHENTICATE: "SaslAuthenticate",
    config_requests.DESCRIBE_CONFIGS: "DescribeConfigs",
    **transaction_requests.NAMES,
}
_REQUESTS: dict[int, Any] = {
    PRODUCE: ProduceRequest,
    METADATA: MetadataRequest,
    SASL_HANDSHAKE: SaslHandshakeRequest,
    API_VERSIONS: ApiVersionsRequest,
    CREATE_TOPICS: CreateTopicsRequest,
    INIT_PRODUCER_ID: InitProducerIdRequest,
    SASL_AUTHENTICATE: SaslAuthenticateRequest,
    config_requests.DESCRIBE_CONFIGS: DescribeConfigsRequest,
    **transaction_requests.REQUESTS,
}
# Before that (Kafka 2.4) brokers tell wrong epochs while partitions are reassigned; Kafka's own clients leave
# them out, too (KAFKA-9212).
_FIRST_RELIABLE_EPOCHS = 9
_NO_TOPIC_ID = bytes(16)
# AclOperation.WRITE.
_WRITE_OPERATION = 4


@dataclass(frozen=True, slots=True)
class ApiVersionsAnswer:
    """The broker's version range by API key; ranges of version 0's answer where ``error_code`` is set.

    ``features`` are the levels that the cluster has finalized (KIP-584).
    """

    error_code: int
    ranges: dict[int, tuple[int, int]]
    throttle_time_ms: int = 0
    features: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MetadataAnswer:
    """A Metadata answer; ``error_code`` is of the whole (version 13: REBOOTSTRAP_REQUIRED).

    ``unwritable``: topics that this client may not write to, where that was asked for (KIP-430).
    """

    update: MetadataUpdate
    error_code: int = 0
    throttle_time_ms: int = 0
    controller_id: int = -1
    unwritable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProducerIdAnswer:
    """InitProducerId's answer; id and epoch are -1 where ``error_code`` is set."""

    error_code: int
    producer_id: int
    producer_epoch: int
    throttle_time_ms: int = 0


def encode_header(api_key: int, api_version: int, correlation_id: int, client_id: str) -> bytes:
    """A request header of the version that the API version asks for."""
    header = RequestHeader(
        request_api_key=api_key,
        request_api_version=api_version,
        correlation_id=correlation_id,
        client_id=client_id,
    )
    return bytes(header.encode(flexible=_REQUESTS[api_key].flexible_version_q(api_version)))


# -- ApiVersions ----------------------------------------------------------------------------------


def encode_api_versions(version: int, software_version: str) -> bytes:
    """The request every connection starts with (KIP-35, client name and version by KIP-511)."""
    request = ApiVersionsRequest(
        version=version,
        client_software_name="kafka-chunked",
        client_software_version=software_version,
    )
    return bytes(request.encode(version=version))


def decode_api_versions(version: int, payload: bytes) -> ApiVersionsAnswer:
    """``payload`` with its header. A broker too old for the version answers in version 0's format."""
    failed = payload[4:6] != b"\0\0"
    return read_response(ApiVersionsResponse, 0 if failed else version, payload, _api_versions)


def _api_versions(response: Any) -> ApiVersionsAnswer:
    ranges = {int(api.api_key): (int(api.min_version), int(api.max_version)) for api in response.api_keys}
    features = {str(one.name): int(one.max_version_level) for one in response.finalized_features or ()}
    return ApiVersionsAnswer(int(response.error_code), ranges, int(response.throttle_time_ms or 0), features)


# -- Metadata -------------------------------------------------------------------------------------


def encode_metadata(
    version: int, topics: tuple[str, ...], allow_auto_create: bool, operations: bool = False
) -> bytes:
    """Metadata of these topics only; of none, just the brokers. Versions as in METADATA_VERSIONS.

    ``operations``: ask, too, what this client may do with them (KIP-430, from version 8 on).
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


def decode_metadata(version: int, payload: bytes) -> MetadataAnswer:
    """``payload`` with its header. Raises ProtocolError."""
    reliable_epochs = version >= _FIRST_RELIABLE_EPOCHS
    return read_response(
        MetadataResponse, version, payload, partial(_metadata, reliable_epochs=reliable_epochs)
    )


def _metadata(response: Any, *, reliable_epochs: bool) -> MetadataAnswer:
    nodes = tuple(Node(int(b.node_id), str(b.host), int(b.port), b.rack) for b in response.brokers)
    topics = []
    errors: dict[str, int] = {}
    for topic in response.topics:
        if topic.name is None:
            continue  # an unknown id has no name; topics are asked for by name here
        if topic.error_code:
            errors[topic.name] = int(topic.error_code)
            continue
        metadata = _topic(topic, reliable_epochs)
        if metadata is None:
            errors[topic.name] = LEADER_NOT_AVAILABLE
        else:
            topics.append(metadata)
    return MetadataAnswer(
        MetadataUpdate(nodes, tuple(topics), errors, response.cluster_id),
        int(response.error_code or 0),
        int(response.throttle_time_ms or 0),
        -1 if response.controller_id is None else int(response.controller_id),
        tuple(str(topic.name) for topic in response.topics if _is_unwritable(topic)),
    )


def _is_unwritable(topic: Any) -> bool:
    # The numbers of the operations; None where the broker was not asked, or does not say.
    operations = getattr(topic, "authorized_operations", None)
    return operations is not None and _WRITE_OPERATION not in operations


def _topic(topic: Any, reliable_epochs: bool) -> TopicMetadata | None:
    """None where partitions are missing: rows would go to partitions that the topic may not have."""
    partitions = sorted(topic.partitions, key=lambda partition: int(partition.partition_index))
    if not partitions or [p.partition_index for p in partitions] != list(range(len(partitions))):
        return None
    topic_id = None if topic.topic_id is None else bytes(topic.topic_id.bytes)
    return TopicMetadata(
        name=str(topic.name),
        topic_id=None if topic_id == _NO_TOPIC_ID else topic_id,
        partitions=tuple(_partition(str(topic.name), partition, reliable_epochs) for partition in partitions),
    )


def _partition(topic: str, partition: Any, reliable_epochs: bool) -> PartitionInfo:
    epoch = partition.leader_epoch if reliable_epochs else None
    leaderless = partition.error_code == LEADER_NOT_AVAILABLE
    return PartitionInfo(
        topic,
        int(partition.partition_index),
        NO_LEADER if leaderless else int(partition.leader_id),
        UNKNOWN_EPOCH if epoch is None else int(epoch),
    )


def metadata_update(answer: MetadataAnswer) -> MetadataUpdate:
    """What a Metadata answer says of brokers and topics; topics with an error have no metadata."""
    return answer.update


# -- CreateTopics -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CreateTopicAnswer:
    """The answer about the one topic that was asked for; ``error_message`` is the broker's own."""

    error_code: int
    error_message: str = ""
    throttle_time_ms: int = 0


def encode_create_topic(
    version: int, name: str, partitions: int, replication_factor: int, timeout_ms: int
) -> bytes:
    """One topic; -1 leaves a number to the broker. Versions as in CREATE_TOPICS_VERSIONS."""
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


def decode_create_topic(version: int, payload: bytes) -> CreateTopicAnswer:
    """``payload`` with its header. Raises ProtocolError."""
    return read_response(CreateTopicsResponse, version, payload, _create_topic)


def _create_topic(response: Any) -> CreateTopicAnswer:
    (topic,) = response.topics
    throttle = int(response.throttle_time_ms or 0)
    return CreateTopicAnswer(int(topic.error_code), str(topic.error_message or ""), throttle)


# -- InitProducerId -------------------------------------------------------------------------------


def encode_init_producer_id(
    version: int,
    producer_id: int,
    producer_epoch: int,
    transactional_id: str | None = None,
    # Read for transactional producers only; Kafka's own client sends the largest value.
    transaction_timeout_ms: int = 2**31 - 1,
) -> bytes:
    """Asks for a producer id. Without a transactional id a broker ignores the id and epoch given here and
    answers with a new id and epoch 0 each time (TransactionCoordinator.handleInitProducerId). With one it
    fences whoever had it, and ends what that had open."""
    request = InitProducerIdRequest(
        version=version,
        transactional_id=transactional_id,
        transaction_timeout_ms=transaction_timeout_ms,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
    )
    return bytes(request.encode(version=version))


def decode_init_producer_id(version: int, payload: bytes) -> ProducerIdAnswer:
    """``payload`` with its header. Raises ProtocolError."""
    return read_response(InitProducerIdResponse, version, payload, _producer_id)


def _producer_id(response: Any) -> ProducerIdAnswer:
    return ProducerIdAnswer(
        int(response.error_code),
        int(response.producer_id),
        int(response.producer_epoch),
        int(response.throttle_time_ms or 0),
    )


def init_producer_id(answer: ProducerIdAnswer) -> ProducerIdAnswer:
    """The answer itself: decoded where it arrives."""
    return answer
