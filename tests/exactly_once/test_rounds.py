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
    arguments = ["--rounds", "3", "--seed", "1", "--minutes", "2"]
    run([sys.executable, "-m", "tests.exactly_once", *arguments], project_environment)


def test_rows_of_a_key_that_trade_places_are_counted() -> None:
    assert disordered([(b"a", 1), (b"b", 9), (b"a", 2), (b"b", 11)]) == 0
    assert disordered([(b"a", 1), (b"a", 3), (b"b", 5), (b"a", 2), (b"a", 3)]) == 1
