"""The live figures: what lost, late and repeated reports do to totals, and what is bounded."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kafka_sink.coordinator.figures import application_figures
from kafka_sink.coordinator.figures.application_figures import OTHER
from kafka_sink.coordinator.figures.channel import FiguresChannel
from kafka_sink.coordinator.figures.handler import FiguresHandler
from kafka_sink.coordinator.figures.messages import (
    MuteFigures,
    TaskFigures,
    TaskIdentity,
    decode_final,
    decode_task,
    encode_final,
    encode_task,
)
from kafka_sink.counts import TopicFigures
from kafka_sink.errors import ProtocolError
from tests.support.reported_figures import CLUSTER, TASK, Board, broker, final, full_report, report


def test_reports_are_totals_so_a_lost_or_repeated_one_changes_nothing() -> None:
    board = Board()
    board.report(report(10))
    board.report(report(10))
    # A report of 20 was lost; one of 15 comes late.
    board.report(report(30))
    board.report(report(15))
    assert board.total() == board.topic() == board.job()["counters"]["records"] == 30


def test_the_drivers_figures_replace_those_of_a_task_whose_last_report_was_lost() -> None:
    board = Board()
    board.report(report(10))
    board.end(final(100))
    board.report(report(100, done=True))
    assert board.total() == board.topic() == board.job()["counters"]["records"] == 100
    assert board.job()["state"] == "committed"


def test_the_applications_name_is_known_though_the_commit_has_overtaken_all_reports() -> None:
    board = Board()
    board.end(final(5))
    board.report(report(5, done=True))
    assert board.shown()["application"] == "app"
    assert board.job()["state"] == "committed"


def test_a_job_that_has_ended_shows_all_its_tasks_as_done() -> None:
    """Catches: 3 of 4 tasks done, because the commit overtook a task's last report."""
    board = Board()
    board.report(report(1, done=True, failed=True))
    board.report(report(1, replace(TASK, task=8), done=True))
    board.report(report(1, replace(TASK, task=8), done=True))
    assert board.job()["tasks_done"] == 1
    board.end(final(3, tasks=3))
    assert board.job()["tasks_done"] == 3


def test_of_a_task_that_has_ended_only_its_number_is_kept_and_late_reports_change_nothing() -> None:
    """Catches: a task that reports every 30 s, because 6,000 others of its write are done."""
    board = Board()
    for number in range(6_000):
        failed = number % 2 == 1
        board.report(report(1, replace(TASK, task=number), done=True, failed=failed, transaction_ms=5.0))
    board.report(report(1, replace(TASK, task=9_000)))
    assert board.figures.interval_ms == 1_000.0
    assert len(board.figures._attempts) == 1
    for number in (0, 1):
        for done in (True, False):
            board.report(report(50, replace(TASK, task=number), done=done))
    shown = board.shown()
    assert board.total() == board.topic() == board.job()["counters"]["records"] == 6_001
    assert (board.job()["tasks"], board.job()["tasks_done"], shown["tasks_running"]) == (1, 3_000, 1)
    assert shown["clusters"][0]["transactions"]["open"] == 3_000
    board.end(final(3_001, tasks=3_001))
    assert board.job()["tasks_done"] == 3_001
    assert board.shown()["clusters"][0]["transactions"]["open"] == 0


def test_tasks_whose_end_is_never_reported_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application_figures, "_MAX_ATTEMPTS", 3)
    board = Board()
    for number in range(5):
        board.report(report(1, replace(TASK, task=number)))
    assert (len(board.figures._attempts), board.total()) == (3, 5)


def test_rows_of_a_failed_attempt_stay_in_the_totals_but_not_in_the_job() -> None:
    board = Board()
    board.report(report(40, done=True, failed=True))
    board.report(report(100, replace(TASK, task=8, attempt=1), done=True))
    board.end(final(100))
    assert board.job()["counters"]["records"] == 100, "as the summary has it"
    assert board.total() == board.topic() == 140, "totals never shrink"
    assert board.total("uncommitted") == 40


