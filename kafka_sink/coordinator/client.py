"""A task's connection to the coordinator, served by a thread that no task waits for; and the driver's.

Channels supply the messages to send and take those that come. If the coordinator cannot be reached or shows
no sign of life, the client tells the channels at once, and the task works alone. The client logs one warning
in a process, and connects again with exponential backoff.
"""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from kafka_sink.clock import COORDINATOR_SILENCE_MS, RANDOM, Clock, ExponentialBackoff, monotonic_ms
from kafka_sink.coordinator.address import CoordinatorAddress, warn_once
from kafka_sink.coordinator.schema import Alive, Channel, Full, Hello, Message, ServiceScope, deliver
from kafka_sink.errors import ProtocolError

# TLS is imported when a connection is made, by the client's thread.
if TYPE_CHECKING:
    from kafka_sink.coordinator.transport import Connection

_log = logging.getLogger(__name__)
_BACKOFF_MS, _BACKOFF_MAX_MS = 1000.0, 30_000.0
_MAX_WAIT_S = 3600.0
_Answer = TypeVar("_Answer")


def connect(address: CoordinatorAddress, silence_ms: float) -> Connection:
    """A connection that has shown the token. Raises OSError and ProtocolError."""
    from kafka_sink.coordinator.transport import Connection

    return Connection(address, silence_ms)


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """Milliseconds. Nobody waits for a connection, and where thousands connect at once, their turn takes
    seconds. A sign of life is to be answered within ``silence_ms``. It is sent after so long without a
    message, so that the server keeps the connection, or sooner while a channel relies on the coordinator.
    """

    connect_ms: float = 10_000.0
    silence_ms: float = COORDINATOR_SILENCE_MS
    alive_ms: float = 60_000.0
    alive_waiting_ms: float = 10_000.0


_DEFAULT_TIMES = ClientTimes()


