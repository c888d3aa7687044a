"""What several tasks and a coordinator make of outcomes, mutes and probes, at exact times."""

from __future__ import annotations

import itertools

from kafka_sink.breaker.mutes import Evidence
from kafka_sink.errors import BrokerRefusedError
from kafka_sink.model import TopicPartition
from tests.support.job_of_tasks import INTERVAL, P0, P1, P2, Job, Task, frozen

REPLICAS = BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19)


def test_a_mute_by_one_task_holds_for_all_and_its_response_unmutes_for_all() -> None:
    job = Job(8)
    job.run(100)
    frozen(job)
    job.run(100)
    assert job.mutes() == [{1}] * 8
    assert all("no response to 1 request(s)" in (t.gate.explain(P0) or "") for t in job.tasks)
    assert [task.manager.local.own_trips for task in job.tasks] == [1] + [0] * 7
    assert [task.manager.local.muted_count for task in job.tasks] == [1] * 8
    job.tasks[0].answer(P0)
    job.run(600)
    assert job.mutes() == [set()] * 8


def test_failures_of_all_tasks_together_mute() -> None:
    job = Job(4)
    job.run(100)
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
    job = Job(4)
    job.run(100)
    for task in job.tasks[1:]:
        task.batch(P0)
    job.run(2_500)
    job.tasks[0].fail(P0, REPLICAS)
    job.run(1_000)
    assert job.mutes() == [{P0}, set(), set(), set()], "it is muted for the task that cannot write to it"
    job.tasks[0].waiting = {P0}
    job.run(2_000)
    assert job.tasks[0].sent[-1][1] == P0, "and by its own clock it probes"


def test_a_silence_that_others_refute_mutes_for_one_task_only() -> None:
    job = Job(3)
    job.run(100)
    first, other = job.tasks[0], job.tasks[1]
    first.batch(P0)
    job.run(10)
    first.send(P0)
    for _ in range(120):
        job.step()
        first.batch(P1)
        other.batch(P0)
    # Healthy outcomes are reported every two seconds and end the mute of the others.
    for _ in range(250):
        job.step()
        first.batch(P1)
        other.batch(P0)
    assert other.muted() == set()


def test_one_probe_an_interval_for_the_whole_job() -> None:
    job = Job(40)
    job.run(100)
    frozen(job)
    for task in job.tasks[1:]:
        task.waiting = {P0}
    start = job.now
    asked = {task.number for task in job.tasks if task.probed}
    assert len(asked) == 20, "whether it responds to them"
    for _ in range(2_000):
        job.step()
    assert not [at for task in job.tasks for at, partition in task.sent if at > start and partition == P0]
    probes = sorted((at, task.number) for task in job.tasks for at, _ in task.probed if at > start)
    assert len(probes) >= 9
    assert not asked.intersection(number for _, number in probes), "they still wait for a response"
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(probes)]
    assert min(gaps) >= INTERVAL - 50
    assert max(gaps) <= INTERVAL + 600


def test_a_successful_probe_unmutes_for_all_and_a_failed_one_delays_the_next() -> None:
    job = Job(3)
    job.run(100)
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


def test_if_the_probing_task_is_gone_another_probes() -> None:
    job = Job(2)
    job.run(100)
    frozen(job)
    while (prober := job.prober()) is None:
        job.step()
    job.lose(prober)
    lost = job.now
    while job.prober() is None:
        job.step()
    assert job.prober() == 1 - prober
    assert lost + INTERVAL <= job.now <= lost + INTERVAL + 600


def test_a_broker_is_probed_by_tasks_that_have_no_rows_for_it() -> None:
    """Catches: a broker that stays muted because no task holds a batch for it, and rows that are
    sent to a dead one."""
    job = Job(60)
    job.run(100)
    frozen(job)
    rested = job.now
    job.run(5_000)
    assert all(P0 in task.gate.mutes for task in job.tasks), "no task lets rows through"
    for task in job.tasks:
        task.answering = {1}
    back = job.now
    while job.tasks[7].muted():
        job.step()
        assert job.now < back + INTERVAL + 1_000
    probes = sum(at > rested for task in job.tasks for at, _ in task.probed)
    assert probes <= (job.now - rested) / INTERVAL + 1


def test_a_partitions_trial_goes_to_the_task_that_has_rows() -> None:
    """Catches: trials that rotate through idle tasks: with 300 tasks and rows in one, none came in 600 s."""
    job = Job(100)
    job.run(100)
    for task in job.tasks[:3]:
        task.fail(P0, REPLICAS)
    job.run(1_500)
    assert job.tasks[99].muted() == {P0}
    busy, muted = job.tasks[50], job.now
    while P0 in busy.gate.mutes:
        busy.gate.local.note_free_rows(["t"])
        job.step()
        assert job.now < muted + 2 * INTERVAL + 600
    assert all(P0 in task.gate.mutes for task in job.tasks if task is not busy)
    busy.batch(P0)
    job.run(1_500)
    assert job.tasks[99].muted() == set()


def test_without_the_coordinator_each_task_goes_on_alone_and_reports_when_it_is_back() -> None:
    job = Job(2)
    job.run(100)
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
    job = Job(3, **{"class": "a.users.Class"})
    job.run(100)
    job.tasks[2].manager.mute(P1, "my own reason")
    job.run(100)
    assert job.mutes() == [{P1}] * 3
    assert "my own reason" in (job.tasks[0].gate.explain(P1) or "")
    job.tasks[2].manager.unmute(P1)
    job.run(300)
    assert job.mutes() == [set()] * 3


