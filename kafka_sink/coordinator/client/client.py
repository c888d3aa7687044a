"""The task's connection to the coordinator, served by its own thread, which no task waits for.

It goes by way of the executor's relay where there is one. Channels supply the messages to send and handle
the replies. If the coordinator cannot be reached or does not reply, the client notifies the channels at once
and the task works alone. The client logs one warning in a process, and connects again with exponential
backoff.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import threading
from collections.abc import Sequence

from kafka_sink.clock import RANDOM, Clock, ExponentialBackoff
from kafka_sink.coordinator.client.executor_relay import ExecutorRelay
from kafka_sink.coordinator.transport.address import CoordinatorAddress, warn_once
from kafka_sink.coordinator.transport.channel import Channel
from kafka_sink.coordinator.transport.connection import CoordinatorConnection, stood_still
from kafka_sink.coordinator.transport.group import GroupFactory
from kafka_sink.errors import ProtocolError
from kafka_sink.timing_bounds import COORDINATOR_SILENCE_MS

_BACKOFF_MS, _BACKOFF_MAX_MS = 1000.0, 30_000.0
_AFTER_IDLE_MS = 100.0
_MAX_WAIT_S = 3600.0


class CoordinatorClient(threading.Thread):
    """Connects after ``resume``, and reconnects as needed until ``pause``.

    ``pause`` keeps an open connection for the next task. A daemon thread, so that it keeps no killed task
    alive. ``groups``: what this process adds up for other tasks where it is their relay.
    """

    def __init__(
        self,
        address: CoordinatorAddress,
        channels: Sequence[Channel],
        clock_ms: Clock,
        silence_ms: float = COORDINATOR_SILENCE_MS,
        *,
        groups: Sequence[GroupFactory] = (),
    ) -> None:
        super().__init__(name="kafka-chunked-coordinator-client", daemon=True)
        self.address = address
        self._channels = {one.kind: one for one in channels}
        self._clock_ms = clock_ms
        self._silence_ms = silence_ms
        self._relay = ExecutorRelay(address, silence_ms, clock_ms, groups)
        self._backoff = ExponentialBackoff(_BACKOFF_MS, _BACKOFF_MAX_MS, RANDOM.random)
        self._failures = 0
        self._connect_after_ms = -math.inf
        self._closing = False
        self._active = False
        self._leaving = False
        self._connection: CoordinatorConnection | None = None
        self._has_received = False
        self._wake_lock = threading.Lock()  # guards _wake_pending and the pair
        self._wake_pending = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        for one in channels:
            one.attach(self.wake)

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
        """Ask the thread to end, without waiting for it."""
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
            if self._connection is not None:
                for channel in self._channels.values():
                    channel.close()
                # A failed task has findings too, which its next attempt needs from the coordinator.
                with contextlib.suppress(OSError):
                    self._send(self._connection, self._clock_ms(), leaving=True)
                self._connection.close()
            self.close()
            self._wake_reader.close()

    def _run_once(self) -> None:
        now_ms = self._clock_ms()
        leaving = self._leaving
        if leaving:
            self._leaving = False
        # A task may have ended before this thread first ran. Its last report is sent nevertheless.
        is_needed = self._active or leaving
        if self._connection is None and is_needed and now_ms >= self._connect_after_ms:
            self._connection = self._relay.connect()
            self._has_received = False
            now_ms = self._clock_ms()
            for channel in self._channels.values():
                channel.on_connected(now_ms)
        connection = self._connection
        if connection is not None and (self._active or leaving or self._left_delay_ms(now_ms) <= 0):
            self._send(connection, now_ms, leaving=leaving)
        if connection is not None and self._may_join_relay(connection) and self._relay.retry_in_ms <= 0:
            connection = self._join_relay(connection)
        self._wait(connection, now_ms)

    def _may_join_relay(self, connection: CoordinatorConnection) -> bool:
        return self._active and connection.is_idle and not connection.is_relayed

    def _join_relay(self, direct: CoordinatorConnection) -> CoordinatorConnection:
        """Exchange a direct connection for one by the relay, if that works by now."""
        relayed = self._relay.connect_by_relay()
        if relayed is None:
            return direct
        now_ms = self._clock_ms()
        direct.close()
        self._connection = relayed
        for channel in self._channels.values():
            channel.on_lost(now_ms)
            channel.on_connected(now_ms)
        self._send(relayed, now_ms, leaving=False)
        return relayed

    def _send(self, connection: CoordinatorConnection, now_ms: float, *, leaving: bool) -> None:
        for kind, channel in self._channels.items():
            if leaving:
                channel.hurry()
            while (body := channel.next_message(now_ms)) is not None:
                connection.send(kind, body, now_ms)

    def _delay_ms(self, connection: CoordinatorConnection | None, now_ms: float) -> float:
        if not self._active:
            return math.inf if connection is None else self._left_delay_ms(now_ms)
        if connection is None:
            return self._connect_after_ms - now_ms
        delays = [one.next_message_delay_ms(now_ms) for one in self._channels.values()]
        if self._may_join_relay(connection):
            delays.append(self._relay.retry_in_ms)
        return min([*delays, connection.silent_at_ms - now_ms])

    def _left_delay_ms(self, now_ms: float) -> float:
        return min((one.left_delay_ms(now_ms) for one in self._channels.values()), default=math.inf)

    def _wait(self, connection: CoordinatorConnection | None, now_ms: float) -> None:
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
        began_ms, now_ms = now_ms, self._clock_ms()
        if stood_still(began_ms, delay_s, now_ms):
            connection.wait_anew(now_ms)
        if connection.socket in ready:
            for message in connection.receive(now_ms):
                # Only now: a coordinator without this cluster accepts the connection, too.
                self._has_received, self._failures = True, 0
                channel = self._channels.get(message.kind)
                if channel is None:
                    continue
                if message.last is None:
                    channel.on_push(message.body, now_ms)
                else:
                    channel.on_reply(message.body, message.last, now_ms)
        elif now_ms >= connection.silent_at_ms:
            raise ProtocolError(f"no reply within {self._silence_ms:.0f} ms")

    def _lose(self, error: Exception) -> None:
        connected, self._connection = self._connection, None
        if connected is not None:
            connected.close()
        if self._closing:
            return
        now_ms = self._clock_ms()
        for channel in self._channels.values():
            channel.on_lost(now_ms)
        is_broken = isinstance(error, ConnectionError)
        if connected is not None and self._may_reconnect_soon(connected, is_broken=is_broken):
            # No failure: the server closes idle connections, and relays end with their workers. If the
            # coordinator is gone, reconnecting fails.
            self._connect_after_ms = now_ms + _AFTER_IDLE_MS * RANDOM.random()
        elif self._active:
            self._failures += 1
            self._connect_after_ms = now_ms + self._backoff.delay_ms(self._failures)
            warn_once(self.address, error)

    def _may_reconnect_soon(self, lost: CoordinatorConnection, *, is_broken: bool) -> bool:
        return self._has_received and (lost.is_relayed or (lost.is_idle and is_broken))
