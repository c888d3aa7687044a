"""The coordinator's breaker: weighs the reports of all tasks, sends mutes to all, leases probes. No I/O."""

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
from kafka_sink.options.breaker import DEFAULT_CLASS, failure_rate_settings
from kafka_sink.timing_bounds import GATHER_MUTES_MS, HEALTHY_VALID_MS

if TYPE_CHECKING:
    from kafka_sink.coordinator.server.handlers import Handler
    from kafka_sink.options import SinkOptions

# A task with batches for a muted target reports every coordinator.report.interval.ms. One that has not
# reported for three intervals, two seconds at least, counts as silent and gets no lease.
_SILENT_INTERVALS = 3
_MIN_SILENT_MS = 2_000.0
# A muted partition that no task has written to for this long is unmuted.
_FORGET_MS = 600_000.0
# If a mute is refuted within a second, the task that caused it had a bad network. Its reports are doubted
# for a minute.
_REFUTED_SOON_MS = 1_000.0
_DOUBT_MS = 60_000.0
# When one task mutes a broker without evidence, another is asked, and has this long to report a response.
_ASK_MS = 1_000.0
# After a mute one task sends again, a step later two more, then four, and so on.
_RAMP_STEP_MS = 100.0
# With more candidates for a lease, walking the tasks in their order finds one sooner than comparing all
# candidates.
_MAX_COMPARED = 16


@dataclass(frozen=True, slots=True)
class _MuteOrigin:
    """The task whose report muted a target. A response to another task after ``refuted_after_ms`` refutes
    it."""

    peer: int
    refuted_after_ms: float


@dataclass(frozen=True, slots=True)
class _Claim:
    """A task wants a broker muted without evidence. It is muted at ``until_ms`` unless another gets a
    response."""

    peer: int
    reason: str
    until_ms: float


@dataclass(slots=True)
class _BreakerTask:
    """A task.

    ``holds``: muted targets that its batches wait for. ``wants``: muted partitions that its rows could go to.
    ``reported_ms``: its last report. ``leased_ms``: its last lease.
    """

    holds: frozenset[Target] = frozenset()
    wants: frozenset[Target] = frozenset()
    reported_ms: float = 0.0
    leased_ms: float = -math.inf


