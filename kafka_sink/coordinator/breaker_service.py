"""The coordinator's side of the circuit breaker, for tasks with one cluster and the same settings. No I/O.

**Partitions.** A task reports each partition that fails for it. ``FailingPartitions`` then asks up to a
hundred other tasks for their counts, and mutes the partition for all tasks if it fails by the same rule that
a single task uses, applied to the sums.

**Brokers.** A task that finds a broker silent wants it muted. The service asks twenty other tasks. If one of
them has had a response, the mute stays with the first task. Otherwise it becomes a mute for all tasks.

**Probes.** In each interval one task may probe each muted target, and a success ends the mute. So a mute that
was wrong usually ends after one interval.

Thousands of partitions may fail for thousands of tasks, so the work at once and the memory are bounded.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, takewhile
from random import Random

from kafka_sink.clock import GATHER_MUTES_MS, RANDOM
from kafka_sink.coordinator.breaker_messages import (
    MAX_MUTES,
    Answer,
    MuteChanges,
    Mutes,
    Outcomes,
    PartitionOutcome,
    Probe,
    Question,
    Waiting,
    Watch,
    reasoned,
)
from kafka_sink.coordinator.schema import MemoryBudget, Outbox, Service, ServiceScope, cut, receives
from kafka_sink.model import Target, TopicPartition
from kafka_sink.options import SinkOptions
from kafka_sink.options.parse import failure_rate_settings
from kafka_sink.options.table import DEFAULT_BREAKER
from kafka_sink.outcomes import MIN_FAILURES, reaches

# How long tasks have to report when they watch a partition, and to answer a question.
_WATCH_MS, _QUESTION_MS = 400.0, 250.0
# How long a partition is not watched again if its sums did not show a failure.
_IDLE_MS = 1_000.0
# The most and the fewest tasks that watch a partition, and the most reports that all watchers may send.
_MAX_WATCHERS, _MIN_WATCHERS, _MAX_REPORTS = 100, 10, 20_000
# How many unsolicited reports about a partition are accepted: few, compared to the fewest watchers.
_MAX_REPORTERS = 3
# How many tasks are asked about one broker, and about how many brokers at a time.
_MAX_ASKED, _MAX_QUESTIONS = 20, 200
# The most partitions judged, the most that begin to be watched, and the most mutes checked, in one iteration.
_JUDGED_AT_ONCE, _WATCHED_AT_ONCE, _CHECKED_AT_ONCE = 300, 1_000, 250
_CHECK_MS = 20.0
# For each mute, how many tasks are remembered that have batches or rows for it.
_MAX_HOLDERS = 16
# The size of all mutes as JSON, because one message contains them all.
_MAX_MUTES_BYTES = 1_800_000
# Changes, and new tasks while anything is muted, wait to be sent together: this long for each task, and at
# most this long. Sending then takes only a part of the time.
_GATHER_PER_TASK_MS, _MAX_GATHER_MS = 0.3, 1_000.0
# Estimates of the bytes that a partition or broker in question takes, and a mute.
_WATCHED_BYTES, _MUTE_BYTES = 2_500, 3_000
# After a mute that one task alone asked for, further such mutes are ignored for this multiple of its
# duration, and at most for this many intervals.
_PAUSE_FACTOR, _MAX_PAUSE = 5.0, 15
# Brokers, and partitions that no task has rows for, are unmuted after this time.
_FORGET_MS = 600_000.0


@dataclass(slots=True)
class _Watched:
    """A partition in question. ``reports``: for each task, batches written, batches failed, and whether a
    broker responded. ``missing``: the watchers that have not reported yet."""

    reports: dict[int, tuple[int, int, bool]] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    error: str = ""


class FailingPartitions:
    """Decides which partitions fail, using the reports of many tasks. Each task counts once.

    Tasks report on their own when a partition fails for them. A sample of all tasks is then asked as well, so
    that tasks for which the partition works are also heard. A partition is first new (it waits for watchers),
    then open (reports are collected until a deadline), and, if it does not fail, idle for a while.
    """

    def __init__(self, trigger_count: int, trigger_perc: int, random: Random) -> None:
        self._trigger_count = trigger_count
        self._perc = trigger_perc
        self._random = random
        # The rows that all tasks have sent, and whether there is no memory to watch more partitions.
        self.rows, self.is_full = 0, False
        self._watched: dict[TopicPartition, _Watched] = {}
        # The watched partitions that have no watchers yet.
        self._new: deque[TopicPartition] = deque()
        # For each watched partition that has watchers: the deadline for their reports, the earliest first.
        self._open: OrderedDict[TopicPartition, float] = OrderedDict()
        # Partitions that did not fail, and until when they are not watched again.
        self._idle: OrderedDict[TopicPartition, float] = OrderedDict()
        self._asked_ms = -math.inf

    def count(self, peer: int, outcome: PartitionOutcome) -> None:
        partition, written, failed, answered, error = outcome
        watched = self._watched.get(partition)
        if watched is None:
            if self.is_full or not failed:
                return
            watched = self._watched[partition] = _Watched()
            if partition not in self._idle:
                self._new.append(partition)
        # If thousands of partitions fail for thousands of tasks, most reports end here.
        is_one_more = peer not in watched.reports and peer not in watched.missing
        if is_one_more and len(watched.reports) >= _MAX_REPORTERS:
            return
        watched.reports[peer] = written, failed, answered
        watched.error = (error if failed else "") or watched.error
        if peer in watched.missing:
            watched.missing.discard(peer)
            if not watched.missing:
                self._open[partition] = -math.inf
                self._open.move_to_end(partition, last=False)

    def watch(self, tasks: Collection[int], now_ms: float) -> tuple[list[TopicPartition], list[int]]:
        """Start to watch some new partitions. Returns them, and the tasks that are to watch all of them."""
        for partition in _due(self._idle, now_ms):
            del self._idle[partition]
            if partition in self._watched:
                self._new.append(partition)
        if not self._new or now_ms < self._asked_ms + GATHER_MUTES_MS:
            return [], []
        self._asked_ms = now_ms
        wanted = min(_MAX_WATCHERS, max(_MIN_WATCHERS, _MAX_REPORTS // len(self._new)))
        watchers = self._random.sample(list(tasks), min(wanted, len(tasks)))
        partitions = [self._new.popleft() for _ in range(min(_WATCHED_AT_ONCE, len(self._new)))]
        for partition in partitions:
            self._watched[partition].missing = set(watchers)
            self._open[partition] = now_ms + _WATCH_MS
        return partitions, watchers

    def judge(self, now_ms: float) -> Iterator[tuple[TopicPartition, str, list[int]]]:
        """Yield some partitions that fail, each with the reason and the tasks for which it fails."""
        for partition in _due(self._open, now_ms):
            del self._open[partition]
            watched = self._watched.pop(partition)
            failing, writing, failures = [], 0, 0
            for peer, (written, failed, answered) in watched.reports.items():
                writing += written + failed > 0
                if failed and reaches(failed, failed + written, self._perc):
                    failing.append(peer)
                    # One lost connection does not show that the partition is broken. A broker's error does.
                    failures += min(failed, MIN_FAILURES) if answered or failed >= MIN_FAILURES else 0
            enough = failures >= MIN_FAILURES
            if enough and self.rows >= self._trigger_count and reaches(len(failing), writing, self._perc):
                who = f"{len(failing)} of {writing} tasks that write to it and were asked"
                yield partition, f"it fails for {who}; last error: {watched.error}", failing
            else:
                self._idle[partition] = now_ms + _IDLE_MS

    def __len__(self) -> int:
        return len(self._watched) + len(self._idle)

    def due_ms(self) -> float:
        """When there is something to watch, to judge or to forget."""
        times = [next(iter(deadlines.values())) for deadlines in (self._open, self._idle) if deadlines]
        if self._new:
            times.append(self._asked_ms + GATHER_MUTES_MS)
        return min(times, default=math.inf)


def _due(times: Mapping[TopicPartition, float], now_ms: float) -> list[TopicPartition]:
    """The partitions that are due, at most ``_JUDGED_AT_ONCE`` of them. ``times`` has the earliest first."""
    return list(takewhile(lambda partition: times[partition] <= now_ms, islice(times, _JUDGED_AT_ONCE)))


@dataclass(slots=True)
class _Inquiry:
    """A task wants a broker muted, unless an ``asked`` task has had a response since ``since_ms``."""

    peer: int
    reason: str
    asked: frozenset[int]
    since_ms: float
    until_ms: float


@dataclass(slots=True)
class _Mute:
    """A mute that all tasks share.

    ``origin``: the task that asked for it, if it was one task alone. ``size``: its bytes in a message.
    ``prober``: the task that may probe until ``probe_ends_ms``; without one, a task may probe from
    ``retry_at_ms`` on. ``tried``: tasks that are not to probe next. ``waiting`` and ``acceptable``: tasks
    that have batches, or new rows, for a muted partition.
    """

    target: Target
    reason: str
    since_ms: float
    origin: int | None
    size: int
    retry_at_ms: float
    prober: int | None = None
    probe_ends_ms: float = math.inf
    hurried_ms: float = -math.inf
    tried: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    acceptable: set[int] = field(default_factory=set)

    def end_probe(self, retry_at_ms: float) -> None:
        """The probe failed, or it is lost."""
        self.prober, self.probe_ends_ms, self.retry_at_ms = None, math.inf, retry_at_ms


class BreakerService(Service):
    """Shares mutes between tasks: it decides them, distributes them, and hands out permits for probes.

    The life of a mute: ``_mute`` starts it. A partition's mute follows a verdict of FailingPartitions, or
    starts at once if a task with a class of its own asks for it. A broker's mute follows a question about the
    broker (``_ask``) that no task answered in time, whichever class asks for it. ``_distribute`` sends the
    mute to all tasks, gathered with other changes. ``_check_some`` permits one task to probe, and another
    task when that probe fails. ``_unmute`` ends the mute when the prober or the origin reports a success.

    ``budget`` is shared by the services of all clusters. Mutes beyond it are not shared.
    """

    scope = ServiceScope.CLUSTER

    def __init__(
        self,
        options: SinkOptions,
        out: Outbox,
        budget: MemoryBudget | None = None,
        random: Random = RANDOM,
    ) -> None:
        super().__init__(out)
        self._budget, self._cost = MemoryBudget() if budget is None else budget, 0
        self._random = random
        settings = options.breaker
        # None if a user's class decides. Partitions that such a class mutes are shared without a vote. Other
        # tasks are asked about a broker whichever class mutes it.
        self._failing: FailingPartitions | None = None
        if settings.class_path == DEFAULT_BREAKER:
            rule = failure_rate_settings(dict(settings.given))
            self._failing = FailingPartitions(rule.trigger_message_count, rule.trigger_failure_perc, random)
        self._interval_ms = settings.mute_retry_interval_ms
        # For each task, the rows that it has sent.
        self._tasks: dict[int, int] = {}
        self._inquiries: dict[int, _Inquiry] = {}
        # The mutes that are checked next come first.
        self.mutes: OrderedDict[Target, _Mute] = OrderedDict()
        self._checked_ms = -math.inf
        # The bytes of these mutes, and of mutes that have ended without all tasks having been notified.
        self._mutes_bytes = 0
        # For each partition, until when a mute that one task alone asks for is ignored.
        self._paused_ms: dict[Target, float] = {}
        # Changes that have not been sent, when the last ones were, and tasks that have got no mutes yet.
        self._added: dict[Target, str] = {}
        self._removed: dict[Target, int] = {}
        self._distributed_ms = -math.inf
        self._newcomers: dict[int, None] = {}

    def _is_full(self) -> bool:
        watched = len(self._inquiries) + (0 if self._failing is None else len(self._failing))
        self._pay(_WATCHED_BYTES * watched + _MUTE_BYTES * (len(self.mutes) + len(self._paused_ms)))
        return self._budget.is_full

    def _pay(self, cost: int) -> None:
        self._budget.used += cost - self._cost
        self._cost = cost

    def close(self) -> None:
        self._pay(0)

    def on_joined(self, peer: int, now_ms: float) -> None:
        self._tasks[peer] = 0
        if self.mutes:
            self._newcomers[peer] = None
        else:
            self.out.send(peer, Mutes(True, (), (), len(self._tasks)))

    def on_gone(self, peer: int, now_ms: float) -> None:
        del self._tasks[peer]
        self._newcomers.pop(peer, None)

    @receives(Waiting)
    def on_waiting(self, peer: int, message: Waiting, now_ms: float) -> None:
        for mute in self._mutes_of(message.waited_for):
            self._add(peer, mute.waiting)
        for mute in self._mutes_of(message.acceptable):
            self._add(peer, mute.acceptable)

    def _mutes_of(self, targets: Iterable[Target]) -> Iterator[_Mute]:
        return filter(None, map(self.mutes.get, targets))

    def _add(self, peer: int, holders: set[int]) -> None:
        if len(holders) >= _MAX_HOLDERS:
            holders -= {holder for holder in holders if holder not in self._tasks}
        if len(holders) < _MAX_HOLDERS:
            holders.add(peer)

    @receives(Outcomes)
    def on_outcomes(self, peer: int, message: Outcomes, now_ms: float) -> None:
        failing = self._failing
        if failing is None:
            return
        failing.is_full = self._is_full()
        failing.rows += max(0, message.rows - self._tasks[peer])
        self._tasks[peer] = max(message.rows, self._tasks[peer])
        for outcome in message.partitions:
            if outcome.partition not in self.mutes:
                failing.count(peer, outcome)

    def _judge(self, failing: FailingPartitions, now_ms: float) -> None:
        for partition, reason, peers in failing.judge(now_ms):
            self._mute(partition, reason, now_ms, peers[0] if len(peers) == 1 else None)
        partitions, watchers = failing.watch(self._tasks, now_ms)
        if partitions:
            self.out.broadcast(watchers, Watch(tuple(partitions)))

    @receives(MuteChanges)
    def on_mute_changes(self, peer: int, message: MuteChanges, now_ms: float) -> None:
        for target, reason, silence_ms in message.muted:
            if isinstance(target, int):
                self._ask(peer, target, reason, silence_ms, now_ms)
            elif self._failing is None:
                self._mute(target, reason, now_ms, peer)
        # If another task is the prober, the batch was sent before the mute, or the permit has expired.
        for mute in self._probed_by(peer, message.failed):
            mute.end_probe(now_ms + self._interval_ms)
        for mute in self._probed_by(peer, message.unused):
            mute.waiting.discard(peer)
            mute.acceptable.discard(peer)
            mute.end_probe(now_ms)
        for target in message.unmuted:
            shared = self.mutes.get(target)
            if shared is not None and peer in (shared.origin, shared.prober):
                self._unmute(target, now_ms)
            elif shared is not None:
                self._hurry(shared, now_ms)
            elif isinstance(target, int) and (asked := self._inquiries.get(target)) and asked.peer == peer:
                del self._inquiries[target]

    def _probed_by(self, peer: int, targets: Iterable[Target]) -> list[_Mute]:
        return [mute for mute in self._mutes_of(targets) if mute.prober == peer]

    def _ask(self, peer: int, node: int, reason: str, silence_ms: float, now_ms: float) -> None:
        """Ask other tasks whether a broker that this task wants muted has responded to them."""
        is_full = len(self._inquiries) >= _MAX_QUESTIONS or self._is_full()
        if node in self.mutes or node in self._inquiries or is_full:
            return
        sample = self._random.sample(list(self._tasks), min(_MAX_ASKED + 1, len(self._tasks)))
        asked = [task for task in sample if task != peer][:_MAX_ASKED]
        # Responses in the first half of the silence may have been on their way when the broker stopped.
        since_ms, until_ms = now_ms - silence_ms / 2, now_ms + _QUESTION_MS
        self._inquiries[node] = _Inquiry(peer, reason, frozenset(asked), since_ms, until_ms)
        self.out.broadcast(asked, Question(node, silence_ms / 2))

    @receives(Answer)
    def on_answer(self, peer: int, message: Answer, now_ms: float) -> None:
        node, at_ms = message.broker, now_ms - message.age_ms
        inquiry = self._inquiries.get(node)
        if inquiry is not None and peer in inquiry.asked and at_ms >= inquiry.since_ms:
            del self._inquiries[node]
        elif (mute := self.mutes.get(node)) is not None and at_ms > mute.since_ms:
            self._hurry(mute, now_ms)

    def _end_questions(self, now_ms: float) -> None:
        over = takewhile(lambda one: one[1].until_ms <= now_ms, self._inquiries.items())
        for node, inquiry in list(over):
            del self._inquiries[node]
            self._mute(node, inquiry.reason, now_ms, inquiry.peer)
            if node in self.mutes:
                # The tasks that were asked have requests at the broker, whose responses serve as probes.
                self.mutes[node].tried |= inquiry.asked

    def _mute(self, target: Target, reason: str, now_ms: float, origin: int | None) -> None:
        size = len(json.dumps((target, cut(reason))))
        # One message also contains all ended mutes.
        count = len(self.mutes) + len(self._removed)
        is_full = count >= MAX_MUTES or self._mutes_bytes + size > _MAX_MUTES_BYTES
        is_paused = origin is not None and now_ms < self._paused_ms.get(target, -math.inf)
        if target in self.mutes or is_full or is_paused or self._is_full():
            return
        mute = self.mutes[target] = _Mute(target, reason, now_ms, origin, size, now_ms + self._interval_ms)
        if origin is not None and isinstance(target, int):
            # Another task is the first to probe.
            mute.tried.add(origin)
        self._mutes_bytes += size - self._removed.pop(target, 0)
        self._added[target] = reason

    def _unmute(self, target: Target, now_ms: float) -> None:
        mute = self.mutes.pop(target)
        if mute.origin is not None and isinstance(target, TopicPartition):
            lasted_ms = now_ms - mute.since_ms
            self._paused_ms[target] = now_ms + min(_PAUSE_FACTOR * lasted_ms, _MAX_PAUSE * self._interval_ms)
            if len(self._paused_ms) > MAX_MUTES:
                del self._paused_ms[next(iter(self._paused_ms))]
        self._added.pop(target, None)
        self._removed[target] = mute.size

    def _hurry(self, mute: _Mute, now_ms: float) -> None:
        """Another task than the origin reports that the mute is over: let a task probe, once an interval."""
        if mute.prober is None and now_ms >= mute.hurried_ms + self._interval_ms:
            mute.hurried_ms = mute.retry_at_ms = now_ms

    def _check_some(self, now_ms: float) -> None:
        """Permit the probes that are due, and forget old mutes. Each call looks at some mutes, in turn."""
        if now_ms < self._check_due_ms():
            return
        self._checked_ms = now_ms
        permitted: dict[tuple[int, bool], list[Target]] = {}
        for target in list(islice(self.mutes, _CHECKED_AT_ONCE)):
            mute = self.mutes[target]
            self.mutes.move_to_end(target)
            if mute.probe_ends_ms <= now_ms:
                mute.end_probe(now_ms)
            if self._is_over(mute, now_ms):
                self._unmute(target, now_ms)
            elif able := self._able(mute, now_ms):
                # A task that probes another of these targets is preferred: this needs fewer messages.
                chosen = self._random.choice([prober for prober in able if prober in permitted] or able)
                permitted.setdefault(chosen, []).append(target)
                mute.prober, mute.probe_ends_ms = chosen[0], now_ms + self._interval_ms
                mute.tried.add(chosen[0])
        for (peer, is_new), targets in permitted.items():
            self.out.send(peer, Probe(tuple(targets), is_new))

    def _is_over(self, mute: _Mute, now_ms: float) -> bool:
        """Whether the mute is old, and its target a broker or a partition that no batches wait for."""
        if now_ms < mute.since_ms + _FORGET_MS:
            return False
        return isinstance(mute.target, int) or self._tasks.keys().isdisjoint(mute.waiting)

    def _check_due_ms(self) -> float:
        return self._checked_ms + _CHECK_MS if self.mutes and self._tasks else math.inf

    def _able(self, mute: _Mute, now_ms: float) -> list[tuple[int, bool]]:
        """Some tasks that may probe now, and for each whether it needs new rows.

        Any task can probe a broker, because that needs no row. A partition's probe needs a batch. A waiting
        batch is preferred, if possible one of a task other than the origin. Otherwise new rows make one.
        """
        # A probe must not be sent before the mute that it belongs to.
        if mute.prober is not None or now_ms < mute.retry_at_ms or mute.target in self._added:
            return []
        able: list[tuple[Collection[int], bool]] = [(self._tasks, False)]
        if isinstance(mute.target, TopicPartition):
            others = mute.waiting - {mute.origin}
            able = [(others, False), (mute.waiting, False), (mute.acceptable, True)]
        for _ in range(2):
            for peers, is_new in able:
                there = ((task, is_new) for task in peers if task not in mute.tried and task in self._tasks)
                if left := list(islice(there, _MAX_HOLDERS)):
                    return left
            # All of them have had their turn.
            mute.tried.clear()
        return []

    def _distribute_ms(self) -> float:
        pause_ms = min(max(GATHER_MUTES_MS, _GATHER_PER_TASK_MS * len(self._tasks)), _MAX_GATHER_MS)
        has_news = self._added or self._removed or self._newcomers
        return self._distributed_ms + pause_ms if has_news else math.inf

    def _distribute(self, now_ms: float) -> None:
        if now_ms < self._distribute_ms():
            return
        self._distributed_ms, tasks = now_ms, len(self._tasks)
        if self._newcomers:
            mutes = reasoned((mute.target, mute.reason) for mute in self.mutes.values())
            self.out.broadcast(list(self._newcomers), Mutes(True, mutes, (), tasks))
        if self._added or self._removed:
            others = [peer for peer in self._tasks if peer not in self._newcomers]
            added, removed = reasoned(self._added.items()), tuple(self._removed)
            self.out.broadcast(others, Mutes(False, added, removed, tasks))
            self._mutes_bytes -= sum(self._removed.values())
            self._added, self._removed = {}, {}
        self._newcomers = {}

    def on_time(self, now_ms: float) -> None:
        if self._failing is not None:
            self._judge(self._failing, now_ms)
        self._end_questions(now_ms)
        self._distribute(now_ms)
        self._check_some(now_ms)
        self._is_full()

    def next_change_ms(self, now_ms: float) -> float:
        failing_ms = math.inf if self._failing is None else self._failing.due_ms()
        answered_ms = next((inquiry.until_ms for inquiry in self._inquiries.values()), math.inf)
        due_ms = min(failing_ms, answered_ms, self._distribute_ms(), self._check_due_ms())
        return max(0.0, due_ms - now_ms)
