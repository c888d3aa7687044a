"""The task's side of the shared breaker: when it reports."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from kafka_sink.breaker.states import Target
from kafka_sink.coordinator.breaker.channel import BreakerChannel
from kafka_sink.coordinator.breaker.messages import (
    BreakerReport,
    BreakerUpdate,
    OutcomeCounts,
    decode_report,
    encode_update,
)
from kafka_sink.model import TopicPartition
from kafka_sink.timing_bounds import HEALTHY_REPORT_MS, next_beat_ms


class Bench:
    """A channel and what its sender's thread brings along: a breaker that has muted nothing itself."""

    def __init__(self) -> None:
        self.channel = BreakerChannel(lambda: None, 500.0)
        self.probes = SimpleNamespace(take_failures=list, held=list, wanted=list)
        self.local = SimpleNamespace(now_ms=0.0, mutes_to_report=list)

    def exchange(self, now_ms: float) -> None:
        """A pass of the sender."""
        self.local.now_ms = now_ms
        manager: Any = SimpleNamespace(
            local=self.local,
            probes=self.probes,
            view=(),
            apply_shared=lambda muted, leases: None,
            on_coordinator_lost=lambda: None,
            has_muted_leader=lambda partition: False,
        )
        self.channel.exchange(manager)

    def connect(self, now_ms: float) -> None:
        """And say so at once."""
        self.channel.on_connected(now_ms)
        self.exchange(now_ms)
        assert self.channel.next_message(now_ms) is not None

    def mute(self, target: Target, now_ms: float) -> None:
        """The coordinator says so."""
        self.channel.on_push(encode_update(BreakerUpdate(False, {target: "silent"})), now_ms)
        self.exchange(now_ms)

    def due_ms(self, now_ms: float) -> float:
        """When it reports next."""
        return now_ms + self.channel.next_change_ms(now_ms)

    def report(self, now_ms: float) -> BreakerReport:
        self.exchange(now_ms)
        body = self.channel.next_message(now_ms)
        assert body is not None
        return decode_report(body)


def test_the_coordinator_learns_once_that_a_task_has_ended() -> None:
    bench = Bench()
    channel = bench.channel
    channel.hurry()
    assert channel.next_message(0.0) is None, "it knows nothing of the task"
    bench.connect(0.0)
    channel.hurry()
    assert channel.next_message(1.0) == {"resting": True}
    assert channel.next_message(1.0) is None
    channel.hurry()
    assert channel.next_message(2.0) is None


def test_while_a_target_is_muted_a_task_without_news_reports_as_ever() -> None:
    """Catches: four times as many messages of all tasks while a broker is muted."""
    bench = Bench()
    bench.connect(10_100.0)
    assert bench.due_ms(10_100.0) == float("inf")
    bench.mute(1, 10_100.0)
    assert bench.due_ms(10_100.0) == next_beat_ms(10_100.0, HEALTHY_REPORT_MS) == 12_000.0
    partition = TopicPartition("t", 1)
    bench.channel.outcomes(1, [(partition, 5)], None, 10_000.0, 10_200.0)
    assert bench.due_ms(10_200.0) == 12_000.0
    bench.channel.outcomes(1, [(partition, 5)], ConnectionError("lost"), 10_000.0, 10_200.0)
    assert bench.due_ms(10_200.0) == 10_600.0


def test_failures_of_a_partition_that_is_muted_for_all_are_not_reported() -> None:
    """Catches: a thousand tasks that went on to report thousands of partitions that were muted already."""
    bench = Bench()
    bench.connect(0.0)
    muted, failing = TopicPartition("t", 0), TopicPartition("t", 1)
    bench.mute(muted, 0.0)
    bench.channel.outcomes(1, [(muted, 5), (failing, 5)], ConnectionError("lost"), 0.0, 100.0)
    assert [one.partition for one in bench.report(600.0).outcomes] == [failing]


def test_long_errors_of_many_partitions_are_reported_in_parts() -> None:
    """Catches: a report that was too large for the relay, which ended the task's connection."""
    bench = Bench()
    bench.connect(0.0)
    failing = [TopicPartition("t", number) for number in range(700)]
    error = ConnectionError("\U0001d11e" * 300)
    bench.channel.outcomes(1, [(one, 5) for one in failing], error, 0.0, 100.0)
    parts: list[tuple[OutcomeCounts, ...]] = []
    while sum(len(part) for part in parts) < len(failing):
        parts.append(bench.report(600.0).outcomes)
        assert sum(len(json.dumps(one.error)) for one in parts[-1]) < 300_000
    assert [one.partition for part in parts for one in part] == failing


def test_reports_of_a_hosts_tasks_meet() -> None:
    beats = {next_beat_ms(10_000.0 + offset, HEALTHY_REPORT_MS) for offset in range(0, 2_000, 7)}
    assert beats == {12_000.0}
    assert next_beat_ms(float("-inf"), HEALTHY_REPORT_MS) == float("-inf")
