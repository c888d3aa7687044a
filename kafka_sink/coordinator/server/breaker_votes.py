"""What the tasks of a job say of a partition, one vote each: whether it fails for all. Pure.

A task tells how it fares with partitions that fail it, and where asked, with others. So a task that cannot
reach a broker, or says what is not so, is outvoted by those that write there, however much it says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kafka_sink.breaker.outcome_windows import LEAST_FAILURES
from kafka_sink.coordinator.wire.breaker_messages import OutcomeCounts
from kafka_sink.model import TopicPartition

# As long as what a task's counts span.
_VALID_MS = 10_000.0
# An answer takes a report at once from a worker that may be busy.
_HEAR_MS = 400.0
_LATE_MS = 20.0
# A partition that was found well is not asked about again sooner.
_AGAIN_MS = 2_000.0
# How often old votes are looked for.
_EXPIRE_MS = 1_000.0


@dataclass(frozen=True, slots=True)
class _Vote:
    outcome: OutcomeCounts
    at_ms: float

    def fails(self, perc: int) -> bool:
        failed, written = self.outcome.failed, self.outcome.written
        return failed > 0 and failed * 100 >= perc * (failed + written)

    @property
    def weighs(self) -> bool:
        """One lost connection says nothing of a partition; the broker's own word does."""
        return self.outcome.refused or self.outcome.failed >= LEAST_FAILURES


@dataclass(slots=True)
class _Tally:
    """Of a partition's votes: how many say that it fails, and how much that weighs."""

    failing: int = 0
    weight: int = 0

    def count(self, vote: _Vote | None, perc: int, sign: int) -> None:
        if vote is not None and vote.fails(perc):
            self.failing += sign
            if vote.weighs:
                self.weight += sign * min(vote.outcome.failed, LEAST_FAILURES)


class PartitionVotes:
    """``trigger_count`` rows must have been sent by all tasks together before anything counts;
    ``trigger_perc`` of a task's batches, and of the tasks that write to a partition, must fail."""

    def __init__(self, trigger_count: int, trigger_perc: int) -> None:
        self._trigger_count = trigger_count
        self._trigger_perc = trigger_perc
        self._rows = 0
        self._votes: dict[TopicPartition, dict[int, _Vote]] = {}
        self._tallies: dict[TopicPartition, _Tally] = {}
        self._expired_ms = -math.inf
        # When the other tasks were asked for theirs.
        self._asked_ms: dict[TopicPartition, float] = {}

    @property
    def is_open(self) -> bool:
        """Whether there are votes to be weighed."""
        return bool(self._votes)

    def add_rows(self, rows: int) -> None:
        """A task has sent so many more."""
        self._rows += rows

    def vote(self, peer: int, outcome: OutcomeCounts, now_ms: float) -> None:
        """A task's counts of the last seconds, in place of what it said before."""
        votes = self._votes.setdefault(outcome.partition, {})
        tally = self._tallies.setdefault(outcome.partition, _Tally())
        tally.count(votes.get(peer), self._trigger_perc, -1)
        votes[peer] = _Vote(outcome, now_ms)
        tally.count(votes[peer], self._trigger_perc, 1)

    def leave(self, peer: int) -> None:
        """A task is gone."""
        for partition in list(self._votes):
            self._withdraw(partition, peer)

    def _withdraw(self, partition: TopicPartition, peer: int) -> None:
        vote = self._votes[partition].pop(peer, None)
        self._tallies[partition].count(vote, self._trigger_perc, -1)
        if not self._votes[partition]:
            self.forget(partition)

    def forget(self, partition: TopicPartition) -> None:
        """Starts anew, as after a mute."""
        self._votes.pop(partition, None)
        self._tallies.pop(partition, None)
        self._asked_ms.pop(partition, None)

    def suspects(self, now_ms: float) -> list[TopicPartition]:
        """Partitions that fail by what is known, be it little."""
        if now_ms - self._expired_ms >= _EXPIRE_MS:
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
        return tally.weight >= LEAST_FAILURES and share

    def heard(self, partition: TopicPartition) -> int:
        """How many tasks have said how they fare."""
        return len(self._votes.get(partition, {}))

    def unheard(self, partition: TopicPartition, peers: list[int]) -> list[int]:
        """Of these tasks the ones that have not said how they fare."""
        return [peer for peer in peers if peer not in self._votes.get(partition, {})]

    def ask(self, partition: TopicPartition, now_ms: float) -> bool:
        """Whether the others are to be asked now."""
        if now_ms - self._asked_ms.get(partition, -_AGAIN_MS) < _AGAIN_MS:
            return False
        self._asked_ms[partition] = now_ms
        return True

    def is_heard(self, partition: TopicPartition, now_ms: float) -> bool:
        """Whether those who were asked have had their time."""
        return now_ms - self._asked_ms.get(partition, now_ms) >= _HEAR_MS

    def next_change_ms(self, now_ms: float) -> float | None:
        """Milliseconds until the next partition is heard."""
        # Timers may be early by a little; then once more.
        waits = (at + _HEAR_MS - now_ms for at in self._asked_ms.values())
        return min((max(1.0, wait) for wait in waits if wait > -_LATE_MS), default=None)

    def describe(self, partition: TopicPartition) -> str:
        """For messages."""
        votes = list(self._votes[partition].values())
        failing = [vote.outcome for vote in votes if vote.fails(self._trigger_perc)]
        failed = sum(one.failed for one in failing)
        error = next((one.error for one in failing if one.error), "")
        return (
            f"{failed} batches of {len(failing)} of the {len(votes)} tasks that write to it failed; "
            f"last error: {error}"
        )
