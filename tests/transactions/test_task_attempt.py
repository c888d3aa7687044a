"""Which transaction an attempt writes in, and when it warns that its batch may not be committed in time."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_sink.clock import monotonic_ms
from kafka_sink.errors import TransactionError
from kafka_sink.transactions.batch import TaskHandover
from kafka_sink.transactions.client import PROTOCOL_2
from kafka_sink.transactions.decision import BatchIdentity, Part, RowsDigest
from kafka_sink.transactions.operations import ProducerEpoch, Scope
from kafka_sink.transactions.task_attempt import TaskAttempt
from tests.support.transaction_steps import Cluster


def test_a_task_warns_once_when_half_of_its_transactions_time_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client: Any = SimpleNamespace(
        run=lambda _, *__: (0, ProducerEpoch(5, 0)), start=lambda *_: None, protocol=PROTOCOL_2
    )
    handover, batch = TaskHandover(ProducerEpoch(1, 0)), BatchIdentity.of_query("x", 0)

    def warned_at(timeout_ms: float, *after_ms: float) -> list[str]:
        attempt = TaskAttempt(client, Scope("p", "t", 1), handover, batch, 0, 0, (), 1.0, timeout_ms)
        caplog.clear()
        attempt.warn_if_open_long(1e15)
        assert not caplog.messages, "nothing is open before the first row"
        attempt.begin(lambda *_: None)
        began_ms = monotonic_ms()
        for passed_ms in after_ms:
            attempt.warn_if_open_long(began_ms + passed_ms)
        return caplog.messages

    (warning,) = warned_at(900_000, 440_000, 452_000, 800_000)
    assert "has been open for 452 s" in warning
    assert "kafka.transaction.timeout.ms = 900000 ms" in warning
    assert not warned_at(math.inf, 1e12)


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
