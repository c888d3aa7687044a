"""The metrics of an application: what lost, late and repeated reports do to totals, and what is bounded."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest
from msgspec.structs import replace

from kafka_sink.clock import COMMITTING, STARTING
from kafka_sink.coordinator.live import application, running_tasks
from kafka_sink.coordinator.live.application import MAX_EVENTS, OTHER, ApplicationMetrics, ReportService
from kafka_sink.coordinator.live.messages import (
    AboutJob,
    BrokerReport,
    DeadLetterCount,
    DriverWaits,
    MuteReport,
    ReportEvery,
    TaskIdentity,
)
from kafka_sink.coordinator.live.prometheus import exposition
from kafka_sink.coordinator.schema import deliver
from kafka_sink.counts import TopicMetrics
from tests.support.fake_outbox import FakeOutbox
from tests.support.task_reports import CLUSTER, TASK, Board, broker, final, of, report

STREAM = of(write="c/3", query="0f3c", batch=3)
BATCH = TaskIdentity("c/3", 7, query="q", batch=3)
STREAM_ENDED = final(1, write="c/3", query="0f3c", batch=3)


def test_reports_are_totals_so_a_lost_or_repeated_one_changes_nothing() -> None:
    board = Board()
    # A report of 20 was lost; one of 15 comes late.
    for records in (10, 10, 30, 15):
        board.report(report(records))
    assert board.rows() == (30, 30, 30)


def test_the_drivers_sums_replace_those_of_a_task_whose_last_report_was_lost() -> None:
    board = Board()
    board.report(report(10))
    board.end(final(100))
    board.end(final(100))
    board.report(report(100, done=True))
    assert board.rows() == (100, 100, 100)
    assert board.job()["state"] == "committed"
    assert board.total("writes_committed") == 1
    # The commit overtook all reports.
    board = Board()
    board.end(final(5))
    board.report(report(5, done=True))
    assert (board.total(), board.shown()["application"]) == (5, "app")


def test_a_job_that_has_ended_shows_all_its_tasks_as_done() -> None:
    """Catches: 3 of 4 tasks done, because the commit overtook a task's last report."""
    board = Board()
    board.report(report(1, done=True, failed=True))
    for _ in range(2):
        board.report(report(1, of(8), done=True))
    assert board.job()["tasks_done"] == 1
    board.end(final(3, tasks=3))
    assert board.job()["tasks_done"] == 3


def test_only_the_number_of_an_ended_task_is_kept_and_late_reports_change_nothing() -> None:
    """Catches: a task that reports every 30 s, because 6,000 others of its write are done."""
    board = Board()
    for number in range(6_000):
        failed = number % 2 == 1
        board.report(report(1, of(number), done=True, failed=failed, transaction_ms=5.0))
    board.report(report(1, of(9_000)))
    assert board.metrics.interval_ms == 1_000.0
    assert len(list(board.metrics.running)) == 1
    for number in (0, 1):
        for done in (True, False):
            board.report(report(50, of(number), done=done))
    assert board.rows() == (6_001, 6_001, 6_001)
    assert (board.job()["tasks"], board.job()["tasks_done"], board.shown()["tasks_running"]) == (1, 3_000, 1)
    assert board.cluster()["transactions"]["open"] == 3_000
    board.end(final(3_001, tasks=3_001))
    assert board.job()["tasks_done"] == 3_001
    assert board.cluster()["transactions"]["open"] == 0


def test_tasks_whose_end_is_never_reported_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_tasks, "_MAX_TASKS", 3)
    board = Board()
    for number in range(5):
        board.report(report(1, of(number)))
    assert (len(list(board.metrics.running)), board.total()) == (3, 5)


def test_rows_of_a_failed_attempt_stay_in_the_totals_but_not_in_the_job() -> None:
    board = Board()
    board.report(report(40, done=True, failed=True))
    board.report(report(100, of(8, attempt=1), done=True))
    board.end(final(100))
    assert board.rows() == (140, 140, 100), "totals never shrink, and the job's are as the summary has them"
    assert board.total("uncommitted") == 40


