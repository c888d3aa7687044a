"""Everything between the task's rows and the brokers' logs but sockets and threads, moved by hand.

Accumulator, appender, pool, identity, requests and response handler are the real ones. Brokers are the
scripted log of tests/support, which checks sequences as Kafka does; the "wire" reads a batch's memory only
when a request arrives, as sendmsg may, so memory that was given away too early shows as rows in wrong places.
What the task does between planning and writing can be interrupted by any step of the sender.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from kafka_sink.breaker.breaker import Breaker
from kafka_sink.breaker.manager import CircuitBreakManager
from kafka_sink.clock import ExponentialBackoff
from kafka_sink.cluster.broker import Broker, SentRequest
from kafka_sink.cluster.partition import BatchState, Partition, ProducerBatch
from kafka_sink.dead_letters.rejected_rows import DeadLetters
from kafka_sink.engine.accumulator import RecordAccumulator
from kafka_sink.engine.appender import RecordAppender
from kafka_sink.engine.deliveries import TaskDeliveries, WrittenBatch
from kafka_sink.engine.identity import ProducerIdentity
from kafka_sink.engine.produce_requests import fill_request, produce_request
from kafka_sink.engine.responses import ResponseHandler
from kafka_sink.engine.sender import split_off_muted
from kafka_sink.errors import BufferExhaustedError, DeliveryError
from kafka_sink.memory.buffer import PieceBuffer
from kafka_sink.memory.pool import BufferPool
from kafka_sink.model import (
    NO_RECORD_ERRORS,
    CompressionType,
    Node,
    PartitionMetadata,
    TopicMetadata,
    TopicPartition,
)
from kafka_sink.network.produce import ProducePartitionResponse, ProduceResponse
from kafka_sink.options import SinkOptions
from kafka_sink.records import encoder
from kafka_sink.records.batch_header import ProducerSequence
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.rows.columns import extract
from kafka_sink.rows.partitioner import BatchCapacity, Partitioner
from tests.support.brokers import Brokers
from tests.support.fake_log import PartitionLog, numbers_in, parse_batch
from tests.support.partitioners import row_batch
from tests.support.strategy import forced
from tests.support.topic_metadata import topic_of

TOPIC = "t"
PARTITIONS = 3
NODES = 2
NOT_LEADER = 6
DELIVERY_TIMEOUT_MS = 10_000
_BATCH_SIZE = 700
_POOL_BYTES = 32_768
_PLAN = ColumnPlan.of([("value", "binary"), ("partition", "int")], TOPIC)


class Metadata:
    """The part of ClusterMetadata that the sender uses."""

    def __init__(self) -> None:
        self.leaders = [index % NODES for index in range(PARTITIONS)]
        self.brokers = Brokers()
        self.version = 0
        self.leader_epoch = 0
        self.topic_id: bytes | None = None
        self.stale = False

    def leader(self, partition: TopicPartition) -> PartitionMetadata | None:
        return PartitionMetadata(
            TOPIC, partition.partition, self.leaders[partition.partition], self.leader_epoch
        )

    def topic(self, name: str) -> TopicMetadata | None:
        return None if self.topic_id is None else self.described()

    def is_stale(self, name: str) -> bool:
        return self.stale

    def describe_lookup_error(self, name: str) -> str | None:
        return None

    def described(self) -> TopicMetadata:
        return topic_of(
            TOPIC,
            self.topic_id,
            tuple(PartitionMetadata(TOPIC, index, node, 0) for index, node in enumerate(self.leaders)),
        )

    def mark_stale(self, topic: str, now_ms: float) -> None: ...

    def on_leader_hint(
        self,
        partition: TopicPartition,
        leader: int,
        epoch: int,
        nodes: Iterable[Node],
        topic_id: bytes | None,
    ) -> bool:
        return False


class NotedDeliveries(TaskDeliveries):
    """Also records the rows of acknowledged batches."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__()
        self.rows = rows

    def on_acknowledged(self, batches: Iterable[WrittenBatch], *, confirmed: bool = True) -> None:
        found = list(batches)
        for batch, *_ in found:
            self.rows += numbers_in(b"".join(batch.buffer.views()))
        super().on_acknowledged(found, confirmed=confirmed)


