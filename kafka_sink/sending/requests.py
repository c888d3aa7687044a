"""The sender's requests: Produce with ready batches, producer ids, and probes of muted brokers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kafka_sink.accumulator.batch_queues import PartitionQueue
from kafka_sink.accumulator.producer_batch import BatchState, ProducerBatch
from kafka_sink.accumulator.record_accumulator import RecordAccumulator
from kafka_sink.breaker.interface import SendPolicy
from kafka_sink.errors import KafkaSinkError
from kafka_sink.metadata.cluster_metadata import ClusterMetadata
from kafka_sink.model import TopicPartition
from kafka_sink.network import apis, produce, requests
from kafka_sink.network.client import NetworkClient, OutboundRequest, RequestFailed, ResponseReceived
from kafka_sink.records.encoder import MAX_RECORDS_PER_BATCH
from kafka_sink.sending.producer_identity import ProducerIdentity
from kafka_sink.version import __version__

if TYPE_CHECKING:
    from kafka_sink.options import SinkOptions


def fill_request(
    accumulator: RecordAccumulator,
    node: int,
    queues: Sequence[PartitionQueue],
    max_bytes: int,
    may_send: Callable[[ProducerBatch], bool],
    split_if_too_large: Callable[[ProducerBatch], bool] | None,
) -> list[ProducerBatch]:
    """Sealed batches for one request to a broker: one for each partition, ``max_bytes`` in total, and no more
    records than one batch may have: brokers may respond with a text for each.

    Only the first batch may exceed ``max_bytes``. An open batch is chosen by its estimated compressed size.
    Once it is sealed, its true size decides whether more batches fit or the last ones go back to their
    queues. ``split_if_too_large`` may put the pieces of a batch into its queue instead; None where no broker
    was found to take less than batch.size.
    """
    taken: dict[TopicPartition, ProducerBatch] = {}
    filled = records = 0

    def may_go(batch: ProducerBatch) -> bool:
        return batch.partition not in taken and may_send(batch)

    while filled < max_bytes and len(taken) < len(queues):
        more = accumulator.drain(node, queues, max_bytes, may_go if taken else may_send, filled)
        estimated = [batch for batch in more if batch.state is BatchState.CLOSED]
        for batch in estimated:
            batch.seal()
        whole = more
        if split_if_too_large is not None:
            whole = [batch for batch in more if not split_if_too_large(batch)]
        for at, batch in enumerate(whole):
            size = batch.buffer.size
            records += batch.record_count
            if taken and (filled + size > max_bytes or records > MAX_RECORDS_PER_BATCH):
                accumulator.put_back(whole[at:])
                return list(taken.values())
            taken[batch.partition] = batch
            filled += size
        if not estimated and len(whole) == len(more):
            break
    return list(taken.values())


@dataclass(slots=True)
class ProduceTag:
    """A Produce request's batches. ``names`` maps the ids of topics that were sent by id (from v13 on)."""

    node_id: int
    batches: dict[TopicPartition, ProducerBatch]
    names: dict[bytes, str]


def produce_request(
    options: SinkOptions,
    cluster: ClusterMetadata,
    network: NetworkClient,
    identity: ProducerIdentity | None,
    node: int,
    taken: Sequence[ProducerBatch],
) -> OutboundRequest:
    """One request of sealed batches for a connected broker. The batches become in flight.

    Raises BrokerVersionError where broker and sink have no version of Produce in common.
    """
    version = network.api_version(node, apis.PRODUCE)
    if identity is not None and identity.adds_partitions:
        version = min(version, produce.LAST_VERSION_OF_PROTOCOL_1)
    in_transaction = identity is not None and identity.transactional_id is not None
    names: dict[bytes, str] = {}
    topics: dict[str, tuple[bytes | None, list[produce.PartitionData]]] = {}
    for batch in taken:
        # Nothing else assigns a sequence.
        if identity is not None:
            identity.assign(batch)
        views = batch.write_header(transactional=in_transaction)
        batch.move_to(BatchState.IN_FLIGHT)
        batch.attempts += 1
        topic, partition = batch.partition
        of_topic = topics.get(topic)
        if of_topic is None:
            metadata = cluster.topic(topic)
            topic_id = None if metadata is None else metadata.topic_id
            of_topic = topics[topic] = topic_id, []
            if topic_id is None:
                # Without an id the request must name its topics.
                version = min(version, produce.LAST_VERSION_WITH_NAMES)
            else:
                names[topic_id] = topic
        of_topic[1].append((partition, views, batch.buffer.size))
    body = produce.produce_body(
        version,
        options.acks,
        options.request_timeout_ms,
        None if identity is None else identity.transactional_id,
        [(name, topic_id, parts) for name, (topic_id, parts) in topics.items()],
    )
    tag = ProduceTag(node, {batch.partition: batch for batch in taken}, names)
    expects_response = options.acks != 0
    timeout = options.request_timeout_ms
    asked, records = len(topics) + len(taken), sum([batch.record_count for batch in taken])
    return OutboundRequest(apis.PRODUCE, version, body, expects_response, timeout, tag, asked, records)


