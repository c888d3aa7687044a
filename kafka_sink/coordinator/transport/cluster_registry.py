"""The clusters of a coordinator: which are running, which are idle, which are evicted. No sockets.

A running cluster has a thread, connections to its brokers and cached metadata. The registry stops a cluster
that has had no connected task for ``idle_ms``, which frees all of that. Its settings stay, because the rows
of a job may come hours after its planning. When the registry is full, it evicts the cluster that has gone
longest without a task. Planning then has to add that cluster again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kafka_sink.coordinator.transport.handlers import ClusterHandlers, HandlerFactory
from kafka_sink.options import SinkOptions


@dataclass(slots=True)
class _Cluster:
    """``used_ms``: when the cluster was added, or its last task disconnected."""

    options: SinkOptions
    used_ms: float
    running: ClusterHandlers | None = None
    tasks: int = 0


class ClusterRegistry:
    """Times are monotonic milliseconds.

    Handlers that have work to do call ``wake(key)``, from any thread. The registry calls ``forgotten(key)``
    for a cluster that it evicts or does not accept.
    """

    def __init__(
        self,
        factories: Mapping[str, HandlerFactory],
        wake: Callable[[str], None],
        forgotten: Callable[[str], None],
        *,
        max_clusters: int,
        idle_ms: float,
    ) -> None:
        self._factories = factories
        self._wake = wake
        self._forgotten = forgotten
        self._max_clusters = max_clusters
        self._idle_ms = idle_ms
        self._known: dict[str, _Cluster] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._known

    def add(self, key: str, options: SinkOptions, now_ms: float) -> bool:
        """Add a cluster, unless it is known. Returns False if all places are taken by clusters with tasks."""
        if key in self._known:
            return True
        if len(self._known) >= self._max_clusters and not self._make_room():
            self._forgotten(key)
            return False
        self._known[key] = _Cluster(options, now_ms)
        return True

    def _make_room(self) -> bool:
        unused = [key for key, one in self._known.items() if not one.tasks]
        if not unused:
            return False
        oldest = min(unused, key=lambda key: self._known[key].used_ms)
        self._stop(self._known.pop(oldest))
        self._forgotten(oldest)
        return True

    def enter(self, key: str) -> bool:
        """A task of this cluster has connected. Returns False if the cluster is not known."""
        found = self._known.get(key)
        if found is None:
            return False
        if found.running is None:
            handlers = {
                kind: make(found.options, lambda: self._wake(key)) for kind, make in self._factories.items()
            }
            found.running = ClusterHandlers(handlers)
        found.tasks += 1
        return True

    def leave(self, key: str, now_ms: float) -> None:
        """A task that entered has disconnected."""
        found = self._known[key]
        found.tasks -= 1
        found.used_ms = now_ms

    def running(self, key: str) -> ClusterHandlers | None:
        """The cluster's handlers. They exist as long as one of its tasks is connected."""
        found = self._known.get(key)
        return None if found is None else found.running

    def stop_idle(self, now_ms: float) -> list[str]:
        """Stop the clusters that have had no task for ``idle_ms``, and return their keys."""
        idle = [
            key
            for key, one in self._known.items()
            if one.running is not None and not one.tasks and now_ms - one.used_ms >= self._idle_ms
        ]
        for key in idle:
            self._stop(self._known[key])
        return idle

    def close(self) -> None:
        """Stop all clusters."""
        for one in self._known.values():
            self._stop(one)

    def _stop(self, cluster: _Cluster) -> None:
        running, cluster.running = cluster.running, None
        if running is not None:
            running.close()
