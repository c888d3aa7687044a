"""Append passes: which rows go to which batch, what happens where memory is short, rows written, full batches
sealed, let go, and who is woken. No thread."""

from __future__ import annotations

import pytest

from kafka_sink.engine.appender import AppendPass
from kafka_sink.engine.batch import BatchState
from kafka_sink.model import TopicPartition
from tests.support.append_bench import CHUNK, Bench, rows
from tests.support.queues import limits_of


def placed(plan: AppendPass) -> list[tuple[int, int, int, int]]:
    """Partition, first row, row past the last, and offset of the first, of each batch."""
    return [
        (batch.partition.partition, plan.start + run.start, plan.start + run.stop, run.base_offset)
        for batch, run in zip(plan.batches, plan.ranges, strict=True)
    ]


def test_each_run_gets_a_held_batch_with_the_time_and_the_first_timestamp() -> None:
    bench = Bench()
    plan = bench.planned(rows(3, 2))
    assert placed(plan) == [(0, 0, 3, 0), (1, 3, 5, 0)]
    assert (plan.stop, plan.missing, plan.closed) == (5, None, [])
    for batch in plan.batches:
        assert (batch.created_ms, batch.base_timestamp) == (3.0, 7)
        assert batch.held
        assert batch.state is BatchState.OPEN


def test_a_plan_writes_nothing() -> None:
    bench = Bench()
    (batch,) = bench.planned(rows(3)).batches
    assert (batch.record_count, batch.raw_bytes) == (0, 0)


def test_a_long_run_goes_to_as_many_batches_as_it_needs_and_closes_all_but_the_last() -> None:
    bench = Bench()
    plan = bench.planned(rows(40))
    assert [(start, stop) for _, start, stop, _ in placed(plan)] == [(0, 16), (16, 32), (32, 40)]
    assert plan.closed == plan.batches[:2]
    assert all(batch.state is BatchState.CLOSED and batch.held for batch in plan.closed)


def test_refused_memory_ends_the_plan_at_the_row_that_has_no_place() -> None:
    bench = Bench(memory=2 * CHUNK)
    ordered = rows(2, 40)
    plan = bench.planned(ordered)
    assert ordered.starts[1] <= plan.stop < ordered.starts[2]
    assert plan.missing is not None
    assert plan.missing[0] <= 2 * CHUNK
    assert plan.missing[1] > plan.stop >= 2
    # What is planned before it holds exactly the pool's lent memory.
    held = sum(batch.buffer.capacity for batch in bench.accumulator.live)
    assert bench.pool.metrics().used_bytes == held


def test_a_grant_opens_a_batch_for_its_rows_and_the_next_pass_goes_on_behind_them() -> None:
    bench = Bench()
    ordered = rows(5)
    granted = bench.allocator.open(400, 0)
    plan = bench.planned(ordered, 1, granted, 3)
    assert placed(plan) == [(0, 1, 3, 0)]
    assert plan.batches[0].buffer is granted
    assert (plan.stop, plan.missing) == (3, None)


def test_a_pass_begins_in_the_middle_of_a_run() -> None:
    plan = Bench().planned(rows(4, 4), 6)
    assert placed(plan) == [(1, 6, 8, 0)]


def test_a_refused_batch_is_learnt_from_once() -> None:
    bench = Bench()
    limits = limits_of(bench.accumulator)
    bench.accumulator.too_large_batches.append((limits, 1.7))
    bench.planned(rows(1))
    assert bench.accumulator.too_large_batches == []
    assert limits.ratio == pytest.approx(1.7)


def test_the_rows_of_a_pass_are_written_and_its_batches_let_go() -> None:
    bench = Bench()
    plan = bench.planned(rows(3, 2))
    bench.appender.carry_out(plan)
    assert [batch.record_count for batch in plan.batches] == [3, 2]
    assert all(not batch.held for batch in plan.batches)
    assert bench.wakes == 1


def test_full_batches_are_sealed_and_the_last_stays_open() -> None:
    bench = Bench()
    plan = bench.planned(rows(40))
    bench.appender.carry_out(plan)
    states = [batch.state for batch in plan.batches]
    assert states == [BatchState.SEALED, BatchState.SEALED, BatchState.OPEN]
    assert [batch.record_count for batch in plan.batches] == [16, 16, 8]
    assert not any(batch.held for batch in plan.batches)


def test_nobody_is_woken_for_more_rows_in_a_batch_that_the_sender_knows() -> None:
    bench = Bench()
    bench.appender.carry_out(bench.planned(rows(1)))
    bench.appender.carry_out(bench.planned(rows(1)))
    assert bench.wakes == 1
    plan = bench.planned(rows(1))
    with bench.accumulator.lock:
        bench.accumulator.held_batch_skipped = True  # the sender passed by meanwhile
    bench.appender.carry_out(plan)
    assert bench.wakes == 2


def test_thousands_of_small_batches_are_given_to_the_sender_in_groups() -> None:
    """A lock and a wake-up for each cost as much as a batch of a few rows takes in all."""
    bench = Bench()
    topics = [TopicPartition(f"t{number}", 0) for number in range(300)]
    bench.appender.carry_out(bench.planned(rows(*[4] * len(topics), partitions=topics)))
    bench.wakes = 0
    bench.appender.flush()
    sealed = [partition.batches[-1] for partition in bench.accumulator.waiting]
    assert not any(batch.held for batch in sealed)
    assert {batch.state for batch in sealed} == {BatchState.SEALED}
    assert sum(batch.raw_bytes for batch in sealed) > 65_536
    # Two groups, and the flush itself.
    assert bench.wakes == 3


def test_a_pass_that_fails_keeps_its_batches_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches lack rows, so the sender must not have them."""
    bench = Bench()
    plan = bench.planned(rows(3))

    def failing(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kafka_sink.engine.appender.encoder.encode", failing)
    with pytest.raises(KeyboardInterrupt):
        bench.appender.carry_out(plan)
    assert plan.batches[0].held
    bench.accumulator.abort_incomplete(lambda batch: None, include_held=True)
    assert bench.pool.metrics().used_bytes == 0