@dataclass(frozen=True, slots=True)
class ProducerIdTag:
    """Marks an InitProducerId request. One of an earlier ``generation`` went to another cluster."""

    generation: int


class ProducerIdRequests:
    """Used by the sender's thread. Times are monotonic milliseconds."""

    def __init__(self, identity: ProducerIdentity, network: NetworkClient, request_timeout_ms: float) -> None:
        self._identity = identity
        self._network = network
        self._request_timeout_ms = request_timeout_ms

    def refresh(self, now_ms: float) -> float:
        """Ask for an id where it is missing; return the milliseconds until there may be something to do."""
        identity = self._identity
        if not identity.may_request(now_ms):
            return identity.retry_delay_ms(now_ms)
        # A bootstrap address may lead to another cluster by now, where another producer has the id.
        node, delay = self._network.node_to_ask(now_ms, known_only=True)
        if node is None:
            return delay
        api = apis.INIT_PRODUCER_ID
        version = self._network.api_version(node, api)
        body = requests.encode_init_producer_id(version, identity.producer_id, identity.producer_epoch)
        tag = ProducerIdTag(identity.generation)
        identity.requested()
        request = OutboundRequest(api, version, [body], True, self._request_timeout_ms, tag)
        self._network.send(node, request, now_ms)
        return math.inf

    def on_response(
        self, event: ResponseReceived, tag: ProducerIdTag, now_ms: float
    ) -> KafkaSinkError | None:
        """Take the id; return an error where no retry can help."""
        if tag.generation != self._identity.generation:
            return None
        return self._identity.on_response(event.response, now_ms)

    def on_failure(self, event: RequestFailed, tag: ProducerIdTag, now_ms: float) -> None:
        if tag.generation == self._identity.generation:
            self._identity.on_failure(now_ms, event.cause)


@dataclass(frozen=True, slots=True)
class BrokerProbeTag:
    """Marks a probe."""


def probe_brokers(policy: SendPolicy, network: NetworkClient, options: SinkOptions, now_ms: float) -> float:
    """Probe every broker that the policy names; return the milliseconds until another can be sent."""
    delay = math.inf
    for node in policy.brokers_to_probe():
        if network.ready_for_any(node, now_ms):
            network.send(node, _probe(network, options, node), now_ms)
            policy.on_probe(node, now_ms)
        elif not network.knows(node):
            # The cluster no longer lists this broker, and its address is unknown until it is back.
            policy.on_probe(node, now_ms)
            policy.on_probe_done(node, ConnectionError("the cluster misses it"), now_ms)
        else:
            delay = min(delay, network.ready_delay_ms(node, now_ms))
    return delay


def _probe(network: NetworkClient, options: SinkOptions, node: int) -> OutboundRequest:
    """ApiVersions is the one request to which every broker responds at once, without a login too.

    It takes the connection of Produce requests, behind those in flight, so that its response speaks for them.
    """
    api = apis.API_VERSIONS
    version = network.api_version(node, api)
    body = requests.encode_api_versions(version, __version__)
    return OutboundRequest(api, version, [body], True, options.request_timeout_ms, BrokerProbeTag())
