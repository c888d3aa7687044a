"""The sender thread: accumulator to brokers and back.

It owns all sockets. One pass of ``run_once`` expires what is too old, refreshes metadata, drains what is
ready into one Produce request per broker, and acts on what the network reports.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kafka_sink.accumulator.producer_batch import BatchState, ProducerBatch
from kafka_sink.accumulator.record_accumulator import PartitionQueue, RecordAccumulator
from kafka_sink.backoff import ExponentialBackoff
from kafka_sink.errors import DeliveryError, KafkaSinkError
from kafka_sink.model import Node, TopicPartition
from kafka_sink.network import produce, requests
from kafka_sink.network.client import (
    NetworkClient,
    NetworkEvent,
    OutboundRequest,
    RequestFailed,
    ResponseReceived,
)
from kafka_sink.sending import outcomes
from kafka_sink.sending.cluster_view import ClusterView
from kafka_sink.sending.deliveries import Deliveries
from kafka_sink.sending.producer_identity import ProducerIdentity
from kafka_sink.sending.splitting import split_batch

_log = logging.getLogger(__name__)
_LONGEST_POLL_MS = 1000.0


@dataclass(frozen=True, slots=True)
class SenderSettings:
    """The options of the same names; times in milliseconds, sizes in bytes."""

    acks: int
    max_request_size: int
    request_timeout_ms: float
    retries: int
    batch_size: int
    allow_auto_create_topics: bool
    transactional_id: str | None = None


@dataclass(slots=True)
class _ProduceTag:
    """What a Produce request carried, by partition and, from v13 on, by topic id."""

    batches: dict[TopicPartition, ProducerBatch]
    names: dict[bytes, str]
    version: int


@dataclass(frozen=True, slots=True)
class _MetadataTag:
    topics: tuple[str, ...]
    version: int


@dataclass(frozen=True, slots=True)
class _InitTag:
    version: int


class Sender(threading.Thread):
    """Runs until ``close``; a daemon, because a killed task must not be kept alive by it."""

    def __init__(
        self,
        settings: SenderSettings,
        accumulator: RecordAccumulator,
        cluster: ClusterView,
        network: NetworkClient,
        identity: ProducerIdentity | None,
        backoff: ExponentialBackoff,
        clock_ms: Callable[[], float],
    ) -> None:
        super().__init__(name="kafka-chunked-sender", daemon=True)
        self.deliveries = Deliveries()
        self.crash: BaseException | None = None
        self._settings = settings
        self._accumulator = accumulator
        self._cluster = cluster
        self._network = network
        self._identity = identity
        self._backoff = backoff
        self._clock_ms = clock_ms
        self._closing = False
        self._known_version = -1
        # Sent and unanswered batches; they expire too, though their memory stays until the answer.
        self._in_flight: dict[int, ProducerBatch] = {}

    # -- the loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """The thread's body. A bug here must not look like a slow broker, so it is kept and told."""
        try:
            while not self._closing:
                self.run_once(self._clock_ms())
        except Exception as error:  # noqa: BLE001 - whatever it is, the waiting task must hear of it
            self.crash = error
            _log.exception("the sender stopped on an unexpected error")
            self.deliveries.failed(None, 0, KafkaSinkError(f"the sender stopped: {error!r}"))
            with self._accumulator.lock:
                self._accumulator.completed.notify_all()
        finally:
            self._network.close()

    def run_once(self, now_ms: float) -> None:
        """One pass; blocks in the network poll until something can happen."""
        delay = min(_LONGEST_POLL_MS, self._expire(now_ms))
        self._refresh_nodes()
        delay = min(delay, self._request_metadata(now_ms))
        if self._identity is not None and not self._identity.ready:
            delay = min(delay, self._request_producer_id(now_ms))
        else:
            delay = min(delay, self._send_ready(now_ms))
        for event in self._network.poll(max(delay, 0.0), now_ms):
            self._handle(event, self._clock_ms())

    def wakeup(self) -> None:
        """From any thread: something changed."""
        self._network.wakeup()

    def close(self, timeout_ms: float) -> None:
        """Ends the thread; batches without an answer stay without one."""
        self._closing = True
        self._network.wakeup()
        if self.is_alive():
            self.join(timeout_ms / 1000)

    def _refresh_nodes(self) -> None:
        if self._cluster.version != self._known_version:
            self._known_version = self._cluster.version
            self._network.set_nodes(self._cluster.nodes().values())

    # -- expiry -----------------------------------------------------------------------------------

    def _expire(self, now_ms: float) -> float:
        expired, delay = self._accumulator.expired(now_ms)
        timeout = self._accumulator.settings.delivery_timeout_ms
        for batch in self._in_flight.values():
            left = batch.created_ms + timeout - now_ms
            if left <= 0:
                expired.append(batch)
            else:
                delay = min(delay, left)
        for batch in expired:
            self._fail(batch, outcomes.expiry(batch.partition, timeout, batch.attempts, batch.last_error))
        return delay

    def _fail(self, batch: ProducerBatch, cause: Exception) -> None:
        if self._accumulator.fail(batch):
            self.deliveries.failed(batch.partition, batch.record_count, cause)

    # -- metadata and producer id -----------------------------------------------------------------

    def _request_metadata(self, now_ms: float) -> float:
        delay = self._cluster.next_request_delay_ms(now_ms)
        if delay > 0:
            return delay
        node = self._network.least_loaded_node(now_ms)
        if node is None or not self._network.ready_for_any(node, now_ms):
            return self._network.connect_delay_ms(now_ms)
        topics = self._cluster.next_request(now_ms)
        if topics is None:
            return math.inf
        version = self._network.api_version(node, requests.METADATA, requests.METADATA_VERSIONS)
        body = requests.encode_metadata(version, topics, self._settings.allow_auto_create_topics)
        self._send(node, requests.METADATA, version, [body], _MetadataTag(topics, version), now_ms)
        return math.inf

    def _request_producer_id(self, now_ms: float) -> float:
        identity = self._identity
        if identity is None or not identity.may_request(now_ms):
            return math.inf if identity is None else identity.retry_delay_ms(now_ms)
        node = self._network.least_loaded_node(now_ms)
        if node is None or not self._network.ready_for_any(node, now_ms):
            return self._network.connect_delay_ms(now_ms)
        api = requests.INIT_PRODUCER_ID
        version = self._network.api_version(node, api, requests.INIT_PRODUCER_ID_VERSIONS)
        body = requests.encode_init_producer_id(version, identity.producer_id, identity.producer_epoch)
        identity.requested()
        self._send(node, api, version, [body], _InitTag(version), now_ms)
        return math.inf

    def _send(
        self,
        node: int,
        api: int,
        version: int,
        body: Sequence[bytes | memoryview],
        tag: object,
        now_ms: float,
    ) -> None:
        expects = not (api == requests.PRODUCE and self._settings.acks == 0)
        timeout = self._settings.request_timeout_ms
        self._network.send(node, OutboundRequest(api, version, body, expects, timeout, tag), now_ms)

    # -- produce ----------------------------------------------------------------------------------

    def _send_ready(self, now_ms: float) -> float:
        check = self._accumulator.ready(self._cluster.leader, now_ms)
        delay = check.next_check_delay_ms
        for topic in check.unknown_leaders:
            self._cluster.mark_stale(topic, now_ms)
        if check.unknown_leaders:
            delay = min(delay, self._cluster.next_request_delay_ms(now_ms))
        for node, queues in check.nodes.items():
            if not self._network.ready(node, now_ms):
                delay = min(delay, self._network.ready_delay_ms(node, now_ms))
                continue
            delay = min(delay, self._produce(node, queues, now_ms))
        return delay

    def _produce(self, node: int, queues: Sequence[PartitionQueue], now_ms: float) -> float:
        """Sends one request; 0 where more may be waiting for the same broker."""
        taken = self._accumulator.drain(node, queues, self._settings.max_request_size, self._may_send)
        if not taken:
            return math.inf
        version = self._network.api_version(node, requests.PRODUCE, produce.VERSIONS)
        names: dict[bytes, str] = {}
        topics: dict[str, tuple[bytes | None, list[tuple[int, list[memoryview], int]]]] = {}
        for batch in taken:
            self._prepare(batch, now_ms)
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
            topics[topic][1].append((batch.partition.partition, batch.buffer.views(), batch.size))
        body = produce.produce_body(
            version,
            self._settings.acks,
            int(self._settings.request_timeout_ms),
            self._settings.transactional_id,
            [(name, topic_id, parts) for name, (topic_id, parts) in topics.items()],
        )
        tag = _ProduceTag({batch.partition: batch for batch in taken}, names, version)
        self.deliveries.count(requests=1)
        self._send(node, requests.PRODUCE, version, body, tag, now_ms)
        return 0.0

    def _may_send(self, batch: ProducerBatch) -> bool:
        return self._identity is None or self._identity.may_send(batch)

    def _prepare(self, batch: ProducerBatch, now_ms: float) -> None:
        """Makes a taken batch's bytes final. Only here does it get its sequence."""
        if batch.state is BatchState.CLOSED:
            batch.seal()
        if self._identity is not None and self._identity.assign(batch):
            batch.header_current = False
        if not batch.header_current:
            batch.write_header(transactional=self._settings.transactional_id is not None)
        batch.move_to(BatchState.IN_FLIGHT)
        batch.attempts += 1
        batch.last_attempt_ms = now_ms
        self._in_flight[id(batch)] = batch

    # -- what the network reports -------------------------------------------------------------------

    def _handle(self, event: NetworkEvent, now_ms: float) -> None:
        if isinstance(event, ResponseReceived):
            self._on_response(event, now_ms)
        elif isinstance(event, RequestFailed):
            self._on_failure(event, now_ms)

    def _on_response(self, event: ResponseReceived, now_ms: float) -> None:
        tag = event.tag
        if isinstance(tag, _ProduceTag):
            self._on_produced(event, tag, now_ms)
        elif isinstance(tag, _MetadataTag):
            self._cluster.on_response(requests.metadata_update(event.response), tag.topics, now_ms)
        elif isinstance(tag, _InitTag) and self._identity is not None:
            failure = self._identity.on_response(requests.init_producer_id(event.response), now_ms)
            if failure is not None:
                self._fail_all(failure)

    def _on_failure(self, event: RequestFailed, now_ms: float) -> None:
        tag = event.tag
        if isinstance(tag, _ProduceTag):
            for batch in tag.batches.values():
                self._cluster.mark_stale(batch.partition.topic, now_ms)
                outcome = outcomes.classify_failure(event.cause, possibly_sent=event.possibly_sent)
                self._apply(batch, outcome, now_ms)
        elif isinstance(tag, _MetadataTag):
            self._cluster.on_failure(now_ms)
        elif isinstance(tag, _InitTag) and self._identity is not None:
            self._identity.on_failure(now_ms)
        if outcomes.is_final(event.cause):
            self._fail_all(event.cause)

    def _fail_all(self, cause: Exception) -> None:
        """The producer cannot go on (authentication, no producer id): everything queued is lost."""
        self.deliveries.failed(None, 0, cause)
        with self._accumulator.lock:
            queued = [batch for batch in self._accumulator.queued() if not batch.leased]
        for batch in [*queued, *self._in_flight.values()]:
            self._fail(batch, cause)

    def _on_produced(self, event: ResponseReceived, tag: _ProduceTag, now_ms: float) -> None:
        if self._settings.acks == 0:
            for batch in tag.batches.values():
                self._succeed(batch, -1, -1, confirmed=False)
            return
        response = event.response
        pending = dict(tag.batches)
        for answer in response.partitions:
            topic = answer.topic if answer.topic is not None else tag.names.get(answer.topic_id or b"", "")
            answered = pending.pop(TopicPartition(topic, answer.partition), None)
            if answered is None:
                _log.warning("an answer for %s-%d, which was not sent", topic, answer.partition)
                continue
            self._on_answer(answered, answer, response.node_endpoints, now_ms)
        for batch in pending.values():
            cause = DeliveryError(f"the broker's answer left out {batch.partition}")
            self._apply(batch, outcomes.classify_failure(cause, possibly_sent=True), now_ms)

    def _on_answer(
        self,
        batch: ProducerBatch,
        answer: produce.ProducePartitionResponse,
        nodes: Iterable[Node],
        now_ms: float,
    ) -> None:
        if answer.error_code == 0:
            self._succeed(batch, answer.base_offset, answer.log_append_time_ms)
            return
        newer = False
        if answer.current_leader is not None:
            newer = self._cluster.leader_hint(batch.partition, *answer.current_leader, nodes)
        attempt = outcomes.Attempt(
            partition=batch.partition,
            error_code=answer.error_code,
            error_message=answer.error_message,
            record_errors=answer.record_errors,
            record_count=batch.record_count,
            size=batch.size,
            possibly_written=batch.possibly_written,
            idempotent=self._identity is not None,
            is_next_expected=self._identity is not None and self._identity.is_next(batch),
            leader_hint_newer=newer,
        )
        self._apply(batch, outcomes.classify_response(attempt), now_ms)

    def _succeed(
        self, batch: ProducerBatch, base_offset: int, log_append_time_ms: int, *, confirmed: bool = True
    ) -> None:
        self._in_flight.pop(id(batch), None)
        wire_bytes = batch.size
        if self._identity is not None:
            self._identity.acknowledged(batch)
        if self._accumulator.finish(batch, BatchState.SUCCEEDED):
            self.deliveries.acknowledged(
                batch.partition,
                records=batch.record_count,
                raw_bytes=batch.raw_bytes,
                wire_bytes=wire_bytes,
                base_offset=base_offset,
                log_append_time_ms=log_append_time_ms,
                confirmed=confirmed,
            )

    def _apply(self, batch: ProducerBatch, outcome: outcomes.Outcome, now_ms: float) -> None:
        """The one dispatcher: does what the classifier decided."""
        self._in_flight.pop(id(batch), None)
        batch.possibly_written |= outcome.possibly_written
        batch.last_error = outcome.cause
        if outcome.refresh:
            self._cluster.mark_stale(batch.partition.topic, now_ms)
        action = outcome.action
        if action is outcomes.Action.SUCCEED:
            self._in_flight[id(batch)] = batch
            self._succeed(batch, -1, -1)
        elif action is outcomes.Action.SPLIT:
            self._split(batch)
        elif action is outcomes.Action.RETRY and (
            not outcome.spends_retry or batch.attempts <= self._settings.retries
        ):
            wait = 0.0 if outcome.immediate else self._backoff.delay_ms(batch.attempts)
            self.deliveries.count(retries=1)
            self._accumulator.requeue(batch, now_ms + wait)
        else:
            cause = outcome.cause or DeliveryError("the broker refused the batch")
            if self._accumulator.finish(batch, BatchState.FAILED):
                self.deliveries.failed(batch.partition, batch.record_count, cause)

    def _split(self, batch: ProducerBatch) -> None:
        """MESSAGE_TOO_LARGE: the records go on in smaller batches with consecutive sequences."""
        pieces = split_batch(batch, self._settings.batch_size, self._accumulator.allocator)
        if self._identity is not None:
            self._identity.replaced(batch, pieces)
        self.deliveries.count(splits=1)
        self._accumulator.put_pieces(batch, pieces)
