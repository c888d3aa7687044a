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

    task: int
    refuted_after_ms: float


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A task wants a broker muted without evidence. It is muted at ``until_ms`` unless another gets a
    response."""

    task: int
    reason: str
    until_ms: float


class _Responses:
    """When tasks last had responses of one broker. What all tasks but one had takes no walk over them.

    A response counts also after its task has left: the broker did respond then.
    """

    __slots__ = ("_last", "_others")

    def __init__(self) -> None:
        # The last response to any task and that task; the last one to any other task.
        self._last: tuple[float, int] = (-math.inf, -1)
        self._others = -math.inf

    def add(self, task: int, at_ms: float) -> None:
        last_ms, last_peer = self._last
        if task == last_peer:
            self._last = max(last_ms, at_ms), task
        elif at_ms > last_ms:
            self._last, self._others = (at_ms, task), last_ms
        else:
            self._others = max(self._others, at_ms)

    def last_ms(self, *, other_than: int) -> float:
        last_ms, last_peer = self._last
        return self._others if last_peer == other_than else last_ms


class MuteEvidence:
    """Responses of brokers, the origins of mutes, the suspicions, and the tasks that are doubted.

    A report costs the same however many tasks there are: thousands mute a frozen broker within a second.
    """

    def __init__(self) -> None:
        self._responses: dict[int, _Responses] = {}
        # The mutes that follow from one task's report.
        self._origins: dict[Target, _MuteOrigin] = {}
        # By task, its mutes that were refuted, and when.
        self._doubted_ms: dict[int, dict[Target, float]] = {}
        # By target, the tasks that muted it or had a lease. They know at first hand when the mute is over.
        self._witnesses: dict[Target, set[int]] = {}
        # The same by task.
        self._witnessed: dict[int, set[Target]] = {}
        self._suspicions: dict[int, Suspicion] = {}

    def add_response(self, task: int, node: int, at_ms: float, mute: Mute | None, now_ms: float) -> bool:
        """A task had a response of a broker at ``at_ms``. True if that refutes the broker's mute."""
        self._responses.setdefault(node, _Responses()).add(task, at_ms)
        suspicion = self._suspicions.get(node)
        if suspicion is not None and suspicion.task != task and at_ms > suspicion.until_ms - ASK_MS:
            del self._suspicions[node]
            self._doubt(suspicion.task, node, now_ms)
        origin = self._origins.get(node)
        if mute is None or origin is None or at_ms <= origin.refuted_after_ms:
            return False
        if task != origin.task and at_ms < mute.since_ms + _REFUTED_SOON_MS:
            self._doubt(origin.task, node, now_ms)
        return True

    def is_doubted(self, task: int, target: Target, now_ms: float) -> bool:
        """Whether a task's last mute of this target was refuted, less than a minute ago."""
        return now_ms - self._doubted_ms.get(task, {}).get(target, -math.inf) < _DOUBT_MS

    def _doubt(self, task: int, target: Target, now_ms: float) -> None:
        self._doubted_ms.setdefault(task, {})[target] = now_ms

    def contradicts(self, task: int, node: int, silence_ms: float, now_ms: float, *, doubtful: bool) -> bool:
        """Whether other tasks had responses in the second half of a broker's silence to one task.

        ``doubtful``: a response of the last seconds contradicts too.
        """
        valid_ms = max(HEALTHY_VALID_MS, silence_ms / 2) if doubtful else silence_ms / 2
        responses = self._responses.get(node)
        return responses is not None and responses.last_ms(other_than=task) > now_ms - valid_ms

    # -- mutes, from their beginning to their end -----------------------------------------------------

    def begin(self, target: Target, finder: int | None) -> None:
        """A target is muted, on the report of ``finder`` or, with None, by the votes of all tasks."""
        self._forget_witnesses(target)
        if finder is not None:
            self.add_witness(finder, target)

    def may_be_refuted(self, task: int, target: Target, now_ms: float, silence_ms: float = 0.0) -> None:
        """The mute of a target follows from one task's report: a response to another refutes it."""
        # Messages take time, and a response before the silence must not look like one within it.
        self._origins[target] = _MuteOrigin(task, now_ms - min(silence_ms, _REFUTED_SOON_MS) / 4)

    def add_witness(self, task: int, target: Target) -> None:
        """A task has a lease for a muted target."""
        self._witnesses.setdefault(target, set()).add(task)
        self._witnessed.setdefault(task, set()).add(target)

    def is_witness(self, task: int, target: Target) -> bool:
        """Whether a task knows at first hand when the mute of a target is over."""
        return task in self._witnesses.get(target, ())

    def on_unmuted_by(self, task: int, target: Target, mute: Mute, now_ms: float, soon_ms: float) -> None:
        """A witness says that a mute is over. If it was a partition's, and began less than ``soon_ms`` ago,
        that raises doubts about the task that muted it."""
        origin = self._origins.get(target)
        soon = now_ms - mute.since_ms < soon_ms
        if isinstance(target, TopicPartition) and origin is not None and origin.task != task and soon:
            self._doubt(origin.task, target, now_ms)

    def end(self, target: Target) -> None:
        """A target is muted no more."""
        self._origins.pop(target, None)
        self._forget_witnesses(target)

    def _forget_witnesses(self, target: Target) -> None:
        for task in self._witnesses.pop(target, ()):
            self._witnessed[task].discard(target)

    def remove_task(self, task: int) -> None:
        """A task has disconnected."""
        self._doubted_ms.pop(task, None)
        for target in self._witnessed.pop(task, ()):
            self._witnesses[target].discard(task)

    # -- suspicions ---------------------------------------------------------------------------------------

    def suspect(self, task: int, node: int, mute: MuteReport, now_ms: float) -> None:
        """A task wants a broker muted, and another task is being asked."""
        self._suspicions.setdefault(node, Suspicion(task, mute.reason, now_ms + ASK_MS))

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
