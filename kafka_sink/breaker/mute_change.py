"""Mutes and unmutes as they happen, with the evidence behind them: plain values."""

from __future__ import annotations

from dataclasses import dataclass

from kafka_sink.breaker.states import Mute, Target
from kafka_sink.model import TopicPartition


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


def ongoing_mute(own: MuteChange | None, mute: Mute, now_ms: float) -> MuteChange:
    """A mute that goes on, as reported to a coordinator that does not know it yet. A broker's mute is
    reported with its silence until now. ``own``: this task's decision, None where another task decided."""
    # The outcomes to come speak for partitions that other tasks found failing.
    evidence = own.evidence if own else Evidence(counted=isinstance(mute.target, TopicPartition))
    if isinstance(mute.target, int) and (own is None or evidence.silence_ms):
        evidence = Evidence(silence_ms=evidence.silence_ms + max(1.0, now_ms - mute.since_ms))
    return MuteChange(mute.target, True, mute.reason, True, evidence)
