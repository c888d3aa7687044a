"""The sender thread: it moves batches from the accumulator to brokers and handles their responses.

It owns the producer's connections to brokers. Other threads wake it with ``NetworkClient.wakeup``, which ends
the poll; it is the only method of ``NetworkClient`` that they call.

``run_once`` is one pass. It does whatever is due, in this order:

1. It fails batches that have expired, and repairs sequences.
2. It runs the circuit breaker.
3. It refreshes metadata.
4. It requests a producer id if one is needed and missing. Otherwise, unless the task has failed, it sends one
   Produce request to each broker that has ready batches.

The pass collects when each step is next due. It then polls the network until the first of these times, and
the network calls the handlers of the responses that arrive (``ResponseHandler``).
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence, Set
from functools import partial

from kafka_sink.breaker.breaker import Breaker
from kafka_sink.clock import MAX_POLL_MS, RANDOM, Clock, ExponentialBackoff
from kafka_sink.cluster.broker import Broker, BrokerCounts, unavailable, update_unreachable
from kafka_sink.cluster.metadata_requests import MetadataRequests
from kafka_sink.cluster.partition import Partition, ProducerBatch
from kafka_sink.cluster.producer_metadata import ProducerMetadata
from kafka_sink.dead_letters.rejected_rows import DeadLetters
from kafka_sink.engine.accumulator import RecordAccumulator
from kafka_sink.engine.identity import ProducerIdentity
from kafka_sink.engine.produce_requests import fill_request, probe_brokers, produce_request
from kafka_sink.engine.responses import ResponseHandler
from kafka_sink.engine.telemetry import ClientTelemetry
from kafka_sink.errors import BrokerVersionError, ClusterChangedError, KafkaSinkError, is_final
from kafka_sink.model import NO_LEADER, CompressionType, TopicPartition
from kafka_sink.network.client import NetworkClient
from kafka_sink.network.produce import FIRST_VERSION_WITH_ZSTD
from kafka_sink.network.requests import MetadataResponse
from kafka_sink.printable import first_of
from kafka_sink.rows.partitioner import Choices, choices_of

_log = logging.getLogger(__name__)
# With how many brokers a task that writes in a transaction is connected before it has rows for them.
_EARLY_CONNECTIONS = 5


class Sender(threading.Thread):
    """The thread that sends batches. It is a daemon, so that it cannot keep a killed task's process alive.

    It runs until ``close`` or ``abort``, which other threads call. These methods set flags and the error that
    ends the thread (``_end_cause``), and wake the thread. The task's thread also calls ``begin`` for each
    task, which sets all counts to zero and replaces ``dead_letters``. Other threads read ``unavailable``,
    ``broker_metrics`` and ``is_reusable``. While the sender's thread runs, it writes everything else.
    """

    def __init__(
        self,
        accumulator: RecordAccumulator,
        cluster: ProducerMetadata,
        network: NetworkClient,
        identity: ProducerIdentity | None,
        breaker: Breaker,
        clock_ms: Clock,
        telemetry: ClientTelemetry | None = None,
    ) -> None:
        super().__init__(name="kafka-chunked-sender", daemon=True)
        options = accumulator.options
        self.max_poll_ms = MAX_POLL_MS
        adapts = options.partitioner_adaptive_partitioning_enable
        self._availability_timeout_ms = options.partitioner_availability_timeout_ms if adapts else 0
        # The ids of brokers that keyless rows should avoid (KIP-794). The sender's thread replaces the set
        # and never changes it, so the task's thread reads it without a lock.
        self.unavailable: Set[int] = frozenset()
        self._options = options
        self._is_zstd = options.compression_type is CompressionType.ZSTD
        self._accumulator = accumulator
        self._cluster = cluster
        self._network = network
        self._identity = identity
        self._clock_ms = clock_ms
        self._breaker = breaker
        self._deliveries = accumulator.deliveries
        self._telemetry = telemetry
        backoff = ExponentialBackoff(options.retry_backoff_ms, options.retry_backoff_max_ms, RANDOM.random)
        self._responses = ResponseHandler(
            accumulator, cluster, identity, backoff, breaker, network.connection_errors
        )
        self._metadata = MetadataRequests(options, cluster, network, self._on_metadata)
        if identity is not None:
            identity.fail = self._responses.fail_all
        network.on_connected, network.on_disconnected = self._on_connected, self._on_disconnected
        self._connects_early = False
        self._closing = False
        self._aborting = False
        self._task_ended = False
        self._known_version = -1
        # Whether brokers have a wait recorded (`_record_waits`), whose end has to be recorded as well.
        self._has_waits = False
        # The error that ends the thread, which may happen before the first task begins. `_record_end_cause`
        # writes it before it fails the current task, and `begin` reads it after it has reset the counts. In
        # the other order a task that begins at that moment would miss the error and wait for ever.
        self._end_cause: Exception | None = None

    def broker_metrics(self, now_ms: float) -> dict[int, BrokerCounts]:
        """The metrics of each broker this task has sent to, by broker id."""
        brokers = list(self._cluster.brokers.values())
        metrics = {broker.id: broker.metrics(now_ms) for broker in brokers}
        return {node_id: counts for node_id, counts in metrics.items() if counts.requests}

    def begin(self, dead_letters: DeadLetters | None = None) -> None:
        """Begin a new task: its counts start at zero. It has failed already if the thread has."""
        self._responses.dead_letters = dead_letters
        self._deliveries.begin()
        for broker in list(self._cluster.brokers.values()):
            broker.counts = BrokerCounts()
        if self._options.exactly_once:
            self._connects_early = True
            self._network.wakeup()
        # This must come last: see `_end_cause`.
        if self._end_cause is not None:
            self._deliveries.on_failed(None, 0, self._end_cause)

    def run(self) -> None:
        """Run passes until the thread is closed. An exception fails the task, so that a bug never looks like
        a slow broker."""
        try:
            while not self._closing:
                self.run_once(self._clock_ms())
            if self._telemetry is not None and not self._aborting:
                self._telemetry.terminate(self._clock_ms())
        except Exception as error:  # noqa: BLE001 - the task that waits must fail with any of them
            if isinstance(error, KafkaSinkError):
                self._record_end_cause(error)
            else:
                _log.exception("the sender stopped on an unexpected error")
                self._record_end_cause(KafkaSinkError(f"the sender stopped: {error!r}"))
        finally:
            self._network.close(abort=self._aborting)
            # If the task has not ended, it may still write into the batches that it holds.
            self._responses.abort_incomplete(include_held=self._task_ended)
            self._breaker.close()

    def run_once(self, now_ms: float) -> None:
        """Run one pass. It blocks in the network poll until the next pass may have something to do."""
        responses = self._responses
        if now_ms >= responses.expires_ms:
            responses.expire(now_ms)
        # The times after which another pass may have something to do.
        delays = [self.max_poll_ms, responses.expires_ms - now_ms]
        if responses.awaiting_dead_letters:
            responses.resume_skipping()
        identity = self._identity
        if identity is not None and identity.needing_repair:
            responses.repair_sequences(identity)
        if self._cluster.version != self._known_version:
            self._refresh_nodes()
        # The breaker also runs before there is a producer id, because a task's first rows wait until the
        # coordinator's mutes are known.
        breaker = self._breaker
        if breaker.is_due(now_ms):
            breaker.run(now_ms)
            self._network.avoided = breaker.avoided.nodes
            delays.append(probe_brokers(breaker, self._cluster, self._network, self._options, now_ms))
        due_ms = self._cluster.next_due_ms
        delays.append(due_ms - now_ms if now_ms < due_ms else self._metadata.refresh(now_ms))
        waits_out_acknowledgements = False
        if identity is not None and not identity.ready:
            delays += identity.refresh(now_ms), self._find_brokers(now_ms)
        elif not self._deliveries.has_failed:
            # A failed task sends nothing more: Spark runs it again, and would write rows twice.
            delay, waits_out_acknowledgements = self._send_ready(now_ms, breaker.avoided)
            delays.append(delay)
            if identity is not None and identity.adds_partitions:
                delays.append(identity.refresh(now_ms))
        # This must come after sending, which may move the breaker's deadline forward.
        delays.append(breaker.delay_ms(now_ms))
        if self._telemetry is not None and self._telemetry.is_offered:
            delays.append(self._telemetry.refresh(now_ms))
        self._poll(now_ms + max(min(delays), 0.0), now_ms, waits_out_acknowledgements)

    def _poll(self, until_ms: float, now_ms: float, waits_out_acknowledgements: bool) -> None:
        """Wait for the network's events. With ``waits_out_acknowledgements`` an acknowledgement does not end
        the wait: no batch became sendable, and a pass costs nearly as much as a request."""
        responses = self._responses
        while now_ms <= until_ms:
            responses.acknowledgements = 0
            events = self._network.poll(until_ms - now_ms, now_ms)
            only_acknowledged = 0 < events == responses.acknowledgements and not self._network.woken
            if not (waits_out_acknowledgements and only_acknowledged) or self._breaker.has_probe_due():
                return
            # The response may have brought the breaker's deadline forward.
            now_ms = self._clock_ms()
            until_ms = min(until_ms, now_ms + self._breaker.delay_ms(now_ms))

    def abort(self, cause: Exception) -> None:
        """Stop sending at once, and drop the bytes in the kernel's socket buffers. Any thread may call it.
        The task fails with this cause or an earlier one."""
        self._record_end_cause(cause)
        self._aborting = True
        self._closing = True
        self._network.wakeup()

    def _record_end_cause(self, cause: Exception) -> None:
        self._end_cause = self._end_cause or cause
        self._deliveries.on_failed(None, 0, cause)

    def close(self, timeout_ms: float, *, abort: bool = False) -> None:
        """End the thread. Batches without a response fail. The task must append no more.

        If the thread does not end within ``timeout_ms``, it returns all memory when it ends. ``abort`` drops
        the bytes in the kernel's socket buffers.
        """
        self._aborting |= abort
        self._task_ended = True
        self._closing = True
        self._network.wakeup()
        if self.is_alive():
            self.join(timeout_ms / 1000)
        if not self.is_alive():
            # The thread may have ended by itself while the task held batches.
            self._responses.abort_incomplete(include_held=True)

    @property
    def is_reusable(self) -> bool:
        """Whether the task ended well and left nothing behind, so that another task may use this sender."""
        is_unfinished = self._accumulator.incomplete or self._accumulator.live
        if not self.is_alive() or self._deliveries.has_failed or is_unfinished:
            return False
        return self._identity is None or self._identity.settled

    def _refresh_nodes(self) -> None:
        self._known_version = self._cluster.version
        nodes = self._cluster.nodes()
        self._network.set_addresses(nodes.values())
        for node in nodes.values():
            self._cluster.broker(node.id).node = node
        self._cluster.connect_brokers()
        # Every listed broker has a connection. The other brokers are dropped, unless they are still in use:
        # a misbehaving peer could name new brokers in every response.
        kept = {*self._network.connections, *self._breaker.avoided.nodes}
        for broker in list(self._cluster.brokers.values()):
            if broker.id not in kept and not broker.sent and not broker.counts.requests:
                del self._cluster.brokers[broker.id]

    def _leader(self, partition: Partition) -> Broker | None:
        topic, info = self._cluster.topic(partition.id.topic), self._cluster.leader(partition.id)
        partition.set_leader(info, None if topic is None else topic.topic_id)
        return None if info is None or info.leader < 0 else self._cluster.broker(info.leader)

    def _send_ready(self, now_ms: float, muted: Container[TopicPartition]) -> tuple[float, bool]:
        """Send one request to each broker that has ready batches and accepts one. Return the delay until more
        batches may be sendable, and whether only time, not a response, can make them so."""
        # The version is read first: if another thread changes the metadata meanwhile, the version differs in
        # the next pass.
        version = self._cluster.version
        ready, leaderless, delay = self._accumulator.ready(self._leader, now_ms, version)
        muted_partitions = split_off_muted(ready, muted) if muted else {}
        # With one request in flight at a time, a response can free the next batch although none is ready now.
        # And while partitions are muted, each response may end a mute.
        only_time_helps = self._options.max_in_flight_requests_per_connection > 1 and not muted
        if not (ready or muted_partitions or leaderless or self._has_waits or self._responses.missing):
            return delay, only_time_helps
        delays = [delay]
        blocked = []
        for broker, partitions in ready.items():
            if not broker.accepts(now_ms):
                blocked.append(broker)
                delays.append(broker.delay_ms(now_ms))
            elif not self._produce(broker, partitions, now_ms):
                only_time_helps = False
                delays.append(broker.slow_starts.pause_ms(now_ms))
            elif any(partition.batches for partition in partitions):
                # More batches may be ready. A pass without any would cost nearly as much as a request.
                delays.append(0.0)
        if blocked or self._has_waits:
            self._record_waits(ready, blocked, now_ms)
        if blocked or leaderless or muted_partitions or self._responses.missing:
            waiting = [*muted_partitions.items(), *((broker, ready[broker]) for broker in blocked)]
            delays.append(self._refresh_stale(leaderless, waiting, now_ms))
        for broker, partitions in muted_partitions.items():
            delays.append(self._probe(broker, partitions, now_ms))
        if (muted or self._responses.missing) and self._move_unwritten(
            muted_partitions, leaderless, muted, now_ms
        ):
            delays.append(0.0)
        return min(delays), only_time_helps and not (blocked or leaderless or self._has_waits)

    def _refresh_stale(
        self,
        leaderless: Sequence[Partition],
        waiting: Iterable[tuple[Broker, Sequence[Partition]]],
        now_ms: float,
    ) -> float:
        """Request metadata for partitions without a reachable leader, since only metadata shows which broker
        leads them next. Return the delay until the next request is allowed."""
        unknown = {partition.id.topic for partition in leaderless}
        if unknown or self._responses.missing:
            self._responses.expire_missing(unknown, now_ms)
        gone = (partitions for broker, partitions in waiting if broker.is_gone)
        stale = unknown.union(partition.id.topic for partitions in gone for partition in partitions)
        for topic in stale:
            self._cluster.mark_stale(topic, now_ms)
        return self._metadata.refresh(now_ms) if stale else math.inf

    def _move_unwritten(
        self,
        muted_partitions: Mapping[Broker, Sequence[Partition]],
        leaderless: Sequence[Partition],
        muted: Container[TopicPartition],
        now_ms: float,
    ) -> bool:
        """Move keyless rows that were surely not written from muted partitions, and from partitions that
        their topic lacks, to other ones. Return whether there were any.

        A task ends once all of its rows are acknowledged. Rows that were appended to a partition before its
        broker was found to be frozen would wait for that broker, although any other partition will do. The
        rows lose their place in the order, so they stay if the other partitions fail as well. A batch that
        may be sent as a probe also stays, even while there is no connection to its broker yet.
        """
        may_probe = self._breaker.task_mutes.may_probe
        missing = self._responses.missing
        sources = [partition for partition in leaderless if partition.id in muted or partition in missing]
        for partitions in muted_partitions.values():
            sources += [partition for partition in partitions if not may_probe(partition.id)]
        topics = {partition.id.topic for partition in sources}
        targets = {topic: self._targets(topic, muted, now_ms) for topic in topics}
        moved = self._accumulator.move_unwritten(sources, targets)
        if moved:
            first = next(iter(moved))
            reason = self._breaker.explain(first) or self._responses.obstacle(first)
            self._deliveries.count(moved=log_moves(moved, reason or "their target is muted"))
        return bool(moved)

    def _targets(self, topic: str, muted: Container[TopicPartition], now_ms: float) -> list[TopicPartition]:
        """The partitions of a topic that can take rows now: only those of connected brokers, if there are
        any.

        A muted partition that is open to new rows takes one batch as its probe, so it is not a target. Its
        queue is empty, and it would be given many of the moved batches.
        """
        known = self._cluster.topic(topic)
        connected = {broker.id for broker in self._cluster.brokers.values() if broker.is_connected}
        probes = self._breaker.avoided.probes
        choices = Choices(()) if known is None else choices_of(known, (), muted, connected, probes)
        names = [TopicPartition(topic, number) for number in choices.available]
        written = self._accumulator.partitions
        failing = {name for name in names if name in written and written[name].outcomes.is_failing(now_ms)}
        # `choices_of` also returns muted partitions and probes if no other partition is available.
        return [name for name in names if not (name in muted or name in probes or name in failing)]

    def _record_waits(
        self, ready: Mapping[Broker, Sequence[Partition]], blocked: Collection[Broker], now_ms: float
    ) -> None:
        """Record which brokers batches wait for."""
        for broker in blocked:
            self._breaker.task_mutes.on_waiting(partition.id for partition in ready[broker])
        brokers = self._cluster.brokers.values()
        # The other blocked brokers are connected, but their in-flight window is full or they throttle us.
        unreachable = [broker for broker in blocked if not broker.is_connected]
        update_unreachable(brokers, unreachable, now_ms)
        if unreachable:
            self._breaker.on_unreachable(unreachable, now_ms)
        timeout_ms = self._availability_timeout_ms
        if timeout_ms > 0:
            accepting = [broker for broker in ready if broker not in blocked]
            self.unavailable = unavailable(brokers, blocked, accepting, timeout_ms, now_ms)
        self._has_waits = bool(unreachable) or any(broker.waits_since_ms is not None for broker in brokers)

    def _connect_leaders(self, now_ms: float) -> None:
        """Connect to some leaders of known topics, while the task gets its producer id. Only once for each
        task: connections of an idle producer are closed after a while, and stay closed."""
        self._connects_early = False
        topics = self._cluster.snapshot(now_ms).topics
        leaders = dict.fromkeys(place.leader for topic in topics for place in topic.metadata.partitions)
        for leader in list(leaders)[:_EARLY_CONNECTIONS]:
            connection = self._network.connections.get(leader)
            if connection is not None and leader != NO_LEADER:
                self._network.is_ready(connection, now_ms)

    def _find_brokers(self, now_ms: float) -> float:
        """Request metadata if no known broker can be reached, because only known brokers are asked for a
        producer id. Return the delay until the next request is allowed."""
        if self._connects_early:
            self._connect_leaders(now_ms)
        known, muted = self._cluster.nodes(), self._breaker.avoided.nodes
        if not known or not all(node in muted or self._cluster.broker(node).is_gone for node in known):
            return math.inf
        for topic in self._cluster.names():
            self._cluster.mark_stale(topic, now_ms)
        return self._metadata.refresh(now_ms)

    def _probe(self, broker: Broker, partitions: Sequence[Partition], now_ms: float) -> float:
        """Send one batch of a muted partition as a probe. Return the delay until the next check."""
        for partition in partitions:
            if not self._breaker.task_mutes.may_probe(partition.id):
                continue
            if not broker.accepts(now_ms):
                return broker.delay_ms(now_ms)
            if self._produce(broker, [partition], now_ms):
                return 0.0
        return math.inf

    def _produce(self, broker: Broker, partitions: Sequence[Partition], now_ms: float) -> bool:
        """Send one request if a batch may be sent. Return whether one was sent."""
        connection, identity = broker.connection, self._identity
        if self._aborting or connection is None:
            return False
        if self._is_zstd and connection.protocol.produce_version < FIRST_VERSION_WITH_ZSTD:
            self._responses.fail_all(
                BrokerVersionError(
                    f"kafka.compression.type=zstd needs Produce requests of version "
                    f"{FIRST_VERSION_WITH_ZSTD}, but broker {broker.node or broker.id} supports only "
                    f"version {connection.protocol.produce_version}: set lz4, snappy, gzip or none"
                )
            )
            return False
        may_send: Callable[[ProducerBatch], bool] = partial(self._may_send, now_ms=now_ms)
        if identity is not None and not self._responses.awaiting_dead_letters:
            may_send = partial(identity.may_send, now_ms=now_ms)
        if broker.slow_starts:
            may_send = broker.slow_starts.limited(may_send, broker.batches_in_flight(), now_ms)
        taken = fill_request(self._accumulator, broker, partitions, self._options.max_request_size, may_send)
        if not taken:
            return False
        self._cluster.pinned = True
        request = produce_request(
            self._options,
            self._cluster,
            connection.protocol.produce_version,
            identity,
            taken,
            partial(self._responses.on_produce, broker),
            partial(self._responses.on_failure, broker),
        )
        broker.send(request, now_ms)
        queue_ms = [now_ms - batch.created_ms for batch in taken if batch.attempts == 1]
        self._deliveries.on_sent(queue_ms)
        if self._telemetry is not None and self._telemetry.is_offered:
            self._telemetry.on_sent(queue_ms)
        self._breaker.on_sent(broker, taken, now_ms)
        return True

    def _may_send(self, batch: ProducerBatch, now_ms: float) -> bool:
        """Whether the batch waits for no dead letters, and its partition's order permits sending it."""
        if batch in self._responses.awaiting_dead_letters:
            return False
        return self._identity is None or self._identity.may_send(batch, now_ms)

    def _on_metadata(self, topics: tuple[str, ...], response: MetadataResponse, now_ms: float) -> None:
        try:
            switched = self._cluster.on_response(response.update, topics, now_ms)
        except ClusterChangedError as error:
            self._responses.fail_all(error)
            return
        if not switched:
            return
        self._breaker.on_other_cluster(now_ms)
        if self._identity is not None:
            # In the cluster that responds now, another producer may have this id.
            self._identity.forget()

    def _on_connected(self, node_id: int, setup_ms: float, now_ms: float) -> None:
        broker = self._cluster.broker(node_id)
        broker.setup_ms, broker.probed_ms = setup_ms, now_ms
        self._breaker.on_connected(broker, now_ms)
        if self._telemetry is not None:
            self._telemetry.on_connected(node_id, now_ms)

    def _on_disconnected(self, node_id: int, cause: Exception, was_used: bool, now_ms: float) -> None:
        """Fail the task after a final error of a broker that the metadata lists, of a connection with
        requests in flight, or of the last bootstrap address that could accept this client."""
        if not is_final(cause):
            return
        bootstrap = [connection.last_error for connection in self._network.bootstrap]
        can_still_connect = any(error is None or not is_final(error) for error in bootstrap)
        if node_id >= 0 or was_used or not can_still_connect:
            self._responses.fail_all(cause)


def log_moves(moved: Mapping[TopicPartition, Sequence[ProducerBatch]], reason: str) -> int:
    """Log the batches that moved to other partitions. Return their number of rows."""
    batches = [batch for of_partition in moved.values() for batch in of_partition]
    rows = sum(batch.rows for batch in batches)
    dead_letters = sum(batch.record_count for batch in batches if batch.dead_letters)
    what = [f"{rows} rows without a key"] if rows or not dead_letters else []
    what += [f"{dead_letters} dead letters"] if dead_letters else []
    _log.warning(
        "moved %s (not written yet) from %s to other partitions: %s",
        " and ".join(what),
        first_of(moved),
        reason,
    )
    return rows


def split_off_muted(
    ready: dict[Broker, list[Partition]], muted: Container[TopicPartition]
) -> dict[Broker, list[Partition]]:
    """Remove the muted partitions from ``ready``, and return them by broker."""
    muted_partitions: dict[Broker, list[Partition]] = {}
    for broker, partitions in list(ready.items()):
        if queues := [partition for partition in partitions if partition.id in muted]:
            muted_partitions[broker] = queues
            ready[broker] = [partition for partition in partitions if partition.id not in muted]
            if not ready[broker]:
                del ready[broker]
    return muted_partitions
