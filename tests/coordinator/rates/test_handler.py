"""A job's rate limit in the coordinator: never exceeded, and everyone gets a turn. In virtual time."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_sink.coordinator.rates import handler as rate_handler
from kafka_sink.coordinator.rates.handler import RateHandler
from kafka_sink.coordinator.transport.handlers import Push, Reply
from kafka_sink.errors import ProtocolError

SECOND = 1000.0


def body(rows: int, size: int = 0, job: str = "j", limits: dict[str, int] | None = None) -> dict[str, Any]:
    return {"job": job, "limits": limits or {"rows": 1000}, "rows": rows, "bytes": size}


class Tasks:
    """Tasks that ask again as soon as they may, and count what they were granted."""

    def __init__(self, row_bytes: int = 10, **limits: int) -> None:
        self.handler = RateHandler()
        self.limits = limits
        self.row_bytes = row_bytes
        self.left: dict[int, int] = {}
        self.granted: dict[int, list[tuple[float, int]]] = {}
        self.messages = 0

    def start(self, peer: int, rows: int, now_ms: float) -> None:
        self.left[peer] = rows
        self.granted[peer] = []
        self._ask(peer, now_ms)

    def _ask(self, peer: int, now_ms: float) -> None:
        rows = min(self.left[peer], 20_000)
        if rows:
            self.messages += 1
            asked = body(rows, rows * self.row_bytes, limits=self.limits)
            self._take(self.handler.on_message(peer, 1, asked, now_ms), now_ms)

    def _take(self, messages: Any, now_ms: float) -> None:
        pushes = [message for message in messages if isinstance(message, Push)]
        for push in pushes:
            rows = push.body["rows"]
            self.granted[push.task].append((now_ms, rows))
            self.left[push.task] -= rows
        for push in pushes:
            self._ask(push.task, now_ms)

    def run(self, from_ms: float, to_ms: float) -> None:
        now_ms = from_ms
        while True:
            now_ms += max(self.handler.next_change_ms(now_ms), 0.0)
            if now_ms > to_ms:
                return
            self._take(self.handler.on_time(now_ms), now_ms)

    def rows(self, peer: int | None = None, after_ms: float = -1.0) -> int:
        grants = [grant for one, grants in self.granted.items() if peer in (None, one) for grant in grants]
        return sum(rows for at_ms, rows in grants if at_ms > after_ms)


@given(
    st.lists(st.integers(1, 100_000), min_size=1, max_size=40),
    st.sampled_from([{"rows": 5_000}, {"bytes": 50_000}, {"rows": 5_000, "bytes": 20_000}]),
)
@settings(max_examples=30)
def test_no_second_exceeds_the_limit_and_none_is_wasted(backlogs: list[int], limits: dict[str, int]) -> None:
    tasks = Tasks(**limits)
    for peer, rows in enumerate(backlogs):
        tasks.start(peer, rows, 0.0)
    tasks.run(0.0, 10 * SECOND)
    limit = min(limits.get("rows", 10**9), limits.get("bytes", 10**9) // tasks.row_bytes)
    assert tasks.rows() <= limit * 10 * 1.05
    assert tasks.rows() >= min(sum(backlogs), limit * 10 * 0.95)


def test_a_task_with_few_rows_does_not_wait_for_those_with_many() -> None:
    tasks = Tasks(rows=1000)
    for peer in range(9):
        tasks.start(peer, 10**9, 0.0)
    tasks.run(0.0, 5 * SECOND)
    tasks.start(9, 5, 5 * SECOND)
    tasks.run(5 * SECOND, 6 * SECOND)
    assert tasks.left[9] == 0
    shares = [tasks.rows(peer) for peer in range(9)]
    assert max(shares) < 1.25 * min(shares)


def test_what_tasks_with_little_to_do_leave_goes_to_the_others() -> None:
    tasks = Tasks(rows=1000)
    tasks.start(0, 10**9, 0.0)
    rng = random.Random(1)
    for second in range(10):
        tasks.start(1 + second, rng.randrange(1, 50), second * SECOND)
        tasks.run(second * SECOND, (second + 1) * SECOND)
    assert tasks.rows() == pytest.approx(10_000, rel=0.05)


def test_a_thousand_tasks_take_a_bounded_number_of_messages() -> None:
    tasks = Tasks(rows=1_000_000)
    for peer in range(1000):
        tasks.start(peer, 10**9, 0.0)
    tasks.run(0.0, 5 * SECOND)
    assert tasks.messages < 8_000
    assert tasks.rows() == pytest.approx(5_000_000, rel=0.06)
    assert min(tasks.rows(peer) for peer in range(1000)) > 0


def test_a_row_larger_than_a_second_is_sent_and_paid_for() -> None:
    tasks = Tasks(row_bytes=3000, bytes=1000)
    tasks.start(0, 3, 0.0)
    tasks.run(0.0, 10 * SECOND)
    assert [rows for _, rows in tasks.granted[0]] == [1, 1, 1]
    times = [at_ms for at_ms, _ in tasks.granted[0]]
    assert [later - earlier for earlier, later in pairwise(times)] == pytest.approx([3000, 3000], abs=10)


def test_a_job_does_not_catch_up_on_a_long_pause() -> None:
    tasks = Tasks(rows=1000)
    tasks.start(0, 10**9, 0.0)
    tasks.run(0.0, SECOND)
    tasks.handler.on_disconnect(0, SECOND)
    tasks.start(1, 10**9, 100 * SECOND)
    tasks.run(100 * SECOND, 101 * SECOND)
    assert tasks.rows(1) <= 1300


def test_a_restart_with_another_limit_counts_at_once() -> None:
    tasks = Tasks(rows=1000)
    tasks.start(0, 10**9, 0.0)
    tasks.run(0.0, 5 * SECOND)
    tasks.handler.on_disconnect(0, 5 * SECOND)
    tasks.limits = {"rows": 100}
    tasks.start(1, 10**9, 5 * SECOND)
    tasks.run(5 * SECOND, 15 * SECOND)
    assert tasks.rows(1) == pytest.approx(1000, rel=0.08)


def test_jobs_have_limits_of_their_own_and_unused_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_handler, "_MAX_JOBS", 3)
    handler = RateHandler()
    for number in range(5):
        messages = handler.on_message(number, 7, body(1, job=f"job {number}"), 0.0)
        assert messages == [Reply(number, 7, {}), Push(number, {"rows": 1, "job": messages[1].body["job"]})]
    assert len(handler._jobs) == 3


def test_jobs_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a relay that named ever new jobs filled the coordinator's memory."""
    monkeypatch.setattr(rate_handler, "_MAX_JOBS", 2)
    handler = RateHandler()

    def wait(number: int) -> None:
        for _ in range(2):
            handler.on_message(1, 7, {**body(10_000, job=f"job {number}"), "tasks": 1}, 0.0)

    for number in range(4):
        wait(number)
    with pytest.raises(ProtocolError, match="too many jobs"):
        wait(4)
    wait(3)


