"""A task's side of the shared breaker: reports outcomes and mutes, receives the job's mutes and leases."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kafka_sink.breaker.interface import SentBatch
from kafka_sink.breaker.manager import CircuitBreakManager
from kafka_sink.breaker.outcomes import Health, OutcomeWindows, has_response, health_of
from kafka_sink.breaker.states import MuteChange, Target
from kafka_sink.coordinator.breaker.messages import (
    KIND,
    MAX_MUTES,
    MAX_TARGETS,
    BreakerReport,
    BreakerUpdate,
    MuteReport,
    OutcomeCounts,
    Room,
    UnmuteReport,
    aged,
    decode_update,
    encode_report,
    how_many_fit,
    that_fit,
)
from kafka_sink.coordinator.transport.channel import Channel
from kafka_sink.model import TopicPartition
from kafka_sink.timing_bounds import HEALTHY_REPORT_MS, next_beat_ms

# Bounds the queue of reports, because none is sent between tasks.
_MAX_QUEUED_REPORTS = 4
# Changes of what a task's batches wait for are gathered for this long.
_MIN_CHANGE_MS = 100.0


class BreakerChannel(Channel):
    """A Channel of the coordinator's client, and the SharedState of a ProducerBreaker.

    ``wake_sender`` makes the sender apply received messages. ``cluster_id`` returns the id of the Kafka
    cluster, None where it is not known: broker ids mean nothing in another one.
    """

    kind = KIND

    def __init__(
        self,
        wake_sender: Callable[[], None],
        report_interval_ms: float,
        cluster_id: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._wake_sender = wake_sender
        self._cluster_id = cluster_id
        self._reported_cluster: str | None = None
        super().__init__()
        self._interval_ms = report_interval_ms
        self._lock = threading.Lock()  # guards the next three
        self._inbox: deque[BreakerUpdate | bool] = deque()  # True: connected; False: connection lost
        self._outbox: deque[tuple[float, BreakerReport]] = deque()  # with the time it was made
        # The task has ended, and the coordinator takes it for one that is at work.
        self._is_leaving = self._has_reported = False
        # The rest belongs to the sender's thread.
        self._connected = False
        # The coordinator's mutes, with their reasons.
        self._muted: dict[Target, str] = {}
        self._windows = OutcomeWindows(0, 100)
        self._rows = 0
        # Partitions with failures that have not been reported: whether a broker responded, and the last
        # error.
        self._errors: dict[TopicPartition, tuple[bool, str]] = {}
        # Partitions whose outcomes the coordinator has requested.
        self._asked: dict[TopicPartition, None] = {}
        # When rows may go to targets that the coordinator has unmuted.
        self._release_ms: dict[Target, float] = {}
        # By broker, the last response since the last report.
        self._last_response_ms: dict[int, float] = {}
        self._changes: list[MuteChange] = []
        self._failures: list[tuple[Target, str]] = []
        self._holds: list[Target] = []
        self._wants: list[Target] = []
        # ``holds`` and ``wants`` as last reported, and whether they have changed since.
        self._reported: tuple[list[Target], list[Target]] = [], []
        self._waits_changed = False
        self._sent_ms = -math.inf
        self._urgent = False
        # False while connecting, and until the first message has arrived. Any thread may read it.
        self.is_current = False

    def expect(self) -> None:
        """The client is about to connect. Called on the task's thread."""
        self.is_current = False

    # -- SharedState: the sender's thread -----------------------------------------------------------

    def outcomes(
        self,
        node_id: int,
        batches: Sequence[SentBatch],
        cause: Exception | None,
        sent_ms: float,
        now_ms: float,
    ) -> None:
        if not self._connected:
            return
        if cause is None:
            self._last_response_ms[node_id] = now_ms
        health = health_of(cause)
        if health is Health.NEUTRAL:
            return
        failed = health is Health.UNHEALTHY
        record = self._windows.record
        for partition, records in batches:
            self._rows += records
            record(partition, records, sent_ms, now_ms, failed=failed)
            if failed:
                self._errors[partition] = has_response(cause), str(cause)

    def probed(self, node_id: int, now_ms: float) -> None:
        if self._connected:
            self._last_response_ms[node_id] = now_ms
            self._urgent = True

    def changed(self, change: MuteChange) -> None:
        if self._connected:
            self._urgent = True
            if not change.muted:
                # Otherwise the next message would mute it again before the coordinator learns of this.
                self._muted.pop(change.target, None)
                self._release_ms.pop(change.target, None)
            # The coordinator counts outcomes itself.
            if not (change.muted and change.evidence.counted):
                self._changes.append(change)

    def on_other_cluster(self) -> None:
        """The next report names the cluster, and its reply has what is muted there."""
        self._muted.clear()
        self._forget()
        self._urgent = self._connected

    def exchange(self, manager: CircuitBreakManager) -> None:
        while self._inbox:
            with self._lock:
                message = self._inbox.popleft()
            self._apply(message, manager)
        if not self._connected:
            return
        self._release(manager)
        failures = manager.probes.take_failures()
        if failures:
            self._failures += failures
            self._urgent = True
        any_muted = bool(manager.view or self._holds or self._wants or self._muted)
        holds = manager.probes.held()[:MAX_TARGETS] if any_muted else []
        wants = manager.probes.wanted()[:MAX_TARGETS] if any_muted else []
        if (holds, wants) != (self._holds, self._wants):
            # The first one may be what a probe waits for. Later ones change with every batch that is full.
            self._urgent |= not (self._holds or self._wants)
            self._holds, self._wants, self._waits_changed = holds, wants, True
        if self._muted and self._cluster_id() != self._reported_cluster:
            self._urgent = True
        if self._due_ms() > manager.local.now_ms:
            return
        if len(self._outbox) < _MAX_QUEUED_REPORTS:
            self._report(manager)
        else:
            self._sent_ms, self._urgent, self._waits_changed = manager.local.now_ms, False, False

    def next_change_ms(self, now_ms: float) -> float:
        if not self._connected:
            return math.inf
        return max(0.0, min([self._due_ms(), *self._release_ms.values()]) - now_ms)

    def _due_ms(self) -> float:
        if self._urgent:
            return -math.inf
        if self._errors or self._changes or self._failures:
            return self._sent_ms + self._interval_ms
        if self._waits_changed:
            return self._sent_ms + min(self._interval_ms, _MIN_CHANGE_MS)
        # Without news a task only shows that it is there, and which brokers respond.
        is_busy = self._rows or self._holds or self._muted
        return next_beat_ms(self._sent_ms, max(self._interval_ms, HEALTHY_REPORT_MS)) if is_busy else math.inf

    def _apply(self, message: BreakerUpdate | bool, manager: CircuitBreakManager) -> None:
        if isinstance(message, bool):
            self._connected = message
            if not message:
                self.is_current = True
            self._muted.clear()
            self._forget()
            manager.on_coordinator_lost()
            # The coordinator may be new, or may have forgotten this task.
            ongoing = manager.local.mutes_to_report() if message else []
            self._changes = [one for one in ongoing if not one.evidence.counted]
            self._urgent = message
            return
        if not self._connected:
            return
        if message.whole:
            self._muted.clear()
            self._release_ms.clear()
            self.is_current = True
        self._muted.update(message.added)
        for target in message.added:
            self._release_ms.pop(target, None)
        for target in message.removed:
            self._release_ms[target] = manager.local.now_ms + message.delay_ms
        for asked in message.asks:
            if isinstance(asked, TopicPartition):
                self._asked[asked] = None
                self._urgent = True
            else:
                manager.probes.ask_broker(asked)
        self._release(manager)
        manager.apply_shared(self._muted, message.leases)

    def _release(self, manager: CircuitBreakManager) -> None:
        """Unmute targets that the coordinator has unmuted, once their delay in this task is over."""
        due = [target for target, at_ms in self._release_ms.items() if at_ms <= manager.local.now_ms]
        for target in due:
            del self._release_ms[target]
            self._muted.pop(target, None)
        if due:
            manager.apply_shared(self._muted, {})

    def _forget(self) -> None:
        self._rows, self._errors, self._last_response_ms = 0, {}, {}
        self._asked, self._release_ms = {}, {}
        self._changes, self._failures, self._holds, self._wants = [], [], [], []
        self._reported, self._waits_changed = ([], []), False
        self._reported_cluster = None

    def _report(self, manager: CircuitBreakManager) -> None:
        now_ms = manager.local.now_ms
        count = how_many_fit((one.target, one.reason) for one in self._changes)
        changes, self._changes = self._changes[:count], self._changes[count:]
        count = how_many_fit(self._failures)
        failed, self._failures = self._failures[:count], self._failures[count:]
        cluster_id = self._cluster_id()
        report = BreakerReport(
            {node: now_ms - at for node, at in self._last_response_ms.items()},
            self._rows,
            self._outcomes(manager),
            tuple(
                MuteReport(one.target, one.reason, one.evidence.silence_ms) for one in changes if one.muted
            ),
            tuple(UnmuteReport(one.target, one.reason) for one in changes if not one.muted),
            tuple(failed),
            tuple(that_fit(self._holds)) if self._holds != self._reported[0] else None,
            tuple(that_fit(self._wants)) if self._wants != self._reported[1] else None,
            cluster_id=cluster_id if cluster_id != self._reported_cluster else None,
        )
        self._reported = self._holds, self._wants
        self._waits_changed = False
        self._reported_cluster = cluster_id
        self._rows, self._last_response_ms = 0, {}
        self._sent_ms = now_ms
        self._urgent = bool(self._changes or self._failures or self._errors or self._asked)
        with self._lock:
            self._outbox.append((now_ms, report))
        self._wake()

    def _outcomes(self, manager: CircuitBreakManager) -> tuple[OutcomeCounts, ...]:
        """Outcomes of failing partitions and of those that the coordinator has requested, even where there
        are none: it waits for them. The next report takes what does not fit into this one.
        """
        outcomes: list[OutcomeCounts] = []
        room = Room()
        while self._errors or self._asked:
            partition = next(iter(self._errors or self._asked))
            answered, error = self._errors.get(partition, (False, ""))
            if not room.takes(partition, error):
                break
            is_asked = partition in self._asked
            self._asked.pop(partition, None)
            self._errors.pop(partition, None)
            # Failures while the broker is muted say nothing about the partition. Those of a partition that is
            # muted for all say nothing new.
            failed, total = self._windows.recent(partition, manager.local.now_ms)
            if error and (partition in self._muted or manager.has_muted_leader(partition)):
                failed, total = 0, 0
            if total or is_asked:
                outcomes.append(OutcomeCounts(partition, total - failed, failed, answered, error))
        return tuple(outcomes)

    # -- Channel: the client's thread -----------------------------------------------------------

    def next_message(self, now_ms: float) -> Mapping[str, Any] | None:
        with self._lock:
            if not self._outbox:
                leaving, self._is_leaving = self._is_leaving and self._has_reported, False
                self._has_reported &= not leaving
                return encode_report(BreakerReport(is_resting=True)) if leaving else None
            made_ms, report = self._outbox.popleft()
            self._has_reported = True
        return encode_report(aged(report, max(0.0, now_ms - made_ms)))

    def hurry(self) -> None:
        """No message of this channel is delayed, but the coordinator learns of the pause."""
        with self._lock:
            self._is_leaving = True

    def next_message_delay_ms(self, now_ms: float) -> float:
        return 0.0 if self._outbox else math.inf

    def on_reply(self, body: Mapping[str, Any], last: bool, now_ms: float) -> None:
        if body:
            self.on_push(body, now_ms)

    def on_push(self, body: Mapping[str, Any], now_ms: float) -> None:
        self._put(decode_update(body, MAX_MUTES))

    def on_connected(self, now_ms: float) -> None:
        self._put(True)

    def on_lost(self, now_ms: float) -> None:
        with self._lock:
            self._outbox.clear()
            self._has_reported = False
        self._put(False)

    def _put(self, message: BreakerUpdate | bool) -> None:
        with self._lock:
            self._inbox.append(message)
        self._wake_sender()
