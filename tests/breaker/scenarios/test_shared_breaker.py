"""What several tasks and a coordinator make of outcomes, mutes and probes, at exact times."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping

import pytest

from kafka_sink.breaker.mutes import Evidence
from kafka_sink.coordinator.breaker_messages import Mutes, Probe, reasoned
from kafka_sink.coordinator.schema import deliver
from kafka_sink.errors import BrokerRefusedError
from kafka_sink.model import Target, TopicPartition
from tests.support.job_of_tasks import INTERVAL, P0, P1, P2, Job, Task, frozen, started

REPLICAS = BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19)


def test_a_mute_by_one_task_holds_for_all_and_its_response_unmutes_for_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kafka_sink")
    job = started(8)
    frozen(job)
    job.run(100)
    assert job.mutes() == [{1}] * 8
    assert all("no response to 1 request(s)" in (t.gate.explain(P0) or "") for t in job.tasks)
    assert [task.manager.task_mutes.own_trips for task in job.tasks] == [1] + [0] * 7
    assert [task.manager.task_mutes.muted_count for task in job.tasks] == [1] * 8
    job.run(3_000)
    job.tasks[0].answer(P0)
    job.run(3_000)
    assert job.mutes() == [set()] * 8
    # One task warns of it, and each logs it once.
    done = sorted((one.levelname, one.getMessage().split()[2]) for one in caplog.records)
    assert done == [
        *[("INFO", "muted")] * 7,
        *[("INFO", "unmuted")] * 7,
        ("WARNING", "muted"),
        ("WARNING", "unmuted"),
    ]


def test_failures_of_all_tasks_together_mute() -> None:
    job = started(4)
    for task in job.tasks:
        task.send(P0, 30)
        task.answer(P0, REPLICAS, 30)
    assert job.mutes() == [set()] * 4, "30 rows are too few for any of them"
    job.run(600)
    assert job.mutes() == [{P0}] * 4
    text = job.tasks[3].gate.explain(P0) or ""
    assert (
        "it fails for 4 of 4 tasks that write to it and were asked; last error: NOT_ENOUGH_REPLICAS" in text
    )


def test_successes_of_others_outweigh_one_tasks_failures() -> None:
    job = started(4)
    for task in job.tasks[1:]:
        task.batch(P0)
    job.run(2_500)
    job.tasks[0].fail(P0, REPLICAS)
    job.run(1_000)
    assert job.mutes() == [{P0}, set(), set(), set()], "it is muted for the task that cannot write to it"
    job.tasks[0].waiting = {P0}
    job.run(2_000)
    assert job.tasks[0].sent[-1][1] == P0, "and by its own clock it probes"


def test_job_sends_one_probe_per_interval() -> None:
    job = started(28)
    frozen(job)
    for task in job.tasks[1:]:
        task.waiting = {P0}
    start = job.now
    asked = {task.number for task in job.tasks if task.probed}
    assert len(asked) == 20, "whether it responds to them"
    for _ in range(1_000):
        job.step()
    assert not [at for task in job.tasks for at, partition in task.sent if at > start and partition == P0]
    probes = sorted((at, task.number) for task in job.tasks for at, _ in task.probed if at > start)
    assert len(probes) >= 4
    assert not asked.intersection(number for _, number in probes), "they still wait for a response"
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(probes)]
    assert min(gaps) >= INTERVAL - 50
    assert max(gaps) <= INTERVAL + 600


def test_a_successful_probe_unmutes_for_all_and_a_failed_one_delays_the_next() -> None:
    job = started(3)
    for task in job.tasks:
        task.send(P0, 50)
        task.answer(P0, REPLICAS, 50)
    job.run(600)
    assert job.mutes() == [{P0}] * 3
    for task in job.tasks:
        task.waiting = {P0}
    tried: list[Task] = []

    def await_probe() -> Task:
        counts = [len(task.sent) for task in job.tasks]
        while True:
            job.step()
            found = [t for t, count in zip(job.tasks, counts, strict=True) if len(t.sent) > count]
            assert len(found) <= 1
            if found:
                tried.append(found[0])
                return found[0]

    prober = await_probe()
    prober.answer(P0, REPLICAS)
    prober.waiting = {P0}
    failed = job.now
    prober = await_probe()
    assert failed + INTERVAL <= job.now <= failed + INTERVAL + 600
    prober.answer(P0)
    job.run(600)
    assert job.mutes() == [set()] * 3
    assert tried[0] is not tried[1], "each in turn"


def test_a_partitions_trial_goes_to_the_task_that_has_rows() -> None:
    """Catches: trials that rotate through idle tasks: with 300 tasks and rows in one, none came in 600 s."""
    job = started(30)
    for task in job.tasks[:3]:
        task.fail(P0, REPLICAS)
    job.run(1_500)
    assert job.tasks[29].muted() == {P0}
    busy, muted = job.tasks[20], job.now
    while P0 in busy.gate.avoided:
        busy.gate.task_mutes.on_movable_rows(["t"])
        job.step()
        assert job.now < muted + 2 * INTERVAL + 600
    assert all(P0 in task.gate.avoided for task in job.tasks if task is not busy)
    busy.batch(P0)
    job.run(1_500)
    assert job.tasks[29].muted() == set()


def test_without_the_coordinator_each_task_goes_on_alone_and_reports_when_it_is_back() -> None:
    job = started(2)
    job.lose(0)
    job.run(50)
    frozen(job)
    job.run(200)
    assert job.mutes() == [{1}, set()]
    job.run(INTERVAL)
    assert [node for _, node in job.tasks[0].probed] == [1], "its own clock lets a probe through"
    job.connect(0)
    job.run(350)
    assert job.mutes() == [{1}, {1}]
    job.lose(0)
    job.lose(1)
    job.run(100)
    assert job.mutes() == [{1}, {1}]
    job.run(INTERVAL + 100)
    assert job.tasks[1].probed


def test_mutes_of_a_users_class_hold_for_all() -> None:
    job = started(3, **{"class": "a.users.Class"})
    job.tasks[2].manager.mute(P1, "my own reason")
    job.run(100)
    assert job.mutes() == [{P1}] * 3
    assert "my own reason" in (job.tasks[0].gate.explain(P1) or "")
    job.tasks[2].manager.unmute(P1)
    job.run(300)
    assert job.mutes() == [set()] * 3
    job.tasks[0].fail(P0, REPLICAS)
    job.run(3_000)
    assert job.mutes() == [{P0}, set(), set()], "the coordinator counts nothing"


def test_between_tasks_reports_do_not_pile_up() -> None:
    job = started(1)
    task = job.tasks[0]
    task.manager.mute(P2, "x")
    for _ in range(500):
        job.now += 500
        task.run_pass()
        assert task.gate.delay_ms(job.now) > 0
    assert len(list(iter(lambda: task.exchange.next_message(job.now), None))) <= 5


def test_a_task_with_many_failing_partitions_is_outvoted_by_those_that_write_there() -> None:
    """Catches: successes that are reported for 200 partitions only."""
    job = Job(20)
    job.cluster.leaders["t"] = [1 + number % 3 for number in range(300)]
    partitions = [TopicPartition("t", number) for number in range(300)]
    job.run(100)
    for partition in partitions:
        for task in job.tasks[1:4]:
            task.batch(partition)
    job.run(100)
    bad = job.tasks[0]
    for partition in partitions:
        bad.fail(partition, ConnectionResetError("its own network"))
    job.run(5_000)
    assert len(bad.muted()) == 300
    assert job.mutes()[1:] == [set()] * 19


def test_a_broker_that_responds_to_no_task_is_muted_for_all_on_one_tasks_report() -> None:
    job = started(5)
    job.tasks[0].manager.mute(1, "I say so")
    job.run(200)
    assert job.mutes()[1:] == [set()] * 4
    job.run(150)
    assert job.mutes() == [{1}] * 5


def test_a_new_mute_stops_tasks_that_have_not_started_again() -> None:
    job = started(40)
    frozen(job)
    job.run(200)
    first = job.tasks[0]
    first.answer(P0)
    job.run(250)
    assert 0 < job.mutes().count({1}) < 40
    job.tasks[0].manager.mute(1, "again", Evidence(silence_ms=600.0))
    job.run(350)
    assert job.mutes() == [{1}] * 40


# -- what goes amiss: old reports, lost memory, one task's bad network ------------------------------------


def tell(
    task: Task,
    *,
    whole: bool = False,
    added: Mapping[Target, str] | None = None,
    removed: Iterable[Target] = (),
) -> None:
    """The coordinator says so to a task."""
    deliver(task.exchange, Mutes(whole, reasoned((added or {}).items()), tuple(removed), 1), task.job.now)


def test_a_late_answer_says_nothing() -> None:
    """Catches: a response from before a broker froze that a stalled task reports late."""
    job = started(2)
    job.tasks[1].batch(P0)
    job.paused = {1}
    job.tasks[0].manager.mute(1, "silent", Evidence(silence_ms=800.0))
    job.run(280)
    assert job.tasks[1].exchange.next_message_delay_ms(job.now) == 0.0, "an answer lies there"
    job.run(200)
    job.paused = set()
    job.run(200)
    assert job.mutes() == [{1}, {1}]


def test_a_late_report_leaves_its_failures_out() -> None:
    job = started(2)
    task = job.tasks[1]
    task.send(P0, 60)
    task.answer(P0, REPLICAS, 60)
    job.paused = {1}
    job.run(30_000)
    job.paused = set()
    job.run(100)
    job.tasks[0].send(P0, 60)
    job.tasks[0].answer(P0, REPLICAS, 60)
    job.run(2_500)
    assert job.mutes() == [set(), set()], "60 rows of a hundred, and others half a minute ago"


def test_a_tasks_own_unmute_is_not_undone_by_the_next_message() -> None:
    """Catches: a needless mute and unmute in the log while the coordinator's message is in flight."""
    job = Job(1)
    (task,) = job.tasks
    job.run(10)
    tell(task, added={1: "x", 2: "y"})
    task.run_pass()
    assert task.muted() == {1, 2}
    task.manager.unmute(1, "a probe succeeded")
    task.run_pass()
    tell(task, added={P2: "z"})
    task.run_pass()
    assert task.muted() == {2, P2}
    # Muted again by own evidence: the coordinator's late message is about the mute before.
    task.manager.mute(1, "again")
    tell(task, removed=(1,))
    task.run_pass()
    assert task.muted() == {1, 2, P2}


