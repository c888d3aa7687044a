"""Asks the coordinator how many rows a task may send next: see handler."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from kafka_sink.coordinator.rates.messages import KIND
from kafka_sink.coordinator.transport.channel import Channel
from kafka_sink.errors import ProtocolError


class RateChannel(Channel):
    """``ask`` and ``await_grant`` are called by the task's thread."""

    kind = KIND

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()  # guards everything below
        # Before the first connection too: the task waits for it rather than for a share of its own.
        self._is_shared = True
        self._ask: Mapping[str, Any] | None = None
        self._must_send = False
        self._granted = 0

    def expect(self) -> None:
        """A new task starts while the client connects: wait for the coordinator again."""
        with self._changed:
            self._is_shared = True

    @property
    def is_shared(self) -> bool:
        """Whether there is a coordinator to ask, or may soon be one."""
        return self._is_shared

    def ask(self, job: str, limits: Mapping[str, int], rows: int, size: int) -> bool:
        """Ask for the job's next rows, ``size`` bytes in all. False where there is no coordinator."""
        with self._changed:
            if not self._is_shared:
                return False
            self._ask = {"job": job, "limits": dict(limits), "rows": rows, "bytes": size}
            self._must_send, self._granted = True, 0
        self._wake()
        return True

    def await_grant(self, timeout_ms: float) -> int | None:
        """How many rows may go; 0 where the time is over before that. None: the coordinator is lost."""
        with self._changed:
            if not self._granted and self._is_shared:
                self._changed.wait(timeout_ms / 1000)
            granted, self._granted = self._granted, 0
            return granted if granted or self._is_shared else None

    def next_message(self, now_ms: float) -> Mapping[str, Any] | None:
        with self._changed:
            must_send, self._must_send = self._must_send, False
            return self._ask if must_send else None

    def on_push(self, body: Mapping[str, Any], now_ms: float) -> None:
        rows = body.get("rows")
        if not isinstance(rows, int) or rows < 1:
            raise ProtocolError("a grant without rows")
        with self._changed:
            if self._ask is not None:
                self._ask = None
                self._granted = rows
                self._changed.notify_all()

    def on_connected(self, now_ms: float) -> None:
        with self._changed:
            self._is_shared = True
            self._must_send = self._ask is not None

    def on_lost(self, now_ms: float) -> None:
        """The task goes on with a share of its own."""
        with self._changed:
            self._is_shared = False
            self._ask = None
            self._changed.notify_all()
