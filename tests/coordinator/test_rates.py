"""A job's rate limit in the coordinator: never exceeded, and everyone gets a turn. In virtual time."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_sink.coordinator.rates import MAX_JOBS, RateChannel, RateService, RowsGranted, RowsWanted
from kafka_sink.coordinator.schema import decode, deliver, encode
from kafka_sink.errors import ProtocolError
from tests.support.effort import tries
from tests.support.fake_outbox import FakeOutbox

SECOND = 1000.0


def wanted(rows: int, size: int = 0, job: str = "j", limits: dict[str, int] | None = None) -> RowsWanted:
    """The message that a task of this job sends."""
    channel = RateChannel()
    assert channel.ask(job, limits or {"rows": 1000}, rows, size)
    sent = channel.next_message(0.0)
    assert sent is not None
    assert channel.next_message(0.0) is None
    return sent


class Coordinator:
    """A service and what it grants."""

    def __init__(self, max_jobs: int = MAX_JOBS) -> None:
        self.out = FakeOutbox()
        self.service = RateService(self.out, max_jobs)

    def ask(self, peer: int, asked: RowsWanted, now_ms: float = 0.0) -> list[tuple[int, int]]:
        deliver(self.service, peer, decode(encode(asked)), now_ms)
        return self.granted()

    def at(self, now_ms: float) -> list[tuple[int, int]]:
        self.service.on_time(now_ms)
        return self.granted()

    def remembered(self, jobs: int) -> list[int]:
        """Of so many jobs that were granted all they may send, those that must wait: the others are new."""
        return [one for one in reversed(range(jobs)) if not self.ask(-1, wanted(1, job=f"job {one}"))]

    def granted(self) -> list[tuple[int, int]]:
        found = []
        for peer, message in self.out.taken():
            assert isinstance(message, RowsGranted)
            found.append((peer, message.rows))
        return found


class Tasks(Coordinator):
    """Tasks that ask again as soon as they may, and when they were granted how many rows."""

    def __init__(self, row_bytes: int = 10, **limits: int) -> None:
        super().__init__()
        self.now_ms = 0.0
        self.row_bytes, self.limits = row_bytes, limits
        self.left: dict[int, int] = {}
        self.asks: dict[int, tuple[int, dict[str, int]]] = {}
        self.grants: dict[int, list[tuple[float, int]]] = {}
        self.messages = 0

    def start(
        self, peer: int, rows: int = 10**9, row_bytes: int | None = None, limits: dict[str, int] | None = None
    ) -> None:
        self.left[peer], self.grants[peer] = rows, []
        self.asks[peer] = row_bytes or self.row_bytes, limits or self.limits
        self._ask(peer)

    def _ask(self, peer: int) -> None:
        rows, (row_bytes, limits) = min(self.left[peer], 20_000), self.asks[peer]
        if rows:
            self.messages += 1
            self._take(self.ask(peer, wanted(rows, rows * row_bytes, limits=limits), self.now_ms))

    def _take(self, grants: list[tuple[int, int]]) -> None:
        for peer, rows in grants:
            self.grants[peer].append((self.now_ms, rows))
            self.left[peer] -= rows
        for peer, _ in grants:
            self._ask(peer)

    def run(self, ms: float) -> None:
        until_ms = self.now_ms + ms
        while (delay_ms := self.service.next_change_ms(self.now_ms)) <= until_ms - self.now_ms:
            self.now_ms += delay_ms
            self._take(self.at(self.now_ms))
        self.now_ms = until_ms

    def rows(self, *peers: int) -> int:
        return sum(rows for peer in peers or self.grants for _, rows in self.grants[peer])


@given(
    st.lists(st.integers(1, 100_000), min_size=1, max_size=40),
    st.sampled_from([{"rows": 5_000}, {"bytes": 50_000}, {"rows": 5_000, "bytes": 20_000}]),
)
@settings(max_examples=tries(30))
def test_no_second_exceeds_the_limit_and_none_is_wasted(backlogs: list[int], limits: dict[str, int]) -> None:
    tasks = Tasks(**limits)
    for peer, rows in enumerate(backlogs):
        tasks.start(peer, rows)
    tasks.run(10 * SECOND)
    limit = min(limits.get("rows", 10**9), limits.get("bytes", 10**9) // tasks.row_bytes)
    assert tasks.rows() <= limit * 10 * 1.05
    assert tasks.rows() >= min(sum(backlogs), limit * 10 * 0.95)


def test_with_two_limits_rows_of_other_sizes_use_up_one_of_them() -> None:
    """Catches: rows that are many and small, and rows that are few and large, paid for with one number."""
    tasks = Tasks(rows=1_000, bytes=1_000_000)
    tasks.start(0, row_bytes=10)
    tasks.start(1, row_bytes=100_000)
    tasks.run(60 * SECOND)
    size = tasks.rows(0) * 10 + tasks.rows(1) * 100_000
    assert 0.95 < max(tasks.rows() / 60_000, size / 60_000_000) < 1.05


def test_rows_that_fit_are_granted_all() -> None:
    """Catches: a row too few where a float is rounded down, and another message for it."""
    limits = {"rows": 10_000}
    for rows in range(1, 200):
        coordinator = Coordinator()
        coordinator.ask(0, wanted(10**6, limits=limits))
        for peer in (1, 2, 3):
            assert coordinator.ask(peer, wanted(rows, limits=limits)) == []
        assert coordinator.at(SECOND) == [(peer, rows) for peer in (1, 2, 3)]


def test_a_task_with_few_rows_does_not_wait_for_those_with_many() -> None:
    tasks = Tasks(rows=1000)
    for peer in range(9):
        tasks.start(peer)
    tasks.run(5 * SECOND)
    tasks.start(9, 5)
    tasks.run(SECOND)
    assert tasks.left[9] == 0
    shares = [tasks.rows(peer) for peer in range(9)]
    assert max(shares) < 1.25 * min(shares)


def test_a_thousand_tasks_take_a_bounded_number_of_messages() -> None:
    tasks = Tasks(rows=1_000_000)
    for peer in range(1000):
        tasks.start(peer)
    tasks.run(5 * SECOND)
    assert tasks.messages < 8_000
    assert tasks.rows() == pytest.approx(5_000_000, rel=0.06)
    assert min(tasks.rows(peer) for peer in range(1000)) > 0


def test_a_row_larger_than_a_second_is_sent_and_paid_for() -> None:
    tasks = Tasks(row_bytes=3000, bytes=1000)
    tasks.start(0, 3)
    tasks.run(10 * SECOND)
    times, rows = zip(*tasks.grants[0], strict=True)
    assert rows == (1, 1, 1)
    assert [later - earlier for earlier, later in pairwise(times)] == pytest.approx([3000, 3000], abs=10)


def test_a_claim_of_any_size_costs_ten_seconds_at_most() -> None:
    """Catches: one message after which a job was granted nothing for millions of years."""
    tasks = Tasks(bytes=1000)
    tasks.ask(9, wanted(1, 10**18, limits={"bytes": 1000}))
    tasks.start(0)
    tasks.run(20 * SECOND)
    assert tasks.rows() == pytest.approx(1000, rel=0.05)


def test_a_job_does_not_catch_up_on_a_long_pause() -> None:
    tasks = Tasks(rows=1000)
    tasks.start(0)
    tasks.run(SECOND)
    tasks.service.on_gone(0, SECOND)
    tasks.run(99 * SECOND)
    tasks.start(1)
    tasks.run(SECOND)
    assert tasks.rows(1) <= 1300


def test_ever_new_jobs_do_not_add_up() -> None:
    """Catches: one peer that named ever new jobs, and 60,001 jobs, kept as a task waited for the oldest."""
    coordinator = Coordinator(max_jobs=3)
    for _ in range(2):
        coordinator.ask(1, wanted(1, 10**6, job="oldest", limits={"bytes": 1}))
    for number in range(100):
        for _ in range(2):
            coordinator.ask(2, wanted(10_000, job=f"job {number}"))
    assert coordinator.remembered(100) == [99, 98, 97]


def test_writes_of_one_query_with_different_limits_have_buckets_of_their_own() -> None:
    """Each ask forgot the other's debt: 20 times the limit."""
    tasks = Tasks()
    tasks.start(0, limits={"rows": 100})
    tasks.start(1, limits={"bytes": 1000})
    tasks.run(10 * SECOND)
    assert [tasks.rows(0), tasks.rows(1)] == [pytest.approx(1000, rel=0.06)] * 2


