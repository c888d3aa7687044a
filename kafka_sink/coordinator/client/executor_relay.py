"""Connects a task to the coordinator by way of its executor's relay, or directly.

The first worker that finds no relay becomes it, unless a process runs relays for the workers (relay_host).
Where workers cannot share one (no common folder, no Unix sockets, a relay that is frozen), each has a
connection of its own. A relay saves work, and nothing depends on it.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from kafka_sink.clock import RANDOM, Clock
from kafka_sink.coordinator.client import relay_host
from kafka_sink.coordinator.client.relay import Relay, RelayFolder
from kafka_sink.coordinator.transport.address import CoordinatorAddress
from kafka_sink.coordinator.transport.connection import CoordinatorConnection, Link, connect
from kafka_sink.coordinator.transport.group import GroupFactory
from kafka_sink.errors import ProtocolError

# A relay runs on this host, in a worker that may be busy.
_CHALLENGE_MS = 1000.0
# Another worker may be about to become the relay: it connects to the coordinator first.
_WAITS_S = (0.0, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64)
# So often the process that runs relays is asked, if there is one, before a worker becomes the relay.
_HOST_ATTEMPTS = 5
# A relay that could not be reached is not tried again for this long, and for twice as long each time that it
# fails again. One that did not greet may only be busy, because all workers of an executor start at once.
_AVOID_MS, _AVOID_BUSY_MS, _AVOID_MAX_MS = 60_000.0, 5_000.0, 600_000.0

_lock = threading.Lock()  # guards the dictionary; held while this process becomes a relay
_relays: dict[str, Relay] = {}


def _forget_after_fork() -> None:
    """Another thread may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _relays.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


class ExecutorRelay:
    """The way to one coordinator. Used by one thread. ``groups``: of a relay that this process becomes."""

    def __init__(
        self,
        address: CoordinatorAddress,
        silence_ms: float,
        clock_ms: Clock,
        groups: Sequence[GroupFactory] = (),
    ) -> None:
        self._address = address
        self._groups = groups
        self._silence_ms = silence_ms
        self._clock_ms = clock_ms
        self._avoid_until_ms = -math.inf if hasattr(socket, "AF_UNIX") else math.inf
        self._failures = 0

    def connect(self) -> CoordinatorConnection:
        """A connection after its challenge. Raises OSError and ProtocolError.

        A relay answers the challenge itself. One that is frozen is left at once, and one that works is kept
        while the coordinator is slow: otherwise a stall would leave it a connection for each task.
        """
        relayed = self.connect_by_relay()
        return relayed or CoordinatorConnection(self._address, self._silence_ms, self._clock_ms)

    def connect_by_relay(self) -> CoordinatorConnection | None:
        """None where there is no relay, or none that may be tried now. Raises OSError and ProtocolError."""
        if self.retry_in_ms > 0:
            return None
        try:
            connection = self._connect_by(RelayFolder.of(self._address))
        except _NoRelayError as error:
            pause_ms = min(error.avoid_ms * 2**self._failures, _AVOID_MAX_MS)
            self._failures = min(self._failures + 1, 10)
            self._avoid_until_ms = self._clock_ms() + pause_ms
            return None
        self._failures = 0
        return connection

    @property
    def retry_in_ms(self) -> float:
        """Milliseconds until a task that is connected directly should try the relay again."""
        return max(0.0, self._avoid_until_ms - self._clock_ms())

    def _connect_by(self, folder: RelayFolder | None) -> CoordinatorConnection:
        if folder is None:
            raise _NoRelayError
        for attempt, wait_s in enumerate(_WAITS_S):
            # Workers of an executor try at the same time.
            time.sleep(wait_s * (0.5 + RANDOM.random()))
            if attempt >= _HOST_ATTEMPTS or not relay_host.is_there():
                self._become_relay(folder)
            try:
                connected = folder.connect(_CHALLENGE_MS)
                return CoordinatorConnection(
                    self._address, self._silence_ms, self._clock_ms, connected, _CHALLENGE_MS
                )
            except (TimeoutError, ProtocolError):
                raise _NoRelayError(_AVOID_BUSY_MS) from None
            except OSError:
                relay_host.ask(self._address)
        raise _NoRelayError

    def become_relay(self) -> None:
        """Start the relay in this process, unless there is one. Raises OSError and ProtocolError."""
        folder = RelayFolder.of(self._address)
        if folder is not None:
            with suppress(_NoRelayError):
                self._become_relay(folder)

    def _become_relay(self, folder: RelayFolder) -> None:
        """Start the relay in this process, unless there is one. Raises as connecting does."""
        key = str(folder.lock_path)
        with _lock:
            running = _relays.get(key)
            if running is not None and running.is_ours:
                return
            _relays.pop(key, None)
            try:
                handle = folder.try_lock()
            except OSError:
                raise _NoRelayError from None
            if handle is None:
                return
            try:
                _relays[key] = self._start(folder, handle)
            except BaseException:
                os.close(handle)
                raise

    def _start(self, folder: RelayFolder, handle: int) -> Relay:
        rendezvous, pid = self._address.rendezvous, os.getpid()
        try:
            # First, because not every file system has sockets.
            listening = folder.listen()
        except OSError:
            raise _NoRelayError from None
        try:
            connected = connect(self._address, self._silence_ms)
            link = Link(connected, rendezvous, self._silence_ms, self._clock_ms, is_relay=True)
        except BaseException:
            listening.close()
            raise

        def ended() -> None:
            with _lock:
                if os.getpid() == pid:
                    _relays.pop(str(folder.lock_path), None)
                    os.close(handle)

        groups = [make() for make in self._groups]
        relay = Relay(link, listening, rendezvous, self._clock_ms, ended, groups, self._silence_ms)
        relay.start()
        return relay


class _NoRelayError(Exception):
    """Connect directly, and do not try the relay for this long."""

    def __init__(self, avoid_ms: float = _AVOID_MS) -> None:
        super().__init__()
        self.avoid_ms = avoid_ms
