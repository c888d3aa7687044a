"""What the page says of a job at night. Catches: a lost cause, a stuck commit that looks like a pause."""

from __future__ import annotations

import json
from dataclasses import replace

from kafka_sink.coordinator.figures.messages import AboutJob, MuteFigures, decode_task, encode_task
from kafka_sink.options import parse
from kafka_sink.spark.writer import job_name
from kafka_sink.task.figures import first_letters
from tests.support.reported_figures import TASK, Board, final, report

STREAM = replace(TASK, write="c/3", query="0f3c", batch=3)


def test_a_job_has_its_name_and_options_from_the_task_of_partition_0() -> None:
    about = AboutJob("nightly orders", 4, {"kafka.linger.ms": "5"})
    sent = report(1, replace(TASK, about=about))
    assert decode_task(json.loads(json.dumps(encode_task(sent)))) == sent
    board = Board()
    board.report(sent)
    board.report(report(1, replace(TASK, task=8)))
    job = board.job()
    assert (job["name"], job["execution"], job["options"]) == ("nightly orders", 4, {"kafka.linger.ms": "5"})


def test_spark_says_what_a_query_is_called() -> None:
    assert job_name("clicks\nid = 1\nrunId = 2\nbatch = 3") == "clicks"
    assert job_name("\nid = 1\nrunId = 2\nbatch = 3") == ""
    assert job_name("nightly orders") == "nightly orders"


def test_shown_options_hold_neither_logins_nor_defaults() -> None:
    options = {
        "kafka.bootstrap.servers": "b:9092",
        "topic": "orders",
        "kafka.linger.ms": "5",
        "kafka.acks": "all",
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.username": "night",
        "kafka.sasl.password": "hunter2",
        "value.format": "json",
        "schema.registry.url": "http://registry",
        "schema.registry.basic.auth.user.info": "me:hunter3",
    }
    assert parse(options).options.shown() == {
        "topic": "orders",
        "kafka.linger.ms": "5",
        "value.format": "json",
        "schema.registry.url": "http://registry",
    }


def test_an_aborted_write_keeps_its_cause_and_a_committed_one_has_none() -> None:
    board = Board()
    board.report(report(1))
    board.figures.note_failure("w", "task 3 on worker-1: no disk")
    board.figures.note_failure("unknown", "task 1 on worker-2: no disk")
    assert board.job()["cause"] == "task 3 on worker-1: no disk"
    assert "a task failed: task 1 on worker-2: no disk" in [one["text"] for one in board.shown()["events"]]
    board.end(final(1, outcome="aborted", cause="the commit failed"))
    assert board.job()["cause"] == "the commit failed"
    board.figures.sample(1_000.0)
    assert board.shown()["events"][0]["text"] == "write w aborted: the commit failed"
    other = Board()
    other.report(report(1))
    other.figures.note_failure("w", "task 3 on worker-1: no disk")
    other.end(final(1))
    assert other.job()["cause"] == ""


def test_a_commit_that_takes_long_is_told_from_a_query_that_waits_for_rows() -> None:
    board = Board()
    board.report(report(1, STREAM, done=True, transaction_ms=2_000.0), 1_000.0)
    assert board.shown(11_000.0)["jobs"][0]["state"] == "waiting for rows"
    board.figures.note_over("c/3", 11_000.0, aborts=False)
    board.figures.note_over("unknown", 11_000.0, aborts=True)
    job = board.shown(61_000.0)["jobs"][0]
    assert (job["state"], job["ending"], job["open"], job["open_seconds"]) == ("committing", 50.0, 1, 62.0)
    assert job["acknowledged"] == 60.0
    board.end(final(1, write="c/3", query="0f3c", batch=3), 61_000.0)
    job = board.shown(71_000.0)["jobs"][0]
    assert (job["state"], job["open"]) == ("waiting for rows", 0)
    last = {"batch": 3, "outcome": "committed", "rows": 1, "seconds": 61.0, "age": 10.0}
    assert job["last_batch"] == last


def test_a_mute_says_what_waits_for_it() -> None:
    board = Board()
    for task in (1, 2):
        mute = MuteFigures("1", "frozen", 5.0, 10 * task, 9_000.0 * task, 2, ("t-0", f"t-{task}"))
        board.report(report(1, replace(TASK, task=task), mutes=(mute,)))
    (shown,) = board.shown(4_000.0)["mutes"]
    assert (shown["rows"], shown["partitions"], shown["named"], shown["left"]) == (
        30,
        2,
        ["t-0", "t-1", "t-2"],
        5.0,
    )
    board.end(final(2))
    assert not board.figures._attempts.waiting._targets


def test_dead_letters_are_added_up_by_topic_and_reason() -> None:
    board = Board()
    for task, number in ((1, 2), (1, 5), (1, 5), (2, 1)):
        letters = {("orders", "RecordTooLargeError"): number, ("bills", "InvalidRowError"): 1}
        board.report(report(1, replace(TASK, task=task), letters=letters))
    (cluster,) = board.shown()["clusters"]
    assert cluster["letters"] == [["orders", "RecordTooLargeError", 6], ["bills", "InvalidRowError", 2]]


def test_a_report_names_few_of_many_topics_with_dead_letters() -> None:
    many = {(f"t{number}", "E"): 1 for number in range(1_000)}
    few = first_letters(many)
    assert sum(few.values()) == 1_000
    assert few["", ""] == 981
