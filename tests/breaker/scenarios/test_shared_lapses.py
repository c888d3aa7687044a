"""What goes amiss between tasks and coordinator: old reports, lost memory, one task's bad network."""

from __future__ import annotations

import itertools
import logging

import pytest

from kafka_sink.breaker.states import Evidence, ProbeLease
from kafka_sink.coordinator.breaker.channel import BreakerChannel
from kafka_sink.coordinator.breaker.handler import BreakerHandler
from kafka_sink.coordinator.breaker.messages import BreakerUpdate, decode_report, encode_update
from kafka_sink.coordinator.breaker.votes import PartitionVotes
from kafka_sink.errors import BrokerRefusedError
from tests.support.job_of_tasks import INTERVAL, P0, P1, P2, Job, frozen

pytestmark = pytest.mark.usefixtures("_behind_relays")

REPLICAS = BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19)


def test_a_late_report_ages_its_responses() -> None:
    """Catches: the report of a task's last responses, sent when the next task begins, counted for a broker
    that has frozen meanwhile."""
    job = Job(2)
    job.run(100)
    job.tasks[1].batch(P0)
    job.paused = {1}
    job.run(5_000)
    assert job.tasks[1].exchange.next_message_delay_ms(job.now) == 0.0, "a report lies there"
    frozen(job)
    # The idle task's report is two seconds old.
    job.run(2_500)
    assert job.tasks[0].muted() == {1}
    job.paused = set()
    job.run(200)
    assert job.mutes() == [{1}, {1}]


def test_a_late_report_leaves_its_failures_out() -> None:
    job = Job(2)
    job.run(100)
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


def test_a_late_report_ages_its_silences() -> None:
    job = Job(1)
    job.run(100)
    job.paused = {0}
    frozen(job)
    job.now += 1_000
    body = job.tasks[0].exchange.next_message(job.now)
    while body is not None and not body["muted"]:
        body = job.tasks[0].exchange.next_message(job.now)
    assert body is not None
    (mute,) = decode_report(body).muted
    assert mute.silence_ms > 1_500


def test_a_tasks_own_unmute_is_not_undone_by_the_next_message() -> None:
    """Catches: a needless mute and unmute in the log while the coordinator's message is in flight."""
    job = Job(1)
    (task,) = job.tasks
    job.run(10)
    task.exchange.on_push(encode_update(BreakerUpdate(added={1: "x", 2: "y"})), job.now)
    task.run_pass()
    assert task.muted() == {1, 2}
    task.manager.unmute(1, "a probe got through")
    task.run_pass()
    task.exchange.on_push(encode_update(BreakerUpdate(added={P2: "z"})), job.now)
    task.run_pass()
    assert task.muted() == {2, P2}
    # Muted again by own evidence: the coordinator's late message is about the mute before.
    task.manager.mute(1, "again")
    task.exchange.on_push(encode_update(BreakerUpdate(removed=(1,), delay_ms=0.0)), job.now)
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
    job = Job(6)
    job.run(100)
    frozen(job)
    job.run(200)
    assert job.mutes() == [{1}] * 6
    job.restart(BreakerHandler(INTERVAL, PartitionVotes(100, 50), 500.0))
    for number in range(1, 6):
        job.connect(number)
    job.run(100)
    assert job.mutes()[1:] == [{1}] * 5
    probes = _probes_of(job, 10_000)
    # A task that still waits for its last probe does not use its lease, and hosts take turns.
    assert (2 if job.per_host == 2 else 4) <= len(probes) <= 5
    assert min(later - earlier for earlier, later in itertools.pairwise(probes)) >= INTERVAL - 50
    job.tasks[1].gate.on_probe_done(1, None, job.now)
    job.run(600)
    assert job.mutes()[1:] == [set()] * 5


def test_a_coordinator_that_is_killed_causes_no_probes() -> None:
    """Catches: all tasks that probe at once when they lose the coordinator, though it is back at once."""
    job = Job(18)
    job.run(100)
    frozen(job)
    job.run(2 * INTERVAL)
    before, lost = {task.number: len(task.probed) for task in job.tasks}, job.now
    job.restart(BreakerHandler(INTERVAL, PartitionVotes(100, 50), 500.0))
    job.run(150)
    assert {task.number: len(task.probed) for task in job.tasks} == before
    for number in range(18):
        job.connect(number)
    job.run(5 * INTERVAL)
    probes = sorted(at for task in job.tasks for at, _ in task.probed if at > lost)
    # One task is asked when mutes are reported again. Who still waits for an earlier probe uses no lease.
    assert 2 <= len(probes) <= 6
    assert min(later - earlier for earlier, later in itertools.pairwise(probes)) >= INTERVAL - 50


def test_two_muted_brokers_are_probed_by_all_in_turn() -> None:
    """Catches: leases for one broker that always go to the same task, which waits for its last probe."""
    job = Job(2)
    job.run(100)
    for node in (1, 2):
        job.tasks[0].manager.mute(node, "silent", Evidence(silence_ms=600.0))
    job.run(3 * INTERVAL)
    probed = {(task.number, node) for task in job.tasks for _, node in task.probed}
    assert probed == {(0, 1), (0, 2), (1, 1), (1, 2)}


