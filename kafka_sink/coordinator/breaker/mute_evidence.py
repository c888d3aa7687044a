"""What the tasks' responses say for and against a mute that one task reported. No I/O.

A task whose own network is bad finds every broker silent. So a mute on one task's word is doubted where other
tasks get responses, and refuted by a later response to another task.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kafka_sink.breaker.states import Mute, Target
from kafka_sink.coordinator.breaker.messages import MuteReport
from kafka_sink.model import TopicPartition
from kafka_sink.timing_bounds import HEALTHY_VALID_MS

# If a mute is refuted within a second, the task that caused it had a bad network. Its reports are doubted
# for a minute.
_REFUTED_SOON_MS = 1_000.0
_DOUBT_MS = 60_000.0
# When one task mutes a broker without evidence, another is asked, and has this long to report a response.
ASK_MS = 1_000.0


@dataclass(frozen=True, slots=True)
class _MuteOrigin:
    """The task whose report muted a target. A response to another task after ``refuted_after_ms`` refutes
    it."""

    peer: int
    refuted_after_ms: float


@dataclass(frozen=True, slots=True)
class Claim:
    """A task wants a broker muted without evidence. It is muted at ``until_ms`` unless another gets a
    response."""

    peer: int
    reason: str
    until_ms: float


class MuteEvidence:
    """Responses by task, the origins of mutes, the claims, and the tasks that are doubted."""

    def __init__(self) -> None:
        # By broker: when each task last had a response.
        self._responses: dict[int, dict[int, float]] = {}
        # The mutes that follow from one task's report.
        self._origins: dict[Target, _MuteOrigin] = {}
        # By task and target: when a mute on the task's report was refuted.
        self._doubted_ms: dict[tuple[int, Target], float] = {}
        # By target, the tasks that muted it or had a lease. They know at first hand when the mute is over.
        self._witnesses: dict[Target, set[int]] = {}
        self._claims: dict[int, Claim] = {}

    def add_response(self, peer: int, node: int, at_ms: float, mute: Mute | None, now_ms: float) -> bool:
        """A task had a response of a broker at ``at_ms``. True if that refutes the broker's mute."""
        responses = self._responses.setdefault(node, {})
        responses[peer] = max(responses.get(peer, -math.inf), at_ms)
        claim = self._claims.get(node)
        if claim is not None and claim.peer != peer and at_ms > claim.until_ms - ASK_MS:
            del self._claims[node]
            self._doubted_ms[claim.peer, node] = now_ms
        origin = self._origins.get(node)
        if mute is None or origin is None or at_ms <= origin.refuted_after_ms:
            return False
        if peer != origin.peer and at_ms < mute.since_ms + _REFUTED_SOON_MS:
            self._doubted_ms[origin.peer, node] = now_ms
        return True

    def is_doubted(self, peer: int, target: Target, now_ms: float) -> bool:
        """Whether a task's last mute of this target was refuted, less than a minute ago."""
        return now_ms - self._doubted_ms.get((peer, target), -math.inf) < _DOUBT_MS

    def contradicts(self, peer: int, node: int, silence_ms: float, now_ms: float, *, doubtful: bool) -> bool:
        """Whether other tasks had responses in the second half of a broker's silence to one task.

        ``doubtful``: a response of the last seconds contradicts too.
        """
        seconds_ms = max(HEALTHY_VALID_MS, silence_ms / 2) if doubtful else silence_ms / 2
        responses = self._responses.get(node, {})
        return any(at > now_ms - seconds_ms for other, at in responses.items() if other != peer)

    # -- mutes, from their beginning to their end -----------------------------------------------------

    def begin(self, target: Target, finder: int | None) -> None:
        """A target is muted, on the report of ``finder`` or, with None, by the votes of all tasks."""
        self._witnesses[target] = set() if finder is None else {finder}

    def may_be_refuted(self, peer: int, target: Target, now_ms: float, silence_ms: float = 0.0) -> None:
        """The mute of a target follows from one task's report: a response to another refutes it."""
        # Messages take time, and a response before the silence must not look like one within it.
        self._origins[target] = _MuteOrigin(peer, now_ms - min(silence_ms, _REFUTED_SOON_MS) / 4)

    def add_witness(self, peer: int, target: Target) -> None:
        """A task has a lease for a muted target."""
        self._witnesses.setdefault(target, set()).add(peer)

    def is_witness(self, peer: int, target: Target) -> bool:
        """Whether a task knows at first hand when the mute of a target is over."""
        return peer in self._witnesses.get(target, ())

    def on_unmuted_by(self, peer: int, target: Target, mute: Mute, now_ms: float, soon_ms: float) -> None:
        """A witness says that a mute is over. If it was a partition's, and began less than ``soon_ms`` ago,
        that raises doubts about the task that muted it."""
        origin = self._origins.get(target)
        soon = now_ms - mute.since_ms < soon_ms
        if isinstance(target, TopicPartition) and origin is not None and origin.peer != peer and soon:
            self._doubted_ms[origin.peer, target] = now_ms

    def end(self, target: Target) -> None:
        """A target is muted no more."""
        self._origins.pop(target, None)
        self._witnesses.pop(target, None)

    def remove_task(self, peer: int) -> None:
        """A task has disconnected."""
        for one in [one for one in self._doubted_ms if one[0] == peer]:
            del self._doubted_ms[one]
        for responses in self._responses.values():
            responses.pop(peer, None)
        for witnesses in self._witnesses.values():
            witnesses.discard(peer)

    # -- claims ---------------------------------------------------------------------------------------

    def claim(self, peer: int, node: int, mute: MuteReport, now_ms: float) -> None:
        """A task wants a broker muted, and another task is being asked."""
        self._claims.setdefault(node, Claim(peer, mute.reason, now_ms + ASK_MS))

    def withdraw_claim(self, target: Target) -> None:
        """A task says that a target is fine."""
        if isinstance(target, int):
            self._claims.pop(target, None)

    def take_due_claims(self, now_ms: float) -> dict[int, Claim]:
        """By broker, the claims that no response has contradicted in time. They are claims no longer."""
        due = {node: claim for node, claim in self._claims.items() if claim.until_ms <= now_ms}
        for node in due:
            del self._claims[node]
        return due

    def next_claim_ms(self, now_ms: float) -> float:
        """Milliseconds until a claim is due; infinite without claims."""
        return min((claim.until_ms - now_ms for claim in self._claims.values()), default=math.inf)
