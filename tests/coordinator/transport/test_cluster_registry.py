"""Which clusters a coordinator has at work, with the time as an argument and no socket."""

from __future__ import annotations

from collections.abc import Callable

from kafka_sink.coordinator.transport.handlers import ClusterRegistry, Handler
from kafka_sink.options import SinkOptions
from tests.support.coordinator_harness import OPTIONS, Echo

IDLE = 600_000.0


class Scene:
    """Three clusters at most; ``made`` are the handlers so far."""

    def __init__(self) -> None:
        self.made: list[Echo] = []
        self.forgotten: list[str] = []
        self.woken: list[str] = []
        self.wakes: list[Callable[[], None]] = []
        self.clusters = ClusterRegistry(
            {"echo": self._make}, self.woken.append, self.forgotten.append, max_clusters=3, idle_ms=IDLE
        )

    def _make(self, options: SinkOptions, wake: Callable[[], None]) -> Handler:
        assert options is OPTIONS
        self.wakes.append(wake)
        self.made.append(Echo())
        return self.made[-1]

    def add(self, *keys: str, at: float = 0.0) -> list[bool]:
        return [self.clusters.add(key, OPTIONS, at) for key in keys]


def test_a_cluster_is_at_work_from_its_first_task_on() -> None:
    scene = Scene()
    assert scene.add("a", "b") == [True, True]
    assert not scene.made
    assert scene.clusters.enter("a")
    assert scene.clusters.enter("a")
    assert len(scene.made) == 1
    assert scene.clusters.running("a") is not None
    assert scene.clusters.running("b") is None
    scene.wakes[0]()
    assert scene.woken == ["a"]
    assert not scene.clusters.enter("an unknown cluster")


def test_a_cluster_without_tasks_rests_and_comes_back_with_the_next() -> None:
    scene = Scene()
    scene.add("a", "b")
    for key in "ab":
        scene.clusters.enter(key)
    scene.clusters.enter("a")
    scene.clusters.leave("a", 1000.0)
    assert not scene.clusters.stop_idle(10 * IDLE), "one of its tasks is there"
    scene.clusters.leave("a", 11 * IDLE)
    assert not scene.clusters.stop_idle(12 * IDLE - 1)
    assert scene.clusters.stop_idle(12 * IDLE) == ["a"]
    assert [one.closed for one in scene.made] == [1, 0]
    assert scene.clusters.running("a") is None
    assert not scene.clusters.stop_idle(13 * IDLE), "once"
    # A job may have been planned long ago.
    assert scene.clusters.enter("a")
    assert len(scene.made) == 3
    assert not scene.made[2].closed


def test_one_too_many_takes_the_place_of_the_one_that_was_longest_without_a_task() -> None:
    scene = Scene()
    for at, key in enumerate("abc"):
        scene.add(key, at=float(at))
        scene.clusters.enter(key)
    scene.clusters.leave("c", 10.0)
    scene.clusters.leave("a", 20.0)
    assert scene.add("d", at=30.0) == [True]
    assert scene.forgotten == ["c"]
    assert [one.closed for one in scene.made] == [0, 0, 1]
    assert "c" not in scene.clusters
    assert scene.clusters.enter("d")
    assert scene.add("e", at=40.0) == [True]
    assert scene.forgotten == ["c", "a"]
    scene.clusters.enter("e")


def test_clusters_with_tasks_make_no_room() -> None:
    scene = Scene()
    scene.add("a", "b", "c")
    for key in "abc":
        scene.clusters.enter(key)
    assert scene.add("d", "a") == [False, True]
    assert scene.forgotten == ["d"], "planning must add it again"
    assert not scene.clusters.enter("d")
    assert not any(one.closed for one in scene.made)


def test_all_are_closed_in_the_end() -> None:
    scene = Scene()
    scene.add("a", "b")
    scene.clusters.enter("a")
    scene.clusters.close()
    assert [one.closed for one in scene.made] == [1]
