"""A task's side of the shared breaker: what it says when, and what it makes of what it is told."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from random import Random
from typing import TypeVar

import pytest

from kafka_sink.coordinator.breaker_messages import (
    MAX_TARGETS,
    MAX_WAITING,
    Answer,
    MuteChanges,
    Mutes,
    Outcomes,
    OwnMute,
    Probe,
    Question,
    Waiting,
    Watch,
    reasoned,
)
from kafka_sink.coordinator.schema import MAX_MESSAGE_BYTES, Message, decode, deliver, encode
from kafka_sink.errors import BrokerRefusedError
from kafka_sink.model import Target, TopicPartition
from tests.support.job_of_tasks import INTERVAL, P0, P1, Job, Task, named

REPLICAS = BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19)
_Kind = TypeVar("_Kind", bound=Message)


class Chance(Random):
    """Always the same."""

    def __init__(self, always: float) -> None:
        super().__init__(0)
        self._always = always

    def random(self) -> float:
        return self._always


class Bench:
    """One task, and what it says. The coordinator is the test."""

    def __init__(self, partitions: int = 3) -> None:
        self.job = Job(1)
        self.job.cluster.leaders["t"] = [1 + number % 3 for number in range(partitions)]
        self.task: Task = self.job.tasks[0]
        self.channel = self.task.exchange
        self.task.run_pass()
        self.tell(Mutes(True, (), (), 1))
        assert self.said() == []

    def tell(self, message: Message) -> None:
        deliver(self.channel, decode(encode(message)), self.job.now)
        self.task.run_pass()

    def mute(self, *targets: Target) -> None:
        self.tell(Mutes(False, reasoned((one, "x") for one in targets), (), 1))

    def said(self, ms: float = 0.0) -> list[Message]:
        """Within so long."""
        found: list[Message] = []
        for _ in range(max(1, int(ms / 10))):
            self.job.now += 10 * (ms > 0)
            self.task.run_pass()
            while (message := self.channel.next_message(self.job.now)) is not None:
                data = encode(message)
                assert len(data) < MAX_MESSAGE_BYTES
                found.append(decode(data))
        return found

    def only(self, kind: type[_Kind]) -> _Kind:
        """All that it says now."""
        (found,) = self.said()
        assert isinstance(found, kind)
        return found


def counts(messages: Iterable[Message]) -> Mapping[TopicPartition, tuple[int, int]]:
    """By partition, written and failed."""
    found: dict[TopicPartition, tuple[int, int]] = {}
    for message in messages:
        assert isinstance(message, Outcomes)
        found |= {one.partition: (one.written, one.failed) for one in message.partitions}
    return found


def test_a_task_without_news_says_nothing() -> None:
    bench = Bench()
    for _ in range(50):
        bench.task.batch(P0)
        assert bench.said(100.0) == []
        assert bench.channel.next_change_ms(bench.job.now) == math.inf
    bench.mute(1)
    assert bench.said(10_000.0) == [], "a broker is probed by any task"


def test_failures_are_reported_at_once_and_then_once_an_interval() -> None:
    bench = Bench()
    times = []
    for _ in range(100):
        bench.task.batch(P0, ConnectionError("lost"))
        found = bench.said(10.0)
        times += [bench.job.now] * len([one for one in found if isinstance(one, Outcomes)])
    assert len(times) in (2, 3)
    assert times[1] - times[0] >= 500.0


def test_few_of_thousands_of_tasks_report_at_first() -> None:
    """Catches: 10,000 tasks that report thousands of partitions within half a second, some seconds of the
    coordinator's work, while they give it up after two."""
    times = []
    for number in range(100):
        bench = Bench()
        bench.tell(Mutes(False, (), (), 10_000))
        bench.job.random = Chance(number / 100)
        bench.task.batch(P0, REPLICAS)
        is_said = bool(bench.said())
        times.append(0.0 if is_said else bench.channel.next_change_ms(bench.job.now))
    assert sum(at < 600.0 for at in times) == pytest.approx(20, abs=1)
    assert max(times) < 3_000.0
    bench.mute(P0)
    assert bench.said(5_000.0) == [], "what is muted meanwhile needs no report"


def test_rows_count_since_the_producer_began() -> None:
    bench = Bench()
    bench.task.send(P1, 70)
    bench.task.answer(P1, None, 70)
    bench.job.lose(0)
    bench.job.connect(0)
    bench.task.run_pass()
    bench.task.send(P0, 30)
    bench.task.answer(P0, REPLICAS, 30)
    assert bench.only(Outcomes).rows == 100


