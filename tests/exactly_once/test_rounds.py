"""Some rounds of kills in every run; ``make exactly-once`` runs many. In a process of its own, as they
fork."""

from __future__ import annotations

import sys

import pytest

from tests.exactly_once.rounds import disordered
from tests.support.commands import run


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_no_row_is_lost_or_doubled_whichever_process_is_killed(project_environment: dict[str, str]) -> None:
    # The driver, with other tasks after it, a driver between two EndTxns, a frozen one, and a worker.
    arguments = ["--rounds", "2", "--seed", "15", "--minutes", "2"]
    run([sys.executable, "-m", "tests.exactly_once", *arguments], project_environment)


def test_rows_of_a_key_that_trade_places_are_counted() -> None:
    assert disordered([(0, 1), (1, 9), (0, 2), (1, 11)]) == 0
    assert disordered([(0, 1), (0, 3), (1, 5), (0, 2), (0, 3)]) == 1