def test_writes_of_one_query_with_different_limits_have_buckets_of_their_own() -> None:
    """Each ask forgot the other's debt: 20 times the limit."""
    handler = RateHandler()
    sent = [0, 0]
    limits = [{"rows": 100}, {"bytes": 1000}]

    def ask(peer: int, now_ms: float) -> None:
        for message in handler.on_message(peer, 1, body(1000, 10_000, limits=limits[peer]), now_ms):
            note(message, now_ms)

    def note(message: Any, now_ms: float) -> None:
        if isinstance(message, Push):
            sent[message.task] += message.body["rows"]
            ask(message.task, now_ms)

    for peer in range(2):
        ask(peer, 0.0)
    for now_ms in range(0, 10_000, 10):
        for message in handler.on_time(now_ms):
            note(message, now_ms)
    assert sent == [pytest.approx(1000, rel=0.06)] * 2


def test_a_task_that_is_gone_leaves_its_place() -> None:
    handler = RateHandler()
    handler.on_message(1, 1, body(10**6), 0.0)
    handler.on_message(2, 1, body(10**6), 0.0)
    handler.on_message(3, 1, body(10), 0.0)
    handler.on_disconnect(2, 0.0)
    later = [push.task for push in handler.on_time(SECOND)]
    assert 2 not in later
    assert 3 in later


@pytest.mark.parametrize(
    "wrong",
    [
        {"job": ""},
        {"job": "x" * 201},
        {"limits": {}},
        {"limits": {"rows": 0}},
        {"limits": {"rows": True}},
        {"limits": {"cats": 1}},
        {"limits": 5},
        {"rows": 0},
        {"rows": None},
        {"bytes": -1},
    ],
)
def test_a_message_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        RateHandler().on_message(1, 1, body(1) | wrong, 0.0)
