"""The one place that wires a task's parts together."""

from __future__ import annotations

import logging
import random
import time

import pyarrow as pa

from kafka_sink.accumulator.batch_size_limits import BatchSizeLimits
from kafka_sink.accumulator.muted_memory_limit import MutedMemoryLimit
from kafka_sink.accumulator.record_accumulator import AccumulatorSettings, RecordAccumulator
from kafka_sink.accumulator.record_appender import RecordAppender
from kafka_sink.accumulator.worker_pools import WorkerPools
from kafka_sink.backoff import ExponentialBackoff
from kafka_sink.breaker.loading import load_breaker
from kafka_sink.breaker.metrics import BreakerMetrics
from kafka_sink.breaker.mute_control import MuteControl
from kafka_sink.breaker.producer_breaker import ProducerBreaker
from kafka_sink.clock import monotonic_ms
from kafka_sink.coordinator.tasks.breaker_channel import BreakerChannel
from kafka_sink.coordinator.tasks.client import Channel, CoordinatorClient
from kafka_sink.coordinator.tasks.metadata_channel import MetadataChannel
from kafka_sink.coordinator.tasks.write_channel import WriteChannel
from kafka_sink.coordinator.wire.address import CoordinatorAddress
from kafka_sink.errors import DeliveryError, RecordTooLargeError
from kafka_sink.metadata.cache import MetadataCache
from kafka_sink.metadata.cluster_metadata import ClusterMetadata, NoHints
from kafka_sink.metadata.snapshot import MetadataSnapshot
from kafka_sink.model import TaskResult
from kafka_sink.network.client import NetworkClient, NetworkSettings
from kafka_sink.options import SinkOptions
from kafka_sink.records import batch_header
from kafka_sink.records.compression import codec_for
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.rows.columns import extract
from kafka_sink.rows.ordering import ordered_rows_of, partitions_needed
from kafka_sink.rows.partitioner import Partitioner
from kafka_sink.sending.producer_identity import ProducerIdentity, TransactionalIdentity
from kafka_sink.sending.producer_metrics import LiveProducers, Metrics, task_metrics
from kafka_sink.sending.sender import Sender
from kafka_sink.sending.settings import SenderSettings
from kafka_sink.timing_bounds import HINT_WAIT_MS

_log = logging.getLogger(__name__)
_CLOSE_TIMEOUT_MS = 5000.0
# How often a waiting task looks whether its sender is still alive.
_WATCH_MS = 1000.0


POOLS = WorkerPools(monotonic_ms)
LIVE_PRODUCERS = LiveProducers()


