"""Compares what producers reported with the log: the invariants that no fault may break.

A history is a list of attempts (the rows of a task, and its result) and the topic's whole content.
``check`` is pure; whatever it reports is a broken promise or, in a test of the checker, an injected bug.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kafka_sink.model import TaskResult

KEYS = 61
_EXAMPLES = 3


class Invariant(Enum):
    """What must hold; the value says what it means that it does not."""

    PRESENT = "an acknowledged row is not in the log"
    ONCE = "a row of one attempt is in the log more than once"
    ORDERED = "rows of one key of one attempt are not in the order in which they were handed over"
    SUCCESSIVE = "rows of a task are before rows of an earlier, acknowledged task of the same worker"
    OURS = "the log holds what nobody sent"
    ONE_PARTITION = "rows of one key are in more than one partition"
    REPORTED = "the offsets or counts in the task's result are not those of the log"
    ENDS = "a task did not end within its bounds"


class Record(NamedTuple):
    """One record as a consumer read it."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None


@dataclass(frozen=True)
class Attempt:
    """One attempt of a task: rows 0 .. rows-1, keys and values as ``key_of`` and ``value_of`` make them.

    ``acknowledged``: the sink said that all were written; else any of them may be there, each at most once.
    ``result``: its result, None if it could not be read. A worker's attempts follow one another.
    """

    worker: int
    task: int
    number: int
    rows: int
    acknowledged: bool
    result: TaskResult | None = None


@dataclass(frozen=True)
class Violations:
    """How often each invariant is broken, with a few examples."""

    counts: Counter[Invariant] = field(default_factory=Counter)
    examples: dict[Invariant, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, invariant: Invariant, example: str) -> None:
        """Counts one."""
        self.counts[invariant] += 1
        if len(self.examples[invariant]) < _EXAMPLES:
            self.examples[invariant].append(example)

    def __bool__(self) -> bool:
        return bool(self.counts)

    def __str__(self) -> str:
        return "; ".join(
            f"{invariant.name} x {count}: {invariant.value} ({', '.join(self.examples[invariant])})"
            for invariant, count in self.counts.items()
        )


def key_of(number: int) -> bytes:
    """The key of a row, of any task."""
    return b"k%d" % (number % KEYS)


def value_of(task: int, attempt: int, number: int) -> bytes:
    """The value of a row: whose it is, and filling whose length depends on the number."""
    return b"%d %d %d " % (task, attempt, number) + b"x" * (number * 7 % 90)


def _owner(record: Record) -> tuple[int, int, int] | None:
    """(task, attempt, row) of a record that ``key_of`` and ``value_of`` made, exactly."""
    try:
        task, attempt, number = map(int, (record.value or b"").split(b" ")[:3])
    except ValueError:
        return None
    if record.value != value_of(task, attempt, number) or record.key != key_of(number):
        return None
    return task, attempt, number


@dataclass
class _Found:
    """The records of one attempt in the log."""

    rows: set[int] = field(default_factory=set)
    offsets: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    last_of_key: dict[bytes | None, int] = field(default_factory=dict)


def check(attempts: Sequence[Attempt], log: Iterable[Record]) -> Violations:
    """Every broken invariant. ``log`` is in offset order within each partition."""
    broken = Violations()
    handed = {(attempt.task, attempt.number): attempt for attempt in attempts}
    found: dict[tuple[int, int], _Found] = defaultdict(_Found)
    home: dict[bytes | None, int] = {}
    for record in log:
        owner = _owner(record)
        attempt = None if owner is None else handed.get(owner[:2])
        if owner is None or attempt is None or not 0 <= owner[2] < attempt.rows:
            broken.add(Invariant.OURS, f"{record.partition}@{record.offset} {record.value!r:.60}")
            continue
        if home.setdefault(record.key, record.partition) != record.partition:
            broken.add(Invariant.ONE_PARTITION, f"{record.key!r} in {home[record.key]}, {record.partition}")
        _place(broken, found[owner[:2]], record, owner)
    for attempt in attempts:
        if attempt.acknowledged:
            _check_acknowledged(broken, attempt, found[attempt.task, attempt.number])
    _check_succession(broken, attempts, found)
    return broken


def _place(broken: Violations, found: _Found, record: Record, owner: tuple[int, int, int]) -> None:
    number = owner[2]
    found.offsets[record.partition].append(record.offset)
    where = f"task {owner[0]}.{owner[1]} row {number} at {record.partition}@{record.offset}"
    if number in found.rows:
        # Not out of order as well: a double says nothing of what was meant to be written when.
        broken.add(Invariant.ONCE, where)
        return
    found.rows.add(number)
    if found.last_of_key.get(record.key, -1) > number:
        broken.add(Invariant.ORDERED, f"{where} after row {found.last_of_key[record.key]}")
    found.last_of_key[record.key] = max(number, found.last_of_key.get(record.key, -1))


def _check_acknowledged(broken: Violations, attempt: Attempt, found: _Found) -> None:
    name = f"task {attempt.task}.{attempt.number}"
    for number in range(attempt.rows):
        if number not in found.rows:
            broken.add(Invariant.PRESENT, f"{name} row {number}")
    result = attempt.result
    if result is None:
        return
    if result.records != attempt.rows:
        broken.add(Invariant.REPORTED, f"{name}: {result.records} records of {attempt.rows}")
    reported = {part.partition: part for part in result.partitions}
    for partition in reported.keys() | found.offsets.keys():
        held = found.offsets.get(partition, [])
        part = reported.get(partition)
        if part is None:
            broken.add(Invariant.REPORTED, f"{name}: partition {partition} is not in the result")
            continue
        ranges = [(low, high) for low, high in part.offset_ranges if low >= 0]
        offsets = {offset for low, high in ranges for offset in range(low, high + 1)}
        # A duplicate may be acknowledged without its offset: then fewer are reported, never others.
        complete = len(offsets) == part.records
        if part.records != len(held) or not (offsets == set(held) if complete else offsets < set(held)):
            broken.add(
                Invariant.REPORTED,
                f"{name}: {part.records} in {ranges} of {partition}, {len(held)} are there",
            )


def _check_succession(
    broken: Violations, attempts: Sequence[Attempt], found: dict[tuple[int, int], _Found]
) -> None:
    """A worker starts a task when the one before was acknowledged: nothing of it may come later."""
    last: dict[tuple[int, int], tuple[int, Attempt]] = {}
    for attempt in attempts:
        for partition, offsets in found[attempt.task, attempt.number].offsets.items():
            end, before = last.get((attempt.worker, partition), (-1, attempt))
            if min(offsets) < end:
                broken.add(
                    Invariant.SUCCESSIVE,
                    f"task {attempt.task}.{attempt.number} at {partition}@{min(offsets)}, task "
                    f"{before.task}.{before.number} up to {end}",
                )
            if attempt.acknowledged:
                last[attempt.worker, partition] = (max(end, *offsets), attempt)
