"""The circuit breaker of a job (KIP-693) for all its tasks together: the messages, and a task's side of it.

A task reports what fails for it, and what it has muted by evidence of its own. The coordinator asks others,
mutes for all and lets one task probe in each interval: see breaker_service.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

from msgspec import Meta

from kafka_sink.breaker.breaker import CircuitBreakManager
from kafka_sink.breaker.failure_rate import has_response
from kafka_sink.breaker.mutes import MuteChange, Target
from kafka_sink.clock import RANDOM
from kafka_sink.coordinator.schema import (
    Channel,
    Count,
    Message,
    Ms,
    NodeId,
    ServiceScope,
    Text,
    Topic,
    cut,
    receives,
)
from kafka_sink.model import TopicPartition

if TYPE_CHECKING:
    from kafka_sink.engine.batch import ProducerBatch

# The coordinator shares no more mutes than this; tasks keep others to themselves.
MAX_MUTES = 10_000
# Targets of one message of a task, which has room for the longest names and reasons of so many.
MAX_TARGETS = 400
# Muted partitions for which a task says that it has rows. Others name others.
MAX_WAITING = 100
# After a mute one task sends again, a step later two more, then four, and so on.
_RAMP_STEP_MS = 100.0
# Tasks report within so long for each of them: what the first ones say is enough, and what is muted meanwhile
# needs no report.
_SPREAD_MS = 0.3
# A task that has named many muted partitions names others only after this time.
_NAME_AGAIN_MS = 10_000.0

_T = TypeVar("_T")

if TYPE_CHECKING:
    WirePartition = TopicPartition
else:

    class WirePartition(TopicPartition):
        """A partition, with the bounds of a message."""

        __slots__ = ()
        topic: Topic
        partition: Count


_Target = Annotated[int, Meta(ge=0, le=2**31 - 1)] | WirePartition
_Targets = Annotated[tuple[_Target, ...], Meta(max_length=MAX_TARGETS)]
_SomeTargets = Annotated[tuple[_Target, ...], Meta(max_length=MAX_WAITING)]
_AllTargets = Annotated[tuple[_Target, ...], Meta(max_length=MAX_MUTES)]


class Reasoned(NamedTuple):
    target: _Target
    reason: Text


class OwnMute(NamedTuple):
    """``silence_ms``: for how long a broker has not responded, if that is why."""

    target: _Target
    reason: Text
    silence_ms: Ms


class PartitionOutcome(NamedTuple):
    """Batches that were written to a partition, and that failed, in the last ten seconds. ``answered``: a
    broker responded with ``error``, which was the last one."""

    partition: WirePartition
    written: Count
    failed: Count
    answered: bool
    error: Text


class Outcomes(Message, frozen=True):
    """Of partitions that fail or are watched. ``rows``: sent since the producer began."""

    rows: Count
    partitions: Annotated[tuple[PartitionOutcome, ...], Meta(max_length=MAX_TARGETS)]


class MuteChanges(Message, frozen=True):
    """What the task has muted and unmuted by evidence of its own, and its probes that failed. ``unused``: it
    has no rows for these probes, which another task may make."""

    muted: Annotated[tuple[OwnMute, ...], Meta(max_length=MAX_TARGETS)] = ()
    unmuted: _Targets = ()
    failed: _Targets = ()
    unused: _Targets = ()


class Answer(Message, frozen=True):
    """To a Question: the broker's last response came so long ago."""

    broker: NodeId
    age_ms: Ms


class Waiting(Message, frozen=True):
    """Muted partitions that batches wait for, and others that rows could go to: some of many."""

    waited_for: _SomeTargets
    acceptable: _SomeTargets


class Mutes(Message, frozen=True):
    """``whole``: ``added`` is all that is muted for all ``tasks``, of which one after the other sends to what
    is ``removed``."""

    whole: bool
    added: Annotated[tuple[Reasoned, ...], Meta(max_length=MAX_MUTES)]
    removed: _AllTargets
    tasks: Count


class Watch(Message, frozen=True):
    """Report the outcomes of these partitions now."""

    partitions: Annotated[tuple[WirePartition, ...], Meta(max_length=MAX_MUTES)]


class Question(Message, frozen=True):
    """Has the broker responded within so long, or does it now?"""

    broker: NodeId
    within_ms: Ms


class Probe(Message, frozen=True):
    """The task may probe each of these once within mute.retry.interval. ``new_rows``: as no batch waits for
    them, new rows may go there until one is sent."""

    targets: _AllTargets
    new_rows: bool


def reasoned(reasons: Iterable[tuple[Target, str]]) -> tuple[Reasoned, ...]:
    return tuple(Reasoned(target, cut(reason)) for target, reason in reasons)