class Producer:
    """Accumulator, sender and network of one option set. One task uses it at a time."""

    def __init__(self, options: SinkOptions) -> None:
        self.options = options
        self._rows = 0
        self._started_ms = 0.0
        self._network = NetworkClient(NetworkSettings.from_options(options), monotonic_ms)
        codec = codec_for(options.compression_type, options.compression_level)
        self._allocator = POOLS.allocator(
            options.buffer_memory_allocation_strategy, options.buffer_memory, options.batch_size
        )
        self._accumulator = RecordAccumulator(
            _accumulator_settings(options),
            self._allocator,
            BatchSizeLimits(options.batch_size, repr(options.bootstrap_servers)),
        )
        cache = MetadataCache(
            max_age_ms=options.metadata_max_age_ms,
            idle_ms=options.metadata_max_idle_ms,
            retry_backoff_ms=options.retry_backoff_ms,
            retry_backoff_max_ms=options.retry_backoff_max_ms,
            random=random.random,
        )
        self._cluster = ClusterMetadata(
            cache, monotonic_ms, self._network.wakeup, self._network.describe_brokers
        )
        self._gate = _breaker_gate(options, self._cluster)
        self._appender = RecordAppender(
            self._accumulator,
            codec,
            monotonic_ms,
            self._network.wakeup,
            None if self._gate is None else _muted_memory_limit(options, self._accumulator, self._gate),
        )
        backoff = ExponentialBackoff(options.retry_backoff_ms, options.retry_backoff_max_ms, random.random)
        self._identity = _identity(options, backoff)
        self._sender = Sender(
            SenderSettings.from_options(options),
            self._accumulator,
            self._cluster,
            self._network,
            self._identity,
            backoff,
            monotonic_ms,
            self._gate,
        )
        self._partitioner = Partitioner(
            room=self._appender.batch_room,
            ignore_keys=options.partitioner_ignore_keys,
            adaptive=options.partitioner_adaptive_partitioning_enable,
            random=random.random,
            spread_keys=options.partitioner_spread_keys_when_muted,
        )
        self._breaker_before = BreakerMetrics()
        self._coordinator: CoordinatorClient | None = None
        self._shared_breaker: BreakerChannel | None = None
        self._writes = WriteChannel(self.abandon)
        self._memory_before = self._allocator.metrics()
        self._sender.start()
        LIVE_PRODUCERS.add(self)

    def begin(
        self,
        coordinator: CoordinatorAddress | None = None,
        hints: MetadataSnapshot | None = None,
        write: str | None = None,
    ) -> None:
        """A new task: its counts start at zero. ``hints``: what the driver knew, aged until now. ``write``
        names what it belongs to; the coordinator tells when that is over."""
        if hints is not None:
            self._cluster.import_hints(hints, monotonic_ms())
        self._join(coordinator)
        self._rows = 0
        self._started_ms = monotonic_ms()
        if isinstance(self._identity, TransactionalIdentity):
            self._identity.leave()
        self._sender.begin()
        self._allocator.restart_maxima()
        self._memory_before = self._allocator.metrics()
        self._breaker_before = self.breaker_metrics()
        self._accumulator.begin_task()
        self._appender.encode_ms = self._appender.pool_wait_ms = 0.0
        self._writes.begin(write)

    def begin_transaction(self, transactional_id: str, producer_id: int, epoch: int) -> None:
        """The rows from now on are in this transaction. Before the first row of a task only.

        Raises ValueError for a producer without delivery.guarantee=exactly-once.
        """
        if not isinstance(self._identity, TransactionalIdentity):
            raise ValueError("this producer writes without transactions")
        self._identity.adopt(transactional_id, producer_id, epoch)

    def _join(self, address: CoordinatorAddress | None) -> None:
        """Work with the coordinator at this address from now on, or with none."""
        known = self._coordinator
        if known is not None and known.address != address:
            known.close()
            self._coordinator = None
            self._cluster.hints = NoHints()
            self._cluster.share_refreshes(False)
            if self._gate is not None:
                self._gate.share(None)
        if address is None:
            return
        if self._coordinator is None:
            interval_ms = self.options.coordinator_report_interval_ms
            idle_ms = self.options.metadata_max_idle_ms
            exchange = MetadataChannel(self._cluster, monotonic_ms, interval_ms, idle_ms)
            self._writes = WriteChannel(self.abandon)
            participants: list[Channel] = [exchange, self._writes]
            if self._gate is not None:
                shared = BreakerChannel(self._network.wakeup, interval_ms)
                participants.append(shared)
                self._gate.share(shared)
                self._shared_breaker = shared
            self._coordinator = CoordinatorClient(address, participants, monotonic_ms)
            self._cluster.hints = exchange
            self._coordinator.start()
        elif self._shared_breaker is not None and self._coordinator.is_connecting:
            self._shared_breaker.expect()
        if self._gate is not None:
            self._gate.begin()
        self._coordinator.resume()

    def send(self, plan: ColumnPlan, batch: pa.RecordBatch | pa.Table) -> int:
        """Takes a unit of rows; returns when they are accumulated, with the number of partitions they go to.

        Raises InvalidRowError (after max.block.ms for a partition that does not exist) or
        RecordTooLargeError for rows that cannot be sent, MetadataTimeoutError or BufferExhaustedError after
        max.block.ms, DeliveryError once earlier rows have failed.
        """
        self.check()
        if batch.num_rows == 0:
            return 0
        now_ms = time.time_ns() // 1_000_000
        rows = extract(plan, batch, now_ms)
        topics = self._cluster.await_topics(
            rows.topics, self.options.max_block_ms, self.check, partitions_needed(rows)
        )
        gate, unavailable = self._gate, self._sender.availability.unavailable
        if gate is not None:
            gate.await_mutes(self._started_ms + HINT_WAIT_MS - monotonic_ms(), self.check)
            if gate.mutes and self._partitioner.chooses(rows.key, rows.partition):
                gate.note_free_rows(rows.topics)
        if gate is not None and gate.congested:
            unavailable |= gate.congested
        unit = ordered_rows_of(
            rows,
            topics,
            self._partitioner,
            self._accumulator.queued_batches,
            now_ms,
            unavailable,
            () if gate is None else gate.mutes,
        )
        self._check_sizes(unit)
        self._rows += batch.num_rows
        self._appender.append(unit, self.check)
        return len(unit.partitions)

    def _check_sizes(self, unit: OrderedRows) -> None:
        largest = unit.largest_bound + batch_header.SIZE
        options = self.options
        for limit, name in (
            (options.max_request_size, "kafka.max.request.size"),
            (options.buffer_memory, "kafka.buffer.memory"),
        ):
            if largest > limit:
                raise RecordTooLargeError(
                    f"a row makes a record of {largest} bytes, more than {name} = {limit}; raise {name} (and "
                    "the topic's max.message.bytes where it is lower) or send smaller rows"
                )

    def finish(self) -> TaskResult:
        """Sends what is left and waits until every row is acknowledged.

        Every batch is bounded by delivery.timeout.ms, so this ends. Raises DeliveryError with the first
        cause and the counts.
        """
        started = monotonic_ms()
        self._appender.flush()
        deliveries = self._sender.deliveries
        while not self._accumulator.await_completion(_WATCH_MS / 1000, lambda: deliveries.has_failed):
            if not self._sender.is_alive():
                break
        self.check()
        counts = deliveries.counts()
        if counts.written_records != self._rows:
            # The last guard of the first invariant; no path is known that leads here.
            raise DeliveryError(f"of {self._rows} rows {counts.written_records} are accounted for")
        now = monotonic_ms()
        breaker = self.breaker_metrics().since(self._breaker_before)
        return TaskResult(
            partitions=self._sender.deliveries.partitions(),
            records=counts.acknowledged_records,
            unconfirmed=counts.unconfirmed_records,
            batches=counts.batches,
            raw_bytes=counts.raw_bytes,
            wire_bytes=counts.wire_bytes,
            requests=counts.requests,
            retries=counts.retries,
            splits=counts.splits,
            elapsed_ms=now - self._started_ms,
            encode_ms=self._appender.encode_ms,
            pool_wait_ms=self._appender.pool_wait_ms,
            flush_ms=now - started,
            breaker_trips=breaker.breaker_trips_total,
            breaker_probes=breaker.probes,
            metrics=self.metrics(),
        )

    def check(self) -> None:
        """Raises DeliveryError if rows of this task have failed; for a task that waits for its next rows."""
        # Asked first: a thread that ends tells its reason before.
        ended = not self._sender.is_alive()
        if self._sender.deliveries.has_failed:
            self._sender.deliveries.raise_failure(self._rows, self._accumulator.unanswered_records())
        if ended:
            raise DeliveryError("the sender thread has ended")

    def abandon(self, cause: Exception) -> None:
        """Stops sending at once and drops what was not sent; from any thread. The task then fails with this
        cause, wherever it waits, and the producer serves no other."""
        unanswered = self._accumulator.unanswered_records()
        self._sender.abort(cause)
        written = self._sender.deliveries.counts().written_records
        _log.warning(
            "%s. Sending has stopped: of %d rows %d are acknowledged, %d were sent and have no answer, "
            "and %d are dropped",
            cause,
            self._rows,
            written,
            unanswered,
            max(0, self._rows - written - unanswered),
        )
        self._accumulator.wake_waiters()

    def metrics(self) -> Metrics:
        """Of the task under way, or of the last one, under Kafka's names: see docs/metrics.md."""
        breaker = self.breaker_metrics().since(self._breaker_before)
        counts = self._sender.deliveries.counts()
        return task_metrics(self._allocator.metrics(), self._memory_before, counts, breaker)

    def breaker_metrics(self) -> BreakerMetrics:
        """muted-partitions, breaker-trips-total and probes of this producer so far."""
        return BreakerMetrics() if self._gate is None else self._gate.metrics()

    @property
    def reusable(self) -> bool:
        """Whether the last task left nothing unresolved and the sender lives: else the producer, and with it
        its producer id, must not serve another task."""
        return self._sender.is_reusable

    def rest(self) -> None:
        """Between tasks: connections and metadata stay, free memory goes back to the system."""
        self._writes.end()
        self._allocator.trim_free()
        if self._coordinator is not None:
            self._coordinator.pause()

    def close(self, *, abort: bool = False) -> None:
        """Ends the sender and its connections and gives all memory back; never waits for answers.

        Called by the task's thread, or once no task is under way. ``abort`` is for a task that failed: Spark
        runs it again, so what the system holds for the connections is dropped.
        """
        LIVE_PRODUCERS.discard(self)
        self._writes.end()
        if self._coordinator is not None:
            self._coordinator.close()
        self._allocator.close()
        self._sender.close(_CLOSE_TIMEOUT_MS, abort=abort)
        # What the sender gave back stays in a pool that other producers share.
        self._allocator.trim_free()


