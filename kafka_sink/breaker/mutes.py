"""The states of a mute (closed, open, half-open) as a transition table, and all that are not closed.

A target is a broker's id or a partition. Times are monotonic milliseconds of the table's owner.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Set
from dataclasses import dataclass
from enum import Enum
from typing import SupportsIndex

from kafka_sink.clock import HELD_MS
from kafka_sink.errors import IllegalTransitionError
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


class BreakerState(Enum):
    """CLOSED lets everything through, OPEN nothing; HALF_OPEN has one probe in flight."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class BreakerEvent(Enum):
    """What changes the state."""

    TRIP = "trip"
    PROBE = "probe"
    SUCCESS = "success"
    FAILURE = "failure"
    EXPIRE = "expire"  # the probe got no response in time, or its permit was not used
    RESET = "reset"  # unmuted by the breaker class or the coordinator


# Late responses and repeated evidence are legal and change nothing. A second probe while one is in flight is
# a bug, and so is the end of a probe that never began.
TRANSITIONS: dict[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (BreakerState.CLOSED, BreakerEvent.TRIP): BreakerState.OPEN,
    (BreakerState.CLOSED, BreakerEvent.SUCCESS): BreakerState.CLOSED,
    (BreakerState.CLOSED, BreakerEvent.FAILURE): BreakerState.CLOSED,
    (BreakerState.CLOSED, BreakerEvent.RESET): BreakerState.CLOSED,
    (BreakerState.OPEN, BreakerEvent.TRIP): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.PROBE): BreakerState.HALF_OPEN,
    (BreakerState.OPEN, BreakerEvent.SUCCESS): BreakerState.CLOSED,
    (BreakerState.OPEN, BreakerEvent.FAILURE): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.RESET): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, BreakerEvent.TRIP): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.SUCCESS): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, BreakerEvent.FAILURE): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.EXPIRE): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.RESET): BreakerState.CLOSED,
}


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
    """A target was muted or unmuted. ``own``: this task decided it and reports it to the coordinator."""

    target: Target
    muted: bool
    reason: str
    own: bool
    evidence: Evidence = NO_EVIDENCE


@dataclass(frozen=True, slots=True)
class ProbePermit:
    """The coordinator's permission for one probe within ``left_ms``. ``new_rows``: no task has a batch for
    the partition, so new rows may go to it until one is sent."""

    left_ms: float
    new_rows: bool = False


@dataclass(slots=True, eq=False)
class Mute:
    """All that is known of a target that is not closed.

    ``retry_at_ms``: when the next probe may go. ``probe_ends_ms``: when the probe in flight counts as lost.
    A task keeps more than the coordinator: ``own`` is why its own breaker class muted the target, None where
    another task did; ``is_shared``, whether the coordinator has muted it for all, so that a probe needs a
    permit, which lasts until ``permit_ends_ms`` and may be for new rows; ``probe``, the partition whose batch
    is the probe, whose response may come late; ``probe_failed``, whether the coordinator is to hear that one
    failed; ``led``, a broker's partitions, as of when a leader was last known; ``held_ms``, when a batch was
    last seen to wait for it.
    """

    target: Target
    reason: str
    since_ms: float
    retry_at_ms: float
    state: BreakerState = BreakerState.OPEN
    probe_ends_ms: float = math.inf
    last_error: str = ""
    own: Evidence | None = None
    is_shared: bool = False
    permit_ends_ms: float = -math.inf
    permits_new_rows: bool = False
    probe_failed: bool = False
    probe: TopicPartition | None = None
    led: Set[TopicPartition] = frozenset()
    held_ms: float = -math.inf

    def is_due(self, now_ms: float) -> bool:
        """Whether a probe may go."""
        from_permit = self.permit_ends_ms > now_ms
        return self.state is BreakerState.OPEN and (
            from_permit if self.is_shared else self.retry_at_ms <= now_ms
        )

    def is_held(self, now_ms: float) -> bool:
        """Whether a batch of this task waits for the target."""
        return now_ms - self.held_ms <= HELD_MS

    def ongoing(self, now_ms: float) -> MuteChange:
        """As it is reported to a coordinator that does not know it yet: a broker's with its silence until
        now."""
        # The outcomes to come speak for partitions that other tasks found failing.
        evidence = self.own or Evidence(counted=isinstance(self.target, TopicPartition))
        if isinstance(self.target, int) and (self.own is None or evidence.silence_ms):
            evidence = Evidence(silence_ms=evidence.silence_ms + max(1.0, now_ms - self.since_ms))
        return MuteChange(self.target, True, self.reason, True, evidence)


