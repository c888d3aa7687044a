"""The identity of a task that writes in transactions.

Under transaction protocol 1 a partition must belong to the transaction before its first batch is sent
(KIP-98), so the identity sends AddPartitionsToTxn requests. Under protocol 2 the first batch adds its
partition.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

from kafka_sink import kafka_errors
from kafka_sink.clock import ExponentialBackoff
from kafka_sink.cluster.partition import Partition, ProducerBatch
from kafka_sink.engine.identity import NO_ID, ProducerIdentity
from kafka_sink.engine.response_classifier import ADVICE, ADVICE_IN_TRANSACTIONS
from kafka_sink.errors import DeliveryError
from kafka_sink.model import TopicPartition
from kafka_sink.network import apis, transaction_requests
from kafka_sink.network.broker_connection import BrokerConnection
from kafka_sink.network.client import NetworkClient

_MOVED = frozenset({kafka_errors.COORDINATOR_NOT_AVAILABLE, kafka_errors.NOT_COORDINATOR})
# The code that brokers return for the other partitions of a request when one of them failed.
_NOT_ATTEMPTED = kafka_errors.OPERATION_NOT_ATTEMPTED


class TransactionalIdentity(ProducerIdentity):
    """The id and epoch of one transaction, which the task's transaction client has requested.

    This class never requests an id and never restarts sequences, because brokers fence an epoch that they
    did not give. The task's thread calls ``adopt`` and ``leave`` while nothing is queued. ``generation``
    identifies the current transaction: it increases when one begins or ends.
    """

    def __init__(
        self, network: NetworkClient, request_timeout_ms: float, backoff: ExponentialBackoff
    ) -> None:
        super().__init__(network, request_timeout_ms, backoff)
        # The partitions that have to be added to the transaction before their batches may be sent, in the
        # order of their first batch. It is empty unless transaction protocol 1 is used.
        self.partitions_to_add: dict[Partition, None] = {}
        self._coordinator: int | None = None

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
        self.producer_id, self.producer_epoch = NO_ID
        self.transactional_id = self.last_error = None
        for partition in self._written:
            partition.forget_sequences()
        self._written.clear()
        self.needing_repair.clear()
        self.partitions_to_add.clear()
        self._coordinator = None
        self.generation += 1

    def may_send(self, batch: ProducerBatch, now_ms: float) -> bool:
        """Whether its order permits it and, under protocol 1, its partition is in the transaction."""
        if self.adds_partitions and batch.queue.transaction != self.generation:
            self.partitions_to_add[batch.queue] = None
            return False
        return super().may_send(batch, now_ms)

    def delays(self, partition: TopicPartition) -> bool:
        return super().delays(partition) or any(queue.id == partition for queue in self.partitions_to_add)

    # -- protocol 1 ---------------------------------------------------------------------------------

    def refresh(self, now_ms: float) -> float:
        """Add the partitions that batches wait for. Return the milliseconds until this method can do more."""
        if not self.ready or not self.partitions_to_add or self._requested_in == self.generation:
            return math.inf
        if now_ms < self._not_before_ms:
            return self._not_before_ms - now_ms
        if self._coordinator is None:
            return self._find_coordinator(now_ms)
        connection = self._network.connections.get(self._coordinator)
        if connection is not None and self._network.is_ready(connection, now_ms):
            self._add(connection, now_ms)
            return math.inf
        if connection is None or connection.is_gone:
            # It takes a while until another broker is the coordinator. So look for it after the backoff.
            self._on_failure("the transaction's coordinator cannot be reached", now_ms)
            return self._not_before_ms - now_ms
        return connection.ready_delay_ms(now_ms)

    def _find_coordinator(self, now_ms: float) -> float:
        connection, delay = self._network.connection_to_ask(now_ms, known_only=True)
        name = self.transactional_id
        if connection is None or name is None:
            return delay
        version = connection.api_version(apis.FIND_COORDINATOR)
        body = transaction_requests.encode_find_coordinator(version, (name,), of_groups=False)
        on_response = partial(self._on_coordinator, name)
        self._send(connection, apis.FIND_COORDINATOR, version, body, on_response, now_ms)
        return math.inf

    def _add(self, connection: BrokerConnection, now_ms: float) -> None:
        wanted = tuple(self.partitions_to_add)
        names = tuple(partition.id for partition in wanted)
        version = connection.api_version(apis.ADD_PARTITIONS_TO_TXN)
        body = transaction_requests.encode_add_partitions(
            version, self.transactional_id or "", self.producer_id, self.producer_epoch, names
        )
        on_response = partial(self._on_added, wanted)
        # Each partition may belong to a different topic.
        asked = 2 * len(wanted)
        self._send(connection, apis.ADD_PARTITIONS_TO_TXN, version, body, on_response, now_ms, asked)

    def _on_coordinator(
        self, name: str, response: transaction_requests.CoordinatorsResponse, now_ms: float
    ) -> None:
        coordinator = response.found.get(name)
        if coordinator is not None and coordinator.node is not None:
            self._coordinator = coordinator.node.id
            self._on_success()
        else:
            code = _NOT_ATTEMPTED if coordinator is None else coordinator.error_code
            self._judge(code, "FindCoordinator", now_ms)

    def _on_added(
        self, partitions: tuple[Partition, ...], response: transaction_requests.PartitionErrors, now_ms: float
    ) -> None:
        # A partition that is not in the response was not added.
        errors = {partition.id: response.errors.get(partition.id, _NOT_ATTEMPTED) for partition in partitions}
        failed = [name for name, code in errors.items() if code]
        for partition in partitions:
            if not errors[partition.id]:
                self.partitions_to_add.pop(partition, None)
                partition.transaction = self.generation
        if not failed:
            self._on_success()
            return
        answered = [name for name in failed if errors[name] != _NOT_ATTEMPTED] or failed
        what = f"AddPartitionsToTxn of {answered[0]}"
        self._judge(errors[answered[0]], what, now_ms, ADVICE_IN_TRANSACTIONS)

    def _judge(self, code: int, what: str, now_ms: float, advice_by_code: Mapping[int, str] = ADVICE) -> None:
        error = kafka_errors.error_of(code)
        text = f"{what} failed: {error.label}"
        if error.retriable or code == _NOT_ATTEMPTED:
            if code in _MOVED:
                self._coordinator = None
            self._retry(text, now_ms)
            return
        advice = advice_by_code.get(code)
        self.fail(DeliveryError(f"{text}; {advice}" if advice else text))

    def _on_failure(self, cause: object, now_ms: float) -> None:
        """Let the request be repeated. Partitions that were added stay added."""
        self._coordinator = None
        self._retry(str(cause), now_ms)
