"""Carrying out a plan: rows written, full batches sealed, leases ended, and who is woken."""

from __future__ import annotations

import pytest

from kafka_sink.accumulator.append_planner import AppendPlan
from kafka_sink.accumulator.producer_batch import BatchState
from kafka_sink.accumulator.record_accumulator import RecordAccumulator
from kafka_sink.accumulator.record_appender import RecordAppender
from kafka_sink.model import TopicPartition
from kafka_sink.records.ordered_rows import OrderedRows
from tests.support.planner_bench import Bench, rows


class WriterBench(Bench):
    """A planner and a writer over one accumulator."""

    def __init__(self) -> None:
        super().__init__()
        self.accumulator = RecordAccumulator(self.settings, self.allocator)
        self.wakes = 0
        self.writer = RecordAppender(self.accumulator, self.estimates, lambda: 0.0, self._wake)

    def _wake(self) -> None:
        self.wakes += 1

    def planned(self, ordered: OrderedRows) -> AppendPlan:
        with self.accumulator.planning() as queues:
            return self.planner.plan(queues, ordered, 0, len(ordered.partitions))


def test_the_rows_of_a_plan_are_written_and_its_leases_end() -> None:
    bench = WriterBench()
    plan = bench.planned(rows(3, 2))
    bench.writer.write(plan)
    assert [batch.record_count for batch in plan.batches] == [3, 2]
    assert all(not batch.leased for batch in plan.batches)
    assert bench.wakes == 1


def test_full_batches_are_sealed_and_the_last_stays_open() -> None:
    bench = WriterBench()
    plan = bench.planned(rows(40))
    bench.writer.write(plan)
    states = [batch.state for batch in plan.batches]
    assert states == [BatchState.SEALED, BatchState.SEALED, BatchState.OPEN]
    assert [batch.record_count for batch in plan.batches] == [16, 16, 8]
    assert not any(batch.leased for batch in plan.batches)


def test_nobody_is_woken_for_more_rows_in_a_batch_that_the_sender_knows() -> None:
    bench = WriterBench()
    bench.writer.write(bench.planned(rows(1)))
    bench.writer.write(bench.planned(rows(1)))
    assert bench.wakes == 1
    plan = bench.planned(rows(1))
    with bench.accumulator.planning() as queues:
        queues.leased_batch_skipped = True  # the sender passed by meanwhile
    bench.writer.write(plan)
    assert bench.wakes == 2


def test_thousands_of_small_batches_are_given_to_the_sender_in_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lock and a wake-up for each cost as much as a batch of a few rows takes in all."""
    bench = WriterBench()
    topics = [TopicPartition(f"t{number}", 0) for number in range(300)]
    monkeypatch.setattr("tests.support.planner_bench.P", topics)
    plan = bench.planned(rows(*[4] * len(topics)))
    bench.writer.write(plan)
    with bench.accumulator.planning() as queues:
        closed = queues.open_batches()
        for batch in closed:
            batch.leased = True
            queues.close(batch)
    bench.wakes = 0
    bench.writer.seal(closed)
    assert not any(batch.leased for batch in closed)
    assert {batch.state for batch in closed} == {BatchState.SEALED}
    assert sum(batch.raw_bytes for batch in closed) > 65_536
    assert bench.wakes == 2


def test_a_turn_that_fails_keeps_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches lack rows, so the sender must not have them."""
    bench = WriterBench()
    plan = bench.planned(rows(3))

    def failing(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kafka_sink.accumulator.record_appender.encoder.encode", failing)
    with pytest.raises(KeyboardInterrupt):
        bench.writer.write(plan)
    assert plan.batches[0].leased
    bench.accumulator.abort_incomplete(lambda batch: None, end_leases=True)
    assert bench.pool.metrics().used_bytes == 0
