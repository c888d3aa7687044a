"""The parts of a producer that outlive a task: connections, metadata, memory and the sender."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafka_sink.breaker.breaker import Breaker
from kafka_sink.breaker.interface import load_breaker
from kafka_sink.breaker.manager import CircuitBreakManager
from kafka_sink.clock import RANDOM, ExponentialBackoff, TaskActivity, monotonic_ms
from kafka_sink.cluster.client_rack import ClientRack
from kafka_sink.cluster.producer_metadata import ProducerMetadata
from kafka_sink.engine.accumulator import RecordAccumulator
from kafka_sink.engine.appender import MutedMemoryLimit, RecordAppender
from kafka_sink.engine.identity import ProducerIdentity
from kafka_sink.engine.sender import Sender
from kafka_sink.engine.telemetry import ClientTelemetry
from kafka_sink.memory.allocator import BufferAllocator, WorkerPools
from kafka_sink.memory.pool import BufferPool
from kafka_sink.network.client import NetworkClient
from kafka_sink.options import SinkOptions
from kafka_sink.options.environment import expanded
from kafka_sink.task.kept_limits import KeptLimits

if TYPE_CHECKING:
    from kafka_sink.engine.transactional_identity import TransactionalIdentity

_CLOSE_TIMEOUT_MS = 5000.0
_DEAD_LETTER_MEMORY_BYTES = 8 << 20
# The least memory of a batch in the pool. Its Python objects take 1.1 kB beside the pool: if batch.size is a
# few bytes, they would take many times the memory of the pool.
_LEAST_BATCH_BYTES = 1024
POOLS = WorkerPools(monotonic_ms)


class WorkerParts:
    """Creates the parts of one producer and connects them."""

    def __init__(self, options: SinkOptions) -> None:
        activity = self.activity = TaskActivity(monotonic_ms)
        network = self.network = NetworkClient(options, monotonic_ms)
        cluster = self.cluster = ProducerMetadata(options, monotonic_ms, network)
        self.rack = ClientRack(expanded("kafka.client.rack", options.client_rack), cluster.nodes)
        memory = options.buffer_memory
        size = max(options.batch_size, min(_LEAST_BATCH_BYTES, memory))
        self.allocator = POOLS.allocator(options.buffer_memory_allocation_strategy, memory, size)
        accumulator = self.accumulator = RecordAccumulator(
            options, self.allocator, KeptLimits(options.bootstrap_servers)
        )
        # This lookup takes no lock: a partition is never removed, so a reader sees none or the final one.
        find = accumulator.partitions.get
        manager = CircuitBreakManager(cluster, options.breaker.mute_retry_interval_ms, find)
        breaker = self.breaker = Breaker(load_breaker(options), manager)
        backoff = ExponentialBackoff(options.retry_backoff_ms, options.retry_backoff_max_ms, RANDOM.random)
        identity: ProducerIdentity | None = None
        self.transactional_identity: TransactionalIdentity | None = None
        if options.exactly_once:
            from kafka_sink.engine.transactional_identity import TransactionalIdentity

            identity = TransactionalIdentity(network, options.request_timeout_ms, backoff)
            self.transactional_identity = identity
        elif options.enable_idempotence:
            identity = ProducerIdentity(network, options.request_timeout_ms, backoff)
        self.identity = identity
        telemetry: ClientTelemetry | None = None
        if options.enable_metrics_push:
            telemetry = ClientTelemetry(network, cluster, options.request_timeout_ms, self._resource)
        self.telemetry = telemetry
        self.sender = Sender(accumulator, cluster, network, identity, breaker, monotonic_ms, telemetry)
        limit: MutedMemoryLimit | None = None
        if not breaker.is_off:
            muted_bytes = memory * options.breaker.muted_buffer_perc // 100
            limit = MutedMemoryLimit(accumulator, muted_bytes, breaker, monotonic_ms)
        self.appender = RecordAppender(accumulator, monotonic_ms, network.wakeup, limit, activity)
        # Dead letters need their own memory: rejected rows may hold all of buffer.memory until then.
        pool = BufferPool(_DEAD_LETTER_MEMORY_BYTES, clock_ms=monotonic_ms)
        self.dead_letter_memory = BufferAllocator(pool, min(size, _DEAD_LETTER_MEMORY_BYTES // 4))
        self.dead_letter_appender = RecordAppender(
            accumulator, monotonic_ms, network.wakeup, None, activity, self.dead_letter_memory
        )

    def _resource(self) -> dict[str, str]:
        transactional_id = None if self.identity is None else self.identity.transactional_id
        labels = {"client_rack": self.rack.name, "transactional_id": transactional_id}
        return {name: value for name, value in labels.items() if value}

    def close(self, *, abort: bool) -> None:
        """End the sender and return all memory."""
        self.allocator.close()
        self.dead_letter_memory.close()
        self.sender.close(_CLOSE_TIMEOUT_MS, abort=abort)
        # The sender has returned its memory to the pool, which other producers share.
        self.rest()

    def rest(self) -> None:
        """Return free memory to the system."""
        self.allocator.rest()
        self.dead_letter_memory.rest()