class BreakerChannel(Channel):
    """A channel of the coordinator's client, for the Breaker that has this ``manager``.

    ``wake_sender`` makes the sender apply what has come. ``cluster_id`` returns the id of the Kafka cluster,
    None until it is known: broker ids mean nothing in another one. ``random`` returns a number in [0, 1).
    """

    scope = ServiceScope.CLUSTER

    def __init__(
        self,
        manager: CircuitBreakManager,
        wake_sender: Callable[[], None],
        report_interval_ms: float,
        cluster_id: Callable[[], str | None],
        random: Callable[[], float] = RANDOM.random,
    ) -> None:
        super().__init__()
        self._manager, self._table = manager, manager.task_mutes
        self._wake_sender = wake_sender
        self._interval_ms = report_interval_ms
        self._cluster_id = cluster_id
        self._random = random
        self._tasks = 1
        # The cluster of this connection; whether all its mutes have come, or no coordinator can be reached.
        self._joined: str | None = None
        self._is_told, self._is_alone = False, True
        # For the sender's thread, and for the client's.
        self._inbox: deque[Callable[[], None]] = deque()
        self._outbox: deque[Message] = deque()
        # The rest belongs to the sender's thread.
        self._connected = False
        self._begin_anew()

    def _begin_anew(self) -> None:
        # When rows may go where the coordinator has ended a mute.
        self._release_ms: dict[Target, float] = {}
        # Of partitions that failed, whether a broker responded, and the last error; which were not reported.
        self._errors: dict[TopicPartition, tuple[bool, str]] = {}
        self._unreported: set[TopicPartition] = set()
        self._changes: dict[Target, MuteChange] = {}
        self._outcomes_ms = -math.inf
        self._report_ms = math.inf
        # Muted partitions that were named, and whether a batch waited for each; when, and when to check.
        self._named: dict[Target, bool] = {}
        self._named_ms = -math.inf
        self._waits_ms = math.inf

    # -- for the Breaker: the sender's thread ---------------------------------------------------------------

    def failed(self, batches: Iterable[ProducerBatch], cause: Exception) -> None:
        """Attempts of one request have failed for a reason that blames the broker."""
        for batch in batches if self._connected else ():
            mute = self._table.mutes.get(batch.partition)
            if mute is None or not mute.is_shared:
                self._errors[batch.partition] = has_response(cause), str(cause)
                self._unreported.add(batch.partition)

    def answered(self, node_id: int) -> None:
        """A broker has just responded to a request without rows: perhaps the coordinator asked about it."""
        if self._connected:
            self._say(Answer(node_id, 0.0))

    def changed(self, change: MuteChange) -> None:
        # The coordinator counts outcomes itself.
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
        self._say_changes()
        if not self._unreported:
            self._report_ms = math.inf
        elif math.isinf(self._report_ms):
            due_ms = max(now_ms, self._outcomes_ms + self._interval_ms)
            self._report_ms = due_ms + self._random() * _SPREAD_MS * (self._tasks - 1)
        if now_ms >= self._report_ms:
            self._outcomes_ms, self._report_ms = now_ms, math.inf
            # Where thousands fail, each task begins elsewhere.
            self._say_outcomes(self._some(sorted(self._unreported), MAX_TARGETS))
        if now_ms >= self._waits_ms:
            self._say_waits()

    def next_change_ms(self, now_ms: float) -> float:
        if not self._connected:
            return math.inf
        if self._changes or (self._unreported and math.isinf(self._report_ms)):
            return 0.0
        return max(0.0, min([self._report_ms, self._waits_ms, *self._release_ms.values()]) - now_ms)

    def _say(self, said: Message) -> None:
        self._outbox.append(said)
        self.wake()

    def _some(self, found: list[_T], most: int) -> list[_T]:
        start = int(self._random() * len(found)) if len(found) > most else 0
        return (found[start:] + found[:start])[:most]

    def _say_changes(self) -> None:
        changes, self._changes = list(self._changes.values()), {}
        failed = self._table.take_failures()
        for start in range(0, max(len(changes), len(failed)), MAX_TARGETS):
            part = changes[start : start + MAX_TARGETS]
            muted = [
                OwnMute(one.target, cut(one.reason), one.evidence.silence_ms) for one in part if one.muted
            ]
            unmuted = [one.target for one in part if not one.muted]
            lost = tuple(failed[start : start + MAX_TARGETS])
            self._say(MuteChanges(tuple(muted), tuple(unmuted), lost))
        unused = self._table.return_permits()
        for start in range(0, len(unused), MAX_TARGETS):
            self._say(MuteChanges(unused=tuple(unused[start : start + MAX_TARGETS])))
        for target in unused:
            # It is named again once there are rows for it.
            self._named.pop(target, None)

    def _say_outcomes(self, partitions: Iterable[TopicPartition]) -> None:
        found = []
        for partition in partitions:
            self._unreported.discard(partition)
            home = self._manager.partition(partition)
            failed, total = (0, 0) if home is None else home.outcomes(self._table.now_ms)
            answered, error = self._errors.get(partition, (False, ""))
            if not failed:
                self._errors.pop(partition, None)
            if self._table.leader_id(partition) in self._table.mutes:
                # Failures while the broker is muted say nothing about the partition.
                failed = total = 0
            found.append(PartitionOutcome(partition, total - failed, failed, answered, cut(error)))
        self._say(Outcomes(self._manager.rows, tuple(found)))

    def _say_waits(self) -> None:
        """Name partitions with rows: not each time that one is unmuted, as thousands may be, one by one."""
        now_ms, muted = self._table.now_ms, self._table.shared()
        self._named = {target: waited_for for target, waited_for in self._named.items() if target in muted}
        waited_for = [one for one in self._table.waited_for() if one in muted]
        acceptable = list(self._table.acceptable())
        is_new = any(not self._named.get(one) for one in waited_for) or not self._named.keys() >= set(
            acceptable
        )
        if is_new and (len(self._named) < MAX_WAITING // 2 or now_ms >= self._named_ms + _NAME_AGAIN_MS):
            self._named_ms = now_ms
            waited_for, acceptable = self._some(waited_for, MAX_WAITING), self._some(acceptable, MAX_WAITING)
            self._named |= dict.fromkeys(acceptable, False) | dict.fromkeys(waited_for, True)
            self._say(Waiting(tuple(waited_for), tuple(acceptable)))
        self._wait_to_name()

    def _wait_to_name(self) -> None:
        if not any(isinstance(one, TopicPartition) for one in self._table.shared()):
            self._waits_ms = math.inf
            return
        # Not all tasks at once: the first probe follows an interval after a mute.
        most_ms = min(self._interval_ms, self._table.retry_interval_ms / 4)
        self._waits_ms = self._table.now_ms + self._random() * max(most_ms, _SPREAD_MS * self._tasks)

    def _release(self) -> None:
        """Unmute targets that the coordinator has unmuted, once their delay in this task is over."""
        due = {target for target, at_ms in self._release_ms.items() if at_ms <= self._table.now_ms}
        for target in due:
            del self._release_ms[target]
        if due:
            muted = self._table.shared().items()
            self._table.apply_shared({target: reason for target, reason in muted if target not in due})

    # -- what has come: the sender's thread ---------------------------------------------------------------

    def _take(self, message: Message) -> None:
        match message:
            case Mutes():
                self._take_mutes(message)
            case Watch():
                for start in range(0, len(message.partitions), MAX_TARGETS):
                    self._say_outcomes(message.partitions[start : start + MAX_TARGETS])
            case Question():
                self._take_question(message)
            case Probe():
                self._table.permit(message.targets, new_rows=message.new_rows)

    def _begin(self, connected: bool) -> None:
        self._connected, self._is_told = connected, False
        self._begin_anew()
        self._table.on_coordinator_lost()
        if connected:
            ongoing = (one for one in self._table.mutes_to_report() if not one.evidence.counted)
            self._changes = {one.target: one for one in ongoing}

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
        self._release_ms |= dict.fromkeys((one for one in message.removed if one in muted), at_ms)
        self._release()
        if math.isinf(self._waits_ms):
            self._wait_to_name()
        self._is_told |= message.whole

    def _take_question(self, asked: Question) -> None:
        broker = self._manager.brokers.get(asked.broker)
        age_ms = math.inf if broker is None else self._table.now_ms - broker.last_response_ms
        if age_ms < asked.within_ms:
            self._say(Answer(asked.broker, age_ms))
        else:
            self._manager.ask(asked.broker)

    # -- Channel: the client's thread ---------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """Whether the mutes of this cluster have come, or no coordinator can be reached. Any thread."""
        known = self._cluster_id()
        return self._is_alone or (self._is_told and known is not None and known == self._joined)

    @property
    def is_waiting(self) -> bool:  # type: ignore[override]
        return bool(self._table.mutes)

    def expect(self) -> None:
        """The client is about to connect. Called on the task's thread."""
        self._is_told = self._is_alone = False

    def next_message(self, now_ms: float) -> Message | None:
        return self._outbox.popleft() if self._outbox else None

    def next_message_delay_ms(self, now_ms: float) -> float:
        return 0.0 if self._outbox else math.inf

    def on_connected(self, now_ms: float) -> None:
        self._is_told, self._is_alone, self._joined = False, False, self._cluster_id()
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
