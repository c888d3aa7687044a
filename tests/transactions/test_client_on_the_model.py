"""The client that runs protocol steps, on the model of Kafka, behind brokers that lose requests and answers,
take requests late, move coordinators and are not done yet. Drivers die at any request."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from kafka.protocol.admin import DescribeTransactionsRequest, ListTransactionsRequest
from kafka.protocol.consumer import OffsetFetchRequest
from kafka.protocol.metadata import FindCoordinatorRequest
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    TxnOffsetCommitRequest,
)

from kafka_sink import kafka_errors
from kafka_sink.errors import DeliveryError
from kafka_sink.model import MetadataUpdate, TopicPartition
from kafka_sink.network import apis
from kafka_sink.network import transaction_requests as responses
from kafka_sink.network.requests import MetadataResponse, ProducerIdResponse
from kafka_sink.network.wire import ErrorResponse
from kafka_sink.transactions.operations import Failed, OffsetKey, ProducerEpoch, TransactionSteps
from tests.support.effort import tries
from tests.support.transaction_network import NODES, Connection, Network
from tests.support.transaction_steps import SCOPE, Cluster, Died
from tests.support.transactions_of_kafka import Kafka, NotYet

BATCHES = 3
REQUESTS: dict[int, Any] = {
    apis.FIND_COORDINATOR: FindCoordinatorRequest,
    apis.INIT_PRODUCER_ID: InitProducerIdRequest,
    apis.END_TXN: EndTxnRequest,
    apis.ADD_OFFSETS_TO_TXN: AddOffsetsToTxnRequest,
    apis.TXN_OFFSET_COMMIT: TxnOffsetCommitRequest,
    apis.OFFSET_FETCH: OffsetFetchRequest,
    apis.DESCRIBE_TRANSACTIONS: DescribeTransactionsRequest,
    apis.LIST_TRANSACTIONS: ListTransactionsRequest,
}


def code_of(result: Any) -> int:
    return getattr(kafka_errors, result.error) if isinstance(result, Failed) else kafka_errors.NONE


class Brokers(Network):
    """In front of the model. ``faults`` and ``deaths`` may still happen."""

    def __init__(self, chance: random.Random, protocol: int, *, delays_offsets: bool) -> None:
        super().__init__(protocol)
        self.kafka = Kafka(protocol=protocol, delays_offsets=delays_offsets)
        self.faults, self.deaths = 12, 2
        self._protocol = protocol
        self._chance = chance
        self._moved: dict[tuple[bool, str], int] = {}
        # Requests whose sender has given them up.
        self._late: list[tuple[int, int, bytes, int]] = []

    def least_loaded(self, _now_ms: float) -> Connection:
        return self._chance.choice(list(self.connections.values()))

    def send(self, connection: Connection, request: Any, _now_ms: float) -> None:
        node = connection.node.id
        asked = (node, request.api_key, b"".join(request.body), request.api_version)
        if self.deaths and self._chance.random() < 0.02:
            self.deaths -= 1
            self._late.append(asked)
            raise Died
        fault = self._chance.randrange(60) if self.faults else -1
        if fault == 2:
            moved = self._chance.choice([True, False]), self._chance.choice(self._names())
            self._moved[moved] = self._chance.choice(list(NODES))
        # The request is lost, or arrives much later; or its response is lost.
        if fault == 1:
            self._late.append(asked)
        response = None if fault in (0, 1) else self._handle(*asked)
        if fault in (0, 1, 3):
            self.faults -= 1
            self.lose(node, request)
        else:
            self.respond(request, response)

    def poll(self, wait_ms: float, now_ms: float) -> int:
        for name in self.kafka.pending_markers():
            if self._chance.random() < 0.5:
                self.kafka.write_markers(name)
        for name in self.kafka.late_offsets():
            if self._chance.random() < 0.2:
                self.kafka.tell_offsets(name)
        if self._late and self._chance.random() < 0.1:
            self._handle(*self._late.pop(0))
        self._chance.shuffle(self.happened)
        return super().poll(wait_ms, now_ms)

    # -- brokers ------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        return [
            SCOPE.driver_id,
            SCOPE.decision_key(0).group,
            SCOPE.marker_key(0).group,
            *self.kafka.transactions,
        ]

    def coordinator(self, of_group: bool, name: str) -> int:
        return self._moved.get((of_group, name), 1 + zlib.crc32(name.encode()) % 3)

    def _handle(self, node: int, api: int, body: bytes, version: int) -> Any:
        if api == apis.METADATA:
            return MetadataResponse(MetadataUpdate(tuple(NODES.values()), ()))
        asked = REQUESTS[api].decode(body, version=version)
        self.kafka.protocol = self._protocol
        handle: Callable[..., Any] = getattr(self, f"_{REQUESTS[api].__name__}")
        if not hasattr(asked, "producer_id"):
            return handle(node, asked)
        return handle(node, asked, ProducerEpoch(asked.producer_id, asked.producer_epoch))

    def _FindCoordinatorRequest(self, _: int, asked: Any) -> Any:
        found = {
            name: responses.FoundCoordinator(NODES[self.coordinator(asked.key_type == 0, name)], 0, None)
            for name in asked.coordinator_keys
        }
        return responses.CoordinatorsResponse(found)

    def _of_id(self, node: int, name: str, act: Callable[[], Any]) -> tuple[int, Any]:
        if self.coordinator(False, name) != node:
            return kafka_errors.NOT_COORDINATOR, None
        return self._tried(act)

    @staticmethod
    def _tried(act: Callable[[], Any]) -> tuple[int, Any]:
        try:
            result = act()
        except NotYet:
            return kafka_errors.CONCURRENT_TRANSACTIONS, None
        return code_of(result), result

    def _InitProducerIdRequest(self, node: int, asked: Any, of: ProducerEpoch) -> Any:
        name, kafka = asked.transactional_id, self.kafka
        take = partial(kafka.init, name) if of.producer_id < 0 else partial(kafka.raise_epoch, name, of)
        code, found = self._of_id(node, name, take)
        return ProducerIdResponse(code, *((-1, -1) if code else found))

    def _EndTxnRequest(self, node: int, asked: Any, producer: ProducerEpoch) -> Any:
        name = asked.transactional_id
        code, found = self._of_id(node, name, lambda: self.kafka.end_txn(name, producer, asked.committed))
        return ProducerIdResponse(code, *((-1, -1) if code else found))

    def _AddOffsetsToTxnRequest(self, node: int, asked: Any, producer: ProducerEpoch) -> Any:
        name = asked.transactional_id
        return ErrorResponse(self._of_id(node, name, lambda: self.kafka.write(name, producer, (), {}))[0])

    def _TxnOffsetCommitRequest(self, node: int, asked: Any, producer: ProducerEpoch) -> Any:
        offsets = {
            OffsetKey(asked.group_id, TopicPartition(topic.name, one.partition_index)): one.committed_metadata
            for topic in asked.topics
            for one in topic.partitions
        }
        code = kafka_errors.NOT_COORDINATOR
        if self.coordinator(True, asked.group_id) == node:
            code, _ = self._tried(lambda: self.kafka.write(asked.transactional_id, producer, (), offsets))
        return responses.PartitionErrors({key.partition: code for key in offsets})

    def _OffsetFetchRequest(self, node: int, asked: Any) -> Any:
        (group,) = asked.groups
        if self.coordinator(True, group.group_id) != node:
            return responses.OffsetFetchResponse({group.group_id: (kafka_errors.NOT_COORDINATOR, {})})
        reported: dict[OffsetKey, str | None] = dict(self.kafka.answers(group.group_id))
        if group.topics is not None:
            keys = [
                OffsetKey(group.group_id, TopicPartition(topic.name, number))
                for topic in group.topics
                for number in topic.partition_indexes
            ]
            try:
                reported = self.kafka.fetch_stable(tuple(keys))
            except NotYet:
                reported = dict.fromkeys(keys)
        rows = {
            key.partition: responses.CommittedOffset(-1, "", kafka_errors.UNSTABLE_OFFSET_COMMIT)
            if text is None
            else responses.CommittedOffset(0, text, 0)
            for key, text in reported.items()
        }
        return responses.OffsetFetchResponse({group.group_id: (0, rows)})

    def _DescribeTransactionsRequest(self, node: int, asked: Any) -> Any:
        (name,) = asked.transactional_ids
        one = self.kafka.describe((name,)).get(name)
        code = 0 if one else kafka_errors.TRANSACTIONAL_ID_NOT_FOUND
        if self.coordinator(False, name) != node:
            code = kafka_errors.NOT_COORDINATOR
        if code or one is None:
            return responses.DescribeTransactionsResponse(
                {name: responses.TransactionDescription(code, "", -1, -1, -1, 0, 0)}
            )
        row = responses.TransactionDescription(0, one.state, *one.producer, one.started_ms, 60_000, 1)
        return responses.DescribeTransactionsResponse({name: row})

    def _ListTransactionsRequest(self, node: int, asked: Any) -> Any:
        ids = [
            name
            for name, one in self.kafka.transactions.items()
            if one.state in asked.state_filters and self.coordinator(False, name) == node
        ]
        return responses.ListTransactionsResponse(0, ids)


class ByClient(Cluster):
    """A driver and its tasks."""

    def __init__(self, brokers: Brokers) -> None:
        self.kafka = brokers.kafka
        self.client = brokers.client()

    def run(self, steps: TransactionSteps[Any], _: object = None) -> Any:
        return self.client.run(steps, 60_000)

    def write_batch(self, number: int) -> None:
        run, reports = self.wrote(number)
        try:
            self.commit(*reports)
        except DeliveryError:
            self.abort(run)
            raise


def history(seed: int, protocol: int, *, delays_offsets: bool) -> Brokers:
    """A query that is started again whenever its driver dies or fails."""
    brokers = Brokers(random.Random(seed), protocol, delays_offsets=delays_offsets)
    number = runs = 0
    cluster = ByClient(brokers)
    while number < BATCHES:
        runs += 1
        assert runs < 40, f"seed {seed}: never done"
        try:
            cluster.write_batch(number)
            number += 1
        except (Died, DeliveryError):
            cluster.client.close()
            cluster = ByClient(brokers)
    brokers.faults = brokers.deaths = 0
    cluster.take_over()
    for name in brokers.kafka.pending_markers():
        brokers.kafka.write_markers(name)
    return brokers


@pytest.mark.parametrize(("protocol", "delays_offsets"), [(1, False), (1, True), (2, False)])
def test_rows_are_written_once_whatever_requests_and_responses_do(
    protocol: int, delays_offsets: bool
) -> None:
    expected = {(number, index): 1 for number in range(BATCHES) for index in range(2)}
    for seed in range(tries(60)):
        brokers = history(seed, protocol, delays_offsets=delays_offsets)
        assert dict(brokers.kafka.visible) == expected, f"seed {seed}"
        # With protocol 1 a late request may begin another one, which the next batch ends.
        held_up = [name for name in brokers.kafka.open() if brokers.kafka.transactions[name].rows]
        assert not held_up, f"seed {seed}"
