"""The circuit breaker of all tasks that write to one cluster with the same settings. No I/O.

A partition that fails for one task is watched by up to a hundred others, and muted for all by the same rule
as in a task, over the sums of what they report. A broker that one task finds silent is muted for all unless
one of twenty others has had a response. One task at a time probes what is muted, and its success ends the
mute. So a wrong mute lasts one probe's interval, and needs no more evidence than that.

What is counted and decided in one iteration of the loop is bounded, as thousands of partitions may fail for
thousands of tasks at once.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from typing import NamedTuple

from kafka_sink.breaker.outcomes import MIN_FAILURES, reaches
from kafka_sink.breaker.states import BreakerState, Mute, MuteTable, Target
from kafka_sink.clock import RANDOM
from kafka_sink.coordinator.breaker import (
    MAX_MUTES,
    MAX_RAMP_MS,
    MAX_TARGETS,
    MAX_WAITING,
    RAMP_STEP_MS,
    Answer,
    Mutes,
    MuteWanted,
    Outcomes,
    Probe,
    ProbeFailed,
    Question,
    Targets,
    Unmuted,
    Waiting,
    Watch,
    apart,
    by_reason,
    together,
    with_reasons,
)
from kafka_sink.coordinator.schema import Outbox, Scope, Service, receives
from kafka_sink.errors import ProtocolError
from kafka_sink.model import TopicPartition
from kafka_sink.options import SinkOptions
from kafka_sink.options.breaker import DEFAULT_CLASS, failure_rate_settings
from kafka_sink.timing_bounds import GATHER_MUTES_MS

# Tasks have so long to report when they watch a partition, and to answer a question.
_WATCH_MS = 400.0
_QUESTION_MS = 250.0
# A partition that does not fail by the sums is not watched again sooner.
_REST_MS = 2_000.0
# How many tasks watch a partition, of thousands of partitions fewer each, and how many answer a question.
_MAX_WATCHERS, _MIN_WATCHERS, _MAX_COUNTS = 100, 10, 20_000
_MAX_ASKED = 20
# Tasks that report by themselves and do not watch: so many of them count, each for itself.
_MAX_REPORTERS = 10
# Work of one iteration of the loop.
_JUDGED_AT_ONCE, _ASKED_AT_ONCE, _PROBED_AT_ONCE = 300, 1_000, 250
# Of those that can probe a partition, one of so many is chosen.
_COMPARED = 16
# Of all tasks together: partitions in question, questions, and what tasks say that they have rows for.
_MAX_WATCHED, _MAX_QUESTIONS, _MAX_WAITS = 20_000, 200, 100_000
_MAX_QUESTIONS_OF_ONE = 10
# JSON of all reasons, which a task that comes is told in one message.
_MAX_REASON_BYTES = 1_000_000
# So many mutes may rest on the word of one task, and none of them for more than a fifth of the time.
_MAX_ALONE = MAX_MUTES // 2
_PAUSE_FACTOR, _MAX_PAUSES = 4.0, 10
# Targets that nobody can probe are looked at again after this, and forgotten after that.
_NO_PROBER_MS = 500.0
_FORGET_MS = 600_000.0


class _Counted(NamedTuple):
    """What one task says of a partition: whether it writes there, whether that fails, and how many of its
    failures count."""

    writes: bool
    fails: bool
    failures: int


@dataclass(slots=True)
class _Watched:
    """A partition in question, or of late: until ``until_ms``. Tasks report by themselves, or answer because
    they watch it; then each of them counts for ``each`` tasks."""

    until_ms: float = math.inf
    reports: dict[int, _Counted] = field(default_factory=dict)
    answers: dict[int, _Counted] = field(default_factory=dict)
    watchers: frozenset[int] = frozenset()
    each: float = 1.0
    error: str = ""
    is_decided: bool = False


class FailingPartitions:
    """Which partitions fail, by sums over tasks in which each task counts once.

    Few tasks report by themselves, and they are those for which it fails. Of all others a sample is asked.
    """

    def __init__(self, trigger_count: int, trigger_perc: int) -> None:
        self._trigger_count = trigger_count
        self._perc = trigger_perc
        self.rows = 0
        self._watched: dict[TopicPartition, _Watched] = {}
        # Those that nobody was asked about, those with all answers, and by time those that wait for answers
        # and those that may be watched anew.
        self._new: deque[TopicPartition] = deque()
        self._complete: deque[TopicPartition] = deque()
        self._asked: deque[tuple[float, TopicPartition]] = deque()
        self._resting: deque[tuple[float, TopicPartition]] = deque()
        self._asked_ms = -math.inf

    def count(
        self, peer: int, partition: TopicPartition, written: int, failed: int, *, answered: bool, error: str
    ) -> None:
        """A task has written so many batches in the last seconds, and so many have failed."""
        watched = self._watched.get(partition)
        if watched is None:
            if not failed or len(self._watched) >= _MAX_WATCHED:
                return
            watched = self._watched[partition] = _Watched()
            self._new.append(partition)
        if watched.is_decided:
            return
        fails = failed > 0 and reaches(failed, failed + written, self._perc)
        # One lost connection says nothing of a partition, a broker's error does.
        counts = fails and (answered or failed >= MIN_FAILURES)
        counted = _Counted(failed + written > 0, fails, min(failed, MIN_FAILURES) if counts else 0)
        if peer in watched.watchers:
            watched.answers[peer] = counted
            if len(watched.answers) == len(watched.watchers):
                self._complete.append(partition)
        elif peer in watched.reports or len(watched.reports) < _MAX_REPORTERS:
            watched.reports[peer] = counted
        watched.error = (error if failed else "") or watched.error

    def ask(self, tasks: Sequence[int], now_ms: float) -> tuple[list[TopicPartition], list[int]]:
        """Some partitions, and the tasks that are to watch all of them."""
        while self._resting and self._resting[0][0] <= now_ms:
            until_ms, partition = self._resting.popleft()
            if self._watched[partition].until_ms == until_ms:
                del self._watched[partition]
        if not self._new or now_ms < self._asked_ms + GATHER_MUTES_MS:
            return [], []
        self._asked_ms = now_ms
        wanted = min(_MAX_WATCHERS, max(_MIN_WATCHERS, _MAX_COUNTS // len(self._new)))
        watchers = RANDOM.sample(tasks, min(wanted, len(tasks)))
        asked, until_ms = frozenset(watchers), now_ms + _WATCH_MS
        partitions = [self._new.popleft() for _ in range(min(_ASKED_AT_ONCE, len(self._new)))]
        for partition in partitions:
            watched = self._watched[partition]
            watched.watchers, watched.until_ms = asked, until_ms
            others = len(tasks) - len(watched.reports.keys() - asked)
            watched.each = max(1.0, others / max(1, len(asked)))
            self._asked.append((until_ms, partition))
        return partitions, watchers

    def judge(self, now_ms: float) -> Iterator[tuple[TopicPartition, str, int]]:
        """Some of the partitions that fail, each with the reason, and for how many tasks it fails."""
        for _ in range(_JUDGED_AT_ONCE):
            if self._complete:
                partition = self._complete.popleft()
            elif self._asked and self._asked[0][0] <= now_ms:
                _, partition = self._asked.popleft()
            else:
                return
            watched = self._watched.get(partition)
            if watched is None or watched.is_decided or not watched.watchers:
                continue
            failing = self._failing(watched)
            if failing:
                del self._watched[partition]
                writing = sum(one.writes for one in {**watched.reports, **watched.answers}.values())
                tasks = f"{failing} of {writing} tasks that write to it and were asked"
                yield partition, f"it fails for {tasks}; last error: {watched.error}", failing
            else:
                watched.is_decided, watched.until_ms = True, now_ms + _REST_MS
                self._resting.append((watched.until_ms, partition))

    def _failing(self, watched: _Watched) -> int:
        """For how many tasks of those that were asked it fails; 0 where these are too few."""
        counts = {**watched.reports, **watched.answers}
        failing = writing = 0.0
        for peer, one in counts.items():
            each = watched.each if peer in watched.watchers else 1.0
            failing += each * one.fails
            writing += each * one.writes
        enough = sum(one.failures for one in counts.values()) >= MIN_FAILURES
        if self.rows < self._trigger_count or not enough or not reaches(failing, writing, self._perc):
            return 0
        return sum(one.fails for one in counts.values())

    def due_ms(self) -> float:
        """When there is something to ask or to judge."""
        if self._complete:
            return -math.inf
        asked_ms = self._asked[0][0] if self._asked else math.inf
        return min(asked_ms, self._asked_ms + GATHER_MUTES_MS) if self._new else asked_ms


@dataclass(slots=True)
class _Silence:
    """A task wants a broker muted, and others are asked. ``next``: another task that wants it meanwhile."""

    peer: int
    reason: str
    silence_ms: float
    asked_ms: float
    asked: frozenset[int]
    next: tuple[int, str, float] | None = None


@dataclass(slots=True)
class _Muted:
    """Beside a mute. ``witnesses`` know at first hand when it is over; ``tried`` are not to probe next."""

    is_alone: bool
    witnesses: set[int]
    tried: set[int]
    prober: int | None = None
    hurried_ms: float = -math.inf


@dataclass(slots=True)
class _Task:
    """``waits``: muted partitions that it has rows for, and whether these would be new rows."""

    rows: int = 0
    questions: int = 0
    waits: list[tuple[TopicPartition, bool]] = field(default_factory=list)
    probes: set[Target] = field(default_factory=set)


class BreakerService(Service):
    """``stalled_ms``: for how long the loop has stood still in all. Tasks' messages wait for it meanwhile, so
    that its own times do not go on: they are those of a clock that stands still, too."""

    scope = Scope.CLUSTER

    def __init__(
        self, options: SinkOptions, out: Outbox, stalled_ms: Callable[[float], float] = lambda _: 0.0
    ) -> None:
        super().__init__(out)
        self._stalled_ms = stalled_ms
        settings = options.breaker
        # None where a user's class decides, whose mutes are shared.
        self._failing: FailingPartitions | None = None
        if settings.class_path == DEFAULT_CLASS:
            rule = failure_rate_settings(dict(settings.given))
            self._failing = FailingPartitions(rule.trigger_message_count, rule.trigger_failure_perc)
        self.table = MuteTable(settings.mute_retry_interval_ms)
        self._tasks: dict[int, _Task] = {}
        self._peers: list[int] | None = None
        self._silences: dict[int, _Silence] = {}
        self._muted: dict[Target, _Muted] = {}
        self._alone = self._reason_bytes = self._waits = 0
        # By target, until when no mute of it may rest on the word of one task.
        self._paused_ms: dict[Target, float] = {}
        # Who has rows for a muted partition, and whether these would be new ones.
        self._able: dict[tuple[Target, bool], dict[int, None]] = {}
        # What tasks have not been told yet.
        self._added: dict[Target, str] = {}
        self._removed: set[Target] = set()
        self._told_ms = -math.inf
        self._whole = -1, Mutes(True, (), Targets(), 0.0)
        self._probe_ms = math.inf

    def _at(self, now_ms: float) -> float:
        return now_ms - self._stalled_ms(now_ms)

    def _all(self) -> list[int]:
        if self._peers is None:
            self._peers = list(self._tasks)
        return self._peers

    # -- tasks ---------------------------------------------------------------------------------------------

    def on_joined(self, peer: int, now_ms: float) -> None:
        self._tasks[peer] = _Task()
        self._peers = None
        if self._whole[0] != self.table.version:
            reasons = by_reason({target: mute.reason for target, mute in self.table.mutes.items()})
            self._whole = self.table.version, Mutes(True, reasons, Targets(), 0.0)
        self.out.send(peer, self._whole[1])

    def on_gone(self, peer: int, now_ms: float) -> None:
        task = self._tasks.pop(peer)
        self._peers = None
        self._forget_waits(peer, task)
        for target in list(task.probes):
            # It may be in flight, so the next one waits as after a failure.
            self._probe_failed(peer, target, "", self._at(now_ms))

    def _forget_waits(self, peer: int, task: _Task) -> None:
        self._waits -= len(task.waits)
        for key in task.waits:
            able = self._able.get(key)
            if able is not None:
                able.pop(peer, None)
        task.waits = []

    @receives(Waiting)
    def on_waiting(self, peer: int, message: Waiting, now_ms: float) -> None:
        held, acceptable = apart(message.held, MAX_WAITING), apart(message.acceptable, MAX_WAITING)
        task = self._tasks[peer]
        self._forget_waits(peer, task)
        for is_new, targets in ((False, held), (True, acceptable)):
            for target in targets:
                if isinstance(target, TopicPartition) and target in self._muted and self._waits < _MAX_WAITS:
                    self._able.setdefault((target, is_new), {})[peer] = None
                    task.waits.append((target, is_new))
                    self._waits += 1
        self._probe_ms = min(self._probe_ms, self._at(now_ms) + GATHER_MUTES_MS)

    # -- partitions that fail ------------------------------------------------------------------------------

    @receives(Outcomes)
    def on_outcomes(self, peer: int, message: Outcomes, now_ms: float) -> None:
        sizes = [{len(one.partitions), len(one.written), len(one.failed)} for one in message.topics]
        if any(len(one) != 1 for one in sizes) or sum(max(one) for one in sizes) > MAX_TARGETS:
            raise ProtocolError(f"outcomes of more than {MAX_TARGETS} partitions, or incomplete ones")
        failing, task = self._failing, self._tasks[peer]
        if failing is None:
            return
        failing.rows += max(0, message.rows - task.rows)
        task.rows = max(message.rows, task.rows)
        for one in message.topics:
            for number, written, failed in zip(one.partitions, one.written, one.failed, strict=True):
                partition = TopicPartition(one.topic, number)
                if partition not in self._muted:
                    failing.count(peer, partition, written, failed, answered=one.answered, error=one.error)

    def _judge(self, failing: FailingPartitions, now_ms: float) -> None:
        for partition, reason, tasks in failing.judge(now_ms):
            self._mute(partition, reason, now_ms, is_alone=tasks == 1)
        partitions, watchers = failing.ask(self._all(), now_ms)
        if partitions:
            self.out.broadcast(watchers, Watch(together(partitions)))

    # -- what one task has muted ---------------------------------------------------------------------------

    @receives(MuteWanted)
    def on_mute_wanted(self, peer: int, message: MuteWanted, now_ms: float) -> None:
        wanted, now_ms = with_reasons(message.wanted, MAX_TARGETS), self._at(now_ms)
        for target, reason in wanted.items():
            if target in self._muted:
                continue
            if isinstance(target, int):
                self._ask(peer, target, reason, message.silence_ms.get(target, 0.0), now_ms)
            elif self._failing is None:
                self._mute(target, reason, now_ms, is_alone=True, peer=peer)

    def _ask(self, peer: int, node: int, reason: str, silence_ms: float, now_ms: float) -> None:
        found = self._silences.get(node)
        if found is not None:
            if found.peer != peer:
                found.next = found.next or (peer, reason, silence_ms)
            return
        peers = self._all()
        others = [one for one in RANDOM.sample(peers, min(_MAX_ASKED + 1, len(peers))) if one != peer]
        if not others:
            self._mute(node, reason, now_ms, is_alone=True, peer=peer)
            return
        task = self._tasks[peer]
        if len(self._silences) < _MAX_QUESTIONS and task.questions < _MAX_QUESTIONS_OF_ONE:
            task.questions += 1
            asked = others[:_MAX_ASKED]
            self._silences[node] = _Silence(peer, reason, silence_ms, now_ms, frozenset(asked))
            self.out.broadcast(asked, Question(node, silence_ms / 2))

    def _take_silence(self, node: int) -> _Silence:
        found = self._silences.pop(node)
        if found.peer in self._tasks:
            self._tasks[found.peer].questions -= 1
        return found

    def _withdraw(self, peer: int, node: int) -> None:
        if self._silences[node].peer == peer:
            self._take_silence(node)

    @receives(Answer)
    def on_answer(self, peer: int, message: Answer, now_ms: float) -> None:
        node, now_ms = message.broker, self._at(now_ms)
        at_ms, found = now_ms - message.age_ms, self._silences.get(node)
        if found is not None and peer in found.asked and at_ms >= found.asked_ms - found.silence_ms / 2:
            self._take_silence(node)
            if found.next is not None and found.next[0] in self._tasks:
                self._ask(found.next[0], node, *found.next[1:], now_ms)
        elif node in self._muted and at_ms > self.table.mutes[node].since_ms:
            self._hurry(peer, node, now_ms)

    def _end_questions(self, now_ms: float) -> None:
        over = takewhile(lambda one: one[1].asked_ms + _QUESTION_MS <= now_ms, self._silences.items())
        for node, found in list(over):
            self._take_silence(node)
            self._mute(node, found.reason, now_ms, is_alone=True, peer=found.peer)
            if node in self._muted:
                # Their requests are with the broker, whose response to any of them is as good as a probe's.
                self._muted[node].tried |= found.asked

    # -- mutes, from their beginning to their end ----------------------------------------------------------

    def _mute(
        self, target: Target, reason: str, now_ms: float, *, is_alone: bool, peer: int | None = None
    ) -> None:
        size = len(json.dumps(reason))
        is_full = len(self._muted) >= MAX_MUTES or self._reason_bytes + size > _MAX_REASON_BYTES
        is_paused = self._alone >= _MAX_ALONE or self._paused_ms.get(target, -math.inf) > now_ms
        if is_full or (is_alone and is_paused) or not self.table.trip(target, reason, now_ms):
            return
        own = set() if peer is None else {peer}
        self._muted[target] = _Muted(is_alone, own, set(own))
        self._alone += is_alone
        self._reason_bytes += size
        self._added[target] = reason
        self._removed.discard(target)
        self._probe_ms = min(self._probe_ms, self.table.mutes[target].retry_at_ms)

    def _unmute(self, target: Target, now_ms: float) -> None:
        found, mute = self._muted.pop(target), self.table.mutes[target]
        self.table.reset(target)
        self._reason_bytes -= len(json.dumps(mute.reason))
        self._alone -= found.is_alone
        if found.is_alone and isinstance(target, TopicPartition):
            most_ms = _MAX_PAUSES * self.table.retry_interval_ms
            pause_ms = min(_PAUSE_FACTOR * (now_ms - mute.since_ms), most_ms)
            self._paused_ms[target] = now_ms + pause_ms
            if len(self._paused_ms) > MAX_MUTES:
                del self._paused_ms[next(iter(self._paused_ms))]
        if found.prober in self._tasks:
            self._tasks[found.prober].probes.discard(target)
        for is_new in (False, True):
            self._able.pop((target, is_new), None)
        self._added.pop(target, None)
        self._removed.add(target)

    @receives(Unmuted)
    def on_unmuted(self, peer: int, message: Unmuted, now_ms: float) -> None:
        over, now_ms = apart(message.targets, MAX_TARGETS), self._at(now_ms)
        for target in over:
            found = self._muted.get(target)
            if found is None:
                if isinstance(target, int) and target in self._silences:
                    self._withdraw(peer, target)
            elif peer in found.witnesses:
                self._unmute(target, now_ms)
            else:
                self._hurry(peer, target, now_ms)

    def _hurry(self, peer: int, target: Target, now_ms: float) -> None:
        """A task that knows it at second hand says that a mute is over: another may probe now, once in an
        interval."""
        found, mute = self._muted[target], self.table.mutes[target]
        if mute.state is BreakerState.OPEN and now_ms >= found.hurried_ms + self.table.retry_interval_ms:
            found.hurried_ms = mute.retry_at_ms = now_ms
            found.tried.add(peer)
            self._probe_ms = min(self._probe_ms, now_ms)

    @receives(ProbeFailed)
    def on_probe_failed(self, peer: int, message: ProbeFailed, now_ms: float) -> None:
        failed, now_ms = with_reasons(message.failed, MAX_TARGETS), self._at(now_ms)
        for target, error in failed.items():
            self._probe_failed(peer, target, error, now_ms)

    def _probe_failed(self, peer: int, target: Target, error: str, now_ms: float) -> None:
        found = self._muted.get(target)
        # Without the permit the batch was sent before the mute.
        if found is not None and found.prober == peer:
            found.prober = None
            self.table.fail(target, error, now_ms)
            self._probe_ms = min(self._probe_ms, self.table.mutes[target].retry_at_ms)
            if peer in self._tasks:
                self._tasks[peer].probes.discard(target)

    # -- probes --------------------------------------------------------------------------------------------

    def _probe(self, now_ms: float) -> None:
        """Permit the probes that are due, a bounded number of them."""
        self.table.expire_late(now_ms)
        self._forget(now_ms)
        permitted: dict[tuple[int, bool], list[Target]] = {}
        left, next_ms = _PROBED_AT_ONCE, math.inf
        for target, mute in self.table.mutes.items():
            if mute.state is BreakerState.HALF_OPEN:
                next_ms = min(next_ms, mute.lease_ends_ms)
            elif mute.retry_at_ms > now_ms:
                next_ms = min(next_ms, mute.retry_at_ms)
            elif not left or target in self._added:
                next_ms = now_ms
            elif (found := self._prober(target, mute, now_ms)) is None:
                next_ms = min(next_ms, now_ms + _NO_PROBER_MS)
            else:
                left -= 1
                permitted.setdefault(found, []).append(target)
                self._permit(target, found[0], now_ms)
                next_ms = min(next_ms, mute.lease_ends_ms)
        # All mutes are looked at, so not for each that is due.
        self._probe_ms = max(next_ms, now_ms + GATHER_MUTES_MS)
        for (peer, is_new), targets in permitted.items():
            self.out.send(peer, Probe(together(targets), is_new, self.table.retry_interval_ms))

    def _permit(self, target: Target, peer: int, now_ms: float) -> None:
        found = self._muted[target]
        if found.prober in self._tasks:
            self._tasks[found.prober].probes.discard(target)
        found.prober = peer
        found.tried.add(peer)
        found.witnesses.add(peer)
        self._tasks[peer].probes.add(target)
        self.table.probe(target, now_ms)

    def _prober(self, target: Target, mute: Mute, now_ms: float) -> tuple[int, bool] | None:
        """Who probes next, and whether with new rows. Any task can probe a broker, as that needs no row. A
        partition's probe needs a batch. If no other task has one, or not for another interval, new rows may
        go there."""
        tried = self._muted[target].tried
        if isinstance(target, int):
            able: list[tuple[bool, Collection[int]]] = [(False, self._all())]
        else:
            held, rows = self._able.get((target, False), {}), self._able.get((target, True), {})
            is_late = now_ms >= mute.retry_at_ms + self.table.retry_interval_ms
            able = [(False, held), (True, rows)] if held or is_late else []
        for _ in range(2):
            for is_new, peers in able:
                found = _one_of(peers, tried)
                if found is not None:
                    return found, is_new
            tried.clear()
        return None

    def _forget(self, now_ms: float) -> None:
        """Partitions that nobody has written to for long. Brokers are probed without rows."""
        # The oldest come first.
        old = takewhile(lambda mute: now_ms - mute.since_ms > _FORGET_MS, self.table.mutes.values())
        for target in [one.target for one in old]:
            if isinstance(target, TopicPartition) and not self._able.get((target, False)):
                self._unmute(target, now_ms)

    # -- time ----------------------------------------------------------------------------------------------

    def _tell(self, now_ms: float) -> None:
        if now_ms < self._tell_ms():
            return
        added, removed = by_reason(self._added), together(self._removed)
        self._added, self._removed, self._told_ms = {}, set(), now_ms
        ramp_ms = RAMP_STEP_MS * math.log2(max(1, len(self._tasks)))
        ramp_ms = min(ramp_ms, MAX_RAMP_MS, self.table.retry_interval_ms)
        self.out.broadcast(self._all(), Mutes(False, added, removed, ramp_ms))

    def _tell_ms(self) -> float:
        return self._told_ms + GATHER_MUTES_MS if self._added or self._removed else math.inf

    def on_time(self, now_ms: float) -> None:
        now_ms = self._at(now_ms)
        if self._failing is not None:
            self._judge(self._failing, now_ms)
        self._end_questions(now_ms)
        self._tell(now_ms)
        if now_ms >= self._probe_ms:
            self._probe(now_ms)

    def next_change_ms(self, now_ms: float) -> float:
        times = [self._tell_ms(), self._probe_ms]
        if self._failing is not None:
            times.append(self._failing.due_ms())
        if self._silences:
            times.append(next(iter(self._silences.values())).asked_ms + _QUESTION_MS)
        return max(0.0, min(times) - self._at(now_ms))


def _one_of(peers: Collection[int], tried: Collection[int]) -> int | None:
    """One that is not among ``tried``, of the first ones where there are many."""
    if isinstance(peers, list) and len(peers) > 2 * len(tried):
        found: int = next(one for one in iter(partial(RANDOM.choice, peers), None) if one not in tried)
        return found
    left = list(islice((one for one in peers if one not in tried), _COMPARED))
    return RANDOM.choice(left) if left else None
