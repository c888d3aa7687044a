"""The task's and the driver's side of ending attempts: see write_handler."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from kafka_sink.clock import monotonic_ms
from kafka_sink.coordinator.wire.address import CoordinatorAddress
from kafka_sink.coordinator.wire.connection import CoordinatorConnection
from kafka_sink.errors import KafkaSinkError, ProtocolError, WriteOverError

KIND = "writes"
# For the connection and for the answer; the coordinator is on this host.
_DRIVER_WAITS_MS = 500.0


class WriteChannel:
    """See Channel. ``abandon`` is called, from the client's thread, when the write under way is over."""

    kind = KIND

    def __init__(self, abandon: Callable[[Exception], None]) -> None:
        self._abandon = abandon
        self._wake: Callable[[], None] = lambda: None
        # Guards the two below, and makes ``end`` wait for a call of ``abandon``.
        self._lock = threading.Lock()
        self._name: str | None = None
        self._to_tell = False

    def attach(self, wake: Callable[[], None]) -> None:
        """See Channel."""
        self._wake = wake

    def begin(self, name: str | None) -> None:
        """A task of this write begins; None for one without a name."""
        with self._lock:
            self._name, self._to_tell = name, name is not None
        self._wake()

    def end(self) -> None:
        """The task is done; ``abandon`` is not called any more."""
        with self._lock:
            self._name, self._to_tell = None, False

    def next_message(self, now_ms: float) -> Mapping[str, Any] | None:  # noqa: ARG002 - Channel's signature
        """See Channel."""
        with self._lock:
            if not self._to_tell:
                return None
            self._to_tell = False
            return {"writing": self._name}

    def hurry(self) -> None:
        """See Channel."""

    def next_message_delay_ms(self, now_ms: float) -> float:  # noqa: ARG002 - Channel's signature
        """See Channel."""
        return math.inf

    def on_reply(self, body: Mapping[str, Any], last: bool, now_ms: float) -> None:  # noqa: ARG002 - Channel's signature
        """See Channel."""
        self._hear(body)

    def on_push(self, body: Mapping[str, Any], now_ms: float) -> None:  # noqa: ARG002 - Channel's signature
        """See Channel."""
        self._hear(body)

    def _hear(self, body: Mapping[str, Any]) -> None:
        over = body.get("over")
        with self._lock:
            if over is not None and over == self._name:
                self._abandon(
                    WriteOverError("Spark has committed or aborted this write while the attempt was at work")
                )

    def on_connected(self, now_ms: float) -> None:  # noqa: ARG002 - Channel's signature
        """See Channel."""
        with self._lock:
            self._to_tell = self._name is not None

    def on_lost(self, now_ms: float) -> None:
        """See Channel. The executor's hang-up still ends the attempt."""


def tell_over(address: CoordinatorAddress, name: str) -> None:
    """From the driver: attempts of this write that are still at work are to end. Never fails."""
    with suppress(OSError, KafkaSinkError, ProtocolError):
        connection = CoordinatorConnection(address, _DRIVER_WAITS_MS, monotonic_ms)
        try:
            connection.tell(KIND, {"over": name}, monotonic_ms())
            connection.receive(monotonic_ms())
        finally:
            connection.close()
