"""What is ready, what is drained, what happens to batches afterwards; no threads and no clock."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable

import pytest

from kafka_sink.cluster.broker import Broker
from kafka_sink.cluster.partition import BatchState, Partition, ProducerBatch
from kafka_sink.engine.accumulator import HOLD_MS, RecordAccumulator
from kafka_sink.engine.deliveries import Deliveries
from kafka_sink.errors import BufferExhaustedError, DeliveryError, IllegalTransitionError
from kafka_sink.memory.pool import BufferPool
from kafka_sink.model import CompressionType, TopicPartition
from kafka_sink.records.batch_header import ProducerSequence
from tests.support.brokers import Brokers
from tests.support.queues import partition_of, settings
from tests.support.strategy import forced

P = [TopicPartition("t", index) for index in range(6)]


LOST = DeliveryError("lost")


def anything(_: ProducerBatch) -> bool:
    return True


class Bench:
    """An accumulator with its pool; partition i leads on broker i % 2."""

    def __init__(self, pool_bytes: int = 1 << 20, **changes: object) -> None:
        self.pool = BufferPool(pool_bytes, clock_ms=lambda: 0.0)
        options = settings(**{"linger_ms": 20, "compression_type": CompressionType.NONE, **changes})
        self.brokers = Brokers()
        self.accumulator = RecordAccumulator(options, forced.allocator(self.pool, 1_000, 128))
        self.leaders: dict[TopicPartition, int] = {}

    def batch(self, partition: TopicPartition, created: float = 0, size: int = 100) -> ProducerBatch:
        buffer = self.accumulator.allocator.open(size, 0)
        with self.accumulator.lock:
            queue = self.accumulator.partition(partition)
            batch = ProducerBatch(buffer, None, CompressionType.NONE, 1.0, 0, queue, created, held=True)
            batch.append(memoryview(b"x" * (size - 61)), 2, 0)
            batch.held = False
            self.accumulator.enqueue(queue, batch)
        return batch

    def closed(self, partition: TopicPartition, created: float = 0, size: int = 100) -> ProducerBatch:
        batch = self.batch(partition, created, size)
        batch.move_to(BatchState.CLOSED)
        batch.seal()
        return batch

    def leader(self, partition: Partition) -> Broker | None:
        node = self.leaders.get(partition.id, partition.id.partition % 2)
        return self.brokers.of(node) if node >= 0 else None

    def ready(self, now: float) -> tuple[dict[int, set[int]], float]:
        """Partition numbers by broker, and the delay."""
        found, _, delay = self.accumulator.ready(self.leader, now)
        return {one.id: {q.id.partition for q in queues} for one, queues in found.items()}, delay

    def drain(
        self,
        node: int,
        now: float = 1_000,
        most: int = 10_000,
        may_send: Callable[[ProducerBatch], bool] = anything,
    ) -> list[ProducerBatch]:
        queues = self.accumulator.ready(self.leader, now)[0][self.brokers.of(node)]
        taken = self.accumulator.drain(self.brokers.of(node), queues, most, may_send)
        for batch in taken:
            if batch.state is BatchState.CLOSED:
                batch.seal()
            batch.move_to(BatchState.IN_FLIGHT)
            batch.attempts += 1
        return taken

    def flying(self) -> ProducerBatch:
        """A batch that is sent."""
        self.closed(P[0])
        (taken,) = self.drain(0)
        return taken

    def counts(self) -> Deliveries:
        return self.accumulator.deliveries.counts()

    def used(self) -> int:
        return self.pool.metrics().used_bytes


def test_open_batches_wait_for_linger_and_the_oldest_says_when_to_check_again() -> None:
    bench = Bench()
    assert bench.ready(0) == ({}, math.inf)
    bench.batch(P[0], created=100)
    assert bench.ready(105) == ({}, 15)
    assert bench.ready(120) == ({0: {0}}, math.inf)
    bench = Bench(linger_ms=500)
    bench.leaders = dict.fromkeys(P, 0)
    for age, partition in enumerate(P[:3]):
        bench.batch(partition, created=100 - 10 * age)
    assert bench.ready(200) == ({}, 380)
    assert bench.ready(580) == ({0: {2}}, 10)


def test_full_followed_and_flushed_batches_are_ready_at_once() -> None:
    full, followed, flushed = Bench(), Bench(), Bench()
    full.closed(P[0])
    followed.batch(P[0])
    followed.batch(P[0])
    flushed.batch(P[0])
    assert flushed.ready(0)[0] == {}
    flushed.accumulator.flushing = True
    for bench in (full, followed, flushed):
        assert bench.ready(0)[0] == {0: {0}}
    # Somebody who waits for memory makes all ready.
    bench, seen = Bench(), []
    bench.batch(P[0])
    bench.batch(P[1])
    with pytest.raises(BufferExhaustedError):
        bench.accumulator.allocator.open(1 << 20, 0, lambda: seen.append(bench.ready(0)[0]))
    assert seen[0] == {0: {0}, 1: {1}}


def test_a_held_batch_is_left_alone_and_the_task_is_asked_to_wake_the_sender() -> None:
    bench = Bench()
    batch = bench.batch(P[0])
    queues = bench.accumulator.ready(bench.leader, 1_000)[0][bench.brokers.of(0)]
    batch.held = True
    assert not bench.accumulator.held_batch_skipped
    assert bench.ready(10_000) == ({}, math.inf)
    assert bench.accumulator.held_batch_skipped
    bench.accumulator.held_batch_skipped = False
    assert bench.accumulator.drain(bench.brokers.of(0), queues, 10_000, anything) == []
    assert bench.accumulator.held_batch_skipped, "held between ready and drain, too"


def test_a_queue_remembers_its_leader_while_the_metadata_stays_the_same() -> None:
    bench = Bench()
    for partition in P[:3]:
        bench.closed(partition)
    bench.leaders[P[2]] = -1
    assert bench.ready(0)[0] == {0: {0}, 1: {1}}
    assert [one.id for one in bench.accumulator.ready(bench.leader, 0)[1]] == [P[2]], "it has none"

    def leader(version: int | None) -> int:
        found = bench.accumulator.ready(bench.leader, 1_000, version)[0]
        return next(one.id for one, queues in found.items() if P[0] in [queue.id for queue in queues])

    assert leader(7) == 0
    bench.leaders[P[0]] = 1
    assert (leader(7), leader(8)) == (0, 1)
    bench.leaders[P[0]] = 0
    assert leader(None) == 0, "without a version nothing is remembered"


def test_a_retry_waits_for_its_backoff_and_holds_back_what_stands_behind() -> None:
    bench = Bench()
    taken = bench.flying()
    bench.closed(P[0])
    bench.accumulator.reenqueue(taken, 1_500)
    assert bench.ready(1_200) == ({}, 300)
    assert bench.drain(0, 1_500) == [taken]


@pytest.mark.parametrize("guarded", [False, True])
def test_guarded_partition_has_one_batch_in_flight(guarded: bool) -> None:
    bench = Bench(max_in_flight_requests_per_connection=1 if guarded else 5)
    bench.closed(P[0])
    taken = bench.flying()
    assert bench.ready(0)[0] == ({} if guarded else {0: {0}})
    bench.accumulator.complete([(taken, 0, -1)])
    assert bench.ready(0)[0] == {0: {0}}


def test_a_pass_takes_one_batch_per_partition_of_the_broker_up_to_a_requests_size() -> None:
    bench = Bench()
    heads = {partition: bench.closed(partition) for partition in P}
    for partition in P:
        bench.closed(partition)
    assert {batch.topic_partition: batch for batch in bench.drain(0)} == {p: heads[p] for p in P[::2]}
    assert {batch.topic_partition for batch in bench.drain(1)} == set(P[1::2])
    # Only a first batch exceeds it.
    bench = Bench()
    bench.closed(P[0], size=500)
    bench.closed(P[2], size=300)
    bench.closed(P[4], size=300)
    assert [batch.size for batch in bench.drain(0, most=400)] == [500]
    assert [batch.size for batch in bench.drain(0, most=600)] == [300, 300]
    # One that was open takes no more rows.
    batch = bench.batch(P[0])
    queues = bench.accumulator.ready(bench.leader, 50)[0][bench.brokers.of(0)]
    assert bench.accumulator.drain(bench.brokers.of(0), queues, 10_000, anything) == [batch]
    assert (batch.state, batch.in_request) == (BatchState.CLOSED, True)


def test_no_partition_starves() -> None:
    bench = Bench()
    for _ in range(4):
        for partition in P[::2]:
            bench.closed(partition, size=300)
    taken = [batch.topic_partition.partition for _ in range(12) for batch in bench.drain(0, most=300)]
    assert [sorted(taken[start : start + 3]) for start in range(0, 12, 3)] == [[0, 2, 4]] * 4


def test_batches_that_may_not_be_sent_stay_in_place() -> None:
    bench = Bench()
    held, free = bench.closed(P[0]), bench.closed(P[2])
    assert bench.drain(0, may_send=lambda batch: batch is free) == [free]
    assert bench.drain(0) == [held]


def test_rows_are_accounted_for_before_their_batch_counts_as_complete() -> None:
    """Else a task that waits for its last batch finds it gone and its rows missing."""
    bench = Bench()
    bench.closed(P[0])
    taken = bench.flying()
    seen: list[int] = []

    def noted(*_: object, **__: object) -> None:
        seen.append(bench.accumulator.incomplete)

    for count in ("on_acknowledged", "on_failed"):
        setattr(bench.accumulator.deliveries, count, noted)
    bench.accumulator.complete([(taken, 0, -1)])
    (taken,) = bench.drain(0)
    bench.accumulator.fail(taken, LOST)
    assert seen == [2, 1]
    assert bench.accumulator.incomplete == 0


@pytest.mark.parametrize("late", ["success", "retry", "split"])
def test_a_late_response_changes_nothing_but_frees_the_memory(late: str) -> None:
    bench = Bench()
    taken = bench.flying()
    assert bench.accumulator.fail(taken, LOST)
    assert not bench.accumulator.fail(taken, LOST)
    assert bench.used() > 0
    if late == "success":
        bench.accumulator.complete([(taken, 0, -1)])
    elif late == "retry":
        bench.accumulator.reenqueue(taken, 0)
    else:
        queue, buffer = taken.queue, bench.accumulator.allocator.open(100, 0)
        piece = ProducerBatch(buffer, None, CompressionType.NONE, 1.0, 0, queue, 0)
        bench.accumulator.reenqueue_split(taken, [piece])
        assert bench.ready(10_000)[0] == {}
    assert (bench.counts().records, bench.used(), bench.accumulator.incomplete) == (0, 0, 0)
    assert taken.state is BatchState.FAILED
    assert not bench.accumulator.live


def test_a_held_batch_is_not_failed() -> None:
    bench = Bench()
    batch = bench.batch(P[0])
    batch.held = True
    assert not bench.accumulator.fail(batch, LOST)
    assert batch.state is BatchState.OPEN
    batch.held = False
    assert bench.accumulator.fail(batch, LOST)
    assert (bench.used(), bench.ready(10_000)) == (0, ({}, math.inf))


def test_expired_batches_and_the_time_until_the_next() -> None:
    bench = Bench()
    old, held = bench.batch(P[0], created=0), bench.batch(P[1], created=0)
    bench.batch(P[0], created=400)
    held.held = True
    assert bench.accumulator.expired(9_000) == ([], 1_000)
    assert bench.accumulator.expired(10_000) == ([old], HOLD_MS)
    held.held = False
    assert bench.accumulator.expired(10_000) == ([old, held], 400)
    # What moved behind younger ones expires at its own age.
    bench = Bench()
    assert bench.accumulator.expired(0) == ([], 10_000), "a batch may be opened just now"
    bench.closed(P[1], created=5_000)
    old = movable(bench.closed(P[0], created=0))
    move(bench, P[0], P[1])
    assert bench.accumulator.expired(9_000) == ([], 1_000)
    assert bench.accumulator.expired(10_000) == ([old], 5_000)


@pytest.mark.parametrize("include_held", [False, True])
def test_closing_gives_all_back_wherever_it_is(include_held: bool) -> None:
    bench = Bench()
    bench.closed(P[0])
    bench.closed(P[0])
    bench.drain(0)
    (expired,) = bench.drain(0)
    bench.accumulator.fail(expired, LOST)
    bench.batch(P[1])
    held = bench.batch(P[2])
    held.held = True
    before = bench.counts().failed
    bench.accumulator.abort_incomplete(LOST, include_held=include_held)
    assert bench.counts().failed - before == 2 * (3 if include_held else 2)
    assert held.terminal is include_held
    assert (bench.used() == 0) is include_held
    bench.accumulator.abort_incomplete(LOST, include_held=True)
    assert (bench.counts().failed - before, bench.used(), bench.accumulator.incomplete) == (6, 0, 0)
    assert not bench.accumulator.live


def test_the_partitioner_learns_how_many_batches_wait() -> None:
    bench = Bench()
    for partition in (P[1], P[4], P[1], TopicPartition("u", 2)):
        bench.closed(partition)
    assert bench.accumulator.queued_batches("t", 6) == [0, 2, 0, 0, 1, 0]
    # A recreated topic may have fewer partitions than what waits was made for.
    assert bench.accumulator.queued_batches("t", 3) == [0, 2, 0]
    assert bench.accumulator.queued_batches("v", 2) == [0, 0]


def test_unacknowledged_rows_are_those_that_were_sent() -> None:
    bench = Bench()
    bench.closed(P[0])
    bench.closed(P[1])
    bench.batch(P[2])
    (one,) = bench.drain(0, may_send=lambda batch: batch.topic_partition == P[0])
    (other,) = bench.drain(1)
    assert bench.accumulator.unacknowledged_records() == 4
    bench.accumulator.reenqueue(one, 0)
    assert bench.accumulator.unacknowledged_records() == 4
    bench.accumulator.fail(one, LOST)
    assert bench.accumulator.unacknowledged_records() == 2
    bench.accumulator.fail(other, LOST)
    assert bench.accumulator.unacknowledged_records() == 0, "its request is in flight still"


def movable(batch: ProducerBatch) -> ProducerBatch:
    batch.is_movable = True
    return batch


def queued(bench: Bench, partition: TopicPartition) -> list[ProducerBatch]:
    with bench.accumulator.lock:
        return list(bench.accumulator.partition(partition).batches)


def move(bench: Bench, source: TopicPartition, *targets: TopicPartition) -> list[ProducerBatch]:
    with bench.accumulator.lock:
        queue = bench.accumulator.partition(source)
    return bench.accumulator.move_unwritten([queue], {"t": targets}).get(source, [])


def test_only_movable_batches_that_were_surely_not_written_move_and_they_keep_their_order() -> None:
    bench = Bench()
    in_doubt, keyed = movable(bench.closed(P[0])), bench.closed(P[0])
    in_doubt.possibly_written = True
    sequenced = movable(bench.closed(P[0]))
    sequenced.assign_sequence(ProducerSequence(7, 0, 0))
    one, two = movable(bench.closed(P[0])), movable(bench.batch(P[0]))
    before = bench.used()
    assert move(bench, P[0], P[1]) == [one, two]
    assert queued(bench, P[0]) == [in_doubt, keyed, sequenced]
    assert queued(bench, P[1]) == [one, two]
    assert {batch.topic_partition for batch in (one, two)} == {P[1]}
    assert one.ordinal < two.ordinal
    assert two.state is BatchState.CLOSED, "no row for its former partition follows"
    assert bench.used() == before
    for batch in (in_doubt, keyed, sequenced):
        with pytest.raises(IllegalTransitionError, match="cannot move"):
            batch.move_to_partition(partition_of(P[1]))


def test_movable_batches_go_after_queued_ones_of_the_shortest_queue() -> None:
    bench = Bench()
    waiting = [bench.closed(P[1]), bench.closed(P[1]), bench.batch(P[1])]
    moving = [movable(bench.closed(P[0])) for _ in range(5)]
    assert move(bench, P[0], P[1], P[2]) == moving
    assert queued(bench, P[2]) == moving[:3] + moving[4:]
    assert queued(bench, P[1]) == [*waiting, moving[3]]
    assert waiting[-1].state is BatchState.CLOSED, "rows after it would be before what moved"
    assert bench.accumulator.partition(P[0]) not in bench.accumulator.waiting


def test_a_move_costs_no_more_where_many_batches_stay() -> None:
    """A look at all that stay for each that moves would take a third of a second, under the lock."""
    bench = Bench(pool_bytes=16 << 20)
    staying = [bench.closed(P[0]) for _ in range(4000)]
    moving = [movable(bench.closed(P[0])) for _ in range(4000)]
    # A search for garbage would look at the objects of all tests before.
    gc.disable()
    try:
        started = time.thread_time()
        moved = move(bench, P[0], P[1])
        spent_s = time.thread_time() - started
    finally:
        gc.enable()
    assert moved == moving
    assert spent_s < 0.1
    assert queued(bench, P[0]) == staying


def test_a_held_batch_neither_moves_nor_is_closed() -> None:
    """Its task writes into it. The sender is woken when that ends, and looks again."""
    bench = Bench()
    moving, open_there = movable(bench.batch(P[0])), bench.batch(P[1])
    moving.held = True
    assert move(bench, P[0], P[1]) == []
    assert bench.accumulator.held_batch_skipped
    moving.held, open_there.held = False, True
    assert move(bench, P[0], P[1]) == []
    assert (moving.state, open_there.state) == (BatchState.OPEN, BatchState.OPEN)
    assert move(bench, P[0], P[1], P[2]) == [moving]
    assert queued(bench, P[2]) == [moving]


def test_only_a_large_batch_that_a_broker_took_raises_a_learnt_limit() -> None:
    bench = Bench(batch_size=1_000)
    large, small = bench.closed(P[0], size=800), bench.closed(P[1], size=100)
    bench.accumulator.on_too_large(large)
    limits = large.queue.limits
    for batch, now_ms in [(small, 0.0), (small, 1_000.0), (large, 2_000.0)]:
        bench.accumulator.on_taken([batch], now_ms)
        assert limits.learnt == 400
    bench.accumulator.on_taken([small, large], 3_000.0)
    assert limits.learnt == 800