def test_a_mute_that_one_task_kept_is_refuted_by_those_that_know_better() -> None:
    """Catches: a healthy broker that is muted for all because one task missed its return."""
    job = Job(3)
    job.run(100)
    frozen(job)
    job.run(200)
    job.lose(2)
    job.tasks[0].answer(P0)
    job.run(100)
    assert job.mutes() == [set(), set(), {1}]
    for _ in range(100):
        job.step()
        job.tasks[0].batch(P0)
        job.tasks[1].batch(P0)
    job.connect(2)
    for _ in range(100):
        job.step()
        assert job.mutes()[:2] == [set(), set()]


def test_one_tasks_bad_network_does_not_make_all_mute_and_unmute() -> None:
    """Catches: a mute by the one task that cannot reach a broker, ended by the responses of the others, found
    again by the one, and so on, all sent to every task."""
    job = Job(3)
    job.run(100)
    lonely, others = job.tasks[0], job.tasks[1:]
    lonely.batch(P0)
    job.run(10)
    lonely.send(P0)
    rested = dict.fromkeys((0, 1, 2), 0)
    for number in range(2_000):
        job.step()
        lonely.batch(P1)
        for task in others:
            if P0 not in task.gate.mutes:
                task.batch(P0)
        if number >= 300:
            for task in job.tasks:
                rested[task.number] += bool(task.muted())
    assert rested[1] == rested[2] == 0
    assert rested[0] > 1_600
    assert lonely.manager.local.own_trips <= 3


def test_nothing_is_left_of_a_lease_when_its_task_ends() -> None:
    job = Job(2)
    job.run(100)
    frozen(job)
    job.tasks[1].exchange._outbox.clear()
    job.tasks[1].waiting = {P0}
    while (owner := job.prober()) is None:
        job.step()
    job.lose(owner)
    job.step()
    assert not job.handler.leases.owners
    assert isinstance(job.tasks[owner].exchange, BreakerChannel)
    job.tasks[owner].run_pass()
    assert not job.tasks[owner].manager.probes._leases


def test_a_late_message_about_a_former_mute_does_not_end_the_present_one() -> None:
    job = Job(1)
    (task,) = job.tasks
    job.run(10)
    task.exchange.on_push(encode_update(BreakerUpdate(added={1: "x"})), job.now)
    task.run_pass()
    task.manager.unmute(1, "a probe got through")
    task.manager.mute(1, "silent again")
    task.exchange.on_push(encode_update(BreakerUpdate(removed=(1,), delay_ms=0.0)), job.now)
    task.run_pass()
    assert task.muted() == {1}


def test_a_lease_does_not_outlive_its_connection() -> None:
    job = Job(1)
    (task,) = job.tasks
    job.run(10)
    task.exchange.on_push(
        encode_update(BreakerUpdate(added={P0: "x"}, leases={P0: ProbeLease(2_000.0)})), job.now
    )
    task.run_pass()
    assert task.gate.may_probe(P0)
    task.exchange.on_lost(job.now)
    task.exchange.on_connected(job.now)
    task.exchange.on_push(encode_update(BreakerUpdate(whole=True, added={P0: "x"})), job.now)
    task.run_pass()
    assert not task.gate.may_probe(P0), "perhaps it is another task's by now"


def test_new_rows_are_a_probe_only_after_another_interval() -> None:
    """Catches: keyless rows of some task on a failing partition as soon as the interval is over, though a
    task that holds a batch may be about to say so."""
    job = Job(3)
    job.run(100)
    for task in job.tasks:
        task.fail(P0, REPLICAS)
    while not all(P0 in task.gate.mutes for task in job.tasks):
        job.step()
    muted = job.now
    while all(P0 in task.gate.mutes for task in job.tasks):
        job.tasks[1].gate.note_free_rows(["t"])
        job.step()
    assert 2 * INTERVAL - 200 <= job.now - muted <= 2 * INTERVAL + 600


def test_one_task_warns_of_a_mute_and_each_logs_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job(4)
    job.run(100)
    with caplog.at_level(logging.INFO, "kafka_sink"):
        frozen(job)
        job.run(3_000)
        job.tasks[0].answer(P0)
        job.run(3_000)
    done = [(one.levelname, one.getMessage().split()[2]) for one in caplog.records]
    assert sorted(done) == [
        *[("INFO", "muted")] * 3,
        *[("INFO", "unmuted")] * 3,
        ("WARNING", "muted"),
        ("WARNING", "unmuted"),
    ]


def test_if_a_users_class_decides_the_coordinator_counts_nothing() -> None:
    job = Job(2)
    job.handler = BreakerHandler(INTERVAL, None, 500.0)
    job.run(100)
    job.tasks[0].fail(P0, REPLICAS)
    job.run(3_000)
    assert job.mutes() == [{P0}, set()]
