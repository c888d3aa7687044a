"""The coordinator's breaker: weighs the outcomes of all tasks, tells mutes to all, leases probes. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kafka_sink.breaker.states import BreakerState, MuteTable, ProbeLease, Target
from kafka_sink.coordinator.server.breaker_votes import PartitionVotes
from kafka_sink.coordinator.server.handlers import Push, Reply, ServerMessage, SharedBody
from kafka_sink.coordinator.wire.breaker_messages import (
    MAX_MUTES,
    BreakerReport,
    BreakerUpdate,
    MuteReport,
    OutcomeCounts,
    decode_report,
    encode_update,
)
from kafka_sink.model import TopicPartition
from kafka_sink.options.breaker import DEFAULT_CLASS, breaker_settings, value_of
from kafka_sink.timing_bounds import GATHER_MUTES_MS, HEALTHY_VALID_MS

if TYPE_CHECKING:
    from kafka_sink.coordinator.server.handlers import Handler
    from kafka_sink.options import SinkOptions

# A task that holds batches for what is muted reports every coordinator.report.interval.ms.
_SILENT_INTERVALS = 3
_MIN_SILENT_MS = 2_000.0
# What nobody has wanted to write to for so long is forgotten.
_FORGET_MS = 600_000.0
# A mute that others speak against so soon was one task's bad network; its word counts less for a minute.
_SOON_MS = 1_000.0
_DOUBT_MS = 60_000.0
# So long has a task that is asked to get an answer of a broker that another has no evidence against.
_ASK_MS = 1_000.0
# After a mute rows come back from one task, then two more, four, and so on, a step apart.
_RAMP_STEP_MS = 100.0
# Fewer tasks than this are compared with one another.
_FEW = 16


@dataclass(frozen=True, slots=True)
class _Silence:
    """Whose word a broker's mute is; answers to others after this time speak against it."""

    peer: int
    spoken_against_ms: float


@dataclass(frozen=True, slots=True)
class _Claim:
    """A broker that a task would have muted without evidence, while another is asked."""

    peer: int
    reason: str
    until_ms: float


@dataclass(slots=True)
class _BreakerTask:
    """A task: muted targets that it holds batches for, muted partitions that it has rows for, its last
    report, its last lease."""

    holds: frozenset[Target] = frozenset()
    wants: frozenset[Target] = frozenset()
    spoke_ms: float = 0.0
    leased_ms: float = -math.inf