def test_rows_reported_before_a_task_connects_again_count_once() -> None:
    """Catches: a partition that is muted before trigger.message.count rows, since the coordinator takes the
    task for another one after each idle connection that it closed."""
    bench = Bench()
    for rows in (70, 30):
        bench.task.send(P0, rows)
        bench.task.answer(P0, REPLICAS, rows)
        assert bench.only(Outcomes).rows == rows
        bench.job.lose(0)
        bench.job.connect(0)
        bench.task.run_pass()


def test_failures_of_a_partition_that_is_muted_for_all_are_not_reported() -> None:
    """Catches: a thousand tasks that went on to report thousands of partitions that were muted already."""
    bench = Bench()
    bench.mute(P0)
    for one in (P0, P1):
        bench.task.batch(one, REPLICAS)
    assert counts(bench.said()) == {P1: (0, 1)}


def test_the_largest_messages_fit() -> None:
    """Catches: a report that was too large, which ended the task's connection."""
    bench = Bench()
    long = "\U0001d11e" * 300
    names: list[Target] = [TopicPartition("t" * 240 + str(number), 0) for number in range(3 * MAX_TARGETS)]
    for number, target in enumerate(names):
        bench.task.manager.mute(target, f"{number}{long}")
    wanted = [one for one in bench.said() if isinstance(one, MuteChanges)]
    assert [len(one.muted) for one in wanted] == [MAX_TARGETS] * 3
    for target in names:
        bench.task.manager.unmute(target)
    over = [one for one in bench.said() if isinstance(one, MuteChanges)]
    assert [len(one.unmuted) for one in over] == [MAX_TARGETS] * 3


def test_thousands_of_failing_partitions_are_reported_in_parts() -> None:
    bench = Bench(2_000)
    partitions = named(2_000)
    for number, one in enumerate(partitions):
        bench.task.batch(one, ConnectionError(f"{number}" + "\U0001d11e" * 300))
    first = bench.said(10.0)
    assert len(counts(first)) == MAX_TARGETS
    assert counts(first + bench.said(2_500.0)).keys() == set(partitions)
    bench.tell(Watch(tuple(partitions)))
    assert counts(bench.said()) == dict.fromkeys(partitions, (0, 1)), "who watches answers at once"


def test_watchers_answer_even_if_they_have_written_nothing() -> None:
    bench = Bench()
    bench.task.batch(P1)
    bench.task.batch(P1, REPLICAS)
    bench.said()
    bench.tell(Watch((P0, P1)))
    answer = bench.only(Outcomes)
    assert counts([answer]) == {P0: (0, 0), P1: (1, 1)}
    failed = [(one.answered, one.error) for one in answer.partitions if one.failed == 1]
    assert failed == [(True, "NOT_ENOUGH_REPLICAS")], "it was reported before"
    bench.mute(2)
    bench.tell(Watch((P1,)))
    assert counts(bench.said()) == {P1: (0, 0)}, "a muted broker's partitions are not to blame"


def test_a_question_is_answered_by_a_late_response_or_by_the_next_one() -> None:
    bench = Bench()
    bench.task.batch(P0)
    bench.job.now += 100.0
    bench.tell(Question(1, 200.0))
    assert bench.said() == [Answer(1, 100.0)]
    bench.tell(Question(1, 50.0))
    assert bench.said() == []
    assert [node for _, node in bench.task.probed] == [1]
    bench.job.now += 30.0
    bench.task.gate.on_probe_done(1, None, bench.job.now)
    assert bench.said() == [Answer(1, 0.0)]


def test_only_the_last_state_of_a_target_is_sent() -> None:
    bench = Bench()
    bench.task.manager.mute(1, "a")
    bench.task.manager.mute(2, "b")
    bench.task.manager.unmute(1)
    bench.task.manager.mute(P1, "b")
    assert bench.only(MuteChanges) == MuteChanges((OwnMute(2, "b", 0.0), OwnMute(P1, "b", 0.0)), (1,))


def test_a_failed_probe_is_said() -> None:
    bench = Bench()
    bench.mute(P0)
    bench.task.waiting = {P0}
    bench.task.run_pass()
    bench.tell(Probe((P0,), False))
    assert P0 not in bench.task.waiting, "it went out"
    bench.task.answer(P0, REPLICAS)
    assert bench.only(MuteChanges).failed == (P0,)


def test_a_probe_that_the_task_has_no_rows_for_is_left_to_another() -> None:
    bench = Bench()
    bench.mute(P0)
    bench.task.manager.task_mutes.may_probe(P0)
    assert [type(one) for one in bench.said(600.0)] == [Waiting]
    bench.said(1_500.0)
    bench.tell(Probe((P0,), False))
    assert bench.only(MuteChanges).unused == (P0,)
    bench.task.manager.task_mutes.may_probe(P0)
    assert [type(one) for one in bench.said(600.0)] == [Waiting], "it has rows again"


