"""The coordinator's breaker: weighs the outcomes of all tasks, tells mutes to all, leases probes. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kafka_sink.cluster.circuit_breaker.mutes import Lease
from kafka_sink.cluster.circuit_breaker.states import BreakerState, Mute, MuteBook, Target
from kafka_sink.cluster.circuit_breaker.windows import OutcomeWindows
from kafka_sink.coordinator.breaker_messages import (
    MOST_MUTES,
    MuteReport,
    News,
    Outcome,
    decode_report,
    encode_news,
)
from kafka_sink.coordinator.handlers import Outgoing, Push, Reply
from kafka_sink.model import TopicPartition
from kafka_sink.options.breaker import DEFAULT_CLASS, breaker_settings, value_of

if TYPE_CHECKING:
    from kafka_sink.coordinator.handlers import Handler
    from kafka_sink.options import SinkOptions

# Mutes that follow one another closely are told together.
_GATHER_MS = 50.0
# A task that holds batches for what is muted reports every coordinator.report.interval.ms.
_SILENT_INTERVALS = 3
_LEAST_SILENT_MS = 2_000.0
# What nobody has wanted to write to for so long is forgotten.
_FORGET_MS = 600_000.0
# A mute that others speak against so soon was one task's bad network; its word counts less for a minute.
_SOON_MS = 1_000.0
_DOUBT_MS = 60_000.0
# Tasks tell of answers every 2 s while nothing is muted.
_TOLD_MS = 3_000.0


@dataclass(frozen=True, slots=True)
class _Silence:
    """Whose word a broker's mute is; answers to others after this time speak against it."""

    peer: int
    spoken_against_ms: float


@dataclass(slots=True)
class _Peer:
    """A task: muted targets that it holds batches for, muted partitions that it has rows for, its last
    report, its last lease."""

    holds: frozenset[Target] = frozenset()
    wants: frozenset[Target] = frozenset()
    spoke_ms: float = 0.0
    leased_ms: float = -math.inf


