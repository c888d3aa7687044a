"""A task attempt's side: it begins, writes, leaves a mark, and never decides."""

from __future__ import annotations

from collections.abc import Mapping

from kafka_sink.errors import TransactionError
from kafka_sink.transactions.decision import BatchIdentity
from kafka_sink.transactions.operations import (
    OPEN,
    Describe,
    Described,
    EndTransaction,
    Failed,
    ListOpen,
    ProducerEpoch,
    RecordOffsets,
    Steps,
    describe,
    init_producer,
)
from kafka_sink.transactions.scope import Scope

# How many further slots an attempt tries whose first one is taken.
_NEXT_SLOT = 1000
_MAX_SLOTS = 16


def begin(scope: Scope, claim: ProducerEpoch, task: int, attempt: int) -> Steps[tuple[int, ProducerEpoch]]:
    """The slot, and the producer id and epoch to write with.

    Each attempt has a slot of its own, its number, so a late one ends no transaction of another attempt of
    its batch. A stage that Spark runs again counts its attempts from 0 once more, while tasks of its first
    run may go on, or have succeeded: an attempt that finds an open transaction in its slot takes another
    slot. Planning left none open. Raises TransactionError for an attempt of an older batch, which finds that
    the driver's id has moved on.
    """
    for slot in range(attempt, attempt + _MAX_SLOTS * _NEXT_SLOT, _NEXT_SLOT):
        name = scope.task_id(task, slot)
        found = yield from describe(scope.driver_id, name)
        yield from require_owner(scope, claim, found)
        if name not in found or found[name].state != OPEN:
            return slot, (yield from init_producer(name))
    raise TransactionError(f"attempt {attempt} of task {task} has {_MAX_SLOTS} transactions open already")


def finish(
    scope: Scope, claim: ProducerEpoch, batch: BatchIdentity, task: int, slot: int, producer: ProducerEpoch
) -> Steps[None]:
    """Put the mark into the transaction, once all rows are acknowledged. Raises TransactionError.

    An attempt that had begun, and not written yet, when its batch was committed is told so here; nobody else
    would end its transaction.
    """
    key = scope.mark_key(task)
    name = scope.task_id(task, slot)
    mark = RecordOffsets(name, producer, key.group, ((key.partition, batch.mark(task, producer)),))
    failed, driver = yield (mark, Describe((scope.driver_id,)))
    if isinstance(failed, Failed):
        raise TransactionError(
            f"the transaction '{name}' is no longer this task's ({failed.error}): it was open for longer "
            "than kafka.transaction.timeout.ms, or another attempt or run took its place"
        )
    yield from require_owner(scope, claim, driver)


def open_longer_than(scope: Scope, age_ms: float) -> Steps[int]:
    """How many transactions of the prefix's tasks have been open for so long, by brokers' clocks."""
    (names,) = yield (ListOpen(scope.prefix, round(age_ms)),)
    return len(names)


def abort(scope: Scope, task: int, slot: int, producer: ProducerEpoch) -> Steps[None]:
    yield (EndTransaction(scope.task_id(task, slot), producer, commit=False),)


def require_owner(
    scope: Scope, claim: ProducerEpoch, described: Mapping[str, Described] | None = None
) -> Steps[None]:
    """Raise TransactionError if the claim is not the driver's any more. ``described``: by what is known."""
    driver = (described or {}).get(scope.driver_id)
    if driver is not None and driver.producer == claim:
        return
    # A former coordinator may have said so.
    driver = (yield from describe(scope.driver_id, afresh=True)).get(scope.driver_id)
    if driver is not None and driver.producer == claim:
        return
    raise TransactionError(
        f"this attempt comes too late: its batch was decided without it, or another driver uses "
        f"transactional.id.prefix '{scope.prefix}'"
    )
