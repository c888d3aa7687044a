"""The tasks of a job vote on a partition, one vote each: does it fail for all of them? No I/O.

A task reports the outcomes of partitions that fail for it, and of others when the coordinator asks. A task
that cannot reach a broker, or that reports nonsense, is outvoted by the tasks that write there, however many
reports it sends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kafka_sink.breaker.outcome_windows import MIN_FAILURES
from kafka_sink.coordinator.wire.breaker_messages import OutcomeCounts
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


@dataclass(frozen=True, slots=True)
class _Vote:
    outcome: OutcomeCounts
    at_ms: float

    def fails(self, perc: int) -> bool:
        failed, written = self.outcome.failed, self.outcome.written
        return failed > 0 and failed * 100 >= perc * (failed + written)

    @property
    def is_significant(self) -> bool:
        """Whether a failing vote counts: one lost connection says nothing of a partition, a broker's error
        does."""
        return self.outcome.refused or self.outcome.failed >= MIN_FAILURES


@dataclass(slots=True)
class _Tally:
    """A partition's votes: how many say that it fails, and with how many failures (a few of each task
    count)."""

    failing: int = 0
    weight: int = 0

    def count(self, vote: _Vote | None, perc: int, sign: int) -> None:
        if vote is not None and vote.fails(perc):
            self.failing += sign
            if vote.is_significant:
                self.weight += sign * min(vote.outcome.failed, MIN_FAILURES)


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
        # When the other tasks were asked to vote.
        self._asked_ms: dict[TopicPartition, float] = {}

    @property
    def has_votes(self) -> bool:
        """Whether there is any vote."""
        return bool(self._votes)

    def add_rows(self, rows: int) -> None:
        """A task has sent ``rows`` more."""
        self._rows += rows

    def vote(self, peer: int, outcome: OutcomeCounts, now_ms: float) -> None:
        """A task's counts of the last seconds, in place of its earlier vote."""
        votes = self._votes.setdefault(outcome.partition, {})
        tally = self._tallies.setdefault(outcome.partition, _Tally())
        tally.count(votes.get(peer), self._trigger_perc, -1)
        votes[peer] = _Vote(outcome, now_ms)
        tally.count(votes[peer], self._trigger_perc, 1)

    def remove_peer(self, peer: int) -> None:
        """A task is gone."""
        for partition in list(self._votes):
            self._withdraw(partition, peer)

    def _withdraw(self, partition: TopicPartition, peer: int) -> None:
        vote = self._votes[partition].pop(peer, None)
        self._tallies[partition].count(vote, self._trigger_perc, -1)
        if not self._votes[partition]:
            self.forget(partition)

    def forget(self, partition: TopicPartition) -> None:
        """Drops a partition's votes, as after a mute."""
        self._votes.pop(partition, None)
        self._tallies.pop(partition, None)
        self._asked_ms.pop(partition, None)

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
            for peer in [peer for peer, vote in votes.items() if now_ms - vote.at_ms > _VALID_MS]:
                self._withdraw(partition, peer)

    def _exceeds(self, partition: TopicPartition) -> bool:
        tally = self._tallies[partition]
        share = tally.failing * 100 >= self._trigger_perc * len(self._votes[partition])
        return tally.weight >= MIN_FAILURES and share

    def vote_count(self, partition: TopicPartition) -> int:
        """How many tasks have voted on a partition."""
        return len(self._votes.get(partition, {}))

    def missing_voters(self, partition: TopicPartition, peers: list[int]) -> list[int]:
        """The tasks among ``peers`` that have not voted on a partition."""
        return [peer for peer in peers if peer not in self._votes.get(partition, {})]

    def begin_voting(self, partition: TopicPartition, now_ms: float) -> bool:
        """Starts asking the other tasks about a partition. False if that was done lately."""
        if now_ms - self._asked_ms.get(partition, -_MIN_ASK_INTERVAL_MS) < _MIN_ASK_INTERVAL_MS:
            return False
        self._asked_ms[partition] = now_ms
        return True

    def is_voting_over(self, partition: TopicPartition, now_ms: float) -> bool:
        """Whether the time for the tasks to vote is over."""
        return now_ms - self._asked_ms.get(partition, now_ms) >= _VOTING_MS

    def next_change_ms(self, now_ms: float) -> float | None:
        """Milliseconds until the voting on a partition is over; None if there is none."""
        # A timer may fire a little early; then the coordinator looks once more.
        waits = (at + _VOTING_MS - now_ms for at in self._asked_ms.values())
        return min((max(1.0, wait) for wait in waits if wait > -_TIMER_DELAY_MS), default=None)

    def describe(self, partition: TopicPartition) -> str:
        """Why a partition is muted, for messages."""
        votes = list(self._votes[partition].values())
        failing = [vote.outcome for vote in votes if vote.fails(self._trigger_perc)]
        failed = sum(one.failed for one in failing)
        error = next((one.error for one in failing if one.error), "")
        return (
            f"{failed} batches of {len(failing)} of the {len(votes)} tasks that write to it failed; "
            f"last error: {error}"
        )
