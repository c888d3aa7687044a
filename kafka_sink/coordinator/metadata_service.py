"""The coordinator's side of shared metadata (KIP-526). No I/O.

The coordinator has no connection to a broker. It runs the same ClusterMetadata as a task. When that is due to
send a request, the coordinator instead asks a task to fetch the topics: the one that it asked longest ago. If
this task is silent for a second or leaves, it asks another task at once. If the request failed, it asks
another task after the backoff. It pushes each response, even an unchanged one, to all tasks with its topics.

A task's report that a leader moved is not passed on. It marks the topic as stale, until a fetch confirms it.
A fetched response is passed on as the brokers sent it. If it contradicts the known metadata, or goes far
beyond it, a second fetch by another task decides. So a task misleads others until the next refresh at most.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from kafka_sink.clock import FETCH_SILENCE_MS, RANDOM
from kafka_sink.cluster.metadata import ClusterMetadata
from kafka_sink.cluster.refresh import NON_URGENT_SHARE
from kafka_sink.coordinator.metadata import (
    MAX_TOPICS,
    Fetch,
    Topics,
    TopicsFetched,
    TopicsWanted,
    parts_of,
    snapshot_of,
    use_interval_ms,
)
from kafka_sink.coordinator.schema import MemoryBudget, Outbox, Service, ServiceScope, receives
from kafka_sink.kafka_errors import LEADER_NOT_AVAILABLE, UNKNOWN_TOPIC_OR_PARTITION
from kafka_sink.model import UNKNOWN_EPOCH, MetadataUpdate, TopicMetadata
from kafka_sink.options import SinkOptions

# The coordinator refreshes a topic before tasks consider it expired, and early enough to push the response.
# Topics become non-urgent at half of metadata.max.age.ms (KIP-526). Tasks leave those to the coordinator.
_SHARE_OF_AGE = 0.9
_MAX_TOPICS_OF_A_TASK, _MAX_CONTRADICTED = 50_000, 1000
# How many tasks may be silent or leave before the fetch counts as failed.
_MAX_ASKED = 3
# How long an answer waits for each topic, because other tasks may want the same: encoding 2,000 takes 10 ms.
_GATHER_MS = 0.05
# The number of topics encoded in one ``on_time``. A set of topics costs as much as a few topics.
_TOPICS_AT_ONCE, _COST_OF_SET = 2_500, 5
# Estimates of the bytes that a topic, a name in a set, and a broker take.
_TOPIC_BYTES, _NAME_BYTES, _NODE_BYTES = 1200, 105, 500
_MEASURE_MS = 1000.0


def coordinator_idle_ms(idle_ms: float) -> float:
    """How long a topic may stay unreported before it is idle.

    A use just after a report is reported one interval later, or two if it waits for other topics' reports.
    """
    return idle_ms + 2 * use_interval_ms(idle_ms)


@dataclass(eq=False, slots=True)
class _Users:
    """The tasks that use exactly these topics. Often many do, and one encoded message serves them all."""

    topics: frozenset[str]
    peers: dict[int, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Fetch:
    """A request of the cache, the message that asks for it, and the tasks that may still answer."""

    requested: tuple[str, ...]
    message: Fetch
    asked: set[int] = field(default_factory=set)
    turns: int = 0
    silent_at_ms: float = math.inf


class MetadataService(Service):
    """Shares metadata between the tasks of one group. ``budget`` is shared by all groups."""

    scope = ServiceScope.GROUP

    def __init__(
        self,
        options: SinkOptions,
        out: Outbox,
        budget: MemoryBudget | None = None,
        random: Callable[[], float] = RANDOM.random,
    ) -> None:
        super().__init__(out)
        self._budget = MemoryBudget() if budget is None else budget
        self._cost, self._measured_ms = 0, -math.inf
        own = replace(
            options,
            metadata_max_age_ms=int(options.metadata_max_age_ms * _SHARE_OF_AGE),
            metadata_max_idle_ms=int(coordinator_idle_ms(options.metadata_max_idle_ms)),
        )
        share = NON_URGENT_SHARE / _SHARE_OF_AGE
        self.cache = ClusterMetadata(own, random=random, non_urgent_share=share)
        # Errors that pass, because a leader is being elected or the topic is being created.
        self._transient = {LEADER_NOT_AVAILABLE}
        if options.allow_auto_create_topics:
            self._transient.add(UNKNOWN_TOPIC_OR_PARTITION)
        # The tasks. The one that was asked to fetch longest ago comes first.
        self._tasks: OrderedDict[int, None] = OrderedDict()
        # The users of sets of topics, by task and by set.
        self._users_with: dict[int, _Users] = {}
        self._users: dict[frozenset[str], _Users] = {}
        self._fetch: _Fetch | None = None
        self._number = 0
        # Whether tasks have been asked to keep waiting since the last response.
        self._is_pending_sent = False
        # Topics whose last response contradicted the known metadata. None stands for the cluster's id.
        self._contradicted: set[str | None] = set()
        # Topics that have changed, and the users that have not been sent the changes.
        self._fresh: set[str] = set()
        self._outdated: OrderedDict[_Users, None] = OrderedDict()
        # Sets of known topics with the tasks that need them, and when to send the first set.
        self._answers: OrderedDict[frozenset[str], dict[int, None]] = OrderedDict()
        self._answers_due_ms = math.inf

    def on_joined(self, peer: int, now_ms: float) -> None:
        self._tasks[peer] = None

    def on_gone(self, peer: int, now_ms: float) -> None:
        self._tasks.pop(peer, None)
        self._leave(peer)
        self._give_up(peer, now_ms)

    def close(self) -> None:
        self._count(-self._cost)

    @receives(TopicsWanted)
    def on_topics_wanted(self, peer: int, message: TopicsWanted, now_ms: float) -> None:
        self._record_use(peer, message.topics, now_ms)
        wanted = {name: age_ms for name, age_ms in message.topics.items() if age_ms is not None}
        known = {topic.metadata.name: topic.age_ms for topic in self.cache.snapshot(now_ms, wanted).topics}
        fresh = frozenset(name for name, age_ms in known.items() if age_ms < wanted[name])
        for name in known.keys() - fresh:
            self.cache.mark_stale(name, now_ms)
        if fresh:
            self._answers.setdefault(fresh, {})[peer] = None
            self._answers_due_ms = min(self._answers_due_ms, now_ms + _GATHER_MS * (len(fresh) - 1))
        self._fetch_due(now_ms)

    def _record_use(self, peer: int, topics: Collection[str], now_ms: float) -> None:
        """Record the use of topics. If there is no capacity, unknown topics are left to the task."""
        # Interned, so that all tasks share one string for each name.
        names = frozenset(map(sys.intern, topics))
        unknown = frozenset(name for name in names if self.cache.topic(name) is None)
        if self._may_keep(_TOPIC_BYTES * len(unknown), now_ms):
            self._use(peer, names)
        elif unknown:
            names -= unknown
            self.out.send(peer, Topics())
        self.cache.on_use(names, now_ms)

    def _use(self, peer: int, names: frozenset[str]) -> None:
        """Record that the task uses these topics, besides those that it has reported before."""
        before = self._users_with.get(peer)
        topics = names
        if before is not None:
            if names <= before.topics:
                return
            if len(before.topics) + len(names) <= _MAX_TOPICS_OF_A_TASK:
                topics = before.topics | names
            # Otherwise the older topics are dropped. The task reports those in use within a minute.
        is_outdated = before in self._outdated
        self._leave(peer)
        if topics not in self._users:
            self._users[topics] = _Users(topics)
            self._count(_NAME_BYTES * len(topics))
        users = self._users_with[peer] = self._users[topics]
        users.peers[peer] = None
        if is_outdated:
            self._outdated[users] = None

    def _leave(self, peer: int) -> None:
        users = self._users_with.pop(peer, None)
        if users is not None:
            del users.peers[peer]
            if not users.peers:
                del self._users[users.topics]
                self._outdated.pop(users, None)

    def _may_keep(self, more: int, now_ms: float) -> bool:
        """Whether there is capacity for this many more bytes. If so, they are counted."""
        if self._budget.is_full:
            self._measure(now_ms)
        if self._budget.is_full:
            return False
        self._count(more)
        return True

    def _count(self, more: int) -> None:
        self._cost += more
        self._budget.used += more

    def _measure(self, now_ms: float) -> None:
        """Correct the count. New entries count at once, but removed ones only at the next measurement."""
        if now_ms - self._measured_ms >= _MEASURE_MS:
            self._measured_ms = now_ms
            topics, partitions = self.cache.sizes()
            names, nodes = sum(map(len, self._users)), len(self.cache.nodes())
            cost = _TOPIC_BYTES * topics + 8 * partitions + _NODE_BYTES * nodes + _NAME_BYTES * names
            self._count(cost - self._cost)

    def _fetch_due(self, now_ms: float) -> None:
        """Ask a task for the topics that are due."""
        topics = self.cache.next_request(now_ms) if self._fetch is None and self._tasks else None
        if topics is not None:
            self._number += 1
            # The cache requests again the topics that do not fit into one message.
            self._fetch = _Fetch(topics, Fetch(self._number, topics[:MAX_TOPICS]))
            self._ask_another(self._fetch, now_ms)

    def _ask_another(self, fetch: _Fetch, now_ms: float) -> None:
        peer = next((task for task in self._tasks if task not in fetch.asked), None)
        fetch.turns += 1
        fetch.silent_at_ms = now_ms + FETCH_SILENCE_MS
        if fetch.turns > _MAX_ASKED or (peer is None and not fetch.asked):
            # No task that we asked could reach a broker.
            self._fetch = None
            self.cache.on_failure(now_ms)
            self._forget_unknown(fetch.requested)
        elif peer is not None:
            self._tasks.move_to_end(peer)
            if fetch.turns > 1:
                self._send_pending()
            fetch.asked.add(peer)
            self.out.send(peer, fetch.message)

    def _send_pending(self) -> None:
        """Ask tasks to keep waiting.

        Once is enough: another task may reach brokers that one task cannot reach, but hardly a third.
        """
        if not self._is_pending_sent:
            self._is_pending_sent = True
            self.out.broadcast(list(self._tasks), Topics(pending=True))

    def _give_up(self, peer: int, now_ms: float) -> None:
        """The task has left, and will not answer."""
        fetch = self._fetch
        if fetch is not None and peer in fetch.asked:
            fetch.asked.discard(peer)
            if not fetch.asked:
                self._ask_another(fetch, now_ms)

    @receives(TopicsFetched)
    def on_topics_fetched(self, peer: int, message: TopicsFetched, now_ms: float) -> None:
        fetch = self._fetch
        if fetch is None or peer not in fetch.asked or message.number != fetch.message.number:
            return
        if message.failed:
            fetch.asked.discard(peer)
            if not fetch.asked:
                # The next task is asked after the backoff (KIP-526).
                self._fetch = None
                self.cache.on_failure(now_ms)
                self._send_pending()
            return
        self._is_pending_sent = False
        response = snapshot_of(message.part)
        self._fetch = None
        if self._doubts(None, self.cache.is_other_cluster(response.cluster_id)):
            self.cache.on_failure(now_ms)
            return
        asked = fetch.message.topics
        received = {topic.metadata.name: topic.metadata for topic in response.topics}
        known = (received[name] for name in asked if name in received)
        topics = tuple(topic for topic in known if self._believes(topic, now_ms))
        errors = {name: message.errors[name] for name in asked if name in message.errors}
        more = len(response.nodes) - len(self.cache.nodes())
        nodes = response.nodes if more <= 0 or self._may_keep(_NODE_BYTES * more, now_ms) else ()
        update = MetadataUpdate(nodes, topics, errors, response.cluster_id)
        self.cache.on_response(update, fetch.requested, now_ms)
        self._forget_unknown(name for name, code in errors.items() if code not in self._transient)
        # The response is sent to all tasks that use the topics.
        self._fresh.update(name for name in fetch.requested if self.cache.topic(name) is not None)
        self._outdated.update(dict.fromkeys(self._users.values()))
        left = set(fetch.requested) - received.keys() - errors.keys()
        if received and left:
            # The message did not have room for these topics. They are fetched next, and tasks wait for them.
            self.cache.on_use(left, now_ms)
            self.out.broadcast(list(self._tasks), Topics(pending=True))
        self._measure(now_ms)
        self._fetch_due(now_ms)

    def _forget_unknown(self, topics: Iterable[str]) -> None:
        """Forget unknown topics. If a task asks again, brokers are asked again: a topic may exist by then."""
        for name in topics:
            if self.cache.topic(name) is None:
                self.cache.forget(name)

    def _believes(self, topic: TopicMetadata, now_ms: float) -> bool:
        """Whether to use a response. Otherwise the topic stays urgent, or is forgotten without capacity."""
        known = self.cache.topic(topic.name)
        more = len(topic.partitions) - (0 if known is None else len(known.partitions))
        if more > 0 and not self._may_keep(8 * more, now_ms):
            if known is None:
                self.cache.forget(topic.name)
            return False
        is_contradicted = known is not None and contradicts(known, topic)
        if self._doubts(topic.name, is_contradicted):
            return False
        if is_contradicted:
            # The second such response in a row replaces the known metadata.
            self.cache.forget(topic.name)
            self.cache.on_use((topic.name,), now_ms)
        return True

    def _doubts(self, key: str | None, is_contradicted: bool) -> bool:
        """Whether to doubt a response: it contradicts the known metadata, and the last one did not.

        Brokers may lag, and a task may have erred.
        """
        if not is_contradicted or key in self._contradicted:
            self._contradicted.discard(key)
            return False
        if len(self._contradicted) >= _MAX_CONTRADICTED:
            self._contradicted.clear()
        self._contradicted.add(key)
        return True

    def on_time(self, now_ms: float) -> None:
        if self._fetch is not None and now_ms >= self._fetch.silent_at_ms:
            self._ask_another(self._fetch, now_ms)
        self._fetch_due(now_ms)
        left = _TOPICS_AT_ONCE
        if now_ms >= self._answers_due_ms:
            while self._answers and left > 0:
                topics, waiting = self._answers.popitem(last=False)
                left -= self._send(waiting, topics, now_ms)
            self._answers_due_ms = now_ms if self._answers else math.inf
        while self._outdated and left > 0:
            users, _ = self._outdated.popitem(last=False)
            left -= self._send(users.peers, users.topics & self._fresh, now_ms)
        if not self._outdated:
            self._fresh.clear()

    def _send(self, peers: Iterable[int], known: frozenset[str], now_ms: float) -> int:
        """Send the topics, encoded once for all of these tasks. Returns the cost, counted in topics."""
        for part in parts_of(self.cache.snapshot(now_ms, known)) if known else ():
            self.out.broadcast(list(peers), Topics(part))
        return _COST_OF_SET + len(known)

    def next_change_ms(self, now_ms: float) -> float:
        if not self._tasks:
            return math.inf
        if self._outdated:
            return 0.0
        fetch = self._fetch
        delay_ms = fetch.silent_at_ms - now_ms if fetch else self.cache.next_request_delay_ms(now_ms)
        return max(0.0, min(delay_ms, self._answers_due_ms - now_ms))


def contradicts(known: TopicMetadata, response: TopicMetadata) -> bool:
    """Whether epochs, ids or partitions make it unlikely that the response is newer than the known metadata.

    Added partitions, and several elections since, are unlikely too, and a second response confirms them.
    """
    if None not in (known.topic_id, response.topic_id) and known.topic_id != response.topic_id:
        return True
    if len(response.partitions) != len(known.partitions):
        return True
    pairs = zip(known.partitions.epochs, response.partitions.epochs, strict=False)
    return any(UNKNOWN_EPOCH not in (old, new) and not old <= new <= old + 1 for old, new in pairs)
