"""A task's side of the rate limit, in virtual time."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pytest

from kafka_sink.clock import TaskActivity
from kafka_sink.coordinator.rates import RateChannel
from kafka_sink.errors import DeliveryError
from kafka_sink.task.rate_limit import RateLimit

TABLE = pa.table({"value": [b"0123456789"] * 1000})


class Time:
    """A clock that a sleep moves on."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def clock(self) -> float:
        return self.now_ms

    def sleep(self, seconds: float) -> None:
        self.now_ms += 1000 * seconds

    def limit(self, limits: dict[str, int]) -> RateLimit:
        return RateLimit(limits, TaskActivity(self.clock), self.clock)


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Time:
    time_of_limits = Time()
    monkeypatch.setattr("kafka_sink.task.rate_limit.time", time_of_limits)
    return time_of_limits


def unchecked() -> None:
    pass


def test_without_a_coordinator_a_task_keeps_to_its_share(at: Time, caplog: pytest.LogCaptureFixture) -> None:
    limit = at.limit({"rows": 1000})
    limit.begin("job", 4)
    sent = [one.num_rows for _ in range(3) for one in limit.slices(TABLE, unchecked)]
    assert sum(sent) == 3000
    assert at.now_ms == pytest.approx(12_000, rel=0.05)
    assert max(sent) <= 25
    assert limit.waited_ms == at.now_ms
    (record,) = caplog.records
    assert record.getMessage() == (
        "the coordinator that shares the rate limit cannot be reached: this task limits itself to 250 rows "
        "per second"
    )


def test_bytes_are_limited_by_what_rows_have(at: Time) -> None:
    limit = at.limit({"rows": 10**6, "bytes": 7_000})
    limit.begin("job", 1)
    slices = list(limit.slices(TABLE, unchecked))
    assert pa.concat_tables(slices).equals(TABLE), "all rows, in order"
    # 10 bytes and an offset a row.
    assert at.now_ms == pytest.approx(2_000, rel=0.1)


def test_a_task_that_was_given_up_ends_while_it_waits(at: Time) -> None:
    limit = at.limit({"rows": 1})
    limit.begin("job", 1)

    def check() -> None:
        if at.now_ms > 500:
            raise DeliveryError("given up")

    with pytest.raises(DeliveryError):
        list(limit.slices(TABLE, check))
    assert at.now_ms < 700


class NoGrants(RateChannel):
    """A coordinator that answers, and grants nothing."""

    def __init__(self, at: Time) -> None:
        super().__init__()
        self.at = at
        self.is_shared = True

    def ask(self, job: str, limits: Mapping[str, int], rows: int, size: int) -> bool:
        return True

    def await_grant(self, timeout_ms: float) -> int | None:
        self.at.now_ms += timeout_ms
        return 0


def test_a_coordinator_that_grants_nothing_is_done_without_after_a_while(at: Time) -> None:
    """Catches: a task that waits for ever."""
    limit = at.limit({"rows": 1000})
    limit.begin("job", 4, NoGrants(at))
    first = next(iter(limit.slices(TABLE, unchecked)))
    assert 0 < first.num_rows <= 25
    assert 60_000 <= at.now_ms < 61_000
    # Of 10,000 tasks that share a row a second, each waits for hours.
    limit = at.limit({"rows": 1})
    limit.begin("job", 10_000, NoGrants(at))
    at.now_ms = 0.0
    next(iter(limit.slices(TABLE, unchecked)))
    assert at.now_ms > 10_000_000
