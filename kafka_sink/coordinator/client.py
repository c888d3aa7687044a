"""A task's connection to the coordinator, which a thread of its own serves; and the driver's requests.

Channels supply the messages to send and receive the messages that arrive. No task waits for this thread. If
the coordinator cannot be reached or shows no sign of life, the client calls ``on_lost`` of the channels at
once, and the task works alone. The client warns once, and reconnects with exponential backoff.
"""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from kafka_sink.clock import (
    COORDINATOR_SILENCE_MS,
    COORDINATOR_WAIT_MS,
    RANDOM,
    Clock,
    ExponentialBackoff,
    monotonic_ms,
)
from kafka_sink.coordinator.address import CoordinatorAddress, warn_once
from kafka_sink.coordinator.schema import Alive, Channel, Full, Hello, Message, ServiceScope, deliver
from kafka_sink.errors import ProtocolError
from kafka_sink.wakeup import WakeUp

if TYPE_CHECKING:
    from kafka_sink.coordinator.transport import Connection

_log = logging.getLogger(__name__)
_BACKOFF_MS, _BACKOFF_MAX_MS = 1000.0, 30_000.0
_MAX_WAIT_S = 3600.0
_Answer = TypeVar("_Answer")


def connect(address: CoordinatorAddress, silence_ms: float) -> Connection:
    """Connect and prove knowledge of the token. Raises OSError and ProtocolError."""
    from kafka_sink.coordinator.transport import Connection

    return Connection(address, silence_ms)


@dataclass(frozen=True, slots=True)
class ClientTimes:
    """Milliseconds. ``connect_ms`` is long because nobody waits for a connection, and if thousands of tasks
    connect at once, it takes seconds until each has had its turn.

    A sign of life must be answered within ``silence_ms``. It is sent after ``alive_ms`` without another
    message, so that the server keeps the connection, or after ``alive_waiting_ms`` if a channel waits.
    """

    connect_ms: float = 10_000.0
    silence_ms: float = COORDINATOR_SILENCE_MS
    alive_ms: float = 60_000.0
    alive_waiting_ms: float = 10_000.0


_DEFAULT_TIMES = ClientTimes()


