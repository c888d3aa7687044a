"""Sends the AddPartitionsToTxn requests of a task under transaction protocol 1. At most one is in flight.

Under protocol 1 a partition must belong to the transaction before its first batch is sent (KIP-98). Under
protocol 2 the first batch adds its partition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kafka_sink import kafka_errors
from kafka_sink.clock import ExponentialBackoff
from kafka_sink.cluster.partition import Partition
from kafka_sink.engine.identity import TransactionalIdentity
from kafka_sink.engine.response_classifier import ADVICE, ADVICE_IN_TRANSACTIONS
from kafka_sink.errors import DeliveryError, KafkaSinkError
from kafka_sink.network import apis, transaction_requests
from kafka_sink.network.broker_connection import BrokerConnection
from kafka_sink.network.broker_protocol import Request
from kafka_sink.network.client import NetworkClient

_MOVED = frozenset({kafka_errors.COORDINATOR_NOT_AVAILABLE, kafka_errors.NOT_COORDINATOR})
# The code that brokers return for the other partitions of a request when one of them failed.
_NOT_ATTEMPTED = kafka_errors.OPERATION_NOT_ATTEMPTED


class TransactionPartitions:
    """Adds the partitions of ``identity.partitions_to_add`` to the transaction.

    Only the sender's thread uses it. Times are monotonic milliseconds. ``fail`` is called with an error that
    no retry can help.
    """

    def __init__(
        self,
        identity: TransactionalIdentity,
        network: NetworkClient,
        request_timeout_ms: float,
        backoff: ExponentialBackoff,
        fail: Callable[[KafkaSinkError], object],
    ) -> None:
        self._identity = identity
        self._network = network
        self._request_timeout_ms = request_timeout_ms
        self._backoff = backoff
        self._fail = fail
        self._coordinator: int | None = None
        self._coordinator_of: str | None = None
        # The transaction that the request in flight is for; None if no request is in flight.
        self._waits_for: tuple[str | None, int, int] | None = None
        self._failures = 0
        self._not_before_ms = -math.inf

    def refresh(self, now_ms: float) -> float:
        """Add the partitions that batches wait for. Return the milliseconds until this method can do more."""
        identity = self._identity
        if not identity.partitions_to_add or self._waits_for == identity.transaction:
            return math.inf
        if now_ms < self._not_before_ms:
            return self._not_before_ms - now_ms
        if self._coordinator_of != identity.transactional_id:
            self._coordinator, self._coordinator_of = None, identity.transactional_id
        if self._coordinator is None:
            return self._find_coordinator(now_ms)
        connection = self._network.connections.get(self._coordinator)
        if connection is not None and self._network.is_ready(connection, now_ms):
            self._add(connection, now_ms)
            return math.inf
        if connection is None or connection.is_gone:
            # Another broker will take over from the lost coordinator, which takes a while. So look for it
            # after the backoff.
            self._identity.last_error = "the transaction's coordinator cannot be reached"
            self._retry(now_ms)
            return self._not_before_ms - now_ms
        return connection.ready_delay_ms(now_ms)

    def _find_coordinator(self, now_ms: float) -> float:
        connection, delay = self._network.connection_to_ask(now_ms, known_only=True)
        name = self._identity.transactional_id
        if connection is None or name is None:
            return delay
        version = connection.api_version(apis.FIND_COORDINATOR)
        body = transaction_requests.encode_find_coordinator(version, (name,), of_groups=False)
        self._send(connection, apis.FIND_COORDINATOR, version, body, (), now_ms)
        return math.inf

    def _add(self, connection: BrokerConnection, now_ms: float) -> None:
        wanted = tuple(self._identity.partitions_to_add)
        names = tuple(partition.id for partition in wanted)
        version = connection.api_version(apis.ADD_PARTITIONS_TO_TXN)
        name, producer_id, epoch = self._identity.transaction
        body = transaction_requests.encode_add_partitions(version, name or "", producer_id, epoch, names)
        self._send(connection, apis.ADD_PARTITIONS_TO_TXN, version, body, wanted, now_ms)

    def _send(
        self,
        connection: BrokerConnection,
        api: int,
        version: int,
        body: bytes,
        partitions: tuple[Partition, ...],
        now_ms: float,
    ) -> None:
        transaction = self._waits_for = self._identity.transaction
        request = Request(
            api,
            version,
            [body],
            self._request_timeout_ms,
            lambda response, at_ms: self._on_response(transaction, partitions, response, at_ms),
            lambda cause, _, at_ms: self._on_failure(transaction, cause, at_ms),
            # Each partition may belong to a different topic.
            asked=2 * len(partitions),
        )
        self._network.send(connection, request, now_ms)

    # -- responses --------------------------------------------------------------------------------

    def _on_response(
        self, transaction: object, partitions: tuple[Partition, ...], response: Any, now_ms: float
    ) -> None:
        """Handle a response, unless it belongs to an earlier transaction."""
        if transaction != self._waits_for:
            return
        self._waits_for = None
        if transaction != self._identity.transaction:
            return
        if isinstance(response, transaction_requests.CoordinatorsResponse):
            self._on_coordinator(response, now_ms)
        else:
            self._on_added(partitions, response, now_ms)

    def _on_failure(self, transaction: object, cause: Exception, now_ms: float) -> None:
        """Let the request be repeated, because it will get no response. Partitions that were added stay
        added."""
        if transaction == self._waits_for:
            self._identity.last_error = str(cause)
            self._retry(now_ms)

    def _on_coordinator(self, response: transaction_requests.CoordinatorsResponse, now_ms: float) -> None:
        coordinator = response.found.get(self._identity.transactional_id or "")
        if coordinator is None:
            self._judge(_NOT_ATTEMPTED, "FindCoordinator", now_ms)
        elif coordinator.node is not None:
            self._coordinator = coordinator.node.id
            self._failures = 0
        else:
            self._judge(coordinator.error_code, "FindCoordinator", now_ms)

    def _on_added(
        self,
        partitions: Sequence[Partition],
        response: transaction_requests.PartitionErrors,
        now_ms: float,
    ) -> None:
        # A partition that is not in the response was not added.
        errors = {partition.id: response.errors.get(partition.id, _NOT_ATTEMPTED) for partition in partitions}
        failed = [name for name, code in errors.items() if code]
        self._identity.on_added(partition for partition in partitions if partition.id not in failed)
        if not failed:
            self._failures = 0
            return
        answered = [name for name in failed if errors[name] != _NOT_ATTEMPTED] or failed
        what = f"AddPartitionsToTxn of {answered[0]}"
        self._judge(errors[answered[0]], what, now_ms, ADVICE_IN_TRANSACTIONS)

    def _judge(self, code: int, what: str, now_ms: float, advice_by_code: Mapping[int, str] = ADVICE) -> None:
        error = kafka_errors.error_of(code)
        text = f"{what} failed: {error.label}"
        if error.retriable or code == _NOT_ATTEMPTED:
            self._identity.last_error = text
            self._retry(now_ms, elsewhere=code in _MOVED)
            return
        advice = advice_by_code.get(code)
        self._fail(DeliveryError(f"{text}; {advice}" if advice else text))

    def _retry(self, now_ms: float, *, elsewhere: bool = True) -> None:
        self._waits_for = None
        if elsewhere:
            self._coordinator = None
        self._failures += 1
        self._not_before_ms = now_ms + self._backoff.delay_ms(min(self._failures, 6))
