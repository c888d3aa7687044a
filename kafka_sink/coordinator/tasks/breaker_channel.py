"""A task's side of the shared breaker: outcomes and own mutes go out, everybody's mutes and leases in."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from kafka_sink.breaker.health import Health, has_response, health_of
from kafka_sink.breaker.mute_change import MuteChange
from kafka_sink.breaker.mute_control import MuteControl
from kafka_sink.breaker.outcome_windows import OutcomeWindows
from kafka_sink.breaker.states import Target
from kafka_sink.coordinator.wire.breaker_messages import (
    MAX_MUTES,
    MAX_OUTCOMES,
    MAX_TARGETS,
    BreakerReport,
    BreakerUpdate,
    MuteReport,
    OutcomeCounts,
    aged,
    decode_update,
    encode_report,
)
from kafka_sink.model import TopicPartition
from kafka_sink.timing_bounds import HEALTHY_REPORT_MS

# Between tasks nothing is sent.
_MAX_WAITING = 4


class BreakerChannel:
    """A Participant of the coordinator's client and the SharedState of a ProducerBreaker.

    ``wake_sender`` has the sender look at what has come.
    """

    kind = "breaker"

    def __init__(self, wake_sender: Callable[[], None], report_interval_ms: float) -> None:
        self._wake_sender = wake_sender
        self._wake: Callable[[], None] = lambda: None
        self._interval_ms = report_interval_ms
        self._lock = threading.Lock()  # guards the next two
        self._inbox: deque[BreakerUpdate | bool] = deque()  # True: connected, False: lost
        self._outbox: deque[tuple[float, BreakerReport]] = deque()  # with when it was made
        # The rest belongs to the sender's thread.
        self._connected = False
        self._muted: dict[Target, str] = {}
        self._windows = OutcomeWindows(0, 100)
        self._rows = 0
        # Partitions with failures that have not been told: whether a broker refused, and the last error.
        self._errors: dict[TopicPartition, tuple[bool, str]] = {}
        # What the coordinator wants to know: partitions, and brokers that a probe without rows has asked.
        self._asked: dict[TopicPartition, None] = {}
        # When rows may go where the coordinator no longer mutes.
        self._release_ms: dict[Target, float] = {}
        self._answered_ms: dict[int, float] = {}
        self._changes: list[MuteChange] = []
        self._failures: list[tuple[Target, str]] = []
        self._holds: list[Target] = []
        self._wants: list[Target] = []
        # Of these two what the coordinator was told last.
        self._told: tuple[list[Target], list[Target]] = [], []
        self._sent_ms = -math.inf
        self._urgent = False
        # False while a connection, or its first answer, is on its way. Any thread may read it.
        self.is_current = False

    def expect(self) -> None:
        """A connection is about to be made, or made again. The task's thread."""
        self.is_current = False

    # -- SharedState: the sender's thread -----------------------------------------------------------

    def outcome(
        self,
        node_id: int,
        partition: TopicPartition,
        records: int,
        cause: Exception | None,
        sent_ms: float,
        now_ms: float,
    ) -> None:
        """See SharedState."""
        if not self._connected:
            return
        if cause is None:
            self._answered_ms[node_id] = now_ms
        verdict = health_of(cause)
        if verdict is Health.NEUTRAL:
            return
        sick = verdict is Health.UNHEALTHY
        self._rows += records
        self._windows.record(partition, records, failed=sick, sent_ms=sent_ms, now_ms=now_ms)
        if sick:
            self._errors[partition] = has_response(cause), str(cause)

    def probed(self, node_id: int, now_ms: float) -> None:
        """See SharedState."""
        if self._connected:
            self._answered_ms[node_id] = now_ms
            self._urgent = True

    def changed(self, change: MuteChange) -> None:
        """See SharedState."""
        if self._connected:
            self._urgent = True
            if not change.muted:
                # Else the next message would bring it back, before the coordinator has heard of this.
                self._muted.pop(change.target, None)
                self._release_ms.pop(change.target, None)
            # Of what was counted the coordinator makes up its own mind.
            if not (change.muted and change.evidence.counted):
                self._changes.append(change)

    def exchange(self, control: MuteControl) -> None:
        """See SharedState."""
        while self._inbox:
            with self._lock:
                news = self._inbox.popleft()
            self._take(news, control)
        if not self._connected:
            return
        self._release(control)
        failures = control.probes.take_failures()
        if failures:
            self._failures += failures
            self._urgent = True
        resting = bool(control.view or self._holds or self._wants or self._muted)
        holds = control.waiting.held()[:MAX_TARGETS] if resting else []
        wants = control.waiting.wanted()[:MAX_TARGETS] if resting else []
        if (holds, wants) != (self._holds, self._wants):
            self._holds, self._wants, self._urgent = holds, wants, True
        if self._due_ms() > control.now_ms:
            return
        if len(self._outbox) < _MAX_WAITING:
            self._report(control)
        else:
            self._sent_ms, self._urgent = control.now_ms, False

    def next_change_ms(self, now_ms: float) -> float:
        """See SharedState."""
        if not self._connected:
            return math.inf
        return max(0.0, min([self._due_ms(), *self._release_ms.values()]) - now_ms)

    def _due_ms(self) -> float:
        if self._urgent:
            return -math.inf
        if self._errors or self._holds or self._muted or self._changes or self._failures:
            return self._sent_ms + self._interval_ms
        return self._sent_ms + max(self._interval_ms, HEALTHY_REPORT_MS) if self._rows else math.inf

    def _take(self, news: BreakerUpdate | bool, control: MuteControl) -> None:
        if isinstance(news, bool):
            self._connected = news
            if not news:
                self.is_current = True
            self._muted.clear()
            self._forget()
            control.on_coordinator_lost()
            # It knows nothing of this task, or has forgotten it.
            standing = control.mutes.mutes_to_report() if news else []
            self._changes = [one for one in standing if not one.evidence.counted]
            self._urgent = news
            return
        if not self._connected:
            return
        if news.whole:
            self._muted.clear()
            self._release_ms.clear()
            self.is_current = True
        self._muted.update(news.added)
        for target in news.added:
            self._release_ms.pop(target, None)
        for target, delay_ms in news.removed.items():
            self._release_ms[target] = control.now_ms + delay_ms
        for asked in news.asks:
            if isinstance(asked, TopicPartition):
                self._asked[asked] = None
                self._urgent = True
            else:
                control.probes.ask_broker(asked)
        self._release(control)
        control.apply_shared(self._muted, news.leases)

    def _release(self, control: MuteControl) -> None:
        """Lets go what the coordinator no longer mutes, at this task's turn."""
        due = [target for target, at_ms in self._release_ms.items() if at_ms <= control.now_ms]
        for target in due:
            del self._release_ms[target]
            self._muted.pop(target, None)
        if due:
            control.apply_shared(self._muted, {})

    def _forget(self) -> None:
        self._rows, self._errors, self._answered_ms = 0, {}, {}
        self._asked, self._release_ms = {}, {}
        self._changes, self._failures, self._holds, self._wants = [], [], [], []
        self._told = [], []

    def _report(self, control: MuteControl) -> None:
        now_ms = control.now_ms
        told, self._changes = self._changes[:MAX_TARGETS], self._changes[MAX_TARGETS:]
        failed, self._failures = self._failures[:MAX_TARGETS], self._failures[MAX_TARGETS:]
        report = BreakerReport(
            {node: now_ms - at for node, at in self._answered_ms.items()},
            self._rows,
            self._outcomes(control),
            tuple(MuteReport(one.target, one.reason, one.evidence.silence_ms) for one in told if one.muted),
            tuple((one.target, one.reason) for one in told if not one.muted),
            tuple(failed),
            tuple(self._holds) if self._holds != self._told[0] else None,
            tuple(self._wants) if self._wants != self._told[1] else None,
        )
        self._told = self._holds, self._wants
        self._rows, self._answered_ms = 0, {}
        self._sent_ms = now_ms
        self._urgent = bool(self._changes or self._failures or self._errors or self._asked)
        with self._lock:
            self._outbox.append((now_ms, report))
        self._wake()

    def _outcomes(self, control: MuteControl) -> tuple[OutcomeCounts, ...]:
        """Those that fail and those asked for; what finds no room in a report is in the next."""
        told: list[OutcomeCounts] = []
        while (self._errors or self._asked) and len(told) < MAX_OUTCOMES:
            partition = next(iter(self._errors or self._asked))
            self._asked.pop(partition, None)
            refused, error = self._errors.pop(partition, (False, ""))
            # What fails with its broker says nothing more of the partition.
            if not (error and control.partitions.has_muted_leader(partition)):
                failed, total = self._windows.recent(partition, control.now_ms)
                told.append(OutcomeCounts(partition, total - failed, failed, refused, error))
        return tuple(one for one in told if one.written or one.failed)

    # -- Participant: the client's thread -----------------------------------------------------------

    def attach(self, wake: Callable[[], None]) -> None:
        """See Channel."""
        self._wake = wake

    def next_message(self, now_ms: float) -> Mapping[str, Any] | None:
        """See Channel."""
        with self._lock:
            if not self._outbox:
                return None
            made_ms, report = self._outbox.popleft()
        return encode_report(aged(report, max(0.0, now_ms - made_ms)))

    def hurry(self) -> None:
        """See Channel. Nothing here waits for more."""

    def next_message_delay_ms(self, now_ms: float) -> float:
        """See Channel."""
        return 0.0 if self._outbox else math.inf

    def on_reply(self, body: Mapping[str, Any], last: bool, now_ms: float) -> None:
        """See Channel."""
        if body:
            self.on_push(body, now_ms)

    def on_push(self, body: Mapping[str, Any], now_ms: float) -> None:
        """See Channel."""
        self._put(decode_update(body, MAX_MUTES))

    def on_connected(self, now_ms: float) -> None:
        """See Channel."""
        self._put(True)

    def on_lost(self, now_ms: float) -> None:
        """See Channel."""
        with self._lock:
            self._outbox.clear()
        self._put(False)

    def _put(self, news: BreakerUpdate | bool) -> None:
        with self._lock:
            self._inbox.append(news)
        self._wake_sender()
