"""Counts of a write's transactions, from what planning, attempts and the commit report."""

from __future__ import annotations

import pytest

from kafka_sink.transactions.batch import BatchOutcome
from kafka_sink.transactions.figures import TransactionFigures, of_write


def test_a_running_write_shows_its_open_transactions_and_the_oldest_age() -> None:
    planned = TransactionFigures(recovered=2)
    attempts = [TransactionFigures(open=1, oldest_open_ms=began) for began in (5_000, 3_000)]
    found = of_write(planned, [*attempts, TransactionFigures(aborted=1)])
    assert found == TransactionFigures(open=2, aborted=1, recovered=2, oldest_open_ms=3_000)
    assert found.oldest_open_age_ms(10_000) == 7_000
    assert found.oldest_open_age_ms(2_000) == 0
    assert planned.oldest_open_age_ms(10_000) == 0


def test_nothing_is_open_once_the_batch_is_committed() -> None:
    """Catches: attempts whose last report says that their transaction is open count for ever."""
    attempts = [TransactionFigures(open=1, oldest_open_ms=3_000)] * 3
    ended = BatchOutcome(committed=2, aborted=1).figures
    assert of_write(TransactionFigures(), attempts, ended) == TransactionFigures(committed=2, aborted=1)


def test_figures_pass_through_a_message_and_others_are_refused() -> None:
    figures = TransactionFigures(1, 2, 3, 4, 5)
    assert TransactionFigures.from_json(figures.as_json()) == figures
    for wrong in ({"open": -1}, {"open": "1"}, {"open": True}, {"open": 1.5}):
        with pytest.raises(ValueError, match="open"):
            TransactionFigures.from_json(wrong)
