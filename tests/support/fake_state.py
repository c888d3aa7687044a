"""The state of the fake broker: topics, producers and the right response to each request. No sockets."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kafka.protocol.admin import DescribeConfigsResponse
from kafka.protocol.admin.topics import CreateTopicsResponse
from kafka.protocol.metadata import ApiVersionsResponse, MetadataResponse
from kafka.protocol.producer import InitProducerIdResponse, ProduceResponse

from tests.support.fake_log import MAX_MESSAGE_BYTES, PartitionLog, RecordBatch, parse_batch
from tests.support.fake_replies import Reply
from tests.support.telemetry_messages import GET_SUBSCRIPTIONS, PUSH, TelemetryResponse, Wanted

PRODUCE, METADATA, API_VERSIONS, CREATE_TOPICS, INIT_PRODUCER_ID, DESCRIBE_CONFIGS = 0, 3, 18, 19, 22, 32
VERSIONS = {
    PRODUCE: (3, 13),
    METADATA: (0, 13),
    API_VERSIONS: (0, 4),
    CREATE_TOPICS: (2, 7),
    INIT_PRODUCER_ID: (0, 6),
    DESCRIBE_CONFIGS: (0, 4),
}
# The brokers' own settings, as DescribeConfigs lists them.
BROKER_CONFIGS = {
    "num.partitions": "4",
    "default.replication.factor": "1",
    "auto.create.topics.enable": "false",
}
INVALID_REPLICATION_FACTOR = 38
_FIRST_WITH_DEFAULTS = 4
UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER_OR_FOLLOWER = 3, 6
UNSUPPORTED_VERSION, UNKNOWN_TOPIC_ID = 35, 100
_HOST = "127.0.0.1"
_FIRST_WITH_LEADERS = 10
_Topic = MetadataResponse.MetadataResponseTopic
_ProduceTopic = ProduceResponse.TopicProduceResponse
_ProducePartition = _ProduceTopic.PartitionProduceResponse


@dataclass
class FakeTopic:
    """A topic; ``leaders[p]`` is partition p's (node id, epoch)."""

    id: uuid.UUID
    logs: list[PartitionLog]
    leaders: list[tuple[int, int]]


