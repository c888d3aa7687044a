"""One mute, and the partitions that rows avoid because of all mutes of a task.

A target is a broker's id or a partition.

|           | a broker                   | a partition                       |
|-----------|----------------------------|-----------------------------------|
| muted for | silence                    | failures                          |
| by        | a task's breaker class, or the coordinator for all (``is_shared``) |
| probed by | a request without rows     | a batch that waits, else new rows |
| ended by  | any response of the broker | a batch that succeeds             |

A probe may be sent once ``retry_at_ms`` has passed. If the mute is shared, a probe needs the coordinator's
permit instead. One probe is in flight at a time. It counts as lost after mute.retry.interval, and after a
failed probe the next one follows after that time. The breaker class and the coordinator also end mutes.

Times are monotonic milliseconds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import SupportsIndex

from kafka_sink.clock import WAITED_FOR_MS
from kafka_sink.model import PartitionMetadata, Target, TopicPartition
from kafka_sink.options.values import topic_problem


def target_of(value: object) -> Target:
    """Check a target that a user's breaker class has passed, and convert numpy's numbers to int.

    Raises ValueError for anything other than a broker's id or a TopicPartition.
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
    """Why a target was muted. The coordinator weighs the evidence of all tasks.

    ``silence_ms`` is how long a broker has not responded. ``counted`` means that the mute follows from
    counted outcomes, which the coordinator also receives. Without either, there is only the class's decision.
    """

    silence_ms: float = 0.0
    counted: bool = False


NO_EVIDENCE = Evidence()


@dataclass(frozen=True, slots=True)
class MuteChange:
    """A target was muted or unmuted. ``own``: this task decided it and reports it to the coordinator."""

    target: Target
    muted: bool
    reason: str
    own: bool
    evidence: Evidence = NO_EVIDENCE


@dataclass(slots=True, eq=False)
class Mute:
    """A mute. ``probe_ends_ms`` is when the probe in flight counts as lost; infinity if there is none.

    ``own_evidence`` is why this task's breaker class muted the target; None if another task's class did. A
    permit is valid until ``permit_ends_ms``, and may allow new rows. ``probe`` is the partition whose batch
    was the last probe. ``probe_failed`` means that the coordinator has yet to be informed of a failed probe.
    ``waited_for_ms`` is when a batch was last seen to wait for the target.
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
        """Whether a probe may be sent."""
        may_go = self.permit_ends_ms > now_ms if self.is_shared else self.retry_at_ms <= now_ms
        return may_go and not self.is_probed

    def is_waited_for(self, now_ms: float) -> bool:
        """Whether a batch of this task waits for the target."""
        return now_ms - self.waited_for_ms <= WAITED_FOR_MS

    def end_probe(self, retry_at_ms: float) -> None:
        """Record that the probe in flight has failed, had no clear result, or is lost."""
        self.retry_at_ms, self.probe_ends_ms = retry_at_ms, math.inf

    def ongoing(self, now_ms: float) -> MuteChange:
        """The change to report to a coordinator that does not know the mute yet.

        For a broker it contains the silence up to now.
        """
        # If other tasks found a partition failing, the outcomes that this task counts are the evidence.
        evidence = self.own_evidence or Evidence(counted=isinstance(self.target, TopicPartition))
        if isinstance(self.target, int) and (self.own_evidence is None or evidence.silence_ms):
            evidence = Evidence(silence_ms=evidence.silence_ms + max(1.0, now_ms - self.since_ms))
        return MuteChange(self.target, True, self.reason, True, evidence)


@dataclass(frozen=True, slots=True)
class MutedPartitions:
    """The muted partitions: those that are muted themselves, and those whose current leader is muted.

    ``probes``: muted partitions that the next keyless rows probe, so that they are not avoided; since when.
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
