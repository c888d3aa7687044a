"""The circuit breaker of all tasks that write to one cluster with the same settings. No I/O.

A partition that fails for one task is watched by up to a hundred others. It is muted for all by the same rule
as in a task, over the sums of what they report. A broker that one task finds silent is muted for all unless
one of twenty others has a response. One task at a time probes what is muted, and a success ends the mute: a
wrong one lasts for one probe's interval.

What is counted and decided in one iteration of the loop is bounded, as thousands of partitions may fail for
thousands of tasks at once. So is all that is kept, in sum and by the word of one task.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count, islice, takewhile
from random import Random
from typing import NamedTuple

from kafka_sink.breaker.failure_rate import MIN_FAILURES, reaches
from kafka_sink.breaker.mutes import BreakerState, Mute, MuteTable, Target
from kafka_sink.clock import RANDOM
from kafka_sink.coordinator.breaker import (
    MAX_MUTES,
    MAX_TARGETS,
    MAX_WAITING,
    Answer,
    MuteChanges,
    Mutes,
    Outcomes,
    Probe,
    Question,
    Targets,
    Waiting,
    Watch,
    apart,
    by_reason,
    together,
    with_reasons,
)
from kafka_sink.coordinator.metadata import MemoryBudget
from kafka_sink.coordinator.schema import Outbox, Scope, Service, receives
from kafka_sink.errors import ProtocolError
from kafka_sink.model import TopicPartition
from kafka_sink.options import SinkOptions
from kafka_sink.options.breaker import DEFAULT_CLASS, failure_rate_settings
from kafka_sink.timing_bounds import GATHER_MUTES_MS

# Tasks have so long to report when they watch a partition, and to answer a question.
_WATCH_MS, _QUESTION_MS = 400.0, 250.0
# A partition that does not fail by the sums is not watched again sooner.
_REST_MS = 2_000.0
# So many tasks watch a partition; of thousands of partitions fewer, so that so many reports come in all.
_MAX_WATCHERS, _MIN_WATCHERS, _MAX_REPORTS = 100, 10, 20_000
# Of tasks that report by themselves so many count, each for itself.
_MAX_REPORTERS = 10
# So many tasks are asked about a broker.
_MAX_ASKED = 20
# Partitions of one iteration of the loop.
_JUDGED_AT_ONCE, _WATCHED_AT_ONCE, _PROBED_AT_ONCE = 300, 1_000, 250
# In all, and by the word of one task: partitions in question, mutes that rest on one task's word, questions.
_MAX_WATCHED, _MAX_WATCHED_OF_ONE = 20_000, 5_000
_MAX_ALONE, _MAX_ALONE_OF_ONE = MAX_MUTES // 2, 1_000
_MAX_QUESTIONS, _MAX_QUESTIONS_OF_ONE = 200, 10
# In all: partitions for which tasks say that they have rows.
_MAX_WAITS = 100_000
# JSON of all reasons, which a task that comes is told in one message.
_MAX_REASON_BYTES = 1_000_000
# Tasks that come are told everything together, after so long for each mute: ten times what encoding takes.
_WELCOME_MS = 0.05
# About what is kept of a partition or broker in question, of a mute, and of a task that waits for one.
_WATCHED_BYTES, _MUTE_BYTES, _WAIT_BYTES = 2_500, 1_500, 200
# After a mute on one task's word, no such word counts for so many times as long, or so many intervals.
_PAUSE_FACTOR, _MAX_PAUSE = 4.0, 10
# Partitions that no task has rows for are unmuted after this time, and so are brokers; those that one task's
# word is against, sooner.
_FORGET_MS, _FORGET_ALONE_MS = 600_000.0, 60_000.0
# One of so many that can probe is chosen.
_CHOICE = 16


class _Counted(NamedTuple):
    """Of a task: whether it writes to a partition, whether that fails, how many of its failures count."""

    writes: bool
    fails: bool
    failures: int


@dataclass(slots=True)
class _Watched:
    """A partition in question; one that does not fail (``is_decided``) is not watched anew before
    ``until_ms``. ``peer``: who has reported it first. A watcher's report counts for ``each`` tasks."""

    peer: int
    until_ms: float = math.inf
    reports: dict[int, _Counted] = field(default_factory=dict)
    watchers: frozenset[int] = frozenset()
    each: float = 1.0
    missing: set[int] = field(default_factory=set)
    error: str = ""
    is_decided: bool = False


