"""The breaker's messages of an executor's tasks, which its relay adds up. Decides nothing. No I/O.

The coordinator decides, as it does for tasks by themselves; it only knows of a group what its report says.
The report has the newest response of each broker, summed rows, the union of held targets and one vote a
partition, which counts for as many tasks as write there. Mutes, unmutes and failed probes name their task,
because responses to another task of the same host contradict a mute, too. A mute of a target that is muted
for all already is news to nobody.

Of what the coordinator sends, mutes go to all tasks at once, and unmutes to one task after the other. A lease
goes to one task, and a question to all that may have an answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from kafka_sink.breaker.states import Target
from kafka_sink.clock import RANDOM
from kafka_sink.coordinator.breaker.messages import (
    KIND,
    MAX_MUTES,
    MAX_NODES,
    MAX_OUTCOMES,
    BreakerReport,
    BreakerUpdate,
    MuteReport,
    OutcomeCounts,
    TaskVotes,
    UnmuteReport,
    decode_report,
    decode_update,
    encode_report,
    encode_update,
    how_many_fit,
    that_fit,
)
from kafka_sink.coordinator.breaker.tasks import BreakerTasks, delay_of_turn, turn_at
from kafka_sink.coordinator.breaker.votes import GROUP_VALID_MS, PartitionVotes
from kafka_sink.coordinator.transport.group import Group, ToTask
from kafka_sink.coordinator.transport.message_format import capped
from kafka_sink.model import TopicPartition
from kafka_sink.timing_bounds import GATHER_MUTES_MS, HEALTHY_REPORT_MS, SILENT_TASK_MS, next_beat_ms

# Changes of what tasks wait for are gathered for this long.
_GATHER_WAITS_MS = 100.0
# Tasks have this long to vote before the relay does, which has longer.
_VOTING_MS = 150.0
# Old votes are looked for so often.
_LOOK_MS = 1_000.0
# The coordinator may have forgotten the votes of a relay that it has not heard for so long.
_RESEND_VOTES_MS = (GROUP_VALID_MS + HEALTHY_REPORT_MS) / 2


class BreakerGroup(Group):
    """``random`` returns a number in [0, 1). Tasks that write to another Kafka cluster than the first one
    speak for themselves."""

    kind = KIND

    def __init__(self, random: Callable[[], float] = RANDOM.random) -> None:
        super().__init__()
        self._random = random
        self._tasks = BreakerTasks(SILENT_TASK_MS)
        self._apart: set[int] = set()
        self._cluster_id: str | None = None
        # What is muted for all in the reported cluster, with reasons. None until the coordinator has said so.
        # The first reports of tasks, by their numbers, are answered when it is known for their cluster.
        self._muted: dict[Target, str] | None = None
        self._entering: dict[int, int] = {}
        # None where the coordinator counts no votes.
        self._votes: PartitionVotes | None = None
        # As last reported, and the partitions that the coordinator has asked about.
        self._reported_votes: dict[TopicPartition, TaskVotes] = {}
        self._asked: set[TopicPartition] = set()
        self._asked_brokers: set[int] = set()
        # Muted targets of which a task has said something else: who mutes them now has news.
        self._contested: set[Target] = set()
        # By target, the task that has the lease, and all that had one since the target was muted.
        self._owners: dict[Target, int] = {}
        self._leased: dict[Target, set[int]] = {}
        # What the next report says.
        self._responses: dict[int, tuple[float, int]] = {}
        self._rows = 0
        self._mutes: dict[tuple[Target, int], tuple[MuteReport, float]] = {}
        self._unmutes: list[UnmuteReport] = []
        self._failed: list[tuple[Target, str]] = []
        # What the last report said.
        self._waits: tuple[frozenset[Target], frozenset[Target]] = frozenset(), frozenset()
        self._reported_cluster: str | None = None
        self._is_resting = True
        self._sent_ms = -math.inf
        # When votes were looked at last, and when they must be again.
        self._looked_ms, self._look_ms = -math.inf, math.inf
        self._urgent = False

    # -- tasks --------------------------------------------------------------------------------------

    def on_task(self, task: int, request: int, body: Mapping[str, Any], now_ms: float) -> bool:
        report = decode_report(body)
        named = report.cluster_id
        if named is not None and self._cluster_id not in (None, named):
            if task in self._entering:
                self.outgoing.append(ToTask(task, self._entering.pop(task), {}))
            self.on_task_left(task, now_ms)
            if self._tasks.has_any:
                self._apart.add(task)
        if task in self._apart:
            return False
        was_moving = self._is_moving
        self._cluster_id = named or self._cluster_id
        if self._is_moving and not was_moving:
            # Said of the former cluster, whose brokers may have the same ids.
            self._responses, self._mutes, self._unmutes, self._failed = {}, {}, [], []
        is_first = task not in self._tasks
        was_silent = self._tasks.update(task, replace(report, tasks=None), now_ms)
        # One more task at work can wait for the next report.
        self._urgent |= (was_silent and self._is_resting) or self._names_cluster
        self._note(task, report, now_ms, is_first=is_first)
        if not is_first:
            self.outgoing.append(ToTask(task, request, {}))
        elif self._muted is None or self._is_moving:
            self._entering[task] = request
        else:
            self.outgoing.append(ToTask(task, request, self._whole()))
        return True

    @property
    def _names_cluster(self) -> bool:
        return self._cluster_id not in (None, self._reported_cluster)

    @property
    def _is_moving(self) -> bool:
        """Whether the coordinator speaks of another cluster until the next report. If all tasks leave before
        that, they do not move."""
        return self._names_cluster and self._reported_cluster is not None

    def _whole(self) -> Mapping[str, Any]:
        return encode_update(BreakerUpdate(whole=True, added=self._muted or {}))

    def _note(self, task: int, report: BreakerReport, now_ms: float, *, is_first: bool) -> None:
        for node, ago_ms in report.responses.items():
            self._note_response(task, node, now_ms - ago_ms)
        self._rows += report.rows
        if self._votes is not None:
            # The coordinator takes no votes on what is muted already.
            outcomes = [one for one in report.outcomes if one.partition not in (self._muted or ())]
            for outcome in outcomes:
                self._votes.vote(task, replace(outcome, votes=None), now_ms)
            # Where a partition fails for one task, or the coordinator asks, the others vote, too.
            doubtful = [one.partition for one in outcomes if one.failed or one.partition in self._asked]
            self._ask_tasks(doubtful, now_ms)
            if outcomes:
                self._look_soon(now_ms)
        for target, error in report.failed:
            self._tasks.end_probe(task, target)
            # Without the lease it was sent before the mute, or without the coordinator.
            if self._owners.get(target) == task:
                del self._owners[target]
                self._failed.append((target, error))
        self._note_changes(task, report, now_ms, is_first=is_first)
        self._urgent |= bool(self._mutes or self._unmutes or self._failed)

    def _note_response(self, task: int, node: int, at_ms: float) -> None:
        self._tasks.end_probe(task, node)
        known_ms, _ = self._responses.get(node, (-math.inf, 0))
        if at_ms <= known_ms or (node not in self._responses and len(self._responses) >= MAX_NODES):
            return
        self._responses[node] = at_ms, task
        if node in (self._muted or ()):
            self._contested.add(node)
        # Others wait for it.
        self._urgent |= node in self._contested or node in self._asked_brokers

    def _note_changes(self, task: int, report: BreakerReport, now_ms: float, *, is_first: bool) -> None:
        muted = self._muted or {}
        for mute in report.muted:
            is_known = mute.target in muted and mute.target not in self._contested
            if not is_known and len(self._mutes) < MAX_MUTES:
                self._mutes[mute.target, task] = replace(mute, task=task, is_old=is_first), now_ms
                # Another task finds out whether the broker is at fault or this task's network.
                self._tasks.move_to_end(task)
        for one in report.unmuted:
            if len(self._unmutes) < MAX_MUTES:
                had_lease = task in self._leased.get(one.target, ())
                self._unmutes.append(UnmuteReport(one.target, one.reason, 0 if had_lease else task))
            if one.target in muted:
                self._contested.add(one.target)

    def on_task_left(self, task: int, now_ms: float) -> None:
        self._apart.discard(task)
        self._entering.pop(task, None)
        if task not in self._tasks:
            return
        self._tasks.remove(task)
        if self._votes is not None:
            self._votes.remove_group(task)
            self._look_soon(now_ms)
        for target in [target for target, owner in self._owners.items() if owner == task]:
            # Its probe may be in flight, so the next one waits as after a failure.
            del self._owners[target]
            self._failed.append((target, ""))
        for leased in self._leased.values():
            leased.discard(task)
        self._urgent |= bool(self._failed)
        if not self._tasks.has_any:
            # The next ones may write to another cluster.
            self._cluster_id = None
            self._urgent = True

    # -- votes --------------------------------------------------------------------------------------

    def _ask_tasks(self, partitions: Collection[TopicPartition], now_ms: float) -> None:
        assert self._votes is not None
        active = self._tasks.active(now_ms) if partitions else []
        asks: dict[int, list[TopicPartition]] = {}
        for partition in partitions:
            for task in self._votes.begin_voting(partition, active, now_ms):
                asks.setdefault(task, []).append(partition)
        for task, asked in asks.items():
            self._push(task, BreakerUpdate(asks=tuple(asked)))

    def _look_soon(self, now_ms: float) -> None:
        """A look walks over all votes, so not every message of a task causes one."""
        self._look_ms = min(self._look_ms, max(now_ms, self._looked_ms + GATHER_MUTES_MS))

    def _decided(self, votes: PartitionVotes, now_ms: float) -> list[TopicPartition]:
        """Partitions whose votes have changed and are complete, or that the coordinator has asked about."""
        votes.expire(now_ms)
        active = self._tasks.active(now_ms)
        return [
            partition
            for partition in {*votes.partitions(), *self._reported_votes, *self._asked}
            if (partition in self._asked or self._is_news(partition, votes.tally(partition)))
            and not votes.is_voting(partition, active, now_ms)
        ]

    def _is_news(self, partition: TopicPartition, votes: TaskVotes) -> bool:
        before = self._reported_votes.get(partition)
        return votes.failing > 0 if before is None else votes != before

    # -- the coordinator ----------------------------------------------------------------------------

    def due_ms(self, now_ms: float) -> float:
        return min(self._look_ms, self._due_without_votes_ms())

    def _due_without_votes_ms(self) -> float:
        if self._urgent:
            return -math.inf
        due_ms = math.inf
        if self._waits != (self._tasks.held, self._tasks.wanted):
            due_ms = self._sent_ms + _GATHER_WAITS_MS
        if not self._is_resting:
            due_ms = min(due_ms, next_beat_ms(self._sent_ms, HEALTHY_REPORT_MS))
        return due_ms

    def next_message(self, now_ms: float) -> Mapping[str, Any] | None:
        if now_ms < self.due_ms(now_ms):
            return None
        outcomes = self._take_outcomes(now_ms)
        if not outcomes and now_ms < self._due_without_votes_ms():
            return None
        if self._is_moving:
            # The reply says what is muted there, where nobody knows yet what these tasks wait for.
            self._muted, self._waits = None, (frozenset(), frozenset())
        active = len(self._tasks.active(now_ms))
        waits = frozenset(self._tasks.held), frozenset(self._tasks.wanted)
        mutes = list(
            islice(self._mutes, how_many_fit((to, one.reason) for (to, _), (one, _) in self._mutes.items()))
        )
        unmutes = how_many_fit((one.target, one.reason) for one in self._unmutes)
        failed = how_many_fit(self._failed)
        report = BreakerReport(
            {node: capped(now_ms - at_ms) for node, (at_ms, _) in self._responses.items()},
            capped(self._rows),
            outcomes,
            tuple(_aged(*self._mutes.pop(one), now_ms) for one in mutes),
            tuple(self._unmutes[:unmutes]),
            tuple(self._failed[:failed]),
            tuple(that_fit(sorted(waits[0], key=str))) if waits[0] != self._waits[0] else None,
            tuple(that_fit(sorted(waits[1], key=str))) if waits[1] != self._waits[1] else None,
            not active,
            self._cluster_id if self._names_cluster else None,
            {node: task for node, (_, task) in self._responses.items()},
            active,
        )
        self._responses, self._rows = {}, 0
        self._asked_brokers -= report.responses.keys()
        self._unmutes, self._failed = self._unmutes[unmutes:], self._failed[failed:]
        self._waits, self._reported_cluster = waits, self._cluster_id or self._reported_cluster
        self._is_resting, self._sent_ms = report.is_resting, now_ms
        self._urgent = bool(self._mutes or self._unmutes or self._failed)
        return encode_report(report)

    def _take_outcomes(self, now_ms: float) -> tuple[OutcomeCounts, ...]:
        if now_ms - self._sent_ms > _RESEND_VOTES_MS:
            self._reported_votes.clear()
        if self._votes is None:
            self._look_ms = math.inf
            return ()
        if now_ms < min(self._look_ms, self._looked_ms + GATHER_MUTES_MS):
            return ()
        found = self._decided(self._votes, now_ms)
        outcomes = [self._votes.total(one) for one in found[:MAX_OUTCOMES]]
        outcomes = outcomes[: how_many_fit((one.partition, one.error) for one in outcomes)]
        self._asked -= {one.partition for one in outcomes}
        for one in outcomes:
            if one.votes is not None and one.votes.tasks:
                self._reported_votes[one.partition] = one.votes
            else:
                self._reported_votes.pop(one.partition, None)
        self._looked_ms, self._look_ms = now_ms, math.inf
        if len(found) > len(outcomes):
            self._look_soon(now_ms)
        elif self._votes.has_votes or self._reported_votes or self._asked:
            voting_ms = self._votes.next_change_ms(now_ms)
            self._look_ms = now_ms + (_LOOK_MS if voting_ms is None else voting_ms)
        return tuple(outcomes)

    def on_reply(self, body: Mapping[str, Any], took_ms: float, now_ms: float) -> None:
        if took_ms > GROUP_VALID_MS - HEALTHY_REPORT_MS:
            self._reported_votes.clear()
            self._look_soon(now_ms)
        if body:
            self.on_push(body, now_ms)

    def on_push(self, body: Mapping[str, Any], now_ms: float) -> None:
        update = decode_update(body, MAX_MUTES)
        if update.terms is not None:
            self._tasks.expect_reports(update.terms.report_interval_ms)
            perc = update.terms.failure_perc
            self._votes = PartitionVotes(0, perc, _VOTING_MS) if perc else None
        if update.whole:
            self._muted = {}
            self._owners.clear()
            self._leased.clear()
            self._contested.clear()
            self._reported_votes.clear()
        if self._muted is None:
            return
        self._muted.update(update.added)
        self._forget({*update.added, *update.removed})
        for target in update.removed:
            self._muted.pop(target, None)
            self._tasks.forget_probes(target)
        if self._is_moving:
            return
        self._tell(update, now_ms)
        for target, lease in update.leases.items():
            owner = self._candidate(target, now_ms, trial=lease.trial)
            if owner is not None:
                self._owners[target] = owner
                self._leased.setdefault(target, set()).add(owner)
                self._tasks.lease(owner, target)
                self._push(owner, BreakerUpdate(leases={target: lease}))
        self._ask(update.asks, now_ms)

    def _forget(self, targets: Collection[Target]) -> None:
        if targets:
            self._mutes = {one: mute for one, mute in self._mutes.items() if one[0] not in targets}
        for target in targets:
            self._contested.discard(target)
            self._owners.pop(target, None)
            self._leased.pop(target, None)
            if isinstance(target, TopicPartition) and self._votes is not None:
                self._votes.forget(target)
                self._reported_votes.pop(target, None)

    def _tell(self, update: BreakerUpdate, now_ms: float) -> None:
        """All tasks learn of mutes and unmutes, each of these in its turn."""
        if update.whole:
            entering, self._entering = self._entering, {}
            whole = self._whole()
            self.outgoing += [ToTask(task, entering.get(task), whole) for task in self._tasks]
        elif update.removed:
            order = self._tasks.those_that_wait_first(update.removed, self._random)
            first = turn_at(update.delay_ms)
            for turn, task in enumerate(order, first):
                delay_ms = update.delay_ms if turn == first else delay_of_turn(turn, self._random())
                delay_ms = max(update.delay_ms, min(delay_ms, update.max_delay_ms))
                told = BreakerUpdate(added=update.added, removed=update.removed, delay_ms=delay_ms)
                self._push(task, told)
        elif update.added:
            body = encode_update(BreakerUpdate(added=update.added))
            self.outgoing += [ToTask(task, None, body) for task in self._tasks]

    def _push(self, task: int, update: BreakerUpdate) -> None:
        self.outgoing.append(ToTask(task, None, encode_update(update)))

    def _candidate(self, target: Target, now_ms: float, *, trial: bool) -> int | None:
        """The task that gets a lease: of those that can probe the target, the one whose last lease is longest
        ago, and for a broker one that waits for no probe of it. None where it has left meanwhile; the lease
        passes on when it ends."""
        order = dict.fromkeys(self._tasks.in_lease_order(now_ms))
        if not isinstance(target, TopicPartition):
            return self._tasks.first_for_broker(target, order)
        first = self._tasks.first_holder(target, order)
        return self._tasks.first_wanter(target, order) if first is None and trial else first

    def _ask(self, targets: Collection[Target], now_ms: float) -> None:
        partitions = [one for one in targets if isinstance(one, TopicPartition)]
        if self._votes is not None and partitions:
            self._asked.update(partitions)
            self._ask_tasks(partitions, now_ms)
            self._look_soon(now_ms)
        for node in [one for one in targets if not isinstance(one, TopicPartition)]:
            chosen = self._candidate(node, now_ms, trial=False)
            if chosen is not None:
                self._asked_brokers.add(node)
                self._tasks.lease(chosen, node)
                self._push(chosen, BreakerUpdate(asks=(node,)))


def _aged(mute: MuteReport, noted_ms: float, now_ms: float) -> MuteReport:
    return replace(mute, silence_ms=capped(mute.silence_ms + now_ms - noted_ms)) if mute.silence_ms else mute
