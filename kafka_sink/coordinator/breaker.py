"""The circuit breaker (KIP-693) that all tasks of a job share: a task's side of it.

A task reports the partitions that fail for it, and the mutes that it decided on its own evidence. The
coordinator asks other tasks, mutes targets for all tasks, and lets one task probe each target in each
interval: see ``breaker_service``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from kafka_sink.breaker.manager import CircuitBreakManager
from kafka_sink.breaker.mutes import MuteChange
from kafka_sink.clock import RANDOM, REPORT_OUTCOMES_MS
from kafka_sink.coordinator.breaker_messages import (
    MAX_TARGETS,
    MAX_WAITING,
    Answer,
    MuteChanges,
    Mutes,
    Outcomes,
    OwnMute,
    PartitionOutcome,
    Probe,
    Question,
    Waiting,
    Watch,
)
from kafka_sink.coordinator.schema import Channel, Message, ServiceScope, cut, receives
from kafka_sink.model import Target, TopicPartition
from kafka_sink.outcomes import has_response

# After a mute ends, one task sends again, one step later two more tasks, then four, and so on.
_RAMP_STEP_MS = 100.0
# Each task adds this much to the time over which all tasks spread their reports. The first ones suffice.
_SPREAD_MS = 0.3
# A task that has reported many partitions with rows reports further ones only after this time.
_OFFER_AGAIN_MS = 10_000.0

_T = TypeVar("_T")


class BreakerChannel(Channel):
    """The channel between the coordinator's client and the Breaker that has this ``manager``.

    Messages arrive on the client's thread, and the sender's thread applies them, so that it alone changes the
    mutes. ``wake_sender`` makes the sender apply new messages. ``cluster_id`` returns the id of the Kafka
    cluster, or None until it is known: in another cluster the same broker id is another broker.
    """

    scope = ServiceScope.CLUSTER

    def __init__(
        self,
        manager: CircuitBreakManager,
        wake_sender: Callable[[], None],
        cluster_id: Callable[[], str | None],
        random: Callable[[], float] = RANDOM.random,
    ) -> None:
        super().__init__()
        self._manager, self._table = manager, manager.task_mutes
        self._wake_sender = wake_sender
        self._cluster_id = cluster_id
        self._random = random
        self._tasks = 1
        # A task's first rows wait until ``is_current``, which reads these three. ``_joined`` is the id of the
        # cluster when the connection was made: mutes of another cluster are about other brokers. The sender's
        # thread sets ``_has_mutes`` once it has applied all mutes, and the client's thread sets ``_is_alone``
        # when there is no coordinator. Both are reset when the client is about to connect: a stale True would
        # let the rows go to a broker that other tasks have muted, and a stale False would delay them.
        self._joined: str | None = None
        self._has_mutes, self._is_alone = False, True
        # Calls for the sender's thread, and messages for the client's thread. Both deques are thread-safe.
        self._inbox: deque[Callable[[], None]] = deque()
        self._outbox: deque[Message] = deque()
        # Only the sender's thread uses the attributes from here on.
        self._connected = False
        # The rows in the last report, and those that were reported before the last connection was made.
        self._reported_rows = self._former_rows = 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        # When rows may go again to targets whose mutes the coordinator has ended.
        self._release_ms: dict[Target, float] = {}
        # For each partition that failed: whether a broker responded, and the last error. Then the partitions
        # whose failures have not been reported.
        self._errors: dict[TopicPartition, tuple[bool, str]] = {}
        self._unreported: set[TopicPartition] = set()
        self._changes: dict[Target, MuteChange] = {}
        self._outcomes_ms = -math.inf
        self._report_ms = math.inf
        # The muted partitions that were reported as having rows, and whether a batch waited for each. Then
        # the time of that report, and when to check for further ones.
        self._offered: dict[Target, bool] = {}
        self._offered_ms = -math.inf
        self._waits_ms = math.inf

    # -- for the Breaker: the sender's thread ---------------------------------------------------------------

    def on_request_failed(self, partitions: Iterable[TopicPartition], cause: Exception) -> None:
        """Attempts of one request failed for a reason that blames the broker."""
        for partition in partitions if self._connected else ():
            mute = self._table.mutes.get(partition)
            if mute is None or not mute.is_shared:
                self._errors[partition] = has_response(cause), str(cause)
                self._unreported.add(partition)

    def on_response(self, node_id: int) -> None:
        """A broker has just responded to a request without rows. The coordinator may have asked about it."""
        if self._connected:
            self._send(Answer(node_id, 0.0))

    def on_mute_change(self, change: MuteChange) -> None:
        # The coordinator counts outcomes by itself.
        if self._connected and not (change.muted and change.evidence.counted):
            self._changes[change.target] = change

    def on_other_cluster(self) -> None:
        self._begin_anew()

    def exchange(self) -> None:
        for _ in range(len(self._inbox)):
            self._inbox.popleft()()
        if not self._connected:
            return
        now_ms = self._table.now_ms
        self._release()
        self._send_changes()
        if not self._unreported:
            self._report_ms = math.inf
        elif math.isinf(self._report_ms):
            due_ms = max(now_ms, self._outcomes_ms + REPORT_OUTCOMES_MS)
            self._report_ms = due_ms + self._random() * _SPREAD_MS * (self._tasks - 1)
        if now_ms >= self._report_ms:
            self._outcomes_ms, self._report_ms = now_ms, math.inf
            # If there are too many for one report, each task begins at a random one.
            self._send_outcomes(self._some(sorted(self._unreported), MAX_TARGETS))
        if now_ms >= self._waits_ms:
            self._send_waits()

    def next_change_ms(self, now_ms: float) -> float:
        if not self._connected:
            return math.inf
        if self._changes or (self._unreported and math.isinf(self._report_ms)):
            return 0.0
        return max(0.0, min([self._report_ms, self._waits_ms, *self._release_ms.values()]) - now_ms)

    def _send(self, message: Message) -> None:
        self._outbox.append(message)
        self.wake()

    def _some(self, found: list[_T], most: int) -> list[_T]:
        start = int(self._random() * len(found)) if len(found) > most else 0
        return (found[start:] + found[:start])[:most]

    def _send_changes(self) -> None:
        changes, self._changes = list(self._changes.values()), {}
        failed, unused = self._table.take_failures(), self._table.return_permits()
        for start in range(0, max(len(changes), len(failed), len(unused)), MAX_TARGETS):
            part = slice(start, start + MAX_TARGETS)
            muted = (change for change in changes[part] if change.muted)
            self._send(
                MuteChanges(
                    tuple(OwnMute(mute.target, cut(mute.reason), mute.evidence.silence_ms) for mute in muted),
                    tuple(change.target for change in changes[part] if not change.muted),
                    tuple(failed[part]),
                    tuple(unused[part]),
                )
            )
        for target in unused:
            # The partition is reported again once there are rows for it.
            self._offered.pop(target, None)

    def _send_outcomes(self, partitions: Iterable[TopicPartition]) -> None:
        outcomes = []
        for partition in partitions:
            self._unreported.discard(partition)
            home = self._manager.partition(partition)
            failed, total = (0, 0) if home is None else home.outcomes.count(self._table.now_ms)
            answered, error = self._errors.get(partition, (False, ""))
            if not failed:
                self._errors.pop(partition, None)
            if self._table.leader_id(partition) in self._table.mutes:
                # Failures while the leader is muted do not count against the partition.
                failed = total = 0
            outcomes.append(PartitionOutcome(partition, total - failed, failed, answered, cut(error)))
        self._reported_rows = self._manager.rows
        self._send(Outcomes(self._reported_rows - self._former_rows, tuple(outcomes)))

    def _send_waits(self) -> None:
        """Report partitions for which this task has rows, but not after each of perhaps many unmutes."""
        now_ms, muted = self._table.now_ms, self._table.shared()
        self._offered = {target: waits for target, waits in self._offered.items() if target in muted}
        waited_for = [target for target in self._table.waited_for() if target in muted]
        acceptable = list(self._table.acceptable())
        is_new = not all(map(self._offered.get, waited_for)) or not self._offered.keys() >= set(acceptable)
        if is_new and (len(self._offered) < MAX_WAITING // 2 or now_ms >= self._offered_ms + _OFFER_AGAIN_MS):
            self._offered_ms = now_ms
            waited_for, acceptable = self._some(waited_for, MAX_WAITING), self._some(acceptable, MAX_WAITING)
            self._offered |= dict.fromkeys(acceptable, False) | dict.fromkeys(waited_for, True)
            self._send(Waiting(tuple(waited_for), tuple(acceptable)))
        self._wait_to_offer()

    def _wait_to_offer(self) -> None:
        if not any(isinstance(target, TopicPartition) for target in self._table.shared()):
            self._waits_ms = math.inf
            return
        # Tasks report at random times. The first probe follows an interval after a mute.
        most_ms = min(REPORT_OUTCOMES_MS, self._table.retry_interval_ms / 4)
        self._waits_ms = self._table.now_ms + self._random() * max(most_ms, _SPREAD_MS * self._tasks)

    def _release(self) -> None:
        """Unmute the targets that the coordinator has unmuted and whose delay in this task has passed."""
        due = {target for target, at_ms in self._release_ms.items() if at_ms <= self._table.now_ms}
        for target in due:
            del self._release_ms[target]
        if due:
            muted = self._table.shared().items()
            self._table.apply_shared({target: reason for target, reason in muted if target not in due})

    # -- messages that have arrived: the sender's thread --------------------------------------------------

    def _take(self, message: Message) -> None:
        match message:
            case Mutes():
                self._take_mutes(message)
            case Watch():
                for start in range(0, len(message.partitions), MAX_TARGETS):
                    self._send_outcomes(message.partitions[start : start + MAX_TARGETS])
            case Question():
                self._take_question(message)
            case Probe():
                self._table.permit(message.targets, new_rows=message.new_rows)

    def _begin(self, connected: bool) -> None:
        self._connected, self._has_mutes = connected, False
        # The coordinator has counted these rows, for a task that it takes for another one.
        self._former_rows = self._reported_rows
        self._begin_anew()
        self._table.on_coordinator_lost()
        if connected:
            ongoing = (change for change in self._table.mutes_to_report() if not change.evidence.counted)
            self._changes = {change.target: change for change in ongoing}

    def _take_mutes(self, message: Mutes) -> None:
        muted = {} if message.whole else self._table.shared()
        if message.whole:
            self._release_ms.clear()
        for target, reason in message.added:
            muted[target] = reason
            self._unreported.discard(target)
            self._release_ms.pop(target, None)
        self._table.apply_shared(muted)
        self._tasks = max(1, message.tasks)
        delay_ms = _RAMP_STEP_MS * math.log2(1.0 + self._random() * (self._tasks - 1))
        at_ms = self._table.now_ms + min(delay_ms, self._table.retry_interval_ms)
        self._release_ms |= dict.fromkeys((target for target in message.removed if target in muted), at_ms)
        self._release()
        if math.isinf(self._waits_ms):
            self._wait_to_offer()
        self._has_mutes |= message.whole

    def _take_question(self, asked: Question) -> None:
        broker = self._manager.brokers.get(asked.broker)
        age_ms = math.inf if broker is None else self._table.now_ms - broker.last_response_ms
        if age_ms < asked.within_ms:
            self._send(Answer(asked.broker, age_ms))
        else:
            self._manager.ask(asked.broker)

    # -- Channel: the client's thread ---------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """Whether this cluster's mutes have arrived, or there is no coordinator. Any thread may ask."""
        known = self._cluster_id()
        return self._is_alone or (self._has_mutes and known is not None and known == self._joined)

    @property
    def is_waiting(self) -> bool:  # type: ignore[override]
        return bool(self._table.mutes)

    def expect(self) -> None:
        """The client is about to connect. The task's thread calls it."""
        self._has_mutes = self._is_alone = False

    def next_message(self, now_ms: float) -> Message | None:
        return self._outbox.popleft() if self._outbox else None

    def next_message_delay_ms(self, now_ms: float) -> float:
        return 0.0 if self._outbox else math.inf

    def on_connected(self, now_ms: float) -> None:
        self._has_mutes, self._is_alone, self._joined = False, False, self._cluster_id()
        self._put(partial(self._begin, True))

    def on_lost(self, now_ms: float) -> None:
        self._is_alone = True
        self._outbox.clear()
        self._put(partial(self._begin, False))

    @receives(Mutes, Watch, Question, Probe)
    def on_message(self, message: Message, now_ms: float) -> None:
        self._put(partial(self._take, message))

    def _put(self, apply: Callable[[], None]) -> None:
        self._inbox.append(apply)
        self._wake_sender()
