"""A task attempt's side: it begins, writes, leaves a mark, and never decides."""

from __future__ import annotations

from collections.abc import Mapping

from kafka_sink.errors import TransactionError
from kafka_sink.transactions.decision import BatchIdentity
from kafka_sink.transactions.operations import (
    Describe,
    Described,
    EndTransaction,
    ProducerEpoch,
    RecordOffsets,
    Refused,
    Steps,
    describe,
    init_producer,
)
from kafka_sink.transactions.scope import Scope


def begin(scope: Scope, claim: ProducerEpoch, task: int, slot: int) -> Steps[ProducerEpoch]:
    """The producer id and epoch to write with. Raises TransactionError for an attempt that comes too late.

    Each attempt has a slot of its own, so a late one ends no transaction of another attempt of its batch. One
    of an older batch finds that the driver's id has moved on.
    """
    _require_owner(scope, claim, (yield from describe(scope.driver_id)))
    return (yield from init_producer(scope.task_id(task, slot)))


def finish(
    scope: Scope, claim: ProducerEpoch, batch: BatchIdentity, task: int, slot: int, producer: ProducerEpoch
) -> Steps[None]:
    """Put the mark into the transaction, once all rows are acknowledged. Raises TransactionError."""
    key = scope.mark_key(task)
    name = scope.task_id(task, slot)
    mark = RecordOffsets(name, producer, key.group, ((key.partition, batch.mark(task)),))
    refused, driver = yield (mark, Describe((scope.driver_id,)))
    if isinstance(refused, Refused):
        raise TransactionError(
            f"the transaction '{name}' is no longer this task's ({refused.error}): it was open for longer "
            "than kafka.transaction.timeout.ms, or another attempt or run took its place"
        )
    _require_owner(scope, claim, driver)


def abort(scope: Scope, task: int, slot: int, producer: ProducerEpoch) -> Steps[None]:
    """End an attempt that failed. Where somebody else has, that is as good."""
    yield (EndTransaction(scope.task_id(task, slot), producer, commit=False),)


def _require_owner(scope: Scope, claim: ProducerEpoch, described: Mapping[str, Described]) -> None:
    driver = described.get(scope.driver_id)
    if driver is None or driver.producer != claim:
        raise TransactionError(
            f"this attempt comes too late: its batch was decided without it, or another driver uses "
            f"transactional.id.prefix '{scope.prefix}'"
        )
