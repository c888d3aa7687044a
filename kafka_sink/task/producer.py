"""A task's parts, wired together: rows, accumulator, sender, network, breaker and coordinator."""

from __future__ import annotations

import logging
import math
import os

import pyarrow as pa

from kafka_sink.breaker.breaker import Breaker, CircuitBreakManager
from kafka_sink.breaker.interface import load_breaker
from kafka_sink.clock import (
    BROKER,
    HINT_WAIT_MS,
    METADATA,
    RANDOM,
    ExponentialBackoff,
    TaskActivity,
    monotonic_ms,
    wall_ms,
)
from kafka_sink.cluster.metadata import ClientRack, ClusterMetadata
from kafka_sink.cluster.topic_state import MetadataSnapshot
from kafka_sink.coordinator.address import CoordinatorAddress
from kafka_sink.coordinator.breaker import BreakerChannel
from kafka_sink.coordinator.client import CoordinatorClient
from kafka_sink.coordinator.live.messages import ReportChannel, TaskIdentity
from kafka_sink.coordinator.metadata import MetadataChannel
from kafka_sink.coordinator.rates import RateChannel
from kafka_sink.coordinator.schema import Channel, Hello
from kafka_sink.coordinator.writes import WriteChannel
from kafka_sink.dead_letters.dead_letter_writer import DeadLetterWriter
from kafka_sink.dead_letters.rejected_rows import DeadLetters, RejectedRows
from kafka_sink.dead_letters.row_rejection import RowRejection
from kafka_sink.engine.accumulator import RecordAccumulator
from kafka_sink.engine.appender import MutedMemoryLimit, RecordAppender
from kafka_sink.engine.deliveries import LiveProducers, Metrics, RowMetrics
from kafka_sink.engine.identity import ProducerIdentity, TransactionalIdentity
from kafka_sink.engine.sender import Sender
from kafka_sink.engine.telemetry import ClientTelemetry
from kafka_sink.errors import DeliveryError, RecordTooLargeError
from kafka_sink.memory.allocator import BufferAllocator, WorkerPools, chunk_size
from kafka_sink.memory.pool import BufferPool
from kafka_sink.model import SparkTask, TaskResult, TopicMetadata
from kafka_sink.network.client import NetworkClient
from kafka_sink.options import SinkOptions
from kafka_sink.records import batch_header
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.rows.columns import RowBatch, extract
from kafka_sink.rows.ordering import partitions_needed, rows_larger_than
from kafka_sink.rows.partitioner import Partitioner
from kafka_sink.security.settings import SecuritySettings
from kafka_sink.task.rate_limit import RateLimit, limits_of
from kafka_sink.task.report import TaskReporter

_log = logging.getLogger(__name__)
_CLOSE_TIMEOUT_MS = 5000.0
# How often a task that waits for responses checks that its sender is alive.
_WATCH_MS = 1000.0


# Of a dead letter. Below the default max.message.bytes of topics, 1,048,588.
_MAX_DEAD_LETTER_BYTES = 1_000_000
_DEAD_LETTER_MEMORY_BYTES = 8 << 20

_NO_TASK = SparkTask()
POOLS = WorkerPools(monotonic_ms)
LIVE_PRODUCERS = LiveProducers()


