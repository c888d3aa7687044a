"""The checker sees every kind of broken promise, and nothing where all is well."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.model import PartitionResult, TaskResult
from tests.chaos.history import KEYS, Attempt, Invariant, Record, check, key_of, value_of

PARTITIONS = 3


def log_of(*attempts: tuple[int, int, int]) -> list[Record]:
    """What a log holds after (task, attempt, rows) were written one after the other."""
    ends = [0] * PARTITIONS
    records = []
    for task, attempt, rows in attempts:
        for number in range(rows):
            partition = number % KEYS % PARTITIONS
            records.append(
                Record(partition, ends[partition], key_of(number), value_of(task, attempt, number))
            )
            ends[partition] += 1
    return records


def result_of(log: list[Record], task: int) -> TaskResult:
    """The result that belongs to a task's rows, which are contiguous in each partition."""
    parts = []
    for partition in range(PARTITIONS):
        prefix = b"%d " % task
        offsets = [r.offset for r in log if r.partition == partition and (r.value or b"").startswith(prefix)]
        if offsets:
            ranges = ((min(offsets), max(offsets)),)
            parts.append(PartitionResult("t", partition, len(offsets), 1, 1, ranges))
    return TaskResult(partitions=tuple(parts), records=sum(part.records for part in parts))


def history() -> tuple[list[Attempt], list[Record]]:
    log = log_of((1, 0, 200), (2, 0, 90), (2, 1, 200))
    return [
        Attempt(0, 1, 0, 200, True, result_of(log, 1)),
        Attempt(0, 2, 0, 150, False),
        Attempt(0, 2, 1, 200, True),
    ], log


def broken(attempts: list[Attempt], log: list[Record]) -> set[Invariant]:
    return set(check(attempts, log).counts)


def test_nothing_is_found_where_all_is_well() -> None:
    attempts, log = history()
    assert not check(attempts, log)
    assert str(check(attempts, log)) == ""


def test_a_lost_row_is_found_with_its_name() -> None:
    attempts, log = history()
    lost = log.pop(17)
    found = check([replace(attempts[0], result=None), *attempts[1:]], log)
    assert found.counts == {Invariant.PRESENT: 1}
    assert f"task 1.0 row {int((lost.value or b'').split()[2])}" in str(found)


def test_what_was_not_acknowledged_may_be_missing() -> None:
    attempts, log = history()
    assert not check(attempts, [r for r in log if not (r.value or b"").startswith(b"2 0 ")])


def of(task: bytes, log: list[Record], key: bytes | None = None) -> list[int]:
    """Places of an attempt's rows in the log."""
    return [
        place
        for place, record in enumerate(log)
        if (record.value or b"").startswith(task) and key in (None, record.key)
    ]


@pytest.mark.parametrize("task", [b"1 0 ", b"2 0 "])
def test_a_double_is_found_in_acknowledged_and_failed_attempts(task: bytes) -> None:
    attempts, log = history()
    found = broken(attempts, [*log, log[of(task, log)[0]]._replace(offset=9999)])
    assert Invariant.ONCE in found
    assert Invariant.ORDERED not in found


def test_rows_of_one_key_that_change_places_are_found() -> None:
    attempts, log = history()
    first, second = of(b"1 0 ", log, b"k3")[:2]
    values = log[first].value, log[second].value
    log[second], log[first] = log[second]._replace(value=values[0]), log[first]._replace(value=values[1])
    assert broken(attempts, log) == {Invariant.ORDERED}


def test_rows_of_different_keys_may_change_places() -> None:
    attempts, log = history()
    one, other = [place for place, record in enumerate(log) if record.partition == 0][:2]
    log[one], log[other] = (
        log[other]._replace(offset=log[one].offset),
        log[one]._replace(offset=log[other].offset),
    )
    assert not check(attempts, log)


@pytest.mark.parametrize(
    "change",
    [
        {"value": b"hello"},
        {"value": None},
        {"value": value_of(1, 0, 5) + b"x"},
        {"value": value_of(1, 0, 999)},
        {"value": value_of(9, 0, 5)},
        {"key": b"k60"},
        {"key": None},
    ],
    ids=str,
)
def test_what_nobody_sent_is_found(change: dict[str, bytes | None]) -> None:
    attempts, log = history()
    assert Invariant.OURS in broken(attempts, [*log, log[5]._replace(offset=9999)._replace(**change)])  # type: ignore[arg-type]


def test_a_key_in_two_partitions_is_found() -> None:
    attempts, log = history()
    log[-1] = log[-1]._replace(partition=(log[-1].partition + 1) % PARTITIONS, offset=9999)
    assert broken(attempts, log) == {Invariant.ONE_PARTITION}


def test_a_late_write_of_an_acknowledged_task_is_found() -> None:
    attempts, log = history()
    log.append(log.pop(of(b"1 0 ", log)[0])._replace(offset=9999))
    unseen = [replace(attempts[0], result=None), *attempts[1:]]
    assert Invariant.SUCCESSIVE in broken(unseen, log)
    elsewhere = [replace(attempts[0], result=None, worker=7), *attempts[1:]]
    assert Invariant.SUCCESSIVE not in broken(elsewhere, log)


@pytest.mark.parametrize("change", ["shifted", "short", "long", "other", "count", "missing"])
def test_wrong_offsets_in_a_result_are_found(change: str) -> None:
    attempts, log = history()
    result = attempts[0].result
    assert result is not None
    first = result.partitions[0]
    low, high = first.offset_ranges[0]
    ranges = {
        "shifted": ((low + 1, high + 1),),
        "long": ((low, high + 1),),
        "other": ((low, 9), (11, high + 1)),
    }
    wrong = first._replace(offset_ranges=ranges.get(change, first.offset_ranges))
    if change == "short":
        wrong = first._replace(records=first.records - 1, offset_ranges=((low, high - 1),))
    parts = (() if change == "missing" else (wrong,)) + result.partitions[1:]
    changed = replace(result, partitions=parts, records=result.records - (change == "count"))
    assert broken([replace(attempts[0], result=changed), *attempts[1:]], log) == {Invariant.REPORTED}


def test_a_duplicate_without_its_offset_is_no_lie() -> None:
    attempts, log = history()
    result = attempts[0].result
    assert result is not None
    first = result.partitions[0]
    low, high = first.offset_ranges[0]
    partial = first._replace(offset_ranges=((low, low + 9),))
    unknown = replace(result, partitions=(partial, *result.partitions[1:]))
    assert not check([replace(attempts[0], result=unknown), *attempts[1:]], log)
    assert high > low + 9


@given(place=st.integers(0, 489), change=st.sampled_from(["drop", "double", "swap", "move"]))
def test_no_single_change_of_an_acknowledged_row_goes_unseen(place: int, change: str) -> None:
    attempts, log = history()
    attempts = [replace(attempt, result=None) for attempt in attempts]
    record = log[place]
    task, attempt, number = map(int, (record.value or b"").split()[:3])
    if (task, attempt) == (2, 0):
        return
    if change == "drop":
        del log[place]
    elif change == "double":
        log.append(record._replace(offset=9999))
    elif change == "swap":
        other = number + KEYS if number + KEYS < 200 else number - KEYS
        value = value_of(task, attempt, other)
        partner = next(i for i, r in enumerate(log) if r.value == value)
        log[place], log[partner] = record._replace(value=value), log[partner]._replace(value=record.value)
    else:
        log[place] = record._replace(partition=(record.partition + 1) % PARTITIONS, offset=9999)
    assert check(attempts, log)