def test_a_micro_batch_that_runs_again_counts_though_its_failed_run_had_the_same_name() -> None:
    """Catches, too: one that aborted before a task had finished showed as a second job."""
    board = Board()
    again = replace(BATCH, task=9)
    board.report(report(10, BATCH))
    board.end(final(0, write="c/3", outcome="aborted", batch=3))
    board.report(report(11, BATCH, done=True, failed=True))
    (job,) = board.shown()["jobs"]
    assert (job["job"], job["query"], job["state"]) == ("q", "q", "aborted")
    assert board.shown()["tasks"] == []
    board.report(report(100, again))
    board.end(final(100, write="c/3", query="q", batch=3, last_task=9))
    board.report(report(100, again, done=True))
    assert (board.job()["counters"]["records"], board.total()) == (100, 110)


@pytest.mark.parametrize("reports", [False, True])
def test_a_micro_batch_counts_though_nothing_was_known_of_its_aborted_run(reports: bool) -> None:
    board = Board()
    board.end(final(0, write="c/3", outcome="aborted", batch=3))
    if reports:
        board.report(report(100, replace(BATCH, task=9)))
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
    board.report(report(5, of(10**9, write="unknown"), done=True))
    assert board.total() == 105


def test_micro_batches_add_up_to_one_job_of_the_query() -> None:
    board = Board()
    for batch in range(3):
        name = f"q/{batch}"
        board.report(report(10, TaskIdentity(name, batch, query="q", batch=batch), done=True))
        board.end(final(10, write=name, query="q", batch=batch))
    (job,) = board.shown()["jobs"]
    assert (job["counters"]["records"], job["batch"], job["state"]) == (30, 2, "waiting for rows")


def test_a_silent_task_is_shown_as_silent_and_then_not_at_all() -> None:
    board = Board()
    board.report(report(1, state="memory", state_ms=2_000.0))
    (task,) = board.shown(1_000)["tasks"]
    assert (task["state"], task["seconds"]) == ("memory", 3.0)
    assert board.shown(6_000)["tasks"][0]["state"] == "silent"
    assert board.shown(40_000)["tasks"] == []
    assert board.total() == 1


def test_topics_beyond_the_bound_count_together() -> None:
    board = Board()
    for number in range(5 * application.MAX_TOPICS):
        board.report(report(0, of(number), topics={f"t{number}": TopicMetrics(1, 1, 1, 1)}))
    assert len(board.shown()["topics"]) <= application.MAX_TOPICS + 1
    assert board.topic(OTHER) == 4 * application.MAX_TOPICS


def test_jobs_of_which_nothing_was_heard_for_longest_make_room() -> None:
    board = Board()
    for number in range(120):
        query = of(write=f"q{number}/0", query=f"q{number}", batch=0)
        board.report(report(1, query), number)
        board.end(final(1, write=query.write, query=query.query, batch=0))
        if number == 50:
            board.end(final(1, write="q0/1", query="q0", batch=1), 50.0)
    board.end(final(1, write="batch"), 2_000.0)
    board.report(report(1, of(write="new")), 2_000.0)
    shown = {job["job"] for job in board.shown()["jobs"]}
    assert {"batch", "new", "q119", "q0"} <= shown
    assert "q21" not in shown


def test_jobs_beyond_the_shown_ones_still_count() -> None:
    """Catches: the quietest of more than 100 jobs was forgotten, with all that its tasks reported later."""
    board = Board()
    board.report(report(1, of(write="long")), 0.0)
    for number in range(120):
        board.report(report(1, of(write=str(number))), 100.0)
        board.end(final(1, write=str(number)), 100.0)
    shown = {job["job"] for job in board.shown(200)["jobs"]}
    assert "long" in shown, "those that have ended go first"
    assert len(shown) == 100
    assert list(board.metrics.writes) == ["long"]
    assert len(list(board.metrics.running)) == 1
    for number in range(120):
        board.report(report(1, of(write=f"other {number}")), 300.0)
    board.metrics.sample(1_000.0)
    board.report(report(5, of(write="long")), 1_100.0)
    assert "long" in {job["job"] for job in board.shown(1_200)["jobs"]}
    assert board.total() == 5 + 120 + 120


def test_thousands_of_writes_that_end_at_once_cost_what_their_tasks_do() -> None:
    """Catches: 3 s for 5,000 writes, as each looked at all 25,000 tasks that run."""
    board = Board()
    for number in range(20_000):
        board.report(report(0, of(number)))
    for number in range(2_000):
        board.report(report(0, of(write=str(number))))
    began_s = time.thread_time()
    for number in range(2_000):
        board.end(final(0, write=str(number)))
    assert time.thread_time() - began_s < 1.0
    assert len(list(board.metrics.running)) == 20_000