def test_a_task_that_is_gone_leaves_its_place() -> None:
    coordinator = Coordinator()
    coordinator.ask(1, wanted(10**6))
    coordinator.ask(2, wanted(10**6))
    coordinator.ask(3, wanted(10))
    coordinator.service.on_gone(2, 0.0)
    later = [peer for peer, _ in coordinator.at(SECOND)]
    assert 2 not in later
    assert 3 in later


def test_thousands_that_wait_are_served_in_parts_of_bounded_size() -> None:
    """Catches: 10,000 grants in one iteration of the loop, and everybody else waits."""
    coordinator = Coordinator()
    limits = {"rows": 10**9}
    coordinator.ask(0, wanted(10**9, limits=limits))
    for peer in range(1, 3_000):
        coordinator.ask(peer, wanted(1, limits=limits))
    served, parts, now_ms = 0, 0, SECOND
    while (delay_ms := coordinator.service.next_change_ms(now_ms)) < math.inf:
        now_ms += delay_ms
        part = len(coordinator.at(now_ms))
        assert part <= 500
        served, parts = served + part, parts + 1
    assert (served, parts) == (2_999, 6)


def test_jobs_that_may_not_send_yet_cost_a_small_part_of_the_time() -> None:
    """Catches: 2,000 connections, each with a job of its own, kept the loop busy all the time."""
    coordinator = Coordinator()
    for peer in range(2_000):
        for _ in range(2):
            coordinator.ask(peer, wanted(10**6, job=f"job {peer}", limits={"rows": 1}))
    for _ in range(2):
        coordinator.ask(2_000, wanted(100, job="the last", limits={"rows": 1_000}))
    for now_ms in (500.0, 520.0, 540.0, 560.0):
        assert coordinator.at(now_ms) == [], "it is looked at after the others"
        assert coordinator.service.next_change_ms(now_ms) >= 20.0
    assert [peer for peer, _ in coordinator.at(580.0)] == [2_000]


