"""When a task warns that its batch may not be committed in time."""

from __future__ import annotations

import math

from kafka_sink.transactions.task_attempt import OpenTime


def test_a_task_warns_once_when_half_of_its_transactions_time_is_over() -> None:
    one = OpenTime(900_000)
    assert one.of_own(1e9) is None, "nothing is open before the first row"
    one.began(1_000)
    assert one.of_own(451_000) is None
    said = one.of_own(452_000)
    assert said is not None
    assert "has been open for 451 s" in said
    assert "kafka.transaction.timeout.ms = 900000 ms" in said
    assert one.of_own(800_000) is None


def test_earlier_tasks_are_asked_for_in_a_batch_that_was_planned_long_ago_only() -> None:
    assert not OpenTime(900_000, 450_000).earlier_may_be_long
    assert not OpenTime(900_000, -5_000).earlier_may_be_long, "clocks of two hosts"
    old = OpenTime(900_000, 450_001)
    assert old.earlier_may_be_long
    assert old.of_others(0) is None
    assert "3 transactions have been open for more than 450 s" in (old.of_others(3) or "")


def test_without_a_limit_nothing_is_said() -> None:
    one = OpenTime(math.inf)
    one.began(0)
    assert one.of_own(1e12) is None
    assert not one.earlier_may_be_long
