"""Which transaction an attempt writes in, and when it warns that its batch may not be committed in time."""

from __future__ import annotations

import math

import pytest

from kafka_sink.errors import TransactionError
from kafka_sink.transactions.decision import BatchIdentity, Part, RowsDigest
from kafka_sink.transactions.operations import ProducerEpoch
from kafka_sink.transactions.task_attempt import OpenTime
from tests.support.transaction_steps import Cluster


def test_a_task_warns_once_when_half_of_its_transactions_time_is_over() -> None:
    one = OpenTime(900_000)
    assert one.problem(1e9) is None, "nothing is open before the first row"
    one.on_begin(1_000)
    assert one.problem(451_000) is None
    said = one.problem(452_000)
    assert said is not None
    assert "has been open for 451 s" in said
    assert "kafka.transaction.timeout.ms = 900000 ms" in said
    assert one.problem(800_000) is None
    without_limit = OpenTime(math.inf)
    without_limit.on_begin(0)
    assert without_limit.problem(1e12) is None


def test_a_stage_that_runs_again_does_not_end_what_its_first_run_has_written() -> None:
    """Catches: attempt numbers begin at 0 again, so the second run aborted what the first had written."""
    cluster = Cluster()
    run = cluster.plan()
    first = cluster.write(run, 0, 0, 0, 1)
    again = cluster.write(run, 0, 0, 0, 1)
    assert first.part is not None
    assert again.part is not None
    assert first.part.slot != again.part.slot
    assert cluster.commit(first).aborted == 1
    assert dict(cluster.kafka.visible) == {(0, 0): 1, (0, 1): 1}
    late = cluster.plan()
    part = cluster.write(late, 1, 0, 0).part
    assert part is not None
    assert part.slot == 0


def test_an_attempt_does_not_look_for_a_free_slot_for_ever() -> None:
    cluster = Cluster()
    run = cluster.plan()
    for _ in range(16):
        cluster.write(run, 0, 0, 0)
    with pytest.raises(TransactionError, match="16 transactions open"):
        cluster.write(run, 0, 0, 0)


def test_a_marker_names_its_transaction() -> None:
    batch = BatchIdentity.of_query("one", 3)
    first, second = (Part(0, 0, ProducerEpoch(1, epoch), RowsDigest()) for epoch in (2, 3))
    assert batch.progress_marker(first) != batch.progress_marker(second)
    long = Part(10**6, 0, ProducerEpoch(2**62, 2**15), RowsDigest())
    assert len(batch.progress_marker(long)) < 100