@dataclass(frozen=True, slots=True)
class MutedPartitions:
    """Contains a partition if it is muted by itself or if its present leader is muted."""

    nodes: Set[int] = frozenset()
    partitions: Set[TopicPartition] = frozenset()
    leader: Callable[[TopicPartition], PartitionMetadata | None] = lambda _: None

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


class MuteTable:
    """The targets that are muted: the coordinator's for all tasks, and of each task (``TaskMutes``).

    ``retry_interval_ms`` is mute.retry.interval. A probe without a response counts as lost after the same
    time, so each interval has one probe at most.
    """

    def __init__(self, retry_interval_ms: float) -> None:
        self.retry_interval_ms = retry_interval_ms
        self.mutes: dict[Target, Mute] = {}
        # Rises whenever a target enters or leaves.
        self.version = 0
        self.probes = 0

    def trip(self, target: Target, reason: str, now_ms: float) -> bool:
        """Mute a target. False if it was muted already."""
        found = self.mutes.get(target)
        if found is not None:
            found.state = _next(found.state, BreakerEvent.TRIP)
            return False
        self.mutes[target] = Mute(target, reason, now_ms, now_ms + self.retry_interval_ms)
        self.version += 1
        return True

    def probe(self, target: Target, now_ms: float) -> None:
        """A probe goes out, or is permitted. Raises IllegalTransitionError while another is in flight."""
        found = self.mutes.get(target)
        state = _next(BreakerState.CLOSED if found is None else found.state, BreakerEvent.PROBE)
        if found is not None:
            found.state = state
            found.probe_ends_ms = now_ms + self.retry_interval_ms
            self.probes += 1

    def succeed(self, target: Target) -> bool:
        """A probe, or a batch sent before the mute, succeeded. True if that ended a mute."""
        return self._close(target, BreakerEvent.SUCCESS)

    def reset(self, target: Target) -> bool:
        return self._close(target, BreakerEvent.RESET)

    def _close(self, target: Target, event: BreakerEvent) -> bool:
        found = self.mutes.get(target)
        if found is None:
            return False
        found.state = _next(found.state, event)
        del self.mutes[target]
        self.version += 1
        return True

    def fail(self, target: Target, error: str, now_ms: float) -> None:
        found = self.mutes.get(target)
        if found is not None:
            probed = found.state is BreakerState.HALF_OPEN
            found.state = _next(found.state, BreakerEvent.FAILURE)
            found.last_error = error or found.last_error
            if probed:
                self._schedule_retry(found, now_ms + self.retry_interval_ms)

    def expire(self, target: Target, now_ms: float) -> None:
        """The probe in flight counts as lost, or its permit was not used. Another probe may go at once.

        Raises IllegalTransitionError if no probe is in flight.
        """
        found = self.mutes.get(target)
        state = _next(BreakerState.CLOSED if found is None else found.state, BreakerEvent.EXPIRE)
        if found is not None:
            found.state = state
            self._schedule_retry(found, now_ms)

    def expire_late(self, now_ms: float) -> None:
        for found in self.mutes.values():
            if found.state is BreakerState.HALF_OPEN and found.probe_ends_ms <= now_ms:
                found.state = _next(found.state, BreakerEvent.EXPIRE)
                self._schedule_retry(found, now_ms)

    @staticmethod
    def _schedule_retry(found: Mute, retry_at_ms: float) -> None:
        found.retry_at_ms = retry_at_ms
        found.probe_ends_ms = math.inf

    def next_change_ms(self, now_ms: float) -> float:
        """Milliseconds until another probe may go or one is lost; infinite if time alone changes nothing."""
        times = (
            mute.retry_at_ms if mute.state is BreakerState.OPEN else mute.probe_ends_ms
            for mute in self.mutes.values()
        )
        return min((at for at in times if at > now_ms), default=math.inf) - now_ms


def _next(state: BreakerState, event: BreakerEvent) -> BreakerState:
    found = TRANSITIONS.get((state, event))
    if found is None:
        raise IllegalTransitionError(f"a mute that is {state.value} does not allow the event {event.value}")
    return found