class Producer:
    """Accumulator, sender and network of one option set. One task uses it at a time.

    Its parts look after their own threads: whoever has the producer may read their counts and states.
    """

    def __init__(self, options: SinkOptions) -> None:
        self.options = options
        self._rows = 0
        # Apart, as the thread that reads a task's rows rejects some while the task's thread sends others.
        self._rejected_rows = 0
        self._largest_record = 0
        self._metadata_wait_ms = self._latest_metadata_wait_ms = 0.0
        self._started_ms = 0.0
        self.network = NetworkClient(options, monotonic_ms)
        self._allocator = POOLS.allocator(
            options.buffer_memory_allocation_strategy, options.buffer_memory, options.batch_size
        )
        self.accumulator = _accumulator(options, self._allocator)
        self.cluster = _cluster_metadata(options, self.network)
        self._rack = ClientRack(options.client_rack, self.cluster.nodes, os.environ)
        self.breaker = _breaker(options, self.cluster, self.accumulator)
        self.activity = TaskActivity(monotonic_ms)
        self._appender = _appender(options, self.accumulator, self.network, self.breaker, self.activity)
        self._identity = _identity(options)
        self._dead_letters = _dead_letters(options)
        self._rejection = _rejection(options, self._dead_letters, self.cluster)
        self._dead_letter_memory = _dead_letter_memory(options)
        self._dead_letter_appender = self._appender.for_dead_letters(self._dead_letter_memory)
        self._dead_letter_writer: DeadLetterWriter | None = None
        if self._dead_letters is not None:
            self._dead_letter_writer = DeadLetterWriter(
                self._dead_letters, self._order, self._append_dead_letters
            )
        self._telemetry = self._new_telemetry()
        self.sender = Sender(
            options,
            self.accumulator,
            self.cluster,
            self.network,
            self._identity,
            self.breaker,
            monotonic_ms,
            self._dead_letters,
            self._telemetry,
        )
        self._partitioner = _partitioner(options, self.accumulator, self._appender)
        self._rate_limit: RateLimit | None = None
        self._rates: RateChannel | None = None
        self._coordinator: CoordinatorClient | None = None
        self._shared_breaker: BreakerChannel | None = None
        self._writes = WriteChannel(self.abort)
        # Of the rows that ``send`` is given without another.
        self.plan: ColumnPlan | None = None
        self._reporter = TaskReporter(
            self.sender,
            self._allocator,
            self.accumulator,
            self._appender,
            self.cluster,
            self.breaker,
            self.activity,
            monotonic_ms,
            self._dead_letters_by_topic,
            lambda: 0.0 if self._rate_limit is None else self._rate_limit.waited_ms,
            self._rack,
        )
        self._reports: ReportChannel | None = None
        self.sender.start()
        LIVE_PRODUCERS.add(self)

    def _new_telemetry(self) -> ClientTelemetry | None:
        if not self.options.enable_metrics_push:
            return None

        def resource() -> dict[str, str]:
            transactional_id = None if self._identity is None else self._identity.transactional_id
            found = {"client_rack": self._rack.name, "transactional_id": transactional_id}
            return {name: value for name, value in found.items() if value}

        return ClientTelemetry(self.network, self.cluster, self.options.request_timeout_ms, resource)

    def begin(
        self,
        coordinator: CoordinatorAddress | None = None,
        hints: MetadataSnapshot | None = None,
        task: SparkTask = _NO_TASK,
        identity: TaskIdentity | None = None,
    ) -> None:
        """A new task: its counts start at zero.

        ``hints`` is the metadata that the driver sent along, with its age.
        """
        if hints is not None:
            self.cluster.import_snapshot(hints, monotonic_ms())
        self._use_coordinator(coordinator)
        self._rows = self._rejected_rows = self._largest_record = 0
        self._metadata_wait_ms = self._latest_metadata_wait_ms = 0.0
        if self._dead_letters is not None:
            self._dead_letters.begin(str(task.number))
        self._begin_rate_limit(task)
        self._started_ms = monotonic_ms()
        if isinstance(self._identity, TransactionalIdentity):
            self._identity.leave()
        self.sender.begin()
        if self._telemetry is not None:
            self._telemetry.idle_since_ms = math.inf
        self._allocator.begin()
        self._dead_letter_memory.begin()
        self.accumulator.begin_task()
        self._appender.encode_ms = self._appender.pool_wait_ms = 0.0
        self._writes.begin(task.write, task.stage)
        self._reporter.begin()
        if self._reports is not None and identity is not None:
            self._reports.begin(identity)

    def _begin_rate_limit(self, task: SparkTask) -> None:
        limits = limits_of(self.options)
        if not limits:
            return
        if self._rate_limit is None:
            self._rate_limit = RateLimit(limits, task.tasks_at_once, monotonic_ms)
            self._rate_limit.activity = self.activity
        self._rate_limit.grants = None if self._coordinator is None else self._rates
        if self._rates is not None and self._coordinator is not None and self._coordinator.is_connecting:
            self._rates.expect()
        self._rate_limit.begin(task.job)

    def begin_transaction(
        self, transactional_id: str, producer_id: int, epoch: int, *, adds_partitions: bool = False
    ) -> None:
        """Write the rows from now on in this transaction. Only before a task's first row.

        ``adds_partitions``: under transaction protocol 1. Raises ValueError for a producer without
        delivery.guarantee=exactly-once.
        """
        if not isinstance(self._identity, TransactionalIdentity):
            raise ValueError("this producer writes without transactions")
        self._identity.adopt(transactional_id, producer_id, epoch, adds_partitions=adds_partitions)
        self._reporter.transaction_since_ms = monotonic_ms()

    def _use_coordinator(self, address: CoordinatorAddress | None) -> None:
        """Work with the coordinator at this address from now on, or without one."""
        if self._coordinator is not None and self._coordinator.address != address:
            self._leave_coordinator(self._coordinator)
        if address is None:
            return
        if self._coordinator is None:
            self._coordinator = self._join_coordinator(address)
        elif self._shared_breaker is not None and self._coordinator.is_connecting:
            self._shared_breaker.expect()
        self.breaker.begin()
        self._coordinator.resume()

    def _leave_coordinator(self, coordinator: CoordinatorClient) -> None:
        coordinator.close()
        self._coordinator = self._reports = None
        self.cluster.hints = None
        self.cluster.share_refreshes(False)
        self.breaker.share(None)

    def _join_coordinator(self, address: CoordinatorAddress) -> CoordinatorClient:
        interval_ms = self.options.coordinator_report_interval_ms
        idle_ms = self.options.metadata_max_idle_ms
        metadata = MetadataChannel(self.cluster, monotonic_ms, interval_ms, idle_ms)
        self._writes = WriteChannel(self.abort)
        channels: list[Channel] = [metadata, self._writes]
        if not self.breaker.is_off:
            self._shared_breaker = BreakerChannel(
                self._call_breaker, interval_ms, lambda: self.cluster.cluster_id
            )
            self.breaker.share(self._shared_breaker)
            channels.append(self._shared_breaker)
        if address.location.has_view:
            self._reports = ReportChannel(self._reporter.read, monotonic_ms)
            channels.append(self._reports)
        if limits_of(self.options):
            self._rates = RateChannel()
            channels.append(self._rates)
        settings = self.options.group_settings()

        def hello() -> Hello:
            return Hello(address.location.group, self.cluster.cluster_id or "", settings)

        coordinator = CoordinatorClient(address, channels, hello, monotonic_ms)
        self.cluster.hints = metadata
        coordinator.start()
        return coordinator

    def _call_breaker(self) -> None:
        """The sender's next pass begins now, and applies what the coordinator says. Any thread."""
        self.breaker.call()
        self.network.wakeup()

    def send(self, batch: pa.RecordBatch | pa.Table, *, plan: ColumnPlan | None = None) -> int:
        """Append rows, whose columns are those of ``plan``, by default ``self.plan``. Returns the number of
        partitions that they go to.

        Raises InvalidRowError (after max.block.ms for a partition that does not exist) or
        RecordTooLargeError for rows that cannot be sent, MetadataTimeoutError or BufferExhaustedError after
        max.block.ms, DeliveryError once earlier rows have failed. With errors.tolerance=all, rows that cannot
        be sent become dead letters, and TooManyDeadLettersError is raised for more than errors.max.
        """
        plan = plan or self.plan
        if plan is None:
            raise ValueError("rows need a plan of their columns")
        if self._rate_limit is None:
            return self._send(plan, batch)
        return max((self._send(plan, part) for part in self._rate_limit.slices(batch, self.check)), default=0)

    def _send(self, plan: ColumnPlan, batch: pa.RecordBatch | pa.Table) -> int:
        self.check()
        if batch.num_rows == 0:
            return 0
        ordered: OrderedRows | None
        if self._rejection is None:
            ordered = self._order(plan, batch)
            self._rows += batch.num_rows
        else:
            self._rows += batch.num_rows
            ordered = self._rejection.order(plan, batch, self._order)
        # Of the rows that are left. What invalid ones waited before is their own, as in Kafka's producer.
        waited_ms = self._latest_metadata_wait_ms
        self._write_dead_letters()
        if ordered is None:
            return 0
        self._largest_record = max(self._largest_record, ordered.largest_bound)
        self._appender.append(ordered, self._check_and_write_dead_letters, waited_ms)
        return len(ordered.partitions)

    def reject(self, rows: RejectedRows) -> None:
        """Rows that could not be encoded, with errors.tolerance=all. Raises TooManyDeadLettersError."""
        assert self._dead_letters is not None
        self._rejected_rows += rows.count
        self._dead_letters.add(rows)

    def write_dead_letters(self) -> bool:
        """Append the dead letters that wait, for a task that waits for rows. Return whether there may be
        more, as not all rows so far are acknowledged. Raises as ``send`` does."""
        dead_letters = self._dead_letters
        if dead_letters is None or dead_letters.topic is None:
            return False
        self._check_and_write_dead_letters()
        # In this order: a row becomes a dead letter before its batch is complete.
        return self.accumulator.incomplete > 0 or self._has_dead_letters

    def _write_dead_letters(self) -> bool:
        """Append the dead letters that wait; return whether there were any."""
        return self._dead_letter_writer is not None and self._dead_letter_writer.write()

    @property
    def _has_dead_letters(self) -> bool:
        dead_letters = self._dead_letters
        return dead_letters is not None and dead_letters.topic is not None and dead_letters.is_waiting

    def _append_dead_letters(self, ordered: OrderedRows) -> None:
        """Their batches are their own and go at once: memory for the next dead letters waits for them."""
        self._dead_letter_appender.flush(ordered.partitions)
        self._dead_letter_appender.append(ordered, self.check)
        self._dead_letter_appender.flush(ordered.partitions)

    def _check_and_write_dead_letters(self) -> None:
        """What a task does while it waits with rows: rows that brokers rejected may hold the memory for them
        until dead letters are written."""
        self.check()
        self._write_dead_letters()

    def _order(self, plan: ColumnPlan, batch: pa.RecordBatch | pa.Table) -> OrderedRows:
        """The rows by partition. Waits for metadata, and for what the coordinator has muted."""
        now_ms = int(wall_ms())
        rows = extract(plan, batch, now_ms)
        topics = self._await_topics(rows)
        breaker = self.breaker
        if breaker.awaits_mutes:
            breaker.await_mutes(self._started_ms + HINT_WAIT_MS - monotonic_ms(), self.check)
        muted = breaker.mutes
        if muted and self._partitioner.chooses(rows.key, rows.partition):
            breaker.note_free_rows(rows.topics)
        unavailable = self.sender.unavailable | breaker.manager.congested
        near = self._rack.brokers() if self.options.partitioner_rack_aware else ()
        ordered = self._partitioner.order(rows, topics, now_ms, unavailable, muted, near)
        self._check_sizes(rows, ordered)
        return ordered

    def _await_topics(self, rows: RowBatch) -> dict[str, TopicMetadata]:
        started_ms = monotonic_ms()
        try:
            with self.activity.waiting(METADATA):
                if self._rejection is not None:
                    return self._rejection.await_topics(rows, self.check)
                timeout_ms = self.options.max_block_ms
                return self.cluster.await_topics(rows.topics, timeout_ms, self.check, partitions_needed(rows))
        finally:
            self._latest_metadata_wait_ms = monotonic_ms() - started_ms
            self._metadata_wait_ms += self._latest_metadata_wait_ms

    def _check_sizes(self, rows: RowBatch, ordered: OrderedRows) -> None:
        largest = ordered.largest_bound + batch_header.SIZE
        options = self.options
        for limit, name in (
            (options.max_request_size, "kafka.max.request.size"),
            (options.buffer_memory, "kafka.buffer.memory"),
        ):
            if largest > limit:
                found = rows_larger_than(rows, ordered, limit - batch_header.SIZE)
                raise RecordTooLargeError(
                    f"a row for topic '{found.topic}' makes a record of {found.record_bytes} bytes (key "
                    f"{found.key_bytes}, value {found.value_bytes}), more than {name} = {limit}. Find such "
                    f"rows by length(value). Raise {name} (and the topic's max.message.bytes where it is "
                    "lower), send smaller rows, or set errors.tolerance=all to skip them "
                    "(errors.deadletterqueue.topic.name keeps them)",
                    found.rows,
                    f"the record is larger than {name} = {limit}",
                )

    def finish(self) -> TaskResult:
        """Send what is left and wait until every row is acknowledged.

        Every batch is bounded by delivery.timeout.ms, so this ends. Raises DeliveryError with the first
        cause and the counts.
        """
        started = monotonic_ms()
        self._send_all()
        counts = self._reporter.counts()
        written = counts.records + counts.unconfirmed
        if written + counts.skipped != self.rows:
            # No row may be lost in silence. No known path leads here.
            raise DeliveryError(f"of {self.rows} rows {written + counts.skipped} are accounted for")
        now = monotonic_ms()
        self._send_last_report()
        return TaskResult(
            **counts.by_name(),
            partitions=self.sender.deliveries.partitions(),
            elapsed_ms=now - self._started_ms,
            flush_ms=now - started,
            metrics=self.metrics(),
            skip_reasons={} if self._dead_letters is None else self._dead_letters.reasons(),
        )

    def flush(self) -> None:
        """Send what is left, wait until every row so far is acknowledged, and go on. Raises as
        ``finish``."""
        self._send_all()
        self.accumulator.begin_task()

    def _send_all(self) -> None:
        self._appender.flush()
        self._await_completion()
        # Brokers reject rows meanwhile, and dead letters that are too large.
        while self._write_dead_letters():
            self._await_completion()

    @property
    def rows(self) -> int:
        return self._rows + self._rejected_rows

    @property
    def acknowledged(self) -> int:
        """Rows of this task that brokers have acknowledged; with acks=0 rows that were sent."""
        return self.sender.deliveries.counts().written

    def _await_completion(self) -> None:
        deliveries = self.sender.deliveries
        with self.activity.waiting(BROKER):
            while not self.accumulator.await_completion(
                _WATCH_MS / 1000, lambda: deliveries.has_failed or self._has_dead_letters
            ):
                if not self.sender.is_alive():
                    break
        self.check()

    def check(self) -> None:
        """Raise DeliveryError if rows of this task have failed. A task that waits calls it now and then."""
        # Read first: a thread that ends records its reason before.
        ended = not self.sender.is_alive()
        if self.sender.deliveries.has_failed:
            self.sender.deliveries.raise_failure(
                self.rows, self.accumulator.unacknowledged_records(), self._skipped
            )
        if ended:
            raise DeliveryError("the sender thread has ended")

    def abort(self, cause: Exception, held: int = 0) -> None:
        """Stop sending at once and drop what was not sent. Any thread may call it.

        The task fails with this cause, wherever it waits. The producer serves no other task. ``held``: rows
        that the task has and did not append yet.
        """
        unacknowledged = self.accumulator.unacknowledged_records()
        self.sender.abort(cause)
        written = self.sender.deliveries.counts().written
        skipped, rows = self._skipped, self.rows + held
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
        return 0 if self._dead_letters is None else self._dead_letters.rows

    def _dead_letters_by_topic(self) -> dict[tuple[str, str], int]:
        """Rows of this task that can never be written, by topic and reason."""
        return {} if self._dead_letters is None else self._dead_letters.by_topic()

    def _send_last_report(self, *, failed: bool = False) -> None:
        """The task's last report, while its counts are there."""
        channel = self._reports
        if channel is not None and channel.identity is not None:
            channel.end(self._reporter.read(channel.identity, done=True, failed=failed))

    def metrics(self) -> Metrics:
        """Metrics of the present task, or else of the last one, under Kafka's names: see docs/metrics.md."""
        muted = self.breaker.manager.muted_count
        age_ms = self.cluster.age_ms(monotonic_ms())
        rows = RowMetrics(self._largest_record, self._metadata_wait_ms, age_ms, muted)
        return self._reporter.metrics(rows)

    @property
    def is_reusable(self) -> bool:
        """Whether another task may use this producer and its producer id.

        The last task must have left nothing unresolved, and the sender must be alive.
        """
        return self.sender.is_reusable

    def go_idle(self) -> None:
        """Between tasks: connections and metadata stay, free memory goes back to the system."""
        self._writes.end()
        self._allocator.rest()
        self._dead_letter_memory.rest()
        if self._telemetry is not None:
            self._telemetry.idle_since_ms = monotonic_ms()
        if self._coordinator is not None:
            self._coordinator.pause()

    def close(self, *, abort: bool = False) -> None:
        """End the sender and its connections and give all memory back, without waiting for responses.

        Called by the task's thread, or between tasks. ``abort`` is for a task that failed: Spark runs it
        again, so bytes that the kernel still holds for the connections are dropped.
        """
        LIVE_PRODUCERS.discard(self)
        self._writes.end()
        self._send_last_report(failed=True)
        if self._coordinator is not None:
            self._coordinator.close()
        self._allocator.close()
        self._dead_letter_memory.close()
        self.sender.close(_CLOSE_TIMEOUT_MS, abort=abort)
        # The sender gave its memory back to a pool that other producers share.
        self._allocator.rest()
        self._dead_letter_memory.rest()