def test_a_task_that_comes_later_learns_at_once() -> None:
    job = Job(2)
    job.run(100)
    frozen(job)
    job.tasks.append(Task(job, 2))
    job.connect(2)
    job.run(20)
    assert job.tasks[2].muted() == {1}


def test_mutes_that_no_task_writes_to_are_forgotten() -> None:
    job = Job(1, **{"class": "a.users.Class"})
    job.run(100)
    job.tasks[0].manager.mute(P2, "gone")
    job.run(100)
    assert job.service.next_change_ms(job.now) < 10_000
    job.now += 700_000
    job.run(100)
    assert job.mutes() == [set()]


def test_between_tasks_reports_do_not_pile_up() -> None:
    job = Job(1)
    job.run(100)
    task = job.tasks[0]
    task.manager.mute(P2, "x")
    for _ in range(500):
        job.now += 500
        task.run_pass()
        assert task.gate.next_change_ms(job.now) > 0
    assert len(list(iter(lambda: task.exchange.next_message(job.now), None))) <= 5


def test_a_task_with_many_failing_partitions_is_outvoted_by_those_that_write_there() -> None:
    """Catches: successes that are reported for 200 partitions only: with 500 partitions one bad task of 20
    muted 300 of them for all."""
    job = Job(20)
    job.cluster.leaders["t"] = [1 + number % 3 for number in range(900)]
    partitions = [TopicPartition("t", number) for number in range(900)]
    job.run(100)
    for partition in partitions:
        for task in job.tasks[1:4]:
            task.batch(partition)
    job.run(100)
    bad = job.tasks[0]
    for partition in partitions:
        bad.fail(partition, ConnectionResetError("its own network"))
    job.run(5_000)
    assert len(bad.muted()) == 900
    assert job.mutes()[1:] == [set()] * 19


def test_more_failing_partitions_than_a_report_holds_are_all_reported() -> None:
    """Catches: failures beyond the 700th partition of a report that are forgotten."""
    job = Job(2)
    job.cluster.leaders["t"] = [1 + number % 3 for number in range(900)]
    partitions = [TopicPartition("t", number) for number in range(900)]
    job.run(100)
    for task in job.tasks:
        for partition in partitions:
            task.fail(partition, REPLICAS)
    for _ in range(200):
        job.step()
        if len(job.service.table.mutes) == 900:
            break
    assert job.service.table.mutes.keys() == set(partitions)


def test_one_lost_connection_of_each_task_mutes_nothing() -> None:
    job = Job(20)
    job.run(100)
    for task in job.tasks:
        task.batch(P0, ConnectionResetError("restarted"))
    job.run(3_000)
    assert job.mutes() == [set()] * 20


def test_a_mute_of_a_broker_without_evidence_holds_after_another_task_asked_it() -> None:
    """Catches: a mute without evidence that is obeyed by all."""
    job = Job(50)
    job.run(100)
    for task in job.tasks[1:]:
        task.answering = {1}
    for _ in range(100):
        job.step()
        job.tasks[0].manager.mute(1, "I say so")
        assert job.mutes()[1:] == [set()] * 49
    assert sum(len(task.probed) for task in job.tasks[1:]) >= 1


def test_a_broker_that_responds_to_no_task_is_muted_for_all_on_one_tasks_report() -> None:
    job = Job(5)
    job.run(100)
    job.tasks[0].manager.mute(1, "I say so")
    job.run(200)
    assert job.mutes()[1:] == [set()] * 4
    job.run(150)
    assert job.mutes() == [{1}] * 5


def test_a_false_silence_is_muted_no_longer_than_another_task_takes_to_ask() -> None:
    job = Job(50)
    job.run(100)
    for task in job.tasks[1:]:
        task.answering = {1}
    job.tasks[0].manager.mute(1, "silent", Evidence(silence_ms=1e12))
    job.run(100)
    rested = job.now
    while any(job.mutes()[1:]):
        job.step()
        assert job.now < rested + 1_000
    job.tasks[0].manager.unmute(1)
    job.tasks[0].manager.mute(1, "silent", Evidence(silence_ms=1e12))
    job.run(3_000)
    assert job.mutes()[1:] == [set()] * 49, "it is not believed again so soon"


def test_one_tasks_report_does_not_end_a_mute_that_others_decided() -> None:
    """Catches: a task that says that a frozen broker is back, and the rows of all go there."""
    job = Job(5)
    job.run(100)
    frozen(job)
    job.run(300)
    assert job.mutes() == [{1}] * 5
    liar = job.tasks[4]
    for _ in range(5):
        liar.manager.unmute(1, "I say so")
        job.run(200)
        assert job.mutes()[:4] == [{1}] * 4


def test_rows_come_back_to_a_broker_from_one_task_after_the_other() -> None:
    """Catches: hundreds of tasks that let go at once, on a broker that has just come back."""
    job = Job(100)
    job.run(100)
    frozen(job)
    job.run(200)
    job.tasks[0].answer(P0)
    back, free = job.now, []
    while any(job.mutes()):
        job.step()
        free.append(job.mutes().count(set()))
        assert job.now < back + INTERVAL
    at = {ms: free[ms // 10 - 1] for ms in (100, 200, 300, 400, 500)}
    assert at[100] <= 4
    assert at[300] <= 16
    assert at[500] <= 64
    assert 500 <= job.now - back <= 900


def test_a_new_mute_stops_tasks_that_have_not_started_again() -> None:
    job = Job(100)
    job.run(100)
    frozen(job)
    job.run(200)
    first = job.tasks[0]
    first.answer(P0)
    job.run(250)
    assert 0 < job.mutes().count({1}) < 100
    job.tasks[0].manager.mute(1, "again", Evidence(silence_ms=600.0))
    job.run(350)
    assert job.mutes() == [{1}] * 100