def _identity(options: SinkOptions, backoff: ExponentialBackoff) -> ProducerIdentity | None:
    if options.delivery_guarantee == "exactly-once":
        return TransactionalIdentity(backoff)
    return ProducerIdentity(backoff) if options.enable_idempotence else None


def _breaker_gate(options: SinkOptions, cluster: ClusterMetadata) -> ProducerBreaker | None:
    breaker = load_breaker(options)
    if breaker is None:
        return None
    interval_ms = options.breaker.mute_retry_interval_ms

    def describe(node_id: int) -> str:
        return str(cluster.nodes().get(node_id, node_id))

    return ProducerBreaker(breaker, MuteControl(cluster, interval_ms), describe, cluster.mark_stale)


def _muted_memory_limit(
    options: SinkOptions, accumulator: RecordAccumulator, gate: ProducerBreaker
) -> MutedMemoryLimit:
    share = options.breaker.muted_buffer_perc
    limit = options.buffer_memory * share // 100
    return MutedMemoryLimit(accumulator, limit, lambda: gate.mutes, gate.explain, monotonic_ms)


def _accumulator_settings(options: SinkOptions) -> AccumulatorSettings:
    return AccumulatorSettings(
        batch_size=options.batch_size,
        linger_ms=options.linger_ms,
        max_block_ms=options.max_block_ms,
        delivery_timeout_ms=options.delivery_timeout_ms,
        buffer_memory=options.buffer_memory,
        compression=options.compression_type,
        guarantee_order=options.max_in_flight_requests_per_connection == 1,
    )
