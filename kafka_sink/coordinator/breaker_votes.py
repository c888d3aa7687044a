"""What the tasks of a job say of a partition, one vote each: whether it fails for all. Pure.

A task tells how it fares with partitions that fail it, and where asked, with others. So a task that cannot
reach a broker, or says what is not so, is outvoted by those that write there, however much it says.
"""

from __future__ import annotations

from dataclasses import dataclass

from kafka_sink.cluster.circuit_breaker.windows import LEAST_FAILURES
from kafka_sink.coordinator.breaker_messages import Outcome
from kafka_sink.model import TopicPartition

# As long as what a task's counts span.
_VALID_MS = 10_000.0
# An answer takes a report at once from a worker that may be busy.
_HEAR_MS = 400.0
_LATE_MS = 20.0
# A partition that was found well is not asked about again sooner.
_AGAIN_MS = 2_000.0


@dataclass(frozen=True, slots=True)
class _Vote:
    outcome: Outcome
    at_ms: float

    def fails(self, perc: int) -> bool:
        failed, written = self.outcome.failed, self.outcome.written
        return failed > 0 and failed * 100 >= perc * (failed + written)

    @property
    def weighs(self) -> bool:
        """One lost connection says nothing of a partition; the broker's own word does."""
        return self.outcome.refused or self.outcome.failed >= LEAST_FAILURES


class PartitionVotes:
    """``trigger_count`` rows must have been sent by all tasks together before anything counts;
    ``trigger_perc`` of a task's batches, and of the tasks that write to a partition, must fail."""

    def __init__(self, trigger_count: int, trigger_perc: int) -> None:
        self._trigger_count = trigger_count
        self._trigger_perc = trigger_perc
        self._rows = 0
        self._votes: dict[TopicPartition, dict[int, _Vote]] = {}
        # When the other tasks were asked for theirs.
        self._asked_ms: dict[TopicPartition, float] = {}

    @property
    def is_open(self) -> bool:
        """Whether there are votes to be weighed."""
        return bool(self._votes)

    def add_rows(self, rows: int) -> None:
        """A task has sent so many more."""
        self._rows += rows

    def vote(self, peer: int, outcome: Outcome, now_ms: float) -> None:
        """A task's counts of the last seconds, in place of what it said before."""
        self._votes.setdefault(outcome.partition, {})[peer] = _Vote(outcome, now_ms)

    def leave(self, peer: int) -> None:
        """A task is gone."""
        for votes in self._votes.values():
            votes.pop(peer, None)

    def forget(self, partition: TopicPartition) -> None:
        """Starts anew, as after a mute."""
        self._votes.pop(partition, None)
        self._asked_ms.pop(partition, None)

    def suspects(self, now_ms: float) -> list[TopicPartition]:
        """Partitions that fail by what is known, be it little."""
        for partition, votes in list(self._votes.items()):
            for peer in [peer for peer, vote in votes.items() if now_ms - vote.at_ms > _VALID_MS]:
                del votes[peer]
            if not votes:
                self.forget(partition)
        if self._rows < self._trigger_count:
            return []
        return [partition for partition in self._votes if self._exceeds(partition)]

    def _exceeds(self, partition: TopicPartition) -> bool:
        votes = self._votes[partition].values()
        failing = [vote for vote in votes if vote.fails(self._trigger_perc)]
        weight = sum(min(vote.outcome.failed, LEAST_FAILURES) for vote in failing if vote.weighs)
        return weight >= LEAST_FAILURES and len(failing) * 100 >= self._trigger_perc * len(votes)

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
