"""The state of one task, and the task's report for the live view."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from itertools import islice
from typing import Any

from kafka_sink.breaker.mutes import Mute
from kafka_sink.clock import LIMIT, MEMORY, Clock
from kafka_sink.cluster.broker import BrokerCounts
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
from kafka_sink.counts import NAMES, Number, TopicMetrics
from kafka_sink.dead_letters.rejected_rows import DeadLetters
from kafka_sink.model import Target, TopicPartition
from kafka_sink.options.values import TOPIC_MAX_LENGTH
from kafka_sink.task.rate_limit import RateLimit
from kafka_sink.task.worker_parts import WorkerParts

# If a broker has answered within this time, the rows that wait for it do not count as late.
_QUIET_MS = 1000.0
# The partitions with waiting rows, how many, and since when: for each partition and for each leader.
_WaitingRows = dict[Target, list[tuple[TopicPartition, int, float]]]


class ProducerTask:
    """The state of a task, created when the task begins.

    Any thread may read its counts and its report. Most counts belong to the parts of the worker.

    ``check`` is called repeatedly while the task waits with rows. It fails the task if other rows have
    failed, and writes dead letters, because the rows that brokers rejected may hold the memory for which the
    task waits. ``transaction_since_ms`` is when the task's transaction began; None without a transaction.
    """

    def __init__(
        self,
        parts: WorkerParts,
        dead_letters: DeadLetters | None,
        check: Callable[[], None],
        rate_limit: RateLimit | None,
        clock_ms: Clock,
    ) -> None:
        self.dead_letters, self.check = dead_letters, check
        self.rows = self.largest_record = 0
        # Counted separately from ``rows``: one thread rejects rows while it reads them, and the task's thread
        # sends other rows at the same time. A shared counter could lose an increment, and ``finish`` would
        # fail the task.
        self.rejected_rows = 0
        self.metadata_wait_ms = self.latest_metadata_wait_ms = 0.0
        self._parts = parts
        self._rate_limit = rate_limit
        self._clock_ms = clock_ms
        self.started_ms = clock_ms()
        self.transaction_since_ms: float | None = None
        # For each partition with waiting rows, the last leader that was known.
        self._led_by: dict[TopicPartition, int | None] = {}
        self.memory_before = parts.allocator.pool.metrics()
        self._before = self._of_all_tasks()

    def _of_all_tasks(self) -> dict[str, Number]:
        """Counts over the life of the producer, by their names in ``TaskCounts``."""
        return {
            "buffer_exhausted": self._parts.allocator.pool.metrics().buffer_exhausted_total,
            "metadata_requests": self._parts.cluster.requests,
            "metadata_avoided": self._parts.cluster.imports,
            "metadata_fetches": self._parts.cluster.fetches,
            "breaker_trips": self._parts.breaker.manager.task_mutes.own_trips,
            "breaker_probes": self._parts.breaker.manager.task_mutes.probes,
            "encode_ms": self._parts.appender.encode_ms,
            "pool_wait_ms": self._parts.appender.pool_wait_ms,
        }

    def read(self, identity: TaskIdentity, *, done: bool = False, failed: bool = False) -> TaskReport:
        now_ms = self._clock_ms()
        state, since_ms = self._parts.activity.current
        state_ms = max(0.0, now_ms - since_ms)
        began, counts = self.transaction_since_ms, self.counts()
        counted, muted = self._parts.sender.broker_metrics(now_ms), self._parts.breaker.muted(MAX_MUTES)
        is_quiet = any(now_ms - metrics.answered_ms > _QUIET_MS for metrics in counted.values())
        # Perhaps nothing could be sent yet to some brokers that rows wait for. In a healthy task this is not
        # needed, and it takes the accumulator's lock for a step of each batch.
        is_needed = is_quiet or bool(muted) or len(counted) < len(self._parts.cluster.nodes())
        waiting = self._waiting() if is_needed and not done else {}
        # The counts contain waits that have ended. A wait that is still going on must also appear.
        if state == MEMORY:
            counts["pool_wait_ms"] += state_ms
        elif state == LIMIT:
            counts["rate_wait_ms"] += state_ms
        return TaskReport(
            cluster_name(self._parts.accumulator.options),
            identity,
            elapsed_ms=max(0.0, now_ms - self.started_ms),
            state=state,
            state_ms=state_ms,
            counters=_rounded(counts),
            gauges={} if done else _rounded(self._gauges()),
            topics=dict(named_topics(self._parts.accumulator.deliveries.topics())),
            brokers=self._brokers(counted, waiting, now_ms, done=done),
            mutes=() if done else self._mutes(muted, waiting, now_ms),
            dead_letters=first_dead_letters(
                {} if self.dead_letters is None else self.dead_letters.by_topic()
            ),
            transaction_ms=None if began is None else max(0.0, now_ms - began),
            done=done,
            failed=failed,
        )

    def counts(self) -> dict[str, Any]:
        """All counts of the task, by their names in ``TaskCounts``."""
        counts, before, other_rack_bytes = self._parts.accumulator.deliveries.counts(), self._before, 0
        if self._parts.rack.name:
            sent = self._parts.sender.broker_metrics(self._clock_ms())
            other_rack_bytes = sum(
                broker.sent_bytes for node_id, broker in sent.items() if self._parts.rack.is_other(node_id)
            )
        return {
            **{name: getattr(counts, name) for name in NAMES},
            **{name: value - before[name] for name, value in self._of_all_tasks().items()},
            "skipped": 0 if self.dead_letters is None else self.dead_letters.rows,
            "other_rack_bytes": other_rack_bytes,
            "rate_wait_ms": 0.0 if self._rate_limit is None else self._rate_limit.waited_ms,
            "transactions_begun": int(self.transaction_since_ms is not None),
        }

    def _gauges(self) -> dict[str, Number]:
        pool = self._parts.allocator.pool.metrics()
        return {
            "buffer_total_bytes": pool.buffer_total_bytes,
            "buffer_used_bytes": pool.used_bytes,
            "buffer_allocated_bytes": pool.allocated_bytes,
            "buffer_heap_bytes": pool.heap_bytes,
            "waiting_threads": pool.waiting_threads,
        }

    def _brokers(
        self, counted: Mapping[int, BrokerCounts], waiting: _WaitingRows, now_ms: float, *, done: bool
    ) -> dict[int, BrokerReport]:
        addresses, options = self._parts.cluster.nodes(), self._parts.accumulator.options
        unsent = {node_id: BrokerCounts() for node_id in addresses if node_id in waiting}
        reports = {}
        for node_id, metrics in islice({**unsent, **counted}.items(), MAX_BROKERS):
            node, oldest_ms = addresses.get(node_id), metrics.oldest_ms
            if node_id in waiting and now_ms - metrics.answered_ms > _QUIET_MS:
                since_ms = min(rows[2] for rows in waiting[node_id])
                # Until the linger time has passed, rows only wait for other rows to fill their batch.
                oldest_ms = max(oldest_ms, now_ms - max(metrics.answered_ms, since_ms + options.linger_ms))
            reports[node_id] = BrokerReport(
                "" if node is None else cut(f"{node.host}:{node.port}"),
                metrics.requests,
                metrics.failures,
                0 if done else metrics.in_flight,
                round(metrics.latency_ms, 1),
                tuple(metrics.latency_buckets) if metrics.requests else (),
                round(metrics.throttle_ms, 1),
                0 if done else round(oldest_ms),
            )
        return reports

    def _waiting(self) -> _WaitingRows:
        waiting: _WaitingRows = {}
        before, self._led_by = self._led_by, {}
        for partition, (rows, since_ms) in self._parts.accumulator.waiting_rows().items():
            info = self._parts.cluster.leader(partition)
            # Without a leader, the rows count as waiting for the partition's last leader.
            leader = before.get(partition) if info is None else info.leader
            self._led_by[partition] = leader
            for target in (partition, leader):
                if target is not None:
                    waiting.setdefault(target, []).append((partition, rows, since_ms))
        return waiting

    def _mutes(
        self, muted: Iterable[tuple[Mute, float]], waiting: _WaitingRows, now_ms: float
    ) -> tuple[MuteReport, ...]:
        timeout_ms, made = self._parts.accumulator.options.delivery_timeout_ms, []
        for mute, age_ms in muted:
            unsent = waiting.get(mute.target, [])
            oldest_ms = min((since_ms for _, _, since_ms in unsent), default=now_ms)
            made.append(
                MuteReport(
                    cut(str(mute.target)),
                    cut(mute.reason),
                    round(age_ms),
                    sum(rows for _, rows, _ in unsent),
                    max(0.0, oldest_ms + timeout_ms - now_ms) if unsent else None,
                    tuple(cut(str(partition)) for partition, _, _ in unsent[:MAX_PARTITIONS]),
                )
            )
        return tuple(made)


def _rounded(values: Mapping[str, Number]) -> dict[str, Number]:
    # Zeros are left out, because most counters of a healthy task are zero.
    return {name: round(value, 1) for name, value in values.items() if value}


def first_dead_letters(rows: Mapping[tuple[str, str], int]) -> tuple[DeadLetterCount, ...]:
    """The first dead letter counts, and the sum of all further ones without topic and reason."""
    entries = [
        DeadLetterCount(cut(topic, TOPIC_MAX_LENGTH), cut(reason), number)
        for (topic, reason), number in islice(rows.items(), MAX_DEAD_LETTERS - 1)
    ]
    other_rows = sum(rows.values()) - sum(entry.rows for entry in entries)
    return (*entries, DeadLetterCount("", "", other_rows)) if other_rows else tuple(entries)


def named_topics(counts: Mapping[str, TopicMetrics]) -> dict[str, TopicMetrics]:
    """The counts of the first topics, and the sum of all further ones under ""."""
    topics = dict(islice(counts.items(), MAX_TOPICS - 1))
    other_topics = reduce(TopicMetrics.plus, islice(counts.values(), MAX_TOPICS - 1, None), TopicMetrics())
    return {**topics, "": other_topics} if other_topics.batches else topics
