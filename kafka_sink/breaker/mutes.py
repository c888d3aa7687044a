"""What is muted, by whom, until when, and what ends it: one mute, and what rows avoid by all of a task's.

A target is a broker's id or a partition.

|           | a broker                   | a partition                       |
|-----------|----------------------------|-----------------------------------|
| muted for | silence                    | failures                          |
| by        | a task's breaker class, or the coordinator for all (``is_shared``) |
| probed by | a request without rows     | a batch that waits, else new rows |
| ended by  | any response of the broker | a batch that is taken             |

A probe may go once ``retry_at_ms`` has passed; where the mute is shared, with the coordinator's permit alone.
One is in flight at a time. After mute.retry.interval it counts as lost, and one that failed is followed by
the next after that time. The class may end a mute, too, and the coordinator one that is shared.

Times are monotonic milliseconds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import SupportsIndex

from kafka_sink.clock import WAITED_FOR_MS
from kafka_sink.model import PartitionMetadata, TopicPartition
from kafka_sink.options.values import topic_problem

Target = int | TopicPartition


def target_of(value: object) -> Target:
    """A target given by a user's breaker class, with numpy's numbers made plain.

    Raises ValueError for anything but a broker's id or a TopicPartition.
    """
    if isinstance(value, TopicPartition):
        topic, number = value.topic, _id_of(value.partition)
        if isinstance(topic, str) and topic_problem(topic) is None and number is not None:
            return TopicPartition(topic, number)
    elif (number := _id_of(value)) is not None:
        return number
    raise ValueError(f"{value!r} cannot be muted: it must be a broker's id or a TopicPartition")


def _id_of(value: object) -> int | None:
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, SupportsIndex)):
        return None
    number = operator.index(value)
    return number if 0 <= number < 1 << 31 else None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why a target was muted, for the coordinator, which weighs the evidence of all tasks.

    ``silence_ms``: for how long a broker has not responded. ``counted``: the mute follows from counted
    outcomes, which the coordinator receives anyway. Without either, only the breaker class speaks for the
    mute.
    """

    silence_ms: float = 0.0
    counted: bool = False


NO_EVIDENCE = Evidence()


@dataclass(frozen=True, slots=True)
class MuteChange:
    """A target was muted or unmuted. ``own``: this task decided that and reports it to the coordinator."""

    target: Target
    muted: bool
    reason: str
    own: bool
    evidence: Evidence = NO_EVIDENCE


@dataclass(slots=True, eq=False)
class Mute:
    """``probe_ends_ms``: when the probe in flight counts as lost.

    A task keeps more than the coordinator: ``own_evidence`` is why its own breaker class muted the target,
    None where another task's did; a permit lasts until ``permit_ends_ms`` and may be for new rows; ``probe``
    is the partition whose batch was the last probe; ``probe_failed``, whether the coordinator is to hear that
    one failed; ``waited_for_ms``, when a batch was last seen to wait for it.
    """

    target: Target
    reason: str
    since_ms: float
    retry_at_ms: float
    probe_ends_ms: float = math.inf
    last_error: str = ""
    own_evidence: Evidence | None = None
    is_shared: bool = False
    permit_ends_ms: float = -math.inf
    permits_new_rows: bool = False
    probe_failed: bool = False
    probe: TopicPartition | None = None
    waited_for_ms: float = -math.inf

    @property
    def is_probed(self) -> bool:
        return self.probe_ends_ms < math.inf

    def is_due(self, now_ms: float) -> bool:
        """Whether a probe may go."""
        may_go = self.permit_ends_ms > now_ms if self.is_shared else self.retry_at_ms <= now_ms
        return may_go and not self.is_probed

    def is_waited_for(self, now_ms: float) -> bool:
        """Whether a batch of this task waits for the target."""
        return now_ms - self.waited_for_ms <= WAITED_FOR_MS

    def end_probe(self, retry_at_ms: float) -> None:
        """The probe in flight has failed, says nothing, or is lost."""
        self.retry_at_ms, self.probe_ends_ms = retry_at_ms, math.inf

    def ongoing(self, now_ms: float) -> MuteChange:
        """The mute as it is reported to a coordinator that does not know it yet: a broker's with its silence
        until now."""
        # The outcomes to come speak for partitions that other tasks found failing.
        evidence = self.own_evidence or Evidence(counted=isinstance(self.target, TopicPartition))
        if isinstance(self.target, int) and (self.own_evidence is None or evidence.silence_ms):
            evidence = Evidence(silence_ms=evidence.silence_ms + max(1.0, now_ms - self.since_ms))
        return MuteChange(self.target, True, self.reason, True, evidence)


@dataclass(frozen=True, slots=True)
class MutedPartitions:
    """Contains a partition if it is muted by itself or if its present leader is muted.

    ``probes``: muted partitions that are not contained, as the next keyless rows are their probe, and since
    when.
    """

    nodes: Set[int] = frozenset()
    partitions: Set[TopicPartition] = frozenset()
    leader: Callable[[TopicPartition], PartitionMetadata | None] = lambda _: None
    probes: Mapping[TopicPartition, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.nodes or self.partitions)

    def __contains__(self, partition: object) -> bool:
        if partition in self.partitions:
            return True
        if not self.nodes or not isinstance(partition, TopicPartition):
            return False
        info = self.leader(partition)
        return info is not None and info.leader in self.nodes


NOTHING_MUTED = MutedPartitions()