def _probes_of(job: Job, ms: float) -> list[float]:
    """The times at which brokers are probed. No broker responds."""
    start = job.now
    job.run(ms)
    connected = [task for task in job.tasks if task.number in job.connected]
    return sorted(at for task in connected for at, _ in task.probed if at > start)


def test_a_new_coordinator_learns_of_mutes_whose_task_is_gone() -> None:
    """Catches: as many probes an interval as there are tasks, after the coordinator was restarted."""
    job = started(50)
    frozen(job)
    job.run(200)
    assert job.mutes() == [{1}] * 50
    job.restart()
    for number in range(1, 50):
        job.connect(number)
    job.run(350)
    assert set(job.service.mutes) == {1}
    assert job.mutes()[1:] == [{1}] * 49
    probes = _probes_of(job, 10_000)
    # Some still wait for a response that the former coordinator has asked for, and send no probe.
    assert 3 <= len(probes) <= 5
    assert min(later - earlier for earlier, later in itertools.pairwise(probes)) >= INTERVAL - 50
    for task in job.tasks[1:]:
        task.answering = {1}
        if task.probed:
            task.gate.on_probe_done(1, None, job.now)
    job.run(1_000)
    assert job.mutes()[1:] == [set()] * 49


def test_a_coordinator_that_is_killed_causes_no_probes() -> None:
    """Catches: all tasks that probe at once when they lose the coordinator, though it is back at once."""
    job = started(30)
    frozen(job)
    job.run(2 * INTERVAL)
    before, lost = {task.number: len(task.probed) for task in job.tasks}, job.now
    job.restart()
    job.run(150)
    assert {task.number: len(task.probed) for task in job.tasks} == before
    for number in range(30):
        job.connect(number)
    job.run(5 * INTERVAL)
    probes = sorted(at for task in job.tasks for at, _ in task.probed if at > lost)
    # Some tasks are asked when mutes are reported again. Who still waits for an earlier probe sends no other.
    asked, later = [at for at in probes if at < lost + 400], [at for at in probes if at >= lost + 400]
    assert len(asked) <= 20
    assert 2 <= len(later) <= 5
    assert min(after - before for before, after in itertools.pairwise(later)) >= INTERVAL - 50


