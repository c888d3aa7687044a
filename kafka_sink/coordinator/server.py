"""The coordinator's sockets on one loop: it accepts connections, and passes messages to services and back.

A service decides what a message means, and Connections decides which connections are kept. The server creates
an instance of each service for each group of tasks, and runs its timer. Peers that have sent something, or
that something is sent to, take turns, so that none of them delays the others.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kafka_sink.clock import Clock
from kafka_sink.coordinator.schema import (
    Alive,
    Full,
    Hello,
    Message,
    Service,
    ServiceScope,
    decompressed,
    deliver,
    parsed,
)
from kafka_sink.coordinator.transport import (
    VERSION,
    Connections,
    Dropped,
    Peer,
    ServerBounds,
    ServerIdentity,
    framed,
)
from kafka_sink.errors import ConfigurationError, ProtocolError
from kafka_sink.options import SinkOptions, parse
from kafka_sink.options.table import GROUP_OPTIONS, SHARED_OPTIONS

_log = logging.getLogger(__name__)
_MAX_TIMER_MS = 60_000.0
# If a service's timer is late by the first time, the process stalled. The timer then waits for the second, so
# that messages that arrived meanwhile are read first: they may contain what the service waits for.
_STALL_S, _READ_FIRST_S = 0.2, 0.25
# How long a service's timer pauses after an exception, so that a bug in one service does not occupy the loop.
_AFTER_BUG_S = 1.0
# A loop that is later than this counts as stalled.
_LATE_MS = 1000.0
# When to accept again after the process ran out of file descriptors.
_ACCEPT_AGAIN_S = 1.0
# In one iteration of the loop: connections to accept, bytes to write to all peers, and bytes to write to one.
_ACCEPT_AT_ONCE = 128
_WRITE_AT_ONCE = 8 * 1024 * 1024
_PEER_AT_ONCE = 256 * 1024
# The most messages and time in a peer's turn. Messages that are sent together are mostly handled together.
_TURN_MESSAGES, _TURN_MS = 10, 5.0
# A message that is longer than this, once decompressed, counts as several.
_BYTES_OF_ONE = 16 * 1024
# The shortest pause after which a peer that sends too fast is read again.
_LEAST_WAIT_MS = 100.0
# How long an instance is kept after its last peer. Cluster ids come from tasks, which may send ever new ones.
_IDLE_MS: Mapping[ServiceScope, float] = {ServiceScope.GROUP: 600_000.0, ServiceScope.CLUSTER: 5_000.0}
_DEFAULT_BOUNDS = ServerBounds()
# The key of an instance: its service's class, and, unless it serves the whole application, the group and its
# settings. Planning, which belongs to no group, may use the application's instances.
_Key = tuple[object, ...]
_Settings = tuple[tuple[str, str], ...]
# A factory for each service class. The factories for GROUP and CLUSTER get the group's options first.
Services = Mapping[type[Service], Callable[..., Service]]


@dataclass(eq=False, slots=True)
class _Instance:
    """A group's service. ``unused_ms``: when its last peer left. ``not_before_s``: bounds its timer."""

    key: _Key
    service: Service
    peers: int = 0
    unused_ms: float = 0.0
    not_before_s: float = 0.0
    timer: asyncio.TimerHandle | None = None

    @property
    def idle_ms(self) -> float:
        """How long it is kept after its last peer."""
        return _IDLE_MS.get(self.service.scope, math.inf)


