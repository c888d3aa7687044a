"""What a task reports to the live view, read from the parts of its producer. Any thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from itertools import islice
from typing import TYPE_CHECKING

from kafka_sink.clock import LIMIT, MEMORY, Clock
from kafka_sink.coordinator.live.messages import (
    MAX_BROKERS,
    MAX_DEAD_LETTERS,
    MAX_MUTES,
    MAX_PARTITIONS,
    MAX_TOPICS,
    BrokerReport,
    DeadLetterCount,
    MuteReport,
    TaskIdentity,
    TaskReport,
    cluster_name,
)
from kafka_sink.coordinator.schema import cut
from kafka_sink.counts import NAMES, BrokerMetrics, Number, TaskCounts, TopicMetrics
from kafka_sink.engine.deliveries import Deliveries, Metrics, RowMetrics, task_metrics
from kafka_sink.options.values import TOPIC_MAX_LENGTH

if TYPE_CHECKING:
    from kafka_sink.breaker.breaker import Breaker
    from kafka_sink.breaker.mutes import Target
    from kafka_sink.clock import TaskActivity
    from kafka_sink.cluster.metadata import ClientRack, ClusterMetadata
    from kafka_sink.engine.accumulator import RecordAccumulator
    from kafka_sink.engine.appender import RecordAppender
    from kafka_sink.engine.sender import Sender
    from kafka_sink.memory.allocator import BufferAllocator
    from kafka_sink.memory.pool import PoolMetrics
    from kafka_sink.model import TopicPartition


# What the sender counts itself.
_OF_DELIVERIES = tuple(one.name for one in fields(Deliveries) if one.name in NAMES)


# A broker that has answered later than this needs no look at the rows that wait for it.
_QUIET_MS = 1000.0


@dataclass(slots=True)
class TaskReporter:
    """The parts of a producer that count. ``begin`` sets what its counts start from.

    ``transaction_since_ms`` is when the task's transaction was begun; None without one.
    """

    sender: Sender
    allocator: BufferAllocator
    accumulator: RecordAccumulator
    appender: RecordAppender
    cluster: ClusterMetadata
    breaker: Breaker
    activity: TaskActivity
    clock_ms: Clock
    # Returns the rows that can never be written, by topic and reason.
    dead_letters: Callable[[], Mapping[tuple[str, str], int]]
    # Returns for how long the rate limit held the task up.
    rate_wait_ms: Callable[[], float]
    rack: ClientRack
    started_ms: float = 0.0
    transaction_since_ms: float | None = None
    # The last leaders of partitions with rows that wait.
    _led_by: dict[TopicPartition, int | None] = field(default_factory=dict)
    # Of all tasks before the present one.
    _before: Mapping[str, int] = field(default_factory=dict)
    _memory_before: PoolMetrics = field(init=False)

    def __post_init__(self) -> None:
        self._memory_before = self.allocator.pool.metrics()

    def begin(self) -> None:
        self.started_ms = self.clock_ms()
        self.transaction_since_ms = None
        self._memory_before = self.allocator.pool.metrics()
        self._before = self._of_all_tasks()

    def _of_all_tasks(self) -> dict[str, int]:
        """Counts over the producer's life, by their names in ``TaskCounts``."""
        return {
            "buffer_exhausted": self.allocator.pool.metrics().buffer_exhausted_total,
            "metadata_requests": self.cluster.requests,
            "metadata_avoided": self.cluster.imports,
            "metadata_fetches": self.cluster.fetches,
            "breaker_trips": self.breaker.manager.local.own_trips,
            "breaker_probes": self.breaker.manager.local.probes,
        }

    def metrics(self, rows: RowMetrics) -> Metrics:
        """Under the names of Kafka's producer."""
        counts = self.sender.deliveries.counts()
        return task_metrics(self.allocator.pool.metrics(), self._memory_before, counts, self.counts(), rows)

    def read(self, identity: TaskIdentity, *, done: bool = False, failed: bool = False) -> TaskReport:
        """The report of the present task."""
        now_ms = self.clock_ms()
        state, since_ms = self.activity.current
        began = self.transaction_since_ms
        return TaskReport(
            cluster_name(self.accumulator.options),
            identity,
            elapsed_ms=max(0.0, now_ms - self.started_ms),
            state=state,
            state_ms=max(0.0, now_ms - since_ms),
            counters=_rounded(self._counts_so_far(state, max(0.0, now_ms - since_ms)).by_name()),
            gauges={} if done else _rounded(self._gauges()),
            topics=dict(named_topics(self.sender.deliveries.topics())),
            brokers=self._brokers(now_ms, done=done),
            mutes=() if done else self._mutes(self.breaker, now_ms),
            dead_letters=first_dead_letters(self.dead_letters()),
            transaction_ms=None if began is None else max(0.0, now_ms - began),
            done=done,
            failed=failed,
        )

    def _counts_so_far(self, state: str, state_ms: float) -> TaskCounts:
        # Waits count when they end. The one that goes on must show, too.
        counts = self.counts()
        return replace(
            counts,
            pool_wait_ms=counts.pool_wait_ms + (state_ms if state == MEMORY else 0.0),
            rate_wait_ms=counts.rate_wait_ms + (state_ms if state == LIMIT else 0.0),
        )

    def counts(self) -> TaskCounts:
        counts, before = self.sender.deliveries.counts(), self._before
        return TaskCounts(
            **{name: getattr(counts, name) for name in _OF_DELIVERIES},
            **{name: value - before.get(name, 0) for name, value in self._of_all_tasks().items()},
            skipped=sum(self.dead_letters().values()),
            other_rack_bytes=self._other_rack_bytes(),
            encode_ms=self.appender.encode_ms,
            pool_wait_ms=self.appender.pool_wait_ms,
            rate_wait_ms=self.rate_wait_ms(),
            transactions_begun=int(self.transaction_since_ms is not None),
        )

    def _other_rack_bytes(self) -> int:
        if not self.rack.name:
            return 0
        sent = self.sender.broker_metrics(self.clock_ms())
        return sum(node.sent_bytes for node_id, node in sent.items() if self.rack.is_other(node_id))

    def _gauges(self) -> dict[str, Number]:
        pool = self.allocator.pool.metrics()
        held = pool.used_bytes + pool.heap_bytes
        return {
            "buffer_total_bytes": pool.buffer_total_bytes,
            "buffer_used_bytes": pool.used_bytes,
            "buffer_allocated_bytes": pool.allocated_bytes,
            "buffer_heap_bytes": pool.heap_bytes,
            # Under the strategy `full` itself, what it holds.
            "buffer_full_strategy_bytes": max(held, pool.full_strategy_bytes),
            "waiting_threads": pool.waiting_threads,
        }

    def _brokers(self, now_ms: float, *, done: bool) -> dict[int, BrokerReport]:
        addresses, options = self.cluster.nodes(), self.accumulator.options
        counted = self.sender.broker_metrics(now_ms)
        is_quiet = any(now_ms - one.answered_ms > _QUIET_MS for one in counted.values())
        # Nothing could be sent to some, perhaps.
        waiting = self._waiting() if not done and (is_quiet or len(counted) < len(addresses)) else {}
        counted = {**{node_id: BrokerMetrics() for node_id in addresses if node_id in waiting}, **counted}
        found = {}
        for node_id, one in islice(counted.items(), MAX_BROKERS):
            node, oldest_ms, left_ms = addresses.get(node_id), one.oldest_ms, None
            if node_id in waiting and now_ms - one.answered_ms > _QUIET_MS:
                since_ms = min(held[2] for held in waiting[node_id])
                # Rows also wait for others to fill their batch.
                oldest_ms = max(oldest_ms, now_ms - max(one.answered_ms, since_ms + options.linger_ms))
                left_ms = max(0.0, since_ms + options.delivery_timeout_ms - now_ms)
            found[node_id] = BrokerReport(
                "" if node is None else cut(f"{node.host}:{node.port}"),
                one.requests,
                one.failures,
                0 if done else one.in_flight,
                round(one.latency_ms, 1),
                round(one.max_latency_ms, 1),
                one.latency_buckets,
                round(one.throttle_ms, 1),
                0 if done else round(oldest_ms),
                left_ms,
            )
        return found

    def _waiting(self) -> dict[Target, list[tuple[TopicPartition, int, float]]]:
        """The partitions with rows that wait, how many, and since when, by partition and by leader."""
        waiting: dict[Target, list[tuple[TopicPartition, int, float]]] = {}
        before, self._led_by = self._led_by, {}
        for partition, (rows, since_ms) in self.accumulator.waiting_rows().items():
            info = self.cluster.leader(partition)
            # Without a leader they wait for the one that it had.
            leader = before.get(partition) if info is None else info.leader
            self._led_by[partition] = leader
            for target in (partition, leader):
                if target is not None:
                    waiting.setdefault(target, []).append((partition, rows, since_ms))
        return waiting

    def _mutes(self, breaker: Breaker, now_ms: float) -> tuple[MuteReport, ...]:
        muted = breaker.muted_targets(MAX_MUTES)
        if not muted:
            return ()
        waiting = self._waiting()
        timeout_ms, made = self.accumulator.options.delivery_timeout_ms, []
        for target, reason, age_ms in muted:
            held = waiting.get(target, [])
            made.append(
                MuteReport(
                    cut(str(target)),
                    cut(reason),
                    round(age_ms),
                    sum(rows for _, rows, _ in held),
                    max(0.0, min(one[2] for one in held) + timeout_ms - now_ms) if held else None,
                    len(held),
                    tuple(cut(str(partition)) for partition, _, _ in held[:MAX_PARTITIONS]),
                    breaker.manager.local.is_shared(target),
                )
            )
        return tuple(made)


def _rounded(values: Mapping[str, Number]) -> dict[str, Number]:
    # Zeros are left out: most counters of a healthy task are zero.
    return {name: round(value, 1) for name, value in values.items() if value}


def first_dead_letters(rows: Mapping[tuple[str, str], int]) -> tuple[DeadLetterCount, ...]:
    """The first of them, and the sum of all others under no topic and no reason."""
    found = [
        DeadLetterCount(cut(topic, TOPIC_MAX_LENGTH), cut(reason), number)
        for (topic, reason), number in islice(rows.items(), MAX_DEAD_LETTERS - 1)
    ]
    others = sum(rows.values()) - sum(one.rows for one in found)
    return (*found, DeadLetterCount("", "", others)) if others else tuple(found)


def named_topics(counts: Mapping[str, TopicMetrics]) -> dict[str, TopicMetrics]:
    """The first topics by name, and the sum of all others under ""."""
    found = dict(islice(counts.items(), MAX_TOPICS - 1))
    others = reduce(TopicMetrics.plus, islice(counts.values(), MAX_TOPICS - 1, None), TopicMetrics())
    return {**found, "": others} if others.batches else found