@dataclass
class Pending:
    """A request on its way. ``response`` is set once the broker has handled it."""

    node: int
    sent: SentRequest
    views: dict[TopicPartition, list[memoryview]]
    response: ProduceResponse | None = None


@dataclass
class Model:
    """One task. Every method is one step; ``check`` raises AssertionError if an invariant is broken."""

    # The default is smaller than a batch, so that batches are split; larger than any row.
    max_message_bytes: int = 500
    # The model runs with errors.tolerance=all.
    dead_letters: DeadLetters | None = None
    now: float = 1_000.0
    next_row: int = 0
    appended: dict[TopicPartition, list[int]] = field(default_factory=dict)
    acknowledged: list[int] = field(default_factory=list)
    muted: set[TopicPartition] = field(default_factory=set)
    pending: list[Pending] = field(default_factory=list)
    zombies: list[tuple[TopicPartition, bytes]] = field(default_factory=list)
    # Groups of rows whose order among themselves no producer can keep: see ``forget``.
    unordered: list[set[int]] = field(default_factory=list)
    moved: int = 0
    closed: bool = False
    exhausted: bool = False
    metadata: Metadata = field(default_factory=Metadata)

    def __post_init__(self) -> None:
        self.pool = BufferPool(_POOL_BYTES, clock_ms=lambda: self.now)
        options = SinkOptions(
            bootstrap_servers=(),
            batch_size=_BATCH_SIZE,
            linger_ms=0,
            max_block_ms=0,
            delivery_timeout_ms=DELIVERY_TIMEOUT_MS,
            buffer_memory=_POOL_BYTES,
            compression_type=CompressionType.NONE,
            max_request_size=4_000,
            retries=1_000,
        )
        self.accumulator = RecordAccumulator(options, forced.allocator(self.pool, _BATCH_SIZE, 128))
        self.appender = RecordAppender(self.accumulator, lambda: self.now, lambda: None)
        backoff = ExponentialBackoff(100, 1_000, lambda: 0.5)
        ignored: Any = self.metadata
        self.identity = ProducerIdentity(ignored, 30_000, backoff)
        self.identity.producer_id, self.identity.producer_epoch = 7, 0
        self.brokers = Brokers(*range(NODES))
        self.metadata.brokers = self.brokers
        breaker = Breaker(None, CircuitBreakManager(ignored, 2_000.0, self.accumulator.partitions.get))
        self.deliveries = self.accumulator.deliveries = NotedDeliveries(self.acknowledged)
        self.responses = ResponseHandler(
            self.accumulator,
            self.metadata,  # type: ignore[arg-type]
            self.identity,
            backoff,
            breaker,
        )
        self.responses.dead_letters = self.dead_letters
        self.options = options
        self.partitioner = Partitioner(
            capacity=lambda *_: BatchCapacity(None, _BATCH_SIZE),
            loads=self.accumulator.queued_batches,
            ignore_keys=False,
            adaptive=False,
            random=lambda: 0.5,
        )
        names = [TopicPartition(TOPIC, index) for index in range(PARTITIONS)]
        self.logs = {partition: PartitionLog(self.max_message_bytes) for partition in names}
        # Sequences of batches that may have been written, which must keep them.
        self.pinned: dict[ProducerBatch, ProducerSequence] = {}

    # -- the task -------------------------------------------------------------------------------------

    def append(self, partitions: list[int], size: int, meanwhile: Callable[[], None]) -> None:
        """A unit with a row for each number; ``meanwhile`` runs while its batches are held."""
        numbers = range(self.next_row, self.next_row + len(partitions))
        self.next_row += len(partitions)
        rows = extract(
            _PLAN, row_batch([b"<%d>" % number + b"x" * size for number in numbers], partitions), 0
        )
        topics = {TOPIC: self.metadata.described()}
        unit = self.partitioner.order(rows, topics, 0)
        for number, partition in zip(numbers, partitions, strict=True):
            self.appended.setdefault(TopicPartition(TOPIC, partition), []).append(number)
        encode = encoder.encode

        def interrupted(*arguments: object) -> object:
            meanwhile()
            return encode(*arguments)  # type: ignore[arg-type]

        encoder.encode = interrupted  # type: ignore[assignment]
        try:
            self.appender.append(unit, lambda: None)
        except BufferExhaustedError:
            self.exhausted = True  # the task fails; the rest is never sent
        finally:
            encoder.encode = encode

    def flush(self) -> None:
        self.appender.flush()
        self.accumulator.flushing = False

    def leader(self, partition: Partition) -> Broker | None:
        known = self.metadata.leader(partition.id)
        partition.set_leader(known, self.metadata.topic_id)
        return None if known is None or known.leader < 0 else self.brokers[known.leader]

    # -- the sender -----------------------------------------------------------------------------------

    def send(self) -> None:
        self.responses.repair_sequences(self.identity)
        if self.deliveries.has_failed:
            return
        ready, _, _ = self.accumulator.ready(self.leader, self.now)
        split_off_muted(ready, self.muted)
        for broker, queues in ready.items():
            node = broker.id
            if sum(request.node == node for request in self.pending) >= 5:
                continue
            taken = fill_request(
                self.accumulator,
                broker,
                queues,
                4_000,
                lambda batch: self.identity.may_send(batch, self.now),
            )
            if not taken:
                continue
            assert not {batch.topic_partition for batch in taken} & self.muted
            ignored: Any = None
            metadata: Any = self.metadata
            sent = produce_request(self.options, metadata, 12, self.identity, taken, ignored, ignored)
            broker.send(sent, self.now)
            views = {batch.topic_partition: batch.buffer.views() for batch in taken}
            self.pending.append(Pending(node, sent, views))

    def move_unwritten(self, source: TopicPartition, *, releases: bool) -> None:
        """Rows that a partition surely does not have go to partitions that are not muted, as if no row had a
        key."""
        queue = self.accumulator.partitions.get(source)
        targets = [one for one in self.logs if one != source and one not in self.muted]
        if queue is None or not targets:
            return
        if releases:
            # As if its topic lacked the partition.
            queue.release_unwritten()
        for batch in queue.batches:
            batch.is_movable = True
        for batch in self.accumulator.move_unwritten([queue], {TOPIC: targets}).get(source, []):
            rows = numbers_in(b"".join(batch.buffer.views()))
            assert rows, "an empty batch"
            left = self.appended[source]
            self.appended[source] = [row for row in left if row not in rows]
            # From now on the order of these rows is the order in their new partition.
            self.appended.setdefault(batch.topic_partition, []).extend(rows)
            self.moved += len(rows)

    def expire(self) -> None:
        self.responses.expire(self.now)

    def expire_while_held(self) -> None:
        """The task holds batches just after the sender has found them too old."""
        self.now += DELIVERY_TIMEOUT_MS + 1
        found = self.accumulator.expired(self.now)
        expired = self.accumulator.expired
        self.accumulator.expired = lambda now_ms: found  # type: ignore[method-assign]
        try:
            self.append([*range(PARTITIONS)], 5, self.expire)
        finally:
            self.accumulator.expired = expired  # type: ignore[method-assign]

    def fail_all(self) -> None:
        self.responses.fail_all(DeliveryError("refused"))

    def close(self) -> None:
        """The task has ended, one way or the other: connections close, then everything goes back."""
        self.closed = True
        self.pending.clear()
        self.responses.abort_incomplete(include_held=True)

    # -- the wire and the brokers ---------------------------------------------------------------------

    def unhandled(self, node: int) -> Pending | None:
        """The oldest request that a broker has not read."""
        return next((r for r in self.pending if r.node == node and r.response is None), None)

    def arrive(
        self,
        node: int,
        error: int,
        *,
        append: bool,
        log_start: int = 0,
        leader: tuple[int, int] | None = None,
    ) -> None:
        """A broker handles its next request; with an error code it answers that, and appends the rows or not.

        ``leader``: the node and epoch that the response carries besides the error (KIP-951).
        """
        request = self.unhandled(node)
        if request is None:
            return
        responses = []
        for partition, views in request.views.items():
            data = b"".join(views)
            code, offset = error, -1
            if self.metadata.leaders[partition.partition] != node:
                code = NOT_LEADER
            elif not error or append:
                found, offset = self.write(partition, data)
                code = found or error
            number, errors = partition.partition, NO_RECORD_ERRORS
            responses.append(
                ProducePartitionResponse(
                    TOPIC, None, number, code, offset, -1, log_start, None, errors, leader if code else None
                )
            )
        request.response = ProduceResponse(tuple(responses), 0, ())

    def write(self, partition: TopicPartition, data: bytes) -> tuple[int, int]:
        """A broker appends; the bytes must be a batch, and of this partition's rows."""
        parsed = parse_batch(TOPIC, partition.partition, data)
        assert not isinstance(parsed, int), f"broken bytes reached {partition}: error {parsed}"
        assert set(numbers_in(data)) <= set(self.appended[partition]), (
            f"rows of another partition reached {partition}"
        )
        return self.logs[partition].append(parsed)

    def respond(self, node: int) -> None:
        request = next((r for r in self.pending if r.node == node), None)
        if request is None or request.response is None:
            return
        self.pending.remove(request)
        assert self.brokers[node].sent[0] is request.sent
        self.responses.on_produce(self.brokers[node], request.response, self.now)

    def disconnect(self, node: int, *, unread: str) -> None:
        """All requests of a broker fail. The requests that it has not read are ``lost``, or read ``late``."""
        broken = [request for request in self.pending if request.node == node]
        self.pending = [request for request in self.pending if request.node != node]
        for request in broken:
            if request.response is None and unread == "late":
                for partition, views in request.views.items():
                    self.zombies.append((partition, b"".join(views)))
            possibly_sent = unread != "unsent" or request.response is not None
            cause = ConnectionResetError("cut")
            self.responses.on_failure(self.brokers[node], cause, possibly_sent, self.now)

    def zombie(self) -> None:
        """A broker at last handles a request whose connection is long gone."""
        if self.zombies:
            self.write(*self.zombies.pop(0))

    def forget(self, partition: TopicPartition) -> None:
        """A broker forgets the producer (producer.id.expiration.ms), and takes any sequence.

        This happens only while all written rows are acknowledged and no written request is under way: against
        a broker that forgets batches which may be sent again, no producer can do anything.
        """
        written = {row for batch in self.logs[partition].batches for row in numbers_in(batch.data)}
        under_way = any(late == partition for late, _ in self.zombies)
        if written <= set(self.acknowledged) and not under_way:
            self.logs[partition].forget_producers()
            queue = self.accumulator.partitions.get(partition)
            if queue is not None and queue.is_in_flight:
                # If the broker rejects the first of these batches, it takes the second one as the first that
                # it sees. No producer can prevent that, since it sent them while the broker knew it.
                rows = [numbers_in(b"".join(batch.buffer.views())) for batch in queue.unacknowledged]
                self.unordered.append(set().union(*rows))

    def settle(self) -> None:
        """Faults end; whatever is not lost must arrive."""
        self.muted.clear()
        self.flush()
        for _ in range(300):
            if not self.accumulator.incomplete or self.deliveries.has_failed:
                return
            self.send()
            for node in range(NODES):
                while self.unhandled(node) is not None:
                    self.arrive(node, 0, append=True)
                while any(request.node == node for request in self.pending):
                    self.respond(node)
            self.check()
            # Longer than any backoff, and 300 times this shorter than delivery.timeout.ms.
            self.now += 25.0
        raise AssertionError(f"{self.accumulator.incomplete} batches never became complete")

    # -- invariants -----------------------------------------------------------------------------------

    def check(self) -> None:
        live = self.accumulator.live
        metrics = self.pool.metrics()
        assert metrics.used_bytes + metrics.heap_bytes == held_by(live), (
            "memory without an owner, or with two"
        )
        assert metrics.used_bytes <= metrics.allocated_bytes <= metrics.buffer_total_bytes
        open_ones = [batch for batch in live if not batch.terminal]
        assert self.accumulator.incomplete == len(open_ones)
        self._check_rows(open_ones)
        self._check_queues(live)
        self._check_pins(live)
        self._check_logs()

    def _check_rows(self, open_ones: Collection[ProducerBatch]) -> None:
        if self.exhausted:
            return
        counts = self.deliveries.counts()
        ended = counts.records + counts.failed
        known = ended + sum(batch.record_count for batch in open_ones)
        assert known == self.next_row, f"{known} of {self.next_row} rows are accounted for"

    def _check_queues(self, live: Collection[ProducerBatch]) -> None:
        for queue in self.accumulator.partitions.values():
            ordinals = [batch.ordinal for batch in queue.batches]
            assert ordinals == sorted(ordinals), "a retry left its place"
            assert len(set(ordinals)) == len(ordinals)
            mine = [batch for batch in live if batch.topic_partition == queue.id]
            if not self.closed:
                assert queue.in_flight == sum(batch.in_request for batch in mine)
            waiting = {BatchState.OPEN, BatchState.CLOSED, BatchState.SEALED}
            assert {b for b in mine if b.state in waiting} == set(queue.batches), "a batch is in no queue"

    def _check_pins(self, live: Collection[ProducerBatch]) -> None:
        for batch in live:
            if batch.possibly_written and not batch.terminal:
                assert self.pinned.setdefault(batch, batch.sequence) == batch.sequence, (
                    "a sequence changed after a possible write"
                )
            else:
                # That it was written may have been disproved since.
                self.pinned.pop(batch, None)

    def _check_logs(self) -> None:
        written: set[int] = set()
        for partition, log in self.logs.items():
            rows = [row for batch in log.batches for row in numbers_in(batch.data)]
            assert len(set(rows)) == len(rows), f"doubled rows in {partition}: {rows}"
            places = {row: place for place, row in enumerate(self.appended.get(partition, ()))}
            assert places.keys() >= set(rows), f"rows in {partition} that had left it"
            for group in self.unordered:
                here = group & places.keys()
                places |= dict.fromkeys(here, min(map(places.__getitem__, here), default=0))
            in_order = rows == sorted(rows, key=places.__getitem__)
            assert in_order, f"order lost in {partition}: {rows}"
            written |= set(rows)
        assert len(set(self.acknowledged)) == len(self.acknowledged), "rows acknowledged twice"
        assert set(self.acknowledged) <= written, "acknowledged rows that no log has"

    def check_end(self) -> None:
        """After ``settle`` or ``close``: no row is lost without an error, and no memory is held."""
        if not self.deliveries.has_failed and not self.exhausted and not self.closed:
            for partition, rows in self.appended.items():
                log = [row for batch in self.logs[partition].batches for row in numbers_in(batch.data)]
                assert sorted(log) == sorted(rows), f"{partition}: {log} is not {rows}"
            assert sorted(self.acknowledged) == list(range(self.next_row))
            assert self.identity.settled
        if not self.closed:
            self.close()
        self.check()
        metrics = self.pool.metrics()
        assert metrics.used_bytes == metrics.heap_bytes == 0, "memory was not given back"
        assert metrics.full_strategy_bytes == self.pool.open_batches == 0
        assert not self.accumulator.incomplete


def held_by(batches: Iterable[ProducerBatch]) -> int:
    """Bytes of memory; the pieces of a batch share its own."""
    buffers = {}
    for batch in batches:
        own = batch.buffer
        shared = own._shared if isinstance(own, PieceBuffer) else None
        buffer = own if shared is None else shared.buffer
        buffers[id(buffer)] = buffer.capacity
    return sum(buffers.values())
