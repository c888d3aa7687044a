"""The tasks of a job vote on a partition, one vote each: does it fail for all of them? No I/O.

A task reports the outcomes of partitions that fail for it, and of others when the coordinator asks. A task
that cannot reach a broker, or that reports nonsense, is outvoted by the tasks that write there, however many
reports it sends. Of many tasks a sample is asked, whose votes count for those that were not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kafka_sink.breaker.outcomes import MIN_FAILURES
from kafka_sink.coordinator.breaker.messages import OutcomeCounts
from kafka_sink.model import TopicPartition

# A task's counts span the last ten seconds, so its vote is valid for as long.
_VALID_MS = 10_000.0
# The time tasks get to vote when asked: they report at once, but their workers may be busy.
_VOTING_MS = 400.0
# How late the coordinator's timer may look at a vote that is over.
_TIMER_DELAY_MS = 20.0
# A partition that the votes cleared is not asked about again sooner.
_MIN_ASK_INTERVAL_MS = 2_000.0
# How often old votes are withdrawn.
_EXPIRE_INTERVAL_MS = 1_000.0
_ROUNDING = 1e-6


# At most so many tasks are asked about a partition.
MAX_ASKED = 100


@dataclass(frozen=True, slots=True)
class _Vote:
    """``tasks``: for how many tasks it counts. ``failures``: a few of each task count, and only if they are
    significant: one lost connection says nothing of a partition, a broker's error does."""

    outcome: OutcomeCounts
    at_ms: float
    tasks: float
    fails: bool
    failures: int


@dataclass(slots=True)
class _Tally:
    """A partition's votes: for how many tasks they count, for how many it fails, and the failures."""

    voters: float = 0.0
    failing: float = 0.0
    failures: int = 0

    def add(self, vote: _Vote) -> None:
        self.voters += vote.tasks
        if vote.fails:
            self.failing += vote.tasks
            self.failures += vote.failures

    def remove(self, vote: _Vote) -> None:
        self.voters -= vote.tasks
        if vote.fails:
            self.failing -= vote.tasks
            self.failures -= vote.failures


@dataclass(frozen=True, slots=True)
class _Sample:
    """The tasks that were asked about a partition, and for how many each of them speaks."""

    tasks: frozenset[int]
    tasks_each: float
    asked_ms: float


