"""The task's side of the shared breaker: when it reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kafka_sink.coordinator.breaker.channel import BreakerChannel
from kafka_sink.coordinator.breaker.messages import BreakerReport
from kafka_sink.model import TopicPartition
from kafka_sink.timing_bounds import HEALTHY_REPORT_MS, next_beat_ms


def test_the_coordinator_learns_once_that_a_task_has_ended() -> None:
    channel = BreakerChannel(lambda: None, 500.0)
    channel.hurry()
    assert channel.next_message(0.0) is None, "it knows nothing of the task"
    channel._outbox.append((0.0, BreakerReport(rows=1)))
    channel.hurry()
    assert channel.next_message(1.0) == {"rows": 1}
    assert channel.next_message(1.0) == {"resting": True}
    assert channel.next_message(1.0) is None
    channel.hurry()
    assert channel.next_message(2.0) is None


def test_while_a_target_is_muted_a_task_without_news_reports_as_ever() -> None:
    """Catches: four times as many messages of all tasks while a broker is muted."""
    channel = BreakerChannel(lambda: None, 500.0)
    channel._connected, channel._sent_ms = True, 10_100.0
    channel._muted = {1: "silent"}
    assert channel._due_ms() == next_beat_ms(10_100.0, HEALTHY_REPORT_MS) == 12_000.0
    channel._muted, channel._rows = {}, 5
    assert channel._due_ms() == 12_000.0
    channel._failures = [(1, "no response")]
    assert channel._due_ms() == 10_600.0


def test_failures_of_a_partition_that_is_muted_for_all_are_not_reported() -> None:
    """Catches: a thousand tasks that went on to report thousands of partitions that were muted already."""
    channel = BreakerChannel(lambda: None, 500.0)
    channel._connected = True
    muted, failing = TopicPartition("t", 0), TopicPartition("t", 1)
    channel._muted = {muted: "errors"}
    channel.outcomes(1, [(muted, 5), (failing, 5)], ConnectionError("lost"), 0.0, 100.0)
    manager: Any = SimpleNamespace(
        local=SimpleNamespace(now_ms=200.0), has_muted_leader=lambda partition: False
    )
    assert [one.partition for one in channel._outcomes(manager)] == [failing]


def test_reports_of_a_hosts_tasks_meet() -> None:
    beats = {next_beat_ms(10_000.0 + offset, HEALTHY_REPORT_MS) for offset in range(0, 2_000, 7)}
    assert beats == {12_000.0}
    assert next_beat_ms(float("-inf"), HEALTHY_REPORT_MS) == float("-inf")
