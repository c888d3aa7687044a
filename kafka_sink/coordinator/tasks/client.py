"""The task's side of the coordinator: a thread of its own that nobody waits for.

Participants say what is to be told and take what is answered. Where the coordinator cannot be reached, or
stays silent, they are told at once and the task works alone; that is warned about once in a process, and the
connection is tried again with growing waits.
"""

from __future__ import annotations

import contextlib
import math
import random
import selectors
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from kafka_sink.backoff import ExponentialBackoff
from kafka_sink.clock import Clock
from kafka_sink.coordinator.wire.address import CoordinatorAddress
from kafka_sink.coordinator.wire.connection import CoordinatorConnection
from kafka_sink.coordinator.wire.warnings import warn_once
from kafka_sink.errors import ProtocolError
from kafka_sink.timing_bounds import COORDINATOR_SILENCE_MS

_BACKOFF_MS, _BACKOFF_MAX_MS = 1000.0, 30_000.0
_AFTER_IDLE_MS = 100.0
_MAX_WAIT_S = 3600.0


class Channel(Protocol):
    """One kind of message. Called on the client's thread, except where it says otherwise; must not block."""

    kind: str

    def attach(self, wake: Callable[[], None]) -> None:
        """Called once, before the thread starts: ``wake``, from any thread, has ``next_message`` called."""

    def next_message(self, now_ms: float) -> Mapping[str, Any] | None:
        """What is to be told now; None when nothing is. Called again until it is None."""

    def hurry(self) -> None:
        """The task ends: what waits to be told together with more is told by ``next_message`` now."""

    def next_message_delay_ms(self, now_ms: float) -> float:
        """Until ``next_message`` may have something by time alone; infinite where a wake-up will tell."""

    def on_reply(self, body: Mapping[str, Any], last: bool, now_ms: float) -> None:
        """A reply. Raises ProtocolError for one that makes no sense: that ends the connection."""

    def on_push(self, body: Mapping[str, Any], now_ms: float) -> None:
        """News that nobody asked for, pushed once something of this kind was told. Raises as ``on_reply``."""

    def on_connected(self, now_ms: float) -> None:
        """A new coordinator, or the same that has forgotten this client."""

    def on_lost(self, now_ms: float) -> None:
        """No reply will come to what was told; work alone until ``on_connected``."""


