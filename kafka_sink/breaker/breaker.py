"""Between sender and breaker class: calls the class, applies its mutes and those of other tasks. No I/O.

``CircuitBreakManager`` is KIP-693's: what a class mutes with, and what it asks.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Set
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import TYPE_CHECKING

from kafka_sink.breaker.failure_rate import FailureRateCircuitBreaker, Health, has_response, health_of
from kafka_sink.breaker.interface import PartitionCircuitBreaker, ProducerStatusContext
from kafka_sink.breaker.mutes import (
    NO_EVIDENCE,
    Evidence,
    Mute,
    MuteChange,
    MutedPartitions,
    Target,
    target_of,
)
from kafka_sink.breaker.task_mutes import TaskMutes
from kafka_sink.cluster.broker import Broker
from kafka_sink.model import NO_LEADER, PartitionMetadata, TopicPartition
from kafka_sink.printable import one_line

if TYPE_CHECKING:
    from kafka_sink.cluster.metadata import ClusterMetadata
    from kafka_sink.cluster.partition import Partition
    from kafka_sink.coordinator.breaker import BreakerChannel
    from kafka_sink.engine.batch import ProducerBatch

_log = logging.getLogger(__name__)
# A log line names a broker's first partitions only.
_MAX_NAMED_PARTITIONS = 5
# How often a task that waits for the coordinator's mutes checks whether it was lost itself.
_CHECK_INTERVAL_MS = 50.0


class CircuitBreakManager:
    """Handed to a breaker class, whose calls come on the sender's thread.

    ``mute`` and ``unmute`` may be called on any thread. A call on another thread is queued and takes effect
    in the sender's next pass. ``partition`` finds one of the producer's.
    """

    def __init__(
        self,
        cluster: ClusterMetadata,
        retry_interval_ms: float,
        partition: Callable[[TopicPartition], Partition | None],
    ) -> None:
        self.task_mutes = TaskMutes(cluster, retry_interval_ms, partition)
        self.partition = partition
        # What the producer knows of each, and of a partition's leader.
        self.brokers: Mapping[int, Broker] = cluster.brokers
        self.leader = cluster.leader
        # Of brokers that the sender has forgotten, see ``rows``.
        self.rows_of_forgotten = 0
        # Brokers that keyless rows avoid for the moment, see mute_congested. Any thread may read it.
        self.congested: Set[int] = frozenset()
        self._cluster = cluster
        # The answer of ``available_nodes``, and the versions that it is for.
        self._available: tuple[tuple[int, int], Set[int]] = (-1, -1), frozenset()
        # The sender's thread, once it has run; mutes and unmutes by other threads.
        self._owner: int | None = None
        self._queued: deque[Callable[[], None]] = deque()
        # Called after each mute and unmute, on its thread.
        self.on_call: Callable[[], None] = lambda: None

    # -- the KIP's methods --------------------------------------------------------------------------

    def mute(
        self,
        target: int | TopicPartition,
        reason: str = "muted by the breaker class",
        evidence: Evidence = NO_EVIDENCE,
    ) -> None:
        """Mute a partition, or a broker with the partitions that it leads at any time.

        Raises ValueError for anything else.
        """
        target = target_of(target)
        self._on_sender(partial(self.task_mutes.mute, target, one_line(str(reason)), evidence, own=True))

    def unmute(self, target: int | TopicPartition, reason: str = "unmuted by the breaker class") -> None:
        """End a mute. Raises ValueError for a target that cannot be muted."""
        target = target_of(target)
        self._on_sender(partial(self.task_mutes.unmute, target, one_line(str(reason)), own=True))

    def _on_sender(self, change: Callable[[], None]) -> None:
        if self._owner in (None, threading.get_ident()):
            change()
        else:
            self._queued.append(change)
        self.on_call()

    def available_partitions_for_topic(self, topic: str) -> list[PartitionMetadata]:
        """Partitions that have a leader and are not muted."""
        found = self.task_mutes.partitions(topic)
        return [info for name, info in found if info.leader >= 0 and not self.is_muted(name)]

    def muted_partitions_for_topic(self, topic: str) -> list[PartitionMetadata]:
        """Partitions that are muted, by themselves or with the broker that leads them, or led them last."""
        return [info for name, info in self.task_mutes.partitions(topic) if self.is_muted(name)]

    def available_partitions_for_node(self, node_id: int) -> dict[str, list[PartitionMetadata]]:
        """By topic, the partitions that a broker leads and that are not muted."""
        return self._of_node(node_id, muted=False)

    def muted_partitions_for_node(self, node_id: int) -> dict[str, list[PartitionMetadata]]:
        """By topic, the muted partitions that a broker leads, or led last."""
        return self._of_node(node_id, muted=True)

    def close(self) -> None:
        """Unmute everything; later mutes have no effect."""
        self.task_mutes.close()
        self.congested = frozenset()

    # -- beyond the KIP -----------------------------------------------------------------------------

    def is_muted(self, target: Target) -> bool:
        """Whether a broker is muted, or a partition by itself or with its leader."""
        if isinstance(target, TopicPartition):
            return bool(self.task_mutes.covering(target))
        return target in self.task_mutes.mutes

    @property
    def rows(self) -> int:
        """Rows whose first attempt has ended, over the producer's life."""
        return self.rows_of_forgotten + sum(broker.rows for broker in self.brokers.values())

    def available_nodes(self) -> Set[int]:
        """Brokers that lead a partition that is not muted."""
        versions = self.task_mutes.version, self._cluster.version
        if versions != self._available[0]:
            leaders = {info.leader for name, info in self.task_mutes.partitions() if not self.is_muted(name)}
            self._available = versions, frozenset(leaders) - {NO_LEADER}
        return self._available[1]

    def ask(self, node_id: int) -> None:
        """Send a broker a request without rows; ``Broker.probed_ms`` has its response."""
        if (broker := self.brokers.get(node_id)) is not None:
            broker.is_to_be_asked = True

    def mute_congested(self, node_id: int) -> None:
        """Keyless rows of this producer avoid a broker until unmute_congested. This is no trip and no probe
        follows."""
        self.congested |= {node_id}

    def unmute_congested(self, node_id: int) -> None:
        if node_id in self.congested:
            self.congested -= {node_id}

    def _of_node(self, node_id: int, *, muted: bool) -> dict[str, list[PartitionMetadata]]:
        found: dict[str, list[PartitionMetadata]] = {}
        for partition, info in self.task_mutes.partitions():
            if self.task_mutes.leader_id(partition) == node_id and self.is_muted(partition) is muted:
                found.setdefault(partition.topic, []).append(info)
        return found

    # -- for the sender: once in each pass ----------------------------------------------------------

    def refresh(self) -> MutedPartitions:
        """Run what other threads called, and publish what is muted now. The calling thread is the sender's
        from now on."""
        self._owner = threading.get_ident()
        for _ in range(len(self._queued)):
            self._queued.popleft()()
        return self.task_mutes.publish()


