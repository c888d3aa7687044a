"""A breaker for each Kafka cluster that tasks with the same bootstrap.servers write to.

Usually that is one. A bootstrap name may move to another cluster while tasks write to the former one, and
brokers of both may have the same ids. So a task shares mutes only with tasks that name the same cluster id,
and with all of them that connect as the same principal, whatever addresses and other options they have.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from kafka_sink.coordinator.breaker.handler import BreakerHandler
from kafka_sink.coordinator.breaker.messages import cluster_id_in
from kafka_sink.coordinator.breaker.votes import PartitionVotes
from kafka_sink.coordinator.figures.messages import MuteFigures
from kafka_sink.coordinator.transport.handlers import Handler, ServerMessage
from kafka_sink.options.breaker import DEFAULT_CLASS, failure_rate_settings

if TYPE_CHECKING:
    from kafka_sink.options import SinkOptions

# Clusters without tasks whose mutes are kept for the next stage's tasks.
_MAX_UNUSED = 2

# By cluster id and those that may share it, as long as a set of options uses it.
Breakers = WeakValueDictionary[tuple[str, Hashable], BreakerHandler]


class ClusterBreakers(Handler):
    """A task that has not named its cluster yet shares with those that named theirs last.

    ``shared``: the breakers of all sets of options; ``sharers``: those that may share one of them.
    """

    def __init__(self, make: Callable[[], BreakerHandler], shared: Breakers, sharers: Hashable) -> None:
        self._make = make
        self._shared = shared
        self._sharers = sharers
        # By cluster id, in the order in which tasks named them last. None: no task has named it yet.
        self._breakers: OrderedDict[str | None, BreakerHandler] = OrderedDict({None: make()})
        self._clusters: dict[int, str | None] = {}

    def on_message(
        self, task: int, request: int, body: Mapping[str, Any], now_ms: float
    ) -> Sequence[ServerMessage]:
        named = cluster_id_in(body)
        if named is not None and self._clusters.get(task) != named:
            self._leave(task, now_ms)
            self._enter(task, named)
        elif task not in self._clusters:
            self._clusters[task] = next(reversed(self._breakers))
        return self._breakers[self._clusters[task]].on_message(task, request, body, now_ms)

    def _enter(self, task: int, cluster_id: str) -> None:
        if cluster_id not in self._breakers:
            unnamed = self._breakers.pop(None, None)
            known = self._shared.get((cluster_id, self._sharers))
            self._breakers[cluster_id] = known or unnamed or self._make()
            self._shared[cluster_id, self._sharers] = self._breakers[cluster_id]
            if unnamed is not None:
                # Where others know the cluster, these tasks learn what is muted there with their next report.
                self._clusters = {} if known else dict.fromkeys(self._clusters, cluster_id)
            # Walks over all tasks, so only where there is one more.
            used = {cluster_id, *self._clusters.values()}
            unused = [one for one in self._breakers if one not in used]
            for one in unused[: max(0, len(unused) - _MAX_UNUSED)]:
                del self._breakers[one]
        self._breakers.move_to_end(cluster_id)
        self._clusters[task] = cluster_id

    def _leave(self, task: int, now_ms: float) -> None:
        if task in self._clusters:
            cluster_id = self._clusters.pop(task)
            # A cluster without a name gets this task's: it stays where it is.
            if cluster_id is not None:
                self._breakers[cluster_id].on_disconnect(task, now_ms)

    def muted(self, now_ms: float) -> Iterator[MuteFigures]:
        """What is muted for all tasks, for the live view."""
        for one in self._breakers.values():
            yield from one.muted(now_ms)

    def on_disconnect(self, task: int, now_ms: float) -> None:
        if task in self._clusters:
            self._breakers[self._clusters.pop(task)].on_disconnect(task, now_ms)

    def on_time(self, now_ms: float) -> Sequence[ServerMessage]:
        # Each set of options has a timer, and what they share needs to be looked at once.
        due = [one for one in self._breakers.values() if one.next_change_ms(now_ms) <= 0]
        return [message for one in due for message in one.on_time(now_ms)]

    def next_change_ms(self, now_ms: float) -> float:
        return min(one.next_change_ms(now_ms) for one in self._breakers.values())


def breaker_handler(
    options: SinkOptions,
    _wake: Callable[[], None],
    shared: Breakers | None = None,
    stood_ms: Callable[[float], float] = lambda _: 0.0,
) -> ClusterBreakers:
    """The breaker handler of one set of options, with those of the default breaker class. ``stood_ms``: as
    BreakerHandler has it."""
    settings = options.breaker
    thresholds = None
    if settings.class_path == DEFAULT_CLASS:
        found = failure_rate_settings(dict(settings.given))
        thresholds = found.trigger_message_count, found.trigger_failure_perc
    times = settings.mute_retry_interval_ms, float(options.coordinator_report_interval_ms)

    def make() -> BreakerHandler:
        votes = None if thresholds is None else PartitionVotes(*thresholds)
        return BreakerHandler(times[0], votes, times[1], stood_ms=stood_ms)

    sharers = frozenset(options.principal().items()), settings.class_path, thresholds, times
    return ClusterBreakers(make, WeakValueDictionary() if shared is None else shared, sharers)
