"""What the sender says and counts when batches that were never sent leave muted partitions."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_sink.engine.sender import tell_of_moves
from kafka_sink.model import TopicPartition


@pytest.mark.parametrize(
    ("batches", "rows", "text"),
    [
        ([(3, False)], 3, "3 rows without a key that were never sent"),
        ([(3, False), (4, True)], 3, "3 rows without a key and 4 dead letters that were never sent"),
        ([(4, True)], 0, "4 dead letters that were never sent"),
    ],
)
def test_dead_letters_that_move_are_no_rows(
    batches: list[tuple[int, bool]], rows: int, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    moved: Any = [
        SimpleNamespace(record_count=count, dead_letters=dead_letters) for count, dead_letters in batches
    ]
    breaker: Any = SimpleNamespace(explain=lambda _: "muted")
    with caplog.at_level(logging.WARNING):
        assert tell_of_moves({TopicPartition("t", 0): moved}, breaker) == rows
    assert text in caplog.text
    assert caplog.text.count("dead letters") == text.count("dead letters")
