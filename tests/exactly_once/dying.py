"""Replaces how this process commits transactions: one after the other, and something dies before the
so-manyth."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kafka_sink.transactions.client import TransactionClient
from kafka_sink.transactions.operations import EndTransaction, Operation

VARIABLE = "EXACTLY_ONCE_TESTS_DIE_BEFORE_COMMIT"


def install(count: int, die: Callable[[], None]) -> None:
    """``die`` is called before the ``count``th commit of a task's transaction."""
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
                die()
            results += execute(self, (operation,))
        return tuple(results)

    TransactionClient.execute = dying  # type: ignore[method-assign]


def _commits_a_task(operation: Operation) -> bool:
    return (
        isinstance(operation, EndTransaction) and operation.commit and "-task-" in operation.transactional_id
    )


def kill_self() -> None:
    """As kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_jvm() -> None:
    """Kills the JVM that this Python worker belongs to, and the worker."""
    pid = os.getppid()
    while pid > 1:
        # The name of the command may hold blanks and brackets.
        name, rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split("(", 1)[1].rsplit(")", 1)
        if name == "java":
            os.kill(pid, signal.SIGKILL)
            break
        pid = int(rest.split()[1])
    kill_self()