def test_rates_are_of_the_last_seconds() -> None:
    board = Board()
    for second in range(20):
        board.report(report(1_000 * (second + 1)), 1_000.0 * second)
        board.metrics.sample(1_000.0 * second)
    shown = board.shown(20_000)
    rates = shown["jobs"][0]["records_rate"], shown["history"][-1][1], shown["topics"][0]["records_rate"]
    assert rates == pytest.approx((1_000, 1_000, 1_000))
    assert shown["jobs"][0]["sent_bytes_rate"] == pytest.approx(10_000)
    for second in range(20, 30):
        board.metrics.sample(1_000.0 * second)
    assert board.job(30_000)["records_rate"] == board.shown(30_000)["history"][-1][1] == 0


def test_brokers_add_up_over_tasks_and_show_the_oldest_request() -> None:
    board = Board()
    for task in (1, 2):
        board.report(report(1, of(task), brokers={0: broker(3, (1, 0, 2))}))
    # One of 2 requests comes late.
    for requests, buckets in ((2, (1,)), (4, (2, 0, 2))):
        board.report(report(1, of(1), brokers={0: broker(requests, buckets)}))
    (shown,) = board.shown(1_000)["brokers"]
    assert (shown["requests"], shown["in_flight"], shown["latency_buckets"]) == (7, 4, [3, 0, 4])
    assert shown["oldest"] == 8.0
    # It owes a response to rows that wait for it, though nothing is in flight.
    board = Board()
    for task in (7, 8):
        board.report(report(1, of(task), brokers={0: BrokerReport(oldest_ms=31_000.0)}))
    (shown,) = board.shown(2_000)["brokers"]
    assert (shown["in_flight"], shown["oldest"], shown["requests"]) == (0, 33.0, 0)


def test_mutes_are_named_with_cause_and_time() -> None:
    board = Board()
    mutes = MuteReport("1", "silent for 2 s", 0.0), MuteReport("t-3", "errors", 500.0)
    board.report(report(1, mutes=mutes))
    board.report(report(1, of(8), mutes=(MuteReport("1", "mine", 0.0),)), 1_000.0)
    first, second = board.shown(4_000)["mutes"]
    assert (first["target"], first["kind"], second["target"]) == ("t-3", "partition", "1")
    assert (second["reason"], second["seconds"]) == ("silent for 2 s", 4.0)


def test_an_open_transaction_is_open_until_the_driver_has_ended_the_write() -> None:
    board = Board()
    board.report(report(1, done=True, transaction_ms=2_000.0))
    assert board.cluster(40_000)["transactions"] == {"open": 1, "oldest": 42.0}
    board.end(final(1, transactions={"committed": 1}))
    assert board.cluster()["transactions"] == {"open": 0, "oldest": 0.0}
    ended = [board.total(f"transactions_{outcome}") for outcome in ("committed", "aborted")]
    assert ended == [1, 0]


def test_the_oldest_transaction_of_a_cluster_is_shown_whichever_task_was_done_last() -> None:
    board = Board()
    for task, age_ms in ((1, 2_000.0), (2, 9_000.0), (3, 1_000.0)):
        board.report(report(1, of(task), done=True, transaction_ms=age_ms))
    # The query writes to another cluster, too: one task of that is done, and one runs.
    for done in (True, False):
        other = of(4 + done, write="elsewhere", query=TASK.query)
        board.report(report(1, other, cluster="other:9092", done=done, transaction_ms=1.0))
    shown = [one["transactions"] for one in board.shown(1_000)["clusters"]]
    assert shown == [{"open": 3, "oldest": 10.0}, {"open": 2, "oldest": 1.001}]


def test_counts_of_another_version_change_nothing() -> None:
    """Catches: an error once a second, hence a coordinator that ended, after topics with fewer counts."""
    board = Board()
    board.report(report(5, counters={"records": 5, "a": 1}, topics={"t": (5,)}))
    assert (board.total(), board.topic()) == (5, 5)
    assert "a" not in board.job()["counters"]
    board.end(final(5, topics={"t": (), "u": ()}))
    board.metrics.sample(0.0)
    assert (board.topic(), board.topic("u")) == (5, 0)


# -- what the driver says -----------------------------------------------------------------------------


