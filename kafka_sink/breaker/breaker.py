"""Connects the sender and the breaker class: calls the class, and applies all mutes. Does no I/O."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable
from datetime import datetime, timedelta, timezone
from typing import Protocol

from kafka_sink.breaker.failure_rate import NO_LIMITS, FailureRateCircuitBreaker
from kafka_sink.breaker.interface import PartitionCircuitBreaker, ProducerStatusContext
from kafka_sink.breaker.manager import CircuitBreakManager
from kafka_sink.breaker.mutes import Mute, MuteChange, MutedPartitions
from kafka_sink.cluster.broker import Broker, SentRequest
from kafka_sink.cluster.partition import ProducerBatch
from kafka_sink.model import Target, TopicPartition
from kafka_sink.outcomes import Health, has_response, health_of
from kafka_sink.printable import first_of

_log = logging.getLogger(__name__)
# How often a task that waits for the coordinator's mutes checks whether it has itself been lost.
_CHECK_INTERVAL_MS = 50.0


class SharedMutes(Protocol):
    """Shares mutes with other tasks, by way of the coordinator. No method waits."""

    @property
    def is_current(self) -> bool:
        """Whether other tasks' mutes have arrived, or no coordinator can be reached. Any thread may ask."""

    def on_request_failed(self, partitions: Iterable[TopicPartition], cause: Exception) -> None:
        """Called when batches of these partitions failed for a reason that blames their broker."""

    def on_response(self, node_id: int) -> None:
        """Called when a broker has responded to a request without rows."""

    def on_mute_change(self, change: MuteChange) -> None:
        """Called when this task has muted or unmuted a target."""

    def on_other_cluster(self) -> None:
        """Called when another Kafka cluster responds, so that reports about the former one are dropped."""

    def exchange(self) -> None:
        """Apply the messages that have arrived to ``TaskMutes``, and send the task's reports."""

    def next_change_ms(self, now_ms: float) -> float:
        """Milliseconds until ``exchange`` has to be called even if no message arrives."""