def _accumulator(options: SinkOptions, allocator: BufferAllocator) -> RecordAccumulator:
    return RecordAccumulator(options, allocator, repr(options.bootstrap_servers))


def _dead_letter_memory(options: SinkOptions) -> BufferAllocator:
    """For dead letters. Rows that brokers reject may hold all of buffer.memory until dead letters are
    written."""
    pool = BufferPool(_DEAD_LETTER_MEMORY_BYTES, chunk_size(options.batch_size), clock_ms=monotonic_ms)
    return BufferAllocator(pool, min(options.batch_size, _DEAD_LETTER_MEMORY_BYTES // 4))


def _dead_letters(options: SinkOptions) -> DeadLetters | None:
    if options.errors_tolerance == "none":
        return None
    topic, max_rows = options.errors_deadletterqueue_topic_name, options.errors_max
    # A dead letter must fit where the row did not, and into a topic with the default max.message.bytes.
    max_bytes = min(_MAX_DEAD_LETTER_BYTES, options.max_request_size // 2, options.buffer_memory // 2)
    return DeadLetters(topic, max_rows, max_bytes)


def _rejection(
    options: SinkOptions, dead_letters: DeadLetters | None, cluster: ClusterMetadata
) -> RowRejection | None:
    if dead_letters is None:
        return None
    return RowRejection(
        dead_letters, cluster, monotonic_ms, options.max_block_ms, options.metadata_max_age_ms
    )


def _cluster_metadata(options: SinkOptions, network: NetworkClient) -> ClusterMetadata:
    metadata = ClusterMetadata(
        monotonic_ms,
        wake_sender=network.wakeup,
        describe_brokers=network.describe_brokers,
        max_age_ms=options.metadata_max_age_ms,
        idle_ms=options.metadata_max_idle_ms,
        retry_backoff_ms=options.retry_backoff_ms,
        retry_backoff_max_ms=options.retry_backoff_max_ms,
    )
    tls = SecuritySettings.from_options(options).tls
    metadata.confirmed_nodes_only = tls is not None and tls.trust is None
    return metadata


def _appender(
    options: SinkOptions,
    accumulator: RecordAccumulator,
    network: NetworkClient,
    breaker: Breaker,
    activity: TaskActivity,
) -> RecordAppender:
    limit = None if breaker.is_off else _muted_memory_limit(options, accumulator, breaker)
    return RecordAppender(accumulator, monotonic_ms, network.wakeup, limit, activity)


def _muted_memory_limit(
    options: SinkOptions, accumulator: RecordAccumulator, breaker: Breaker
) -> MutedMemoryLimit:
    limit = options.buffer_memory * options.breaker.muted_buffer_perc // 100
    return MutedMemoryLimit(accumulator, limit, lambda: breaker.mutes, breaker.explain, monotonic_ms)


def _identity(options: SinkOptions) -> ProducerIdentity | None:
    backoff = ExponentialBackoff(options.retry_backoff_ms, options.retry_backoff_max_ms, RANDOM.random)
    if options.exactly_once:
        return TransactionalIdentity(backoff)
    return ProducerIdentity(backoff) if options.enable_idempotence else None


def _breaker(options: SinkOptions, cluster: ClusterMetadata, accumulator: RecordAccumulator) -> Breaker:
    # Read without the accumulator's lock: a partition stays once it is there.
    find = accumulator.partitions.get
    manager = CircuitBreakManager(cluster, options.breaker.mute_retry_interval_ms, find)
    return Breaker(load_breaker(options), manager, cluster.mark_stale)


def _partitioner(
    options: SinkOptions, accumulator: RecordAccumulator, appender: RecordAppender
) -> Partitioner:
    return Partitioner(
        capacity=appender.batch_capacity,
        loads=accumulator.queued_batches,
        ignore_keys=options.partitioner_ignore_keys,
        adaptive=options.partitioner_adaptive_partitioning_enable,
        random=RANDOM.random,
        spread_keys=options.partitioner_spread_keys_when_muted,
    )
