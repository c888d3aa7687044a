"""The tasks of a job vote on a partition, one vote each: does it fail for all of them? No I/O.

A relay votes for its tasks, with as many votes as they are, and counts them by this class, too. A task
reports the outcomes of partitions that fail for it, and of others when the coordinator asks. A task that
cannot reach a broker, or that reports nonsense, is outvoted by the tasks that write there, however many
reports it sends. Of many tasks a sample is asked, whose votes count for those that were not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from kafka_sink.breaker.outcomes import MIN_FAILURES
from kafka_sink.coordinator.breaker.messages import OutcomeCounts, TaskVotes
from kafka_sink.coordinator.transport.message_format import capped
from kafka_sink.model import TopicPartition

# A task's counts span the last ten seconds, so its vote is valid for as long.
_VALID_MS = 10_000.0
# A relay says when its votes change. It reports every two seconds, or else its tasks have left it and vote by
# themselves, three seconds after its last report at the earliest.
GROUP_VALID_MS = 3_000.0
# The time groups get to vote when asked: they report at once, but their workers may be busy.
_VOTING_MS = 400.0
# How late the coordinator's timer may look at a vote that is over.
_TIMER_DELAY_MS = 20.0
# A partition that the votes cleared is not asked about again sooner.
_MIN_ASK_INTERVAL_MS = 2_000.0
# How often old votes are withdrawn.
_EXPIRE_INTERVAL_MS = 1_000.0
_EXPIRED_AT_ONCE = 1_000
_ROUNDING = 1e-6


# At most so many tasks are asked about a partition.
MAX_ASKED = 100
# Where thousands of partitions fail for thousands of tasks, more votes than so many in all count only where a
# partition has few, or the voter was asked.
_MAX_VOTES, _MIN_VOTERS = 50_000, 10
# Partitions with votes: more than can be muted.
_MAX_PARTITIONS = 20_000


@dataclass(frozen=True, slots=True)
class _Vote:
    """``votes``: of one task, or of those behind a relay. ``each``: for how many others each of them
    counts."""

    outcome: OutcomeCounts
    at_ms: float
    votes: TaskVotes
    each: float


@dataclass(slots=True)
class _Tally:
    """A partition's votes: for how many tasks they count, for how many it fails, and the failures."""

    voters: float = 0.0
    failing: float = 0.0
    failures: int = 0

    def add(self, vote: _Vote, times: int = 1) -> None:
        self.voters += times * vote.each * vote.votes.tasks
        self.failing += times * vote.each * vote.votes.failing
        self.failures += times * vote.votes.failures


@dataclass(frozen=True, slots=True)
class _Sample:
    """The groups that were asked about a partition, and for how many each of them speaks."""

    groups: frozenset[int]
    tasks_each: float
    asked_ms: float


