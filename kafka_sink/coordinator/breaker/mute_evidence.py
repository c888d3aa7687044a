"""What the tasks' responses say for and against a mute that one task reported. No I/O.

A task whose own network is bad finds every broker silent. So a mute on one task's word is doubted where other
tasks get responses, and refuted by a later response to another task.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from kafka_sink.breaker.states import Mute, Target
from kafka_sink.coordinator.breaker.messages import MAX_NODES, MAX_TARGETS, MuteReport
from kafka_sink.model import TopicPartition
from kafka_sink.timing_bounds import HEALTHY_VALID_MS

# If a mute is refuted within a second, the task that caused it had a bad network. Its reports are doubted
# for a minute.
_REFUTED_SOON_MS = 1_000.0
_DOUBT_MS = 60_000.0
# When one task mutes a broker without evidence, another is asked, and has this long to report a response.
ASK_MS = 1_000.0


class Voice(NamedTuple):
    """Who speaks: a task behind a relay by its number there; 0: a task by itself, or the one that a relay
    gave a lease to."""

    group: int
    task: int = 0


_NOBODY = Voice(-1)


@dataclass(frozen=True, slots=True)
class _MuteOrigin:
    """The task whose report muted a target. A response to another task after ``refuted_after_ms`` refutes
    it."""

    voice: Voice
    refuted_after_ms: float


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A task wants a broker muted without evidence. It is muted at ``until_ms`` unless another gets a
    response after ``since_ms``."""

    voice: Voice
    reason: str
    since_ms: float
    until_ms: float


class _Responses:
    """When tasks last had responses of one broker. What all tasks but one had is known without a walk over
    them.

    A response counts also after its task has left: the broker did respond then.
    """

    __slots__ = ("_last", "_others")

    def __init__(self) -> None:
        # The last response to any task and that task; the last one to any other task.
        self._last: tuple[float, Voice] = (-math.inf, _NOBODY)
        self._others = -math.inf

    def add(self, voice: Voice, at_ms: float) -> None:
        last_ms, last_voice = self._last
        if voice == last_voice:
            self._last = max(last_ms, at_ms), voice
        elif at_ms > last_ms:
            self._last, self._others = (at_ms, voice), last_ms
        else:
            self._others = max(self._others, at_ms)

    def last_ms(self, *, other_than: Voice) -> float:
        last_ms, last_voice = self._last
        return self._others if last_voice == other_than else last_ms