class BreakerHandler:
    """See Handler. ``windows`` is None where a class of the user's decides instead."""

    def __init__(
        self, retry_interval_ms: float, windows: OutcomeWindows | None, report_interval_ms: float
    ) -> None:
        self._book = MuteBook(retry_interval_ms)
        self._windows = windows
        self._quiet_ms = max(_SILENT_INTERVALS * report_interval_ms, _LEAST_SILENT_MS)
        self._peers: dict[int, _Peer] = {}
        # By broker, when each task last had an answer; which mutes rest on silence; who probes.
        self._answered: dict[int, dict[int, float]] = {}
        self._silent: dict[Target, _Silence] = {}
        # By task and broker, when a mute on its word was spoken against.
        self._doubted_ms: dict[tuple[int, Target], float] = {}
        self._owners: dict[Target, int] = {}
        self._added: dict[Target, str] = {}
        self._removed: set[Target] = set()
        self._told_ms = -math.inf

    # -- Handler ------------------------------------------------------------------------------------

    def on_message(
        self, peer: int, request: int, body: Mapping[str, Any], now_ms: float
    ) -> Sequence[Outgoing]:
        """See Handler. A task's first report is answered with all that is muted."""
        report = decode_report(body)
        first = peer not in self._peers
        known = self._peers.setdefault(peer, _Peer())
        known.spoke_ms = now_ms
        known.holds, known.wants = frozenset(report.holds), frozenset(report.wants)
        self._book.expire_late(now_ms)
        for node, ago_ms in report.answered.items():
            self._note_answer(peer, node, now_ms - ago_ms, now_ms)
        for outcome in report.outcomes:
            self._weigh(outcome, now_ms)
        for mute in report.muted:
            # What a task tells first it found before, and others may know better by now.
            self._take(peer, mute, now_ms, doubtful=first)
        for target, error in report.failed:
            self._on_failure(peer, target, error, now_ms)
        for target, _ in report.unmuted:
            self._unmute(target)
        answer: dict[str, Any] = {}
        if first:
            reasons = {target: mute.reason for target, mute in self._book.mutes.items()}
            answer = encode_news(News(whole=True, added=reasons))
        return [Reply(peer, request, answer), *self.on_time(now_ms)]

    def on_disconnect(self, peer: int, now_ms: float) -> None:
        """See Handler."""
        self._peers.pop(peer, None)
        for one in [one for one in self._doubted_ms if one[0] == peer]:
            del self._doubted_ms[one]
        for answered in self._answered.values():
            answered.pop(peer, None)
        for target in [target for target, owner in self._owners.items() if owner == peer]:
            # Perhaps its probe is on its way: the next waits as after a failure.
            self._on_failure(peer, target, "", now_ms)

    def on_time(self, now_ms: float) -> Sequence[Outgoing]:
        """See Handler."""
        self._book.expire_late(now_ms)
        self._forget(now_ms)
        outgoing: list[Outgoing] = []
        if (self._added or self._removed) and now_ms - self._told_ms >= _GATHER_MS:
            news = encode_news(News(added=self._added, removed=tuple(self._removed)))
            outgoing += [Push(peer, news) for peer in self._peers]
            self._added, self._removed = {}, set()
            self._told_ms = now_ms
        return outgoing + self._lease_all(now_ms)

    def next_change_ms(self, now_ms: float) -> float:
        """See Handler."""
        delay = self._book.next_change_ms(now_ms)
        if self._added or self._removed:
            delay = min(delay, self._told_ms + _GATHER_MS - now_ms)
        for mute in self._book.mutes.values():
            if mute.state is BreakerState.OPEN:
                trial_ms = mute.retry_at_ms + self._book.retry_interval_ms
                if trial_ms > now_ms:
                    delay = min(delay, trial_ms - now_ms)
        return max(delay, 0.0)

    def close(self) -> None:
        """See Handler."""

    # -- evidence -----------------------------------------------------------------------------------

    def _note_answer(self, peer: int, node: int, at_ms: float, now_ms: float) -> None:
        answered = self._answered.setdefault(node, {})
        answered[peer] = max(answered.get(peer, -math.inf), at_ms)
        mute, silence = self._book.mutes.get(node), self._silent.get(node)
        if mute is None or silence is None or at_ms <= silence.spoken_against_ms:
            return
        if peer != silence.peer and at_ms < mute.since_ms + _SOON_MS:
            self._doubted_ms[silence.peer, node] = now_ms
        self._unmute(node)

    def _weigh(self, outcome: Outcome, now_ms: float) -> None:
        windows, partition = self._windows, outcome.partition
        if windows is None:
            return
        windows.forget_idle(now_ms)
        tripped = windows.record(partition, outcome.written, outcome.failed, now_ms)
        if tripped and partition not in self._book.mutes:
            failures, total = windows.counts(partition)
            windows.forget(partition)
            reason = f"{failures} of the last {total} rows of all tasks failed; last error: {outcome.error}"
            self._mute(partition, reason, now_ms)

    def _take(self, peer: int, mute: MuteReport, now_ms: float, *, doubtful: bool) -> None:
        """A task's own mute holds for all, unless another has had answers in the silence's second half: then
        the way from that one task to the broker is sick, and the mute stays its own."""
        target = mute.target
        if not mute.silence_ms:
            self._mute(target, mute.reason, now_ms)
            return
        doubtful |= now_ms - self._doubted_ms.get((peer, target), -math.inf) < _DOUBT_MS
        answered = self._answered.get(target, {}) if isinstance(target, int) else {}
        since = now_ms - (max(_TOLD_MS, mute.silence_ms / 2) if doubtful else mute.silence_ms / 2)
        if any(at > since for other, at in answered.items() if other != peer):
            return
        if self._mute(target, mute.reason, now_ms):
            # Messages take their time, and a last answer must not look as if it had come in the silence.
            self._silent[target] = _Silence(peer, now_ms - min(mute.silence_ms, _SOON_MS) / 4)

    def _mute(self, target: Target, reason: str, now_ms: float) -> bool:
        full = len(self._book.mutes) >= MOST_MUTES
        if full or not self._book.trip(target, reason, now_ms):
            return False
        self._added[target] = reason
        self._removed.discard(target)
        return True

    def _unmute(self, target: Target) -> None:
        self._owners.pop(target, None)
        self._silent.pop(target, None)
        if self._book.reset(target):
            self._removed.add(target)
            self._added.pop(target, None)

    def _on_failure(self, peer: int, target: Target, error: str, now_ms: float) -> None:
        mute = self._book.mutes.get(target)
        # What fails beside somebody's lease was sent before, or without the coordinator.
        if mute is not None and self._owners.get(target) == peer:
            self._book.fail(target, error, now_ms)
            del self._owners[target]

    def _forget(self, now_ms: float) -> None:
        for target, mute in list(self._book.mutes.items()):
            # A broker is probed as long as there are tasks, whether they have rows for it or not.
            is_partition = isinstance(target, TopicPartition)
            if is_partition and now_ms - mute.since_ms > _FORGET_MS and not self._holders(target, now_ms):
                self._unmute(target)

    # -- probes -------------------------------------------------------------------------------------

    def _holders(self, target: Target, now_ms: float) -> list[int]:
        return [peer for peer in self._awake(now_ms) if target in self._peers[peer].holds]

    def _awake(self, now_ms: float) -> list[int]:
        return [peer for peer, known in self._peers.items() if now_ms - known.spoke_ms <= self._quiet_ms]

    def _lease_all(self, now_ms: float) -> list[Outgoing]:
        leases: dict[int, dict[Target, Lease]] = {}
        for target, mute in self._book.mutes.items():
            found = self._candidate(target, mute, now_ms)
            if found is None:
                continue
            peer, trial = found
            self._book.probe(target, now_ms)
            self._owners[target] = peer
            self._peers[peer].leased_ms = now_ms
            leases.setdefault(peer, {})[target] = Lease(self._book.retry_interval_ms, trial)
        return [Push(peer, encode_news(News(leases=granted))) for peer, granted in leases.items()]

    def _candidate(self, target: Target, mute: Mute, now_ms: float) -> tuple[int, bool] | None:
        """Who may probe, and whether with a new row: of those that can, whose last lease is longest ago.

        Any task can probe a broker, as that takes no row. A partition takes a batch: a task that holds one,
        or where there is none for another interval, one whose rows could go there.
        """
        if not self._book.is_due(target, now_ms):
            return None
        awake, trial = self._awake(now_ms), False
        if isinstance(target, TopicPartition):
            able = [peer for peer in awake if target in self._peers[peer].holds]
            if not able and now_ms >= mute.retry_at_ms + self._book.retry_interval_ms:
                able, trial = [peer for peer in awake if target in self._peers[peer].wants], True
            awake = able
        if not awake:
            return None
        return min(awake, key=lambda peer: self._peers[peer].leased_ms), trial


def breaker_handler(options: SinkOptions, wake: Callable[[], None]) -> Handler:
    """The handler of one cluster; its evidence is weighed by the default class's options."""
    given = dict(options.breaker)
    settings = breaker_settings(given)
    windows = None
    if settings.class_path == DEFAULT_CLASS:
        windows = OutcomeWindows(
            value_of("trigger.message.count", given), value_of("trigger.failure.perc", given)
        )
    return BreakerHandler(
        settings.mute_retry_interval_ms, windows, float(options.coordinator_report_interval_ms)
    )
