"""What a relay makes of its tasks' reports, and of the coordinator's updates. At exact times, without
sockets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from kafka_sink.breaker.states import ProbeLease, Target
from kafka_sink.coordinator.breaker.group import BreakerGroup
from kafka_sink.coordinator.breaker.messages import (
    KIND,
    BreakerReport,
    BreakerUpdate,
    MuteReport,
    OutcomeCounts,
    TaskVotes,
    Terms,
    UnmuteReport,
    decode_report,
    decode_update,
    encode_report,
    encode_update,
)
from kafka_sink.coordinator.transport.group import Groups
from kafka_sink.coordinator.transport.message_format import unpacked
from kafka_sink.coordinator.transport.session import MAX_FRAME_BYTES, MAX_REQUEST_BYTES, dump
from kafka_sink.errors import ProtocolError
from kafka_sink.model import TopicPartition
from kafka_sink.timing_bounds import GATHER_MUTES_MS, HEALTHY_REPORT_MS

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
SICK = 7
TERMS = Terms(50, 500.0)
SILENT = MuteReport(SICK, "silent", 2_000.0)


class Bench:
    """A group of so many tasks, of which the coordinator knows. The time is ``now``."""

    def __init__(self, tasks: int, added: Mapping[Target, str] | None = None) -> None:
        self.now = 10_000.0
        self.group = BreakerGroup(lambda: 0.5)
        for task in range(1, tasks + 1):
            self.say(task, rows=1)
        assert self.report() is not None
        self.hear(whole=True, added=added or {}, terms=TERMS)
        self.told()

    def say(self, task: int, **report: Any) -> bool:
        body = json.loads(json.dumps(encode_report(BreakerReport(**report))))
        return self.group.on_task(task, 5, body, self.now)

    def hear(self, **update: Any) -> None:
        self.group.on_push(json.loads(json.dumps(encode_update(BreakerUpdate(**update)))), self.now)

    def report(self) -> BreakerReport | None:
        """What it says to the coordinator now."""
        body = self.group.next_message(self.now)
        return None if body is None else decode_report(json.loads(json.dumps(body)))

    def told(self) -> dict[int, BreakerUpdate]:
        """By task, the last thing that it was told."""
        found = {one.task: decode_update({"whole": False, **one.body}, 100) for one in self.group.outgoing}
        self.group.outgoing.clear()
        return found


def test_reports_without_news_become_one_every_two_seconds() -> None:
    bench = Bench(3)
    reports = []
    for step in range(400):
        bench.now += 10.0
        if step % 100 == 50:
            for task in (1, 2, 3):
                bench.say(task, rows=100, responses={1: float(10 * task), 2: 5.0})
        found = bench.report()
        if found is not None:
            reports.append((bench.now, found))
    assert [at for at, _ in reports] == [12_000.0, 14_000.0]
    assert sum(found.rows for _, found in reports) == 4 * 3 * 100
    assert {found.tasks for _, found in reports} == {3}
    # The newest response, of whichever task.
    assert reports[0][1].responses[1] == pytest.approx(12_000.0 - 11_510.0 + 10.0)
    assert reports[0][1].responders[1] == 1
    assert all(one.request == 5 and not one.body for one in bench.group.outgoing)


def test_a_mute_goes_out_at_once_with_its_task_and_not_again_once_all_know() -> None:
    bench = Bench(3)
    bench.say(2, muted=(SILENT,))
    bench.now += 5.0
    found = bench.report()
    assert found is not None
    (mute,) = found.muted
    assert (mute.target, mute.task, mute.is_old) == (SICK, 2, False)
    assert mute.silence_ms == 2_005.0, "it was silent all the time"
    bench.hear(added={SICK: "silent"})
    known = {task: set(update.added) for task, update in bench.told().items()}
    assert known == {1: {SICK}, 2: {SICK}, 3: {SICK}}
    bench.say(3, muted=(SILENT,))
    assert bench.report() is None
    # A task that has had a response knows more than the coordinator, and so does who mutes it next.
    bench.say(1, unmuted=(UnmuteReport(SICK, "it responds"),))
    bench.say(1, muted=(SILENT,))
    found = bench.report()
    assert found is not None
    assert [one.task for one in found.unmuted] == [1]
    assert [one.task for one in found.muted] == [1]


def test_a_task_that_comes_later_learns_what_is_muted_without_the_coordinator() -> None:
    bench = Bench(1, {SICK: "silent"})
    bench.say(2, rows=1, muted=(MuteReport(3, "silent", 9_000.0),))
    assert set(bench.told()[2].added) == {SICK}
    found = bench.report()
    assert found is not None
    assert [one.is_old for one in found.muted] == [True]


def test_a_response_of_a_muted_broker_is_reported_at_once() -> None:
    bench = Bench(2, {SICK: "silent"})
    bench.say(1, responses={1: 5.0})
    assert bench.report() is None
    bench.say(1, responses={SICK: 5.0})
    found = bench.report()
    assert found is not None
    assert SICK in found.responses


def test_what_tasks_wait_for_is_reported_as_one_list_when_it_changes() -> None:
    bench = Bench(3, {P0: "x", P1: "x"})
    bench.say(1, holds=(P0,))
    bench.say(2, holds=(P0, P1), wants=(P1,))
    assert bench.report() is None, "gathered for a moment"
    bench.now += 100.0
    found = bench.report()
    assert found is not None
    assert found.holds is not None
    assert found.wants == (P1,)
    assert set(found.holds) == {P0, P1}
    bench.say(1, holds=())
    bench.now += 200.0
    assert bench.report() is None, "another task still waits"
    bench.group.on_task_left(2, bench.now)
    bench.now += 100.0
    found = bench.report()
    assert found is not None
    assert found.holds == found.wants == ()


def test_a_relay_votes_for_all_its_tasks_once_they_have_voted() -> None:
    bench = Bench(3)
    bench.say(1, outcomes=(OutcomeCounts(P0, 0, 4, True, "no"),))
    assert bench.report() is None
    assert {task: update.asks for task, update in bench.told().items() if update.asks} == {2: (P0,), 3: (P0,)}
    bench.say(2, outcomes=(OutcomeCounts(P0, 9, 0),))
    assert bench.report() is None
    bench.say(3, outcomes=(OutcomeCounts(P0, 0, 0),))  # it does not write there
    bench.now += GATHER_MUTES_MS
    found = bench.report()
    assert found is not None
    assert found.outcomes == (OutcomeCounts(P0, 9, 4, True, "no", TaskVotes(2, 1, 3)),)
    # The same votes are no news. A task's vote goes with it.
    bench.say(1, outcomes=(OutcomeCounts(P0, 0, 5, True, "no"),))
    assert bench.report() is None
    bench.group.on_task_left(1, bench.now)
    bench.now += GATHER_MUTES_MS
    found = bench.report()
    assert found is not None
    assert found.outcomes[0].votes == TaskVotes(1, 0, 0)


def test_thousands_of_votes_are_not_walked_over_for_each_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: 20 to 80 ms for each message while 10,000 partitions fail."""
    bench = Bench(2)
    looks: list[float] = []
    decided = BreakerGroup._decided
    monkeypatch.setattr(
        BreakerGroup, "_decided", lambda self, *found: looks.append(bench.now) or decided(self, *found)
    )
    for number in range(100):
        bench.now += 1.0
        bench.say(1, outcomes=(OutcomeCounts(TopicPartition("t", number), 0, 4, True, "no"),))
        bench.group.due_ms(bench.now)
        bench.report()
    assert len(looks) <= 100.0 / GATHER_MUTES_MS + 1