class CoordinatorClient(threading.Thread):
    """Connects once ``resume`` is called, and again as often as needed until ``pause``, which keeps an open
    connection for the next task. A daemon: it must keep no killed task alive."""

    def __init__(
        self,
        address: CoordinatorAddress,
        participants: Sequence[Channel],
        clock_ms: Clock,
        silence_ms: float = COORDINATOR_SILENCE_MS,
    ) -> None:
        super().__init__(name="kafka-chunked-coordinator-client", daemon=True)
        self.address = address
        self._participants = {one.kind: one for one in participants}
        self._clock_ms = clock_ms
        self._silence_ms = silence_ms
        self._backoff = ExponentialBackoff(_BACKOFF_MS, _BACKOFF_MAX_MS, random.random)
        self._failures = 0
        self._connect_after_ms = -math.inf
        self._closing = False
        self._active = False
        self._leaving = False
        self._connection: CoordinatorConnection | None = None
        self._has_heard = False
        self._wake_lock = threading.Lock()  # guards _wake_pending and the pair
        self._wake_pending = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        for one in participants:
            one.attach(self.wake)

    # -- any thread ---------------------------------------------------------------------------------

    def wake(self) -> None:
        """A participant has something to tell."""
        with self._wake_lock:
            if not self._wake_pending and not self._closing:
                self._wake_pending = True
                self._wake_writer.send(b"\0")

    @property
    def is_connecting(self) -> bool:
        """Whether there is no connection and one will be tried for at once. Any thread."""
        return self._connection is None and self._clock_ms() >= self._connect_after_ms

    def resume(self) -> None:
        """A task begins."""
        self._active = True
        self.wake()

    def pause(self) -> None:
        """No task is under way; what the last one found out is still told."""
        self._active = False
        self._leaving = True
        self.wake()

    def close(self) -> None:
        """Lets the thread end; does not wait for it."""
        with self._wake_lock:
            already, self._closing = self._closing, True
            if not already:
                self._wake_writer.close()

    # -- the thread ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Until ``close``."""
        try:
            while not self._closing:
                try:
                    self._run_once()
                except Exception as error:  # noqa: BLE001 - whatever it is, it must cost no task
                    self._lose(error)
        finally:
            if self._connection is not None:
                # A task that failed knows why, and the attempt that follows it asks the coordinator.
                with contextlib.suppress(OSError):
                    self._tell(self._connection, self._clock_ms(), leaving=True)
                self._connection.close()
            self.close()
            self._wake_reader.close()

    def _run_once(self) -> None:
        now_ms = self._clock_ms()
        if self._connection is None and self._active and now_ms >= self._connect_after_ms:
            self._connection = CoordinatorConnection(self.address, self._silence_ms, self._clock_ms)
            self._has_heard = False
            now_ms = self._clock_ms()
            for participant in self._participants.values():
                participant.on_connected(now_ms)
        connection = self._connection
        leaving, self._leaving = self._leaving, False
        if connection is not None and (self._active or leaving):
            self._tell(connection, now_ms, leaving=leaving)
        self._wait(connection, now_ms)

    def _tell(self, connection: CoordinatorConnection, now_ms: float, *, leaving: bool) -> None:
        for kind, participant in self._participants.items():
            if leaving:
                participant.hurry()
            while (body := participant.next_message(now_ms)) is not None:
                connection.tell(kind, body, now_ms)

    def _delay_ms(self, connection: CoordinatorConnection | None, now_ms: float) -> float:
        if not self._active:
            return math.inf
        if connection is None:
            return self._connect_after_ms - now_ms
        delays = [one.next_message_delay_ms(now_ms) for one in self._participants.values()]
        return min([*delays, connection.silent_at_ms - now_ms])

    def _wait(self, connection: CoordinatorConnection | None, now_ms: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_reader, selectors.EVENT_READ)
            if connection is not None:
                selector.register(connection.socket, selectors.EVENT_READ)
            delay_s = max(0.0, self._delay_ms(connection, now_ms) / 1000)
            ready = {key.fileobj for key, _ in selector.select(min(delay_s, _MAX_WAIT_S))}
        if self._wake_reader in ready:
            with self._wake_lock:
                self._wake_pending = False
                self._wake_reader.recv(1)
        if connection is None:
            return
        now_ms = self._clock_ms()
        if connection.socket in ready:
            for heard in connection.receive(now_ms):
                # Not sooner: one that does not serve this cluster takes the connection all the same.
                self._has_heard, self._failures = True, 0
                participant = self._participants.get(heard.kind)
                if participant is None:
                    continue
                if heard.last is None:
                    participant.on_push(heard.body, now_ms)
                else:
                    participant.on_reply(heard.body, heard.last, now_ms)
        elif now_ms >= connection.silent_at_ms:
            raise ProtocolError(f"no answer within {self._silence_ms:.0f} ms")

    def _lose(self, error: Exception) -> None:
        connected, self._connection = self._connection, None
        if connected is not None:
            connected.close()
        if self._closing:
            return
        now_ms = self._clock_ms()
        for participant in self._participants.values():
            participant.on_lost(now_ms)
        was_resting = connected is not None and connected.is_idle and self._has_heard
        if was_resting and isinstance(error, ConnectionError):
            # No failure: the server closes idle connections. Where it is gone, connecting will tell.
            self._connect_after_ms = now_ms + _AFTER_IDLE_MS
        elif self._active:
            self._failures += 1
            self._connect_after_ms = now_ms + self._backoff.delay_ms(self._failures)
            warn_once(self.address, error)