class Breaker:
    """Follows a breaker class and the coordinator, and does nothing while nothing is wrong.

    While ``is_busy`` is false, ``due_ms`` lies ahead and every response comes within ``prompt_ms``, the
    sender calls nothing of it. Failures are always reported to it. Whoever sends a request, or sees that a
    broker cannot be reached, lowers ``due_ms`` to ``prompt_ms`` from then. It is busy as long as something is
    muted or suspicious, and always for a user's class. A class that raises is switched off for this producer;
    probes then end what it had muted.
    """

    def __init__(self, breaker: PartitionCircuitBreaker | None, manager: CircuitBreakManager) -> None:
        self.manager = manager
        self.task_mutes = manager.task_mutes
        self.is_off = breaker is None
        self._breaker = breaker
        self._brokers = manager.brokers
        self._shared: BreakerChannel | None = None
        self._alone = True
        # Cleared where a task begins before the coordinator's mutes have come: its first rows then wait for
        # them. Set by the sender's thread once ``view`` has them.
        self.is_current = threading.Event()
        self.is_current.set()
        self._context = ProducerStatusContext(brokers=manager.brokers)
        # ``TaskMutes.view`` as of the last pass, () where nothing is muted: what keyless rows avoid. Any
        # thread may read it; the sender's replaces it.
        self.view: Container[TopicPartition] = ()
        # The same of ``MutedPartitions.probes``.
        self.probes: Mapping[TopicPartition, float] = {}
        # No latency up to this is suspicious, and no silence.
        self.prompt_ms = math.inf
        # A user's class hears of each batch, as in the KIP.
        self._tells_all = breaker is not None and type(breaker) is not FailureRateCircuitBreaker
        if isinstance(breaker, FailureRateCircuitBreaker):
            self.prompt_ms = breaker.prompt_ms
            self._tells_all |= breaker.needs_every_call
        # Whether it is to be called for all that happens, and in each pass. Any thread may set it.
        self.is_busy = True
        # Otherwise, when a pass has to call it.
        self.due_ms = -math.inf
        manager.on_call = self.call
        if breaker is not None:
            self._call(breaker.set_circuit_break_manager, manager)

    def call(self) -> None:
        """The sender's next pass is to run it. Any thread."""
        self.is_busy = True

    # -- the task's thread --------------------------------------------------------------------------

    def muted(self, limit: int) -> list[tuple[Mute, float]]:
        """At most ``limit`` mutes that the sender follows, with the milliseconds since. Any thread."""
        mutes = list(self.task_mutes.mutes.values())[:limit] if self.task_mutes.view else []
        return [(mute, max(0.0, self._context.now - mute.since_ms)) for mute in mutes]

    def share(self, channel: BreakerChannel | None) -> None:
        """Work with a coordinator, or alone, from the sender's next pass on. Any thread."""
        self._shared = channel
        if channel is None:
            # The last task may have had no rows, and so not waited for it.
            self.is_current.set()
        self.is_busy = True

    def begin(self) -> None:
        """A new task begins. It must know what others have muted before its rows get partitions."""
        shared = self._shared
        # Between tasks the sender goes on applying messages, but makes no pass of its own when a task begins.
        if shared is not None and not shared.is_current:
            self.is_current.clear()
            self.is_busy = True

    def await_mutes(self, timeout_ms: float, check: Callable[[], None]) -> None:
        """Return once ``view`` has the coordinator's mutes, or after ``timeout_ms``.

        ``check`` raises if the task is lost.
        """
        left_ms = timeout_ms
        while left_ms > 0 and not self.is_current.is_set():
            check()
            self.is_current.wait(min(left_ms, _CHECK_INTERVAL_MS) / 1000)
            left_ms -= _CHECK_INTERVAL_MS
        # A late coordinator is not waited for again. Its mutes hold from when they come.
        self.is_current.set()

    def explain(self, partition: TopicPartition) -> str | None:
        """Why a partition is muted, for messages; None if it is not. Any thread."""
        covering = self.task_mutes.covering(partition) if self.task_mutes.mutes else []
        if not covering:
            return None
        mute = covering[0]
        age_s = (self._context.now - mute.since_ms) / 1000
        since = datetime.now(timezone.utc) - timedelta(seconds=age_s)
        known = not mute.last_error or mute.last_error in mute.reason
        last = "" if known else f"; last error: {mute.last_error}"
        return (
            f"the circuit breaker has muted {self._name(mute.target)} since {since:%H:%M:%S} UTC "
            f"({age_s:.1f} s): {mute.reason}{last}"
        )

    def _name(self, target: Target) -> str:
        if isinstance(target, int):
            return f"broker {self._broker(target)}"
        info = self.manager.leader(target)
        return f"{target}, led by {self._broker(info.leader)}" if info and info.leader >= 0 else f"{target}"

    def _with_partitions(self, node_id: int) -> str:
        mutes = self.task_mutes
        names = [str(name) for name, _ in mutes.partitions() if mutes.leader_id(name) == node_id]
        more = f" and {len(names) - _MAX_NAMED_PARTITIONS} more" if len(names) > _MAX_NAMED_PARTITIONS else ""
        return f" with {', '.join(names[:_MAX_NAMED_PARTITIONS])}{more}" if names else ""

    def _broker(self, node_id: int) -> str:
        broker = self._brokers.get(node_id)
        return str(node_id if broker is None or broker.node is None else broker.node)

    # -- the sender's thread ------------------------------------------------------------------------

    def _at(self, now_ms: float) -> None:
        """The context's mappings are made again: once for all of a request's batches, as there may be
        thousands."""
        self.task_mutes.now_ms = now_ms
        self._context = ProducerStatusContext(now_ms, brokers=self._brokers)

    def on_send(self, broker: Broker, batches: Collection[ProducerBatch], now_ms: float) -> None:
        """These batches go to a broker in one request."""
        self._at(now_ms)
        self.task_mutes.batches_sent(batches)
        breaker, context = self._breaker, self._context
        if breaker is not None and self._tells_all:
            context.node_id, context.request_sent_ms = broker.id, now_ms
            self._call(_tell, context, batches, lambda _: breaker.on_send(context))

    def on_complete(
        self, broker: Broker, batches: Collection[ProducerBatch], cause: Exception | None, now_ms: float
    ) -> None:
        """Attempts of one request have ended. ``cause`` is None if the broker has the batches."""
        self.is_busy = True
        self._at(now_ms)
        self.task_mutes.batches_done(batches, cause)
        if cause is not None and health_of(cause) is Health.UNHEALTHY:
            for batch in batches:
                batch.home.count_failure(broker.request_sent_ms, now_ms)
            shared = self._shared
            if shared is not None:
                shared.failed(batches, cause)
        breaker, context = self._breaker, self._context
        if breaker is not None:
            context.node_id, context.request_sent_ms = broker.id, broker.request_sent_ms
            self._call(
                _tell, context, batches, lambda batch: breaker.on_complete(context, batch.partition, cause)
            )

    def on_connected(self, broker: Broker, now_ms: float) -> None:
        """A connection is ready: the broker has responded to its first request."""
        self._at(now_ms)
        self.task_mutes.connected(broker.id)

    def on_other_cluster(self, now_ms: float) -> None:
        """Another Kafka cluster responds at bootstrap.servers now, whose brokers and partitions may have the
        same ids and names. No row was sent to the former one."""
        self.is_busy = True
        self._at(now_ms)
        for target in list(self.task_mutes.mutes):
            self.task_mutes.unmute(target, "another cluster responds at bootstrap.servers now", own=False)
        shared = self._shared
        if shared is not None:
            shared.on_other_cluster()

    def on_unreachable(self, brokers: Iterable[Broker], now_ms: float) -> None:
        """Batches wait for connections to these. One that is refused or lost may be silent at once."""
        self.due_ms = min(self.due_ms, now_ms + self.prompt_ms)
        if any(one.is_failing for one in brokers):
            self.is_busy = True

    def run(self, now_ms: float) -> None:
        """In a pass of the sender: let the breaker class judge, log and report its changes, apply the
        coordinator's messages, and publish ``view`` again."""
        # First, as other threads set it once their message is there.
        self.is_busy = False
        self._at(now_ms)
        if self._breaker is not None:
            self._call(self._breaker.on_tick, self._context)
        # The task's thread may replace it at any time.
        shared = self._shared
        self._publish_changes(shared)
        if shared is not None:
            self._alone = False
            shared.exchange()
        elif not self._alone:
            self._alone = True
            self.task_mutes.on_coordinator_lost()
        view = self.manager.refresh()
        self.view, self.probes = view if view else (), view.probes
        self._publish_changes(shared)
        if not self.is_current.is_set() and shared is not None and shared.is_current:
            self.is_current.set()
        if self._needs_calls():
            self.is_busy = True
        self.due_ms = now_ms + self.next_change_ms(now_ms)

    def _needs_calls(self) -> bool:
        if (
            self._tells_all
            or self.task_mutes.mutes
            or self.task_mutes.has_changes
            or not self.is_current.is_set()
        ):
            return True
        return any(
            one.is_silent or one.is_to_be_asked or one.suspect_since_ms is not None
            for one in self._brokers.values()
        )

    def _publish_changes(self, shared: BreakerChannel | None) -> None:
        for change in self.task_mutes.take_changes():
            if shared is not None and change.own:
                shared.changed(change)
            self._log_change(change)

    def on_probe(self, node_id: int, now_ms: float) -> None:
        """A request without rows goes to a broker."""
        self._at(now_ms)
        self.task_mutes.broker_probe_sent(node_id)

    def on_probe_done(self, node_id: int, cause: Exception | None, now_ms: float) -> None:
        """That request has its response, or failed with ``cause``."""
        self.is_busy = True
        self._at(now_ms)
        self.task_mutes.broker_probe_done(node_id, cause)
        shared = self._shared
        if has_response(cause):
            self._brokers[node_id].probed_ms = now_ms
            if shared is not None:
                shared.answered(node_id)
        # A broker that was gone for long leads nothing in the metadata known here. Keyless rows avoid
        # partitions without a leader, so nothing else would have that metadata fetched again.
        self.task_mutes.refresh_leaderless(now_ms)

    def next_change_ms(self, now_ms: float) -> float:
        """Milliseconds until time alone may change something."""
        if self.task_mutes.has_changes:
            return 0.0
        delay = self.task_mutes.next_change_ms()
        if self._breaker is not None:
            self._at(self.task_mutes.now_ms)
            tick_ms = self._call(self._breaker.next_tick_ms, self._context)
            delay = min(delay, tick_ms) if isinstance(tick_ms, float | int) else delay
        shared = self._shared
        return delay if shared is None else min(delay, shared.next_change_ms(now_ms))

    def close(self) -> None:
        """No calls follow."""
        self.manager.close()
        self.view, self.probes = (), {}
        if self._breaker is not None:
            self._call(self._breaker.close)

    def _log_change(self, change: MuteChange) -> None:
        # The task that decided a mute logs the warning, so a job logs it once.
        level = logging.WARNING if change.own else logging.INFO
        done, target = "muted" if change.muted else "unmuted", change.target
        name = self._name(target) + (self._with_partitions(target) if isinstance(target, int) else "")
        _log.log(level, "circuit breaker: %s %s: %s", done, name, change.reason)

    def _call(self, method: Callable[..., object], *arguments: object) -> object:
        """Call the breaker class, which may be a user's."""
        try:
            return method(*arguments)
        except Exception:  # noqa: BLE001 - a user's class may raise anything
            _log.exception("the circuit breaker class failed and is switched off for this producer")
            self._breaker = None
            self.prompt_ms = math.inf
            self.manager.congested = frozenset()
            return None


def _tell(
    context: ProducerStatusContext, batches: Iterable[ProducerBatch], tell: Callable[[ProducerBatch], object]
) -> None:
    """One call of ``Breaker._call`` for all of a request's batches."""
    for batch in batches:
        context.topic_partition, context.record_count = batch.partition, batch.record_count
        tell(batch)