class MuteEvidence:
    """Responses of brokers, the origins of mutes, the suspicions, and the tasks that are doubted.

    A report costs the same however many tasks there are: thousands mute a frozen broker within a second.
    """

    def __init__(self) -> None:
        self._responses: dict[int, _Responses] = {}
        # The mutes that follow from one task's report.
        self._origins: dict[Target, _MuteOrigin] = {}
        # By group, its tasks' mutes that were refuted, and when.
        self._doubted_ms: dict[int, dict[tuple[int, Target], float]] = {}
        # By target, the tasks that muted it or had a lease. They know at first hand when the mute is over.
        self._witnesses: dict[Target, set[Voice]] = {}
        # By group, the targets of which some task is a witness.
        self._witnessed: dict[int, set[Target]] = {}
        self._suspicions: dict[int, Suspicion] = {}

    def add_response(self, voice: Voice, node: int, at_ms: float, mute: Mute | None, now_ms: float) -> bool:
        """A task had a response of a broker at ``at_ms``. True if that refutes the broker's mute."""
        if node not in self._responses:
            self._responses[node] = _Responses()
            if len(self._responses) > MAX_NODES:
                # One that responds is soon known again.
                del self._responses[next(iter(self._responses))]
        self._responses[node].add(voice, at_ms)
        suspicion = self._suspicions.get(node)
        if suspicion is not None and suspicion.voice != voice and at_ms > suspicion.since_ms:
            del self._suspicions[node]
            self._doubt(suspicion.voice, node, now_ms)
        origin = self._origins.get(node)
        if mute is None or origin is None or at_ms <= origin.refuted_after_ms:
            return False
        if voice != origin.voice and at_ms < mute.since_ms + _REFUTED_SOON_MS:
            self._doubt(origin.voice, node, now_ms)
        return True

    def is_doubted(self, voice: Voice, target: Target, now_ms: float) -> bool:
        """Whether a task's last mute of this target was refuted, less than a minute ago."""
        refuted_ms = self._doubted_ms.get(voice.group, {}).get((voice.task, target), -math.inf)
        return now_ms - refuted_ms < _DOUBT_MS

    def _doubt(self, voice: Voice, target: Target, now_ms: float) -> None:
        doubted = self._doubted_ms.setdefault(voice.group, {})
        # Tasks come and go behind a relay.
        for old in [one for one, at_ms in doubted.items() if now_ms - at_ms >= _DOUBT_MS]:
            del doubted[old]
        if len(doubted) < MAX_TARGETS:
            doubted[voice.task, target] = now_ms

    def contradicts(
        self, voice: Voice, node: int, silence_ms: float, now_ms: float, *, doubtful: bool
    ) -> bool:
        """Whether other tasks had responses in the second half of a broker's silence to one task.

        ``doubtful``: a response of the last seconds contradicts too.
        """
        valid_ms = max(HEALTHY_VALID_MS, silence_ms / 2) if doubtful else silence_ms / 2
        responses = self._responses.get(node)
        return responses is not None and responses.last_ms(other_than=voice) > now_ms - valid_ms

    # -- mutes, from their beginning to their end -----------------------------------------------------

    def begin(self, target: Target, finder: Voice | None) -> None:
        """A target is muted, on the report of ``finder`` or, with None, by the votes of all tasks."""
        self._forget_witnesses(target)
        if finder is not None:
            self.add_witness(finder, target)

    def may_be_refuted(self, voice: Voice, target: Target, now_ms: float, silence_ms: float = 0.0) -> None:
        """The mute of a target follows from one task's report: a response to another refutes it."""
        # Messages take time, and a response before the silence must not look like one within it.
        self._origins[target] = _MuteOrigin(voice, now_ms - min(silence_ms, _REFUTED_SOON_MS) / 4)

    def add_witness(self, voice: Voice, target: Target) -> None:
        """A task has a lease for a muted target."""
        self._witnesses.setdefault(target, set()).add(voice)
        self._witnessed.setdefault(voice.group, set()).add(target)

    def is_witness(self, voice: Voice, target: Target) -> bool:
        """Whether a task knows at first hand when the mute of a target is over."""
        return voice in self._witnesses.get(target, ())

    def on_unmuted_by(self, voice: Voice, target: Target, mute: Mute, now_ms: float, soon_ms: float) -> None:
        """A witness says that a mute is over. If it was a partition's, and began less than ``soon_ms`` ago,
        that raises doubts about the task that muted it."""
        origin = self._origins.get(target)
        soon = now_ms - mute.since_ms < soon_ms
        if isinstance(target, TopicPartition) and origin is not None and origin.voice != voice and soon:
            self._doubt(origin.voice, target, now_ms)

    def end(self, target: Target) -> None:
        """A target is muted no more."""
        self._origins.pop(target, None)
        self._forget_witnesses(target)

    def _forget_witnesses(self, target: Target) -> None:
        for voice in self._witnesses.pop(target, ()):
            self._witnessed[voice.group].discard(target)

    def remove_group(self, group: int) -> None:
        self._doubted_ms.pop(group, None)
        for target in self._witnessed.pop(group, ()):
            self._witnesses[target] = {one for one in self._witnesses[target] if one.group != group}

    # -- suspicions ---------------------------------------------------------------------------------------

    def suspect(self, voice: Voice, node: int, mute: MuteReport, now_ms: float) -> None:
        """A task wants a broker muted, and another task is being asked."""
        self._suspicions.setdefault(node, Suspicion(voice, mute.reason, now_ms, now_ms + ASK_MS))

    def forgive(self, late_ms: float) -> None:
        """No response could be taken for so long."""
        for node, one in self._suspicions.items():
            self._suspicions[node] = replace(one, until_ms=one.until_ms + late_ms)

    def withdraw_suspicion(self, target: Target) -> None:
        """A task says that a target is fine."""
        if isinstance(target, int):
            self._suspicions.pop(target, None)

    def take_due_suspicions(self, now_ms: float) -> dict[int, Suspicion]:
        """By broker, the suspicions that no response has contradicted in time. They end with it."""
        due = {
            node: suspicion for node, suspicion in self._suspicions.items() if suspicion.until_ms <= now_ms
        }
        for node in due:
            del self._suspicions[node]
        return due

    def next_suspicion_ms(self, now_ms: float) -> float:
        """Milliseconds until a suspicion is due; infinite without suspicions."""
        return min((suspicion.until_ms - now_ms for suspicion in self._suspicions.values()), default=math.inf)
