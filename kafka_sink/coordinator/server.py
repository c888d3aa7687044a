"""The coordinator's sockets on one loop: accepts, hands messages to services, writes what they say.

Services decide what a message means; Connections decides which connections are kept. The server makes an
instance of each service for each group of tasks, keeps its timer, and bounds what one iteration of the loop
does: messages handled, time to handle them, bytes written. A message that comes meanwhile waits for its end.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import selectors
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kafka_sink.clock import RANDOM, Clock
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
# A service gets its time so late only after a stall. It waits until messages that came meanwhile have been
# read: they may say what it waits for.
_STALL_S, _READ_FIRST_S = 0.2, 0.25
# A bug in one must not occupy the others.
_AFTER_BUG_S = 1.0
_LATE_MS = 1000.0
# Without a free file descriptor.
_ACCEPT_AGAIN_S = 1.0
# In one iteration: connections to accept, events to handle, bytes to write, also to one peer.
_ACCEPT_AT_ONCE = 128
_EVENTS_AT_ONCE = 500
_WRITE_AT_ONCE = 8 * 1024 * 1024
_PEER_AT_ONCE = 256 * 1024
# A message counts as one for so many bytes, once decompressed.
_BYTES_OF_ONE = 16 * 1024
# How long an instance is kept after its last task. Clusters are named by tasks, perhaps ever new ones.
_IDLE_MS: Mapping[ServiceScope, float] = {ServiceScope.GROUP: 600_000.0, ServiceScope.CLUSTER: 5_000.0}
_DEFAULT_BOUNDS = ServerBounds()
# Of the application, whatever the group, so that a service that needs none may be asked by planning.
_Key = tuple[object, ...]
# What a hello says of options.
_Settings = tuple[tuple[str, str], ...]
# By the service's class; those of GROUP and CLUSTER are given the group's options first.
Services = Mapping[type[Service], Callable[..., Service]]


@dataclass(eq=False, slots=True)
class _Instance:
    """A service for one group. ``unused_ms``: when its last task left. ``not_before_s``: of its timer."""

    key: _Key
    service: Service
    tasks: int = 0
    unused_ms: float = 0.0
    not_before_s: float = 0.0
    timer: asyncio.TimerHandle | None = None


class CoordinatorServer:
    """Made and used on the loop that ``new_loop`` has made; it is the services' Outbox."""

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
        # Peers with something to write, in turn. While there are any, ``_write`` is due.
        self._to_write: deque[Peer] = deque()
        # Peers whose first message waits, in turn: thousands may connect at once. As above, with ``_greet``.
        self._newcomers: deque[Peer] = deque()
        # Peers whose next message waits for another iteration, in turn.
        self._waiting: deque[Peer] = deque()
        self._reads_first = False
        # How many messages have been handled in this iteration, and when the first of them was.
        self._handled, self._began_ms = 0, math.inf
        # In all; and how often the loop was so late that tasks may have waited for more than a second.
        self._messages = self._stalls = 0

    @property
    def connections(self) -> int:
        return len(self._connections.peers)

    def state(self) -> Mapping[str, Any]:
        """For metrics: counts of messages and stalls, tasks, and connections by kind."""
        tasks = sum(bool(peer.joined) for peer in self._connections.peers.values())
        unproved = self.connections - self._connections.proved
        kinds = {"task": tasks, "idle": self._connections.proved - tasks, "unproved": unproved}
        counts = {"messages": self._messages, "stalls": self._stalls, "tasks": tasks}
        return {**counts, "connections": kinds}

    def start(self, listening: socket.socket) -> None:
        """Begin to accept."""
        listening.setblocking(False)
        self._listening = listening
        self._loop.add_reader(listening, self._accept)
        self._sweep_later()

    def close(self) -> None:
        if self._listening is not None:
            self._loop.remove_reader(self._listening)
            self._listening = None
        self._connections.close()
        for instance in list(self._instances.values()):
            self._close_instance(instance)

    # -- connections --------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            # It may have been closed since this was due.
            if self._listening is None:
                return
            try:
                connected, address = self._listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                # Most likely out of file descriptors. The socket stays readable, so the loop would spin.
                _log.warning("a connection could not be accepted: %s", error)
                self._loop.remove_reader(self._listening)
                self._loop.call_later(_ACCEPT_AGAIN_S, self._accept_again)
                return
            connected.setblocking(False)
            # Else a second small message waits for the acknowledgement of the first one: 40 ms.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._count += 1
            peer = Peer(self._count, sys.intern(str(address[0])), connected, self._clock_ms())
            self._connections.add(peer)
            self._loop.add_reader(peer.fd, self._on_readable, peer)

    def _accept_again(self) -> None:
        if self._listening is not None:
            self._loop.add_reader(self._listening, self._accept)

    def _on_removed(self, peer: Peer) -> None:
        self._loop.remove_reader(peer.fd)
        self._loop.remove_writer(peer.fd)
        for kind in list(peer.joined):
            self._leave(peer, kind)

    # -- bytes --------------------------------------------------------------------------------------

    def _on_readable(self, peer: Peer) -> None:
        if not peer.has_begun:
            self._loop.remove_reader(peer.fd)
            # Until its turn comes, no time runs.
            peer.begun_ms = peer.heard_ms = math.inf
            if not self._newcomers:
                self._loop.call_soon(self._greet)
            self._newcomers.append(peer)
        elif not self._is_spent(peer):
            # Otherwise the selector names it again in the next iteration.
            self._guarded(peer, self._receive)

    def _greet(self) -> None:
        """Take first messages for a part of the iteration: tasks who are there wait for no newcomer."""
        until_ms = self._clock_ms() + self._bounds.greeting_ms
        while self._newcomers and (now_ms := self._clock_ms()) < until_ms:
            peer = self._newcomers.popleft()
            if not peer.is_gone:
                peer.begun_ms = peer.heard_ms = now_ms
                self._loop.add_reader(peer.fd, self._on_readable, peer)
                self._guarded(peer, self._receive)
        if self._newcomers:
            self._loop.call_soon(self._greet)

    def _is_spent(self, peer: Peer) -> bool:
        """Whether enough has been handled in this iteration, so that this peer waits for its turn."""
        now_ms = self._clock_ms()
        if self._began_ms == math.inf:
            self._handled, self._began_ms = 0, now_ms
            # The next iteration begins with this.
            self._loop.call_soon(self._begin_iteration)
        is_in_time = now_ms - self._began_ms < self._bounds.iteration_ms
        if is_in_time and self._handled < self._bounds.messages_at_once:
            return False
        # It does not choose how long.
        peer.begun_ms = max(peer.begun_ms, now_ms)
        return True

    def _begin_iteration(self) -> None:
        """Go on with peers that wait. Every second iteration is for those that are to be read."""
        self._began_ms = math.inf
        self._reads_first = not self._reads_first
        while self._waiting and not self._is_spent(self._waiting[0]) and not self._reads_first:
            self._resume(self._waiting.popleft())

    def _guarded(self, peer: Peer, step: Callable[[Peer], None]) -> None:
        """Take this step with the peer. What goes wrong ends its connection and no other."""
        if peer.is_gone:
            return
        try:
            step(peer)
            self._connections.note_unfinished(peer, self._clock_ms())
        except ProtocolError as error:
            _log.debug("connection %d ended: %s", peer.number, error)
            self._connections.drop(peer, Dropped.NONSENSE if peer.is_proved else Dropped.WRONG_PROOF)
        except OSError as error:
            _log.debug("connection %d ended: %s", peer.number, error)
            self._connections.remove(peer)
        except Exception:  # noqa: BLE001 - a bug in one service must not end the others
            _log.exception("a service failed")
            self._connections.remove(peer)

    def _receive(self, peer: Peer) -> None:
        try:
            peer.receive(self._identity.context)
        finally:
            peer.heard_ms = self._clock_ms()
            # What came before the end of the stream counts.
            self._handle(peer)

    def _handle(self, peer: Peer) -> None:
        """Handle complete messages as far as the bounds allow, and the others a moment later."""
        while not (peer.is_gone or peer.is_paused) and peer.frames.end:
            wait_ms = self._wait_ms(peer)
            if wait_ms > 0 or self._is_spent(peer):
                peer.is_paused = True
                self._loop.remove_reader(peer.fd)
                if wait_ms > 0:
                    self._loop.call_later(wait_ms / 1000, self._resume, peer)
                else:
                    self._waiting.append(peer)
                return
            data = peer.frames.next_message()
            assert data is not None
            self._handled += 1
            if peer.is_proved:
                data = decompressed(data)
                peer.allowance -= max(1.0, len(data) / _BYTES_OF_ONE)
                self.on_message(peer, parsed(data))
                self._messages += 1
            else:
                self._on_proof(peer, data)

    def _wait_ms(self, peer: Peer) -> float:
        """How long the peer's next message must wait. A token bucket."""
        now_ms, rate = self._clock_ms(), self._bounds.messages_per_s / 1000
        peer.allowance = min(self._bounds.burst, peer.allowance + rate * (now_ms - peer.allowed_ms))
        peer.allowed_ms = now_ms
        if peer.allowance < 1:
            self._connections.note(peer, Dropped.HELD_BACK)
            return max((1 - peer.allowance) / rate, 100.0)
        return 0.0

    def _resume(self, peer: Peer) -> None:
        if not peer.is_gone:
            peer.is_paused = False
            self._loop.add_reader(peer.fd, self._on_readable, peer)
            self._guarded(peer, self._handle)

    def _on_proof(self, peer: Peer, data: bytes) -> None:
        if data[0] != VERSION or not hmac.compare_digest(data[1:], self._identity.token):
            raise ProtocolError("a wrong token, or another version")
        if self._connections.proved >= self._bounds.connections:
            # Not closed at once: what the task has sent meanwhile would destroy what it is to read. Like one
            # without proof, it goes when its time is over.
            self._loop.remove_reader(peer.fd)
            peer.is_paused = True
            peer.enqueue(framed(Full()), shared=True)
            self._flush(peer)
            return
        self._connections.on_proved(peer)

    # -- messages -----------------------------------------------------------------------------------

    def on_message(self, peer: Peer, message: Message) -> None:
        """Answer it, or hand it to its service. Raises ProtocolError, and whatever a service's bug raises."""
        if isinstance(message, Alive):
            self.send(peer.number, message)
        elif isinstance(message, Hello):
            self._on_hello(peer, message)
        else:
            kind = self._of_message.get(type(message))
            if kind is None:
                raise ProtocolError(f"{type(message).__name__} is not for the coordinator")
            instance = peer.joined.get(kind)
            if instance is None:
                if kind.scope is not ServiceScope.APPLICATION:
                    raise ProtocolError("a task must say Hello first")
                instance = self._join(peer, kind, (kind,), ())
            deliver(instance.service, peer.number, message, self._clock_ms())
            self._arm(instance)

    def _on_hello(self, peer: Peer, hello: Hello) -> None:
        settings = tuple(sorted(hello.settings.items()))
        options = _options_of(settings)
        for kind in self._services:
            if kind.scope is ServiceScope.APPLICATION:
                continue
            # Tasks that differ in other settings share a service, which has those of the first.
            key: _Key = (kind, hello.group, tuple(one for one in settings if one[0] in SHARED_OPTIONS))
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
        instance.tasks += 1
        peer.joined[kind] = instance
        instance.service.on_joined(peer.number, self._clock_ms())
        self._arm(instance)
        return instance

    def _leave(self, peer: Peer, kind: type[Service]) -> None:
        instance = peer.joined.pop(kind, None)
        if instance is None:
            return
        instance.tasks -= 1
        instance.unused_ms = self._clock_ms()
        try:
            instance.service.on_gone(peer.number, instance.unused_ms)
        except Exception:  # noqa: BLE001 - whoever removes the peer goes on
            _log.exception("a service failed")
        self._arm(instance)

    def _make_capacity(self) -> None:
        unused = [one for key, one in self._instances.items() if not one.tasks and len(key) > 1]
        if not unused:
            raise ProtocolError("more groups of tasks than the coordinator serves")
        self._close_instance(min(unused, key=lambda one: one.unused_ms))

    def _close_instance(self, instance: _Instance) -> None:
        del self._instances[instance.key]
        if instance.timer is not None:
            instance.timer.cancel()
        instance.service.close()

    # -- time ---------------------------------------------------------------------------------------

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
            # One that comes sooner than needed sets the next: cheaper than a new timer for each message.
            if instance.timer.when() <= when_s:
                return
            instance.timer.cancel()
        instance.timer = self._loop.call_at(when_s, self._on_time, instance)

    # -- Outbox -------------------------------------------------------------------------------------

    def send(self, peer: int, message: Message) -> None:
        found = self._connections.peers.get(peer)
        if found is not None:
            self._enqueue(found, framed(message), shared=False)

    def broadcast(self, peers: Iterable[int], message: Message) -> None:
        data = framed(message)
        for number in peers:
            found = self._connections.peers.get(number)
            if found is not None:
                self._enqueue(found, data, shared=True)

    def _enqueue(self, peer: Peer, data: bytes, *, shared: bool) -> None:
        if peer.is_gone:
            return
        if peer.unread > self._bounds.unread_bytes:
            # Not now: a service may be in the middle of its list of tasks.
            self._loop.call_soon(self._connections.drop, peer, Dropped.UNREAD)
            return
        is_next = not peer.unread
        peer.enqueue(data, shared=shared)
        if is_next:
            self._write_later(peer)

    def _write_later(self, peer: Peer) -> None:
        if not self._to_write:
            self._loop.call_soon(self._write)
        self._to_write.append(peer)

    def _write(self) -> None:
        """Write to peers in turn, and a bounded amount at once, so that others are read in between."""
        until_ms, left = self._clock_ms() + self._bounds.iteration_ms, _WRITE_AT_ONCE
        while self._to_write and left > 0 and self._clock_ms() < until_ms:
            peer = self._to_write[0]
            if not peer.is_gone:
                left -= self._flush(peer)
            # Only now, so that whoever is added meanwhile does not make this due twice.
            self._to_write.popleft()
        if self._to_write:
            self._loop.call_soon(self._write)

    def _flush(self, peer: Peer) -> int:
        try:
            written = peer.flush(_PEER_AT_ONCE)
        except OSError:
            self._connections.remove(peer)
            return 0
        if peer.unread and written >= _PEER_AT_ONCE:
            self._write_later(peer)
        elif peer.unread and peer.unread_since_ms == math.inf:
            peer.unread_since_ms = self._clock_ms()
            self._loop.add_writer(peer.fd, self._on_writable, peer)
        return written

    def _on_writable(self, peer: Peer) -> None:
        self._loop.remove_writer(peer.fd)
        peer.unread_since_ms = math.inf
        self._flush(peer)

    # -- sweep --------------------------------------------------------------------------------------

    def _sweep_later(self) -> None:
        due_s = self._loop.time() + self._bounds.sweep_ms / 1000
        self._loop.call_at(due_s, self._sweep, due_s)

    def _sweep(self, due_s: float) -> None:
        # First, as what follows may fail.
        self._sweep_later()
        now_ms, late_ms = self._clock_ms(), 1000 * (self._loop.time() - due_s)
        self._stalls += late_ms > _LATE_MS
        # After a stall first of all what peers have sent and read meanwhile is to be seen.
        if late_ms <= self._bounds.sweep_ms:
            self._connections.drop_late(now_ms)
        self._connections.bound_unread()
        line = self._connections.log_line(now_ms)
        if line is not None:
            kinds = self.state()["connections"]
            _log.warning("%s; now open: %s", line, ", ".join(f"{kinds[kind]} {kind}" for kind in kinds))
        for one in list(self._instances.values()):
            if not one.tasks and now_ms - one.unused_ms >= _IDLE_MS.get(one.service.scope, math.inf):
                self._close_instance(one)


@lru_cache(maxsize=500)
def _options_of(settings: _Settings) -> SinkOptions:
    """Kept, because a thousand tasks have the same. Raises ProtocolError."""
    if any(name not in GROUP_OPTIONS for name, _ in settings):
        raise ProtocolError("a setting that groups do not have")
    try:
        return parse({"kafka.bootstrap.servers": "coordinator.invalid:1", **dict(settings)}).options
    except ConfigurationError as error:
        raise ProtocolError(f"invalid settings: {error}") from None


# -- the loop -------------------------------------------------------------------------------------------


def new_loop() -> asyncio.AbstractEventLoop:
    """The loop for a server."""
    return asyncio.SelectorEventLoop(_FairSelector())


class _FairSelector(selectors.DefaultSelector):
    """Begins with any of those that are ready: whoever comes first may use up the iteration. The others are
    named again by the next poll."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        if len(ready) > 1:
            start = RANDOM.randrange(len(ready))
            ready = (ready[start:] + ready[:start])[:_EVENTS_AT_ONCE]
        return ready