class _Turns:
    """Serves peers in turn, for ``most_ms`` at most in one iteration of the loop.

    ``serve`` serves one peer and returns its cost. The costs in one iteration add up to about ``most``.
    """

    def __init__(
        self, serve: Callable[[Peer], float], clock_ms: Clock, most_ms: float, most: float = math.inf
    ) -> None:
        self._serve = serve
        self._clock_ms = clock_ms
        self._most_ms = most_ms
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Peer] = deque()
        # Whether the next iteration has been requested. Then this one's deadline and its rest of ``most``.
        self._is_due = False
        self._until_ms = self._left = 0.0

    def add(self, peer: Peer) -> None:
        self._waiting.append(peer)
        self._later()

    def at_once(self, peer: Peer) -> bool:
        """Serve the peer now if no other peer waits and there is time left. Returns whether it was served."""
        if not self._is_due:
            self._begin()
            self._later()
        if self._waiting or not self._has_time():
            return False
        self._left -= self._serve(peer)
        return True

    def _later(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._take)

    def _begin(self) -> None:
        self._until_ms, self._left = self._clock_ms() + self._most_ms, self._most

    def _has_time(self) -> bool:
        return self._left > 0 and self._clock_ms() < self._until_ms

    def _take(self) -> None:
        self._is_due = False
        self._begin()
        if self._waiting:
            # Request it first, so that an error does not leave the other peers waiting.
            self._later()
        while self._waiting and self._has_time():
            peer = self._waiting.popleft()
            if not peer.is_gone:
                self._left -= self._serve(peer)


