"""The sender's requests: Produce with ready batches, and probes of muted brokers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kafka_sink.breaker.breaker import Breaker
from kafka_sink.cluster.broker import Broker, SentRequest
from kafka_sink.cluster.partition import BatchState, Partition, ProducerBatch
from kafka_sink.cluster.producer_metadata import ProducerMetadata
from kafka_sink.engine.accumulator import RecordAccumulator
from kafka_sink.engine.identity import ProducerIdentity
from kafka_sink.engine.splitting import is_too_large, split
from kafka_sink.model import TopicPartition
from kafka_sink.network import apis, produce, requests
from kafka_sink.network.broker_connection import BrokerConnection
from kafka_sink.network.broker_protocol import OnFailure, OnResponse, Request
from kafka_sink.network.client import NetworkClient
from kafka_sink.options import SinkOptions
from kafka_sink.records.encoder import MAX_RECORDS_PER_BATCH
from kafka_sink.version import __version__


def fill_request(
    accumulator: RecordAccumulator,
    broker: Broker,
    partitions: Sequence[Partition],
    max_bytes: int,
    may_send: Callable[[ProducerBatch], bool],
) -> list[ProducerBatch]:
    """Take sealed batches for one request to a broker: at most one of each partition, ``max_bytes`` in total,
    and no more records than one batch may have, because a response may contain a text for each record.

    Only the first batch may exceed ``max_bytes``. An open batch is chosen by its estimated compressed size.
    Once it is sealed, its true size decides whether more batches fit or the last ones go back to their
    queues. A batch that its brokers would refuse as too large is split.
    """
    taken: dict[TopicPartition, ProducerBatch] = {}
    filled = records = 0

    def may_go(batch: ProducerBatch) -> bool:
        return batch.topic_partition not in taken and may_send(batch)

    while filled < max_bytes and len(taken) < len(partitions):
        more = accumulator.drain(broker, partitions, max_bytes, may_go if taken else may_send, filled)
        estimated = [batch for batch in more if batch.state is BatchState.CLOSED]
        for batch in estimated:
            batch.seal()
        large = [batch for batch in more if is_too_large(batch)] if accumulator.any_learnt else []
        for batch in large:
            split(accumulator, batch)
        whole = [batch for batch in more if batch not in large] if large else more
        for at, batch in enumerate(whole):
            size = batch.buffer.size
            records += batch.record_count
            if taken and (filled + size > max_bytes or records > MAX_RECORDS_PER_BATCH):
                accumulator.put_back(whole[at:])
                return list(taken.values())
            taken[batch.topic_partition] = batch
            filled += size
        if not (estimated or large):
            break
    return list(taken.values())


def produce_request(
    options: SinkOptions,
    cluster: ProducerMetadata,
    version: int,
    identity: ProducerIdentity | None,
    taken: Sequence[ProducerBatch],
    on_response: OnResponse,
    on_failure: OnFailure,
) -> SentRequest:
    """Make a Produce request of this version from sealed batches, which become in flight."""
    if identity is not None and identity.adds_partitions:
        version = min(version, produce.LAST_VERSION_OF_PROTOCOL_1)
    in_transaction = identity is not None and identity.transactional_id is not None
    names: dict[bytes, str] = {}
    topics: dict[str, tuple[bytes | None, list[produce.PartitionData]]] = {}
    new_rows = 0
    for batch in taken:
        # A batch gets its first sequence here. Splits and closed gaps may change it later (``Partition``).
        if identity is not None:
            identity.assign(batch)
        views = batch.write_header(transactional=in_transaction)
        batch.move_to(BatchState.IN_FLIGHT)
        batch.attempts += 1
        new_rows += 0 if batch.was_sent else batch.record_count
        batch.was_sent = True
        topic, partition = batch.topic_partition
        of_topic = topics.get(topic)
        if of_topic is None:
            metadata = cluster.topic(topic)
            topic_id = None if metadata is None else metadata.topic_id
            of_topic = topics[topic] = topic_id, []
            if topic_id is None:
                # Without the topic's id the request must contain topic names.
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
    request = Request(
        apis.PRODUCE,
        version,
        body,
        options.request_timeout_ms,
        on_response,
        on_failure,
        expects_response=options.acks != 0,
        asked=len(topics) + len(taken),
        records=sum([batch.record_count for batch in taken]),
    )
    return SentRequest(request, list(taken), names, new_rows)


def probe_brokers(
    breaker: Breaker, cluster: ProducerMetadata, network: NetworkClient, options: SinkOptions, now_ms: float
) -> float:
    """Send the probes that the breaker wants. Return the milliseconds until another may be possible."""
    delay = math.inf
    for node_id in breaker.task_mutes.brokers_to_probe():
        broker = cluster.broker(node_id)
        connection = broker.connection
        if connection is None:
            # The cluster no longer lists this broker, so its address is unknown until it is back.
            breaker.on_probe(node_id, now_ms)
            breaker.on_probe_done(node_id, ConnectionError("the cluster no longer lists this broker"), now_ms)
        elif network.is_ready(connection, now_ms):
            network.send(connection, _probe(breaker, connection, options, node_id), now_ms)
            breaker.on_probe(node_id, now_ms)
        else:
            delay = min(delay, broker.delay_ms(now_ms))
    return delay


def _probe(breaker: Breaker, connection: BrokerConnection, options: SinkOptions, node_id: int) -> Request:
    """Make a probe: an ApiVersions request, to which every broker responds at once. It is sent after the
    Produce requests in flight, so that its response shows that they are not stuck."""
    version = connection.api_version(apis.API_VERSIONS)
    return Request(
        apis.API_VERSIONS,
        version,
        [requests.encode_api_versions(version, __version__)],
        options.request_timeout_ms,
        lambda _, now_ms: breaker.on_probe_done(node_id, None, now_ms),
        lambda cause, _, now_ms: breaker.on_probe_done(node_id, cause, now_ms),
    )