class PartitionVotes:
    """All votes of one cluster's tasks, or of those behind a relay. In a relay, a group is one of its tasks.

    ``trigger_count``: no vote counts before all tasks together have sent so many rows. ``trigger_perc``: the
    share of a task's batches that must fail, and of the tasks that write to a partition. ``voting_ms``: the
    time to vote when asked.
    """

    def __init__(self, trigger_count: int, trigger_perc: int, voting_ms: float = _VOTING_MS) -> None:
        self._trigger_count = trigger_count
        self.trigger_perc = trigger_perc
        self._voting_ms = voting_ms
        self._rows = 0
        self._votes: dict[TopicPartition, dict[int, _Vote]] = {}
        self._count = 0
        self._tallies: dict[TopicPartition, _Tally] = {}
        self._expired_ms = -math.inf
        self._to_expire: list[TopicPartition] = []
        # By task, the partitions that it has voted on.
        self._voted: dict[int, set[TopicPartition]] = {}
        self._samples: dict[TopicPartition, _Sample] = {}
        # When relays that have voted reported last.
        self._heard_ms: dict[int, float] = {}

    @property
    def has_votes(self) -> bool:
        return bool(self._votes)

    def add_rows(self, rows: int) -> None:
        """A task has sent ``rows`` more."""
        self._rows += rows

    def vote(self, group: int, outcome: OutcomeCounts, now_ms: float) -> None:
        """A task's counts of the last seconds, in place of its earlier vote."""
        partition = outcome.partition
        votes = self._votes.get(partition)
        if votes is None:
            if len(self._votes) >= _MAX_PARTITIONS:
                return
            votes = self._votes[partition] = {}
            self._tallies[partition] = _Tally()
        tally, sample = self._tallies[partition], self._samples.get(partition)
        before, is_asked = votes.get(group), sample is not None and group in sample.groups
        if before is None:
            if self._count >= _MAX_VOTES and len(votes) >= _MIN_VOTERS and not is_asked:
                return
            self._count += 1
        else:
            tally.add(before, -1)
            if outcome.failed and not outcome.error:
                # An answer to a question names no error that was reported before.
                error, answered = before.outcome.error, before.outcome.answered
                outcome = replace(outcome, error=error, answered=answered)
        each = sample.tasks_each if sample is not None and is_asked else 1.0
        vote = votes[group] = _Vote(outcome, now_ms, outcome.votes or self._votes_of(outcome), each)
        tally.add(vote)
        self._voted.setdefault(group, set()).add(partition)
        if outcome.votes is not None:
            self._heard_ms[group] = now_ms

    def _votes_of(self, outcome: OutcomeCounts) -> TaskVotes:
        """One task's vote. A few failures of each count, and only if they are significant: one lost
        connection says nothing of a partition, a broker's error does."""
        failed = outcome.failed
        fails = failed > 0 and failed * 100 >= self.trigger_perc * (failed + outcome.written)
        significant = outcome.answered or failed >= MIN_FAILURES
        counted = min(failed, MIN_FAILURES) if fails and significant else 0
        return TaskVotes(int(failed + outcome.written > 0), int(fails), counted)

    def heard(self, group: int, now_ms: float) -> None:
        """A relay has reported, so that its votes stay valid."""
        if group in self._heard_ms:
            self._heard_ms[group] = now_ms

    def forgive(self, late_ms: float) -> None:
        """No vote could be taken for so long."""
        for group in self._heard_ms:
            self._heard_ms[group] += late_ms
        for partition, one in self._samples.items():
            self._samples[partition] = replace(one, asked_ms=one.asked_ms + late_ms)

    def partitions(self) -> Collection[TopicPartition]:
        """Those with votes."""
        return self._votes.keys()

    def tally(self, partition: TopicPartition) -> TaskVotes:
        """The sum of a partition's votes."""
        found = self._tallies.get(partition) or _Tally()
        return TaskVotes(round(found.voters), round(found.failing), found.failures)

    def total(self, partition: TopicPartition) -> OutcomeCounts:
        """The sums of a partition's votes and outcomes, as a relay reports them."""
        outcomes = [vote.outcome for vote in self._votes.get(partition, {}).values()]
        failing = [one for one in outcomes if one.failed]
        return OutcomeCounts(
            partition,
            capped(sum(one.written for one in outcomes)),
            capped(sum(one.failed for one in outcomes)),
            any(one.answered for one in failing),
            next((one.error for one in failing if one.error), ""),
            self.tally(partition),
        )

    def remove_group(self, group: int) -> None:
        self._heard_ms.pop(group, None)
        for partition in self._voted.pop(group, ()):
            self._withdraw(partition, group)

    def _withdraw(self, partition: TopicPartition, group: int) -> None:
        vote = self._votes.get(partition, {}).pop(group, None)
        if vote is None:
            return
        self._count -= 1
        self._tallies[partition].add(vote, -1)
        self._forget_voter(group, partition)
        if not self._votes[partition]:
            self.forget(partition)

    def _forget_voter(self, group: int, partition: TopicPartition) -> None:
        voted = self._voted.get(group)
        if voted is not None:
            voted.discard(partition)
            if not voted:
                del self._voted[group]
                self._heard_ms.pop(group, None)

    def forget(self, partition: TopicPartition) -> None:
        """Drop a partition's votes, as after a mute."""
        votes = self._votes.pop(partition, {})
        self._count -= len(votes)
        for group in votes:
            self._forget_voter(group, partition)
        self._tallies.pop(partition, None)
        self._samples.pop(partition, None)

    def suspects(self, now_ms: float) -> list[TopicPartition]:
        """Partitions that fail by the votes so far."""
        self.expire(now_ms)
        if self._rows < self._trigger_count:
            return []
        return [partition for partition in self._votes if self._exceeds(partition)]

    def expire(self, now_ms: float) -> None:
        """Withdraw old votes, of a part of thousands of partitions at a time."""
        if now_ms - self._expired_ms >= _EXPIRE_INTERVAL_MS and not self._to_expire:
            self._expired_ms = now_ms
            for group in [one for one, at_ms in self._heard_ms.items() if now_ms - at_ms > GROUP_VALID_MS]:
                self.remove_group(group)
            self._to_expire = list(self._votes)
        in_turn, self._to_expire = self._to_expire[-_EXPIRED_AT_ONCE:], self._to_expire[:-_EXPIRED_AT_ONCE]
        for partition in in_turn:
            votes = self._votes.get(partition, {})
            old = [(group, vote) for group, vote in votes.items() if now_ms - vote.at_ms > _VALID_MS]
            for group, vote in old:
                # A relay's vote stays valid, unless none of its tasks writes there any more.
                if group not in self._heard_ms or not vote.votes.tasks:
                    self._withdraw(partition, group)

    def _exceeds(self, partition: TopicPartition) -> bool:
        tally = self._tallies[partition]
        # Sums of fractions are not exact.
        share = tally.failing * 100 >= self.trigger_perc * tally.voters - _ROUNDING
        return tally.failures >= MIN_FAILURES and share

    def is_decided(self, partition: TopicPartition, groups: Collection[int], now_ms: float) -> bool:
        """Whether all of these groups have voted, or those that were asked, or the time to vote is over."""
        votes, sample = self._votes.get(partition, {}), self._samples.get(partition)
        if sample is not None and now_ms - sample.asked_ms < _MIN_ASK_INTERVAL_MS:
            return not self.is_voting(partition, groups, now_ms)
        return len(votes) >= len(groups) and votes.keys() >= set(groups)

    def is_voting(self, partition: TopicPartition, groups: Collection[int], now_ms: float) -> bool:
        """Whether some of these groups were asked just now, and have not voted yet."""
        sample = self._samples.get(partition)
        if sample is None or now_ms - sample.asked_ms >= self._voting_ms:
            return False
        return not self._votes.get(partition, {}).keys() >= sample.groups.intersection(groups)

    def begin_voting(
        self, partition: TopicPartition, groups: Sequence[int], now_ms: float, max_asked: int = MAX_ASKED
    ) -> Sequence[int]:
        """Start asking groups about a partition, and return them: at most ``max_asked`` of those ``groups``
        that have not voted, in their order. Nobody if that was done lately."""
        before = self._samples.get(partition)
        if before is not None and now_ms - before.asked_ms < _MIN_ASK_INTERVAL_MS:
            return ()
        votes = self._votes.get(partition, {})
        asked = list(islice((group for group in groups if group not in votes), max_asked))
        each = max(1.0, (len(groups) - len(votes)) / len(asked)) if asked else 1.0
        self._samples[partition] = _Sample(frozenset(asked), each, now_ms)
        return asked

    def next_change_ms(self, now_ms: float) -> float | None:
        """Milliseconds until the voting on a partition is over; None if there is none."""
        # A timer may fire a little early; then the coordinator looks once more.
        waits = (one.asked_ms + self._voting_ms - now_ms for one in self._samples.values())
        return min((max(1.0, wait) for wait in waits if wait > -_TIMER_DELAY_MS), default=None)

    def describe(self, partition: TopicPartition) -> str:
        """Why a partition is muted, for messages."""
        votes = list(self._votes[partition].values())
        failing = [vote for vote in votes if vote.votes.failing]
        failed = sum(one.outcome.failed for one in failing)
        error = next((one.outcome.error for one in failing if one.outcome.error), "")
        return (
            f"{failed} batches of {sum(one.votes.failing for one in failing)} of the "
            f"{sum(one.votes.tasks for one in votes)} tasks that write to it failed; last error: {error}"
        )