def test_a_task_is_asked_about_all_partitions_at_once() -> None:
    bench = Bench(2)
    where = tuple(TopicPartition("t", number) for number in range(600))
    bench.say(1, outcomes=tuple(OutcomeCounts(one, 0, 4, True, "no") for one in where))
    (asked,) = [one for one in bench.group.outgoing if one.request is None]
    assert decode_update({"whole": False, **asked.body}, 1_000).asks == where


def test_what_tasks_say_adds_up_to_what_the_coordinator_accepts() -> None:
    """Catches: one task's nonsense that made the coordinator end the connection of all."""
    most = (1 << 63) - 1
    bench = Bench(3)
    for task in (1, 2, 3):
        bench.say(
            task,
            rows=most,
            responses={1: float(most - 1024)},
            outcomes=(OutcomeCounts(P0, most, most, True, "no"),),
        )
    bench.say(1, muted=(MuteReport(SICK, "silent", float(most - 1024)),))
    bench.now += 2_000.0
    assert bench.report() is not None


@pytest.mark.parametrize("character", ["x", "\n", "\U0001d11e"])
def test_long_texts_of_many_tasks_are_reported_in_parts_that_the_coordinator_takes(character: str) -> None:
    """Catches: texts that take twelve bytes a character made a report too large, which ended the relay."""
    bench = Bench(2)
    reason, topic = character * 300, character * 244
    targets = [TopicPartition(f"{topic}{number:05d}", 2**31 - 1) for number in range(1_400)]
    for task, in_turn in ((1, targets[:700]), (2, targets[700:])):
        for at in range(0, 700, 50):
            part = in_turn[at : at + 50]
            bench.say(
                task,
                outcomes=tuple(OutcomeCounts(one, 2**52, 2**52, True, reason) for one in part),
                muted=tuple(MuteReport(one, reason, 2.0**52) for one in part),
                unmuted=tuple(UnmuteReport(one, reason) for one in part),
                holds=tuple(part),
                wants=tuple(part),
            )
    bench.say(1, responses={2**30 + number: 5.0 for number in range(10_000)})
    muted: set[Target] = set()
    voted: set[Target] = set()
    parts = 0
    while len(muted) < 1_400 or len(voted) < 1_400:
        bench.now += GATHER_MUTES_MS
        body = bench.group.next_message(bench.now)
        parts += 1
        assert parts < 200
        if body is not None:
            assert len(dump({"id": 1, "kind": KIND, "body": body})) < MAX_REQUEST_BYTES
            report = decode_report(json.loads(json.dumps(body)))
            muted |= {one.target for one in report.muted}
            voted |= {one.partition for one in report.outcomes}