class Breaker:
    """Calls the breaker class and follows the coordinator. Does nothing while nothing is wrong.

    The sender reports what happens (``on_*``) and calls ``run`` in a pass if it ``is_due``. While nothing is
    muted or suspicious and the class is the default one, the breaker is not busy: it then ignores events
    other than failures and slow responses, and a pass only compares a deadline. A request without a response,
    or a broker that cannot be reached, may become suspicious after ``_prompt_ms``, so these events bring the
    deadline forward to that time. A class that raises is switched off; probes then end its mutes.
    """

    def __init__(self, breaker: PartitionCircuitBreaker | None, manager: CircuitBreakManager) -> None:
        self.manager = manager
        self.task_mutes = manager.task_mutes
        self.is_off = breaker is None
        self._breaker = breaker
        self._brokers = manager.brokers
        self._shared: SharedMutes | None = None
        self._alone = True
        # Cleared by the task's thread if a task begins before the coordinator's mutes have arrived: its first
        # rows then wait for it, because they could otherwise be given to a muted partition. The sender's
        # thread sets it once ``avoided`` contains these mutes.
        self.is_current = threading.Event()
        self.is_current.set()
        self._context = ProducerStatusContext(brokers=manager.brokers)
        # A latency or a silence up to this long is never suspicious.
        self._prompt_ms = math.inf
        self._limits = NO_LIMITS
        # A user's class is called for each batch, as the KIP specifies.
        self._tells_all = breaker is not None and type(breaker) is not FailureRateCircuitBreaker
        if isinstance(breaker, FailureRateCircuitBreaker):
            self._limits = breaker.limits
            self._prompt_ms = breaker.limits.min_ms or math.inf
            self._tells_all |= breaker.needs_every_call
        # True if the breaker must be called for all events and in each pass. Any thread may set it. Only the
        # sender's thread clears it, before it reads messages, so that a later message sets it again.
        self._is_busy = True
        # When ``_is_busy`` is False, the time of the next pass that has to call ``run``.
        self._due_ms = -math.inf
        manager.on_call = self.call
        if breaker is not None:
            self._call(breaker.set_circuit_break_manager, manager)

    def call(self) -> None:
        """Make the sender's next pass run the breaker. Any thread may call it."""
        self._is_busy = True

    # -- the task's thread --------------------------------------------------------------------------

    @property
    def avoided(self) -> MutedPartitions:
        """The partitions to avoid, as of the sender's last pass. Any thread may read it."""
        return self.task_mutes.avoided

    def muted(self, limit: int) -> list[tuple[Mute, float]]:
        """At most ``limit`` mutes that the sender follows, each with its age in milliseconds. Any thread."""
        mutes = list(self.task_mutes.mutes.values())[:limit] if self.avoided else []
        return [(mute, max(0.0, self._context.now - mute.since_ms)) for mute in mutes]

    def share(self, shared: SharedMutes | None) -> None:
        """Use a coordinator, or none, from the sender's next pass on. Any thread may call it."""
        self._shared = shared
        if shared is None:
            # The last task may have had no rows, so that its wait for mutes has not ended.
            self.is_current.set()
        self._is_busy = True

    def begin(self) -> None:
        """Start a new task. Before its rows get partitions, the mutes of other tasks must be known."""
        shared = self._shared
        # Between tasks the sender still applies messages, but a new task does not by itself start a pass.
        if shared is not None and not shared.is_current:
            self.is_current.clear()
            self._is_busy = True

    def await_mutes(self, timeout_ms: float, check: Callable[[], None]) -> None:
        """Wait until ``avoided`` contains the coordinator's mutes, for at most ``timeout_ms``.

        ``check`` raises if the task is lost.
        """
        left_ms = timeout_ms
        while left_ms > 0 and not self.is_current.is_set():
            check()
            self.is_current.wait(min(left_ms, _CHECK_INTERVAL_MS) / 1000)
            left_ms -= _CHECK_INTERVAL_MS
        # Do not wait again for a coordinator that is late. Its mutes apply when they arrive.
        self.is_current.set()

    def explain(self, partition: TopicPartition) -> str | None:
        """Why a partition is muted, for messages; None if it is not. Any thread may call it."""
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
        return f" with {first_of(names)}" if names else ""

    def _broker(self, node_id: int) -> str:
        broker = self._brokers.get(node_id)
        return str(node_id if broker is None or broker.node is None else broker.node)

    # -- the sender's thread ------------------------------------------------------------------------

    def _at(self, now_ms: float) -> None:
        """Make a new context for this time. Its mappings, computed once, serve all batches of a request."""
        self.task_mutes.now_ms = now_ms
        self._context = ProducerStatusContext(now_ms, brokers=self._brokers)

    def is_due(self, now_ms: float) -> bool:
        """Whether this pass has to call ``run``."""
        return self._is_busy or now_ms >= self._due_ms

    def delay_ms(self, now_ms: float) -> float:
        """Milliseconds until a pass has to call ``run`` even if no event happens.

        The sender asks after it has sent requests, because that may bring the deadline forward.
        """
        return self._next_change_ms(now_ms) if self._is_busy else self._due_ms - now_ms

    def has_probe_due(self) -> bool:
        """Whether a broker should get a request without rows now."""
        return self._is_busy and bool(self.task_mutes.brokers_to_probe())

    def on_sent(self, broker: Broker, batches: Collection[ProducerBatch], now_ms: float) -> None:
        """Called when these batches were sent to a broker in one request."""
        self._due_ms = min(self._due_ms, now_ms + self._prompt_ms)
        if not self._is_busy:
            return
        self._at(now_ms)
        self.task_mutes.on_batches_sent(batches)
        breaker, context = self._breaker, self._context
        if breaker is not None and self._tells_all:
            context.node_id, context.request_sent_ms = broker.id, now_ms
            self._call(_tell, context, batches, lambda _: breaker.on_send(context))

    def on_response(self, broker: Broker, sent: SentRequest, now_ms: float) -> None:
        """Called when the response to a Produce request has arrived, before ``on_complete`` for its batches.

        A latency above the limit for the usual one counts as that limit, so that a frozen broker's latency
        never becomes usual. The class compares other brokers' silence with a broker's first response.
        """
        self.manager.rows += sent.new_rows
        latency_ms = max(0.0, now_ms - broker.request_sent_ms)
        if latency_ms > self._prompt_ms:
            limit_ms = self._limits.of_response(broker, self._brokers.values(), broker.usual_ms)
            latency_ms = min(latency_ms, limit_ms)
            self._is_busy = True
        broker.observe(latency_ms)
        if broker.responses == 1:
            self._is_busy = True

    def on_failure(self, sent: SentRequest) -> None:
        """Called when a Produce request will get no response, before ``on_complete`` for its batches."""
        self.manager.rows += sent.new_rows

    def on_complete(
        self, broker: Broker, batches: Collection[ProducerBatch], cause: Exception | None, now_ms: float
    ) -> None:
        """Called when attempts of one request have ended. ``cause``: None if the broker has the batches."""
        if cause is None and not self._is_busy:
            return
        self._is_busy = True
        self._at(now_ms)
        self.task_mutes.on_batches_done(batches, cause)
        if cause is not None and health_of(cause) is Health.UNHEALTHY:
            for batch in batches:
                batch.queue.outcomes.on_failure(broker.request_sent_ms, now_ms)
            shared = self._shared
            if shared is not None:
                shared.on_request_failed([batch.topic_partition for batch in batches], cause)
        breaker, context = self._breaker, self._context
        if breaker is not None:
            context.node_id, context.request_sent_ms = broker.id, broker.request_sent_ms
            self._call(
                _tell,
                context,
                batches,
                lambda batch: breaker.on_complete(context, batch.topic_partition, cause),
            )

    def on_connected(self, broker: Broker, now_ms: float) -> None:
        """Called when a connection is ready: the broker has responded to its first request."""
        if not self._is_busy:
            return
        self._at(now_ms)
        self.task_mutes.on_connected(broker.id)

    def on_other_cluster(self, now_ms: float) -> None:
        """Called when another Kafka cluster responds at bootstrap.servers, before any row was sent.

        Its brokers and partitions may have the same ids and names, so the mutes end.
        """
        self._is_busy = True
        self._at(now_ms)
        for target in list(self.task_mutes.mutes):
            self.task_mutes.unmute(target, "another cluster responds at bootstrap.servers now", own=False)
        shared = self._shared
        if shared is not None:
            shared.on_other_cluster()

    def on_unreachable(self, brokers: Iterable[Broker], now_ms: float) -> None:
        """Called when batches wait for connections to these brokers. After a failure they may be silent."""
        self._due_ms = min(self._due_ms, now_ms + self._prompt_ms)
        if any(broker.is_failing for broker in brokers):
            self._is_busy = True

    def run(self, now_ms: float) -> None:
        """Let the class judge, log and report changes, and apply the coordinator's messages.

        Afterwards ``avoided`` is up to date.
        """
        # Clear it first: other threads set it after adding their message, so no message is missed.
        self._is_busy = False
        self._at(now_ms)
        if self._breaker is not None:
            self._call(self._breaker.on_tick, self._context)
        # Read it once, because the task's thread may replace it at any time.
        shared = self._shared
        self._publish_changes(shared)
        if shared is not None:
            self._alone = False
            shared.exchange()
        elif not self._alone:
            self._alone = True
            self.task_mutes.on_coordinator_lost()
        self.manager.refresh()
        self._publish_changes(shared)
        if not self.is_current.is_set() and shared is not None and shared.is_current:
            self.is_current.set()
        if self._needs_calls():
            self._is_busy = True
        self._due_ms = now_ms + self._next_change_ms(now_ms)

    def _needs_calls(self) -> bool:
        table = self.task_mutes
        if self._tells_all or table.mutes or table.has_changes or not self.is_current.is_set():
            return True
        return any(
            broker.is_silent or broker.is_to_be_asked or broker.suspect_since_ms is not None
            for broker in self._brokers.values()
        )

    def _publish_changes(self, shared: SharedMutes | None) -> None:
        for change in self.task_mutes.take_changes():
            if shared is not None and change.own:
                shared.on_mute_change(change)
            # The task that decided on a mute logs it as a warning, so that a job logs it once.
            level = logging.WARNING if change.own else logging.INFO
            done, target = "muted" if change.muted else "unmuted", change.target
            name = self._name(target) + (self._with_partitions(target) if isinstance(target, int) else "")
            _log.log(level, "circuit breaker: %s %s: %s", done, name, change.reason)

    def on_probe(self, node_id: int, now_ms: float) -> None:
        """Called when a request without rows is sent to a broker."""
        self._at(now_ms)
        self.task_mutes.on_broker_probe_sent(node_id)

    def on_probe_done(self, node_id: int, cause: Exception | None, now_ms: float) -> None:
        """Called when the response to that request has arrived, or the request failed with ``cause``."""
        self._is_busy = True
        self._at(now_ms)
        self.task_mutes.on_broker_probe_done(node_id, cause)
        shared = self._shared
        if has_response(cause):
            self._brokers[node_id].probed_ms = now_ms
            if shared is not None:
                shared.on_response(node_id)
        # A broker that was gone for a long time leads nothing in the metadata known here. Keyless rows avoid
        # partitions without a leader, so nothing else would make the client fetch that metadata again.
        self.task_mutes.refresh_leaderless(now_ms)

    def _next_change_ms(self, now_ms: float) -> float:
        """Milliseconds until the passage of time alone may change something."""
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
        self.manager.close()
        if self._breaker is not None:
            self._call(self._breaker.close)

    def _call(self, method: Callable[..., object], *arguments: object) -> object:
        try:
            return method(*arguments)
        except Exception:  # noqa: BLE001 - a user's class may raise anything
            _log.exception("the circuit breaker class failed and is switched off for this producer")
            self._breaker = None
            self._prompt_ms = math.inf
            self.manager.congested = frozenset()
            return None


def _tell(
    context: ProducerStatusContext, batches: Iterable[ProducerBatch], tell: Callable[[ProducerBatch], object]
) -> None:
    """Call ``tell`` for each batch of a request. ``Breaker._call`` guards all these calls together."""
    for batch in batches:
        context.topic_partition, context.record_count = batch.topic_partition, batch.record_count
        tell(batch)