class CoordinatorClient(threading.Thread):
    """Connects after ``resume``, and reconnects as needed until ``pause``.

    ``pause`` keeps an open connection for the next task. A daemon thread, so that it keeps no killed task
    alive. ``hello``: what to say first, which changes when the task learns its cluster's id.
    """

    def __init__(
        self,
        address: CoordinatorAddress,
        channels: Sequence[Channel],
        hello: Callable[[], Hello],
        clock_ms: Clock,
        times: ClientTimes = _DEFAULT_TIMES,
    ) -> None:
        super().__init__(name="kafka-chunked-coordinator-client", daemon=True)
        self.address = address
        self._channels = channels
        self._of_message = {kind: one for one in channels for kind in one.takes}
        self._hello = hello
        self._clock_ms = clock_ms
        self._times = times
        self._backoff = ExponentialBackoff(_BACKOFF_MS, _BACKOFF_MAX_MS, RANDOM.random)
        self._failures = 0
        self._connect_after_ms = -math.inf
        self._closing = False
        self._active = False
        self._leaving = False
        self._connection: Connection | None = None
        self._greeted: Hello | None = None
        # When the last sign of life was sent, and the last message; since when no sign of life is answered.
        self._alive_ms = self._said_ms = -math.inf
        self._unanswered_ms = math.inf
        self._wake_lock = threading.Lock()  # guards _wake_pending and the pair
        self._wake_pending = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        for one in channels:
            one.wake = self.wake

    # -- any thread ---------------------------------------------------------------------------------

    def wake(self) -> None:
        """A channel has a message to send."""
        with self._wake_lock:
            if not self._wake_pending and not self._closing:
                self._wake_pending = True
                self._wake_writer.send(b"\0")

    @property
    def is_connecting(self) -> bool:
        """Whether there is no connection, and the next attempt is due. Any thread."""
        return self._connection is None and self._clock_ms() >= self._connect_after_ms

    def resume(self) -> None:
        """A task starts."""
        self._active = True
        self.wake()

    def pause(self) -> None:
        """The task has ended. Its delayed messages are still sent."""
        self._active = False
        self._leaving = True
        self.wake()

    def close(self) -> None:
        """Ask the thread to send what the channels still have, and to end. Who relies on that joins it."""
        with self._wake_lock:
            already, self._closing = self._closing, True
            if not already:
                self._wake_writer.close()

    # -- the thread ---------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._run_once()
                except Exception as error:  # noqa: BLE001 - no error here may fail a task
                    self._lose(error)
        finally:
            # A failed task has findings too, which its next attempt needs from the coordinator.
            with contextlib.suppress(OSError, ProtocolError):
                # One that was lost is not made again for that.
                connection = self._connection if self._failures else self._connected()
                if connection is not None:
                    self._send(connection, self._clock_ms())
                    # What a closed connection still holds may be lost: wait until it has been read.
                    connection.send(Alive())
                    while not any(isinstance(one, (Alive, Full)) for one in connection.receive()):
                        pass
            if self._connection is not None:
                self._connection.socket.close()
            self.close()
            self._wake_reader.close()

    def _connected(self) -> Connection | None:
        # A task may have ended before this thread first ran. Its last report is sent nevertheless.
        is_needed = self._active or self._leaving
        self._leaving = False
        if is_needed and self.is_connecting:
            self._connection = connect(self.address, self._times.connect_ms)
            self._greeted = None
            self._alive_ms, self._unanswered_ms = -math.inf, math.inf
        return self._connection

    def _run_once(self) -> None:
        connection = self._connected()
        now_ms = self._clock_ms()
        if connection is not None:
            # Between tasks, too: others may wait for what this one has fetched, or muted.
            self._send(connection, now_ms)
        self._wait(connection, now_ms)

    def _send(self, connection: Connection, now_ms: float) -> None:
        hello = self._hello()
        if hello != self._greeted:
            first = self._greeted is None
            connection.send(hello)
            self._greeted = hello
            for channel in self._channels:
                if first or channel.scope is ServiceScope.CLUSTER:
                    channel.on_connected(now_ms)
        for channel in self._channels:
            while (message := channel.next_message(now_ms)) is not None:
                connection.send(message)
                self._said_ms = now_ms
        if self._active and now_ms >= self._alive_due_ms():
            connection.send(Alive())
            self._alive_ms = self._said_ms = now_ms
            self._unanswered_ms = min(self._unanswered_ms, now_ms)

    def _alive_due_ms(self) -> float:
        # The first one's answer shows that the coordinator knows the token.
        if self._alive_ms == -math.inf or any(one.is_waiting for one in self._channels):
            return self._alive_ms + self._times.alive_waiting_ms
        return self._said_ms + self._times.alive_ms

    def _delay_ms(self, connection: Connection | None, now_ms: float) -> float:
        if connection is None:
            return self._connect_after_ms - now_ms if self._active else math.inf
        delays = [one.next_message_delay_ms(now_ms) for one in self._channels]
        if self._active:
            delays += [self._alive_due_ms() - now_ms, self._unanswered_ms + self._times.silence_ms - now_ms]
        return min(delays, default=math.inf)

    def _wait(self, connection: Connection | None, now_ms: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_reader, selectors.EVENT_READ)
            if connection is not None:
                selector.register(connection.socket, selectors.EVENT_READ)
            delay_s = min(max(0.0, self._delay_ms(connection, now_ms) / 1000), _MAX_WAIT_S)
            ready = {key.fileobj for key, _ in selector.select(delay_s)}
        if self._wake_reader in ready:
            with self._wake_lock:
                self._wake_pending = False
                self._wake_reader.recv(1)
        if connection is None:
            return
        now_ms = self._clock_ms()
        # First: where this process stalled, the answer has come meanwhile.
        if connection.socket in ready:
            self._receive(connection, now_ms)
        elif self._active and now_ms >= self._unanswered_ms + self._times.silence_ms:
            raise ProtocolError(f"no sign of life within {now_ms - self._unanswered_ms:.0f} ms")

    def _receive(self, connection: Connection, now_ms: float) -> None:
        for message in connection.receive():
            # Only now: who does not know the token is let in, too, for a moment.
            self._failures = 0
            self._unanswered_ms = math.inf
            if isinstance(message, Full):
                raise _FullError("it serves no more tasks")
            channel = self._of_message.get(type(message))
            if channel is not None:
                deliver(channel, message, now_ms)

    def _lose(self, error: Exception) -> None:
        connected, self._connection = self._connection, None
        if connected is not None:
            connected.socket.close()
        if self._closing:
            return
        now_ms = self._clock_ms()
        for channel in self._channels:
            channel.on_lost(now_ms)
        if isinstance(error, _FullError):
            self._connect_after_ms = now_ms + _BACKOFF_MAX_MS * (1 + RANDOM.random())
            _log.info("the coordinator serves as many tasks as it can; this one asks brokers by itself")
        elif self._active:
            self._failures += 1
            # Of thousands that were lost together, not all come back together.
            self._connect_after_ms = now_ms + self._backoff.delay_ms(self._failures) * (0.5 + RANDOM.random())
            # Of connections that the server has closed most are made again at once.
            if connected is None or self._failures > 1 or not isinstance(error, ConnectionError):
                warn_once(self.address, error)


class _FullError(ConnectionError):
    """The coordinator has as many tasks as it serves."""


# -- one question at a time: planning, commit, a task that has failed -------------------------------------


def ask(
    address: CoordinatorAddress,
    message: Message,
    answer: type[_Answer],
    timeout_ms: float,
    before: Message | None = None,
) -> _Answer:
    """The first message of this class that comes back. ``before`` is sent first. Raises OSError, TimeoutError
    among them, and ProtocolError."""
    connection = connect(address, timeout_ms)
    with connection.socket:
        until_ms = monotonic_ms() + timeout_ms
        if before is not None:
            connection.send(before)
        connection.send(message)
        # Otherwise the next receive ends it.
        with contextlib.suppress(TimeoutError):
            while (left_ms := until_ms - monotonic_ms()) > 0:
                connection.socket.settimeout(left_ms / 1000)
                for received in connection.receive():
                    if isinstance(received, answer):
                        return received
        raise TimeoutError(f"no {answer.__name__} within {timeout_ms:.0f} ms")


def tell(address: CoordinatorAddress, message: Message, timeout_ms: float) -> None:
    """Send a message, and wait until the coordinator has handled it. Raises as ``ask``."""
    ask(address, Alive(), Alive, timeout_ms, before=message)