def waits(write: str, step: str = STARTING, awaited: str = "broker 1", **changes: Any) -> DriverWaits:
    return replace(DriverWaits(CLUSTER, write, step, awaited, 14_000.0, 46_000.0), **changes)


def streamed() -> Board:
    """The board of a query that has committed a micro-batch."""
    board = Board()
    board.report(report(1, STREAM, done=True))
    board.end(STREAM_ENDED)
    return board


@pytest.mark.parametrize("name", ["c", "0f3c"])
def test_a_drivers_wait_between_micro_batches_is_a_state_of_the_query(name: str) -> None:
    """Catches: a query "waits for rows" while a frozen broker is to begin its transaction, and no alert where
    it is the first write to its cluster."""

    def metric(board: Board, step: str, now_ms: float) -> str:
        text = exposition(board.shown(now_ms))[0].decode()
        return text.partition(f'driver_wait_seconds{{cluster="{CLUSTER}",step="{step}"}} ')[2].split()[0]

    board = Board()
    board.metrics.on_driver_waits(waits("c"), 1_000.0)
    assert metric(board, "starting", 1_000.0) == "14.0"
    board = streamed()
    board.metrics.on_driver_waits(waits(name), 1_000.0)
    (one,) = board.shown(3_000.0)["driver"]
    assert (one["job"], one["step"], one["awaited"]) == ("0f3c", "starting", "broker 1")
    assert (one["seconds"], one["left"]) == (16.0, 44.0)
    assert metric(board, "starting", 3_000.0) == "16.0"
    assert metric(board, "committing", 3_000.0) == "0.0"
    assert board.shown(30_000.0)["driver"] == [], "its process has ended"
    board.metrics.on_driver_waits(waits(name, awaited=""), 4_000.0)
    assert board.shown(4_000.0)["driver"] == []


def test_a_query_whose_micro_batch_could_not_start_has_failed() -> None:
    board = streamed()
    board.metrics.on_driver_waits(waits("c"), 1_000.0)
    board.metrics.on_driver_waits(waits("c", awaited="", cause="no transaction within 60 s"), 2_000.0)
    assert (board.job()["state"], board.job()["cause"]) == ("aborted", "no transaction within 60 s")
    board.metrics.on_driver_waits(waits("unknown", awaited="", cause="why"), 2_000.0)
    assert "a write could not start: why" in board.texts()[0]


def test_waits_of_the_driver_are_bounded() -> None:
    board = Board()
    for number in range(1_000):
        board.metrics.on_driver_waits(waits(str(number)), 0.0)
    assert len(board.shown(0.0)["driver"]) <= 100
    board.metrics.on_driver_waits(waits("c"), 60_000.0)
    assert [one["write"] for one in board.shown(60_000.0)["driver"]] == ["c"], "the others were killed"


def test_a_query_whose_driver_was_killed_as_it_committed_is_lost_and_its_next_run_is_shown() -> None:
    """Catches: open transactions, and red, for a day."""
    board = Board()
    board.report(report(1, STREAM, done=True, transaction_ms=2_000.0), 1_000.0)
    board.metrics.on_driver_waits(waits("c", COMMITTING), 60_000.0)
    board.metrics.sample(950_000.0)
    assert (board.job(950_000.0)["quiet"], board.job()["open"]) == (890.0, 1)
    board.metrics.sample(1_000_000.0)
    assert (board.job(1_000_000.0)["state"], board.job()["open"]) == ("lost", 0)
    board.report(report(5, replace(STREAM, task=STREAM.task + 1)), 1_100_000.0)
    assert (board.job()["state"], board.job()["tasks"]) == ("running", 1)


def test_rows_of_a_lost_write_that_ends_after_all_are_counted_once() -> None:
    board = Board()
    board.report(report(5), 0.0)
    board.metrics.sample(901_000.0)
    board.end(final(9, last_task=TASK.task + 1), 901_000.0)
    assert (board.job()["state"], board.total()) == ("lost", 5)


def test_a_write_whose_driver_says_for_long_that_it_waits_is_not_lost() -> None:
    """Catches: a write that was committed after sixteen minutes, and shown as lost."""
    board = Board()
    board.report(report(5, done=True, transaction_ms=2_000.0), 0.0)
    for second in range(0, 1_000, 2):
        board.metrics.on_driver_waits(waits("w", COMMITTING), 1_000.0 * second)
        board.metrics.sample(1_000.0 * second)
    board.end(final(5), 1_000_000.0)
    assert board.job()["state"] == "committed"


