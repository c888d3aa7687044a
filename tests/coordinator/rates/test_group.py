"""A relay asks for the rows of all its tasks at once, and splits what it is granted."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.coordinator.rates.group import RateGroup
from kafka_sink.coordinator.rates.handler import RateHandler
from kafka_sink.coordinator.transport.handlers import Push
from kafka_sink.errors import ProtocolError

LIMITS = {"rows": 1_000}
RELAY = 1


def asks(rows: int, size: int = 0, job: str = "j") -> dict[str, Any]:
    return {"job": job, "limits": LIMITS, "rows": rows, "bytes": size}


def asked(group: RateGroup) -> list[dict[str, Any]]:
    """What it asks the coordinator for."""
    found = []
    while group.due_ms(0.0) <= 0.0:
        message = group.next_message(0.0)
        assert message is not None
        found.append(dict(message))
        group.on_reply({}, 1.0, 0.0)
    return found


def granted(group: RateGroup) -> dict[int, int]:
    """What its tasks were granted; without replies."""
    found = {one.task: one.body["rows"] for one in group.outgoing if one.request is None}
    group.outgoing.clear()
    return found


def key_of(message: dict[str, Any]) -> str:
    """As the coordinator names the job."""
    (_, push) = RateHandler().on_message(RELAY, 1, message, 0.0)
    assert isinstance(push, Push)
    return str(push.body["job"])


def test_it_asks_once_for_all_tasks_that_wait() -> None:
    group = RateGroup()
    for task, rows in ((1, 100), (2, 300)):
        assert group.on_task(task, 7, asks(rows, 10 * rows), 0.0)
    assert [(one.task, one.request, one.body) for one in group.outgoing] == [(1, 7, {}), (2, 7, {})]
    (message,) = asked(group)
    assert message == {"job": "j", "limits": LIMITS, "rows": 400, "bytes": 4_000, "tasks": 2}
    assert asked(group) == []
    group.on_task(2, 8, asks(50), 0.0)
    group.on_task_left(1, 0.0)
    (message,) = asked(group)
    assert (message["rows"], message["tasks"]) == (50, 1)
    group.on_task_left(2, 0.0)
    (message,) = asked(group)
    assert (message["rows"], message["tasks"]) == (0, 0), "none waits any more"


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=12), st.data())
def test_what_its_tasks_get_is_what_it_is_granted(rows: list[int], data: st.DataObject) -> None:
    group = RateGroup()
    for task, one in enumerate(rows):
        group.on_task(task, 1, asks(one), 0.0)
    (message,) = asked(group)
    key = key_of(message)
    left = dict(enumerate(rows))
    while left:
        total = data.draw(st.integers(1, sum(left.values())))
        group.outgoing.clear()
        group.on_push({"rows": total, "job": key}, 0.0)
        found = granted(group)
        assert sum(found.values()) == total
        assert all(found[task] <= left[task] for task in found)
        for task in found:
            del left[task]
        again = asked(group)
        assert [one["tasks"] for one in again] == ([len(left)] if left else [])
        if left:
            assert again[0]["rows"] == sum(left.values())


def test_its_tasks_may_write_for_several_jobs() -> None:
    group, handler = RateGroup(), RateHandler()
    group.on_task(1, 1, asks(10, job="a"), 0.0)
    group.on_task(2, 1, asks(10, job="b"), 0.0)
    for message in asked(group):
        for one in handler.on_message(RELAY, 1, message, 0.0):
            if isinstance(one, Push):
                group.on_push(one.body, 0.0)
    assert granted(group) == {1: 10, 2: 10}
    assert not handler._jobs_of


def test_each_of_a_relays_tasks_counts_and_a_relay_keeps_its_place() -> None:
    handler = RateHandler()
    handler.on_message(9, 1, asks(1_000_000), 0.0)  # uses what may be sent at once
    handler.on_message(RELAY, 1, {**asks(7_000), "tasks": 7}, 0.0)
    handler.on_message(2, 1, asks(1_000), 0.0)
    handler.on_message(RELAY, 2, {**asks(8_000), "tasks": 7}, 0.0)
    rows: dict[int, int] = {}
    now_ms = 0.0
    while len(rows) < 2:
        now_ms += 10.0
        rows |= {one.task: one.body["rows"] for one in handler.on_time(now_ms) if isinstance(one, Push)}
    assert list(rows) == [RELAY, 2]
    assert rows[RELAY] == pytest.approx(1_000 * 0.1 * 7 / 8, abs=1)


@pytest.mark.parametrize("wrong", [{"rows": 0}, {"tasks": -1}, {"job": ""}, {"limits": {}}])
def test_an_invalid_request_ends_its_task_only(wrong: dict[str, Any]) -> None:
    group = RateGroup()
    group.on_task(1, 1, asks(5), 0.0)
    with pytest.raises(ProtocolError):
        group.on_task(2, 1, {**asks(5), **wrong}, 0.0)
    (message,) = asked(group)
    assert message["tasks"] == 1


def test_where_a_grant_is_too_small_for_all_the_one_that_waits_longest_gets_it() -> None:
    """Catches: one task that got all of a low limit, because it asked last each time."""
    group = RateGroup()
    for task in range(10):
        group.on_task(task, 1, asks(100), 0.0)
    key = key_of(asked(group)[0])
    served = []
    for _ in range(20):
        group.outgoing.clear()
        group.on_push({"rows": 1, "job": key}, 0.0)
        (found,) = granted(group)
        served.append(found)
        group.on_task(found, 1, asks(100), 0.0)
    assert served == 2 * list(range(10))


def test_a_relay_forgets_jobs_whose_tasks_have_been_served() -> None:
    """Catches: one that refused tasks after 10,000 jobs, as those of an executor that lives for long."""
    group = RateGroup()
    for number in range(10_100):
        group.on_task(1, 1, asks(100, job=f"job {number}"), 0.0)
        (message,) = asked(group)
        group.on_push({"rows": 100, "job": key_of(message)}, 0.0)
    assert asked(group) == []


def test_a_grant_that_meets_a_message_on_its_way_leaves_no_rows_waiting_at_the_coordinator() -> None:
    handler = RateHandler()
    group = RateGroup()
    group.on_task(1, 1, asks(300), 0.0)
    (first,) = asked(group)
    (_, push) = handler.on_message(RELAY, 1, first, 0.0)
    assert isinstance(push, Push)
    group.on_task(2, 1, asks(300), 0.0)
    second = group.next_message(0.0)
    assert second is not None
    # The grant arrives before the reply to the second message, and is enough for both.
    group.on_push({**push.body, "rows": 600}, 0.0)
    handler.on_message(RELAY, 2, second, 0.0)
    group.on_reply({}, 1.0, 0.0)
    (correction,) = asked(group)
    assert (correction["rows"], correction["tasks"]) == (0, 0)
    handler.on_message(RELAY, 3, correction, 0.0)
    assert handler.on_time(60_000.0) == []
    assert handler.next_change_ms(60_000.0) == math.inf
