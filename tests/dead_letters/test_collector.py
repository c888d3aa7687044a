"""Dead letters of one task: counts, the maximum, and letters that wait."""

from __future__ import annotations

import logging

import pytest

from kafka_sink.dead_letters.collector import DeadLetters
from kafka_sink.dead_letters.letter import DeadLetter, RefusedLetter
from kafka_sink.errors import TooManyDeadLettersError


def letters(count: int) -> list[DeadLetter]:
    return [DeadLetter("t", 0, b"k", b"secret", (), 1, "too large", "RecordTooLargeError")] * count


def test_rows_beyond_the_maximum_are_not_taken() -> None:
    found = DeadLetters("dead", 3, 1000)
    found.add(letters(2))
    with pytest.raises(TooManyDeadLettersError, match=r"4 rows .* errors\.max = 3.*too large"):
        found.add(letters(2))
    assert found.rows == len(found.take()) == 2
    assert found.reasons() == {"RecordTooLargeError": 2}


def test_a_new_task_starts_at_zero() -> None:
    found = DeadLetters("dead", 3, 1000)
    found.add(letters(3))
    found.begin("1")
    assert (found.rows, found.take(), found.reasons()) == (0, [], {})
    found.add(letters(3))


def test_without_a_topic_no_content_is_kept() -> None:
    found = DeadLetters(None, -1, 1000)
    found.add(letters(5))
    assert (found.rows, found.take()) == (5, [])


def test_three_rows_are_logged_without_content(caplog: pytest.LogCaptureFixture) -> None:
    found = DeadLetters("dead", -1, 1000)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            found.add(letters(2))
    assert len(caplog.records) == 3
    assert "secret" not in caplog.text


def test_a_refused_letter_is_cut_to_half_and_counted_once() -> None:
    found = DeadLetters("dead", -1, 100_000)
    found.add(letters(1))
    found.take()
    refused = RefusedLetter(b"k", b"v", ())
    assert found.refused(refused, 60_000)
    assert (found.max_bytes, found.take(), found.rows) == (30_000, [refused], 1)
    assert not found.refused(refused, 2000), "its headers alone would be too large"