def test_muted_partitions_with_rows_are_named_some_of_many_and_again_when_they_change() -> None:
    bench = Bench(500)
    partitions = named(500)
    bench.mute(*partitions[:450])
    for one in partitions[:300]:
        bench.task.manager.task_mutes.may_probe(one)
    bench.task.gate.task_mutes.on_movable_rows(["t"])
    (found,) = bench.said(600.0)
    assert isinstance(found, Waiting)
    assert len(found.waited_for) == len(found.acceptable) == MAX_WAITING
    assert set(found.waited_for) < set(partitions[:300])
    assert set(found.acceptable) < set(partitions[300:450])
    assert bench.said(2_000.0) == []


def test_waiting_partitions_are_not_sent_after_each_unmute() -> None:
    """Catches: 5,000 partitions that were written again, and each time 1,000 tasks said what they had rows
    for: replies took 9.5 s."""
    bench = Bench(500)
    partitions = named(500)
    bench.mute(*partitions)
    for one in partitions:
        bench.task.manager.task_mutes.may_probe(one)
    said, most = bench.said(600.0), 0
    assert [type(one) for one in said] == [Waiting]
    for start in range(0, 450, 10):
        for one in partitions:
            bench.task.manager.task_mutes.may_probe(one)
        bench.tell(Mutes(False, (), tuple(partitions[start : start + 10]), 1))
        most = max(most, len(found := bench.said(300.0)))
        said += found
    assert most == 1
    assert 2 <= len(said) <= 12
    left = partitions[450:]
    last = {one for message in said[-2:] if isinstance(message, Waiting) for one in message.waited_for}
    assert len(last.intersection(left)) > 20, "those that are still muted have a task that can probe"


def test_rows_come_back_in_each_step_from_twice_as_many_tasks() -> None:
    delays = []
    for number in range(250):
        bench = Bench()
        bench.job.random = Chance(number / 250)
        bench.mute(1)
        bench.tell(Mutes(False, (), (1,), 1_000))
        delays.append(0.0 if not bench.task.muted() else bench.channel.next_change_ms(bench.job.now))
    for step in range(3, 10):
        assert sum(delay <= 100.0 * step for delay in delays) == pytest.approx(2**step / 4, abs=1)


def test_the_coordinators_last_message_about_a_target_counts() -> None:
    bench = Bench()
    bench.job.random = Chance(1.0)
    bench.mute(P0, P1)
    bench.tell(Mutes(False, (), (P0,), 1_000))
    bench.mute(P0)
    bench.said(INTERVAL)
    assert bench.task.muted() == {P0, P1}, "muted again before rows came back here"
    bench.tell(Mutes(True, reasoned([(P0, "x")]), (), 1))
    assert bench.task.muted() == {P0}, "of a new coordinator"


def test_only_the_mutes_of_the_cluster_that_a_task_writes_to_are_current() -> None:
    """A task must not give rows to partitions before it knows what is muted in their cluster."""
    job = Job(1)
    task, channel = job.tasks[0], job.tasks[0].exchange
    task.cluster_id = None
    whole = Mutes(True, reasoned([(1, "x")]), (), 1)
    channel.expect()
    assert not channel.is_current
    channel.on_connected(job.now)
    deliver(channel, whole, job.now)
    task.run_pass()
    assert not channel.is_current, "of which cluster?"
    task.cluster_id = "a"
    assert not channel.is_current
    channel.on_connected(job.now)
    deliver(channel, whole, job.now)
    assert not channel.is_current, "the sender has not applied them"
    task.run_pass()
    assert channel.is_current
    assert channel.is_waiting
    task.cluster_id = "b"
    assert not channel.is_current, "the bootstrap name has moved to another cluster"
    channel.on_lost(job.now)
    assert channel.is_current, "it works alone"


def test_a_task_whose_bootstrap_name_moves_leaves_the_mutes_behind() -> None:
    """Catches: broker 1 of the cluster that a bootstrap name had moved to was muted, as the former one's."""
    bench = Bench()
    bench.mute(1)
    bench.task.gate.on_other_cluster(bench.job.now)
    assert bench.task.muted() == set()
    assert bench.said() == []
    bench.channel.on_connected(bench.job.now)
    bench.tell(Mutes(True, (), (), 1))
    assert bench.said() == []


def test_messages_not_sent_before_a_loss_are_not_sent_after_it() -> None:
    bench = Bench()
    bench.task.batch(P0, REPLICAS)
    bench.task.run_pass()
    assert bench.channel.next_message_delay_ms(bench.job.now) == 0.0
    assert bench.channel.next_message_delay_ms(bench.job.now) == 0.0, "between tasks, too"
    bench.channel.on_lost(bench.job.now)
    assert bench.said(INTERVAL) == []
