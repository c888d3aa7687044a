"""The clusters that a coordinator was told of: which are at work, which rest, which make room. No sockets.

A cluster at work has a thread, connections to its brokers and what is known of its topics. One that no task
has been connected for since ``idle_ms`` gives all of that back; its settings stay, so that a job whose rows
come hours after it was planned still finds it. Where there are too many, those longest without a task go
altogether, and whoever told of them is to tell again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kafka_sink.coordinator.server.handlers import ClusterHandlers, HandlerFactory
from kafka_sink.options import SinkOptions


@dataclass(slots=True)
class _Cluster:
    """``used_ms``: when it was told of, or its last task went."""

    options: SinkOptions
    used_ms: float
    running: ClusterHandlers | None = None
    tasks: int = 0


class ClusterRegistry:
    """Times are monotonic milliseconds. ``wake(key)`` is called from any thread, by handlers that have
    something to do; ``forgotten(key)`` when a cluster went to make room."""

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
        """Another cluster; False, and it is not served, where all have tasks. A known one stays as it is."""
        if key in self._known:
            return True
        if len(self._known) >= self._max_clusters and not self._make_room():
            self._forgotten(key)
            return False
        self._known[key] = _Cluster(options, now_ms)
        return True

    def _make_room(self) -> bool:
        resting = [key for key, one in self._known.items() if not one.tasks]
        if not resting:
            return False
        oldest = min(resting, key=lambda key: self._known[key].used_ms)
        self._rest(self._known.pop(oldest))
        self._forgotten(oldest)
        return True

    def enter(self, key: str) -> bool:
        """A task is connected for this cluster; False where it is not known."""
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
        """A task that entered has gone."""
        found = self._known[key]
        found.tasks -= 1
        found.used_ms = now_ms

    def running(self, key: str) -> ClusterHandlers | None:
        """The cluster's handlers; surely there while a task is connected for it."""
        found = self._known.get(key)
        return None if found is None else found.running

    def stop_idle(self, now_ms: float) -> list[str]:
        """Lets clusters rest that have had no task for ``idle_ms``; returns which."""
        idle = [
            key
            for key, one in self._known.items()
            if one.running is not None and not one.tasks and now_ms - one.used_ms >= self._idle_ms
        ]
        for key in idle:
            self._rest(self._known[key])
        return idle

    def close(self) -> None:
        """All rest."""
        for one in self._known.values():
            self._rest(one)

    def _rest(self, served: _Cluster) -> None:
        running, served.running = served.running, None
        if running is not None:
            running.close()