class BreakerHandler:
    """See Handler. ``votes`` is None if a user's breaker class decides instead of failure rates.

    ``random`` returns a number in [0, 1) for jitter.
    """

    def __init__(
        self,
        retry_interval_ms: float,
        votes: PartitionVotes | None,
        report_interval_ms: float,
        random: Callable[[], float] = random.random,
    ) -> None:
        self._table = MuteTable(retry_interval_ms)
        self._votes = votes
        self._random = random
        self._quiet_ms = max(_SILENT_INTERVALS * report_interval_ms, _MIN_SILENT_MS)
        self._peers: dict[int, _BreakerTask] = {}
        # By broker: when each task last had a response.
        self._answered: dict[int, dict[int, float]] = {}
        # The mutes that follow from one task's report.
        self._origins: dict[Target, _MuteOrigin] = {}
        # By task and target: when a mute on the task's report was refuted.
        self._doubted_ms: dict[tuple[int, Target], float] = {}
        # The task that has the lease for a target.
        self._owners: dict[Target, int] = {}
        # By target, the tasks that muted it or had a lease. They know at first hand when the mute is over.
        self._witnesses: dict[Target, set[int]] = {}
        self._claims: dict[int, _Claim] = {}
        # By task, the targets that the next message asks it about.
        self._asks: dict[int, list[Target]] = {}
        self._asked_ms: dict[int, float] = {}
        # Changes that have not been sent.
        self._added: dict[Target, str] = {}
        self._removed: set[Target] = set()
        self._pushed_ms = self._judged_ms = self._leased_ms = -math.inf
        self._is_judged = True
        # By muted target, the tasks that hold batches for it, and those that have rows for it.
        self._holders_of: dict[Target, set[int]] = {}
        self._wanters_of: dict[Target, set[int]] = {}
        # When time alone requires the next look.
        self._due_ms = -math.inf

    # -- Handler ------------------------------------------------------------------------------------

    def on_message(
        self, peer: int, request: int, body: Mapping[str, Any], now_ms: float
    ) -> Sequence[ServerMessage]:
        """See Handler. The reply to a task's first report lists everything that is muted."""
        report = decode_report(body)
        first = peer not in self._peers
        known = self._peers.setdefault(peer, _BreakerTask())
        was_silent = now_ms - known.reported_ms > self._quiet_ms
        known.reported_ms = now_ms
        if report.holds is not None:
            before, known.holds = known.holds, frozenset(report.holds)
            _index(self._holders_of, peer, before, known.holds)
        if report.wants is not None:
            before, known.wants = known.wants, frozenset(report.wants)
            _index(self._wanters_of, peer, before, known.wants)
        if now_ms >= self._due_ms:
            self._table.expire_late(now_ms)
        for node, ago_ms in report.answered.items():
            self._note_answer(peer, node, now_ms - ago_ms, now_ms)
        self._weigh(peer, report.rows, report.outcomes, now_ms)
        for mute in report.muted:
            # A first report may hold old mutes, and other tasks may know better by now.
            self._on_mute(peer, mute, now_ms, doubtful=first)
        for target, error in report.failed:
            self._on_failure(peer, target, error, now_ms)
        for target, _ in report.unmuted:
            self._on_unmute(peer, target, now_ms)
        body_back: dict[str, Any] = {}
        if first:
            reasons = {target: mute.reason for target, mute in self._table.mutes.items()}
            body_back = encode_update(BreakerUpdate(whole=True, added=reasons))
        reply = Reply(peer, request, body_back)
        # Most reports change nothing, and must not cost a walk over all mutes.
        if was_silent or self._asks or now_ms >= min(self._due_ms, self._gathered_ms(report)):
            return [reply, *self.on_time(now_ms)]
        return [reply]

    def _gathered_ms(self, report: BreakerReport) -> float:
        """When to act on this report: those of many tasks that come together are handled together."""
        due_ms = math.inf
        if self._added or self._removed:
            due_ms = self._pushed_ms + GATHER_MUTES_MS
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
            self._votes.remove_peer(peer)
        for witnesses in self._witnesses.values():
            witnesses.discard(peer)
        for target in [target for target, owner in self._owners.items() if owner == peer]:
            # Its probe may be in flight, so the next one waits as after a failure.
            self._on_failure(peer, target, "", now_ms)

    def on_time(self, now_ms: float) -> Sequence[ServerMessage]:
        """See Handler."""
        self._table.expire_late(now_ms)
        self._forget(now_ms)
        self._judge(now_ms)
        self._end_claims(now_ms)
        outgoing: list[ServerMessage] = []
        if (self._added or self._removed) and now_ms - self._pushed_ms >= GATHER_MUTES_MS:
            outgoing += self._push_changes()
            self._pushed_ms = now_ms
        asks, self._asks = self._asks, {}
        # Most tasks are asked the same, so they share a body.
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

    def _push_changes(self) -> list[ServerMessage]:
        """Sends new mutes to all tasks at once. Unmutes take effect in one task after another: otherwise
        hundreds that wait would all send to a broker that has just come back."""
        added, removed = self._added, self._removed
        self._added, self._removed = {}, set()
        if not removed:
            update = SharedBody(encode_update(BreakerUpdate(added=added)), 0.0)
            return [Push(peer, update) for peer in self._peers]
        # Tasks that hold rows for these targets go first. For the others the moment does not matter yet.
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
        return min(step * _RAMP_STEP_MS, self._table.retry_interval_ms)

    def next_change_ms(self, now_ms: float) -> float:
        """See Handler."""
        return max(0.0, self._due_ms - now_ms)

    def _next_change_ms(self, now_ms: float) -> float:
        delay = self._table.next_change_ms(now_ms)
        if self._added or self._removed:
            delay = min(delay, self._pushed_ms + GATHER_MUTES_MS - now_ms)
        if self._asks:
            return 0.0
        delay = min([delay, *(claim.until_ms - now_ms for claim in self._claims.values())])
        voting_ms = None if self._votes is None else self._votes.next_change_ms(now_ms)
        if voting_ms is not None:
            delay = min(delay, max(voting_ms, self._judged_ms + GATHER_MUTES_MS - now_ms))
        if not self._is_judged:
            delay = min(delay, self._judged_ms + GATHER_MUTES_MS - now_ms)
        for mute in self._table.mutes.values():
            if mute.state is BreakerState.OPEN:
                trial_ms = mute.retry_at_ms + self._table.retry_interval_ms
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
        mute, origin = self._table.mutes.get(node), self._origins.get(node)
        if mute is None or origin is None or at_ms <= origin.refuted_after_ms:
            return
        if peer != origin.peer and at_ms < mute.since_ms + _REFUTED_SOON_MS:
            self._doubted_ms[origin.peer, node] = now_ms
        self._unmute(node)

    def _weigh(self, peer: int, rows: int, outcomes: Sequence[OutcomeCounts], now_ms: float) -> None:
        if self._votes is not None:
            self._votes.add_rows(rows)
            self._is_judged &= not self._votes.has_votes and not outcomes
            for outcome in outcomes:
                self._votes.vote(peer, outcome, now_ms)

    def _judge(self, now_ms: float) -> None:
        """Mutes partitions that fail by the votes of all tasks that write to them, after asking those
        tasks."""
        votes = self._votes
        if votes is None:
            return
        if now_ms - self._judged_ms < GATHER_MUTES_MS:
            # Judging walks over all votes, so not every report causes it.
            self._is_judged = not votes.has_votes
            return
        if votes.has_votes:
            self._judged_ms, self._is_judged = now_ms, True
        suspects = [one for one in votes.suspects(now_ms) if one not in self._table.mutes]
        active = self._active(now_ms) if suspects else []
        for partition in suspects:
            all_voted = votes.vote_count(partition) >= len(active) and not votes.missing_voters(
                partition, active
            )
            if all_voted or votes.is_voting_over(partition, now_ms):
                self._mute(partition, votes.describe(partition), now_ms)
                votes.forget(partition)
            elif votes.begin_voting(partition, now_ms):
                for peer in votes.missing_voters(partition, active):
                    self._asks.setdefault(peer, []).append(partition)

    def _on_mute(self, peer: int, mute: MuteReport, now_ms: float, *, doubtful: bool) -> None:
        """A task has muted a target; that is a reason to ask others, not a proof.

        A silent broker is muted for all tasks while another task asks it. If others had responses in the
        second half of the silence, the network of that one task is at fault, and the mute stays its own.
        """
        target = mute.target
        if isinstance(target, TopicPartition):
            self._on_partition_mute(peer, target, mute.reason, now_ms)
            return
        silence_ms = mute.silence_ms
        doubted = now_ms - self._doubted_ms.get((peer, target), -math.inf) < _DOUBT_MS
        since = now_ms - (max(HEALTHY_VALID_MS, silence_ms / 2) if doubtful or doubted else silence_ms / 2)
        answered = self._answered.get(target, {})
        if any(at > since for other, at in answered.items() if other != peer):
            return
        # Others get the next leases: they find out whether the broker is at fault or this task's network.
        self._peers[peer].leased_ms = now_ms
        asked = self._ask_another(peer, target, now_ms)
        if not silence_ms and asked:
            if not doubted and target not in self._table.mutes:
                self._claims.setdefault(target, _Claim(peer, mute.reason, now_ms + _ASK_MS))
            return
        if self._mute(target, mute.reason, now_ms, peer):
            # Messages take time, and a response before the silence must not look like one within it.
            self._origins[target] = _MuteOrigin(peer, now_ms - min(silence_ms, _REFUTED_SOON_MS) / 4)

    def _on_partition_mute(self, peer: int, target: TopicPartition, reason: str, now_ms: float) -> None:
        """A user's breaker class has muted a partition. Another task that holds a batch for it probes at
        once. If that succeeds, the first task is doubted for a minute."""
        if now_ms - self._doubted_ms.get((peer, target), -math.inf) < _DOUBT_MS:
            return
        if self._mute(target, reason, now_ms, peer):
            self._origins[target] = _MuteOrigin(peer, now_ms)
            if len(self._active(now_ms)) > 1:
                self._table.mutes[target].retry_at_ms = now_ms

    def _ask_another(self, peer: int, node: int, now_ms: float) -> bool:
        """Has another task send a broker a request without rows. False if there is no other task."""
        others = [other for other in self._active(now_ms) if other != peer]
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
                self._origins[node] = _MuteOrigin(claim.peer, now_ms)

    def _mute(self, target: Target, reason: str, now_ms: float, finder: int | None = None) -> bool:
        full = len(self._table.mutes) >= MAX_MUTES
        if full or not self._table.trip(target, reason, now_ms):
            return False
        self._added[target] = reason
        self._removed.discard(target)
        self._witnesses[target] = set() if finder is None else {finder}
        return True

    def _on_unmute(self, peer: int, target: Target, now_ms: float) -> None:
        """A task says that a mute is over. It knows if it caused the mute or had a lease; from any other
        task that is a reason to probe at once."""
        origin, mute = self._origins.get(target), self._table.mutes.get(target)
        if mute is None:
            self._claims.pop(target, None) if isinstance(target, int) else None
        elif peer in self._witnesses.get(target, ()):
            soon = now_ms - mute.since_ms < 2 * self._table.retry_interval_ms
            if isinstance(target, TopicPartition) and origin is not None and origin.peer != peer and soon:
                self._doubted_ms[origin.peer, target] = now_ms
            self._unmute(target)
        elif mute.state is BreakerState.OPEN:
            mute.retry_at_ms = now_ms

    def _unmute(self, target: Target) -> None:
        self._owners.pop(target, None)
        self._origins.pop(target, None)
        self._witnesses.pop(target, None)
        if self._table.reset(target):
            self._removed.add(target)
            self._added.pop(target, None)

    def _on_failure(self, peer: int, target: Target, error: str, now_ms: float) -> None:
        mute = self._table.mutes.get(target)
        # A task without the lease sent its batch before the mute, or without the coordinator.
        if mute is not None and self._owners.get(target) == peer:
            self._table.fail(target, error, now_ms)
            del self._owners[target]

    def _forget(self, now_ms: float) -> None:
        for target, mute in list(self._table.mutes.items()):
            # Brokers stay muted: their probes need no rows, so any task can do them.
            is_partition = isinstance(target, TopicPartition)
            if is_partition and now_ms - mute.since_ms > _FORGET_MS and not self._holders(target, now_ms):
                self._unmute(target)

    # -- probes -------------------------------------------------------------------------------------

    def _holders(self, target: Target, now_ms: float) -> list[int]:
        return [peer for peer in self._holders_of.get(target, ()) if self._is_active(peer, now_ms)]

    def _is_active(self, peer: int, now_ms: float) -> bool:
        return now_ms - self._peers[peer].reported_ms <= self._quiet_ms

    def _active(self, now_ms: float) -> list[int]:
        return [peer for peer in self._peers if self._is_active(peer, now_ms)]

    def _lease_all(self, now_ms: float) -> list[ServerMessage]:
        due = [target for target in self._table.mutes if self._table.is_due(target, now_ms)]
        if not due:
            return []
        # The task whose last lease is longest ago comes first. A task that gets a lease goes to the end.
        order = dict.fromkeys(sorted(self._active(now_ms), key=lambda peer: self._peers[peer].leased_ms))
        leases: dict[int, dict[Target, ProbeLease]] = {}
        for target in due:
            found = self._candidate(target, order, now_ms)
            if found is None:
                continue
            peer, trial = found
            self._table.probe(target, now_ms)
            self._owners[target] = peer
            self._witnesses.setdefault(target, set()).add(peer)
            self._peers[peer].leased_ms = now_ms
            del order[peer]
            order[peer] = None
            leases.setdefault(peer, {})[target] = ProbeLease(self._table.retry_interval_ms, trial)
        return [Push(peer, encode_update(BreakerUpdate(leases=granted))) for peer, granted in leases.items()]

    def _candidate(self, target: Target, order: Mapping[int, None], now_ms: float) -> tuple[int, bool] | None:
        """The first task in ``order`` that can probe a target, and whether new rows may go there for it.

        Any task can probe a broker, as that needs no row. A partition's probe needs a batch. A task that
        holds one goes first. If none does for another interval, a task whose rows could go there gets a
        trial.
        """
        if not isinstance(target, TopicPartition):
            first = next(iter(order), None)
            return None if first is None else (first, False)
        first = self._first(order, self._holders_of.get(target, set()))
        if first is not None:
            return first, False
        if now_ms < self._table.mutes[target].retry_at_ms + self._table.retry_interval_ms:
            return None
        first = self._first(order, self._wanters_of.get(target, set()))
        return None if first is None else (first, True)

    def _first(self, order: Mapping[int, None], able: set[int]) -> int | None:
        """The first of ``able`` in ``order``."""
        if len(able) > _MAX_COMPARED:
            return next((peer for peer in order if peer in able), None)
        active = [peer for peer in able if peer in order]
        return min(active, key=lambda peer: (self._peers[peer].leased_ms, peer), default=None)


def _index(
    index: dict[Target, set[int]], peer: int, before: frozenset[Target], now: frozenset[Target]
) -> None:
    """Moves a task in an index from the targets ``before`` to those ``now``."""
    for target in before - now:
        index[target].discard(peer)
        if not index[target]:
            del index[target]
    for target in now - before:
        index.setdefault(target, set()).add(peer)


def breaker_handler(options: SinkOptions, wake: Callable[[], None]) -> Handler:  # noqa: ARG001 - HandlerFactory's signature
    """The handler of one cluster, with the options of the default breaker class."""
    settings = options.breaker
    votes = None
    if settings.class_path == DEFAULT_CLASS:
        thresholds = failure_rate_settings(dict(settings.given))
        votes = PartitionVotes(thresholds.trigger_message_count, thresholds.trigger_failure_perc)
    return BreakerHandler(
        settings.mute_retry_interval_ms, votes, float(options.coordinator_report_interval_ms)
    )