class FailingPartitions:
    """Which partitions fail, by sums over tasks of which each counts once.

    Tasks report by themselves where a partition fails for them, so that of all others a sample is asked.
    """

    def __init__(self, trigger_count: int, trigger_perc: int, random: Random) -> None:
        self._trigger_count = trigger_count
        self._perc = trigger_perc
        self._random = random
        # Sent by all tasks.
        self.rows = 0
        # Whether there is no memory to watch more.
        self.is_full = False
        self._watched: dict[TopicPartition, _Watched] = {}
        self._by_peer: Counter[int] = Counter()
        # Those that nobody watches yet, those of which all watchers have reported. By time: those that wait
        # for reports, and those that are decided.
        self._new: deque[TopicPartition] = deque()
        self._complete: deque[TopicPartition] = deque()
        self._open: deque[tuple[float, TopicPartition]] = deque()
        self._decided: deque[tuple[float, TopicPartition]] = deque()
        self._asked_ms = -math.inf

    def count(
        self, peer: int, partition: TopicPartition, written: int, failed: int, *, answered: bool, error: str
    ) -> None:
        """A task has written so many batches in the last seconds, and so many have failed."""
        watched = self._watched.get(partition)
        if watched is None:
            is_full = len(self._watched) >= _MAX_WATCHED or self._by_peer[peer] >= _MAX_WATCHED_OF_ONE
            if self.is_full or is_full or not failed:
                return
            watched = self._watched[partition] = _Watched(peer)
            self._by_peer[peer] += 1
            self._new.append(partition)
        # Where thousands of partitions fail for thousands of tasks, most of what they report ends here.
        is_one_more = peer not in watched.reports and peer not in watched.watchers
        if is_one_more and len(watched.reports) >= _MAX_REPORTERS:
            return
        fails = failed > 0 and reaches(failed, failed + written, self._perc)
        # One lost connection says nothing of a partition, a broker's error does.
        counts = fails and (answered or failed >= MIN_FAILURES)
        found = _Counted(failed + written > 0, fails, min(failed, MIN_FAILURES) if counts else 0)
        watched.reports[peer] = found
        watched.error = (error if failed else "") or watched.error
        if peer in watched.missing:
            watched.missing.discard(peer)
            if not watched.missing:
                self._complete.append(partition)
        elif watched.is_decided and counts and self._fails(watched):
            watched.is_decided = False
            self._complete.append(partition)

    def watch(self, tasks: Collection[int], now_ms: float) -> tuple[list[TopicPartition], list[int]]:
        """Some partitions, and the tasks that are to watch all of them."""
        while self._decided and self._decided[0][0] <= now_ms:
            until_ms, partition = self._decided.popleft()
            if partition in self._watched and self._watched[partition].until_ms == until_ms:
                self._drop(partition)
        if not self._new or now_ms < self._asked_ms + GATHER_MUTES_MS:
            return [], []
        self._asked_ms, until_ms = now_ms, now_ms + _WATCH_MS
        wanted = min(_MAX_WATCHERS, max(_MIN_WATCHERS, _MAX_REPORTS // len(self._new)))
        watchers = self._random.sample(list(tasks), min(wanted, len(tasks)))
        chosen = frozenset(watchers)
        partitions = [self._new.popleft() for _ in range(min(_WATCHED_AT_ONCE, len(self._new)))]
        for partition in partitions:
            watched = self._watched[partition]
            watched.watchers, watched.missing, watched.until_ms = chosen, set(chosen), until_ms
            others = len(tasks) - len(watched.reports.keys() - chosen)
            watched.each = max(1.0, others / max(1, len(chosen)))
            self._open.append((until_ms, partition))
        return partitions, watchers

    def judge(self, now_ms: float) -> Iterator[tuple[TopicPartition, str, list[int]]]:
        """Some of those that fail, each with the reason, and the tasks for which it does."""
        for _ in range(_JUDGED_AT_ONCE):
            if self._complete:
                partition = self._complete.popleft()
            elif self._open and self._open[0][0] <= now_ms:
                until_ms, partition = self._open.popleft()
                if partition not in self._watched or self._watched[partition].until_ms != until_ms:
                    continue
            else:
                return
            watched = self._watched.get(partition)
            if watched is None or watched.is_decided:
                continue
            failing = [peer for peer, one in watched.reports.items() if one.fails]
            if self._fails(watched):
                self._drop(partition)
                writing = sum(one.writes for one in watched.reports.values())
                who = f"{len(failing)} of {writing} tasks that write to it and were asked"
                yield partition, f"it fails for {who}; last error: {watched.error}", failing
            else:
                watched.is_decided, watched.until_ms = True, now_ms + _REST_MS
                self._decided.append((watched.until_ms, partition))

    def _fails(self, watched: _Watched) -> bool:
        failing = writing = 0.0
        for peer, one in watched.reports.items():
            each = watched.each if peer in watched.watchers else 1.0
            failing += each * one.fails
            writing += each * one.writes
        enough = sum(one.failures for one in watched.reports.values()) >= MIN_FAILURES
        return enough and self.rows >= self._trigger_count and reaches(failing, writing, self._perc)

    def _drop(self, partition: TopicPartition) -> None:
        _one_less(self._by_peer, self._watched.pop(partition).peer)

    def __len__(self) -> int:
        return len(self._watched)

    def due_ms(self) -> float:
        """When there is something to watch, to judge or to forget."""
        if self._complete:
            return -math.inf
        due_ms = min((one[0][0] for one in (self._open, self._decided) if one), default=math.inf)
        return min(due_ms, self._asked_ms + GATHER_MUTES_MS) if self._new else due_ms


def _one_less(counts: Counter[int], peer: int) -> None:
    counts[peer] -= 1
    if not counts[peer]:
        del counts[peer]


@dataclass(slots=True)
class _Inquiry:
    """A task wants a broker muted, and others are asked."""

    peer: int
    reason: str
    silence_ms: float
    asked_ms: float
    asked: frozenset[int]


@dataclass(slots=True)
class _Muted:
    """What belongs to a mute. ``alone``: the task on whose word it rests, if on one's, until a probe of
    a broker fails for another. ``witnesses`` know at first hand when it is over; ``tried`` are not to probe
    next. ``due_ms``: when to look at it. By task: who has batches for it, or rows."""

    alone: int | None
    witnesses: set[int]
    tried: set[int]
    due_ms: float = math.inf
    prober: int | None = None
    hurried_ms: float = -math.inf
    held: dict[int, None] = field(default_factory=dict)
    acceptable: dict[int, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Task:
    rows: int = 0
    waits: list[Target] = field(default_factory=list)


class BreakerService(Service):
    """``stalled_ms``: for how long the loop has stood still in all. What tasks have sent meanwhile waits for
    it, so the times here are those of a clock that stands still with it. ``budget`` is shared by all
    clusters; what exceeds it is not shared."""

    scope = Scope.CLUSTER

    def __init__(
        self,
        options: SinkOptions,
        out: Outbox,
        stalled_ms: Callable[[float], float] = lambda _: 0.0,
        budget: MemoryBudget | None = None,
        random: Random = RANDOM,
    ) -> None:
        super().__init__(out)
        self._budget = MemoryBudget() if budget is None else budget
        self._cost = 0
        self._stalled_ms = stalled_ms
        self._random = random
        settings = options.breaker
        # None where a user's class decides, whose mutes are shared.
        self._failing: FailingPartitions | None = None
        if settings.class_path == DEFAULT_CLASS:
            rule = failure_rate_settings(dict(settings.given))
            self._failing = FailingPartitions(rule.trigger_message_count, rule.trigger_failure_perc, random)
        self.table = MuteTable(settings.mute_retry_interval_ms)
        self._interval_ms = settings.mute_retry_interval_ms
        self._tasks: dict[int, _Task] = {}
        self._inquiries: dict[int, _Inquiry] = {}
        self._muted: dict[Target, _Muted] = {}
        self._alone: Counter[int] = Counter()
        self._reason_bytes = self._waits = 0
        # By partition, until when no mute of it may rest on the word of one task.
        self._paused_ms: dict[Target, float] = {}
        # What tasks have not been told yet; those that have been told nothing yet, and when others were told.
        self._added: dict[Target, str] = {}
        self._removed: set[Target] = set()
        self._told_ms = -math.inf
        self._newcomers: dict[int, None] = {}
        self._welcomed_ms = -math.inf
        # Mutes by the time at which to look at them; a number tells those of the same time apart.
        self._due: list[tuple[float, int, Target]] = []
        self._count = count()

    def _at(self, now_ms: float) -> float:
        return now_ms - self._stalled_ms(now_ms)

    def _is_full(self) -> bool:
        """Whether there is no memory for more."""
        watched = len(self._inquiries) + (0 if self._failing is None else len(self._failing))
        cost = _WATCHED_BYTES * watched + _MUTE_BYTES * (len(self._muted) + len(self._paused_ms))
        self._pay(cost + self._reason_bytes + _WAIT_BYTES * self._waits)
        return self._budget.used >= self._budget.limit

    def _pay(self, cost: int) -> None:
        self._budget.used += cost - self._cost
        self._cost = cost

    def close(self) -> None:
        self._pay(0)

    # -- tasks ------------------------------------------------------------------------------------------

    def on_joined(self, peer: int, now_ms: float) -> None:
        self._tasks[peer] = _Task()
        self._newcomers[peer] = None

    def on_gone(self, peer: int, now_ms: float) -> None:
        self._note_waits(peer, [], [])
        del self._tasks[peer]
        self._newcomers.pop(peer, None)

    @receives(Waiting)
    def on_waiting(self, peer: int, message: Waiting, now_ms: float) -> None:
        self._note_waits(peer, apart(message.held, MAX_WAITING), apart(message.acceptable, MAX_WAITING))
        for target in self._tasks[peer].waits:
            self._look_at(target, self._at(now_ms) + GATHER_MUTES_MS)

    def _note_waits(self, peer: int, held: list[Target], acceptable: list[Target]) -> None:
        task = self._tasks[peer]
        self._waits -= len(task.waits)
        for target in task.waits:
            if (found := self._muted.get(target)) is not None:
                found.held.pop(peer, None)
                found.acceptable.pop(peer, None)
        left = 0 if self._is_full() else _MAX_WAITS - self._waits
        task.waits = [one for one in (*held, *acceptable) if one in self._muted][:left]
        self._waits += len(task.waits)
        known = set(task.waits)
        for target in known.intersection(held):
            self._muted[target].held[peer] = None
        for target in known.intersection(acceptable):
            self._muted[target].acceptable[peer] = None

    # -- partitions that fail -----------------------------------------------------------------------------

    @receives(Outcomes)
    def on_outcomes(self, peer: int, message: Outcomes, now_ms: float) -> None:
        sizes = [{len(one.partitions), len(one.written), len(one.failed)} for one in message.topics]
        if any(len(one) != 1 for one in sizes) or sum(max(one) for one in sizes) > MAX_TARGETS:
            raise ProtocolError(f"outcomes of more than {MAX_TARGETS} partitions, or incomplete ones")
        failing, task = self._failing, self._tasks[peer]
        if failing is None:
            return
        failing.is_full = self._is_full()
        failing.rows += max(0, message.rows - task.rows)
        task.rows = max(message.rows, task.rows)
        for one in message.topics:
            for number, written, failed in zip(one.partitions, one.written, one.failed, strict=True):
                partition = TopicPartition(one.topic, number)
                if partition not in self._muted:
                    failing.count(peer, partition, written, failed, answered=one.answered, error=one.error)

    def _judge(self, failing: FailingPartitions, now_ms: float) -> None:
        for partition, reason, peers in failing.judge(now_ms):
            self._mute(partition, reason, now_ms, alone=peers[0] if len(peers) == 1 else None)
        partitions, watchers = failing.watch(self._tasks, now_ms)
        if partitions:
            self.out.broadcast(watchers, Watch(together(partitions)))

    # -- what one task has muted, and unmuted -------------------------------------------------------------

    @receives(MuteChanges)
    def on_mute_changes(self, peer: int, message: MuteChanges, now_ms: float) -> None:
        muted, now_ms = with_reasons(message.muted, MAX_TARGETS), self._at(now_ms)
        unmuted, failed = apart(message.unmuted, MAX_TARGETS), with_reasons(message.failed, MAX_TARGETS)
        for target, reason in muted.items():
            if isinstance(target, int):
                self._ask(peer, target, reason, message.silence_ms.get(target, 0.0), now_ms)
            elif self._failing is None and self._mute(target, reason, now_ms, alone=peer):
                self._muted[target].witnesses.add(peer)
        for target, error in failed.items():
            # Otherwise the batch was sent before the mute.
            if target in self._muted and self._muted[target].prober == peer:
                self._end_probe(target, error, now_ms)
        for target in unmuted:
            found = self._muted.get(target)
            if found is not None and peer in found.witnesses:
                self._unmute(target, now_ms)
            elif found is not None:
                self._hurry(peer, target, now_ms)
            elif isinstance(target, int) and (asked := self._inquiries.get(target)) and asked.peer == peer:
                del self._inquiries[target]

    def _ask(self, peer: int, node: int, reason: str, silence_ms: float, now_ms: float) -> None:
        """Whether others have responses of a broker that a task wants muted."""
        of_one = sum(one.peer == peer for one in self._inquiries.values())
        is_full = len(self._inquiries) >= _MAX_QUESTIONS or of_one >= _MAX_QUESTIONS_OF_ONE
        if node in self._muted or node in self._inquiries or is_full or self._is_full():
            return
        some = self._random.sample(list(self._tasks), min(_MAX_ASKED + 1, len(self._tasks)))
        asked = [one for one in some if one != peer][:_MAX_ASKED]
        asked_ms = now_ms if asked else -math.inf
        self._inquiries[node] = _Inquiry(peer, reason, silence_ms, asked_ms, frozenset(asked))
        self.out.broadcast(asked, Question(node, silence_ms / 2))

    @receives(Answer)
    def on_answer(self, peer: int, message: Answer, now_ms: float) -> None:
        node, at_ms = message.broker, self._at(now_ms) - message.age_ms
        found = self._inquiries.get(node)
        if found is not None and peer in found.asked and at_ms >= found.asked_ms - found.silence_ms / 2:
            del self._inquiries[node]
        elif node in self._muted and at_ms > self.table.mutes[node].since_ms:
            self._hurry(peer, node, self._at(now_ms))

    def _end_questions(self, now_ms: float) -> None:
        over = takewhile(lambda one: one[1].asked_ms + _QUESTION_MS <= now_ms, self._inquiries.items())
        for node, found in list(over):
            del self._inquiries[node]
            if self._mute(node, found.reason, now_ms, alone=found.peer):
                self._muted[node].witnesses.add(found.peer)
                # Their requests are with the broker, and a response is as good as a probe's.
                self._muted[node].tried |= found.asked

    # -- mutes, from their beginning to their end ---------------------------------------------------------

    def _mute(self, target: Target, reason: str, now_ms: float, *, alone: int | None) -> bool:
        size = len(json.dumps(reason))
        is_full = len(self._muted) >= MAX_MUTES or self._reason_bytes + size > _MAX_REASON_BYTES
        is_full |= self._is_full()
        if alone is not None:
            is_full |= self._alone[alone] >= _MAX_ALONE_OF_ONE or self._alone.total() >= _MAX_ALONE
            is_full |= now_ms < self._paused_ms.get(target, -math.inf)
        if is_full or not self.table.trip(target, reason, now_ms):
            return False
        self._muted[target] = _Muted(alone, set(), set() if alone is None else {alone})
        if alone is not None:
            self._alone[alone] += 1
        self._reason_bytes += size
        self._added[target] = reason
        self._removed.discard(target)
        self._look_at(target, self.table.mutes[target].retry_at_ms)
        return True

    def _unmute(self, target: Target, now_ms: float) -> None:
        mute, found = self.table.mutes[target], self._muted.pop(target)
        self.table.reset(target)
        self._reason_bytes -= len(json.dumps(mute.reason))
        if self._release(found) and isinstance(target, TopicPartition):
            lasted_ms = now_ms - mute.since_ms
            self._paused_ms[target] = now_ms + min(_PAUSE_FACTOR * lasted_ms, _MAX_PAUSE * self._interval_ms)
            if len(self._paused_ms) > MAX_MUTES:
                del self._paused_ms[next(iter(self._paused_ms))]
        self._added.pop(target, None)
        self._removed.add(target)

    def _release(self, found: _Muted) -> bool:
        """The mute rests on one task's word no longer. Whether it did."""
        alone, found.alone = found.alone, None
        if alone is not None:
            _one_less(self._alone, alone)
        return alone is not None

    def _hurry(self, peer: int, target: Target, now_ms: float) -> None:
        """A task that knows it at second hand says that a mute is over: another may probe, once an
        interval."""
        found, mute = self._muted[target], self.table.mutes[target]
        if mute.state is BreakerState.OPEN and now_ms >= found.hurried_ms + self._interval_ms:
            found.hurried_ms = mute.retry_at_ms = now_ms
            found.tried.add(peer)
            self._look_at(target, now_ms)

    # -- probes -------------------------------------------------------------------------------------------

    def _end_probe(self, target: Target, error: str, now_ms: float) -> None:
        found = self._muted[target]
        if isinstance(target, int) and found.prober != found.alone:
            self._release(found)
        found.prober = None
        self.table.fail(target, error, now_ms)
        self._look_at(target, self.table.mutes[target].retry_at_ms)

    def _probe(self, now_ms: float) -> None:
        """Permit the probes that are due, a bounded number of them."""
        permitted: dict[tuple[int, bool], list[Target]] = {}
        for _ in range(_PROBED_AT_ONCE):
            if self._next_due_ms() > now_ms:
                break
            at_ms, _, target = heappop(self._due)
            found = self._muted.get(target)
            if found is None or found.due_ms != at_ms:
                continue
            found.due_ms = math.inf
            if self._is_over(target, now_ms):
                self._unmute(target, now_ms)
            else:
                self._look_at(target, self._next_probe_ms(target, permitted, now_ms))
        for (peer, is_new), targets in permitted.items():
            self.out.send(peer, Probe(together(targets), is_new, self._interval_ms))

    def _look_at(self, target: Target, at_ms: float) -> None:
        """Look at the mute then, if not before."""
        found = self._muted[target]
        if at_ms < found.due_ms:
            found.due_ms = at_ms
            heappush(self._due, (at_ms, next(self._count), target))
        if len(self._due) > 4 * MAX_MUTES:
            # Most are of mutes that are over, or are looked at sooner.
            muted = self._muted.items()
            self._due = [(one.due_ms, next(self._count), of) for of, one in muted if one.due_ms < math.inf]
            heapify(self._due)

    def _next_due_ms(self) -> float:
        return self._due[0][0] if self._due and self._tasks else math.inf

    def _next_probe_ms(
        self, target: Target, permitted: dict[tuple[int, bool], list[Target]], now_ms: float
    ) -> float:
        """When to look at the mute next, after a probe was permitted if one was due."""
        found, mute = self._muted[target], self.table.mutes[target]
        if mute.state is BreakerState.HALF_OPEN and mute.lease_ends_ms <= now_ms:
            self.table.expire(target, now_ms)
        if mute.state is BreakerState.HALF_OPEN:
            return mute.lease_ends_ms
        if mute.retry_at_ms > now_ms:
            return mute.retry_at_ms
        if target in self._added:
            return now_ms + GATHER_MUTES_MS
        able = self._prober(target, mute, now_ms)
        if able is not None:
            permitted.setdefault(able, []).append(target)
            found.prober = able[0]
            found.tried.add(able[0])
            found.witnesses.add(able[0])
            self.table.probe(target, now_ms)
            return mute.lease_ends_ms
        # Until a task says that it has rows.
        return mute.retry_at_ms + self._interval_ms if found.acceptable else mute.since_ms + _FORGET_MS

    def _prober(self, target: Target, mute: Mute, now_ms: float) -> tuple[int, bool] | None:
        """Who probes next, and whether with new rows. Any task can probe a broker, as that needs no row. A
        partition's probe needs a batch; if no other task has one, or none for another interval, new rows may
        go there."""
        found = self._muted[target]
        able: list[tuple[Collection[int], bool]] = [(found.held, False), (found.acceptable, True)]
        if isinstance(target, int):
            able = [(self._tasks, False)]
        elif not found.held and not (found.acceptable and now_ms >= mute.retry_at_ms + self._interval_ms):
            return None
        for _ in range(2):
            for peers, is_new in able:
                if left := list(islice((one for one in peers if one not in found.tried), _CHOICE)):
                    return self._random.choice(left), is_new
            # All have had their turn.
            found.tried.clear()
        return None

    def _is_over(self, target: Target, now_ms: float) -> bool:
        """Whether a mute is of what nobody writes to, or a task may have made up."""
        found, age_ms = self._muted[target], now_ms - self.table.mutes[target].since_ms
        if isinstance(target, int):
            return age_ms >= (_FORGET_MS if found.alone is None else _FORGET_ALONE_MS)
        return age_ms >= _FORGET_MS and not found.held

    # -- time ---------------------------------------------------------------------------------------------

    def _tell_ms(self) -> float:
        return self._told_ms + GATHER_MUTES_MS if self._added or self._removed else math.inf

    def _welcome_ms(self) -> float:
        return self._welcomed_ms + _WELCOME_MS * len(self._muted) if self._newcomers else math.inf

    def _welcome(self, now_ms: float) -> None:
        if now_ms >= self._welcome_ms():
            reasons = by_reason({target: mute.reason for target, mute in self.table.mutes.items()})
            self.out.broadcast(list(self._newcomers), Mutes(True, reasons, Targets(), len(self._tasks)))
            self._newcomers, self._welcomed_ms = {}, now_ms

    def _tell(self, now_ms: float) -> None:
        if now_ms >= self._tell_ms():
            added, removed = by_reason(self._added), together(self._removed)
            self._added, self._removed, self._told_ms = {}, set(), now_ms
            self.out.broadcast(list(self._tasks), Mutes(False, added, removed, len(self._tasks)))

    def on_time(self, now_ms: float) -> None:
        now_ms = self._at(now_ms)
        if self._failing is not None:
            self._judge(self._failing, now_ms)
        self._end_questions(now_ms)
        self._welcome(now_ms)
        self._tell(now_ms)
        self._probe(now_ms)
        self._is_full()

    def next_change_ms(self, now_ms: float) -> float:
        failing_ms = math.inf if self._failing is None else self._failing.due_ms()
        asked_ms = next((one.asked_ms for one in self._inquiries.values()), math.inf)
        due_ms = min(
            failing_ms, asked_ms + _QUESTION_MS, self._welcome_ms(), self._tell_ms(), self._next_due_ms()
        )
        return max(0.0, due_ms - self._at(now_ms))
