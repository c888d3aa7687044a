"""Plans: which rows go to which batch, and what a plan does where memory is short. No thread, no lock."""

from __future__ import annotations

import pytest

from kafka_sink.accumulator.append_planner import AppendPlan, Grant
from kafka_sink.accumulator.batch_limits import TooLargeBatch
from kafka_sink.accumulator.producer_batch import BatchState
from tests.support.planner_bench import CHUNK, Bench, rows


def placed(plan: AppendPlan) -> list[tuple[int, int, int, int]]:
    """Partition, first row, row past the last, and offset of the first, of each batch."""
    return [
        (batch.partition.partition, plan.start + run.start, plan.start + run.stop, run.base_offset)
        for batch, run in zip(plan.batches, plan.runs, strict=True)
    ]


def test_each_run_gets_a_leased_batch_with_the_time_and_the_first_timestamp() -> None:
    bench = Bench()
    plan = bench.plan(rows(3, 2))
    assert placed(plan) == [(0, 0, 3, 0), (1, 3, 5, 0)]
    assert (plan.stop, plan.shortage, plan.opened, plan.full) == (5, None, True, [])
    for batch in plan.batches:
        assert (batch.created_ms, batch.base_timestamp) == (3.0, 7)
        assert batch.leased
        assert batch.state is BatchState.OPEN


def test_a_plan_writes_nothing() -> None:
    bench = Bench()
    (batch,) = bench.plan(rows(3)).batches
    assert (batch.record_count, batch.raw_bytes) == (0, 0)


def test_a_long_run_goes_to_as_many_batches_as_it_needs_and_closes_all_but_the_last() -> None:
    bench = Bench()
    plan = bench.plan(rows(40))
    assert [(start, stop) for _, start, stop, _ in placed(plan)] == [(0, 16), (16, 32), (32, 40)]
    assert plan.full == plan.batches[:2]
    assert all(batch.state is BatchState.CLOSED and batch.leased for batch in plan.full)


def test_refused_memory_ends_the_plan_at_the_row_that_has_no_place() -> None:
    bench = Bench(memory=2 * CHUNK)
    ordered = rows(2, 40)
    plan = bench.plan(ordered)
    assert ordered.run_of(plan.stop) == 1
    assert plan.shortage is not None
    assert plan.shortage.size <= 2 * CHUNK
    assert plan.shortage.stop > plan.stop >= 2
    # What is planned before it holds exactly the pool's lent memory.
    held = sum(batch.buffer.capacity for batch in bench.queues.live)
    assert bench.pool.metrics().used_bytes == held


def test_a_grant_opens_a_batch_for_its_rows_and_the_next_turn_goes_on_behind_them() -> None:
    bench = Bench()
    ordered = rows(5)
    grant = Grant(bench.allocator.open(400, 0), 3)
    plan = bench.plan(ordered, 1, grant)
    assert placed(plan) == [(0, 1, 3, 0)]
    assert plan.batches[0].buffer is grant.buffer
    assert (plan.stop, plan.shortage) == (3, None)


def test_a_turn_begins_in_the_middle_of_a_run() -> None:
    plan = Bench().plan(rows(4, 4), 6)
    assert placed(plan) == [(1, 6, 8, 0)]


def test_a_refused_batch_is_learnt_from_once() -> None:
    bench = Bench()
    bench.queues.too_large_batches.append(TooLargeBatch("t", 1.7))
    bench.plan(rows(1))
    assert bench.queues.too_large_batches == []
    # Of batches without compression the ratio is not asked for.
    assert bench.estimates.ratios.estimate("t", bench.estimates.compression) == pytest.approx(1.7)
