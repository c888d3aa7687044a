"""What ended a transaction is proved, and nobody believes a former coordinator's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kafka_sink.transactions import driver, proof
from kafka_sink.transactions.batch import TaskRole
from kafka_sink.transactions.operations import (
    Described,
    Failed,
    FetchOffsets,
    Operation,
    ProducerEpoch,
)
from tests.support.transaction_steps import SCOPE, Cluster, ends_driver, ends_task


def test_a_transaction_that_somebody_else_has_ended_is_not_counted_as_aborted() -> None:
    found = {name: Described("Ongoing", ProducerEpoch(number, 0), number) for number, name in enumerate("ab")}
    steps = proof.abort_others(found, SCOPE, ())
    next(steps)
    with pytest.raises(StopIteration) as ended:
        steps.send((Failed("INVALID_TXN_STATE"), None))
    assert ended.value.value == 1


def test_a_decided_transaction_that_a_former_coordinator_refused_to_commit_is_committed() -> None:
    """Catches: the driver took what it had decided for another attempt's, and aborted it."""
    cluster = Cluster()
    run = cluster.plan()
    name = SCOPE.task_id(0, 0)
    answers_again = cluster.kafka.replace_coordinator_of_id(name)
    report = cluster.write(run, 0, 0, 0)

    def thaws(one: Operation) -> bool:
        if ends_driver(one):
            answers_again()
        return False

    assert cluster.commit(report, die_before=thaws).committed == 1
    assert dict(cluster.kafka.visible) == {(0, 0): 1}


def test_decided_batch_that_a_former_coordinator_does_not_know_is_not_aborted() -> None:
    """Catches: a batch that was decided, and could have been completed, became incomplete."""
    cluster = Cluster()
    first = cluster.plan()
    answers_again = cluster.kafka.replace_coordinator(SCOPE.decision_key(0).group)
    reports = [cluster.write(first, 0, index, index) for index in range(2)]
    cluster.dies(*reports, before=ends_task(0))
    answers_again()
    found = cluster.take_over()
    assert (found.completed, found.aborted, found.missing) == (2, 0, frozenset())


def test_markers_that_only_a_former_coordinator_does_not_have_are_not_missing() -> None:
    """Catches: rows doubled, as a batch that is complete was taken for lost and written again."""
    cluster = Cluster()
    first = cluster.plan()
    answers_again = cluster.kafka.replace_coordinator(SCOPE.marker_key(0).group)
    report = cluster.write(first, 0, 0, 0)
    cluster.commit(report)
    answers_again()
    again = cluster.plan()
    assert again.role(report.run.batch, 0) is TaskRole.SKIP
    later = cluster.write(again, 1, 0, 0)
    assert cluster.commit(later).committed == 1


def test_markers_are_looked_for_where_the_tasks_left_them() -> None:
    """Catches: a batch was written twice, as the topic got partitions since planning."""
    cluster = Cluster()
    cluster.commit(*cluster.wrote(tasks=3)[1])
    found = cluster.take_over(replace(SCOPE, partitions=3))
    assert (found.completed, found.missing) == (0, frozenset())


def test_markers_are_listed_by_their_keys() -> None:
    """Catches: ``list`` failed for a group with more than about 2,080 markers, as a client that does not know
    the topic's partitions takes so many offsets for an attack."""
    cluster = Cluster()
    cluster.decided(1)
    asked: list[Operation] = []
    decision = cluster.run(driver.read_decision(SCOPE))
    missing = cluster.run(proof.uncommitted(SCOPE, decision), lambda one: bool(asked.append(one)))
    assert [part.task for part in missing] == [1]
    assert asked[0] == FetchOffsets((), tuple(SCOPE.marker_key(task) for task in (0, 1)))