def test_a_commit_that_takes_long_is_told_from_a_query_that_waits_for_rows() -> None:
    board = Board()
    board.report(report(1, STREAM, done=True, transaction_ms=2_000.0), 1_000.0)
    assert board.job(11_000.0)["state"] == "waiting for rows"
    job = board.job(61_000.0)
    assert (job["tasks"], job["quiet"], job["open"], job["oldest"]) == (0, 60.0, 1, 62.0)
    assert job["acknowledged"] == 60.0
    board.end(STREAM_ENDED, 61_000.0)
    job = board.job(71_000.0)
    assert (job["state"], job["open"], job["batch"], job["ended"]) == ("waiting for rows", 0, 3, 0.0)


def test_a_job_has_its_name_and_options_and_an_aborted_one_its_cause() -> None:
    board = Board()
    board.report(report(1, of(about=AboutJob("orders", {"kafka.linger.ms": "5"}))))
    board.report(report(1, of(8)))
    assert (board.job()["name"], board.job()["options"]) == ("orders", {"kafka.linger.ms": "5"})
    board.metrics.on_attempt_failed("w", "task 3 on worker-1: no disk")
    board.metrics.on_attempt_failed("unknown", "task 1 on worker-2: no disk")
    assert board.job()["cause"] == "task 3 on worker-1: no disk"
    assert "a task failed: task 1 on worker-2: no disk" in board.texts()
    for _ in range(2):
        board.end(final(1, outcome="aborted", cause="the commit failed"))
    assert board.job()["cause"] == "the commit failed"
    first, second, *_ = board.shown()["events"]
    assert (first["text"], first["level"]) == ("write orders aborted: the commit failed", "bad")
    assert second["level"] == "warn"
    other = Board()
    other.report(report(1))
    other.metrics.on_attempt_failed("w", "task 3 on worker-1: no disk")
    other.end(final(1))
    assert other.job()["cause"] == ""


# -- the service ------------------------------------------------------------------------------------