def test_a_commit_that_is_reported_twice_counts_once() -> None:
    board = Board()
    board.end(final(5))
    board.end(final(5))
    assert board.total() == 5
    assert board.total("writes_committed") == 1


def test_a_micro_batch_that_runs_again_counts_though_its_failed_run_had_the_same_name() -> None:
    board = Board()
    failed = TaskIdentity("q/3", 7, query="q", batch=3)
    board.report(report(10, failed))
    board.end(final(0, write="q/3", outcome="aborted", query="q", batch=3))
    board.report(report(11, failed, done=True, failed=True))
    again = replace(failed, task=9)
    board.report(report(100, again))
    board.end(final(100, write="q/3", query="q", batch=3, last_task=9))
    board.report(report(100, again, done=True))
    assert board.job()["counters"]["records"] == 100
    assert board.total() == 110


def test_a_micro_batch_that_aborts_before_a_task_has_finished_belongs_to_its_query() -> None:
    """Catches: it showed as a second job, and its attempts ran on under the query."""
    board = Board()
    board.report(report(10, TaskIdentity("c/3", 7, query="q", batch=3)))
    board.end(final(0, write="c/3", outcome="aborted", batch=3))
    (job,) = board.shown()["jobs"]
    assert (job["job"], job["kind"], job["writes"]) == ("q", "stream", 1)
    assert board.shown()["tasks"] == []


@pytest.mark.parametrize("reports", [False, True])
def test_a_micro_batch_counts_though_nothing_was_known_of_its_aborted_run(reports: bool) -> None:
    board = Board()
    board.end(final(0, write="c/3", outcome="aborted", batch=3))
    if reports:
        board.report(report(100, TaskIdentity("c/3", 9, query="q", batch=3)))
    for _ in range(2):
        board.end(final(100, write="c/3", query="q", batch=3, last_task=9))
    assert board.job()["counters"]["records"] == board.total() == 100
    assert board.total("writes_committed") == 1


def test_reports_that_the_commit_has_overtaken_are_not_counted_again() -> None:
    board = Board()
    board.end(final(100, last_task=7))
    board.report(report(100, done=True))
    assert board.total() == 100
    board.end(final(5, write="unknown"))
    board.report(report(5, replace(TASK, write="unknown", task=10**9), done=True))
    assert board.total() == 105


def test_a_report_after_the_abort_of_a_job_does_not_show_it_as_running_again() -> None:
    board = Board()
    board.end(final(0, outcome="aborted"))
    board.report(report(5))
    assert (board.job()["state"], board.shown()["tasks"]) == ("aborted", [])


def test_micro_batches_add_up_to_one_job_of_the_query() -> None:
    board = Board()
    for batch in range(3):
        name = f"q/{batch}"
        board.report(report(10, TaskIdentity(name, batch, query="q", batch=batch), done=True))
        board.end(final(10, write=name, query="q", batch=batch))
    assert len(board.shown()["jobs"]) == 1
    assert board.job()["counters"]["records"] == 30
    assert (board.job()["batch"], board.job()["writes"], board.job()["state"]) == (2, 3, "waiting for rows")


def test_a_silent_task_is_shown_as_silent_and_then_not_at_all() -> None:
    board = Board()
    board.report(report(1, state="memory", state_ms=2_000.0))
    assert board.shown(1_000)["tasks"][0]["state"] == "memory"
    assert board.shown(1_000)["tasks"][0]["seconds"] == 3.0
    assert board.shown(6_000)["tasks"][0]["state"] == "silent"
    assert board.shown(40_000)["tasks"] == []
    assert board.total() == 1


def test_topics_beyond_the_bound_count_together() -> None:
    board = Board()
    for number in range(5 * application_figures.MAX_TOPICS):
        name = f"t{number}"
        board.report(report(0, topics={name: TopicFigures(1, 1, 1, 1)}, identity=replace(TASK, task=number)))
    shown = board.shown()["topics"]
    assert len(shown) <= application_figures.MAX_TOPICS + 1
    assert board.topic(OTHER) == 4 * application_figures.MAX_TOPICS


