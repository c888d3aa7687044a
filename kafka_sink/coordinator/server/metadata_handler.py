"""The coordinator's side of metadata: what tasks ask and report, what they are told. Pure but for its view.

A message has any of ``ask`` (topics that a task needs and does not know), ``use`` (topics that it writes to),
``stale`` ([topic, milliseconds ago] that a broker denied) and ``leaders`` ([topic, topic id, partition,
leader, epoch] that a broker named when it denied). What a task says of a topic is a reason to ask the
brokers and told to nobody: one task that errs, or lies, must not mislead all others. A reply has topics with
ages and epochs, and ``errors`` of topics asked for. Of topics that must be fetched first, replies say every
100 ms that they are ``pending``; the last one to a message with ``ask`` has ``asked``. What brokers tell of a
task's topics after that, its age alone too, is pushed. ``waited``: all ages are so many milliseconds older.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kafka_sink.coordinator.server.handlers import Push, Reply, ServerMessage, SharedBody, with_facts
from kafka_sink.coordinator.wire.metadata_messages import (
    MAX_STALE,
    NamedLeader,
    age,
    encode_snapshot,
    named_leaders,
    names,
    text,
)
from kafka_sink.errors import ProtocolError
from kafka_sink.kafka_errors import LEADER_NOT_AVAILABLE, UNKNOWN_TOPIC_OR_PARTITION
from kafka_sink.metadata.snapshot import MetadataSnapshot
from kafka_sink.model import PartitionInfo, TopicMetadata, TopicPartition
from kafka_sink.timing_bounds import GIVE_UP_MS, PENDING_MS

_MAX_TOPICS_OF_A_TASK = 50_000
# Numbers of changes to keep, beyond twice those of topics in use, before they are sorted out.
_MAX_SPARE = 10_000
_MAX_PENDING = 64
# Different answers that are kept encoded, and for how long at most.
_MAX_ENCODED = 64
_ENCODED_MS = 10_000.0
# Leaders that tasks named and brokers have not confirmed, and the answers that refute one.
_MAX_CLAIMS = 10_000
_ANSWERS_THAT_REFUTE = 5
# Errors that asking again may mend: the topic is being created, or its leader elected.
_PASSING = frozenset({UNKNOWN_TOPIC_OR_PARTITION, LEADER_NOT_AVAILABLE})


class MetadataView(Protocol):
    """The part of ClusterMetadata that is used here."""

    def note_use(self, topics: Iterable[str], now_ms: float) -> None: ...
    def mark_stale(self, topic: str, now_ms: float) -> None: ...
    def leader(self, partition: TopicPartition) -> PartitionInfo | None: ...
    def snapshot(self, names: Iterable[str], now_ms: float) -> MetadataSnapshot: ...
    def topic(self, name: str) -> TopicMetadata | None: ...
    def topic_error(self, name: str) -> int | None: ...
    def forget(self, name: str) -> None: ...


@dataclass(slots=True)
class _Pending:
    """A question that waits for topics to be fetched."""

    peer: int
    request: int
    asked: list[str]
    missing: set[str]
    next_ms: float
    until_ms: float


@dataclass(slots=True)
class _MetadataTask:
    """A task: the topics it writes to, and the last change that it was told."""

    topics: frozenset[str] = frozenset()
    seen: int = 0
    pending: int = 0


@dataclass(slots=True)
class _Claim:
    """A leader epoch that a task says a broker named; ``answers_left`` without it refute it."""

    epoch: int
    answers_left: int = _ANSWERS_THAT_REFUTE


class MetadataHandler:
    """See Handler. ``view`` is refreshed by others, who say so with ``answered``.

    ``fetch`` wakes them. ``auto_create``: a missing topic may be about to exist.
    """

    def __init__(
        self, view: MetadataView, fetch: Callable[[], None], wake: Callable[[], None], *, auto_create: bool
    ) -> None:
        self._view = view
        self._fetch = fetch
        self._wake = wake
        self._passing = _PASSING if auto_create else _PASSING - {UNKNOWN_TOPIC_OR_PARTITION}
        self._peers: dict[int, _MetadataTask] = {}
        self._pending: list[_Pending] = []
        # The number of each topic's last change; of what was fetched again only the age is new.
        self._changes: dict[str, int] = {}
        self._change = 0
        # The topics of the last changes, from this number on.
        self._fresh: set[str] = set()
        self._fresh_after = 0
        self._tidy_at = _MAX_SPARE
        self._claims: dict[TopicPartition, _Claim] = {}
        # From the fetching thread: append and popleft of a deque are atomic.
        self._answered: deque[tuple[str, ...]] = deque()
        self._failure: str | None = None
        # Topics that somebody was just told not to exist.
        self._missing: set[str] = set()
        # Many tasks write to the same topics: one set of each, what changed of it, and what is told of it.
        self._sets: dict[frozenset[str], frozenset[str]] = {}
        self._changed_of: dict[tuple[int, frozenset[str]], frozenset[str]] = {}
        self._encoded: dict[frozenset[str], list[SharedBody]] = {}
        self._encoded_at: tuple[int, int] = (-1, -1)

    # -- the fetching thread ------------------------------------------------------------------------

    def answered(self, topics: tuple[str, ...]) -> None:
        """The view has new metadata, or errors, of these topics."""
        self._answered.append(topics)
        self._wake()

    def failed(self, reason: str | None) -> None:
        """Fetching is of no use at present (None: it is again)."""
        if reason != self._failure:
            self._failure = reason
            self._wake()

    # -- Handler ------------------------------------------------------------------------------------

    def on_message(
        self, peer: int, request: int, body: Mapping[str, Any], now_ms: float
    ) -> Sequence[ServerMessage]:
        """See Handler."""
        asked, used = names(body.get("ask", [])), names(body.get("use", []))
        stale, leaders = _stale(body.get("stale", [])), named_leaders(body.get("leaders", []))
        known = self._peers.setdefault(peer, _MetadataTask())
        self._note_answers(now_ms)
        self._tidy()
        self._note_topics(known, asked, used, now_ms)
        newer = [topic for topic, ago_ms in stale.items() if not self._mark(topic, ago_ms, now_ms)]
        missing = {name for name in asked if not self._is_answered(name)}
        if self._take_leaders(leaders, now_ms) or missing or len(newer) < len(stale):
            self._fetch()
        told = self._changed(known).union(asked, newer)
        if not missing or self._failure is not None or known.pending >= _MAX_PENDING:
            replies = self._tell(peer, request, told, asked, last=True, now_ms=now_ms)
            self._forget_missing()
            return replies
        known.pending += 1
        until_ms, next_ms = now_ms + GIVE_UP_MS, now_ms + PENDING_MS
        self._pending.append(_Pending(peer, request, asked, missing, next_ms, until_ms))
        return self._tell(peer, request, told, (), last=False, now_ms=now_ms)

    def _note_topics(self, peer: _MetadataTask, asked: list[str], used: list[str], now_ms: float) -> None:
        named = frozenset((*asked, *used))
        if not named:
            return
        if not named <= peer.topics:
            many = len(peer.topics) + len(named) > _MAX_TOPICS_OF_A_TASK
            # Told of again within a minute where they are still written to.
            topics = named if many else peer.topics | named
            peer.topics = self._sets.setdefault(topics, topics)
        self._view.note_use(named, now_ms)

    def _take_leaders(self, leaders: Iterable[NamedLeader], now_ms: float) -> bool:
        """Whether any is news that brokers are to be asked about."""
        news = False
        for one in leaders:
            known = self._view.leader(one.partition)
            topic = self._view.topic(one.partition.topic)
            if known is None or topic is None or one.epoch <= known.leader_epoch:
                continue
            other_topic = None not in (one.topic_id, topic.topic_id) and one.topic_id != topic.topic_id
            claim = self._claims.get(one.partition)
            if other_topic or (claim is None and len(self._claims) >= _MAX_CLAIMS):
                continue
            if claim is None or one.epoch > claim.epoch:
                self._claims[one.partition] = _Claim(one.epoch)
            self._view.mark_stale(one.partition.topic, now_ms)
            news = True
        return news

    def _check_claims(self, answered: Collection[str], now_ms: float) -> None:
        """The broker that was asked may lag behind the one that named a leader: others are asked, each time
        later, until one confirms it or enough have not."""
        again = False
        for partition, claim in list(self._claims.items()):
            if partition.topic not in answered:
                continue
            known = self._view.leader(partition)
            claim.answers_left -= 1
            if known is None or known.leader_epoch >= claim.epoch or not claim.answers_left:
                del self._claims[partition]
                continue
            self._view.mark_stale(partition.topic, now_ms)
            again = True
        if again:
            self._fetch()

    def on_disconnect(self, peer: int, now_ms: float) -> None:  # noqa: ARG002 - Handler's signature
        """See Handler."""
        self._peers.pop(peer, None)
        self._pending = [one for one in self._pending if one.peer != peer]

    def on_time(self, now_ms: float) -> Sequence[ServerMessage]:
        """See Handler."""
        self._note_answers(now_ms)
        replies: list[ServerMessage] = []
        waiting: list[_Pending] = []
        for one in self._pending:
            one.missing = {name for name in one.missing if not self._is_answered(name)}
            if not one.missing or now_ms >= one.until_ms or self._failure is not None:
                peer = self._peers[one.peer]
                peer.pending -= 1
                told = self._changed(peer).union(one.asked)
                replies += self._tell(one.peer, one.request, told, one.asked, last=True, now_ms=now_ms)
                continue
            if now_ms >= one.next_ms:
                one.next_ms = now_ms + PENDING_MS
                replies.append(Reply(one.peer, one.request, {"pending": len(one.missing)}, last=False))
            waiting.append(one)
        self._pending = waiting
        self._forget_missing()
        return replies + self._pushes(now_ms)

    def _pushes(self, now_ms: float) -> list[ServerMessage]:
        """What changed, to tasks that do not wait for an answer, which will tell them."""
        pushes: list[ServerMessage] = []
        for number, peer in self._peers.items():
            if peer.pending or peer.seen == self._change:
                continue
            changed = self._changed(peer)
            peer.seen = self._change
            if changed:
                pushes += [Push(number, body) for body in self._bodies(changed, {}, now_ms)]
        return pushes

    def _bodies(
        self, topics: Iterable[str], facts: Mapping[str, Any], now_ms: float
    ) -> list[Mapping[str, Any]]:
        """Bodies with these topics and facts. What stands in them of topics is encoded once for all that are
        told the same, until something changes; ``waited`` is how much older it is by now."""
        told = topics if isinstance(topics, frozenset) else frozenset(topics)
        # Of a change that was not noted yet the view knows already.
        state = (self._change, len(self._answered))
        if self._encoded_at != state or len(self._encoded) >= _MAX_ENCODED:
            self._encoded.clear()
            self._encoded_at = state
        shared = self._encoded.get(told)
        if shared is None or now_ms - shared[0].made_ms > _ENCODED_MS:
            snapshot = self._view.snapshot(told, now_ms)
            shared = self._encoded[told] = [SharedBody(one, now_ms) for one in encode_snapshot(snapshot)]
        return [with_facts({**facts, "waited": max(0.0, now_ms - one.made_ms)}, one) for one in shared]

    def next_change_ms(self, now_ms: float) -> float:
        """See Handler."""
        return max(0.0, min((one.next_ms for one in self._pending), default=math.inf) - now_ms)

    def close(self) -> None:
        """See Handler."""

    # -- what is told -------------------------------------------------------------------------------

    def _note_answers(self, now_ms: float) -> None:
        if self._answered:
            self._fresh, self._fresh_after = set(), self._change
            self._changed_of.clear()
        while self._answered:
            self._change += 1
            topics = self._answered.popleft()
            self._fresh.update(topics)
            self._changes.update(dict.fromkeys(topics, self._change))
            if self._claims:
                self._check_claims(frozenset(topics), now_ms)

    def _forget_missing(self) -> None:
        """Brokers are not asked again and again for what nobody waits for; the next who asks has it asked
        for anew, as it may have been created by then. While brokers cannot be reached it is what shows
        that they are back."""
        if self._missing and self._failure is None:
            for name in self._missing.difference(*(one.missing for one in self._pending)):
                self._view.forget(name)
            self._missing.clear()

    def _tidy(self) -> None:
        if len(self._changes) > self._tidy_at:
            used = set().union(*(one.topics for one in self._peers.values()))
            self._changes = {name: change for name, change in self._changes.items() if name in used}
            self._claims = {where: claim for where, claim in self._claims.items() if where.topic in used}
            self._tidy_at = 2 * len(self._changes) + _MAX_SPARE
        if len(self._sets) > 2 * len(self._peers) + _MAX_ENCODED:
            self._sets = {one.topics: one.topics for one in self._peers.values()}

    def _changed(self, peer: _MetadataTask) -> frozenset[str]:
        if peer.seen == self._change:
            return frozenset()
        # A set hashes its names once, and knows then what it hashes to.
        key = (peer.seen, peer.topics)
        changed = self._changed_of.get(key)
        if changed is None:
            if peer.seen >= self._fresh_after:
                changed = peer.topics & self._fresh
            else:
                changed = frozenset(one for one in peer.topics if self._changes.get(one, 0) > peer.seen)
            changed = self._changed_of[key] = self._sets.get(changed, changed)
        return changed

    def _is_answered(self, name: str) -> bool:
        """Whether there is metadata, or an error that waiting does not mend."""
        if self._view.topic(name) is not None:
            return True
        error = self._view.topic_error(name)
        return error is not None and error not in self._passing

    def _mark(self, topic: str, ago_ms: float, now_ms: float) -> bool:
        """False where the metadata is younger than what the task had: that is news for the task."""
        found = self._view.snapshot((topic,), now_ms).topics
        if found and found[0].age_ms < ago_ms:
            return False
        self._view.mark_stale(topic, now_ms)
        return True

    def _tell(
        self,
        peer: int,
        request: int,
        topics: Iterable[str],
        asked: Iterable[str],
        *,
        last: bool,
        now_ms: float,
    ) -> list[Reply]:
        """``asked``: topics whose errors are told."""
        errors = {name: self._view.topic_error(name) for name in asked}
        self._missing.update(name for name in errors if self._view.topic(name) is None)
        facts = {
            "pending": 0 if last else 1,
            "errors": {name: error for name, error in errors.items() if error},
            "asked": bool(errors),
            "failure": self._failure,
        }
        self._peers[peer].seen = self._change
        bodies = self._bodies(topics, facts, now_ms)
        return [Reply(peer, request, body, last and body is bodies[-1]) for body in bodies]


def _stale(value: Any) -> dict[str, float]:
    if not isinstance(value, list) or len(value) > MAX_STALE:
        raise ProtocolError("a list of stale topics that is none, or too long")
    try:
        return {text(topic): age(ago_ms) for topic, ago_ms in value}
    except (TypeError, ValueError):
        raise ProtocolError("a list of stale topics that is none") from None