def test_thousands_of_mutes_fit_into_a_frame_for_a_task() -> None:
    """Catches: more than 4 MiB of mutes ended the connection of every task behind a relay."""
    groups = Groups([BreakerGroup()], 0.0)
    groups.on_task(1, {"id": 5, "kind": KIND, "body": {}}, 0.0)
    assert list(groups.messages(0.0))
    added: dict[Target, str] = {TopicPartition("t" * 200, number): "r" * 290 for number in range(10_000)}
    update = encode_update(BreakerUpdate(whole=True, added=added, terms=TERMS))
    groups.on_coordinator({"id": 1, "kind": KIND, "body": update}, 0.0)
    ((_, line),) = groups.for_tasks()
    assert len(line) < MAX_FRAME_BYTES
    assert decode_update(unpacked(json.loads(line)["body"]), 10_000).added == added


def test_a_task_that_does_not_vote_holds_a_relay_up_for_a_moment_only() -> None:
    bench = Bench(2)
    bench.hear(asks=(P0,))
    assert {task: update.asks for task, update in bench.told().items()} == {1: (P0,), 2: (P0,)}
    bench.say(1, outcomes=(OutcomeCounts(P0, 5, 0),))
    assert bench.report() is None
    bench.now += 151.0
    found = bench.report()
    assert found is not None
    assert found.outcomes[0].votes == TaskVotes(1, 0, 0)


def test_after_a_pause_it_votes_again() -> None:
    """The coordinator has withdrawn the votes of a relay that it did not hear: its tasks may be elsewhere."""
    bench = Bench(1)
    bench.say(1, outcomes=(OutcomeCounts(P0, 0, 4, True, "no"),))
    assert bench.report() is not None
    bench.now += HEALTHY_REPORT_MS
    found = bench.report()
    assert found is not None
    assert not found.outcomes
    bench.now += 3_000.0
    found = bench.report()
    assert found is not None
    assert [one.partition for one in found.outcomes] == [P0]


def test_a_lease_goes_to_one_task_that_can_use_it_and_ends_with_it() -> None:
    bench = Bench(3, {P0: "x", SICK: "silent"})
    bench.say(2, holds=(P0,))
    bench.report()
    bench.hear(leases={P0: ProbeLease(2_000.0)})
    assert [task for task, update in bench.told().items() if update.leases] == [2]
    bench.hear(leases={SICK: ProbeLease(2_000.0)})
    ((prober, _),) = bench.told().items()
    assert prober != 2, "the others' turn"
    bench.say(2, failed=((SICK, "late"),))
    found = bench.report()
    assert found is None or not found.failed, "it has no lease for that"
    bench.say(2, failed=((P0, "again"),))
    found = bench.report()
    assert found is not None
    assert found.failed == ((P0, "again"),)
    bench.group.on_task_left(prober, bench.now)
    found = bench.report()
    assert found is not None
    assert found.failed == ((SICK, ""),)


def test_a_task_with_a_lease_speaks_for_the_relay_when_its_probe_succeeds() -> None:
    bench = Bench(2, {SICK: "silent"})
    bench.hear(leases={SICK: ProbeLease(2_000.0)})
    (prober,) = bench.told()
    for task, voice in ((prober, 0), (3 - prober, 3 - prober)):
        bench.say(task, unmuted=(UnmuteReport(SICK, "it responds"),))
        found = bench.report()
        assert found is not None
        assert [one.task for one in found.unmuted] == [voice]


