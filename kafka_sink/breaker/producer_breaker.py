"""Between the sender and a circuit breaker: counts what is in flight, asks the class, does as it says."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from datetime import datetime, timedelta, timezone
from typing import Protocol

from kafka_sink.breaker.in_flight_tracker import InFlightTracker
from kafka_sink.breaker.interface import PartitionCircuitBreaker
from kafka_sink.breaker.manager import CircuitBreakManager
from kafka_sink.breaker.states import Target
from kafka_sink.breaker.values import MuteChange, MutedView
from kafka_sink.model import PartitionInfo, TopicPartition

_log = logging.getLogger(__name__)
_PARTITIONS_NAMED = 5
_CHECK_MS = 50.0


class SharedState(Protocol):
    """The coordinator's side of a breaker, as the sender's thread uses it; nothing here blocks."""

    def outcome(
        self,
        node_id: int,
        partition: TopicPartition,
        records: int,
        cause: Exception | None,
        sent_ms: float,
        now_ms: float,
    ) -> None:
        """An attempt, sent at ``sent_ms``, has ended."""

    def probed(self, node_id: int, now_ms: float) -> None:
        """A broker that the coordinator asked about has answered a request without rows."""

    def changed(self, change: MuteChange) -> None:
        """This task's breaker muted or unmuted something."""

    def exchange(self, manager: CircuitBreakManager) -> None:
        """Applies what has come, sends what is due."""

    def next_change_ms(self, now_ms: float) -> float:
        """Milliseconds until there is something to send."""

    @property
    def has_heard(self) -> bool:
        """Whether all that is muted is known here, or nobody is there who would tell. Any thread."""