def test_ended_jobs_make_room_for_new_ones() -> None:
    board = Board()
    for number in range(500):
        board.report(report(1, replace(TASK, write=str(number))))
        board.end(final(1, write=str(number)))
    assert len(board.shown()["jobs"]) <= 50
    assert board.figures._writes == {}
    assert not board.figures._attempts


def test_a_batch_job_that_has_ended_stays_however_many_queries_there_were() -> None:
    """Nobody reports the end of a query: it counts as running for a day."""
    board = Board()
    for number in range(60):
        query = replace(TASK, write=f"q{number}/0", query=f"q{number}", batch=0)
        board.report(report(1, query), number)
        board.end(final(1, write=query.write, query=query.query, batch=0))
    board.end(final(1, write="batch"))
    board.figures.sample(2_000.0)
    assert "batch" in {job["job"] for job in board.shown()["jobs"]}
    board.report(report(1, replace(TASK, write="new")))
    assert {"batch", "new", "q59"} <= {job["job"] for job in board.shown()["jobs"]}
    assert "q0" not in {job["job"] for job in board.shown()["jobs"]}


def test_a_long_job_stays_when_it_ends_after_many_short_ones() -> None:
    board = Board()
    board.report(report(1, replace(TASK, write="long")), 0.0)
    for number in range(60):
        board.end(final(1, write=str(number)), 1_000.0 + number)
    board.end(final(2, write="long"), 3_000.0)
    board.end(final(1, write="next"), 4_000.0)
    shown = [job["job"] for job in board.shown(5_000)["jobs"]]
    assert {"long", "59", "next"} <= set(shown)
    assert len(shown) == 50


def test_each_new_job_is_shown_though_many_have_ended_and_the_host_is_up_for_long() -> None:
    """Catches: a new job without a time of its last report counted as lost, and went before all others."""
    board = Board()
    up_ms = 7 * 86_400_000.0
    for number in range(60):
        board.report(report(1, replace(TASK, write=str(number))), up_ms + 10.0 * number)
        assert board.shown(up_ms + 10.0 * number)["jobs"][0]["state"] == "running"
        board.end(final(1, write=str(number)), up_ms + 10.0 * number + 5)
        newest = board.shown(up_ms + 10.0 * number + 6)["jobs"][0]
        assert (newest["job"], newest["state"]) == (str(number), "committed")


def test_rates_are_of_the_last_seconds() -> None:
    board = Board()
    for second in range(20):
        board.report(report(1_000 * (second + 1)), 1_000.0 * second)
        board.figures.sample(1_000.0 * second)
    assert board.shown(20_000)["rates"]["records"] == pytest.approx(1_000)
    assert board.shown(20_000)["topics"][0]["sent_bytes_rate"] == pytest.approx(10_000)
    for second in range(20, 30):
        board.figures.sample(1_000.0 * second)
    assert board.shown(30_000)["rates"]["records"] == 0


def test_brokers_add_up_over_tasks_and_show_the_oldest_request() -> None:
    board = Board()
    for task in (1, 2):
        board.report(report(1, replace(TASK, task=task), brokers={0: broker(3, (1, 0, 2))}))
    board.report(report(1, replace(TASK, task=1), brokers={0: broker(4, (2, 0, 2))}))
    (shown,) = board.shown(1_000)["brokers"]
    assert (shown["requests"], shown["in_flight"], shown["latency_buckets"]) == (7, 4, [3, 0, 4])
    assert shown["oldest"] == 8.0


def test_mutes_of_the_coordinator_and_of_tasks_are_named_with_cause_and_time() -> None:
    board = Board()
    board.figures.add_mutes(CLUSTER, lambda: lambda now_ms: [MuteFigures("1", "silent for 2 s", now_ms)])
    board.report(report(1, mutes=(MuteFigures("1", "mine", 9e9), MuteFigures("t-3", "errors", 500.0))))
    first, second = board.shown(4_000)["mutes"]
    assert (first["target"], second["target"]) == ("t-3", "1")
    assert (second["reason"], second["seconds"], second["shared"]) == ("silent for 2 s", 4.0, True)
    assert (first["kind"], first["shared"]) == ("partition", False)


