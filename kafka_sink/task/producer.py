"""Connects the parts of a task: rows, accumulator, sender, network, breaker and coordinator."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable
from functools import partial
from weakref import WeakValueDictionary

import pyarrow as pa

from kafka_sink.clock import BROKER, COORDINATOR_WAIT_MS, METADATA, RANDOM, monotonic_ms, wall_ms
from kafka_sink.cluster.topic_state import MetadataSnapshot
from kafka_sink.coordinator.address import CoordinatorAddress
from kafka_sink.coordinator.breaker import BreakerChannel
from kafka_sink.coordinator.client import CoordinatorClient
from kafka_sink.coordinator.live.messages import ReportChannel, TaskIdentity, TaskReport
from kafka_sink.coordinator.metadata import MetadataChannel
from kafka_sink.coordinator.rates import RateChannel
from kafka_sink.coordinator.schema import Channel, Hello
from kafka_sink.coordinator.writes import WriteChannel
from kafka_sink.dead_letters.dead_letter_writer import DeadLetterWriter
from kafka_sink.dead_letters.rejected_rows import DeadLetters, RejectedRows
from kafka_sink.dead_letters.row_rejection import RowRejection
from kafka_sink.engine.deliveries import Metrics, task_metrics
from kafka_sink.errors import DeliveryError
from kafka_sink.model import TaskResult
from kafka_sink.options import SinkOptions
from kafka_sink.options.environment import has_variables
from kafka_sink.records import batch_header
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.rows.columns import RowBatch, extract
from kafka_sink.rows.ordering import partitions_needed, record_too_large
from kafka_sink.rows.partitioner import Partitioner
from kafka_sink.task.rate_limit import RateLimit, limits_of
from kafka_sink.task.report import ProducerTask
from kafka_sink.task.worker_parts import WorkerParts

_log = logging.getLogger(__name__)
# How long a failed task waits until it has sent its last messages to the coordinator.
_LAST_WORDS_S = 2.0
# How often a task that waits for responses checks that its sender thread is alive.
_WATCH_MS = 1000.0


# The limit for one dead letter. It is below 1,048,588, the default max.message.bytes of topics.
_MAX_DEAD_LETTER_BYTES = 1_000_000
# The identity of work that is not a Spark task.
NO_TASK = TaskIdentity("", 0, -1)
# The producers of this process that are not closed, by their id().
LIVE_PRODUCERS: WeakValueDictionary[int, Producer] = WeakValueDictionary()
# Cleared in a forked child, where the producers' threads do not exist.
os.register_at_fork(after_in_child=LIVE_PRODUCERS.clear)


def live_metrics() -> list[Metrics]:
    # Copy the references in one step, because other threads may add and remove producers at the same time.
    living = [reference() for reference in LIVE_PRODUCERS.valuerefs()]
    return [producer.metrics() for producer in living if producer is not None]


class Producer:
    """Appends the rows of one task at a time, and waits until they are acknowledged or have failed.

    The parts synchronise their own threads, so any thread that has the producer may read their counts and
    states.
    """

    def __init__(self, options: SinkOptions, watch_ms: float = _WATCH_MS) -> None:
        self.options = options
        self.watch_ms = watch_ms
        parts = self._parts = WorkerParts(options)
        self.network, self.cluster, self.breaker = parts.network, parts.cluster, parts.breaker
        self.accumulator, self.sender, self.activity = parts.accumulator, parts.sender, parts.activity
        self._rejection: RowRejection | None = None
        if options.errors_tolerance != "none":
            self._rejection = RowRejection(
                self.cluster, monotonic_ms, options.max_block_ms, options.metadata_max_age_ms
            )
        self._partitioner = Partitioner(
            capacity=parts.appender.batch_capacity,
            loads=self.accumulator.queued_batches,
            ignore_keys=options.partitioner_ignore_keys,
            adaptive=options.partitioner_adaptive_partitioning_enable,
            random=RANDOM.random,
            spread_keys=options.partitioner_spread_keys_when_muted,
        )
        limits = limits_of(options)
        self._rate_limit = RateLimit(limits, self.activity, monotonic_ms) if limits else None
        self._rates: RateChannel | None = None
        self._coordinator: CoordinatorClient | None = None
        self._shared_breaker: BreakerChannel | None = None
        self._reports: ReportChannel | None = None
        self._writes = WriteChannel(self.abort)
        # The plan for rows that are passed to ``send`` without their own plan.
        self.plan: ColumnPlan | None = None
        self._task = self._new_task(NO_TASK)
        self.sender.start()
        LIVE_PRODUCERS[id(self)] = self

    def _new_task(self, task: TaskIdentity) -> ProducerTask:
        options, dead_letters, check = self.options, None, self.check
        if options.errors_tolerance != "none":
            topic, max_rows = options.errors_deadletterqueue_topic_name, options.errors_max
            # A dead letter must fit where its row did not, and a topic with the default max.message.bytes.
            max_bytes = min(_MAX_DEAD_LETTER_BYTES, options.max_request_size // 2, options.buffer_memory // 2)
            dead_letters = DeadLetters(topic, max_rows, max_bytes, str(task.partition))
            writer = DeadLetterWriter(dead_letters, self._order, self._append_dead_letters)

            def check_and_write() -> None:
                self.check()
                writer.write()

            check = check_and_write
        self.sender.begin(dead_letters)
        return ProducerTask(self._parts, dead_letters, check, self._rate_limit, monotonic_ms)

    def begin(
        self,
        coordinator: CoordinatorAddress | None = None,
        snapshot: MetadataSnapshot | None = None,
        task: TaskIdentity = NO_TASK,
        tasks_at_once: int = 1,
    ) -> None:
        """Start a new task. Its counts start at zero.

        ``snapshot`` is metadata that the driver sent with the task, with its age. ``tasks_at_once`` is how
        many tasks may run at the same time. Without a coordinator, they share the job's rate limit.
        """
        # With variables the client's id differs from the driver's, and some brokers name leaders by it.
        if snapshot is not None and not has_variables(self.options.client_id):
            self.cluster.import_snapshot(snapshot, monotonic_ms())
        self._use_coordinator(coordinator)
        if self._rate_limit is not None:
            # All micro-batches of a query share one limit.
            self._rate_limit.begin(task.query or task.write, tasks_at_once, self._rates)
        parts = self._parts
        if parts.transactional_identity is not None:
            parts.transactional_identity.leave()
        if parts.telemetry is not None:
            parts.telemetry.idle_since_ms = math.inf
        parts.allocator.begin()
        parts.dead_letter_memory.begin()
        parts.accumulator.begin()
        self._task = self._new_task(task)
        self._writes.begin(task.write or None)
        if self._reports is not None and task.write:
            self._reports.begin(task)

    def begin_transaction(
        self, transactional_id: str, producer_id: int, epoch: int, adds_partitions: bool = False
    ) -> None:
        """Write all following rows in this transaction. May only be called before a task's first row.

        ``adds_partitions`` is True with transaction protocol 1. Raises ValueError for a producer without
        delivery.guarantee=exactly-once.
        """
        identity = self._parts.transactional_identity
        if identity is None:
            raise ValueError("this producer writes without transactions")
        identity.adopt(transactional_id, producer_id, epoch, adds_partitions=adds_partitions)
        self._task.transaction_since_ms = monotonic_ms()

    def _use_coordinator(self, address: CoordinatorAddress | None) -> None:
        """Use the coordinator at this address from now on, or none."""
        if self._coordinator is not None and self._coordinator.address != address:
            self._coordinator.close()
            self._coordinator = self._reports = self._rates = None
            self.cluster.coordinator = None
            self.cluster.share_refreshes(False)
            self.breaker.share(None)
        if address is None:
            return
        if self._coordinator is None:
            self._coordinator = self._join_coordinator(address)
        elif self._coordinator.is_connecting:
            for channel in (self._shared_breaker, self._rates):
                if channel is not None:
                    channel.expect()
        if not self._coordinator.is_lost:
            self.breaker.begin()
        self._coordinator.resume()

    def _join_coordinator(self, address: CoordinatorAddress) -> CoordinatorClient:
        metadata = MetadataChannel(self.cluster, monotonic_ms, self.options.metadata_max_idle_ms)
        self._writes = WriteChannel(self.abort)
        channels: list[Channel] = [metadata, self._writes]
        if not self.breaker.is_off:
            self._shared_breaker = BreakerChannel(
                self.breaker.manager, self._call_breaker, lambda: self.cluster.cluster_id
            )
            self.breaker.share(self._shared_breaker)
            channels.append(self._shared_breaker)
        if address.has_view:
            self._reports = ReportChannel(self.report, monotonic_ms)
            channels.append(self._reports)
        if self._rate_limit is not None:
            self._rates = RateChannel()
            channels.append(self._rates)
        settings = self.options.group_settings()
        group, client_id = address.group, self.network.client_id
        if client_id:
            # Some brokers name other leaders to the clients of each zone, and take the zone from this id.
            group += f"-{hashlib.sha256(client_id.encode()).hexdigest()[:16]}"
        coordinator = CoordinatorClient(
            address, channels, lambda: Hello(group, self.cluster.cluster_id or "", settings), monotonic_ms
        )
        self.cluster.coordinator = metadata
        coordinator.start()
        return coordinator

    def _call_breaker(self) -> None:
        """Let the sender apply the coordinator's messages now. Any thread may call it."""
        self.breaker.call()
        self.network.wakeup()

    def send(self, batch: pa.RecordBatch | pa.Table, *, plan: ColumnPlan | None = None) -> int:
        """Append rows, and return the number of partitions to which they go.

        ``plan`` describes their columns; the default is ``self.plan``.

        Raises InvalidRowError (after max.block.ms for a partition that does not exist) or RecordTooLargeError
        for rows that cannot be sent, MetadataTimeoutError or BufferExhaustedError after max.block.ms, and
        DeliveryError once earlier rows have failed. With errors.tolerance=all, rows that cannot be sent
        become dead letters, and TooManyDeadLettersError is raised if there are more than errors.max.
        """
        plan = plan or self.plan
        if plan is None:
            raise ValueError("rows need a plan of their columns")
        task, limit, partitions = self._task, self._rate_limit, 0
        self.check()
        for rows in (batch,) if limit is None else limit.slices(batch, self.check):
            if rows.num_rows == 0:
                continue
            ordered: OrderedRows | None
            if self._rejection is None or task.dead_letters is None:
                ordered = self._order(plan, rows)
                task.rows += rows.num_rows
            else:
                task.rows += rows.num_rows
                ordered = self._rejection.order(plan, rows, self._order, task.dead_letters)
            # The wait of the rows that are left. As in Kafka's producer, earlier waits of rejected rows do
            # not count.
            waited_ms = task.latest_metadata_wait_ms
            task.check()
            if ordered is not None:
                task.largest_record = max(task.largest_record, ordered.largest_bound)
                self._parts.appender.append(ordered, task.check, waited_ms)
                partitions = max(partitions, len(ordered.partitions))
        return partitions

    def reject(self, rows: RejectedRows) -> None:
        """Reject rows that could not be encoded. Raises TooManyDeadLettersError."""
        task = self._task
        assert task.dead_letters is not None
        task.rejected_rows += rows.count
        task.dead_letters.add(rows)

    @property
    def dead_letters(self) -> DeadLetters | None:
        """The dead letters of the current task; None if a row that cannot be written fails the task."""
        return self._task.dead_letters

    def write_dead_letters(self) -> bool:
        """Append the waiting dead letters, while the task waits for rows. Raises the errors of ``send``.

        Returns whether there may be more dead letters, because not all rows so far are acknowledged.
        """
        dead_letters = self._task.dead_letters
        if dead_letters is None or dead_letters.topic is None:
            return False
        self._task.check()
        # Read in this order: a row becomes a dead letter before its batch is complete, so none is missed.
        return self.accumulator.incomplete > 0 or dead_letters.is_waiting

    def _append_dead_letters(self, ordered: OrderedRows) -> None:
        """Append dead letters in batches that are sent at once: their memory is needed for the next ones."""
        appender, partitions = self._parts.dead_letter_appender, set(ordered.partitions)
        appender.flush(partitions)
        appender.append(ordered, self.check)
        appender.flush(partitions)

    def _order(self, plan: ColumnPlan, batch: pa.RecordBatch | pa.Table) -> OrderedRows:
        """Order the rows by partition. Waits for metadata, and until the coordinator's mutes are known."""
        now_ms = int(wall_ms())
        rows = extract(plan, batch, now_ms)
        options, breaker, task = self.options, self.breaker, self._task
        started_ms = monotonic_ms()
        try:
            with self.activity.waiting(METADATA, partial(self._describe_lookup, rows)):
                if self._rejection is not None:
                    topics = self._rejection.await_topics(rows, self.check)
                else:
                    topics = self.cluster.await_topics(
                        rows.topics, options.max_block_ms, self.check, partitions_needed(rows)
                    )
        finally:
            task.latest_metadata_wait_ms = monotonic_ms() - started_ms
            task.metadata_wait_ms += task.latest_metadata_wait_ms
        if not breaker.is_current.is_set():
            breaker.await_mutes(task.started_ms + COORDINATOR_WAIT_MS - monotonic_ms(), self.check)
        muted = breaker.avoided
        if (muted or muted.probes) and self._partitioner.chooses(rows.key, rows.partition)[0]:
            breaker.task_mutes.on_movable_rows(rows.topics)
        unavailable = self.sender.unavailable | breaker.manager.congested
        near = self._parts.rack.brokers() if options.partitioner_rack_aware else ()
        ordered = self._partitioner.order(rows, topics, now_ms, unavailable, muted, near, muted.probes)
        limit, option = options.max_request_size, "kafka.max.request.size"
        if options.buffer_memory < limit:
            limit, option = options.buffer_memory, "kafka.buffer.memory"
        if ordered.largest_bound + batch_header.SIZE > limit:
            raise record_too_large(rows, ordered, limit, option)
        return ordered

    def _describe_lookup(self, rows: RowBatch) -> str:
        lack = self.cluster.describe_lack(rows.topics, partitions_needed(rows))
        return f"{lack}, and fails after kafka.max.block.ms = {self.options.max_block_ms} ms"

    def _describe_unacknowledged(self) -> str:
        return (
            f"acknowledgements (batches without one: {self.accumulator.incomplete}; brokers: "
            f"{self.network.describe_brokers()}), and fails after kafka.delivery.timeout.ms = "
            f"{self.options.delivery_timeout_ms} ms"
        )

    def finish(self, meanwhile: Callable[[], object] | None = None) -> TaskResult:
        """Send the remaining rows and wait until every row is acknowledged.

        ``meanwhile`` is called when they are on their way. The wait ends, because delivery.timeout.ms limits
        every batch. Raises DeliveryError with the first cause and the counts, and the errors of
        ``meanwhile``.
        """
        started = monotonic_ms()
        if meanwhile is not None:
            self._parts.appender.flush()
            meanwhile()
        self.flush()
        task = self._task
        counts = task.counts()
        rows, accounted = task.rows + task.rejected_rows, counts["records"] + counts["unconfirmed"]
        if accounted + counts["skipped"] != rows:
            # A check against silent loss of rows. No known path leads here.
            raise DeliveryError(f"of {rows} rows {accounted + counts['skipped']} are accounted for")
        now = monotonic_ms()
        if self._reports is not None:
            self._send_last_report(self._reports)
        return TaskResult(
            **counts,
            partitions=self.accumulator.deliveries.partitions(),
            elapsed_ms=now - task.started_ms,
            flush_ms=now - started,
            metrics=self.metrics(),
            skip_reasons={} if task.dead_letters is None else task.dead_letters.reasons(),
        )

    def flush(self) -> None:
        """Like ``finish``, but the task can go on afterwards."""
        deliveries, dead_letters = self.accumulator.deliveries, self._task.dead_letters
        self._parts.appender.flush()
        is_complete = False
        with self.activity.waiting(BROKER, self._describe_unacknowledged):
            while not is_complete:
                self.accumulator.await_change(
                    self.watch_ms / 1000,
                    lambda: (
                        not self.accumulator.incomplete
                        or deliveries.has_failed
                        or (dead_letters is not None and dead_letters.is_waiting)
                    ),
                )
                # Meanwhile brokers may reject rows, and dead letters that are too large. The order matters: a
                # row becomes a dead letter before its batch is complete, and then the check raises if
                # something has failed.
                is_complete = not self.accumulator.incomplete
                is_complete &= dead_letters is None or not dead_letters.is_waiting
                self._task.check()
        self.accumulator.flushing = False

    @property
    def rows(self) -> int:
        return self._task.rows + self._task.rejected_rows

    @property
    def acknowledged(self) -> int:
        """The rows of this task that brokers have acknowledged; with acks=0 the rows that were sent."""
        return self.accumulator.deliveries.counts().written

    def check(self) -> None:
        """Raise DeliveryError if rows of this task have failed. A waiting task calls it repeatedly."""
        # Read this first: a thread that ends has recorded its reason before.
        ended = not self.sender.is_alive()
        if self.accumulator.deliveries.has_failed:
            self.accumulator.deliveries.raise_failure(
                self.rows, self.accumulator.unacknowledged_records(), self._skipped
            )
        if ended:
            raise DeliveryError("the sender thread has ended")
        if awaited := self.activity.long_wait():
            _log.warning("waits for %s", awaited)

    def abort(self, cause: Exception, unsent: int = 0) -> None:
        """Stop sending at once and drop everything that was not sent. Any thread may call it.

        The task fails with this cause, even if it is waiting. The producer cannot be used for another task.
        ``unsent`` is how many rows the task has received and not appended yet.
        """
        unacknowledged = self.accumulator.unacknowledged_records()
        self.sender.abort(cause)
        written = self.accumulator.deliveries.counts().written
        skipped, rows = self._skipped, self.rows + unsent
        _log.warning(
            "%s. Sending has stopped: of %d rows %d are acknowledged, %d were sent and have no response, "
            "%d are skipped, and %d are dropped",
            cause,
            rows,
            written,
            unacknowledged,
            skipped,
            max(0, rows - written - unacknowledged - skipped),
        )
        self.accumulator.wake_waiters()

    @property
    def _skipped(self) -> int:
        return 0 if self._task.dead_letters is None else self._task.dead_letters.rows

    def _send_last_report(self, channel: ReportChannel, *, failed: bool = False) -> None:
        if channel.identity is not None:
            channel.end(self._task.read(channel.identity, done=True, failed=failed))

    def report(self, identity: TaskIdentity) -> TaskReport:
        """The report of the current task. Any thread may call it."""
        return self._task.read(identity)

    def metrics(self) -> Metrics:
        """Metrics of the current task, or of the last one, under Kafka's names (docs/metrics.md)."""
        task, counts = self._task, self._task.counts()
        pool, deliveries = self._parts.allocator.pool.metrics(), self.accumulator.deliveries.counts()
        return {
            **task_metrics(pool, task.memory_before, deliveries),
            "record-size-max": task.largest_record,
            # The age of the brokers' last list of brokers; 0 before the first list.
            "metadata-age": self.cluster.age_ms(monotonic_ms()) / 1000,
            "metadata-wait-time-ns-total": int(task.metadata_wait_ms * 1e6),
            "muted-partitions": self.breaker.task_mutes.muted_count,
            "breaker-trips-total": counts["breaker_trips"],
            "breaker-probes-total": counts["breaker_probes"],
        }

    @property
    def is_reusable(self) -> bool:
        """Whether another task may use it: the last one has left nothing unresolved, and the sender lives."""
        return self.sender.is_reusable

    def go_idle(self) -> None:
        """Keep connections and metadata until the next task, and return free memory to the system."""
        self._writes.end()
        self._parts.rest()
        if self._parts.telemetry is not None:
            self._parts.telemetry.idle_since_ms = monotonic_ms()
        if self._coordinator is not None:
            self._coordinator.pause()

    def close(self, *, abort: bool = False) -> None:
        """End the sender and its connections and return all memory, without waiting for responses.

        Called by the task's thread, or between tasks. ``abort`` is for a failed task: Spark runs it again, so
        bytes that the kernel has not sent yet are dropped.
        """
        LIVE_PRODUCERS.pop(id(self), None)
        self._writes.end()
        if self._reports is not None:
            self._send_last_report(self._reports, failed=True)
        if self._coordinator is not None:
            self._coordinator.close()
        self._parts.close(abort=abort)
        if abort and self._coordinator is not None:
            # Spark ends the process of a failed task next, so the last messages must be sent before.
            self._coordinator.join(_LAST_WORDS_S)
