"""The id and epoch of the idempotent producer (KIP-98, KIP-360). Each Partition keeps its own sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter

from kafka_sink import kafka_errors
from kafka_sink.clock import ExponentialBackoff
from kafka_sink.cluster.partition import Partition, ProducerBatch
from kafka_sink.errors import BrokerVersionError, DeliveryError, KafkaSinkError
from kafka_sink.model import TopicPartition
from kafka_sink.network import apis, requests
from kafka_sink.network.broker_connection import BrokerConnection
from kafka_sink.network.broker_protocol import OnResponse, Request
from kafka_sink.network.client import NetworkClient
from kafka_sink.network.requests import ProducerIdResponse
from kafka_sink.records.batch_header import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_SEQUENCE

_LAST_EPOCH = (1 << 15) - 1
# Further failures do not increase the backoff.
_MAX_BACKOFFS = 6
_FINAL_ERRORS = frozenset(
    {kafka_errors.CLUSTER_AUTHORIZATION_FAILED, kafka_errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED}
)
_WITHOUT_ID = (
    "Set kafka.enable.idempotence=false if a row may be written twice when a response is lost; "
    "kafka.max.in.flight.requests.per.connection=1 then keeps the order"
)
NO_ID = (NO_PRODUCER_ID, NO_PRODUCER_EPOCH)


class ProducerIdentity:
    """The id and epoch that batches are written with, and the partitions that have sequences of them.

    Only the sender's thread uses it. Times are monotonic milliseconds.
    """

    transactional_id: str | None = None
    # Whether partitions are added to the transaction before their first batch: transaction protocol 1.
    adds_partitions = False

    def __init__(
        self, network: NetworkClient, request_timeout_ms: float, backoff: ExponentialBackoff
    ) -> None:
        self.producer_id, self.producer_epoch = NO_ID
        self.last_error: str | None = None
        # Called with an error that no retry can help. The sender sets it.
        self.fail: Callable[[KafkaSinkError], object] = lambda _: None
        # This number increases when the id is given up. Responses to earlier requests are then ignored,
        # because they come from another cluster or belong to another transaction.
        self.generation = 0
        self._network = network
        self._request_timeout_ms = request_timeout_ms
        self._backoff = backoff
        self._failures = 0
        self._not_before_ms = -math.inf
        # The generation in which the request in flight was sent; None if no request is in flight.
        self._requested_in: int | None = None
        # The partitions with sequences, and those whose sequences have to restart or have a gap.
        self._written: set[Partition] = set()
        self.needing_repair: set[Partition] = set()

    @property
    def ready(self) -> bool:
        """Whether there is an id to write with."""
        return self.producer_id != NO_PRODUCER_ID

    def refresh(self, now_ms: float) -> float:
        """Request an id. Return the milliseconds until this method can do more."""
        if self._requested_in == self.generation:
            return math.inf
        if now_ms < self._not_before_ms:
            return self._not_before_ms - now_ms
        # A bootstrap address is not used: it may lead to another cluster, where another producer has this id.
        connection, delay = self._network.connection_to_ask(now_ms, known_only=True)
        if connection is None:
            return delay
        try:
            version = connection.api_version(apis.INIT_PRODUCER_ID)
        except BrokerVersionError as error:
            self.fail(BrokerVersionError(f"{error}. {_WITHOUT_ID}"))
            return math.inf
        body = requests.encode_init_producer_id(version, self.producer_id, self.producer_epoch)
        self._send(connection, apis.INIT_PRODUCER_ID, version, body, self._on_producer_id, now_ms)
        return math.inf

    def _send(
        self,
        connection: BrokerConnection,
        api: int,
        version: int,
        body: bytes,
        on_response: OnResponse,
        now_ms: float,
        asked: int = 0,
    ) -> None:
        """Send a request, which is the only one in flight in this generation."""
        generation = self._requested_in = self.generation

        def responded(response: object, at_ms: float) -> None:
            if generation == self.generation:
                self._requested_in = None
                on_response(response, at_ms)

        def failed(cause: Exception, _: bool, at_ms: float) -> None:
            if generation == self.generation:
                self._on_failure(cause, at_ms)

        timeout_ms = self._request_timeout_ms
        request = Request(api, version, [body], timeout_ms, responded, failed, asked=asked)
        self._network.send(connection, request, now_ms)

    def _on_producer_id(self, response: ProducerIdResponse, now_ms: float) -> None:
        label = kafka_errors.error_of(response.error_code).label
        if response.error_code == kafka_errors.UNSUPPORTED_VERSION:
            self.fail(DeliveryError(f"the broker has no idempotent producers ({label}). {_WITHOUT_ID}"))
        elif response.error_code in _FINAL_ERRORS:
            self.fail(
                DeliveryError(
                    f"the broker gave no producer id ({label}); grant IdempotentWrite or Write, or set "
                    "kafka.enable.idempotence=false"
                )
            )
        elif response.error_code:
            self._on_failure(label, now_ms)
        else:
            self._on_success()
            self.producer_id, self.producer_epoch = response.producer_id, response.producer_epoch

    def _on_failure(self, cause: object, now_ms: float) -> None:
        self._retry(f"no producer id yet: {cause}", now_ms)

    def _retry(self, problem: str, now_ms: float) -> None:
        """Let the next request wait for the backoff, because of a problem with this one."""
        self._requested_in = None
        self._failures += 1
        self.last_error = problem
        self._not_before_ms = now_ms + self._backoff.delay_ms(min(self._failures, _MAX_BACKOFFS))

    def _on_success(self) -> None:
        self._failures = 0
        self.last_error = None

    def delays(self, partition: TopicPartition) -> bool:
        """Whether batches of this partition wait for a request of the identity."""
        return not self.ready

    def forget(self) -> None:
        """Give up the id or the request for one. Raises KafkaSinkError if a batch has been sent with it."""
        if self._written:
            raise KafkaSinkError("the producer id cannot be given up, because batches were sent with it")
        self.producer_id, self.producer_epoch = NO_ID
        self.generation += 1

    # -- sequences: see Partition -------------------------------------------------------------------

    def may_send(self, batch: ProducerBatch, now_ms: float) -> bool:
        """Whether the batch may be sent now without risk to its partition's order."""
        return batch.queue.may_send(batch, now_ms)

    def assign(self, batch: ProducerBatch) -> None:
        """Give a batch its id, epoch and sequence, unless it has them from an earlier attempt."""
        if batch.sequence is NO_SEQUENCE:
            self._written.add(batch.queue)
            batch.queue.assign(batch, (self.producer_id, self.producer_epoch))

    def on_shrunk(self, batch: ProducerBatch, pieces: list[ProducerBatch]) -> None:
        """Record the shrink in the partition, and mark it: its sequences now have a gap to close."""
        batch.queue.on_shrunk(batch, pieces)
        self.needing_repair.add(batch.queue)

    def request_restart(self, partition: Partition) -> None:
        """Mark a partition whose leader expects another sequence than this producer sends."""
        partition.needs_restart = True
        self.needing_repair.add(partition)

    def repairable(self) -> list[Partition]:
        """The partitions whose sequences have to restart or have a gap, and that have nothing in flight."""
        return [partition for partition in self.needing_repair if not partition.is_in_flight]

    def close_gap(self, partition: Partition) -> None:
        partition.close_gap()
        if not partition.needs_restart:
            self.needing_repair.discard(partition)

    def restart(self, partition: Partition) -> None:
        """Restart a partition's sequences at 0 under the next epoch, or under a new id after the last epoch.

        Raises KafkaSinkError and changes nothing if a batch is in flight or may have been written.
        """
        partition.restart()
        self.needing_repair.discard(partition)
        if self.producer_epoch >= _LAST_EPOCH:
            self.producer_id, self.producer_epoch = NO_ID
        elif self.ready:
            self.producer_epoch += 1

    @property
    def settled(self) -> bool:
        """Whether every sequence is acknowledged. Only then may another task use the id."""
        return not self.needing_repair and not any(map(attrgetter("unacknowledged"), self._written))
