"""Mutes go to all tasks at once, unmutes to one task after another; changes share a message."""

from __future__ import annotations

import pytest

from kafka_sink.coordinator.breaker.messages import BreakerReport, BreakerUpdate, decode_update
from kafka_sink.coordinator.breaker.tasks import BreakerTasks, MutePushes
from kafka_sink.timing_bounds import GATHER_MUTES_MS

MAX_DELAY_MS = 2_000


@pytest.fixture
def tasks() -> BreakerTasks:
    made = BreakerTasks(500.0)
    for peer in range(1, 8):
        made.update(peer, BreakerReport(holds=(7,) if peer == 5 else ()), 1_000.0)
    return made


def taken(pushes: MutePushes, tasks: BreakerTasks, now_ms: float) -> dict[int, BreakerUpdate]:
    return {push.task: decode_update(push.body, MAX_DELAY_MS) for push in pushes.take(tasks, now_ms)}


def test_a_mute_goes_to_all_tasks_at_once_and_once(tasks: BreakerTasks) -> None:
    pushes = MutePushes(MAX_DELAY_MS, lambda: 0.5)
    assert pushes.due_ms == float("inf")
    pushes.add(7, "silent")
    updates = taken(pushes, tasks, 1_000.0)
    assert updates.keys() == set(tasks)
    assert {str(update.added) for update in updates.values()} == {"{7: 'silent'}"}
    assert taken(pushes, tasks, 2_000.0) == {}


def test_changes_soon_after_a_push_are_gathered(tasks: BreakerTasks) -> None:
    pushes = MutePushes(MAX_DELAY_MS, lambda: 0.5)
    pushes.add(7, "silent")
    pushes.take(tasks, 1_000.0)
    pushes.add(8, "silent")
    assert taken(pushes, tasks, 1_000.0 + GATHER_MUTES_MS - 1) == {}
    pushes.add(9, "silent")
    assert pushes.due_ms == 1_000.0 + GATHER_MUTES_MS
    assert taken(pushes, tasks, pushes.due_ms)[1].added.keys() == {8, 9}


def test_what_was_muted_and_unmuted_since_the_last_push_is_sent_as_it_is_now(tasks: BreakerTasks) -> None:
    pushes = MutePushes(MAX_DELAY_MS, lambda: 0.5)
    pushes.add(7, "silent")
    pushes.remove(7)
    pushes.remove(8)
    pushes.add(8, "again")
    update = taken(pushes, tasks, 1_000.0)[1]
    assert list(update.added) == [8]
    assert list(update.removed) == [7]


def test_after_an_unmute_one_task_sends_at_once_then_two_more_then_four(tasks: BreakerTasks) -> None:
    pushes = MutePushes(MAX_DELAY_MS, lambda: 0.5)
    pushes.remove(7)
    updates = taken(pushes, tasks, 1_000.0)
    delays = {peer: update.delay_ms for peer, update in updates.items()}
    assert delays[5] == 0.0, "it has rows for the target"
    assert {update.max_delay_ms for update in updates.values()} == {MAX_DELAY_MS}, "for a relay's other tasks"
    assert sorted(delays.values()) == [0.0, 50.0, 50.0, 150.0, 150.0, 150.0, 150.0]
