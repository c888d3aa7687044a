"""Three real brokers, of which one is frozen until others have taken its place, and thaws."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import pytest

from kafka_sink.clock import monotonic_ms, wall_ms
from kafka_sink.model import Node
from kafka_sink.network.blocking import KeyType
from kafka_sink.network.client import NetworkClient
from kafka_sink.options import parse
from kafka_sink.transactions import batch, driver
from kafka_sink.transactions.client import TransactionClient
from kafka_sink.transactions.operations import (
    EndTransaction,
    Failed,
    Operation,
    Scope,
    TransactionSteps,
    describe,
)
from local_kafka import LocalBroker
from tests.support.batches_by_hand import Job
from tests.support.effort import EFFORT
from tests.support.transaction_steps import through
from tests.support.waiting import until

_PATIENCE_S = 90.0


@pytest.fixture
def cluster(cluster3: LocalBroker) -> Iterator[LocalBroker]:
    """All brokers serve again behind the test."""
    yield cluster3
    for broker in range(3):
        cluster3.thaw(broker)


@pytest.fixture
def clients() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def job_on(
    cluster: LocalBroker, clients: ExitStack, topic: str, prefix: str, without: int | None = None
) -> tuple[Job, NetworkClient]:
    """With a client of its own, which does not begin at the broker ``without``; and its connections."""
    servers = cluster.bootstrap_servers.split(",")
    named = ",".join(one for number, one in enumerate(servers) if number != without)
    raw = {"kafka.bootstrap.servers": named, "topic": topic, "delivery.guarantee": "exactly-once"}
    options = parse(raw).options
    network = NetworkClient(options, monotonic_ms)
    client = clients.enter_context(closing(TransactionClient(options, network)))
    return Job(options, client, Scope(prefix, topic, 2), clients), network


def coordinator_of(run: Job, name: str) -> int:
    run.client.coordinators.pop((KeyType.TRANSACTION, name), None)
    run.run(describe(name))
    return run.client.coordinators[KeyType.TRANSACTION, name]


def prefix_with_a_task_alone(run: Job) -> tuple[str, int]:
    """A prefix whose first task's id has a coordinator that the driver's id has not, and which it is."""
    for number in range(100):
        scope = Scope(f"former-{number}", run.scope.topic, 2)
        broker = coordinator_of(run, scope.task_id(0, 0))
        if broker != coordinator_of(run, scope.driver_id):
            return scope.prefix, broker
    raise AssertionError("all coordinators are one broker")


@dataclass
class Thawing:
    """Runs a commit, and has the former coordinator answer for the first task when that is committed."""

    cluster: LocalBroker
    run: Job
    network: NetworkClient
    node: Node
    refused: int = 0

    def steps(self, commit: TransactionSteps[Any]) -> TransactionSteps[Any]:
        return (yield from through(commit, self._ask))

    def _ask(self, wanted: tuple[Operation, ...]) -> TransactionSteps[Any]:
        name = self.run.scope.task_id(0, 0)
        ends = [one for one in wanted if isinstance(one, EndTransaction) and one.transactional_id == name]
        if ends and not ends[0].afresh:
            client = self.run.client
            client.nodes[self.node.id] = self.node
            self.network.set_addresses(client.nodes.values())
            client.coordinators[KeyType.TRANSACTION, name] = self.node.id
            self.cluster.thaw(self.node.id)
        answers = yield wanted
        if ends:
            self.refused += isinstance(answers[wanted.index(ends[0])], Failed)
        return answers


# A broker is away until others replace it, so the next run's way is gone where there is time.
@pytest.mark.parametrize("dies", [False, True] if EFFORT > 1 else [False])
def test_decided_batch_is_committed_although_a_former_coordinator_refuses(
    cluster: LocalBroker, clients: ExitStack, *, dies: bool
) -> None:
    """Catches: it answers PRODUCER_FENCED from memory once it thaws, as it never saw the transaction. The
    driver then aborted what it had decided, or waited for the progress marker until its bound."""
    topic = f"former-{dies}"
    cluster.create_topic(topic, 2)
    looking, _ = job_on(cluster, clients, topic, "looking")
    prefix, broker = prefix_with_a_task_alone(looking)
    warm, _ = job_on(cluster, clients, topic, prefix)
    # So that it knows the id, and has connections to all brokers.
    warm.commit(warm.write(warm.take_over(), 0, 0, ["first"]))
    node = warm.client.nodes[broker]
    cluster.freeze(broker)
    run, network = job_on(cluster, clients, topic, prefix, without=broker)
    until(lambda: coordinator_of(run, run.scope.task_id(0, 0)) != broker, "a successor", _PATIENCE_S)
    handover = run.take_over()
    report = run.write(handover, 1, 0, ["second"])
    thawing = Thawing(cluster, run, network, node)
    if dies:
        run.decide_only(handover, report)
        found = run.run(thawing.steps(driver.take_over(run.scope, wall_ms)))
        assert (found.missing, found.unknown, found.aborted) == (frozenset(), frozenset(), 0)
    else:
        outcome = run.run(thawing.steps(batch.commit([report])))
        assert outcome.aborted == 0
    run.await_rows(["first", "second"])
    # Mostly once; the broker may learn of its successor before it answers.
    print("refused from memory:", thawing.refused)
