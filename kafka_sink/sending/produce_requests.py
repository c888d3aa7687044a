"""Fills one Produce request with ready batches, and encodes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kafka_sink.accumulator.batch_queues import PartitionQueue
from kafka_sink.accumulator.producer_batch import BatchState, ProducerBatch
from kafka_sink.accumulator.record_accumulator import RecordAccumulator
from kafka_sink.metadata.cluster_metadata import ClusterMetadata
from kafka_sink.model import TopicPartition
from kafka_sink.network import apis, produce
from kafka_sink.network.client import NetworkClient, OutboundRequest
from kafka_sink.sending.producer_identity import ProducerIdentity
from kafka_sink.sending.settings import SenderSettings


def fill_request(
    accumulator: RecordAccumulator,
    node: int,
    queues: Sequence[PartitionQueue],
    max_bytes: int,
    may_send: Callable[[ProducerBatch], bool],
    split_if_too_large: Callable[[ProducerBatch], bool],
) -> list[ProducerBatch]:
    """Sealed batches for one request to a broker: one for each partition, ``max_bytes`` in total.

    Only the first batch may exceed that. An open batch is chosen by its estimated compressed size. Once it is
    sealed, its true size decides whether more batches fit or the last ones go back to their queues.
    ``split_if_too_large`` may put the pieces of a batch into its queue instead.
    """
    taken: dict[TopicPartition, ProducerBatch] = {}
    filled = 0

    def may_go(batch: ProducerBatch) -> bool:
        return batch.partition not in taken and may_send(batch)

    while filled < max_bytes:
        more = accumulator.drain(node, queues, max_bytes, may_go, filled)
        estimated = [batch for batch in more if batch.state is BatchState.CLOSED]
        for batch in estimated:
            batch.seal()
        whole = [batch for batch in more if not split_if_too_large(batch)]
        for at, batch in enumerate(whole):
            if taken and filled + batch.size > max_bytes:
                accumulator.put_back(whole[at:])
                return list(taken.values())
            taken[batch.partition] = batch
            filled += batch.size
        if not estimated and len(whole) == len(more):
            break
    return list(taken.values())


@dataclass(slots=True)
class ProduceTag:
    """A Produce request's batches. ``names`` maps the ids of topics that were sent by id (from v13 on)."""

    node_id: int
    batches: dict[TopicPartition, ProducerBatch]
    names: dict[bytes, str]


class ProduceRequests:
    """Used by the sender's thread only."""

    def __init__(
        self,
        settings: SenderSettings,
        cluster: ClusterMetadata,
        network: NetworkClient,
        identity: ProducerIdentity | None,
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._network = network
        self._identity = identity

    def build(self, node: int, taken: Sequence[ProducerBatch]) -> OutboundRequest:
        """One request of sealed batches for a connected broker. The batches become in flight.

        Raises BrokerVersionError where broker and sink have no version of Produce in common.
        """
        version = self._network.api_version(node, apis.PRODUCE, produce.VERSIONS)
        if self._identity is not None and self._identity.adds_partitions:
            version = min(version, produce.LAST_VERSION_OF_PROTOCOL_1)
        names: dict[bytes, str] = {}
        topics: dict[str, tuple[bytes | None, list[tuple[int, list[memoryview], int]]]] = {}
        for batch in taken:
            views = self._prepare(batch)
            topic = batch.partition.topic
            if topic not in topics:
                metadata = self._cluster.topic(topic)
                topic_id = None if metadata is None else metadata.topic_id
                topics[topic] = (topic_id, [])
                if topic_id is None:
                    # Without an id the request must name its topics.
                    version = min(version, produce.LAST_VERSION_WITH_NAMES)
                else:
                    names[topic_id] = topic
            topics[topic][1].append((batch.partition.partition, views, batch.size))
        body = produce.produce_body(
            version,
            self._settings.acks,
            int(self._settings.request_timeout_ms),
            None if self._identity is None else self._identity.transactional_id,
            [(name, topic_id, parts) for name, (topic_id, parts) in topics.items()],
        )
        tag = ProduceTag(node, {batch.partition: batch for batch in taken}, names)
        expects_response = self._settings.acks != 0
        timeout = self._settings.request_timeout_ms
        asked = len(topics) + len(taken)
        return OutboundRequest(apis.PRODUCE, version, body, expects_response, timeout, tag, asked)

    def _prepare(self, batch: ProducerBatch) -> list[memoryview]:
        """Complete a sealed batch's header; return the batch's bytes. Nothing else assigns a sequence."""
        identity = self._identity
        if identity is not None:
            identity.assign(batch)
        in_transaction = identity is not None and identity.transactional_id is not None
        views = batch.write_header(transactional=in_transaction)
        batch.move_to(BatchState.IN_FLIGHT)
        batch.attempts += 1
        return views