class CoordinatorServer:
    """Accepts tasks' connections and passes their messages to services. Use it only from its event loop.

    The way of a message: the loop reports a readable socket (``_on_readable``). The peer is served at once if
    there is time, and otherwise waits for its turn in ``_readable``, or, before its TLS handshake, in
    ``_newcomers``. In its turn (``_take_turn``) the peer's bytes are received and decrypted, and some
    complete messages are handled (``_handle``). The first message is the token, and each later one goes to
    ``on_message``, which passes it to the instance of its service that the peer has joined. A peer that sends
    faster than its bound waits.

    The way back: a service calls ``send`` or ``broadcast`` (the server implements its ``Outbox``). Messages
    are queued at the peer, and ``_writable`` gives it turns to encrypt and write them (``_flush``).

    Each instance has one timer (``_arm``, ``_on_time``), and a sweep once a second drops peers that are too
    slow and instances that are no longer used.
    """

    def __init__(
        self,
        identity: ServerIdentity,
        services: Services,
        clock_ms: Clock,
        bounds: ServerBounds = _DEFAULT_BOUNDS,
    ) -> None:
        self._identity = identity
        self._services = services
        self._of_message = {kind: service for service in services for kind in service.takes}
        self._clock_ms = clock_ms
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self._listening: socket.socket | None = None
        self._connections = Connections(bounds, self._on_removed)
        self._count = 0
        self._instances: dict[_Key, _Instance] = {}
        # Peers that have sent something. New connections have turns of their own, because each costs a
        # signature and thousands of tasks may connect at once.
        self._readable = _Turns(self._read, clock_ms, bounds.iteration_ms, bounds.messages_at_once)
        self._newcomers = _Turns(self._read, clock_ms, bounds.greeting_ms)
        self._writable = _Turns(self._flush, clock_ms, bounds.iteration_ms, _WRITE_AT_ONCE)
        # The messages handled, and how often the loop was late by more than a second.
        self._messages = self._stalls = 0

    @property
    def connections(self) -> int:
        return len(self._connections.peers)

    def state(self) -> Mapping[str, Any]:
        """For metrics: counts of messages and stalls, and connections by kind."""
        authenticated = self._connections.authenticated
        joined = sum(bool(peer.joined) for peer in self._connections.peers.values())
        kinds = {
            "joined": joined,
            "idle": authenticated - joined,
            "unauthenticated": self.connections - authenticated,
        }
        return {"messages": self._messages, "stalls": self._stalls, "connections": kinds}

    def start(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        self._listening = listening
        self._listen()
        self._sweep_later()

    def close(self) -> None:
        if self._listening is not None:
            self._loop.remove_reader(self._listening)
            self._listening = None
        self._connections.close()
        for instance in list(self._instances.values()):
            self._close_instance(instance)

    def _listen(self) -> None:
        if self._listening is not None:
            self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            # The socket may have been closed since this call was scheduled.
            if self._listening is None:
                return
            try:
                connected, address = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                # There may be no file descriptor left. The socket stays readable, so the loop would spin.
                _log.warning("cannot accept a connection: %s", error)
                self._loop.remove_reader(self._listening)
                self._loop.call_later(_ACCEPT_AGAIN_S, self._listen)
                return
            connected.setblocking(False)
            # Otherwise a second small message would wait 40 ms for the acknowledgement of the first one.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._count += 1
            peer = Peer(self._count, sys.intern(str(address[0])), connected, self._clock_ms())
            self._connections.add(peer)
            self._loop.add_reader(peer.fd, self._on_readable, peer)

    def _on_removed(self, peer: Peer) -> None:
        self._loop.remove_reader(peer.fd)
        self._loop.remove_writer(peer.fd)
        for kind in list(peer.joined):
            self._leave(peer, kind)

    def _on_readable(self, peer: Peer) -> None:
        if not (peer.has_begun and self._readable.at_once(peer)):
            self._loop.remove_reader(peer.fd)
            self._await_turn(peer)

    def _await_turn(self, peer: Peer) -> None:
        peer.waits_since_ms = self._clock_ms()
        (self._readable if peer.has_begun else self._newcomers).add(peer)

    def _read(self, peer: Peer) -> int:
        """Give the peer its turn and return the cost. An error ends this connection and no other."""
        try:
            handled = self._take_turn(peer, self._clock_ms())
            self._connections.count_unfinished(peer, self._clock_ms())
            return max(1, handled)
        except ProtocolError as error:
            _log.debug("connection %d ended: %s", peer.number, error)
            why = Dropped.NONSENSE if peer.is_authenticated else Dropped.NOT_AUTHENTICATED
            self._connections.drop(peer, why)
        except OSError as error:
            _log.debug("connection %d ended: %s", peer.number, error)
            self._connections.remove(peer)
        except Exception:  # noqa: BLE001 - a bug in one service must not end the others
            _log.exception("a service failed")
            self._connections.remove(peer)
        return 1

    def _take_turn(self, peer: Peer, now_ms: float) -> int:
        """Read the socket, unless messages still wait, and handle some messages. Returns how many."""
        if peer.is_waiting:
            peer.begun_ms += now_ms - peer.waits_since_ms
            peer.waits_since_ms = math.inf
            self._loop.add_reader(peer.fd, self._on_readable, peer)
        if not peer.frames.end:
            peer.heard_ms = now_ms
            try:
                peer.receive(self._identity.context)
            except OSError:
                # Messages that arrived before the end of the stream count.
                if not peer.frames.end:
                    raise
        handled, until_ms = 0, now_ms + _TURN_MS
        while peer.frames.end and handled < _TURN_MESSAGES and self._clock_ms() < until_ms:
            if peer.due_ms > now_ms:
                break
            self._handle(peer, now_ms)
            handled += 1
            if not peer.is_authenticated:
                # Stop reading from a peer that was rejected.
                self._loop.remove_reader(peer.fd)
                return handled
        if peer.frames.end:
            self._loop.remove_reader(peer.fd)
            if peer.due_ms > now_ms:
                self._connections.count_dropped(peer, Dropped.HELD_BACK)
                peer.waits_since_ms = now_ms
                wait_ms = max(peer.due_ms - now_ms, _LEAST_WAIT_MS)
                self._loop.call_later(wait_ms / 1000, self._await_turn, peer)
            else:
                self._await_turn(peer)
        return handled

    def _handle(self, peer: Peer, now_ms: float) -> None:
        data = peer.frames.next_message()
        assert data is not None
        if peer.is_authenticated:
            peer.begun_ms = math.inf
            data = decompressed(data)
            # After a pause the peer may send up to ``burst`` messages at once.
            each_ms = 1000 / self._bounds.messages_per_s
            saved_ms = now_ms - each_ms * (self._bounds.burst - 1)
            peer.due_ms = max(peer.due_ms, saved_ms) + each_ms * max(1.0, len(data) / _BYTES_OF_ONE)
            self.on_message(peer, parsed(data))
            self._messages += 1
        elif not self._knows_a_token(peer, data):
            raise ProtocolError("wrong token, or another version of the package")
        elif self._connections.authenticated < self._most_for(peer):
            self._connections.on_authenticated(peer)
        else:
            # It is not closed at once: unread data from the task would turn the close into a reset, and the
            # task might miss this answer. It is dropped when its time to authenticate has passed.
            self.send(peer.number, Full())

    def _most_for(self, peer: Peer) -> int:
        """How many connections there may be once this peer has authenticated."""
        return self._bounds.connections + (self._bounds.reserved if peer.is_driver else 0)

    def _knows_a_token(self, peer: Peer, data: bytes) -> bool:
        peer.is_driver = hmac.compare_digest(data[1:], self._identity.driver_token)
        is_task = hmac.compare_digest(data[1:], self._identity.token)
        return data[0] == VERSION and (peer.is_driver or is_task)

    def on_message(self, peer: Peer, message: Message) -> None:
        """Answer the message, or pass it to its service. Raises ProtocolError, and errors of services."""
        if isinstance(message, Alive):
            self.send(peer.number, message)
        elif isinstance(message, Hello):
            self._on_hello(peer, message)
        else:
            kind = self._of_message.get(type(message))
            if kind is None:
                raise ProtocolError(f"no service accepts {type(message).__name__}")
            if message.is_of_driver and not peer.is_driver:
                raise ProtocolError(f"only the driver may send {type(message).__name__}")
            instance = peer.joined.get(kind)
            if instance is None:
                if kind.scope is not ServiceScope.APPLICATION:
                    raise ProtocolError("a task must send Hello first")
                instance = self._join(peer, kind, (kind,), ())
            deliver(instance.service, peer.number, message, self._clock_ms())
            self._arm(instance)

    def _on_hello(self, peer: Peer, hello: Hello) -> None:
        settings = tuple(sorted(hello.settings.items()))
        options = _options_of(settings)
        # Tasks that differ in other settings share an instance. It has the settings of the first task.
        shared = tuple(setting for setting in settings if setting[0] in SHARED_OPTIONS)
        for kind in self._services:
            if kind.scope is ServiceScope.APPLICATION:
                continue
            key: _Key = (kind, hello.group, shared)
            if kind.scope is ServiceScope.CLUSTER:
                key += (hello.cluster_id,)
            if kind not in peer.joined or peer.joined[kind].key != key:
                self._leave(peer, kind)
                self._join(peer, kind, key, (options,))

    def _join(self, peer: Peer, kind: type[Service], key: _Key, arguments: tuple[Any, ...]) -> _Instance:
        instance = self._instances.get(key)
        if instance is None:
            if len(self._instances) >= self._bounds.instances:
                self._make_capacity()
            instance = self._instances[key] = _Instance(key, self._services[kind](*arguments, self))
        instance.peers += 1
        peer.joined[kind] = instance
        instance.service.on_joined(peer.number, self._clock_ms())
        self._arm(instance)
        return instance

    def _leave(self, peer: Peer, kind: type[Service]) -> None:
        instance = peer.joined.pop(kind, None)
        if instance is None:
            return
        instance.peers -= 1
        instance.unused_ms = self._clock_ms()
        try:
            instance.service.on_gone(peer.number, instance.unused_ms)
            self._arm(instance)
        except Exception:  # noqa: BLE001 - the caller must still remove the peer
            _log.exception("a service failed")

    def _make_capacity(self) -> None:
        instances = self._instances.values()
        unused = [instance for instance in instances if not instance.peers and instance.idle_ms < math.inf]
        if not unused:
            raise ProtocolError("too many groups of tasks")
        self._close_instance(min(unused, key=lambda instance: instance.unused_ms))

    def _close_instance(self, instance: _Instance) -> None:
        del self._instances[instance.key]
        if instance.timer is not None:
            instance.timer.cancel()
        instance.service.close()

    def _on_time(self, instance: _Instance) -> None:
        assert instance.timer is not None
        due_s, now_s = instance.timer.when(), self._loop.time()
        instance.timer = None
        if now_s > due_s + _STALL_S and due_s > instance.not_before_s:
            instance.not_before_s = now_s + _READ_FIRST_S
        else:
            try:
                instance.service.on_time(self._clock_ms())
            except Exception:  # noqa: BLE001 - a bug in one service must not end the others
                _log.exception("a service failed")
                instance.not_before_s = now_s + _AFTER_BUG_S
        self._arm(instance)

    def _arm(self, instance: _Instance) -> None:
        delay_ms = min(instance.service.next_change_ms(self._clock_ms()), _MAX_TIMER_MS)
        when_s = max(self._loop.time() + delay_ms / 1000, instance.not_before_s)
        if instance.timer is not None:
            # A timer that fires early sets the next one. That is cheaper than a new timer for each message.
            if instance.timer.when() <= when_s:
                return
            instance.timer.cancel()
        instance.timer = self._loop.call_at(when_s, self._on_time, instance)

    def send(self, peer: int, message: Message) -> None:
        self._enqueue((peer,), message, shared=False)

    def broadcast(self, peers: Iterable[int], message: Message) -> None:
        self._enqueue(peers, message, shared=True)

    def _enqueue(self, peers: Iterable[int], message: Message, *, shared: bool) -> None:
        data = framed(message)
        for peer in filter(None, map(self._connections.peers.get, peers)):
            if peer.unread > self._bounds.unread_bytes:
                # Drop it after this call, because the service may be iterating over its peers.
                self._loop.call_soon(self._connections.drop, peer, Dropped.UNREAD)
                continue
            if not peer.unread:
                self._writable.add(peer)
            peer.enqueue(data, shared=shared)

    def _flush(self, peer: Peer) -> int:
        try:
            written = peer.flush(_PEER_AT_ONCE)
        except OSError:
            self._connections.remove(peer)
            return 0
        if peer.unread and written >= _PEER_AT_ONCE:
            self._writable.add(peer)
        elif peer.unread and peer.unread_since_ms == math.inf:
            peer.unread_since_ms = self._clock_ms()
            self._loop.add_writer(peer.fd, self._on_writable, peer)
        return written

    def _on_writable(self, peer: Peer) -> None:
        self._loop.remove_writer(peer.fd)
        peer.unread_since_ms = math.inf
        self._flush(peer)

    def _sweep_later(self) -> None:
        due_s = self._loop.time() + self._bounds.sweep_ms / 1000
        self._loop.call_at(due_s, self._sweep, due_s)

    def _sweep(self, due_s: float) -> None:
        # Schedule the next sweep first, because the rest may fail.
        self._sweep_later()
        now_ms, late_ms = self._clock_ms(), 1000 * (self._loop.time() - due_s)
        self._stalls += late_ms > _LATE_MS
        # After a stall, read first what peers have sent meanwhile.
        if late_ms <= self._bounds.sweep_ms:
            self._connections.drop_late(now_ms)
        self._connections.bound_unread()
        line = self._connections.log_line(now_ms)
        if line is not None:
            kinds = self.state()["connections"]
            _log.warning("%s; now open: %s", line, ", ".join(f"{kinds[kind]} {kind}" for kind in kinds))
        for instance in list(self._instances.values()):
            if not instance.peers and now_ms - instance.unused_ms >= instance.idle_ms:
                self._close_instance(instance)


@lru_cache(maxsize=500)
def _options_of(settings: _Settings) -> SinkOptions:
    """The options of a group, cached because a thousand tasks have the same. Raises ProtocolError."""
    if any(name not in GROUP_OPTIONS for name, _ in settings):
        raise ProtocolError("unknown group setting")
    try:
        return parse({"kafka.bootstrap.servers": "coordinator.invalid:1", **dict(settings)}).options
    except ConfigurationError as error:
        raise ProtocolError(f"invalid settings: {error}") from None