@pytest.mark.parametrize("delay_ms", [0.0, 50.0, 450.0])
def test_unmuted_tasks_send_again_one_after_the_other(delay_ms: float) -> None:
    bench = Bench(8, {SICK: "silent"})
    bench.say(5, holds=(SICK,))
    bench.hear(removed=(SICK,), delay_ms=delay_ms)
    delays = {task: update.delay_ms for task, update in bench.told().items()}
    assert delays.keys() == set(range(1, 9))
    assert delays[5] == min(delays.values()) == delay_ms, "the one that waits"
    assert max(delays.values()) <= delay_ms + 400.0
    assert len({one for one in delays.values() if one <= delay_ms + 10.0}) < 3
    assert bench.told() == {}


def test_no_task_sends_again_later_than_the_coordinator_allows() -> None:
    """Catches: an executor's last task sent again after 0.4 s, where mute.retry.interval was 0.2 s."""
    bench = Bench(8, {SICK: "silent"})
    bench.hear(removed=(SICK,), delay_ms=50.0, max_delay_ms=200.0)
    assert max(update.delay_ms for update in bench.told().values()) == 200.0
    bench.hear(removed=(SICK,), delay_ms=50.0)
    assert max(update.delay_ms for update in bench.told().values()) > 200.0, "an older coordinator names none"


def test_tasks_of_another_cluster_speak_for_themselves() -> None:
    bench = Bench(2)
    assert bench.say(1, cluster_id="here")
    found = bench.report()
    assert found is not None
    assert found.cluster_id == "here"
    assert not bench.say(2, cluster_id="there")
    assert not bench.say(2, rows=5)
    bench.now += HEALTHY_REPORT_MS
    found = bench.report()
    assert found is not None
    assert found.tasks == 1


def test_when_all_have_left_the_next_ones_may_write_to_another_cluster() -> None:
    bench = Bench(1, {SICK: "silent"})
    bench.say(1, cluster_id="here")
    bench.report()
    bench.group.on_task_left(1, bench.now)
    found = bench.report()
    assert found is not None
    assert found.is_resting
    assert found.tasks == 0
    bench.now += 60_000.0
    assert bench.report() is None
    bench.group.outgoing.clear()
    assert bench.say(2, rows=1)
    assert set(bench.told()[2].added) == {SICK}, "it has not said where it writes"
    assert bench.say(2, cluster_id="there")
    found = bench.report()
    assert found is not None
    assert found.cluster_id == "there"
    bench.say(3, rows=1)
    assert bench.told().keys() == {2}, "what is muted there is not known yet"
    bench.hear(whole=True, added={9: "silent"}, terms=TERMS)
    assert {task: set(update.added) for task, update in bench.told().items()} == {2: {9}, 3: {9}}


def test_a_cluster_that_is_named_and_left_at_once_changes_nothing() -> None:
    """Catches: tasks that came later waited for their first reply for ever."""
    bench = Bench(1, {SICK: "silent"})
    bench.say(1, cluster_id="here")
    bench.report()
    bench.group.on_task_left(1, bench.now)
    bench.say(2, cluster_id="there")
    bench.group.on_task_left(2, bench.now)
    bench.report()
    bench.group.outgoing.clear()
    for name in (None, "here"):
        bench.say(3, cluster_id=name)
        assert set(bench.told()[3].added) == {SICK}
        bench.group.on_task_left(3, bench.now)


def test_what_was_said_of_one_cluster_is_not_reported_of_another() -> None:
    """Catches: a broker of the next cluster was muted because one of the former had its id."""
    bench = Bench(1)
    bench.say(1, cluster_id="here")
    bench.report()
    bench.say(1, muted=(SILENT,), responses={3: 5.0}, rows=9)
    bench.group.on_task_left(1, bench.now)
    bench.say(2, cluster_id="there")
    found = bench.report()
    assert found is not None
    assert found.cluster_id == "there"
    assert not found.muted
    assert not found.responses


def test_an_invalid_report_changes_nothing() -> None:
    bench = Bench(1)
    with pytest.raises(ProtocolError):
        bench.group.on_task(1, 1, {"rows": 5, "muted": [["t"]]}, bench.now)
    bench.now += HEALTHY_REPORT_MS
    found = bench.report()
    assert found is not None
    assert found.rows == 0
