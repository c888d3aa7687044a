"""A relay says once for all its tasks that a topic is in use, and passes on what a task asks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.coordinator.metadata.group import MetadataGroup
from kafka_sink.coordinator.metadata.messages import coordinator_idle_ms, use_interval_ms

MINUTE_MS = 60_000.0
NOTHING: dict[str, list[str]] = {"use": [], "stale": []}


def use(*topics: str) -> dict[str, list[str]]:
    return {"use": list(topics), "stale": []}


def replies(group: MetadataGroup) -> list[tuple[int, int | None]]:
    found = [(one.task, one.request) for one in group.outgoing]
    group.outgoing.clear()
    return found


def test_that_a_topic_is_in_use_is_news_once_for_all_tasks() -> None:
    group = MetadataGroup()
    for task in (1, 2, 3):
        assert not group.on_task(task, 1, {"ask": ["orders"]}, 0.0), "each gets its own metadata"
    assert not group.on_task(1, 2, use("orders"), MINUTE_MS)
    assert group.on_task(2, 2, use("orders"), MINUTE_MS + 1.0)
    assert group.on_task(3, 2, use("orders"), MINUTE_MS + 2.0)
    assert replies(group) == [(2, 2), (3, 2)]
    assert not group.on_task(2, 3, use("orders"), 2 * MINUTE_MS), "a minute later it is news again"


def test_what_the_coordinator_does_not_know_of_a_task_is_passed_on() -> None:
    group = MetadataGroup()
    group.on_task(1, 1, {"ask": ["orders", "returns"]}, 0.0)
    assert not group.on_task(2, 1, use("orders"), 1.0), "it would not be sent news of the topic"
    assert not group.on_task(2, 2, use("orders", "returns"), 2.0)
    assert not group.on_task(2, 3, {"use": ["orders"], "stale": [["orders", 5]]}, 3.0)
    assert not group.on_task(2, 4, {**use("orders"), "leaders": [["orders", None, 0, 1, 2]]}, 4.0)
    group.on_task_left(2, 5.0)
    assert not group.on_task(2, 1, use("orders"), 6.0), "another task has its number"


def test_a_task_with_too_many_topics_says_again_what_it_uses() -> None:
    group = MetadataGroup()
    names = [f"topic-{number}" for number in range(50_000)]
    for start in range(0, 50_000, 5_000):
        group.on_task(1, 1, use(*names[start : start + 5_000]), 0.0)
        group.on_task(2, 1, use(*names[start : start + 5_000]), 0.0)
    assert not group.on_task(1, 2, use("one-more"), MINUTE_MS)
    assert not group.on_task(2, 3, use(names[0]), MINUTE_MS)
    assert not group.on_task(1, 3, use(names[0]), MINUTE_MS + 1.0), "the coordinator has forgotten it"


def test_a_check_that_the_coordinator_responds_is_answered_at_once_and_asked_later() -> None:
    group = MetadataGroup()
    group.heard_ms = 0.0
    assert group.on_task(1, 1, NOTHING, 100.0)
    assert replies(group) == [(1, 1)]
    assert group.next_message(4_999.0) is None
    assert group.next_message(5_000.0) == NOTHING


@pytest.mark.parametrize("idle_ms", [5_000.0, 300_000.0])
@given(st.lists(st.tuples(st.integers(1, 4), st.floats(0.0, 1.0)), min_size=2, max_size=60))
def test_the_coordinator_hears_of_a_topic_in_use_before_it_takes_it_for_idle(
    idle_ms: float, steps: list[tuple[int, float]]
) -> None:
    group, interval_ms = MetadataGroup(), use_interval_ms(idle_ms)
    # Each task says so one interval after the last time, and may be one more late.
    due_ms = dict.fromkeys((1, 2, 3, 4), 0.0)
    told_ms = 0.0
    for chosen, late in steps:
        task = min(due_ms, key=lambda one: (due_ms[one], one != chosen))
        now_ms = due_ms[task] + late * interval_ms
        now_ms = max(now_ms, told_ms)
        if not group.on_task(task, 1, use("orders"), now_ms):
            told_ms = now_ms
        due_ms[task] = now_ms + interval_ms
        assert now_ms - told_ms < coordinator_idle_ms(idle_ms)
