"""Dead letters of one task: counts, the maximum, and rows that wait for their dead letters."""

from __future__ import annotations

import logging

import pytest

from kafka_sink.dead_letters.rejected_rows import MAX_WAITING_BYTES, DeadLetters, RejectedRows
from kafka_sink.errors import TooManyDeadLettersError
from tests.support.rejected_rows import rejected_rows


def rejected(count: int, size: int = 6, topic: str = "t") -> RejectedRows:
    return rejected_rows([b"secret".ljust(size)] * count, topic)


def test_rows_beyond_the_maximum_are_not_taken() -> None:
    found = DeadLetters("dead", 3, 1000)
    found.add(rejected(2))
    with pytest.raises(TooManyDeadLettersError, match=r"4 rows .* errors\.max = 3.*too large"):
        found.add(rejected(2))
    taken = found.take()
    assert taken is not None
    assert found.rows == taken.count == 2
    assert found.take() is None
    assert found.reasons() == {"InvalidRowError": 2}


def test_there_is_room_again_once_rows_are_taken() -> None:
    found = DeadLetters("dead", -1, 1000)
    found.add(rejected(1000, MAX_WAITING_BYTES // 2000))
    assert found.has_room
    found.add(rejected(1000, MAX_WAITING_BYTES // 1000))
    assert not found.has_room
    found.take()
    found.take()
    assert found.has_room
    # Without a topic no content is kept.
    found = DeadLetters(None, -1, 1000)
    for _ in range(3):
        found.add(rejected(1, MAX_WAITING_BYTES))
    assert (found.rows, found.is_waiting, found.has_room) == (3, False, True)


def test_three_rows_are_logged_without_content(caplog: pytest.LogCaptureFixture) -> None:
    found = DeadLetters("dead", -1, 1000)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            found.add(rejected(2, topic="long" * 1000))
    assert len(caplog.records) == 3
    assert "secret" not in caplog.text
    assert len(caplog.text) < 2000
