"""Connects the sender with a breaker class: calls the class, applies its mutes.

No I/O. The sender's thread calls it; what the task's thread may call says so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from datetime import datetime, timedelta, timezone
from itertools import islice
from typing import Protocol

from kafka_sink.breaker.interface import (
    PartitionCircuitBreaker,
    ProducerStatusContext,
    SendPolicy,
    SentBatch,
)
from kafka_sink.breaker.manager import CircuitBreakManager, MutedView
from kafka_sink.breaker.outcomes import has_response
from kafka_sink.breaker.states import MuteChange, Target
from kafka_sink.cluster.broker import Broker
from kafka_sink.model import PartitionInfo, TopicPartition

_log = logging.getLogger(__name__)
# A log line names a broker's first partitions only.
_MAX_NAMED_PARTITIONS = 5
# How often a task that waits for the coordinator's mutes checks whether it was lost itself.
_CHECK_INTERVAL_MS = 50.0


class SharedState(Protocol):
    """The connection of a task's breaker to the coordinator. The sender's thread uses it; nothing blocks."""

    def outcomes(
        self,
        node_id: int,
        batches: Sequence[SentBatch],
        cause: Exception | None,
        sent_ms: float,
        now_ms: float,
    ) -> None:
        """Attempts that were sent at ``sent_ms`` have ended."""

    def answered(self, node_id: int, now_ms: float) -> None:
        """A broker that the coordinator asked about responded to a request without rows."""

    def changed(self, change: MuteChange) -> None:
        """This task's breaker muted or unmuted something."""

    def on_other_cluster(self) -> None:
        """Another Kafka cluster responds now. Mutes and reports so far concern the former one's brokers."""

    def exchange(self, manager: CircuitBreakManager) -> None:
        """Apply messages that have come, and send what is due."""

    def next_change_ms(self, now_ms: float) -> float:
        """Milliseconds until there is something to send."""

    @property
    def is_current(self) -> bool:
        """Whether the coordinator's mutes have come, or no coordinator can be reached. Any thread."""


