"""Which partitions belong to a task's transaction, by responses that a test makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kafka_sink.clock import ExponentialBackoff
from kafka_sink.engine.responses import ResponseHandler
from kafka_sink.engine.transactional_identity import TransactionalIdentity
from kafka_sink.kafka_errors import COORDINATOR_LOAD_IN_PROGRESS, TOPIC_AUTHORIZATION_FAILED
from kafka_sink.model import Node, TopicPartition
from kafka_sink.network import apis
from kafka_sink.network.transaction_requests import CoordinatorsResponse, FoundCoordinator, PartitionErrors
from tests.support.queues import partition_of

PLACE = TopicPartition("t", 0)


class Network:
    """One broker, which takes any request."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.connections = {
            1: SimpleNamespace(is_gone=False, api_version=lambda api: apis.APIS[api].versions[1])
        }

    def is_ready(self, *_: object) -> bool:
        return True

    def connection_to_ask(self, *_: object, **__: object) -> tuple[Any, float]:
        return self.connections[1], 0.0

    def send(self, _: object, request: Any, __: float) -> None:
        self.sent.append(request)


class Task:
    """A task whose rows wait until their partition is in the transaction."""

    def __init__(self) -> None:
        backoff = ExponentialBackoff(100.0, 100.0, lambda: 0.5)
        self.network = Network()
        network: Any = self.network
        self.identity = TransactionalIdentity(network, 1_000.0, backoff)
        self.partition = partition_of(PLACE)
        self.failures: list[Exception] = []
        self.begin(0)
        self.identity.fail = self.failures.append
        self.refresh = self.identity.refresh

    def begin(self, epoch: int) -> None:
        self.identity.adopt("x", 7, epoch, adds_partitions=True)
        self.identity.partitions_to_add[self.partition] = None

    def respond(self, response: object, now_ms: float = 0.0, request: int = -1) -> None:
        self.network.sent[request].on_response(response, now_ms)

    @property
    def sent(self) -> list[int]:
        return [request.api_key for request in self.network.sent]


FOUND = CoordinatorsResponse({"x": FoundCoordinator(Node(1, "h", 9, None), 0, None)})


def test_a_response_that_leaves_out_what_was_asked_for_is_no_answer() -> None:
    """Catches: rows sent to a partition that is not in the transaction, as a broker did not name it; and a
    task that a KeyError ended."""
    task = Task()
    responses = (CoordinatorsResponse({}), FOUND, PartitionErrors({}), PartitionErrors({PLACE: 0}))
    for now_ms, response in enumerate(responses):
        assert task.partition in task.identity.partitions_to_add
        task.refresh(1_000.0 * now_ms)
        task.respond(response, 1_000.0 * now_ms)
    assert task.sent == [*[apis.FIND_COORDINATOR] * 2, *[apis.ADD_PARTITIONS_TO_TXN] * 2]
    assert not task.identity.partitions_to_add
    assert not task.failures


def test_lost_coordinator_is_looked_for_after_the_backoff() -> None:
    """Catches: requests without a pause while another broker takes over; and a lost request that nobody
    repeats."""
    task = Task()
    task.refresh(0.0)
    task.network.sent[-1].on_failure(ConnectionResetError("cut"), None, 0.0)
    assert 0.0 < task.refresh(1.0) <= 200.0
    assert task.sent == [apis.FIND_COORDINATOR]
    task.refresh(1_000.0)
    task.respond(FOUND, 1_000.0)
    broker = task.network.connections.pop(1)
    assert 0.0 < task.refresh(1_000.0) <= 200.0
    assert "coordinator cannot be reached" in str(task.identity.last_error)
    task.network.connections[1] = broker
    task.refresh(2_000.0)
    assert task.sent == [apis.FIND_COORDINATOR] * 3
    assert not task.failures


def test_responses_of_an_earlier_transaction_add_nothing() -> None:
    """Catches: a partition that counts as added to a transaction, because an earlier one had it."""
    task = Task()
    task.refresh(0.0)
    task.respond(FOUND)
    task.refresh(0.0)
    task.begin(1)
    task.respond(PartitionErrors({PLACE: 0}))
    assert task.partition in task.identity.partitions_to_add
    task.refresh(0.0)
    task.respond(FOUND)
    task.refresh(0.0)
    task.respond(PartitionErrors({PLACE: 0}), request=1)
    assert task.partition in task.identity.partitions_to_add
    task.respond(PartitionErrors({PLACE: 0}))
    assert not task.identity.partitions_to_add


def test_errors_of_coordinators_are_retried_unless_they_are_final() -> None:
    """Catches: batches that expired meanwhile, and whose error did not contain the coordinator's."""
    task = Task()
    unused: Any = SimpleNamespace(options=None)
    responses = ResponseHandler(unused, unused, task.identity, unused, unused)
    task.refresh(0.0)
    loading = COORDINATOR_LOAD_IN_PROGRESS
    task.respond(CoordinatorsResponse({"x": FoundCoordinator(None, loading, None)}))
    assert not task.failures
    assert "COORDINATOR_LOAD_IN_PROGRESS" in str(responses.obstacle(PLACE))
    task.refresh(1_000.0)
    task.respond(FOUND)
    task.refresh(1_000.0)
    task.respond(PartitionErrors({PLACE: TOPIC_AUTHORIZATION_FAILED}))
    assert "AddPartitionsToTxn of t-0 failed: TOPIC_AUTHORIZATION_FAILED" in str(task.failures[0])
