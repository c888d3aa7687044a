"""Which partitions belong to a task's transaction, by responses that a test makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kafka_sink.clock import ExponentialBackoff
from kafka_sink.engine.identity import TransactionalIdentity
from kafka_sink.engine.transaction_partitions import TransactionPartitions
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


def test_a_response_that_leaves_out_what_was_asked_for_is_no_answer() -> None:
    """Catches: rows sent to a partition that is not in the transaction, as a broker did not name it; and a
    task that a KeyError ended."""
    backoff = ExponentialBackoff(100.0, 100.0, lambda: 0.5)
    identity, network = TransactionalIdentity(backoff), Network()
    identity.adopt("x", 7, 0, adds_partitions=True)
    partition = partition_of(PLACE)
    identity.partitions_to_add[partition] = None
    failures: list[Exception] = []
    asks: Any = TransactionPartitions(identity, network, 1_000.0, backoff, failures.append)  # type: ignore[arg-type]
    found = FoundCoordinator(Node(1, "h", 9, None), 0, None)
    responses = (
        CoordinatorsResponse({}),
        CoordinatorsResponse({"x": found}),
        PartitionErrors({}),
        PartitionErrors({PLACE: 0}),
    )
    for now_ms, response in enumerate(responses):
        assert partition in identity.partitions_to_add
        asks.refresh(1_000.0 * now_ms)
        network.sent[-1].on_response(response, 1_000.0 * now_ms)
    assert [one.api_key for one in network.sent] == [
        *[apis.FIND_COORDINATOR] * 2,
        *[apis.ADD_PARTITIONS_TO_TXN] * 2,
    ]
    assert not identity.partitions_to_add
    assert not failures
