"""Replaces how this process commits transactions: one after the other, and it dies before the so-manyth."""

from __future__ import annotations

import os
import signal
from typing import Any

from kafka_sink.transactions.client import TransactionClient
from kafka_sink.transactions.operations import EndTransaction, Operation


def install(count: int) -> None:
    """This process dies, as by kill -9, before the ``count``th commit of a task's transaction."""
    execute = TransactionClient.execute
    left = count

    def dying(self: TransactionClient, operations: tuple[Operation, ...]) -> tuple[Any, ...]:
        nonlocal left
        if not any(_commits_a_task(one) for one in operations):
            return execute(self, operations)
        results: list[Any] = []
        for operation in operations:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            results += execute(self, (operation,))
        return tuple(results)

    TransactionClient.execute = dying  # type: ignore[method-assign]


def _commits_a_task(operation: Operation) -> bool:
    return (
        isinstance(operation, EndTransaction) and operation.commit and "-task-" in operation.transactional_id
    )
