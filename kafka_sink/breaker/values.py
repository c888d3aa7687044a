"""What is said of mutes between manager, sender, partitioner and coordinator: plain values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kafka_sink.breaker.states import Mute, Target
from kafka_sink.model import PartitionInfo, TopicPartition


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a mute rests on, for whoever weighs the evidence of all tasks. Without any, on the class's word.

    ``silence_ms``: a broker has not answered for so long. ``counted``: outcomes were counted, of which the
    coordinator is told anyway.
    """

    silence_ms: float = 0.0
    counted: bool = False


NO_EVIDENCE = Evidence()


@dataclass(frozen=True, slots=True)
class MuteChange:
    """Something was muted, or unmuted. ``own``: decided here, so that the coordinator is to hear of it."""

    target: Target
    muted: bool
    reason: str
    own: bool
    evidence: Evidence = NO_EVIDENCE


def ongoing_mute(own: MuteChange | None, mute: Mute, now_ms: float) -> MuteChange:
    """A mute that goes on, as a coordinator that knows nothing of it is to be told: a broker's by its silence
    until now. ``own``: what was decided here, None where the mute is another task's."""
    # Of partitions that others found failing the outcomes to come will tell.
    evidence = own.evidence if own else Evidence(counted=isinstance(mute.target, TopicPartition))
    if isinstance(mute.target, int) and (own is None or evidence.silence_ms):
        evidence = Evidence(silence_ms=evidence.silence_ms + max(1.0, now_ms - mute.since_ms))
    return MuteChange(mute.target, True, mute.reason, True, evidence)


@dataclass(frozen=True, slots=True)
class ProbeLease:
    """One probe, granted by the coordinator for ``left_ms``. ``trial``: no task holds a batch for the
    partition, so new rows may go to it until one is sent."""

    left_ms: float
    trial: bool = False


@dataclass(frozen=True, slots=True)
class BreakerMetrics:
    """``muted-partitions``, ``breaker-trips-total`` and ``breaker-probes-total`` of one producer."""

    muted_partitions: int = 0
    breaker_trips_total: int = 0
    probes: int = 0

    def since(self, before: BreakerMetrics) -> BreakerMetrics:
        """Totals counted from then on."""
        trips = self.breaker_trips_total - before.breaker_trips_total
        return BreakerMetrics(self.muted_partitions, trips, self.probes - before.probes)

    def by_name(self) -> dict[str, float]:
        """As docs/metrics.md names them."""
        return {
            "muted-partitions": self.muted_partitions,
            "breaker-trips-total": self.breaker_trips_total,
            "breaker-probes-total": self.probes,
        }


class MutedView:
    """An immutable view of what rests, for any thread: a broker's partitions follow their leader."""

    __slots__ = ("_leader", "nodes", "partitions")

    def __init__(
        self,
        nodes: frozenset[int] = frozenset(),
        partitions: frozenset[TopicPartition] = frozenset(),
        leader: Callable[[TopicPartition], PartitionInfo | None] = lambda _: None,
    ) -> None:
        self.nodes = nodes
        self.partitions = partitions
        self._leader = leader

    def __bool__(self) -> bool:
        return bool(self.nodes or self.partitions)

    def __contains__(self, partition: object) -> bool:
        if partition in self.partitions:
            return True
        if not self.nodes or not isinstance(partition, TopicPartition):
            return False
        info = self._leader(partition)
        return info is not None and info.leader in self.nodes


NOTHING_MUTED = MutedView()