class Coordinator(Board):
    """A service and what it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.out = FakeOutbox()
        self.service = ReportService(self.out, self.metrics)

    def receive(self, peer: int, message: Any, now_ms: float = 0.0) -> list[tuple[int, Any]]:
        deliver(self.service, peer, message, now_ms)
        return self.out.taken()


def test_so_many_reports_a_second_ask_for_fewer_whoever_sends_them() -> None:
    """500 workers whose tasks take a second each: nobody runs for long, and 500 reports a second come."""
    coordinator = Coordinator()
    for number in range(2_000):
        coordinator.receive(number % 500, report(1, of(number), done=True), 2.0 * number)
    assert coordinator.metrics.interval_ms == 2_500.0
    for peer in range(500):
        coordinator.service.on_gone(peer, 5_000.0)
    assert coordinator.metrics.interval_ms == 1_000.0


def test_many_tasks_are_asked_for_fewer_reports_and_are_not_called_silent() -> None:
    coordinator = Coordinator()
    for task in range(2_000):
        sent = coordinator.receive(task, report(1, of(task)), 5.0 * task)
    assert sent == [(1_999, ReportEvery(10_000.0))]
    assert coordinator.cluster(25_000)["states"] == {"working": 2_000}
    assert coordinator.cluster(36_000)["states"] == {"silent": 2_000}
    assert coordinator.receive(1_999, report(1, of(1_999)), 10_000.0) == [], "it knows"
    for task in range(2_000):
        coordinator.service.on_gone(task, 10_000.0)
    assert not coordinator.service.intervals_ms


def test_sums_of_running_tasks_follow_what_they_report_last() -> None:
    """Catches: sums that keep what a task reported before, or that is gone."""
    board = Board()
    given: dict[str, Any] = {
        "gauges": {"buffer_used_bytes": 7},
        "mutes": (MuteReport("t-3", "errors", 500.0),),
    }
    for rows in (1, 2):
        board.report(report(rows, brokers={0: broker(rows, (rows,))}, state="rows", **given))
    board.report(report(1, of(8)))
    shown, cluster = board.shown(1_000), board.cluster(1_000)
    assert (cluster["gauges"], cluster["states"]) == ({"buffer_used_bytes": 7}, {"rows": 1, "working": 1})
    assert (shown["brokers"][0]["in_flight"], board.job()["tasks"], len(shown["mutes"])) == (2, 2, 1)
    # It comes back after it was gone.
    assert (board.shown(40_000)["tasks_running"], board.cluster(40_000)["gauges"]) == (0, {})
    board.report(report(3), 41_000.0)
    shown = board.shown(41_000)
    assert (shown["tasks_running"], shown["mutes"], shown["brokers"][0]["in_flight"]) == (1, [], 0)
    assert board.total() == 4


def test_dead_letters_are_added_up_by_topic_and_reason() -> None:
    board = Board()
    for task, number in ((1, 2), (1, 5), (1, 5), (2, 1)):
        found = DeadLetterCount("orders", "RecordTooLargeError", number), DeadLetterCount("bills", "E", 1)
        board.report(report(1, of(task), dead_letters=found))
    assert board.cluster()["dead_letters"] == [["orders", "RecordTooLargeError", 6], ["bills", "E", 2]]


# -- bounds: one task whose reports name ever more ---------------------------------------------------


def grown_mib(act: Any) -> float:
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[0] / 2**20
    finally:
        tracemalloc.stop()


def test_names_in_the_reports_of_all_tasks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: 50,000 tasks of 100 topics each, 1 GB in a process without a bound on what they name."""
    monkeypatch.setattr(running_tasks, "_MAX_ENTRIES", 7_000)
    board = Board()

    def attack() -> None:
        for task in range(300):
            name = f"{task}".ljust(60, "x")
            board.report(
                report(
                    1,
                    TaskIdentity(name, task, host=name, query=name),
                    topics={f"{name}-{one}": TopicMetrics(1, 1, 1, 1) for one in range(100)},
                    brokers={1_000 * task + one: broker(1, (1,)) for one in range(200)},
                    mutes=tuple(MuteReport(f"{name}-{one}", name, 1.0, 1) for one in range(20)),
                    dead_letters=tuple(DeadLetterCount(name, f"{name}-{one}", 1) for one in range(20)),
                )
            )

    assert grown_mib(attack) < 6
    assert board.metrics.running.entries <= 7_000 + 300
    assert board.total() == 300, "counts do not depend on names"
    for task in range(300):
        board.end(final(1, write=f"{task}".ljust(60, "x"), query=f"{task}".ljust(60, "x")))
    assert board.metrics.running.entries == 0
    assert not board.metrics.writes
    assert len(board.cluster()["dead_letters"]) <= 101


def test_ever_new_writes_tasks_and_clusters_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "_MAX_WRITES", 50)
    monkeypatch.setattr(running_tasks, "_MAX_ENTRIES", 500)
    board = Board()
    for number in range(1_000):
        board.report(report(1, of(number, write=f"w{number}"), cluster=f"c{number}"))
    assert len(board.metrics.writes) == 50
    assert len(board.shown()["clusters"]) == 101
    for number in range(1_000):
        board.report(report(1, of(number, write="long"), done=True))
    assert board.metrics.running.entries <= 500 + 1
    board.end(final(1_000, write="long"))
    (job,) = [one for one in board.shown()["jobs"] if one["job"] == "long"]
    assert job["counters"]["records"] == 1_000, "the driver's sums have them"


# -- events -----------------------------------------------------------------------------------------


class Day(Board):
    """Metrics whose wall clock is a second per sample."""

    def __init__(self) -> None:
        self.second = 100
        super().__init__(ApplicationMetrics(lambda: self.second))

    def mute(self, *targets: str, seconds: float = 0.0) -> None:
        """What a task reports of them, and a sample."""
        mutes = tuple(MuteReport(one, "3 requests without a response", 1_000.0 * seconds) for one in targets)
        self.report(report(1, mutes=mutes), 1_000.0 * self.second)
        self.metrics.sample(1_000.0 * self.second)
        self.second += 1


def test_a_mute_is_told_when_it_began_and_when_it_ended() -> None:
    day = Day()
    for second in range(10):
        day.mute("1", seconds=2.5 + second)
    day.mute()
    assert day.texts() == ["broker 1 unmuted after 12 s", "broker 1 muted: 3 requests without a response"]
    events = day.shown()["events"]
    assert [(one["time"], one["level"]) for one in events] == [(110, "good"), (97.5, "bad")]


def test_events_are_bounded() -> None:
    day = Day()
    for number in range(200):
        day.mute(f"t-{number}")
    assert len(day.texts()) == MAX_EVENTS
