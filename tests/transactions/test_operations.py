"""Names of groups and ids by scope, and how far an epoch is behind another."""

from __future__ import annotations

import re

from kafka_sink.transactions.operations import (
    LAST_EPOCH,
    ProducerEpoch,
    Scope,
    epochs_behind,
    prefix_of,
    task_id_pattern,
)


def test_keys_stay_within_the_partitions_there_are() -> None:
    scope = Scope("p", "t", 3)
    keys = [scope.marker_key(task) for task in range(7)]
    assert len(set(keys)) == 7
    assert {key.partition.partition for key in keys} == {0, 1, 2}
    assert {key.group for key in keys} == {"p-tasks", "p-tasks-1", "p-tasks-2"}
    assert scope.decision_groups(1) == scope.decision_groups(3) == ("p-decision",)
    assert scope.decision_groups(4) == ("p-decision", "p-decision-1")


def test_the_pattern_of_ids_takes_no_other_prefix() -> None:
    pattern = task_id_pattern("a.b")
    assert re.match(pattern, Scope("a.b", "t", 1).task_id(3, 0))
    assert not re.match(pattern, Scope("a-b", "t", 1).task_id(3, 0))
    assert not re.match(pattern, Scope("a.b-task-1", "t", 1).task_id(3, 0))
    assert not re.match(pattern, Scope("a.b", "t", 1).driver_id)


def test_an_id_tells_its_prefix() -> None:
    scope = Scope("a-task-1-b", "t", 1)
    assert {prefix_of(scope.task_id(10, 2)), prefix_of(scope.driver_id)} == {scope.prefix}


def test_epochs_behind_counts_past_the_last_epoch_of_a_producer_id() -> None:
    last = ProducerEpoch(7, LAST_EPOCH)
    assert epochs_behind(ProducerEpoch(7, 3), ProducerEpoch(7, 5)) == 2
    assert epochs_behind(last, ProducerEpoch(8, 0)) == 1
    assert epochs_behind(last, ProducerEpoch(8, 1)) is None
    assert epochs_behind(ProducerEpoch(7, 3), ProducerEpoch(8, 0)) is None
