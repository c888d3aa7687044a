"""The coordinator's side of metadata: requests and reports of tasks, and the responses. Pure except its view.

A message of a task has any of these keys:

    ask      topics whose metadata the task needs
    use      topics that the task writes to
    stale    [topic, milliseconds since], of topics whose metadata proved wrong at a broker
    leaders  [topic, topic id, partition, leader, epoch], as a broker named it in such an error

A report makes the coordinator ask the brokers. It never passes a report on to other tasks, so that a faulty
task cannot mislead them.

A reply has topics with ages and epochs, and ``errors`` of topics in ``ask``. While topics are being fetched,
a reply every 100 ms counts those ``pending``. The last reply to a message with ``ask`` has ``asked``. From
then on the coordinator pushes each new response of the brokers about the task's topics, even if only the age
has changed. ``waited``: milliseconds to add to all ages.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kafka_sink.coordinator.metadata.messages import (
    NamedLeader,
    encode_snapshot,
    leaders_in,
    stale_in,
    topics_in,
)
from kafka_sink.coordinator.transport.handlers import (
    Handler,
    Push,
    Reply,
    ServerMessage,
    SharedBody,
    TaskId,
    with_facts,
)
from kafka_sink.kafka_errors import LEADER_NOT_AVAILABLE, UNKNOWN_TOPIC_OR_PARTITION
from kafka_sink.metadata.topic_state import MetadataSnapshot
from kafka_sink.model import PartitionInfo, TopicMetadata, TopicPartition
from kafka_sink.timing_bounds import GIVE_UP_MS, PENDING_MS

_MAX_TOPICS_OF_A_TASK = 50_000
# Topics whose last change is kept, beyond twice those in use, before unused ones are removed.
_MAX_SPARE = 10_000
_MAX_PENDING = 64
# Encoded responses that are cached, and how long each is used at most.
_MAX_ENCODED = 64
_ENCODED_MS = 10_000.0
# The use of the same topics is noted at most this often.
_NOTE_USE_MS = 1000.0
# Leaders that tasks reported and brokers have not confirmed, and the responses that refute one.
_MAX_REPORTED = 10_000
_REFUTING_RESPONSES = 5
# Errors that pass: the topic is being created, or its leader is being elected.
_TRANSIENT_ERRORS = frozenset({UNKNOWN_TOPIC_OR_PARTITION, LEADER_NOT_AVAILABLE})


class MetadataView(Protocol):
    """The part of ClusterMetadata that the handler uses."""

    def note_use(self, topics: Iterable[str], now_ms: float) -> None: ...
    def mark_stale(self, topic: str, now_ms: float) -> None: ...
    def leader(self, partition: TopicPartition) -> PartitionInfo | None: ...
    def snapshot(self, now_ms: float, names: Iterable[str] | None = None) -> MetadataSnapshot: ...
    def topic(self, name: str) -> TopicMetadata | None: ...
    def topic_error(self, name: str) -> int | None: ...
    def forget(self, name: str) -> None: ...


@dataclass(slots=True)
class Lookups:
    """Of the coordinator: Metadata responses that it got from brokers, and requests of tasks."""

    made: int = 0
    asked: int = 0

    @property
    def avoided(self) -> int:
        """A task that asks the coordinator would otherwise ask a broker."""
        return max(0, self.asked - self.made)


@dataclass(slots=True)
class _Pending:
    """A request that waits until its topics have been fetched. Hundreds share
    these sets."""

    task: TaskId
    request: int
    asked: frozenset[str]
    missing: frozenset[str]
    next_ms: float
    until_ms: float


@dataclass(frozen=True, slots=True)
class _TopicsView:
    """Of the topics of a request: those that may still get metadata, those without, and their errors."""

    unsettled: frozenset[str]
    without_metadata: frozenset[str]
    errors: Mapping[str, int]


@dataclass(slots=True)
class _MetadataTask:
    """A task: its topics, the number of the last change sent to it, and its count of pending requests."""

    topics: frozenset[str] = frozenset()
    seen: int = 0
    pending: int = 0


@dataclass(slots=True)
class _ReportedLeader:
    """A leader epoch that a task reported. ``responses_left`` more responses without it refute it."""

    epoch: int
    responses_left: int = _REFUTING_RESPONSES


class MetadataHandler(Handler):
    """The fetching thread refreshes ``view`` and then calls ``on_response``; ``fetch`` wakes it.

    ``auto_create``: brokers may create a missing topic, so its error is transient.
    """

    def __init__(
        self,
        view: MetadataView,
        fetch: Callable[[], None],
        wake: Callable[[], None],
        *,
        auto_create: bool,
        lookups: Lookups | None = None,
    ) -> None:
        self._lookups = Lookups() if lookups is None else lookups
        self._view = view
        self._fetch = fetch
        self._wake = wake
        self._transient = _TRANSIENT_ERRORS - (set() if auto_create else {UNKNOWN_TOPIC_OR_PARTITION})
        self._tasks: dict[TaskId, _MetadataTask] = {}
        self._pending: list[_Pending] = []
        # When one of them must be looked at. Thousands may wait, and each message asks.
        self._next_ms = math.inf
        # The number of each topic's last change. A response that changes only the age counts as well.
        self._changes: dict[str, int] = {}
        self._change = 0
        # The last change that has been pushed.
        self._pushed_at = 0
        # The topics that have changed since change number ``_fresh_after``.
        self._fresh: set[str] = set()
        self._fresh_after = 0
        self._tidy_at = _MAX_SPARE
        self._reported: dict[TopicPartition, _ReportedLeader] = {}
        # Filled by the fetching thread: append and popleft of a deque are atomic.
        self._responses: deque[tuple[str, ...]] = deque()
        self._failure: str | None = None
        # Topics without metadata in the replies just made.
        self._missing: set[str] = set()
        # Many tasks write to the same topics. They share the names, changes and encoded response.
        self._sets: dict[frozenset[str], frozenset[str]] = {}
        self._changed_of: dict[tuple[int, frozenset[str]], frozenset[str]] = {}
        self._encoded: dict[frozenset[str], list[SharedBody]] = {}
        self._encoded_at: tuple[int, int] = (-1, -1)
        self._views: dict[frozenset[str], _TopicsView] = {}
        self._views_at: tuple[int, int] = (-1, -1)
        # When the use of a set of topics was noted last.
        self._noted_ms: dict[frozenset[str], float] = {}

    # -- the fetching thread ------------------------------------------------------------------------

    def on_response(self, topics: tuple[str, ...]) -> None:
        """The view has new metadata or errors of these topics."""
        self._lookups.made += 1
        self._responses.append(topics)
        self._wake()

    def failed(self, reason: str | None) -> None:
        """Fetching fails for this reason; None: it works again."""
        if reason != self._failure:
            self._failure = reason
            self._wake()

    # -- Handler ------------------------------------------------------------------------------------

    def on_message(
        self, task: TaskId, request: int, body: Mapping[str, Any], now_ms: float
    ) -> Sequence[ServerMessage]:
        named = frozenset(topics_in(body, "ask"))
        asked, used = self._sets.setdefault(named, named), topics_in(body, "use")
        stale, leaders = stale_in(body), leaders_in(body)
        known = self._tasks.setdefault(task, _MetadataTask())
        self._lookups.asked += bool(asked)
        self._note_responses(now_ms)
        self._tidy()
        self._note_topics(known, asked, used, now_ms)
        newer = [topic for topic, ago_ms in stale.items() if not self._mark(topic, ago_ms, now_ms)]
        missing = self._view_of(asked).unsettled
        if self._take_leaders(leaders, now_ms) or missing or len(newer) < len(stale):
            self._fetch()
        topics = self._changed(known).union(asked, newer)
        if not missing or self._failure is not None or known.pending >= _MAX_PENDING:
            replies = self._replies(task, request, topics, asked, last=True, now_ms=now_ms)
            self._forget_missing()
            return replies
        known.pending += 1
        until_ms, next_ms = now_ms + GIVE_UP_MS, now_ms + PENDING_MS
        self._pending.append(_Pending(task, request, asked, missing, next_ms, until_ms))
        self._next_ms = min(self._next_ms, next_ms)
        return self._replies(task, request, topics, (), last=False, now_ms=now_ms)

    def _note_topics(
        self, task: _MetadataTask, asked: frozenset[str], used: list[str], now_ms: float
    ) -> None:
        named = asked.union(used)
        if not named:
            return
        if not named <= task.topics:
            many = len(task.topics) + len(named) > _MAX_TOPICS_OF_A_TASK
            # The task reports those still in use again within a minute.
            topics = named if many else task.topics | named
            task.topics = self._sets.setdefault(topics, topics)
        if now_ms - self._noted_ms.get(named, -math.inf) >= _NOTE_USE_MS:
            if len(self._noted_ms) >= _MAX_ENCODED:
                self._noted_ms.clear()
            self._noted_ms[named] = now_ms
            self._view.note_use(named, now_ms)
            # It forgets metadata that nobody has used for long.
            self._views.clear()

    def _view_of(self, asked: Iterable[str]) -> _TopicsView:
        """What the view knows of these topics. Many tasks ask for the same thousands of topics at once."""
        key = asked if isinstance(asked, frozenset) else frozenset(asked)
        # The view may contain a change that ``_note_responses`` has not counted yet.
        state = (self._change, len(self._responses))
        if self._views_at != state or len(self._views) >= _MAX_ENCODED:
            self._views.clear()
            self._views_at = state
        found = self._views.get(key)
        if found is None:
            without = frozenset(name for name in key if self._view.topic(name) is None)
            errors = {name: error for name in key if (error := self._view.topic_error(name))}
            unsettled = frozenset(one for one in without if errors.get(one) in (None, *self._transient))
            found = self._views[key] = _TopicsView(unsettled, without, errors)
        return found

    def _take_leaders(self, leaders: Iterable[NamedLeader], now_ms: float) -> bool:
        """Record reported leaders. Returns whether any is new, so that brokers must be asked."""
        any_new = False
        for one in leaders:
            known = self._view.leader(one.partition)
            topic = self._view.topic(one.partition.topic)
            if known is None or topic is None or one.epoch <= known.leader_epoch:
                continue
            other_topic = None not in (one.topic_id, topic.topic_id) and one.topic_id != topic.topic_id
            reported = self._reported.get(one.partition)
            if other_topic or (reported is None and len(self._reported) >= _MAX_REPORTED):
                continue
            if reported is None or one.epoch > reported.epoch:
                self._reported[one.partition] = _ReportedLeader(one.epoch)
            self._view.mark_stale(one.partition.topic, now_ms)
            any_new = True
        return any_new

    def _check_reported(self, responded: Collection[str], now_ms: float) -> None:
        """Fetch again until a response confirms a reported leader, or enough responses have not.

        The broker that responded may lag behind the broker that named the leader. Each retry waits longer.
        """
        again = False
        for partition, reported in list(self._reported.items()):
            if partition.topic not in responded:
                continue
            known = self._view.leader(partition)
            reported.responses_left -= 1
            if known is None or known.leader_epoch >= reported.epoch or not reported.responses_left:
                del self._reported[partition]
                continue
            self._view.mark_stale(partition.topic, now_ms)
            again = True
        if again:
            self._fetch()

    def on_disconnect(self, task: TaskId, now_ms: float) -> None:
        # Its requests go when they are looked at next: thousands may leave at once.
        self._tasks.pop(task, None)

    def on_time(self, now_ms: float) -> Sequence[ServerMessage]:
        self._note_responses(now_ms)
        replies: list[ServerMessage] = []
        waiting: list[_Pending] = []
        for one in self._pending:
            if one.task not in self._tasks:
                continue
            unsettled = self._view_of(one.asked).unsettled
            one.missing = unsettled if unsettled <= one.missing else one.missing & unsettled
            if not one.missing or now_ms >= one.until_ms or self._failure is not None:
                task = self._tasks[one.task]
                task.pending -= 1
                topics = self._changed(task).union(one.asked)
                replies += self._replies(one.task, one.request, topics, one.asked, last=True, now_ms=now_ms)
                continue
            if now_ms >= one.next_ms:
                one.next_ms = now_ms + PENDING_MS
                replies.append(Reply(one.task, one.request, {"pending": len(one.missing)}, last=False))
            waiting.append(one)
        self._pending = waiting
        self._next_ms = min((one.next_ms for one in waiting), default=math.inf)
        self._forget_missing()
        return replies + self._pushes(now_ms)

    def _pushes(self, now_ms: float) -> list[ServerMessage]:
        """Changes for tasks without a pending request. For others, its reply will contain them."""
        pushes: list[ServerMessage] = []
        if self._pushed_at == self._change:
            return pushes
        self._pushed_at = self._change
        for number, task in self._tasks.items():
            if task.pending or task.seen == self._change:
                continue
            changed = self._changed(task)
            task.seen = self._change
            if changed:
                pushes += [Push(number, body) for body in self._bodies(changed, {}, now_ms)]
        return pushes

    def _bodies(
        self, topics: Iterable[str], facts: Mapping[str, Any], now_ms: float
    ) -> list[Mapping[str, Any]]:
        """Bodies with these topics and facts. Tasks with the same topics share one encoding of
        the metadata, until it changes. ``waited`` is the time since then, in milliseconds."""
        topics = topics if isinstance(topics, frozenset) else frozenset(topics)
        # The view may contain a change that ``_note_responses`` has not counted yet.
        state = (self._change, len(self._responses))
        if self._encoded_at != state or len(self._encoded) >= _MAX_ENCODED:
            self._encoded.clear()
            self._encoded_at = state
        shared = self._encoded.get(topics)
        if shared is None or now_ms - shared[0].made_ms > _ENCODED_MS:
            snapshot = self._view.snapshot(now_ms, topics)
            shared = self._encoded[topics] = [SharedBody(one, now_ms) for one in encode_snapshot(snapshot)]
        return [with_facts({**facts, "waited": max(0.0, now_ms - one.made_ms)}, one) for one in shared]

    def next_change_ms(self, now_ms: float) -> float:
        return max(0.0, self._next_ms - now_ms)

    # -- responses ----------------------------------------------------------------------------------

    def _note_responses(self, now_ms: float) -> None:
        if self._responses:
            self._fresh, self._fresh_after = set(), self._change
            self._changed_of.clear()
        while self._responses:
            self._change += 1
            topics = self._responses.popleft()
            self._fresh.update(topics)
            self._changes.update(dict.fromkeys(topics, self._change))
            if self._reported:
                self._check_reported(frozenset(topics), now_ms)

    def _forget_missing(self) -> None:
        """Drop missing topics that no request waits for, so that brokers are not asked for them repeatedly.

        The next request fetches them again, because they may have been created by then. While brokers cannot
        be reached, the topics stay: fetching them shows when brokers are back.
        """
        if self._missing and self._failure is None:
            waiting = (one.missing for one in self._pending if one.task in self._tasks)
            for name in self._missing.difference(*waiting):
                self._view.forget(name)
            self._missing.clear()
            self._views.clear()

    def _tidy(self) -> None:
        if len(self._changes) > self._tidy_at:
            used = set().union(*(one.topics for one in self._tasks.values()))
            self._changes = {name: change for name, change in self._changes.items() if name in used}
            self._reported = {
                where: reported for where, reported in self._reported.items() if where.topic in used
            }
            self._tidy_at = 2 * len(self._changes) + _MAX_SPARE
        if len(self._sets) > 2 * len(self._tasks) + _MAX_ENCODED:
            self._sets = {one.topics: one.topics for one in self._tasks.values()}

    def _changed(self, task: _MetadataTask) -> frozenset[str]:
        if task.seen == self._change:
            return frozenset()
        # A frozenset caches its hash, so equal topics are hashed once.
        key = (task.seen, task.topics)
        changed = self._changed_of.get(key)
        if changed is None:
            if task.seen >= self._fresh_after:
                changed = task.topics & self._fresh
            else:
                changed = frozenset(one for one in task.topics if self._changes.get(one, 0) > task.seen)
            changed = self._changed_of[key] = self._sets.get(changed, changed)
        return changed

    def _mark(self, topic: str, ago_ms: float, now_ms: float) -> bool:
        """Mark a topic stale. Returns False if the metadata is newer than the task's."""
        found = self._view.snapshot(now_ms, (topic,)).topics
        if found and found[0].age_ms < ago_ms:
            return False
        self._view.mark_stale(topic, now_ms)
        return True

    def _replies(
        self,
        task: TaskId,
        request: int,
        topics: Iterable[str],
        asked: Collection[str],
        *,
        last: bool,
        now_ms: float,
    ) -> list[Reply]:
        """``asked``: topics whose errors are included."""
        found = self._view_of(asked)
        self._missing |= found.without_metadata
        facts = {
            "pending": 0 if last else 1,
            "errors": found.errors,
            "asked": bool(asked),
            "failure": self._failure,
        }
        self._tasks[task].seen = self._change
        bodies = self._bodies(topics, facts, now_ms)
        return [Reply(task, request, body, last and body is bodies[-1]) for body in bodies]