class CoordinatorClient(threading.Thread):
    """Connects after ``resume``, and reconnects as needed until ``pause``.

    ``pause`` keeps an open connection for the next task. The thread is a daemon, so that it cannot keep a
    killed task's process alive. ``hello`` returns the first message, which may change during a task.
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
        self._of_message = {kind: channel for channel in channels for kind in channel.takes}
        self._hello = hello
        self._clock_ms = clock_ms
        self._times = times
        self._backoff = ExponentialBackoff(_BACKOFF_MS, _BACKOFF_MAX_MS, RANDOM.random)
        self._failures = 0
        self._connect_after_ms = -math.inf
        # When the first attempt to connect since the last message began.
        self._connecting_ms = math.inf
        # The task's thread writes these three before it wakes the client's thread, which reads them. A flag
        # that is set after the wake-up would be read at the next one, which may be an hour later.
        self._closing = False
        self._active = False
        self._leaving = False
        self._connection: Connection | None = None
        self._greeted: Hello | None = None
        # When the last sign of life and message were sent, and since when a sign of life is unanswered.
        self._alive_ms = self._sent_ms = -math.inf
        self._unanswered_ms = math.inf
        self.wake_up = WakeUp()
        for channel in channels:
            channel.wake = self.wake_up.wake

    # -- any thread ---------------------------------------------------------------------------------

    @property
    def is_connecting(self) -> bool:
        """Whether a task should wait for the connection: it is not open, but an attempt is due, and attempts
        to connect have not failed for as long as tasks wait. Any thread may ask.

        If a firewall drops what tasks send, an attempt takes ``connect_ms``, and no task waits for it again.
        """
        return self.is_due and self._clock_ms() < self._connecting_ms + COORDINATOR_WAIT_MS

    @property
    def is_due(self) -> bool:
        """Whether there is no connection, and the next attempt is due."""
        return self._connection is None and self._clock_ms() >= self._connect_after_ms

    @property
    def is_lost(self) -> bool:
        """Whether there is no connection, and no task should wait for one."""
        return self._connection is None and not self.is_connecting

    def resume(self) -> None:
        """A task starts."""
        self._active = True
        self.wake_up.wake()

    def pause(self) -> None:
        """The task has ended. Messages that its channels still have are sent."""
        self._active = False
        self._leaving = True
        self.wake_up.wake()

    def close(self) -> None:
        """Ask the thread to flush its channels and stop. Join it if you need that to have happened."""
        self._closing = True
        self.wake_up.wake()

    # -- the thread ---------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._run_once()
                except Exception as error:  # noqa: BLE001 - no error here may fail a task
                    self._lose(error)
        finally:
            # The next attempt of a failed task needs from the coordinator what this attempt found out.
            with contextlib.suppress(OSError, ProtocolError):
                # A lost connection is not made again for that.
                connection = self._connection if self._failures else self._connected()
                if connection is not None:
                    self._send(connection, self._clock_ms())
                    # A closed connection may lose data, so wait until the coordinator has read it.
                    connection.send(Alive())
                    while not any(isinstance(message, (Alive, Full)) for message in connection.receive()):
                        pass
            if self._connection is not None:
                self._connection.socket.close()
            self._closing = True
            self.wake_up.close()

    def _connected(self) -> Connection | None:
        # A task may have ended before this thread first ran. Its last report is sent nevertheless.
        is_needed = self._active or self._leaving
        self._leaving = False
        if is_needed and self.is_due:
            self._connecting_ms = min(self._connecting_ms, self._clock_ms())
            self._connection = connect(self.address, self._times.connect_ms)
            self._greeted = None
            self._alive_ms, self._unanswered_ms = -math.inf, math.inf
        return self._connection

    def _run_once(self) -> None:
        connection = self._connected()
        now_ms = self._clock_ms()
        if connection is not None:
            # This also happens between tasks: other tasks may wait for metadata or mutes from this one.
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
                self._sent_ms = now_ms
        if self._active and now_ms >= self._alive_due_ms():
            connection.send(Alive())
            self._alive_ms = self._sent_ms = now_ms
            self._unanswered_ms = min(self._unanswered_ms, now_ms)

    def _alive_due_ms(self) -> float:
        # The answer to the first one shows that the coordinator accepted the token.
        if self._alive_ms == -math.inf or any(channel.is_waiting for channel in self._channels):
            return self._alive_ms + self._times.alive_waiting_ms
        return self._sent_ms + self._times.alive_ms

    def _delay_ms(self, connection: Connection | None, now_ms: float) -> float:
        if connection is None:
            return self._connect_after_ms - now_ms if self._active else math.inf
        delays = [channel.next_message_delay_ms(now_ms) for channel in self._channels]
        if self._active:
            delays += [self._alive_due_ms() - now_ms, self._unanswered_ms + self._times.silence_ms - now_ms]
        return min(delays, default=math.inf)

    def _wait(self, connection: Connection | None, now_ms: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.wake_up, selectors.EVENT_READ)
            if connection is not None:
                selector.register(connection.socket, selectors.EVENT_READ)
            delay_s = min(max(0.0, self._delay_ms(connection, now_ms) / 1000), _MAX_WAIT_S)
            ready = {key.fileobj for key, _ in selector.select(delay_s)}
        if self.wake_up in ready:
            self.wake_up.clear()
        if connection is None:
            return
        now_ms = self._clock_ms()
        # Read first: if this process stalled, the answer has arrived meanwhile.
        if connection.socket in ready:
            self._receive(connection, now_ms)
        elif self._active and now_ms >= self._unanswered_ms + self._times.silence_ms:
            raise ProtocolError(f"it has not answered within {now_ms - self._unanswered_ms:.0f} ms")

    def _receive(self, connection: Connection, now_ms: float) -> None:
        for message in connection.receive():
            # Only a message shows that the token was right: the TLS handshake succeeds without it.
            self._failures = 0
            self._connecting_ms = self._unanswered_ms = math.inf
            if isinstance(message, Full):
                raise _FullError("it is at its task limit")
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
            _log.info("the coordinator is at its task limit; this task asks the brokers directly")
        elif self._active:
            self._failures += 1
            # Jitter, so that thousands of disconnected tasks do not all reconnect at once.
            self._connect_after_ms = now_ms + self._backoff.delay_ms(self._failures) * (0.5 + RANDOM.random())
            # The server closes idle connections, and the first reconnect succeeds: that needs no warning.
            if connected is None or self._failures > 1 or not isinstance(error, ConnectionError):
                warn_once(self.address, error)


class _FullError(ConnectionError):
    """The coordinator is at its task limit."""


# -- one question at a time: planning, commit, a task that has failed -------------------------------------


def ask(
    address: CoordinatorAddress,
    message: Message,
    answer: type[_Answer],
    timeout_ms: float,
    before: Message | None = None,
) -> _Answer:
    """Send a message and return the first answer of this class. ``before`` is sent first.

    Raises OSError, of which TimeoutError is one, and ProtocolError.
    """
    connection = connect(address, timeout_ms)
    with connection.socket:
        until_ms = monotonic_ms() + timeout_ms
        if before is not None:
            connection.send(before)
        connection.send(message)
        # A timeout is reported below, with its length.
        with contextlib.suppress(TimeoutError):
            while (left_ms := until_ms - monotonic_ms()) > 0:
                connection.socket.settimeout(left_ms / 1000)
                for received in connection.receive():
                    if isinstance(received, answer):
                        return received
        raise TimeoutError(f"it has not answered with {answer.__name__} within {timeout_ms:.0f} ms")


def tell(address: CoordinatorAddress, message: Message, timeout_ms: float) -> None:
    """Send a message, and wait until the coordinator has handled it. Raises the same errors as ``ask``."""
    ask(address, Alive(), Alive, timeout_ms, before=message)