class ProducerBreaker(SendPolicy):
    """Follows a breaker class and the coordinator. The task's thread may use ``mutes``, ``congested`` and
    ``explain``.

    A breaker class that raises is switched off for this producer. Probes then end what it had muted.
    """

    def __init__(
        self,
        breaker: PartitionCircuitBreaker,
        manager: CircuitBreakManager,
        mark_stale: Callable[[str, float], None] = lambda topic, now_ms: None,
    ) -> None:
        self.manager = manager
        self._local = manager.local
        self._probes = manager.probes
        self._breaker: PartitionCircuitBreaker | None = breaker
        self._brokers = manager.brokers
        self._mark_stale = mark_stale
        self._shared: SharedState | None = None
        self._alone = True
        # Set by the sender's thread once ``mutes`` has the coordinator's first message.
        self._is_current = threading.Event()
        self._context = ProducerStatusContext(brokers=manager.brokers)
        manager.probes.awaits_response = self._awaits_response
        self._call(breaker.set_circuit_break_manager, manager)

    # -- the task's thread --------------------------------------------------------------------------

    @property
    def mutes(self) -> MutedView:
        return self.manager.view

    @property
    def congested(self) -> Set[int]:
        """Brokers that keyless rows avoid for the moment."""
        return self.manager.congested

    def muted_targets(self, limit: int) -> list[tuple[Target, str, float]]:
        """At most ``limit`` muted targets with reason and milliseconds since. Any thread."""
        view, mutes = self.manager.view, self._local.mutes
        found: list[tuple[Target, str, float]] = []
        targets: tuple[Target, ...] = (*view.nodes, *view.partitions)
        for target in islice(targets, limit):
            mute = mutes.get(target)
            if mute is not None:
                found.append((target, mute.reason, max(0.0, self._context.now - mute.since_ms)))
        return found

    def share(self, state: SharedState | None) -> None:
        """Work with a coordinator, or alone, from the sender's next pass on. Any thread."""
        self._shared = state

    def begin(self) -> None:
        """A new task begins. It must know what others have muted before its rows get partitions."""
        shared = self._shared
        # Between tasks the sender goes on applying messages, but makes no pass of its own when a task begins.
        if shared is None or not shared.is_current:
            self._is_current.clear()

    def await_mutes(self, timeout_ms: float, check: Callable[[], None]) -> None:
        """Return once ``mutes`` has the coordinator's mutes, or after ``timeout_ms``.

        ``check`` raises if the task is lost.
        """
        shared = self._shared
        left_ms = timeout_ms
        while shared is not None and left_ms > 0 and not self._is_current.is_set():
            check()
            self._is_current.wait(min(left_ms, _CHECK_INTERVAL_MS) / 1000)
            left_ms -= _CHECK_INTERVAL_MS
        # A late coordinator is not waited for again. Its mutes hold from when they come.
        self._is_current.set()

    def note_free_rows(self, topics: Iterable[str]) -> None:
        """The task has rows of these topics that may go to any partition."""
        if self.manager.view:
            self._probes.note_free_rows(topics)

    def explain(self, partition: TopicPartition) -> str | None:
        mute = self.manager.mute_of(partition)
        if mute is None:
            return None
        age_s = (self._context.now - mute.since_ms) / 1000
        since = datetime.now(timezone.utc) - timedelta(seconds=age_s)
        known = not mute.last_error or mute.last_error in mute.reason
        last = "" if known else f"; last error: {mute.last_error}"
        return (
            f"the circuit breaker has muted {self._name(mute.target)} since {since:%H:%M:%S} UTC "
            f"({age_s:.1f} s): {mute.reason}{last}"
        )

    def _name(self, target: Target) -> str:
        if isinstance(target, TopicPartition):
            info: PartitionInfo | None = self.manager.leader(target)
            return f"{target}" + (
                f", led by {self._broker(info.leader)}" if info and info.leader >= 0 else ""
            )
        broker, seen = self._brokers.get(target), self.manager.seen
        found = None if broker is None else broker.partitions_text
        if found is None or found[0] != seen:
            found = seen, self._with_partitions(target)
            if broker is not None:
                broker.partitions_text = found
        return f"broker {self._broker(target)}{found[1]}"

    def _with_partitions(self, node_id: int) -> str:
        manager = self.manager
        led = manager.muted_partitions_for_node(node_id) or manager.available_partitions_for_node(node_id)
        names = [f"{topic}-{info.partition}" for topic, infos in led.items() for info in infos]
        more = f" and {len(names) - _MAX_NAMED_PARTITIONS} more" if len(names) > _MAX_NAMED_PARTITIONS else ""
        return f" with {', '.join(names[:_MAX_NAMED_PARTITIONS])}{more}" if names else ""

    def _broker(self, node_id: int) -> str:
        broker = self._brokers.get(node_id)
        return str(node_id if broker is None or broker.node is None else broker.node)

    # -- the sender's thread ------------------------------------------------------------------------

    def _at(self, now_ms: float) -> None:
        """The context's mappings are made again: once for all of a request's batches, as there may be
        thousands."""
        self._local.now_ms = now_ms
        self._context = ProducerStatusContext(now_ms, brokers=self._brokers)

    def on_send(self, broker: Broker, batches: Sequence[SentBatch], now_ms: float) -> None:
        self._at(now_ms)
        self._probes.batches_sent(batches)
        breaker, context = self._breaker, self._context
        if breaker is not None:
            context.node_id, context.request_sent_ms = broker.id, now_ms
            self._call(_tell_of_sends, breaker, context, batches)

    def on_complete(
        self, broker: Broker, batches: Sequence[SentBatch], cause: Exception | None, now_ms: float
    ) -> None:
        self._at(now_ms)
        self._probes.batches_done(batches, cause)
        shared = self._shared
        if shared is not None:
            shared.outcomes(broker.id, batches, cause, broker.request_sent_ms, now_ms)
        breaker, context = self._breaker, self._context
        if breaker is not None:
            context.node_id, context.request_sent_ms = broker.id, broker.request_sent_ms
            self._call(_tell_of_ends, breaker, context, batches, cause)

    def on_connected(self, broker: Broker, now_ms: float) -> None:
        self._at(now_ms)
        self._probes.connected(broker.id)

    def _awaits_response(self, target: Target) -> bool:
        """Whether a broker owes a response, or one for a partition is outstanding."""
        if isinstance(target, TopicPartition):
            return any(target in sent.batches for one in self._brokers.values() for sent in one.sent)
        broker = self._brokers.get(target)
        return broker is not None and bool(broker.sent)

    def on_other_cluster(self, now_ms: float) -> None:
        """The other cluster's brokers and partitions may have the same ids and names."""
        self._at(now_ms)
        self._local.unmute_all("another cluster responds at bootstrap.servers now")
        shared = self._shared
        if shared is not None:
            shared.on_other_cluster()

    def on_waiting(self, partitions: Iterable[TopicPartition]) -> None:
        self._probes.note_waiting(partitions)

    def muted(self, now_ms: float) -> MutedView:
        """Once in each pass of the sender.

        Lets the breaker class judge, logs and reports its changes, applies the coordinator's messages, and
        publishes ``mutes`` again.
        """
        self._at(now_ms)
        if self._breaker is not None:
            self._call(self._breaker.on_tick, self._context)
        # The task's thread may replace it at any time.
        shared = self._shared
        self._publish_changes(shared)
        if shared is not None:
            self._alone = False
            shared.exchange(self.manager)
        elif not self._alone:
            self._alone = True
            self.manager.on_coordinator_lost()
        mutes = self.manager.refresh()
        self._publish_changes(shared)
        if not self._is_current.is_set() and shared is not None and shared.is_current:
            self._is_current.set()
        return mutes

    def _publish_changes(self, shared: SharedState | None) -> None:
        for change in self._local.take_changes():
            if shared is not None and change.own:
                shared.changed(change)
            self._log_change(change)

    @property
    def muted_brokers(self) -> Collection[int]:
        return self.manager.view.nodes

    def brokers_to_probe(self) -> Collection[int]:
        return self._probes.brokers_to_probe()

    def on_probe(self, node_id: int, now_ms: float) -> None:
        self._at(now_ms)
        self._probes.broker_probe_sent(node_id)

    def on_probe_done(self, node_id: int, cause: Exception | None, now_ms: float) -> None:
        self._at(now_ms)
        if has_response(cause) and node_id in self._brokers:
            self._brokers[node_id].probed_ms = now_ms
        if self._probes.broker_probe_done(node_id, cause) and self._shared is not None:
            self._shared.answered(node_id, now_ms)
        # A broker that was gone for long leads nothing in the metadata known here. Keyless rows avoid
        # partitions without a leader, so nothing else would have that metadata fetched again.
        for topic in self.manager.leaderless_topics():
            self._mark_stale(topic, now_ms)

    def may_probe(self, partition: TopicPartition) -> bool:
        return self._probes.may_probe(partition)

    def next_change_ms(self, now_ms: float) -> float:
        if self._local.has_changes:
            return 0.0
        delay = self._local.next_change_ms(self._local.now_ms)
        if self._breaker is not None:
            self._at(self._local.now_ms)
            tick_ms = self._call(self._breaker.next_tick_ms, self._context)
            delay = min(delay, tick_ms) if isinstance(tick_ms, float | int) else delay
        shared = self._shared
        return delay if shared is None else min(delay, shared.next_change_ms(now_ms))

    def close(self) -> None:
        self.manager.close()
        if self._breaker is not None:
            self._call(self._breaker.close)

    def _log_change(self, change: MuteChange) -> None:
        # The task that decided a mute logs the warning, so a job logs it once.
        level = logging.WARNING if change.own else logging.INFO
        done = "muted" if change.muted else "unmuted"
        _log.log(level, "circuit breaker: %s %s: %s", done, self._name(change.target), change.reason)

    def _call(self, method: Callable[..., object], *arguments: object) -> object:
        """Call the breaker class, which may be a user's."""
        try:
            return method(*arguments)
        except Exception:  # noqa: BLE001 - a user's class may raise anything
            _log.exception("the circuit breaker class failed and is switched off for this producer")
            self._breaker = None
            self.manager.congested = frozenset()
            return None


# A user's class hears of each batch, as in the KIP. One call here for all of a request's.


def _tell_of_sends(
    breaker: PartitionCircuitBreaker, context: ProducerStatusContext, batches: Iterable[SentBatch]
) -> None:
    for context.topic_partition, context.record_count in batches:
        breaker.on_send(context)


def _tell_of_ends(
    breaker: PartitionCircuitBreaker,
    context: ProducerStatusContext,
    batches: Iterable[SentBatch],
    cause: Exception | None,
) -> None:
    for partition, context.record_count in batches:
        context.topic_partition = partition
        breaker.on_complete(context, partition, cause)