class ProducerBreaker:
    """A SendPolicy. The task's thread may read ``mutes``, ``congested`` and ``explain``.

    A breaker class that raises is switched off for this producer, and what it had muted is unmuted by probes.
    """

    def __init__(
        self,
        breaker: PartitionCircuitBreaker,
        manager: CircuitBreakManager,
        describe_node: Callable[[int], str],
        mark_stale: Callable[[str, float], None] = lambda topic, now_ms: None,
    ) -> None:
        self.manager = manager
        self._breaker: PartitionCircuitBreaker | None = breaker
        self._describe_node = describe_node
        self._mark_stale = mark_stale
        self._shared: SharedState | None = None
        self._alone = True
        # Set by the sender's thread once ``mutes`` has what the coordinator told at first.
        self._is_current = threading.Event()
        # A broker that is gone for long is in nobody's metadata, and must be named all the same.
        self._names: dict[int, str] = {}
        self._in_flight = InFlightTracker()
        self._context = self._in_flight.context
        manager.awaits = self._in_flight.awaits
        self._ask(breaker.set_circuit_break_manager, manager)

    # -- the task's thread --------------------------------------------------------------------------

    @property
    def mutes(self) -> MutedView:
        """What rests now."""
        return self.manager.mutes

    @property
    def congested(self) -> frozenset[int]:
        """Brokers that keyless rows avoid for the moment."""
        return self.manager.congested

    def share(self, state: SharedState | None) -> None:
        """From now on work with a coordinator, or alone. Any thread; holds from the sender's next pass on."""
        self._shared = state

    def begin(self) -> None:
        """A new task: what others have muted meanwhile is to be known before its rows get partitions."""
        shared = self._shared
        # Between tasks the sender goes on taking what is told; it does not pass by for a task that begins.
        if shared is None or not shared.has_heard:
            self._is_current.clear()

    def await_mutes(self, timeout_ms: float, check: Callable[[], None]) -> None:
        """Returns once ``mutes`` has what the coordinator knows, after ``timeout_ms`` in any case.

        ``check`` raises when the task is lost.
        """
        shared = self._shared
        left_ms = timeout_ms
        while shared is not None and left_ms > 0 and not self._is_current.is_set():
            check()
            self._is_current.wait(min(left_ms, _CHECK_MS) / 1000)
            left_ms -= _CHECK_MS
        # One that is late is not waited for again; what it tells holds from then on.
        self._is_current.set()

    def note_free_rows(self, topics: Iterable[str]) -> None:
        """The task has rows of these topics that choose their partition freely."""
        if self.manager.mutes:
            self.manager.note_free_rows(topics)

    def explain(self, partition: TopicPartition) -> str | None:
        """See SendPolicy."""
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
        led = self.manager.muted_partitions_for_node(target) or self.manager.available_partitions_for_node(
            target
        )
        names = [f"{topic}-{info.partition}" for topic, infos in led.items() for info in infos]
        more = f" and {len(names) - _PARTITIONS_NAMED} more" if len(names) > _PARTITIONS_NAMED else ""
        partitions = f" with {', '.join(names[:_PARTITIONS_NAMED])}{more}" if names else ""
        return f"broker {self._broker(target)}{partitions}"

    def _broker(self, node_id: int) -> str:
        told = self._describe_node(node_id)
        if told != str(node_id):
            self._names[node_id] = told
        return self._names.get(node_id, told)

    # -- the sender's thread ------------------------------------------------------------------------

    def _at(self, now_ms: float) -> None:
        self._context.now = self.manager.now_ms = now_ms

    def on_request(self, node_id: int, now_ms: float) -> None:
        """See SendPolicy."""
        self._at(now_ms)
        self._in_flight.request_sent(node_id, now_ms)

    def on_send(self, node_id: int, partition: TopicPartition, records: int, now_ms: float) -> None:
        """See SendPolicy."""
        self._in_flight.batch_sent(partition)
        self.manager.sent(partition)
        breaker, context = self._breaker, self._context
        if breaker is None:
            return
        context.node_id, context.topic_partition = node_id, partition
        context.record_count, context.request_sent_ms = records, now_ms
        self._ask(breaker.on_send, context)

    def on_request_done(self, node_id: int, now_ms: float) -> None:
        """See SendPolicy."""
        self._at(now_ms)
        self._context.request_sent_ms = self._in_flight.request_done(node_id)

    def on_complete(
        self, node_id: int, partition: TopicPartition, records: int, cause: Exception | None, now_ms: float
    ) -> None:
        """See SendPolicy."""
        self._in_flight.batch_done(partition)
        self.manager.completed(partition, cause)
        shared = self._shared
        if shared is not None:
            shared.outcome(node_id, partition, records, cause, self._context.request_sent_ms, now_ms)
        breaker, context = self._breaker, self._context
        if breaker is None:
            return
        context.node_id, context.topic_partition, context.record_count = node_id, partition, records
        self._ask(breaker.on_complete, context, partition, cause)

    def on_unreachable(self, nodes: Collection[int], failing: Collection[int], now_ms: float) -> None:
        """See SendPolicy."""
        self._in_flight.unreachable(nodes, failing, now_ms)

    def on_connected(self, node_id: int, setup_ms: float, now_ms: float) -> None:
        """See SendPolicy."""
        self._at(now_ms)
        self._in_flight.connected(node_id, setup_ms)
        self.manager.connected(node_id)

    def on_throttled(self, node_id: int, now_ms: float, throttled_ms: float) -> None:
        """See SendPolicy."""
        self._in_flight.throttled(node_id, now_ms + throttled_ms)

    def on_waiting(self, partitions: Iterable[TopicPartition]) -> None:
        """See SendPolicy."""
        self.manager.note_waiting(partitions)

    def muted(self, now_ms: float) -> MutedView:
        """See SendPolicy."""
        self._at(now_ms)
        if self._breaker is not None:
            self._ask(self._breaker.on_tick, self._context)
        # The task's thread may put another in its place at any time.
        shared = self._shared
        self._tell_changes(shared)
        if shared is not None:
            self._alone = False
            shared.exchange(self.manager)
        elif not self._alone:
            self._alone = True
            self.manager.on_coordinator_lost()
        mutes = self.manager.refresh()
        self._tell_changes(shared)
        if not self._is_current.is_set() and shared is not None and shared.has_heard:
            self._is_current.set()
        return mutes

    def _tell_changes(self, shared: SharedState | None) -> None:
        for change in self.manager.take_changes():
            if shared is not None and change.own:
                shared.changed(change)
            self._tell(change)

    @property
    def muted_brokers(self) -> Collection[int]:
        """See SendPolicy."""
        return self.manager.mutes.nodes

    def brokers_to_probe(self) -> Collection[int]:
        """See SendPolicy."""
        return self.manager.brokers_to_probe()

    def on_probe(self, node_id: int, now_ms: float) -> None:
        """See SendPolicy."""
        self._at(now_ms)
        self.manager.probe_sent(node_id)

    def on_probe_done(self, node_id: int, cause: Exception | None, now_ms: float) -> None:
        """See SendPolicy."""
        self._at(now_ms)
        if self.manager.probe_done(node_id, cause) and self._shared is not None:
            self._shared.probed(node_id, now_ms)
        # A broker that was out for long leads nothing until it is asked for anew: rows without keys keep away
        # from partitions without a leader, and so nobody else would ask.
        for topic in self.manager.leaderless_topics():
            self._mark_stale(topic, now_ms)

    def may_probe(self, partition: TopicPartition) -> bool:
        """See SendPolicy."""
        return self.manager.may_probe(partition)

    def next_change_ms(self, now_ms: float) -> float:
        """See SendPolicy."""
        delay = self.manager.next_change_ms()
        if self._breaker is not None:
            told = self._ask(self._breaker.next_tick_ms, self._context)
            delay = min(delay, told) if isinstance(told, float | int) else delay
        shared = self._shared
        return delay if shared is None else min(delay, shared.next_change_ms(now_ms))

    def close(self) -> None:
        """See SendPolicy."""
        self.manager.close()
        if self._breaker is not None:
            self._ask(self._breaker.close)

    def _tell(self, change: MuteChange) -> None:
        # What another task found is that task's to say aloud.
        level = logging.WARNING if change.own else logging.INFO
        done = "muted" if change.muted else "unmuted"
        _log.log(level, "circuit breaker: %s %s: %s", done, self._name(change.target), change.reason)

    def _ask(self, method: Callable[..., object], *arguments: object) -> object:
        """Calls the class, which may be a user's."""
        try:
            return method(*arguments)
        except Exception:  # noqa: BLE001 - a class of the user's may raise anything
            _log.exception("the circuit breaker class failed and is switched off for this producer")
            self._breaker = None
            self.manager.forget_congested()
            return None
