"""The client that runs protocol steps, on the model of Kafka, behind brokers that lose requests and answers,
take requests late, move coordinators and are not done yet. Drivers die at any request."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
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
from kafka_sink.transactions import batch as batches
from kafka_sink.transactions import driver, task_attempt
from kafka_sink.transactions.batch import AttemptReport, TaskHandover, TaskRole
from kafka_sink.transactions.client import TransactionClient
from kafka_sink.transactions.decision import BatchIdentity, Part, RowsDigest
from kafka_sink.transactions.operations import Failed, OffsetKey, ProducerEpoch, Scope
from tests.support.effort import EFFORT
from tests.support.transaction_network import NODES, Connection, Network
from tests.support.transactions_of_kafka import Kafka, NotYet, Produce

SCOPE = Scope("p", "t", 2)
BATCHES, TASKS = 3, 2
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


class Died(Exception):
    """The driver did."""


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
        handle: Callable[[int, Any], Any] = getattr(self, f"_{REQUESTS[api].__name__}")
        return handle(node, asked)

    def _FindCoordinatorRequest(self, _: int, asked: Any) -> Any:
        found = {
            name: responses.FoundCoordinator(NODES[self.coordinator(asked.key_type == 0, name)], 0, None)
            for name in asked.coordinator_keys
        }
        return responses.CoordinatorsResponse(found)

    def _of_id(self, node: int, name: str, act: Callable[[], Any]) -> tuple[int, Any]:
        if self.coordinator(False, name) != node:
            return kafka_errors.NOT_COORDINATOR, None
        try:
            result = act()
        except NotYet:
            return kafka_errors.CONCURRENT_TRANSACTIONS, None
        return code_of(result), result

    def _InitProducerIdRequest(self, node: int, asked: Any) -> Any:
        name, of = asked.transactional_id, ProducerEpoch(asked.producer_id, asked.producer_epoch)
        kafka = self.kafka
        code, found = self._of_id(
            node, name, lambda: kafka.init(name) if of.producer_id < 0 else kafka.raise_epoch(name, of)
        )
        return ProducerIdResponse(code, *((-1, -1) if code else found))

    def _EndTxnRequest(self, node: int, asked: Any) -> Any:
        producer = ProducerEpoch(asked.producer_id, asked.producer_epoch)
        name = asked.transactional_id
        code, found = self._of_id(node, name, lambda: self.kafka.end_txn(name, producer, asked.committed))
        return responses.EndTxnResponse(code, *((-1, -1) if code else found))

    def _AddOffsetsToTxnRequest(self, node: int, asked: Any) -> Any:
        producer = ProducerEpoch(asked.producer_id, asked.producer_epoch)
        name = asked.transactional_id
        code, _ = self._of_id(node, name, lambda: self.kafka.write(name, producer, (), {}))
        return responses.AddOffsetsResponse(code)

    def _TxnOffsetCommitRequest(self, node: int, asked: Any) -> Any:
        offsets = {
            OffsetKey(asked.group_id, TopicPartition(topic.name, one.partition_index)): one.committed_metadata
            for topic in asked.topics
            for one in topic.partitions
        }
        producer = ProducerEpoch(asked.producer_id, asked.producer_epoch)
        code = kafka_errors.NOT_COORDINATOR
        if self.coordinator(True, asked.group_id) == node:
            try:
                code = code_of(self.kafka.write(asked.transactional_id, producer, (), offsets))
            except NotYet:
                code = kafka_errors.CONCURRENT_TRANSACTIONS
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


def write(client: TransactionClient, brokers: Brokers, number: int) -> None:
    """A micro-batch, as a driver and its tasks write it."""
    batch = BatchIdentity.of_query("one", number)
    handover = TaskHandover.of(SCOPE, client.run(driver.take_over(SCOPE, 0), 60_000), 0)
    reports = []
    for index in range(TASKS):
        role, part = handover.role(batch, index), None
        digest = RowsDigest(1, 1, index)
        if role is TaskRole.WRITE:
            slot, producer = client.run(
                task_attempt.begin_steps(SCOPE, handover.driver_epoch, index, 0), 60_000
            )
            row = Produce(SCOPE.task_id(index, slot), producer, ((number, index),))
            if not brokers.kafka.execute(row):
                raise DeliveryError("fenced")
            client.run(
                task_attempt.finish_steps(SCOPE, handover.driver_epoch, batch, index, slot, producer), 60_000
            )
            part = Part(index, slot, producer, digest)
        reports.append(AttemptReport(handover.run(SCOPE, batch), index, role, digest, part))
    try:
        client.run(batches.commit(reports, records_empty=False), 60_000)
    except DeliveryError:
        client.run(driver.abort(SCOPE, handover.driver_epoch, 0), 60_000)
        raise


def history(seed: int, protocol: int, *, delays_offsets: bool) -> Brokers:
    """A query that is started again whenever its driver dies or fails."""
    brokers = Brokers(random.Random(seed), protocol, delays_offsets=delays_offsets)
    number = runs = 0
    client = brokers.client()
    while number < BATCHES:
        runs += 1
        assert runs < 40, f"seed {seed}: never done"
        try:
            write(client, brokers, number)
        except (Died, DeliveryError):
            client.close()
            client = brokers.client()
            continue
        number += 1
    brokers.faults = brokers.deaths = 0
    client.run(driver.take_over(SCOPE, 0), 60_000)
    for name in brokers.kafka.pending_markers():
        brokers.kafka.write_markers(name)
    return brokers


@pytest.mark.parametrize(("protocol", "delays_offsets"), [(1, False), (1, True), (2, False)])
def test_rows_are_written_once_whatever_requests_and_responses_do(
    protocol: int, delays_offsets: bool
) -> None:
    expected = {(number, index): 1 for number in range(BATCHES) for index in range(TASKS)}
    for seed in range(60 * EFFORT):
        brokers = history(seed, protocol, delays_offsets=delays_offsets)
        assert dict(brokers.kafka.visible) == expected, f"seed {seed}"
        # With protocol 1 a late request may begin another one, which the next batch ends.
        held_up = [name for name in brokers.kafka.open() if brokers.kafka.transactions[name].rows]
        assert not held_up, f"seed {seed}"