def test_an_open_transaction_is_open_until_the_driver_has_ended_the_write() -> None:
    board = Board()
    board.report(report(1, done=True, transaction_ms=2_000.0))
    assert board.shown(40_000)["clusters"][0]["transactions"]["open"] == 1
    assert board.shown(40_000)["clusters"][0]["transactions"]["oldest"] == 42.0
    board.end(final(1, transactions={"committed": 1}, transactions_ms={"committed": 42_500}))
    assert board.shown()["clusters"][0]["transactions"] == {
        "open": 0,
        "oldest": 0.0,
        "committed": 1,
        "aborted": 0,
        "recovered": 0,
    }
    board.end(final(1, write="next", transactions={"committed": 1}, transactions_ms={"committed": 1_500}))
    seconds = {"committed": 44.0, "aborted": 0.0, "recovered": 0.0}
    assert board.shown()["clusters"][0]["transaction_seconds"] == seconds


def test_the_oldest_transaction_of_a_cluster_is_shown_whichever_task_was_done_last() -> None:
    board = Board()
    for task, age_ms in ((1, 2_000.0), (2, 9_000.0), (3, 1_000.0)):
        board.report(report(1, replace(TASK, task=task), done=True, transaction_ms=age_ms))
    board.figures.report("other:9092", report(1, replace(TASK, write="elsewhere")), 0.0)
    here, elsewhere = (one["transactions"] for one in board.shown(1_000)["clusters"])
    assert (here["open"], here["oldest"]) == (3, 10.0)
    assert (elsewhere["open"], elsewhere["oldest"]) == (0, 0.0)


def test_a_job_names_the_schemas_of_its_last_write() -> None:
    board = Board()
    board.end(final(5, schemas=("value as avro by t-value version 1 (id 7)",)))
    assert board.job()["schemas"] == ["value as avro by t-value version 1 (id 7)"]


# -- messages ---------------------------------------------------------------------------------------


def test_messages_survive_the_wire() -> None:
    assert decode_task(json.loads(json.dumps(encode_task(full_report())))) == full_report()
    counted: dict[str, Any] = {"transactions": {"committed": 2}, "transactions_ms": {"committed": 7}}
    sent = final(
        5, query="q", batch=3, schemas=("value as avro by t-value (id 7)",), cause="no disk", **counted
    )
    assert decode_final(json.loads(json.dumps(encode_final(sent)))) == sent


FIELDS = ("task", "state", "counters", "topics", "brokers", "mutes", "end")
NONSENSE = (None, -2, "x", [1], {"a": 1}, [[1]], 1e400, [["t", -1, 0, 0, 0]])


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key in FIELDS for value in NONSENSE if (key, value) != ("counters", {"a": 1})],
)
def test_a_report_that_makes_no_sense_is_refused_and_changes_nothing(key: str, value: object) -> None:
    board = Board()
    body = encode_task(full_report())
    with pytest.raises(ProtocolError):
        FiguresHandler(CLUSTER, board.figures).on_message(1, 1, body | {key: value}, 0.0)
    assert board.shown()["jobs"] == []


def test_a_counter_of_a_newer_version_is_ignored() -> None:
    board = Board()
    body = encode_task(report(5))
    body["counters"]["a"] = 1
    FiguresHandler(CLUSTER, board.figures).on_message(1, 1, body, 0.0)
    assert board.total() == 5
    assert "a" not in board.job()["counters"]


def test_tasks_that_share_a_connection_are_counted_separately() -> None:
    board = Board()
    handler = FiguresHandler(CLUSTER, board.figures)
    for task in (1, 2):
        handler.on_message(9, task, encode_task(report(10, replace(TASK, task=task))), 0.0)
    assert board.total() == 20


# -- a task's side ----------------------------------------------------------------------------------


