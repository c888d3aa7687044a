"""The coordinator's breaker: weighs the reports of all tasks, sends mutes to all, leases probes. No I/O.

A group is the tasks behind a relay, or one task by itself. ``votes.py`` decides on partitions and
``mute_evidence.py`` on brokers; ``tasks.py`` knows the tasks, who may probe, and what has not been pushed
yet.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from kafka_sink.breaker.states import BreakerState, MuteTable, Target
from kafka_sink.coordinator.breaker.messages import (
    MAX_MUTES,
    MAX_NODES,
    BreakerUpdate,
    MuteReport,
    OutcomeCounts,
    Terms,
    decode_report,
    encode_update,
    size_of,
)
from kafka_sink.coordinator.breaker.mute_evidence import ASK_MS, MuteEvidence, Voice
from kafka_sink.coordinator.breaker.tasks import BreakerTasks, MutePushes, ProbeLeases
from kafka_sink.coordinator.breaker.votes import MAX_ASKED, PartitionVotes
from kafka_sink.coordinator.figures.messages import MuteFigures
from kafka_sink.coordinator.transport.handlers import Handler, Push, Reply, ServerMessage, SharedBody
from kafka_sink.model import TopicPartition
from kafka_sink.timing_bounds import GATHER_MUTES_MS

# A muted partition that no task has written to for this long is unmuted.
_FORGET_MS = 600_000.0
# JSON of all mutes: what a new task is told fits into a frame, whatever tasks call their reasons.
_MAX_MUTED_BYTES = 3_000_000
# Partitions that are judged in one turn of the loop, and the votes that all those in question may cause.
_JUDGED_AT_ONCE = 300
_MAX_VOTES, _MIN_ASKED = 20_000, 10


class BreakerHandler(Handler):
    """``votes`` is None if a user's breaker class decides instead of failure rates.

    ``random`` returns a number in [0, 1) for jitter. ``stood_ms``: for how long the coordinator has stood
    still in all. What tasks reported meanwhile waits for it, so they are not silent, and may still vote.
    """

    def __init__(
        self,
        retry_interval_ms: float,
        votes: PartitionVotes | None,
        report_interval_ms: float,
        random: Callable[[], float] = random.random,
        stood_ms: Callable[[float], float] = lambda _: 0.0,
    ) -> None:
        self._stood_ms = stood_ms
        self._forgiven_ms = 0.0
        self.table = MuteTable(retry_interval_ms)
        self._muted_bytes = 0
        self.votes = votes
        self._random = random
        self._terms = Terms(0 if votes is None else votes.trigger_perc, report_interval_ms)
        self._tasks = BreakerTasks(report_interval_ms)
        self._evidence = MuteEvidence()
        self.leases = ProbeLeases(self.table, self._tasks)
        self._pushes = MutePushes(retry_interval_ms, random)
        # By task, the targets that the next message asks it about.
        self._asks: dict[int, list[Target]] = {}
        self._asked_ms: dict[int, float] = {}
        self._judged_ms = self._leased_ms = -math.inf
        self._is_judged = True
        # How many of the partitions in question have had their turn.
        self._judged = 0
        # All that is muted, as a task is told first, and the table's version then.
        self._whole = SharedBody({}, 0.0)
        self._whole_at = -1
        # When time alone requires the next look.
        self._due_ms = -math.inf

    # -- Handler ------------------------------------------------------------------------------------

    def on_message(
        self, group: int, request: int, body: Mapping[str, Any], now_ms: float
    ) -> Sequence[ServerMessage]:
        """The reply to a task's first report lists everything that is muted."""
        report = decode_report(body)
        self._forgive(now_ms)
        first = group not in self._tasks
        was_silent = self._tasks.update(group, report, now_ms)
        if now_ms >= self._due_ms:
            self.table.expire_late(now_ms)
        for node, ago_ms in report.responses.items():
            self._tasks.end_probe(group, node)
            mute, voice = self.table.mutes.get(node), Voice(group, report.responders.get(node, 0))
            if self._evidence.add_response(voice, node, now_ms - ago_ms, mute, now_ms):
                self._unmute(node)
        self._weigh(group, report.rows, report.outcomes, now_ms)
        for mute_report in report.muted:
            # A first report may hold old mutes, and other tasks may know better by now.
            doubtful = mute_report.is_old if mute_report.task else first
            self._on_mute(Voice(group, mute_report.task), mute_report, now_ms, doubtful=doubtful)
        for target, error in report.failed:
            self.leases.on_failure(group, target, error, now_ms)
        for one in report.unmuted:
            self._on_unmute(Voice(group, one.task), one.target, now_ms)
        reply = Reply(group, request, self._all_muted() if first else {})
        # Most reports change nothing, and must not cost a walk over all mutes. Nor must those of thousands of
        # tasks that connect at once.
        gathered_ms = self._gathered_ms(changes_probes=report.changes_probes or was_silent)
        if self._asks or now_ms >= min(self._due_ms, gathered_ms):
            return [reply, *self.on_time(now_ms)]
        return [reply]

    def _all_muted(self) -> SharedBody:
        """The body for new tasks: one for all, as thousands may connect at once, and thousands of targets be
        muted."""
        if self._whole_at != self.table.version:
            reasons = {target: mute.reason for target, mute in self.table.mutes.items()}
            update = BreakerUpdate(whole=True, added=reasons, terms=self._terms)
            self._whole, self._whole_at = SharedBody(encode_update(update), 0.0), self.table.version
        return self._whole

    def _gathered_ms(self, *, changes_probes: bool) -> float:
        """When to act on a report: those of many tasks that come together are handled together."""
        due_ms = self._pushes.due_ms
        if not self._is_judged:
            due_ms = min(due_ms, self._judged_ms + GATHER_MUTES_MS)
        if changes_probes:
            due_ms = min(due_ms, self._leased_ms + GATHER_MUTES_MS)
        self._due_ms = min(self._due_ms, due_ms)
        return due_ms

    def muted(self, now_ms: float) -> Iterator[MuteFigures]:
        """What is muted for all tasks, for the live view."""
        for target, mute in self.table.mutes.items():
            yield MuteFigures(str(target), mute.reason, max(0.0, now_ms - mute.since_ms))

    def on_disconnect(self, group: int, now_ms: float) -> None:
        self._tasks.remove(group)
        self._evidence.remove_group(group)
        if self.votes is not None:
            self.votes.remove_group(group)
        self.leases.remove_task(group, now_ms)
        # All tasks of an executor may go at once.
        self._due_ms = min(self._due_ms, self._leased_ms + GATHER_MUTES_MS)

    def _forgive(self, now_ms: float) -> None:
        late_ms = self._stood_ms(now_ms) - self._forgiven_ms
        if late_ms >= GATHER_MUTES_MS:
            self._forgiven_ms += late_ms
            self._tasks.forgive(late_ms)
            self._evidence.forgive(late_ms)
            if self.votes is not None:
                self.votes.forgive(late_ms)

    def on_time(self, now_ms: float) -> Sequence[ServerMessage]:
        self._forgive(now_ms)
        self.table.expire_late(now_ms)
        self._forget(now_ms)
        self._judge(now_ms)
        for node, suspicion in self._evidence.take_due_suspicions(now_ms).items():
            self._mute_for(suspicion.voice, node, suspicion.reason, now_ms)
        outgoing: list[ServerMessage] = [*self._pushes.take(self._tasks, now_ms), *self._take_asks()]
        for group, granted in self.leases.grant(now_ms, self._pushes.unsent).items():
            for target in granted:
                self._evidence.add_witness(Voice(group), target)
            outgoing.append(Push(group, encode_update(BreakerUpdate(leases=granted))))
        self._leased_ms = now_ms
        self._due_ms = now_ms + self._next_change_ms(now_ms)
        return outgoing

    def _take_asks(self) -> list[Push]:
        asks, self._asks = self._asks, {}
        # Most tasks are asked the same, so they share a body.
        bodies: dict[tuple[Target, ...], SharedBody] = {}
        for asked in asks.values():
            key = tuple(asked)
            if key not in bodies:
                bodies[key] = SharedBody(encode_update(BreakerUpdate(asks=key)), 0.0)
        return [Push(group, bodies[tuple(asked)]) for group, asked in asks.items()]

    def next_change_ms(self, now_ms: float) -> float:
        return max(0.0, self._due_ms - now_ms)

    def _next_change_ms(self, now_ms: float) -> float:
        delay = min(
            self.table.next_change_ms(now_ms),
            self._pushes.due_ms - now_ms,
            self._evidence.next_suspicion_ms(now_ms),
            self.leases.next_trial_ms(now_ms),
        )
        voting_ms = None if self.votes is None else self.votes.next_change_ms(now_ms)
        if voting_ms is not None:
            delay = min(delay, max(voting_ms, self._judged_ms + GATHER_MUTES_MS - now_ms))
        if not self._is_judged:
            delay = min(delay, self._judged_ms + GATHER_MUTES_MS - now_ms)
        return max(delay, 0.0)

    # -- evidence -----------------------------------------------------------------------------------

    def _weigh(self, group: int, rows: int, outcomes: Sequence[OutcomeCounts], now_ms: float) -> None:
        if self.votes is not None:
            self.votes.add_rows(rows)
            self.votes.heard(group, now_ms)
            self._is_judged &= not self.votes.has_votes and not outcomes
            for outcome in outcomes:
                # What thousands of tasks say of a partition that is muted would only take memory.
                if outcome.partition not in self.table.mutes:
                    self.votes.vote(group, outcome, now_ms)

    def _judge(self, now_ms: float) -> None:
        """Mute partitions that fail by the votes of all tasks that write to them, after asking those
        tasks."""
        votes = self.votes
        if votes is None:
            return
        if now_ms - self._judged_ms < GATHER_MUTES_MS:
            # Judging walks over all votes, so not every report causes it.
            self._is_judged = not votes.has_votes
            return
        if votes.has_votes:
            self._judged_ms, self._is_judged = now_ms, True
        suspects = [one for one in votes.suspects(now_ms) if one not in self.table.mutes]
        self._judged = self._judged if self._judged < len(suspects) else 0
        # Of thousands that fail together some have their turn now, and fewer tasks are asked about each.
        max_asked = min(MAX_ASKED, max(_MIN_ASKED, _MAX_VOTES // max(1, len(suspects))))
        in_turn = suspects[self._judged : self._judged + _JUDGED_AT_ONCE]
        self._judged += len(in_turn)
        self._is_judged &= self._judged >= len(suspects)
        active = self._tasks.active(now_ms) if suspects else []
        if len(active) > MAX_ASKED:
            # Neighbours may share a host, and its network. One order makes the same tasks answer for all.
            active.sort(key=lambda _: self._random())
        all_active = frozenset(active)
        for partition in in_turn:
            if votes.is_decided(partition, all_active, now_ms):
                self._mute(partition, votes.describe(partition), now_ms)
                votes.forget(partition)
                self._judged -= 1
                continue
            for group in votes.begin_voting(partition, active, now_ms, max_asked):
                self._asks.setdefault(group, []).append(partition)

    def _on_mute(self, voice: Voice, mute: MuteReport, now_ms: float, *, doubtful: bool) -> None:
        """A task has muted a target; that is a reason to ask others, not a proof.

        A silent broker is muted for all tasks while another task asks it. If others had responses in the
        second half of the silence, the network of that one task is at fault, and the mute stays its own.
        """
        target, silence_ms = mute.target, mute.silence_ms
        doubted = self._evidence.is_doubted(voice, target, now_ms)
        if isinstance(target, TopicPartition):
            if not doubted:
                self._on_partition_mute(voice, target, mute.reason, now_ms)
            return
        if self._evidence.contradicts(voice, target, silence_ms, now_ms, doubtful=doubtful or doubted):
            return
        # Others get the next leases: they find out whether the broker is at fault or this task's network.
        self._tasks.move_to_end(voice.group)
        asked = self._ask_another(voice.group, target, now_ms)
        if silence_ms or not asked:
            self._mute_for(voice, target, mute.reason, now_ms, silence_ms)
        elif not doubted and target not in self.table.mutes:
            self._evidence.suspect(voice, target, mute, now_ms)

    def _on_partition_mute(self, voice: Voice, target: TopicPartition, reason: str, now_ms: float) -> None:
        """A user's breaker class has muted a partition. Another task that holds a batch for it probes at
        once. If that succeeds, the first task is doubted for a minute."""
        if self._mute_for(voice, target, reason, now_ms) and self._tasks.has_several(now_ms):
            self.table.mutes[target].retry_at_ms = now_ms

    def _ask_another(self, group: int, node: int, now_ms: float) -> bool:
        """Have another task send a broker a request without rows. False if there is no other task."""
        if now_ms - self._asked_ms.get(node, -math.inf) < ASK_MS:
            return True
        # Walks over all tasks, so only once in a while.
        chosen = self._tasks.next_for_lease(now_ms, other_than=group)
        if chosen is None:
            return False
        if len(self._asked_ms) >= MAX_NODES:
            self._asked_ms.clear()
        self._asked_ms[node] = now_ms
        self._tasks.lease(chosen, node)
        self._asks.setdefault(chosen, []).append(node)
        return True

    # -- mutes --------------------------------------------------------------------------------------

    def _mute_for(
        self, voice: Voice, target: Target, reason: str, now_ms: float, silence_ms: float = 0.0
    ) -> bool:
        """Mute a target on one task's report. False if it was muted already."""
        muted = self._mute(target, reason, now_ms, voice)
        if muted:
            self._evidence.may_be_refuted(voice, target, now_ms, silence_ms)
        return muted

    def _mute(self, target: Target, reason: str, now_ms: float, finder: Voice | None = None) -> bool:
        size = size_of(target, reason)
        full = len(self.table.mutes) >= MAX_MUTES or self._muted_bytes + size > _MAX_MUTED_BYTES
        if full or not self.table.trip(target, reason, now_ms):
            return False
        self._muted_bytes += size
        self._pushes.add(target, reason)
        self._evidence.begin(target, finder)
        return True

    def _on_unmute(self, voice: Voice, target: Target, now_ms: float) -> None:
        """A task says that a mute is over. It knows if it caused the mute or had a lease; from any other
        task that is a reason to probe at once."""
        mute = self.table.mutes.get(target)
        if mute is None:
            self._evidence.withdraw_suspicion(target)
        elif self._evidence.is_witness(voice, target):
            soon_ms = 2 * self.table.retry_interval_ms
            self._evidence.on_unmuted_by(voice, target, mute, now_ms, soon_ms)
            self._unmute(target)
        elif mute.state is BreakerState.OPEN:
            mute.retry_at_ms = now_ms

    def _unmute(self, target: Target) -> None:
        self.leases.end(target)
        self._evidence.end(target)
        mute = self.table.mutes.get(target)
        if mute is not None and self.table.reset(target):
            self._muted_bytes -= size_of(target, mute.reason)
            self._pushes.remove(target)

    def _forget(self, now_ms: float) -> None:
        # The oldest come first.
        old = takewhile(lambda mute: now_ms - mute.since_ms > _FORGET_MS, self.table.mutes.values())
        for target in [one.target for one in old]:
            # Brokers stay muted: their probes need no rows, so any task can do them.
            if isinstance(target, TopicPartition) and not self._tasks.has_holder(target, now_ms):
                self._unmute(target)
