"""What brokers take is remembered beyond the producer that learnt it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kafka_sink import spark_application
from kafka_sink.accumulator.batch_limits import LearntLimits


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))


def test_a_refused_size_is_halved_and_what_was_larger_before_changes_nothing() -> None:
    limits = LearntLimits(1_000)
    assert limits.of("t") == 1_000
    limits.note_too_large("t", 900)
    assert (limits.of("t"), limits.of("u")) == (450, 1_000)
    limits.note_too_large("t", 900)
    assert limits.of("t") == 450
    limits.note_too_large("t", 450)
    assert limits.of("t") == 225


def test_a_refusal_says_nothing_about_other_topics() -> None:
    """Batches of theirs were split before they were sent if rows shrank less than expected."""
    limits = LearntLimits(1_000)
    limits.note_too_large("t", 900)
    assert (limits.learnt("t"), limits.learnt("u")) == (450, None)


def test_batches_are_not_split_by_a_batch_size_below_what_brokers_take() -> None:
    LearntLimits(1_000, "a").note_too_large("t", 900)
    limits = LearntLimits(400, "a")
    assert (limits.of("t"), limits.learnt("t")) == (400, 450)


def test_a_refusal_that_costs_a_task_lowers_the_limit_further() -> None:
    """Spark allows four attempts: with halves, batches of 512 KiB would still be of 64 KiB in the last."""
    limits = LearntLimits(512 << 10)
    for _ in range(3):
        limits.note_too_large("t", limits.of("t"), costs_task=True)
    assert limits.of("t") == 1 << 10
    limits = LearntLimits(1)
    limits.note_too_large("t", 1, costs_task=True)
    assert limits.of("t") == 1


def test_the_next_producer_begins_with_what_was_learnt_of_its_cluster() -> None:
    LearntLimits(1_000, "a").note_too_large("t", 900)
    assert LearntLimits(1_000, "a").of("t") == 450
    assert LearntLimits(400, "a").of("t") == 400
    assert LearntLimits(1_000, "b").of("t") == 1_000
    assert LearntLimits(1_000).of("t") == 1_000


def test_what_two_workers_learn_is_kept_together() -> None:
    one, two = LearntLimits(1_000, "a"), LearntLimits(1_000, "a")
    one.note_too_large("t", 900)
    two.note_too_large("u", 800)
    two.note_too_large("t", 1_000)
    kept = LearntLimits(1_000, "a")
    assert (kept.of("t"), kept.of("u")) == (450, 400)


def test_after_an_hour_batch_size_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    LearntLimits(1_000, "a").note_too_large("t", 900)
    now = time.time()
    monkeypatch.setattr("kafka_sink.spark_application.time.time", lambda: now + 3_601)
    assert LearntLimits(1_000, "a").of("t") == 1_000


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"t": "9"}', '{"t": true}', '{"t": 0}', "\0"])
def test_a_file_that_says_something_else_is_not_believed(text: str) -> None:
    spark_application.note("batch size limits of a", text)
    assert LearntLimits(1_000, "a").of("t") == 1_000


def test_without_a_folder_nothing_is_kept_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "")
    limits = LearntLimits(1_000, "a")
    limits.note_too_large("t", 900)
    assert (limits.of("t"), LearntLimits(1_000, "a").of("t")) == (450, 1_000)
