"""The checker of histories finds each anomaly that is planted."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.exactly_once.history import Checker, History, Read, write_began, write_is_known
from tests.exactly_once.rounds import disordered

pytestmark = pytest.mark.skipif(shutil.which("go") is None, reason="the checker is in Go")


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    with Checker() as built:
        yield built


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(str(tmp_path))


def write(history: History, first: int, *, is_known: bool = True) -> None:
    """A batch of two rows."""
    name = write_began(history.checkpoint, first, 2)
    if is_known:
        write_is_known(history.checkpoint, name)


def read(history: History, *rows: int) -> None:
    call = time.monotonic_ns()
    history.reads.append(Read(call, time.monotonic_ns(), Counter(rows)))


def test_batches_of_killed_drivers_may_be_there_or_not(checker: Checker, history: History) -> None:
    read(history)
    write(history, 0)
    read(history, 0)
    write(history, 2, is_known=False)
    read(history, 0, 1)
    write(history, 2)
    write(history, 4, is_known=False)
    read(history, 0, 1, 2, 3)
    assert checker.problems(history.registers(range(6))) == []


@pytest.mark.parametrize(
    ("reads", "wrong"),
    [
        pytest.param([(0,)], "1 rows from 1 on, seen [0] times", id="lost"),
        pytest.param([(0, 1, 1)], "1 rows from 1 on, seen [2] times", id="doubled"),
        pytest.param([(0, 1), (0,), (0, 1)], "1 rows from 1 on, seen [1, 0, 1] times", id="vanished"),
        pytest.param([(0, 1, 2)], "1 rows from 2 on, seen [1] times", id="of an aborted batch"),
        pytest.param([(0, 1, 9)], "1 rows from 9 on, seen [1] times", id="never written"),
    ],
)
def test_an_anomaly_is_found(
    checker: Checker, history: History, reads: list[tuple[int, ...]], wrong: str
) -> None:
    write(history, 0)
    for rows in reads:
        read(history, *rows)
    # It begins behind the read that saw one of its rows.
    write(history, 2, is_known=False)
    assert checker.problems(history.registers(range(10))) == [f"{wrong}: Illegal"]


def test_rows_of_a_key_that_trade_places_are_counted() -> None:
    assert disordered([(b"a", 1), (b"b", 9), (b"a", 2), (b"b", 11)]) == 0
    assert disordered([(b"a", 1), (b"a", 3), (b"b", 5), (b"a", 2), (b"a", 3)]) == 1
