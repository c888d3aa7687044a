"""The circuit breaker of a job, KIP-693 for all tasks together: its messages, and the side of a task.

A task reports what fails for it and what it has muted on evidence of its own; the coordinator (see
breaker_service) asks others, mutes for all, and lets one task probe in each interval. Partitions of one topic
stand together in a message, and so do those with the same reason: thousands may fail at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Annotated, NamedTuple

from kafka_sink.breaker.interface import SentBatch
from kafka_sink.breaker.manager import CircuitBreakManager
from kafka_sink.breaker.outcomes import Health, OutcomeWindows, has_response, health_of
from kafka_sink.breaker.states import MuteChange, ProbeLease, Target
from kafka_sink.clock import RANDOM
from kafka_sink.coordinator.schema import (
    AtMost,
    Channel,
    Count,
    Message,
    Ms,
    NodeId,
    Scope,
    Text,
    Topic,
    Within,
    cut,
    message,
    receives,
)
from kafka_sink.errors import ProtocolError
from kafka_sink.model import TopicPartition

# The coordinator shares no more mutes than this; tasks keep others to themselves.
MAX_MUTES = 10_000
# Targets of one message of a task, whose names and reasons then fit into it. What is left goes into others.
MAX_TARGETS = 400
# Muted partitions for which a task says that it has rows. Other tasks name others.
MAX_WAITING = 100
# After a mute one task sends again, a step later two more, then four, and so on.
RAMP_STEP_MS = 100.0
MAX_RAMP_MS = 20 * RAMP_STEP_MS
# How often a task checks what its rows wait for.
_CHECK_MS = 100.0
# What lay there for longer says nothing of the present: the task did not run.
_MAX_OUTCOME_AGE_MS, _MAX_ANSWER_AGE_MS = 5_000.0, 250.0

_Counts = Annotated[tuple[Count, ...], AtMost(MAX_MUTES)]


class Partitions(NamedTuple):
    """Of one topic, by their numbers."""

    topic: Topic
    numbers: _Counts


class Targets(NamedTuple):
    """Brokers by their ids, and partitions."""

    brokers: _Counts = ()
    topics: Annotated[tuple[Partitions, ...], AtMost(MAX_MUTES)] = ()


class Reasoned(NamedTuple):
    """Targets for which the same is said."""

    reason: Text
    targets: Targets


_Reasons = Annotated[tuple[Reasoned, ...], AtMost(MAX_MUTES)]


class TopicOutcomes(NamedTuple):
    """Batches of a topic's partitions in the last seconds: how many were written, how many failed.
    ``answered``: a broker responded with ``error``, the last one."""

    topic: Topic
    answered: bool
    error: Text
    partitions: _Counts
    written: _Counts
    failed: _Counts


@message
class Outcomes:
    """Of partitions that fail, or that the coordinator watches: also where there are none. ``rows``: sent
    since the producer began."""

    rows: Count
    topics: Annotated[tuple[TopicOutcomes, ...], AtMost(MAX_TARGETS)]


@message
class MuteWanted:
    """What a task has muted. ``silence_ms``: for how long brokers have not responded, if that is why."""

    wanted: _Reasons
    silence_ms: Annotated[dict[NodeId, Ms], AtMost(MAX_TARGETS)]


@message
class Answer:
    """The task had a response of a broker so long ago."""

    broker: NodeId
    age_ms: Ms


@message
class Unmuted:
    """By the outcome of a probe, or by the breaker class of the task."""

    targets: Targets


@message
class ProbeFailed:
    """Probes that the coordinator had permitted."""

    failed: _Reasons


@message
class Waiting:
    """Muted partitions that batches of the task wait for, and those that its rows could go to. Each message
    replaces the one before."""

    held: Targets
    acceptable: Targets


@message
class Mutes:
    """What is muted for all. ``whole``: everything that is; else what has changed. After ``removed``, rows
    of a task may go there again within ``ramp_ms``, of each task at another time."""

    whole: bool
    added: _Reasons
    removed: Targets
    ramp_ms: Annotated[float, Within(0, int(MAX_RAMP_MS))]


@message
class Watch:
    """Report the outcomes of these partitions now."""

    partitions: Targets


@message
class Question:
    """Does the broker respond? An answer younger than ``within_ms`` says so, or the next response."""

    broker: NodeId
    within_ms: Ms


@message
class Probe:
    """The task may probe each of these once within ``left_ms``. ``new_rows``: nobody has batches for them,
    so new rows may go there until one is sent."""

    targets: Targets
    new_rows: bool
    left_ms: Ms


def together(targets: Iterable[Target]) -> Targets:
    brokers: list[int] = []
    topics: dict[str, list[int]] = {}
    for target in targets:
        if isinstance(target, int):
            brokers.append(target)
        else:
            topics.setdefault(target.topic, []).append(target.partition)
    return Targets(tuple(brokers), tuple(Partitions(name, tuple(found)) for name, found in topics.items()))


def apart(targets: Targets, most: int) -> list[Target]:
    """Each of them. Raises ProtocolError for more than ``most``."""
    if len(targets.brokers) + sum(len(one.numbers) for one in targets.topics) > most:
        raise ProtocolError(f"more than {most} brokers and partitions in a message")
    found: list[Target] = list(targets.brokers)
    for topic, numbers in targets.topics:
        found += [TopicPartition(topic, number) for number in numbers]
    return found


def by_reason(reasons: Mapping[Target, str]) -> tuple[Reasoned, ...]:
    grouped: dict[str, list[Target]] = {}
    for target, reason in reasons.items():
        grouped.setdefault(cut(reason), []).append(target)
    return tuple(Reasoned(reason, together(found)) for reason, found in grouped.items())


def with_reasons(said: Iterable[Reasoned], most: int) -> dict[Target, str]:
    """By target, what is said of it. Raises ProtocolError for more than ``most``."""
    found: dict[Target, str] = {}
    for reason, targets in said:
        found |= dict.fromkeys(apart(targets, most - len(found)), reason)
    return found


def _delay_ms(ramp_ms: float, chance: float) -> float:
    """When one of the tasks that share a ramp sends again: in each step twice as many as before."""
    return RAMP_STEP_MS * math.log2(1.0 + chance * (2.0 ** (ramp_ms / RAMP_STEP_MS) - 1.0))


class BreakerChannel(Channel):
    """A channel of the coordinator's client, and the SharedState of a ProducerBreaker.

    ``wake_sender`` makes the sender apply what has come. ``cluster_id`` returns the id of the Kafka cluster,
    None until it is known: broker ids mean nothing in another one.
    """

    scope = Scope.CLUSTER

    def __init__(
        self,
        wake_sender: Callable[[], None],
        report_interval_ms: float,
        cluster_id: Callable[[], str | None],
        random: Callable[[], float] = RANDOM.random,
    ) -> None:
        super().__init__()
        self._wake_sender = wake_sender
        self._interval_ms = report_interval_ms
        self._cluster_id = cluster_id
        self._random = random
        # Whether all mutes of the cluster with this id have come, or no coordinator can be reached.
        self._is_told, self._is_alone = False, True
        self._joined: str | None = None
        # What has come, for the sender's thread; what goes out, and until when that is worth sending.
        self._inbox: deque[Callable[[CircuitBreakManager], None]] = deque()
        self._outbox: deque[tuple[float, Message]] = deque()
        # The rest belongs to the sender's thread.
        self._connected = False
        self._windows = OutcomeWindows(0, 100)
        self._rows = 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        # The coordinator's mutes, with their reasons; when rows may go where it has ended one.
        self._muted: dict[Target, str] = {}
        self._release_ms: dict[Target, float] = {}
        # Of each partition that failed of late, whether a broker responded, and the last error. Those whose
        # failures were not reported.
        self._errors: dict[TopicPartition, tuple[bool, str]] = {}
        self._unreported: dict[TopicPartition, None] = {}
        # By broker, the last response.
        self._response_ms: dict[int, float] = {}
        # What the next messages say.
        self._watched: list[TopicPartition] = []
        self._answers: dict[int, float] = {}
        self._changes: dict[Target, MuteChange] = {}
        self._failures: dict[Target, str] = {}
        self._outcomes_ms = -math.inf
        # Held and acceptable targets as they were reported, when they were checked, when the next may go.
        self._waits: tuple[list[Target], list[Target]] = [], []
        self._checked_ms, self._waits_ms = -math.inf, math.inf

    # -- SharedState: the sender's thread ---------------------------------------------------------------

    def outcomes(
        self,
        node_id: int,
        batches: Sequence[SentBatch],
        cause: Exception | None,
        sent_ms: float,
        now_ms: float,
    ) -> None:
        if cause is None:
            self._response_ms[node_id] = now_ms
        health = health_of(cause)
        if health is Health.NEUTRAL:
            return
        failed = health is Health.UNHEALTHY
        record = self._windows.record
        for partition, rows in batches:
            self._rows += rows
            record(partition, rows, sent_ms, now_ms, failed=failed)
            if failed and self._connected and partition not in self._muted:
                self._errors[partition] = has_response(cause), str(cause)
                self._unreported[partition] = None

    def answered(self, node_id: int, now_ms: float) -> None:
        if self._connected:
            self._answers[node_id] = now_ms

    def changed(self, change: MuteChange) -> None:
        if not self._connected:
            return
        if not change.muted:
            # Otherwise the next message would mute it again before the coordinator learns of this.
            self._muted.pop(change.target, None)
            self._release_ms.pop(change.target, None)
        # The coordinator counts outcomes itself.
        if not (change.muted and change.evidence.counted):
            self._changes.pop(change.target, None)
            self._changes[change.target] = change

    def on_other_cluster(self) -> None:
        self._begin_anew()

    def exchange(self, manager: CircuitBreakManager) -> None:
        for _ in range(len(self._inbox)):
            self._inbox.popleft()(manager)
        if not self._connected:
            return
        now_ms = manager.local.now_ms
        self._release(manager)
        self._failures.update(manager.probes.take_failures())
        self._say_changes()
        for node, at_ms in self._answers.items():
            self._say(Answer(node, now_ms - at_ms), now_ms + _MAX_ANSWER_AGE_MS)
        self._answers = {}
        watched, self._watched = self._watched, []
        for start in range(0, len(watched), MAX_TARGETS):
            self._say_outcomes(manager, watched[start : start + MAX_TARGETS])
        if self._unreported and now_ms >= self._outcomes_ms + self._interval_ms:
            self._outcomes_ms = now_ms
            self._say_outcomes(manager, self._some_that_fail())
        if now_ms >= self._checked_ms + _CHECK_MS:
            self._check_waits(manager)

    def next_change_ms(self, now_ms: float) -> float:
        if not self._connected:
            return math.inf
        if self._changes or self._failures or self._answers or self._watched:
            return 0.0
        report_ms = self._outcomes_ms + self._interval_ms if self._unreported else math.inf
        return max(0.0, min([report_ms, self._waits_ms, *self._release_ms.values()]) - now_ms)

    def _say(self, said: Message, for_ms: float = math.inf) -> None:
        self._outbox.append((for_ms, said))
        self.wake()

    def _say_changes(self) -> None:
        changes, self._changes = list(self._changes.values()), {}
        failures, self._failures = list(self._failures.items()), {}
        for start in range(0, len(changes), MAX_TARGETS):
            part = changes[start : start + MAX_TARGETS]
            wanted = [one for one in part if one.muted]
            if wanted:
                silent = {
                    one.target: one.evidence.silence_ms
                    for one in wanted
                    if isinstance(one.target, int) and one.evidence.silence_ms
                }
                self._say(MuteWanted(by_reason({one.target: one.reason for one in wanted}), silent))
            if len(wanted) < len(part):
                self._say(Unmuted(together(one.target for one in part if not one.muted)))
        for start in range(0, len(failures), MAX_TARGETS):
            self._say(ProbeFailed(by_reason(dict(failures[start : start + MAX_TARGETS]))))

    def _some_that_fail(self) -> list[TopicPartition]:
        """Some of the partitions with failures. Where thousands fail for thousands of tasks, each begins with
        others, and those that are muted meanwhile need no report."""
        failing = list(self._unreported)
        start = int(self._random() * len(failing)) if len(failing) > MAX_TARGETS else 0
        return (failing[start:] + failing[:start])[:MAX_TARGETS]

    def _say_outcomes(self, manager: CircuitBreakManager, partitions: Iterable[TopicPartition]) -> None:
        now_ms = manager.local.now_ms
        found: dict[tuple[str, bool, str], list[tuple[int, int, int]]] = {}
        for partition in partitions:
            self._unreported.pop(partition, None)
            failed, total = self._windows.recent(partition, now_ms)
            answered, error = self._errors.get(partition, (False, ""))
            if not failed:
                self._errors.pop(partition, None)
            # Failures while the broker is muted say nothing about the partition.
            if error and manager.has_muted_leader(partition):
                failed, total = 0, 0
            counts = partition.partition, total - failed, failed
            found.setdefault((partition.topic, answered, cut(error)), []).append(counts)
        topics = tuple(TopicOutcomes(*key, *zip(*counts, strict=True)) for key, counts in found.items())
        self._say(Outcomes(self._rows, topics), now_ms + _MAX_OUTCOME_AGE_MS)

    def _check_waits(self, manager: CircuitBreakManager) -> None:
        now_ms = self._checked_ms = manager.local.now_ms
        shared, probes = self._muted, manager.probes
        waits: tuple[list[Target], list[Target]] = [], []
        if any(isinstance(one, TopicPartition) for one in shared):
            waits = [one for one in probes.held() if one in shared], probes.wanted()
        if waits == self._waits:
            self._waits_ms = math.inf
        elif math.isinf(self._waits_ms):
            # Of thousands that learn of a mute, not all at once; a probe follows an interval later.
            most_ms = min(self._interval_ms, manager.local.retry_interval_ms / 4)
            self._waits_ms = now_ms + self._random() * most_ms
        if now_ms >= self._waits_ms:
            self._waits, self._waits_ms = waits, math.inf
            self._say(Waiting(*(together(self._sample(one)) for one in waits)))

    def _sample(self, targets: list[Target]) -> Iterable[Target]:
        start = int(self._random() * len(targets)) if len(targets) > MAX_WAITING else 0
        return islice(targets[start:] + targets[:start], MAX_WAITING)

    def _release(self, manager: CircuitBreakManager) -> None:
        """Unmute targets that the coordinator has unmuted, once their delay in this task is over."""
        due = [target for target, at_ms in self._release_ms.items() if at_ms <= manager.local.now_ms]
        for target in due:
            del self._release_ms[target]
            self._muted.pop(target, None)
        if due:
            manager.apply_shared(self._muted, {})

    # -- what has come, on the sender's thread ------------------------------------------------------------

    def _begin(self, connected: bool, manager: CircuitBreakManager) -> None:
        self._connected = connected
        self._begin_anew()
        manager.on_coordinator_lost()
        if connected:
            ongoing = (one for one in manager.local.mutes_to_report() if not one.evidence.counted)
            self._changes = {one.target: one for one in ongoing}

    def _take_mutes(
        self,
        whole: bool,
        added: Mapping[Target, str],
        removed: Iterable[Target],
        ramp_ms: float,
        manager: CircuitBreakManager,
    ) -> None:
        if not self._connected:
            return
        if whole:
            self._muted.clear()
            self._release_ms.clear()
        self._muted |= added
        for target in added:
            self._release_ms.pop(target, None)
            if isinstance(target, TopicPartition):
                self._unreported.pop(target, None)
        at_ms = manager.local.now_ms + _delay_ms(ramp_ms, self._random())
        self._release_ms |= dict.fromkeys((one for one in removed if one in self._muted), at_ms)
        self._release(manager)
        manager.apply_shared(self._muted, {})
        self._is_told |= whole

    def _take_watch(self, partitions: Iterable[Target], manager: CircuitBreakManager) -> None:
        self._watched += [one for one in partitions if isinstance(one, TopicPartition)]

    def _take_question(self, asked: Question, manager: CircuitBreakManager) -> None:
        at_ms = self._response_ms.get(asked.broker, -math.inf)
        if manager.local.now_ms - at_ms < asked.within_ms:
            self._answers[asked.broker] = at_ms
        else:
            manager.probes.ask_broker(asked.broker)

    def _take_probes(self, leases: Mapping[Target, ProbeLease], manager: CircuitBreakManager) -> None:
        if self._connected:
            manager.apply_shared(self._muted, leases)

    # -- Channel: the client's thread ---------------------------------------------------------------------

    @property
    def is_current(self) -> bool:
        """Whether the mutes of this cluster have come, or no coordinator can be reached. Any thread."""
        known = self._cluster_id()
        return self._is_alone or (self._is_told and known is not None and self._joined == known)

    @property
    def is_waiting(self) -> bool:  # type: ignore[override]
        return bool(self._muted)

    def expect(self) -> None:
        """The client is about to connect. Called on the task's thread."""
        self._is_told = self._is_alone = False

    def next_message(self, now_ms: float) -> Message | None:
        while self._outbox:
            until_ms, said = self._outbox.popleft()
            if now_ms <= until_ms:
                return said
        return None

    def next_message_delay_ms(self, now_ms: float) -> float:
        return 0.0 if self._outbox else math.inf

    def left_delay_ms(self, now_ms: float) -> float:
        # The sender goes on between tasks, and a producer that rests can answer and probe.
        return self.next_message_delay_ms(now_ms)

    def on_connected(self, now_ms: float) -> None:
        self._is_told, self._is_alone, self._joined = False, False, self._cluster_id()
        self._put(partial(self._begin, True))

    def on_lost(self, now_ms: float) -> None:
        self._put(partial(self._begin, False))
        self._is_alone = True
        self._outbox.clear()

    @receives(Mutes)
    def on_mutes(self, told: Mutes, now_ms: float) -> None:
        added, removed = with_reasons(told.added, MAX_MUTES), apart(told.removed, MAX_MUTES)
        self._put(partial(self._take_mutes, told.whole, added, removed, told.ramp_ms))

    @receives(Watch)
    def on_watch(self, told: Watch, now_ms: float) -> None:
        self._put(partial(self._take_watch, apart(told.partitions, MAX_MUTES)))

    @receives(Question)
    def on_question(self, asked: Question, now_ms: float) -> None:
        self._put(partial(self._take_question, asked))

    @receives(Probe)
    def on_probe(self, told: Probe, now_ms: float) -> None:
        lease = ProbeLease(told.left_ms, told.new_rows)
        self._put(partial(self._take_probes, dict.fromkeys(apart(told.targets, MAX_MUTES), lease)))

    def _put(self, apply: Callable[[CircuitBreakManager], None]) -> None:
        self._inbox.append(apply)
        self._wake_sender()