class PartitionVotes:
    """All votes of one cluster's tasks.

    ``trigger_count``: no vote counts before all tasks together have sent so many rows. ``trigger_perc``: the
    share of a task's batches that must fail, and of the tasks that write to a partition.
    """

    def __init__(self, trigger_count: int, trigger_perc: int) -> None:
        self._trigger_count = trigger_count
        self._trigger_perc = trigger_perc
        self._rows = 0
        self._votes: dict[TopicPartition, dict[int, _Vote]] = {}
        self._tallies: dict[TopicPartition, _Tally] = {}
        self._expired_ms = -math.inf
        # By task, the partitions that it has voted on.
        self._voted: dict[int, set[TopicPartition]] = {}
        self._samples: dict[TopicPartition, _Sample] = {}

    @property
    def has_votes(self) -> bool:
        """Whether there is any vote."""
        return bool(self._votes)

    def add_rows(self, rows: int) -> None:
        """A task has sent ``rows`` more."""
        self._rows += rows

    def vote(self, task: int, outcome: OutcomeCounts, now_ms: float) -> None:
        """A task's counts of the last seconds, in place of its earlier vote."""
        partition, failed = outcome.partition, outcome.failed
        votes = self._votes.get(partition)
        if votes is None:
            votes = self._votes[partition] = {}
            self._tallies[partition] = _Tally()
        tally, sample = self._tallies[partition], self._samples.get(partition)
        before = votes.get(task)
        if before is not None:
            tally.remove(before)
        vote = votes[task] = _Vote(
            outcome,
            now_ms,
            sample.tasks_each if sample is not None and task in sample.tasks else 1.0,
            failed > 0 and failed * 100 >= self._trigger_perc * (failed + outcome.written),
            min(failed, MIN_FAILURES) if outcome.answered or failed >= MIN_FAILURES else 0,
        )
        tally.add(vote)
        self._voted.setdefault(task, set()).add(partition)

    def remove_task(self, task: int) -> None:
        """A task is gone."""
        for partition in self._voted.pop(task, ()):
            self._withdraw(partition, task)

    def _withdraw(self, partition: TopicPartition, task: int) -> None:
        vote = self._votes.get(partition, {}).pop(task, None)
        if vote is None:
            return
        self._tallies[partition].remove(vote)
        self._forget_voter(task, partition)
        if not self._votes[partition]:
            self.forget(partition)

    def _forget_voter(self, task: int, partition: TopicPartition) -> None:
        voted = self._voted.get(task)
        if voted is not None:
            voted.discard(partition)
            if not voted:
                del self._voted[task]

    def forget(self, partition: TopicPartition) -> None:
        """Drop a partition's votes, as after a mute."""
        for task in self._votes.pop(partition, ()):
            self._forget_voter(task, partition)
        self._tallies.pop(partition, None)
        self._samples.pop(partition, None)

    def suspects(self, now_ms: float) -> list[TopicPartition]:
        """Partitions that fail by the votes so far."""
        if now_ms - self._expired_ms >= _EXPIRE_INTERVAL_MS:
            self._expired_ms = now_ms
            self._expire(now_ms)
        if self._rows < self._trigger_count:
            return []
        return [partition for partition in self._votes if self._exceeds(partition)]

    def _expire(self, now_ms: float) -> None:
        for partition, votes in list(self._votes.items()):
            for task in [task for task, vote in votes.items() if now_ms - vote.at_ms > _VALID_MS]:
                self._withdraw(partition, task)

    def _exceeds(self, partition: TopicPartition) -> bool:
        tally = self._tallies[partition]
        # Sums of fractions are not exact.
        share = tally.failing * 100 >= self._trigger_perc * tally.voters - _ROUNDING
        return tally.failures >= MIN_FAILURES and share

    def is_decided(self, partition: TopicPartition, tasks: Collection[int], now_ms: float) -> bool:
        """Whether all of these tasks have voted, or those that were asked, or the time to vote is over."""
        votes, sample = self._votes[partition], self._samples.get(partition)
        if sample is not None and now_ms - sample.asked_ms < _MIN_ASK_INTERVAL_MS:
            is_over = now_ms - sample.asked_ms >= _VOTING_MS
            return is_over or votes.keys() >= sample.tasks.intersection(tasks)
        return len(votes) >= len(tasks) and votes.keys() >= set(tasks)

    def begin_voting(self, partition: TopicPartition, tasks: Sequence[int], now_ms: float) -> Sequence[int]:
        """Start asking tasks about a partition, and return them: at most MAX_ASKED of those ``tasks`` that
        have not voted, in their order. None if that was done lately."""
        before = self._samples.get(partition)
        if before is not None and now_ms - before.asked_ms < _MIN_ASK_INTERVAL_MS:
            return ()
        votes = self._votes[partition]
        missing = [task for task in tasks if task not in votes]
        asked = missing[:MAX_ASKED]
        each = len(missing) / len(asked) if asked else 1.0
        self._samples[partition] = _Sample(frozenset(asked), each, now_ms)
        return asked

    def next_change_ms(self, now_ms: float) -> float | None:
        """Milliseconds until the voting on a partition is over; None if there is none."""
        # A timer may fire a little early; then the coordinator looks once more.
        waits = (one.asked_ms + _VOTING_MS - now_ms for one in self._samples.values())
        return min((max(1.0, wait) for wait in waits if wait > -_TIMER_DELAY_MS), default=None)

    def describe(self, partition: TopicPartition) -> str:
        """Why a partition is muted, for messages."""
        votes = list(self._votes[partition].values())
        failing = [vote.outcome for vote in votes if vote.fails]
        failed = sum(one.failed for one in failing)
        error = next((one.error for one in failing if one.error), "")
        return (
            f"{failed} batches of {len(failing)} of the {len(votes)} tasks that write to it failed; "
            f"last error: {error}"
        )