class Channel:
    """A task with a counter, and the messages that it sends."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.rows = 0
        self.channel = FiguresChannel(lambda identity: report(self.rows, identity), lambda: self.now_ms)

    def send(self) -> list[TaskFigures]:
        sent = []
        while (body := self.channel.next_message(self.now_ms)) is not None:
            sent.append(decode_task(body))
        return sent


def test_a_task_reports_soon_then_every_second_and_at_its_end() -> None:
    task = Channel()
    assert task.send() == []
    task.channel.begin(TASK)
    assert task.send() == []
    assert task.channel.next_message_delay_ms(0.0) == 300.0
    task.now_ms = 300.0
    assert len(task.send()) == 1
    task.now_ms = 1_200.0
    assert task.send() == []
    assert task.channel.next_message_delay_ms(1_200.0) == pytest.approx(100.0)
    task.now_ms, task.rows = 1_300.0, 5
    assert [one.counters.get("records", 0) for one in task.send()] == [5]
    task.channel.end(report(9, done=True))
    # The next task begins before the last report has gone out.
    task.channel.begin(replace(TASK, task=8))
    assert [(one.identity.task, one.done) for one in task.send()] == [(7, True)]
    task.now_ms = 2_300.0
    assert [(one.identity.task, one.done) for one in task.send()] == [(8, False)]


def test_short_tasks_of_a_worker_share_a_report_in_an_interval() -> None:
    """Catches: 500 short tasks a second sent 1,000 reports a second."""
    task, board, sent = Channel(), Board(), []
    for number in range(100):
        task.now_ms = 100.0 * number
        task.channel.begin(replace(TASK, task=number))
        task.channel.end(report(3, replace(TASK, task=number), brokers={0: broker(2, (1, 1))}, done=True))
        sent += task.send()
    assert len(sent) == 10
    assert task.channel.left_delay_ms(task.now_ms) == pytest.approx(100.0)
    # The process ends.
    task.channel.close()
    sent += task.send()
    for one in sent:
        board.report(one)
    assert (board.total(), board.topic(), board.job()["tasks_done"]) == (300, 300, 100)
    assert board.shown()["brokers"][0]["latency_buckets"] == [100, 100]
    board.end(final(300, tasks=100))
    assert (board.total(), board.job()["tasks_done"]) == (300, 100)


def test_a_failed_task_and_one_that_has_reported_are_not_joined_with_others() -> None:
    task = Channel()
    task.channel.end(report(1, done=True))
    assert task.send() == [], "no task has begun"
    for number, failed in ((1, False), (2, True), (3, False), (4, False)):
        task.channel.begin(replace(TASK, task=number, write=f"w{number // 4}"))
        task.channel.end(
            report(1, replace(TASK, task=number, write=f"w{number // 4}"), done=True, failed=failed)
        )
    assert [(one.identity.task, one.others) for one in task.send()] == [(1, ()), (2, ()), (3, ()), (4, ())]


def test_so_many_reports_a_second_ask_for_fewer_whoever_sends_them() -> None:
    """500 workers whose tasks take a second each: nobody runs for long, and 1,000 reports a second come."""
    board = Board()
    number = 0
    for second in range(40):
        board.figures.sample(1_000.0 * second)
        for _ in range(round(1_000 * 1_000 / board.figures.interval_ms)):
            number += 1
            board.report(report(1, replace(TASK, task=number), done=True), 1_000.0 * second)
    assert board.figures.interval_ms == pytest.approx(5_000.0, rel=0.1)
    for second in range(40, 60):
        board.figures.sample(1_000.0 * second)
    assert board.figures.interval_ms == 1_000.0


def test_thousands_that_report_at_once_take_turns_and_lose_nothing() -> None:
    """Catches: after a restart 4,000 reports of 0.4 ms each held up what tasks need."""
    board = Board()
    handler = FiguresHandler(CLUSTER, board.figures)
    tasks = [Channel() for _ in range(500)]
    came: list[float] = []
    for number, task in enumerate(tasks):
        task.rows = 1
        task.channel.begin(replace(TASK, task=number))
    for now_ms in range(0, 6_001, 100):
        for task in tasks:
            task.now_ms = float(now_ms)
            while (body := task.channel.next_message(task.now_ms)) is not None:
                (reply,) = handler.on_message(1, 1, body, task.now_ms)
                task.channel.on_reply(reply.body, True, task.now_ms)
                came.append(task.now_ms)
        board.figures.sample(float(now_ms))
        assert board.figures.reports <= 200 * (1 + now_ms / 1000)
    # Each of them, the last one after 2.5 s, and no more of them than were asked for.
    assert board.total() == 500
    assert sum(1_000 <= one <= 3_500 for one in came) == pytest.approx(500, abs=200)
    assert sum(one > 3_500 for one in came) < 2.5 * 250
    # The last reports of tasks are taken, however many come.
    for number in range(500):
        last = report(2, replace(TASK, task=number), done=True)
        handler.on_message(1, 1, encode_task(last), 6_000.0)
    assert board.total() == 1_000


def test_a_report_that_was_not_taken_is_sent_again_with_all_topics() -> None:
    task = Channel()
    task.channel.begin(TASK)
    task.now_ms, task.rows = 300.0, 5
    assert list(task.send()[0].topics) == ["t"]
    task.channel.on_reply({"interval": 4_000.0, "skipped": True}, True, 300.0)
    task.now_ms = 4_200.0
    assert task.send() == []
    task.now_ms = 4_300.0
    assert list(task.send()[0].topics) == ["t"]


def test_sums_of_running_tasks_follow_what_they_report_last() -> None:
    """Catches: sums that keep what a task reported before, or that is gone."""
    board = Board()
    mute = MuteFigures("t-3", "errors", 500.0)
    for rows in (1, 2):
        figures = report(
            rows,
            gauges={"buffer_used_bytes": 7},
            brokers={0: broker(rows, (rows,))},
            mutes=(mute,),
            state="rows",
        )
        board.report(figures)
    board.report(report(1, replace(TASK, task=8)))
    shown = board.shown(1_000)
    (cluster,) = shown["clusters"]
    assert (cluster["gauges"], cluster["states"]) == ({"buffer_used_bytes": 7}, {"rows": 1, "working": 1})
    assert (shown["brokers"][0]["in_flight"], board.job()["tasks"], len(shown["mutes"])) == (2, 2, 1)
    # It comes back after it was gone.
    assert board.shown(40_000)["tasks_running"] == 0
    assert board.shown(40_000)["clusters"][0]["gauges"] == {}
    board.report(report(3), 41_000.0)
    shown = board.shown(41_000)
    assert (shown["tasks_running"], shown["mutes"], shown["brokers"][0]["in_flight"]) == (1, [], 0)
    assert board.total() == 4


def test_topics_without_news_are_left_out_until_a_new_coordinator_needs_them() -> None:
    task = Channel()
    task.rows = 5
    task.channel.begin(TASK)
    task.now_ms = 300.0
    assert list(task.send()[0].topics) == ["t"]
    task.now_ms = 1_300.0
    assert list(task.send()[0].topics) == []
    task.channel.on_lost(task.now_ms)
    task.channel.on_connected(task.now_ms)
    task.now_ms = 2_300.0
    assert list(task.send()[0].topics) == ["t"]


def test_many_tasks_are_asked_for_fewer_reports_and_are_not_called_silent() -> None:
    board = Board()
    handler = FiguresHandler(CLUSTER, board.figures)
    for task in range(2_000):
        body = encode_task(report(1, replace(TASK, task=task)))
        (reply,) = handler.on_message(1, task, body, 5.0 * task)
    assert reply.body == {"interval": 10_000.0}
    assert board.shown(25_000)["clusters"][0]["states"] == {"working": 2_000}
    assert board.shown(36_000)["clusters"][0]["states"] == {"silent": 2_000}
    one = Channel()
    one.channel.on_reply(reply.body, True, 0.0)
    one.channel.begin(TASK)
    one.now_ms = 300.0
    assert one.send()
    assert one.channel.next_message_delay_ms(300.0) == 10_000.0