def test_a_mute_that_one_task_kept_is_refuted_by_those_that_know_better() -> None:
    """Catches: a healthy broker that is muted for all because one task missed its return."""
    job = started(3)
    frozen(job)
    job.run(200)
    job.lose(2)
    job.tasks[0].answer(P0)
    job.run(200)
    assert job.mutes() == [set(), set(), {1}]
    for _ in range(100):
        job.step()
        job.tasks[0].batch(P0)
        job.tasks[1].batch(P0)
    job.connect(2)
    for _ in range(100):
        job.step()
        assert job.mutes()[:2] == [set(), set()]


def test_bad_network_of_one_task_does_not_mute_brokers_for_all_tasks() -> None:
    """Catches: a mute by one task, ended by the others' responses, found again by the one, and so on."""
    job = started(3)
    lonely, others = job.tasks[0], job.tasks[1:]
    lonely.batch(P0)
    job.run(10)
    lonely.send(P0)
    rested = dict.fromkeys((0, 1, 2), 0)
    for number in range(2_000):
        job.step()
        lonely.batch(P1)
        for task in others:
            if P0 not in task.gate.avoided:
                task.batch(P0)
        if number >= 300:
            for task in job.tasks:
                rested[task.number] += bool(task.muted())
    assert rested[1] == rested[2] == 0
    assert rested[0] > 1_600
    assert lonely.manager.task_mutes.own_trips <= 3


def test_a_permit_does_not_outlive_its_connection() -> None:
    job = Job(1)
    (task,) = job.tasks
    job.run(10)
    tell(task, added={P0: "x"})
    task.run_pass()
    assert not task.gate.task_mutes.may_probe(P0)
    deliver(task.exchange, Probe((P0,), False), job.now)
    task.run_pass()
    assert task.gate.task_mutes.may_probe(P0)
    task.exchange.on_lost(job.now)
    task.exchange.on_connected(job.now)
    tell(task, whole=True, added={P0: "x"})
    task.run_pass()
    assert not task.gate.task_mutes.may_probe(P0), "perhaps it is another task's by now"
