"""The driver's connection to the coordinator, kept from micro-batch to micro-batch.

Spark reuses the process that commits a stream's micro-batches. Connecting, with the challenge of both ends,
and waiting for the reply took 3 ms of each commit. Batch writes connect by themselves, once a job.
"""

from __future__ import annotations

import os
import selectors
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kafka_sink.clock import Clock
from kafka_sink.coordinator.wire.address import CoordinatorAddress
from kafka_sink.coordinator.wire.connection import CoordinatorConnection
from kafka_sink.errors import ProtocolError


class KeptConnection:
    """At most one connection, to the coordinator that was used last. Any thread; a fork has another.

    ``silence_ms`` bounds connecting, and how long a reply may be missing before another connection is made.
    """

    def __init__(self, silence_ms: float, clock_ms: Clock) -> None:
        self._silence_ms = silence_ms
        self._clock_ms = clock_ms
        self._lock = threading.Lock()  # guards the next one
        self._kept: tuple[CoordinatorAddress, CoordinatorConnection] | None = None
        # For the life of the process, as are the instances.
        os.register_at_fork(after_in_child=self._after_fork)

    def send(self, address: CoordinatorAddress, kind: str, body: Mapping[str, Any]) -> None:
        """Send a message without waiting for its reply. Raises OSError and ProtocolError."""
        with self._lock:
            connection = self._usable(address) or CoordinatorConnection(
                address, self._silence_ms, self._clock_ms
            )
            self._kept = address, connection
            try:
                connection.send(kind, body, self._clock_ms())
            except OSError:
                self._close()
                raise

    def close(self) -> None:
        """Close it, if there is one."""
        with self._lock:
            self._close()

    def _after_fork(self) -> None:
        """In the child: another thread may have held the lock, and the replies are the parent's."""
        self._lock = threading.Lock()
        self._close()

    def _usable(self, address: CoordinatorAddress) -> CoordinatorConnection | None:
        """The kept connection, after the replies that have come, unless the coordinator has left it."""
        if self._kept is None:
            return None
        kept_address, connection = self._kept
        if kept_address == address:
            with suppress(OSError, ProtocolError):
                _receive_all(connection, self._clock_ms)
                if self._clock_ms() < connection.silent_at_ms:
                    return connection
        self._close()
        return None

    def _close(self) -> None:
        if self._kept is not None:
            self._kept[1].close()
        self._kept = None


def _receive_all(connection: CoordinatorConnection, clock_ms: Clock) -> None:
    """The replies that have come."""
    # Not select.select, which takes no descriptor above 1,023.
    with selectors.DefaultSelector() as selector:
        selector.register(connection.socket, selectors.EVENT_READ)
        while selector.select(0):
            connection.receive(clock_ms())
