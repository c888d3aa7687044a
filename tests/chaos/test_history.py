"""The checker sees every kind of broken promise, and nothing where all is well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

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


def of(task: bytes, log: list[Record], key: bytes | None = None) -> list[int]:
    """Places of an attempt's rows in the log."""
    return [
        place
        for place, record in enumerate(log)
        if (record.value or b"").startswith(task) and key in (None, record.key)
    ]


def test_check_reports_nothing_for_a_correct_log() -> None:
    attempts, log = history()
    assert not check(attempts, log)
    assert str(check(attempts, log)) == ""
    # What was not acknowledged may be missing.
    assert not check(attempts, [r for r in log if not (r.value or b"").startswith(b"2 0 ")])
    # Rows of different keys may change places.
    one, other = [place for place, record in enumerate(log) if record.partition == 0][:2]
    log[one], log[other] = (
        log[other]._replace(offset=log[one].offset),
        log[one]._replace(offset=log[other].offset),
    )
    assert not check(attempts, log)


def test_a_lost_row_is_found_with_its_name() -> None:
    attempts, log = history()
    lost = log.pop(17)
    found = check([replace(attempts[0], result=None), *attempts[1:]], log)
    assert found.counts == {Invariant.PRESENT: 1}
    assert f"task 1.0 row {int((lost.value or b'').split()[2])}" in str(found)


def double(log: list[Record], task: bytes = b"1 0 ") -> None:
    log.append(log[of(task, log)[0]]._replace(offset=9999))


def swap_in_key(log: list[Record]) -> None:
    first, second = of(b"1 0 ", log, b"k3")[:2]
    values = log[first].value, log[second].value
    log[second], log[first] = log[second]._replace(value=values[0]), log[first]._replace(value=values[1])


def move_to_another_partition(log: list[Record]) -> None:
    log[-1] = log[-1]._replace(partition=(log[-1].partition + 1) % PARTITIONS, offset=9999)


def strange(**change: bytes | None) -> Callable[[list[Record]], None]:
    return lambda log: log.append(log[5]._replace(offset=9999)._replace(**change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "found", "not_found"),
    [
        (double, {Invariant.ONCE}, {Invariant.ORDERED}),
        # Also of an attempt that failed.
        (partial(double, task=b"2 0 "), {Invariant.ONCE}, {Invariant.ORDERED}),
        (swap_in_key, {Invariant.ORDERED}, set(Invariant) - {Invariant.ORDERED}),
        (move_to_another_partition, {Invariant.ONE_PARTITION}, set(Invariant) - {Invariant.ONE_PARTITION}),
        (strange(value=b"hello"), {Invariant.OURS}, set()),
        (strange(value=None), {Invariant.OURS}, set()),
        (strange(value=value_of(1, 0, 5) + b"x"), {Invariant.OURS}, set()),
        (strange(value=value_of(1, 0, 999)), {Invariant.OURS}, set()),
        (strange(value=value_of(9, 0, 5)), {Invariant.OURS}, set()),
        (strange(key=b"k60"), {Invariant.OURS}, set()),
        (strange(key=None), {Invariant.OURS}, set()),
    ],
)
def test_check_reports_each_broken_invariant_of_a_log(
    change: Callable[[list[Record]], None], found: set[Invariant], not_found: set[Invariant]
) -> None:
    attempts, log = history()
    change(log)
    broken = check(attempts, log).counts.keys()
    assert found <= broken
    assert not not_found & broken


def test_a_late_write_of_an_acknowledged_task_is_found() -> None:
    attempts, log = history()
    log.append(log.pop(of(b"1 0 ", log)[0])._replace(offset=9999))
    for worker, expected in ((attempts[0].worker, True), (7, False)):
        first = replace(attempts[0], result=None, worker=worker)
        assert (Invariant.SUCCESSIVE in check([first, *attempts[1:]], log).counts) is expected


def test_wrong_offsets_in_a_result_are_found() -> None:
    attempts, log = history()
    result = attempts[0].result
    assert result is not None
    first, *others = result.partitions
    low, high = first.offset_ranges[0]

    def checked(*parts: PartitionResult, records: int = result.records) -> set[Invariant]:
        changed = replace(result, partitions=(*parts, *others), records=records)
        return set(check([replace(attempts[0], result=changed), *attempts[1:]], log).counts)

    for wrong in (
        first._replace(offset_ranges=((low + 1, high + 1),)),
        first._replace(offset_ranges=((low, high + 1),)),
        first._replace(offset_ranges=((low, 9), (11, high + 1))),
        first._replace(records=first.records - 1, offset_ranges=((low, high - 1),)),
    ):
        assert checked(wrong) == {Invariant.REPORTED}, wrong
    assert checked() == {Invariant.REPORTED}, "a partition is missing"
    assert checked(first, records=result.records - 1) == {Invariant.REPORTED}
    # A duplicate's offset may be unknown.
    assert high > low + 9
    assert checked(first._replace(offset_ranges=((low, low + 9),))) == set()


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
