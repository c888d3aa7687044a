"""Closed, open, half-open: what a mute goes through, as a table, for one target or a book of them.

A target is a broker's id or a partition. Times are monotonic milliseconds of whoever keeps the book.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from enum import Enum
from typing import SupportsIndex

from kafka_sink.model import TopicPartition
from kafka_sink.options.values import TOPIC_MAX_LENGTH

Target = int | TopicPartition


def target_of(value: object) -> Target:
    """What a class of the user's wants to mute, numbers of numpy made plain. Raises ValueError for what is
    neither a broker's id nor a TopicPartition."""
    if isinstance(value, TopicPartition):
        topic, number = value.topic, _id_of(value.partition)
        if isinstance(topic, str) and len(topic) <= TOPIC_MAX_LENGTH and number is not None:
            return TopicPartition(topic, number)
    elif (number := _id_of(value)) is not None:
        return number
    raise ValueError(f"{value!r} cannot be muted: a broker's id or a TopicPartition is wanted")


def _id_of(value: object) -> int | None:
    if type(value) is not int and (isinstance(value, bool) or not isinstance(value, SupportsIndex)):
        return None
    number = operator.index(value)
    return number if number >= 0 else None


class BreakerState(Enum):
    """CLOSED lets all through, OPEN nothing, HALF_OPEN has one probe under way."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class BreakerEvent(Enum):
    """What moves a breaker."""

    TRIP = "trip"
    PROBE = "probe"
    SUCCESS = "success"
    FAILURE = "failure"
    EXPIRE = "expire"  # the probe got no answer in its time, or was not used
    RESET = "reset"  # told to unmute


class IllegalBreakerMoveError(RuntimeError):
    """A move that the table does not have: a bug. Nothing was changed."""


# Late answers and repeated evidence are legal and leave things as they are. A second probe beside one that is
# under way, and the end of one that never began, are bugs.
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


@dataclass(slots=True)
class Mute:
    """One target that is not closed. ``retry_at_ms`` is when the next probe may go, ``lease_ends_ms`` when
    the present one counts as lost."""

    target: Target
    reason: str
    since_ms: float
    retry_at_ms: float
    state: BreakerState = BreakerState.OPEN
    lease_ends_ms: float = math.inf
    last_error: str = ""


class MuteTable:
    """The breakers that are not closed. A task keeps one, and the coordinator one for all tasks.

    ``retry_interval_ms`` is mute.retry.interval; a probe without an answer counts as lost after as long, so
    there is never more than one per interval.
    """

    def __init__(self, retry_interval_ms: float) -> None:
        self.retry_interval_ms = retry_interval_ms
        self.mutes: dict[Target, Mute] = {}
        # Rises whenever a target enters or leaves.
        self.version = 0
        self.trips = 0
        self.probes = 0

    def trip(self, target: Target, reason: str, now_ms: float) -> bool:
        """Mutes a target; False where it was muted before."""
        found = self.mutes.get(target)
        if found is not None:
            found.state = _next(found.state, BreakerEvent.TRIP)
            return False
        self.mutes[target] = Mute(target, reason, now_ms, now_ms + self.retry_interval_ms)
        self.version += 1
        self.trips += 1
        return True

    def probe(self, target: Target, now_ms: float) -> None:
        """A probe goes out, or its lease begins. Raises IllegalBreakerMoveError beside another one."""
        found = self.mutes.get(target)
        state = _next(BreakerState.CLOSED if found is None else found.state, BreakerEvent.PROBE)
        if found is not None:
            found.state = state
            found.lease_ends_ms = now_ms + self.retry_interval_ms
            self.probes += 1

    def succeed(self, target: Target) -> bool:
        """A probe, or a batch sent before the mute, got through; True where that ended a mute."""
        return self._close(target, BreakerEvent.SUCCESS)

    def reset(self, target: Target) -> bool:
        """Unmutes; True where the target was muted."""
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
        """A probe failed; the next may go after the interval."""
        found = self.mutes.get(target)
        if found is not None:
            probed = found.state is BreakerState.HALF_OPEN
            found.state = _next(found.state, BreakerEvent.FAILURE)
            found.last_error = error or found.last_error
            if probed:
                self._rest(found, now_ms + self.retry_interval_ms)

    def expire(self, target: Target, now_ms: float) -> None:
        """The probe under way counts as lost, or the lease was given back unused: another may go at once.

        Raises IllegalBreakerMoveError where no probe is under way.
        """
        found = self.mutes.get(target)
        state = _next(BreakerState.CLOSED if found is None else found.state, BreakerEvent.EXPIRE)
        if found is not None:
            found.state = state
            self._rest(found, now_ms)

    def expire_late(self, now_ms: float) -> None:
        """Ends the probes whose time is over."""
        for found in self.mutes.values():
            if found.state is BreakerState.HALF_OPEN and found.lease_ends_ms <= now_ms:
                found.state = _next(found.state, BreakerEvent.EXPIRE)
                self._rest(found, now_ms)

    @staticmethod
    def _rest(found: Mute, retry_at_ms: float) -> None:
        found.retry_at_ms = retry_at_ms
        found.lease_ends_ms = math.inf

    def is_due(self, target: Target, now_ms: float) -> bool:
        """Whether a probe may go."""
        found = self.mutes.get(target)
        return found is not None and found.state is BreakerState.OPEN and found.retry_at_ms <= now_ms

    def next_change_ms(self, now_ms: float) -> float:
        """Milliseconds until one more probe may go or one is lost; infinite where time changes nothing."""
        times = (
            mute.retry_at_ms if mute.state is BreakerState.OPEN else mute.lease_ends_ms
            for mute in self.mutes.values()
        )
        return min((at for at in times if at > now_ms), default=math.inf) - now_ms


def _next(state: BreakerState, event: BreakerEvent) -> BreakerState:
    found = TRANSITIONS.get((state, event))
    if found is None:
        raise IllegalBreakerMoveError(f"a breaker that is {state.value} cannot take a {event.value}")
    return found
