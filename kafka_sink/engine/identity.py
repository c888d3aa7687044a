"""The id and epoch of the idempotent producer (KIP-98, KIP-360). Each Partition keeps its own sequences.

After a broker has lost its state of this producer, a restart begins the partition's sequences at 0 under the
next epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from operator import attrgetter

from kafka_sink import kafka_errors
from kafka_sink.clock import ExponentialBackoff
from kafka_sink.cluster.partition import Partition, ProducerBatch
from kafka_sink.errors import BrokerVersionError, DeliveryError, KafkaSinkError
from kafka_sink.network import apis, requests
from kafka_sink.network.broker_protocol import Request
from kafka_sink.network.client import NetworkClient
from kafka_sink.network.requests import ProducerIdResponse
from kafka_sink.records.batch_header import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_SEQUENCE

_LAST_EPOCH = (1 << 15) - 1
_FINAL_ERRORS = frozenset(
    {
        kafka_errors.CLUSTER_AUTHORIZATION_FAILED,
        kafka_errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
_WITHOUT_ID = (
    "Set kafka.enable.idempotence=false if a row may be written twice when a response is lost; "
    "kafka.max.in.flight.requests.per.connection=1 then keeps the order"
)
_NO_ID = (NO_PRODUCER_ID, NO_PRODUCER_EPOCH)


class ProducerIdentity:
    """The id and epoch that batches are written with, and the partitions that have sequences of them.

    Only the sender's thread uses it. Times are monotonic milliseconds.
    """

    transactional_id: str | None = None
    # Whether partitions are added to the transaction before their first batch: transaction protocol 1.
    adds_partitions = False

    def __init__(self, backoff: ExponentialBackoff) -> None:
        self.producer_id, self.producer_epoch = _NO_ID
        self.last_error: str | None = None
        # This number increases when the id is given up.
        self.generation = 0
        self._backoff = backoff
        self._failures = 0
        self._not_before_ms = 0.0
        self._requested = False
        # The partitions with sequences of this producer, and the partitions whose sequences have to restart
        # or have a gap.
        self._written: set[Partition] = set()
        self.needing_repair: set[Partition] = set()

    # -- the id -----------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether there is an id to write with."""
        return self.producer_id != NO_PRODUCER_ID

    def refresh(
        self,
        network: NetworkClient,
        request_timeout_ms: float,
        fail: Callable[[KafkaSinkError], object],
        now_ms: float,
    ) -> float:
        """Request an id. Return the milliseconds until this method can do more.

        ``fail`` is called with an error that no retry can help.
        """
        if self._requested:
            return math.inf
        if now_ms < self._not_before_ms:
            return self._not_before_ms - now_ms
        # Bootstrap addresses are not asked: they may lead to another cluster by now, in which another
        # producer can have the same id.
        connection, delay = network.connection_to_ask(now_ms, known_only=True)
        if connection is None:
            return delay
        # Responses to requests of an earlier generation are ignored: they come from another cluster.
        generation = self.generation

        def on_response(response: ProducerIdResponse, at_ms: float) -> None:
            failure = self.on_response(response, at_ms) if generation == self.generation else None
            if failure is not None:
                fail(failure)

        def on_failure(cause: Exception, _: bool, at_ms: float) -> None:
            if generation == self.generation:
                self.on_failure(at_ms, cause)

        try:
            version = connection.api_version(apis.INIT_PRODUCER_ID)
        except BrokerVersionError as error:
            fail(BrokerVersionError(f"{error}. {_WITHOUT_ID}"))
            return math.inf
        body = requests.encode_init_producer_id(version, self.producer_id, self.producer_epoch)
        self._requested = True
        request = Request(apis.INIT_PRODUCER_ID, version, [body], request_timeout_ms, on_response, on_failure)
        network.send(connection, request, now_ms)
        return math.inf

    def on_response(self, response: ProducerIdResponse, now_ms: float) -> KafkaSinkError | None:
        """Take the id from the response. Return an error if no retry can help."""
        self._requested = False
        label = kafka_errors.error_of(response.error_code).label
        if response.error_code == kafka_errors.UNSUPPORTED_VERSION:
            return DeliveryError(f"the broker has no idempotent producers ({label}). {_WITHOUT_ID}")
        if response.error_code in _FINAL_ERRORS:
            return DeliveryError(
                f"the broker gave no producer id ({label}); grant IdempotentWrite or Write, or set "
                "kafka.enable.idempotence=false"
            )
        if response.error_code:
            self.on_failure(now_ms, label)
            return None
        self._failures = 0
        self.last_error = None
        self.producer_id, self.producer_epoch = response.producer_id, response.producer_epoch
        return None

    def on_failure(self, now_ms: float, cause: object) -> None:
        """Let the next request wait for the backoff, because this one failed."""
        self._requested = False
        self._failures += 1
        self.last_error = f"no producer id yet: {cause}"
        self._not_before_ms = now_ms + self._backoff.delay_ms(self._failures)

    def forget(self) -> None:
        """Give up the id or the request for one, because it comes from another cluster.

        Raises KafkaSinkError if a batch has been sent with the id.
        """
        if self._written:
            raise KafkaSinkError("the producer id cannot be given up, because batches were sent with it")
        self.producer_id, self.producer_epoch = _NO_ID
        self.generation += 1
        self._requested = False

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
        """Close the partition's gap (``Partition.close_gap``)."""
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
            self.producer_id, self.producer_epoch = _NO_ID
        elif self.ready:
            self.producer_epoch += 1

    @property
    def settled(self) -> bool:
        """Whether every sequence is acknowledged. Only then may another task use the id."""
        return not self.needing_repair and not any(map(attrgetter("unacknowledged"), self._written))