@pytest.mark.parametrize(
    "wrong",
    [
        RowsWanted("x" * 201, 1, (1.0,)),
        RowsWanted("j", 0, (1.0,)),
        RowsWanted("j", 1, (-1.0,)),
        RowsWanted("j", 1, ()),
    ],
)
def test_a_message_that_makes_no_sense_is_refused(wrong: RowsWanted) -> None:
    with pytest.raises(ProtocolError):
        Coordinator().ask(1, wrong)


def test_a_grant_for_another_job_is_not_taken() -> None:
    """Catches: the next task of a worker took what the last one had been granted."""
    channel = RateChannel()
    limits = {"rows": 10}
    assert channel.ask("a", limits, 5, 50)
    assert channel.is_waiting
    assert channel.ask("b", limits, 5, 50)
    for job, rows in (("a", 0), ("b", 4)):
        deliver(channel, RowsGranted(wanted(5, 50, job, limits).job, 4), 0.0)
        assert channel.await_grant(0.0) == rows
    assert not channel.is_waiting


def test_waiting_tasks_learn_of_a_lost_coordinator_and_ask_again_once_it_is_back() -> None:
    channel = RateChannel()
    channel.ask("a", {"rows": 10}, 5, 50)
    channel.next_message(0.0)
    channel.on_connected(0.0)
    assert channel.next_message(0.0) is not None, "a new coordinator does not know"
    channel.on_lost(0.0)
    assert channel.await_grant(0.0) is None
    assert not channel.ask("a", {"rows": 10}, 5, 50)
    channel.on_connected(0.0)
    assert channel.ask("a", {"rows": 10}, 5, 50)