class FakeState:
    """A cluster's state. ``ports`` are the brokers' by id. Not thread-safe: the caller brings the lock."""

    def __init__(
        self,
        ports: list[int],
        versions: Mapping[int, tuple[int, int]],
        max_message_bytes: int | Mapping[str, int],
        cluster_id: str = "fake",
    ) -> None:
        self.cluster_id = cluster_id
        self.ports = ports
        self.versions = versions
        self.topics: dict[str, FakeTopic] = {}
        # The state of client metrics, if ``versions`` offers them.
        self.wanted = Wanted()
        # The broker that leads all partitions for a client, by client id. Brokers over object storage answer
        # each zone so, and each of them takes rows for every partition.
        self.zones: dict[str, int] = {}
        self._max_message_bytes = max_message_bytes
        self._next_producer_id = 999

    def create_topic(self, name: str, partitions: int) -> None:
        """A new id, empty logs, epochs from 0; leaders go round the brokers."""
        self.topics[name] = FakeTopic(
            uuid.uuid4(),
            [PartitionLog(self._limit(name)) for _ in range(partitions)],
            [(partition % len(self.ports), 0) for partition in range(partitions)],
        )

    def _limit(self, topic: str) -> int:
        limits = self._max_message_bytes
        return limits if isinstance(limits, int) else limits.get(topic, MAX_MESSAGE_BYTES)

    def add_partitions(self, name: str, partitions: int) -> None:
        """Up to this number: empty logs, epochs from 0; leaders go round the brokers."""
        topic = self.topics[name]
        for partition in range(len(topic.logs), partitions):
            topic.logs.append(PartitionLog(self._limit(name)))
            topic.leaders.append((partition % len(self.ports), 0))

    def answer(self, node_id: int, api_key: int, version: int, request: Any, reply: Reply) -> Any:
        """Do what the request asks for, as far as ``reply`` allows it, and return kafka-python's response."""
        if api_key == PRODUCE:
            return self._produce(version, node_id, request, reply)
        if api_key == GET_SUBSCRIPTIONS:
            return TelemetryResponse.subscription(reply.throttle_ms, reply.error, self.wanted)
        if api_key == PUSH:
            return TelemetryResponse.pushed(reply.throttle_ms, reply.error)
        answer = {
            API_VERSIONS: self.api_versions,
            METADATA: self._metadata,
            INIT_PRODUCER_ID: self._init_producer_id,
            CREATE_TOPICS: self._create_topics,
            DESCRIBE_CONFIGS: self._describe_configs,
        }[api_key]
        return answer(version, request, reply)

    def api_versions(self, version: int, _request: Any, reply: Reply) -> Any:
        rows = [
            ApiVersionsResponse.ApiVersion(api_key=key, min_version=low, max_version=high)
            for key, (low, high) in self.versions.items()
        ]
        return ApiVersionsResponse(
            version=version, error_code=reply.error, api_keys=rows, throttle_time_ms=reply.throttle_ms
        )

    # -- Metadata -------------------------------------------------------------------------------------

    def _metadata(self, version: int, request: Any, reply: Reply) -> Any:
        asked = list(self.topics) if request.topics is None else [topic.name for topic in request.topics]
        broker = MetadataResponse.MetadataResponseBroker
        return MetadataResponse(
            version=version,
            throttle_time_ms=reply.throttle_ms,
            brokers=[broker(node_id=at, host=_HOST, port=port) for at, port in enumerate(self.ports)],
            cluster_id=self.cluster_id,
            controller_id=0,
            topics=[self._topic_metadata(name, reply.error, request.header.client_id) for name in asked],
        )

    def _topic_metadata(self, name: str, code: int, client_id: str) -> Any:
        topic = self.topics.get(name)
        if topic is None or code:
            return _Topic(error_code=code or UNKNOWN_TOPIC_OR_PARTITION, name=name, partitions=[])
        partitions = [
            _Topic.MetadataResponsePartition(
                partition_index=at, leader_id=node, leader_epoch=epoch, replica_nodes=[node], isr_nodes=[node]
            )
            for at, (leader, epoch) in enumerate(topic.leaders)
            for node in (self.zones.get(client_id, leader),)
        ]
        return _Topic(name=name, topic_id=topic.id, partitions=partitions)

    # -- CreateTopics, DescribeConfigs, InitProducerId --------------------------------------------------

    def _create_topics(self, version: int, request: Any, reply: Reply) -> Any:
        """Numbers of -1 are the broker's defaults from version 4 on, and refused before (KIP-464)."""
        (asked,) = request.topics
        code = reply.error
        if not code and version < _FIRST_WITH_DEFAULTS:
            code = INVALID_REPLICATION_FACTOR if -1 in (asked.num_partitions, asked.replication_factor) else 0
        if not code and not request.validate_only:
            self.create_topic(asked.name, max(asked.num_partitions, 1))
        row = CreateTopicsResponse.CreatableTopicResult(name=asked.name, error_code=code)
        return CreateTopicsResponse(version=version, throttle_time_ms=reply.throttle_ms, topics=[row])

    def _describe_configs(self, version: int, request: Any, reply: Reply) -> Any:
        (asked,) = request.resources
        result = DescribeConfigsResponse.DescribeConfigsResult
        config = result.DescribeConfigsResourceResult
        names = [] if reply.error else asked.configuration_keys
        row = result(
            error_code=reply.error,
            error_message=reply.message,
            resource_type=asked.resource_type,
            resource_name=asked.resource_name,
            configs=[config(name=name, value=BROKER_CONFIGS[name], synonyms=[]) for name in names],
        )
        return DescribeConfigsResponse(version=version, throttle_time_ms=reply.throttle_ms, results=[row])

    def _init_producer_id(self, version: int, _request: Any, reply: Reply) -> Any:
        """Return a producer id. Without a transactional id a broker gives a new one each time, whatever the
        request carries."""
        self._next_producer_id += not reply.error
        return InitProducerIdResponse(
            version=version,
            throttle_time_ms=reply.throttle_ms,
            error_code=reply.error,
            producer_id=-1 if reply.error else self._next_producer_id,
            producer_epoch=-1 if reply.error else reply.producer_epoch,
        )

    # -- Produce --------------------------------------------------------------------------------------

    def parse_batches(self, request: Any) -> tuple[RecordBatch, ...]:
        """The batches that a Produce request carries, as far as they can be read."""
        parsed = [
            parse_batch(self._topic_of(topic)[0] or topic.name, row.index, bytes(row.records or b""))
            for topic in request.topic_data
            for row in topic.partition_data
        ]
        return tuple(batch for batch in parsed if not isinstance(batch, int))

    def _topic_of(self, row: Any) -> tuple[str | None, int]:
        """(name, 0), or (None, the error code) of a topic that is not there."""
        if row.topic_id is None:
            return (row.name, 0) if row.name in self.topics else (None, UNKNOWN_TOPIC_OR_PARTITION)
        names = [name for name, topic in self.topics.items() if topic.id == row.topic_id]
        return (names[0], 0) if names else (None, UNKNOWN_TOPIC_ID)

    def _produce(self, version: int, node_id: int, request: Any, reply: Reply) -> Any:
        rows = []
        for topic in request.topic_data:
            name, code = self._topic_of(topic)
            partitions = []
            for row in topic.partition_data:
                returned, offset, leader = self._outcome(node_id, name, code, row, reply)
                partitions.append(_produce_partition(version, row.index, returned, offset, leader, reply))
            rows.append(
                _ProduceTopic(name=topic.name, topic_id=topic.topic_id, partition_responses=partitions)
            )
        answered = [row for topic in rows for row in topic.partition_responses]
        leaders = {row.current_leader.leader_id for row in answered if row.tags}
        endpoint = ProduceResponse.NodeEndpoint
        endpoints = [endpoint(node_id=one, host=_HOST, port=self.ports[one]) for one in sorted(leaders)]
        tagged = {"node_endpoints": endpoints} if endpoints else {}
        return ProduceResponse(version=version, responses=rows, throttle_time_ms=reply.throttle_ms, **tagged)

    def _outcome(
        self, node_id: int, name: str | None, code: int, row: Any, reply: Reply
    ) -> tuple[int, int, tuple[int, int] | None]:
        """(error code, base offset, a leader to name) for one partition."""
        returned = code or reply.partition_errors.get((name or "", row.index), reply.error)
        if name is None or (returned and not reply.append):
            return returned, -1, reply.leader
        found, offset, moved_to = self._append(node_id, name, row)
        return returned or found, offset, reply.leader or moved_to

    def _append(self, node_id: int, name: str, row: Any) -> tuple[int, int, tuple[int, int] | None]:
        """Return (error code, base offset, the leader if it is another broker)."""
        topic = self.topics[name]
        if row.index >= len(topic.logs):
            return UNKNOWN_TOPIC_OR_PARTITION, -1, None
        if node_id not in (topic.leaders[row.index][0], *self.zones.values()):
            return NOT_LEADER_OR_FOLLOWER, -1, topic.leaders[row.index]
        batch = parse_batch(name, row.index, bytes(row.records or b""))
        if isinstance(batch, int):
            return batch, -1, None
        return (*topic.logs[row.index].append(batch), None)


def _produce_partition(
    version: int, index: int, code: int, offset: int, leader: tuple[int, int] | None, reply: Reply
) -> Any:
    tagged: dict[str, Any] = {}
    if code and leader is not None and version >= _FIRST_WITH_LEADERS:
        named = _ProducePartition.LeaderIdAndEpoch(leader_id=leader[0], leader_epoch=leader[1])
        tagged["current_leader"] = named
    return _ProducePartition(
        index=index,
        error_code=code,
        base_offset=-1 if code and not reply.tell_offset else offset,
        log_start_offset=reply.log_start_offset if code else 0,
        error_message=reply.message if code else None,
        **tagged,
    )


def framed(response: Any, correlation: int) -> bytes:
    """A response as bytes, its length and header included."""
    response.with_header(correlation_id=correlation)
    # This has no version=, which the library's setter takes for requests only, once there is a header.
    return bytes(response.encode(header=True, framed=True))