class TransactionalIdentity(ProducerIdentity):
    """The id and epoch of one transaction, which the task's transaction client has requested.

    This class never requests an id and never restarts sequences, because brokers fence an epoch that they
    did not give. The task's thread calls ``adopt`` and ``leave`` while nothing is queued.
    """

    def __init__(self, backoff: ExponentialBackoff) -> None:
        super().__init__(backoff)
        # The partitions that have to be added to the transaction before their batches may be sent, in the
        # order of their first batch. It is empty unless transaction protocol 1 is used.
        self.partitions_to_add: dict[Partition, None] = {}
        # A number that identifies the current transaction: it increases when one begins or ends.
        self._number = 0

    @property
    def transaction(self) -> tuple[str | None, int, int]:
        """The transactional id, producer id and epoch."""
        return self.transactional_id, self.producer_id, self.producer_epoch

    def adopt(
        self, transactional_id: str, producer_id: int, epoch: int, *, adds_partitions: bool = False
    ) -> None:
        """Write with this id and epoch from now on."""
        self.leave()
        self.transactional_id = transactional_id
        self.producer_epoch = epoch
        self.adds_partitions = adds_partitions
        # The producer id comes last, because it makes the identity ready for the sender's thread.
        self.producer_id = producer_id

    def leave(self) -> None:
        """End the transaction: write nothing until the next one is adopted."""
        self.producer_id, self.producer_epoch = _NO_ID
        self.transactional_id = None
        for partition in self._written:
            partition.forget_sequences()
        self._written.clear()
        self.needing_repair.clear()
        self.partitions_to_add.clear()
        self._number += 1

    def may_send(self, batch: ProducerBatch, now_ms: float) -> bool:
        """Whether the batch may be sent now: its order permits it and, under protocol 1, its partition
        belongs to the transaction."""
        if self.adds_partitions and batch.queue.transaction != self._number:
            self.partitions_to_add[batch.queue] = None
            return False
        return super().may_send(batch, now_ms)

    def on_added(self, partitions: Iterable[Partition]) -> None:
        """Record that these partitions belong to the transaction now."""
        for partition in partitions:
            self.partitions_to_add.pop(partition, None)
            partition.transaction = self._number

    def refresh(self, *_: object) -> float:
        """Do nothing: the task's transaction client requests the id."""
        return math.inf