class BreakerHandler:
    """See Handler. ``votes`` is None where a class of the user's decides instead of failure rates.

    ``random`` gives [0, 1) for jitter.
    """

    def __init__(
        self,
        retry_interval_ms: float,
        votes: PartitionVotes | None,
        report_interval_ms: float,
        random: Callable[[], float] = random.random,
    ) -> None:
        self._book = MuteTable(retry_interval_ms)
        self._votes = votes
        self._random = random
        self._quiet_ms = max(_SILENT_INTERVALS * report_interval_ms, _MIN_SILENT_MS)
        self._peers: dict[int, _BreakerTask] = {}
        # By broker, when each task last had an answer; which mutes rest on silence; who probes.
        self._answered: dict[int, dict[int, float]] = {}
        self._silent: dict[Target, _Silence] = {}
        # By task and broker, when a mute on its word was spoken against.
        self._doubted_ms: dict[tuple[int, Target], float] = {}
        self._owners: dict[Target, int] = {}
        # Tasks that found a mute or were to probe it: what they say of its end is first-hand.
        self._witnesses: dict[Target, set[int]] = {}
        self._claims: dict[int, _Claim] = {}
        # What tasks are to be asked with the next messages.
        self._asks: dict[int, list[Target]] = {}
        self._asked_ms: dict[int, float] = {}
        self._added: dict[Target, str] = {}
        self._removed: set[Target] = set()
        self._told_ms = self._judged_ms = self._leased_ms = -math.inf
        self._is_judged = True
        # Who holds batches, or has rows, for what is muted; when time alone brings something to do.
        self._holders_of: dict[Target, set[int]] = {}
        self._wanters_of: dict[Target, set[int]] = {}
        self._due_ms = -math.inf

    # -- Handler ------------------------------------------------------------------------------------

    def on_message(
        self, peer: int, request: int, body: Mapping[str, Any], now_ms: float
    ) -> Sequence[ServerMessage]:
        """See Handler. A task's first report is answered with all that is muted."""
        report = decode_report(body)
        first = peer not in self._peers
        known = self._peers.setdefault(peer, _BreakerTask())
        wakes = now_ms - known.spoke_ms > self._quiet_ms
        known.spoke_ms = now_ms
        if report.holds is not None:
            before, known.holds = known.holds, frozenset(report.holds)
            _index(self._holders_of, peer, before, known.holds)
        if report.wants is not None:
            before, known.wants = known.wants, frozenset(report.wants)
            _index(self._wanters_of, peer, before, known.wants)
        if now_ms >= self._due_ms:
            self._book.expire_late(now_ms)
        for node, ago_ms in report.answered.items():
            self._note_answer(peer, node, now_ms - ago_ms, now_ms)
        self._weigh(peer, report.rows, report.outcomes, now_ms)
        for mute in report.muted:
            # What a task tells first it found before, and others may know better by now.
            self._take(peer, mute, now_ms, doubtful=first)
        for target, error in report.failed:
            self._on_failure(peer, target, error, now_ms)
        for target, _ in report.unmuted:
            self._take_unmute(peer, target, now_ms)
        answer: dict[str, Any] = {}
        if first:
            reasons = {target: mute.reason for target, mute in self._book.mutes.items()}
            answer = encode_update(BreakerUpdate(whole=True, added=reasons))
        reply = Reply(peer, request, answer)
        # Most reports change nothing: these are not to cost a look at every mute.
        if wakes or self._asks or now_ms >= min(self._due_ms, self._gathered_ms(report)):
            return [reply, *self.on_time(now_ms)]
        return [reply]

    def _gathered_ms(self, report: BreakerReport) -> float:
        """When what this report brought is to be looked at: what many tell at once, together."""
        due_ms = math.inf
        if self._added or self._removed:
            due_ms = self._told_ms + GATHER_MUTES_MS
        if not self._is_judged:
            due_ms = min(due_ms, self._judged_ms + GATHER_MUTES_MS)
        if report.changes_probes:
            due_ms = min(due_ms, self._leased_ms + GATHER_MUTES_MS)
        self._due_ms = min(self._due_ms, due_ms)
        return due_ms

    def on_disconnect(self, peer: int, now_ms: float) -> None:
        """See Handler."""
        known = self._peers.pop(peer, None)
        if known is not None:
            _index(self._holders_of, peer, known.holds, frozenset())
            _index(self._wanters_of, peer, known.wants, frozenset())
        self._due_ms = -math.inf
        for one in [one for one in self._doubted_ms if one[0] == peer]:
            del self._doubted_ms[one]
        for answered in self._answered.values():
            answered.pop(peer, None)
        if self._votes is not None:
            self._votes.leave(peer)
        for witnesses in self._witnesses.values():
            witnesses.discard(peer)
        for target in [target for target, owner in self._owners.items() if owner == peer]:
            # Perhaps its probe is on its way: the next waits as after a failure.
            self._on_failure(peer, target, "", now_ms)

    def on_time(self, now_ms: float) -> Sequence[ServerMessage]:
        """See Handler."""
        self._book.expire_late(now_ms)
        self._forget(now_ms)
        self._judge(now_ms)
        self._end_claims(now_ms)
        outgoing: list[ServerMessage] = []
        if (self._added or self._removed) and now_ms - self._told_ms >= GATHER_MUTES_MS:
            outgoing += self._tell_all()
            self._told_ms = now_ms
        asks, self._asks = self._asks, {}
        # Most are asked the same.
        bodies: dict[tuple[Target, ...], SharedBody] = {}
        for peer, asked in asks.items():
            key = tuple(asked)
            if key not in bodies:
                bodies[key] = SharedBody(encode_update(BreakerUpdate(asks=key)), 0.0)
            outgoing.append(Push(peer, bodies[key]))
        outgoing += self._lease_all(now_ms)
        self._leased_ms = now_ms
        self._due_ms = now_ms + self._next_change_ms(now_ms)
        return outgoing

    def _tell_all(self) -> list[ServerMessage]:
        """What was muted, at once; what no longer is, to one task after the other: hundreds that wait would
        else all send to a broker that has just come back."""
        added, removed = self._added, self._removed
        self._added, self._removed = {}, set()
        if not removed:
            news = SharedBody(encode_update(BreakerUpdate(added=added)), 0.0)
            return [Push(peer, news) for peer in self._peers]
        # Those that have rows for it go first: whether the others let go at all makes no difference yet.
        order = sorted(
            self._peers,
            key=lambda peer: (removed.isdisjoint(self._peers[peer].holds), self._random()),
        )
        return [
            Push(
                peer,
                encode_update(
                    BreakerUpdate(added=added, removed=dict.fromkeys(removed, self._delay_ms(turn)))
                ),
            )
            for turn, peer in enumerate(order)
        ]

    def _delay_ms(self, turn: int) -> float:
        if turn == 0:
            return 0.0
        step = (turn + 1).bit_length() - 2 + self._random()
        return min(step * _RAMP_STEP_MS, self._book.retry_interval_ms)

    def next_change_ms(self, now_ms: float) -> float:
        """See Handler."""
        return max(0.0, self._due_ms - now_ms)

    def _next_change_ms(self, now_ms: float) -> float:
        delay = self._book.next_change_ms(now_ms)
        if self._added or self._removed:
            delay = min(delay, self._told_ms + GATHER_MUTES_MS - now_ms)
        if self._asks:
            return 0.0
        delay = min([delay, *(claim.until_ms - now_ms for claim in self._claims.values())])
        heard_ms = None if self._votes is None else self._votes.next_change_ms(now_ms)
        if heard_ms is not None:
            delay = min(delay, max(heard_ms, self._judged_ms + GATHER_MUTES_MS - now_ms))
        if not self._is_judged:
            delay = min(delay, self._judged_ms + GATHER_MUTES_MS - now_ms)
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
        claim = self._claims.get(node)
        if claim is not None and claim.peer != peer and at_ms > claim.until_ms - _ASK_MS:
            del self._claims[node]
            self._doubted_ms[claim.peer, node] = now_ms
        mute, silence = self._book.mutes.get(node), self._silent.get(node)
        if mute is None or silence is None or at_ms <= silence.spoken_against_ms:
            return
        if peer != silence.peer and at_ms < mute.since_ms + _SOON_MS:
            self._doubted_ms[silence.peer, node] = now_ms
        self._unmute(node)

    def _weigh(self, peer: int, rows: int, outcomes: Sequence[OutcomeCounts], now_ms: float) -> None:
        if self._votes is not None:
            self._votes.add_rows(rows)
            self._is_judged &= not self._votes.is_open and not outcomes
            for outcome in outcomes:
                self._votes.vote(peer, outcome, now_ms)

    def _judge(self, now_ms: float) -> None:
        """Mutes partitions that fail by the votes of all who write to them, once those have been asked."""
        votes = self._votes
        if votes is None:
            return
        if now_ms - self._judged_ms < GATHER_MUTES_MS:
            # All votes are looked at, so not for each that comes.
            self._is_judged = not votes.is_open
            return
        if votes.is_open:
            self._judged_ms, self._is_judged = now_ms, True
        suspects = [one for one in votes.suspects(now_ms) if one not in self._book.mutes]
        awake = self._awake(now_ms) if suspects else []
        for partition in suspects:
            all_heard = votes.heard(partition) >= len(awake) and not votes.unheard(partition, awake)
            if all_heard or votes.is_heard(partition, now_ms):
                self._mute(partition, votes.describe(partition), now_ms)
                votes.forget(partition)
            elif votes.ask(partition, now_ms):
                for peer in votes.unheard(partition, awake):
                    self._asks.setdefault(peer, []).append(partition)

    def _take(self, peer: int, mute: MuteReport, now_ms: float, *, doubtful: bool) -> None:
        """What a task has muted is a reason to ask, not a truth. By its silence a broker rests for all, while
        another task asks it; unless others have had answers in the silence's second half: then the way from
        that one task is sick, and the mute stays its own."""
        target = mute.target
        if isinstance(target, TopicPartition):
            self._take_partition(peer, target, mute.reason, now_ms)
            return
        silence_ms = mute.silence_ms
        doubted = now_ms - self._doubted_ms.get((peer, target), -math.inf) < _DOUBT_MS
        since = now_ms - (max(HEALTHY_VALID_MS, silence_ms / 2) if doubtful or doubted else silence_ms / 2)
        answered = self._answered.get(target, {})
        if any(at > since for other, at in answered.items() if other != peer):
            return
        # The next leases are for others: they see whether it is the broker, or the way from this task.
        self._peers[peer].leased_ms = now_ms
        asked = self._ask_another(peer, target, now_ms)
        if not silence_ms and asked:
            if not doubted and target not in self._book.mutes:
                self._claims.setdefault(target, _Claim(peer, mute.reason, now_ms + _ASK_MS))
            return
        if self._mute(target, mute.reason, now_ms, peer):
            # Messages take their time, and a last answer must not look as if it had come in the silence.
            self._silent[target] = _Silence(peer, now_ms - min(silence_ms, _SOON_MS) / 4)

    def _take_partition(self, peer: int, target: TopicPartition, reason: str, now_ms: float) -> None:
        """A class of the user's says so. Another task that holds a batch for it tries at once, and where that
        succeeds the first is not believed for a minute."""
        if now_ms - self._doubted_ms.get((peer, target), -math.inf) < _DOUBT_MS:
            return
        if self._mute(target, reason, now_ms, peer):
            self._silent[target] = _Silence(peer, now_ms)
            if len(self._awake(now_ms)) > 1:
                self._book.mutes[target].retry_at_ms = now_ms

    def _ask_another(self, peer: int, node: int, now_ms: float) -> bool:
        """Has another task ask a broker, with no rows; False where there is none."""
        others = [other for other in self._awake(now_ms) if other != peer]
        if not others:
            return False
        if now_ms - self._asked_ms.get(node, -math.inf) < _ASK_MS:
            return True
        self._asked_ms[node] = now_ms
        chosen = min(others, key=lambda other: self._peers[other].leased_ms)
        self._peers[chosen].leased_ms = now_ms
        self._asks.setdefault(chosen, []).append(node)
        return True

    def _end_claims(self, now_ms: float) -> None:
        for node in [node for node, claim in self._claims.items() if claim.until_ms <= now_ms]:
            claim = self._claims.pop(node)
            if self._mute(node, claim.reason, now_ms, claim.peer):
                self._silent[node] = _Silence(claim.peer, now_ms)

    def _mute(self, target: Target, reason: str, now_ms: float, finder: int | None = None) -> bool:
        full = len(self._book.mutes) >= MAX_MUTES
        if full or not self._book.trip(target, reason, now_ms):
            return False
        self._added[target] = reason
        self._removed.discard(target)
        self._witnesses[target] = set() if finder is None else {finder}
        return True

    def _take_unmute(self, peer: int, target: Target, now_ms: float) -> None:
        """Who found a mute, or had a lease in it, knows that it is over. What another says is a reason to
        probe at once."""
        silence, mute = self._silent.get(target), self._book.mutes.get(target)
        if mute is None:
            self._claims.pop(target, None) if isinstance(target, int) else None
        elif peer in self._witnesses.get(target, ()):
            soon = now_ms - mute.since_ms < 2 * self._book.retry_interval_ms
            if isinstance(target, TopicPartition) and silence is not None and silence.peer != peer and soon:
                self._doubted_ms[silence.peer, target] = now_ms
            self._unmute(target)
        elif mute.state is BreakerState.OPEN:
            mute.retry_at_ms = now_ms

    def _unmute(self, target: Target) -> None:
        self._owners.pop(target, None)
        self._silent.pop(target, None)
        self._witnesses.pop(target, None)
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
        return [peer for peer in self._holders_of.get(target, ()) if self._is_awake(peer, now_ms)]

    def _is_awake(self, peer: int, now_ms: float) -> bool:
        return now_ms - self._peers[peer].spoke_ms <= self._quiet_ms

    def _awake(self, now_ms: float) -> list[int]:
        return [peer for peer in self._peers if self._is_awake(peer, now_ms)]

    def _lease_all(self, now_ms: float) -> list[ServerMessage]:
        due = [target for target in self._book.mutes if self._book.is_due(target, now_ms)]
        if not due:
            return []
        # By their last lease, the one longest ago first; who gets one goes to the end.
        order = dict.fromkeys(sorted(self._awake(now_ms), key=lambda peer: self._peers[peer].leased_ms))
        leases: dict[int, dict[Target, ProbeLease]] = {}
        for target in due:
            found = self._candidate(target, order, now_ms)
            if found is None:
                continue
            peer, trial = found
            self._book.probe(target, now_ms)
            self._owners[target] = peer
            self._witnesses.setdefault(target, set()).add(peer)
            self._peers[peer].leased_ms = now_ms
            del order[peer]
            order[peer] = None
            leases.setdefault(peer, {})[target] = ProbeLease(self._book.retry_interval_ms, trial)
        return [Push(peer, encode_update(BreakerUpdate(leases=granted))) for peer, granted in leases.items()]

    def _candidate(self, target: Target, order: Mapping[int, None], now_ms: float) -> tuple[int, bool] | None:
        """Who may probe, and whether with a new row: of those that can, the first in ``order``.

        Any task can probe a broker, as that takes no row. A partition takes a batch: a task that holds one,
        or where there is none for another interval, one whose rows could go there.
        """
        if not isinstance(target, TopicPartition):
            first = next(iter(order), None)
            return None if first is None else (first, False)
        first = self._first(order, self._holders_of.get(target, set()))
        if first is not None:
            return first, False
        if now_ms < self._book.mutes[target].retry_at_ms + self._book.retry_interval_ms:
            return None
        first = self._first(order, self._wanters_of.get(target, set()))
        return None if first is None else (first, True)

    def _first(self, order: Mapping[int, None], able: set[int]) -> int | None:
        """Of few the order is looked up, of many one comes soon."""
        if len(able) > _FEW:
            return next((peer for peer in order if peer in able), None)
        awake = [peer for peer in able if peer in order]
        return min(awake, key=lambda peer: (self._peers[peer].leased_ms, peer), default=None)


def _index(
    index: dict[Target, set[int]], peer: int, before: frozenset[Target], now: frozenset[Target]
) -> None:
    """Notes of a peer that it has left some targets and come to others."""
    for target in before - now:
        index[target].discard(peer)
        if not index[target]:
            del index[target]
    for target in now - before:
        index.setdefault(target, set()).add(peer)


def breaker_handler(options: SinkOptions, wake: Callable[[], None]) -> Handler:
    """The handler of one cluster; its evidence is weighed by the default class's options."""
    given = dict(options.breaker)
    settings = breaker_settings(given)
    votes = None
    if settings.class_path == DEFAULT_CLASS:
        votes = PartitionVotes(
            value_of("trigger.message.count", given), value_of("trigger.failure.perc", given)
        )
    return BreakerHandler(
        settings.mute_retry_interval_ms, votes, float(options.coordinator_report_interval_ms)
    )
