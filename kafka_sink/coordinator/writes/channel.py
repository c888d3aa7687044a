"""How the driver ends attempts that outlive their write, and how tasks learn of it: see handler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from kafka_sink.clock import monotonic_ms
from kafka_sink.coordinator.transport.address import CoordinatorAddress
from kafka_sink.coordinator.transport.channel import Channel
from kafka_sink.coordinator.transport.connection import CoordinatorConnection, KeptConnection
from kafka_sink.errors import KafkaSinkError, WriteOverError
from kafka_sink.model import WriteTransactions

KIND = "writes"
# Characters of what a task says about its failure.
MAX_CAUSE = 2000
# Bounds connecting and the reply. The coordinator runs on the driver's host.
_DRIVER_TIMEOUT_MS = 500.0
_KEPT = KeptConnection(_DRIVER_TIMEOUT_MS, monotonic_ms)


class WriteChannel(Channel):
    """Calls ``abort``, on the client's thread, when the current write is over."""

    kind = KIND

    def __init__(self, abort: Callable[[Exception], None]) -> None:
        self._abort = abort
        super().__init__()
        # Guards the next four, and makes ``end`` wait for a running call of ``abort``.
        self._lock = threading.Lock()
        self._name: str | None = None
        self._stage: int | None = None
        self._transactions: WriteTransactions | None = None
        self._must_send = False

    def begin(
        self, name: str | None, stage: int | None = None, transactions: WriteTransactions | None = None
    ) -> None:
        """A task of the write with this name starts. None: the write has no name.

        ``stage``: Spark's number of the task's stage, where it is known. ``transactions``: what the
        coordinator ends if Spark's driver does not.
        """
        with self._lock:
            self._name, self._stage, self._must_send = name, stage, name is not None
            self._transactions = transactions
        self._wake()

    def end(self) -> None:
        """The task has ended: ``abort`` is not called any more."""
        with self._lock:
            self._name, self._must_send = None, False

    def next_message(self, now_ms: float) -> Mapping[str, Any] | None:
        with self._lock:
            if not self._must_send:
                return None
            self._must_send = False
            body: dict[str, Any] = {"writing": self._name}
            if self._stage is not None:
                body["stage"] = self._stage
            if self._transactions is not None:
                body["transactions"] = asdict(self._transactions)
            return body

    def on_reply(self, body: Mapping[str, Any], last: bool, now_ms: float) -> None:
        self._receive(body)

    def on_push(self, body: Mapping[str, Any], now_ms: float) -> None:
        self._receive(body)

    def _receive(self, body: Mapping[str, Any]) -> None:
        over = body.get("over")
        with self._lock:
            # A late message may concern the last run of this micro-batch, in another stage.
            is_mine = body.get("stage", self._stage) == self._stage
            if over is not None and over == self._name and is_mine:
                self._abort(
                    WriteOverError("Spark committed or aborted this write while the attempt still ran")
                )

    def on_connected(self, now_ms: float) -> None:
        with self._lock:
            self._must_send = self._name is not None


def end_attempts(
    address: CoordinatorAddress,
    name: str,
    *,
    again: bool = False,
    is_urgent: bool = True,
    aborts: bool = False,
) -> str:
    """Called on the driver: end the attempts of this write that still run. Raises nothing.

    ``again``: a later write may have this name. Attempts that begin later are not ended then.
    ``is_urgent``: wait until the coordinator has notified them. A commit of a stream, where only superseded
    copies still run, need not wait. ``aborts``: the write is not committed.

    Returns what the last attempt that reported a failure said; "" if none did, or where it does not wait.
    """
    body = {"over": name, "again": again, "aborts": aborts}
    if is_urgent:
        return str(_asked(address, body).get("cause", ""))
    with suppress(OSError, KafkaSinkError):
        _KEPT.send(address, KIND, body)
    return ""


def report_failure(address: CoordinatorAddress, name: str, cause: str) -> None:
    """Called in a task: its attempt has failed. Raises nothing."""
    _asked(address, {"failed": name, "cause": cause[:MAX_CAUSE]})


def _asked(address: CoordinatorAddress, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reply; empty where none came within the bound."""
    with suppress(OSError, KafkaSinkError):
        connection = CoordinatorConnection(address, _DRIVER_TIMEOUT_MS, monotonic_ms)
        try:
            connection.send(KIND, body, monotonic_ms())
            for received in connection.receive(monotonic_ms()):
                if received.last:
                    return received.body
        finally:
            connection.close()
    return {}
