"""The server over loopback: who is let in, what is bounded, which tasks share an instance of a service."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from msgspec import structs

from kafka_sink.coordinator.schema import (
    Alive,
    Full,
    Hello,
    Message,
    Outbox,
    Service,
    ServiceScope,
    encode,
    receives,
)
from kafka_sink.coordinator.server import CoordinatorServer, Services
from kafka_sink.coordinator.transport import (
    VERSION,
    Connection,
    ServerBounds,
    _client_context,
    framed,
    framed_bytes,
)
from kafka_sink.options import SinkOptions
from tests.support.coordinator_harness import HELLO, Echo, Said, Serving, Shout, clock_ms, identity, serving
from tests.support.waiting import until

# For peers that do not authenticate, and for peers that do and are as slow as a busy machine.
SHORT = ServerBounds(frame_ms=200, silence_ms=60_000, sweep_ms=50)
PATIENT = ServerBounds(frame_ms=60_000, silence_ms=60_000, sweep_ms=100)


class Raw:
    """A peer that knows the protocol but need not keep to it."""

    def __init__(self, found: Serving, source: str = "127.0.0.1") -> None:
        self.plain = socket.create_connection(("127.0.0.1", found.port), 30, source_address=(source, 0))
        self.socket: Any = self.plain

    def shake_hands(self) -> Raw:
        self.socket = _client_context().wrap_socket(self.plain, server_hostname=identity().name)
        return self

    def close(self) -> None:
        self.socket.close()


@contextmanager
def raw(found: Serving, source: str = "127.0.0.1") -> Iterator[Raw]:
    peer = Raw(found, source)
    try:
        yield peer
    finally:
        peer.close()


@contextmanager
def task(found: Serving, hello: Hello | None = HELLO) -> Iterator[Connection]:
    connection = Connection(found.address, 30_000)
    try:
        if hello is not None:
            connection.send(hello)
        yield connection
    finally:
        connection.socket.close()


def heard(connection: Connection) -> list[Message]:
    while not (found := connection.receive()):
        pass
    return found


def asked(connection: Connection, message: Message) -> Message:
    connection.send(message)
    return heard(connection)[0]


_Kind = TypeVar("_Kind", bound=Service)


def recorded(kind: type[_Kind]) -> tuple[list[_Kind], Services]:
    """A service of each application, and the list that each instance is put into."""
    made: list[_Kind] = []

    def make(out: Outbox) -> _Kind:
        made.append(kind(out))
        return made[-1]

    return made, {kind: make}


def works(found: Serving) -> bool:
    with task(found) as one:
        return asked(one, Said(1)) == Said(1)


def is_closed(peer: Connection | Raw) -> bool:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while not isinstance(peer, Raw) or peer.socket.recv(65536):
            if isinstance(peer, Connection):
                peer.receive()
    return True


def test_a_write_to_a_connection_that_is_closed_is_no_failure_of_tls() -> None:
    """Catches: a warning of a task whose idle connection the server had closed, as it may."""

    def sendall(_: bytes) -> None:
        raise ssl.SSLEOFError(8, "EOF occurred in violation of protocol")

    with serving() as found, task(found) as one, one.socket:
        one.socket = cast("ssl.SSLSocket", SimpleNamespace(sendall=sendall, close=lambda: None))
        with pytest.raises(ConnectionError, match="it closed the connection"):
            one.send(Said(1))


# -- who is let in ----------------------------------------------------------------------------------------


def test_a_wrong_token_or_version_is_turned_away() -> None:
    token = identity().token
    tokens = [bytes((VERSION,)) + b"x" * 32, bytes((VERSION + 1,)) + token, b"x" * 34]
    with serving() as found:
        for sent in (bytes(4), *map(framed_bytes, tokens)):
            with raw(found) as peer:
                peer.shake_hands().socket.sendall(sent)
                assert is_closed(peer)
        assert works(found)


def test_garbage_ends_only_its_own_connection() -> None:
    with serving() as found:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 600):
            with raw(found) as peer:
                peer.socket.sendall(garbage)
                assert is_closed(peer)
        assert works(found)


def test_a_conversation_that_was_recorded_says_nothing_again() -> None:
    """TLS has it; catches a token that could be taken from another connection."""
    with serving() as found, socket.create_server(("127.0.0.1", 0)) as proxy:
        recorded = b""
        connected = socket.create_connection(proxy.getsockname())
        near, _ = proxy.accept()
        far = socket.create_connection(("127.0.0.1", found.port))
        context = _client_context()
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = context.wrap_bio(incoming, outgoing, server_hostname=identity().name)
        with connected, near, far:
            while True:
                try:
                    client.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    sent = outgoing.read()
                    recorded += sent
                    far.sendall(sent)
                    incoming.write(far.recv(65536))
            client.write(framed_bytes(bytes((VERSION,)) + identity().token) + framed(HELLO) + framed(Said(1)))
            sent = outgoing.read()
            recorded += sent
            far.sendall(sent)
            until(lambda: found.echoes and found.echo.heard)
        with raw(found) as again:
            again.socket.sendall(recorded)
            assert is_closed(again)
        assert found.echo.heard == [Said(1)]


def test_silence_is_bounded_in_time() -> None:
    """Instead of the token, before it, and in the middle of a message."""
    with serving(SHORT) as found, raw(found) as peer, raw(found) as half:
        half.shake_hands()
        assert is_closed(peer)
        assert is_closed(half)
        with raw(found) as one:
            opening = framed_bytes(bytes((VERSION,)) + identity().token)
            one.shake_hands().socket.sendall(opening + b"\0\0\1\0abc")
            assert is_closed(one)
        until(lambda: found.connections() == 0)


def test_a_thousand_silent_connections_do_not_keep_a_task_out() -> None:
    bounds = ServerBounds(unauthenticated=256)
    with serving(bounds) as found:
        crowd = [socket.create_connection(("127.0.0.1", found.port), timeout=5) for _ in range(1000)]
        try:
            assert works(found)
            assert found.connections() <= bounds.unauthenticated + 1
        finally:
            for one in crowd:
                one.close()


def test_a_flood_from_one_address_keeps_no_task_of_another_out() -> None:
    """Catches: room for a flood that connections of all addresses make."""
    with serving(replace(PATIENT, unauthenticated=8)) as found, contextlib.ExitStack() as stack:
        slow = stack.enter_context(raw(found))
        for _ in range(100):
            stack.enter_context(raw(found, "127.0.0.2"))
        assert works(found), "it is accepted after all of the flood"
        slow.shake_hands()


def test_a_task_too_many_is_told_so() -> None:
    with (
        serving(replace(PATIENT, connections=2, frame_ms=1_000)) as found,
        contextlib.ExitStack() as stack,
    ):
        tasks = [stack.enter_context(task(found)) for _ in range(2)]
        for one in tasks:
            assert asked(one, Said(1)) == Said(1)
        with task(found, None) as third:
            assert heard(third) == [Full()]
            assert is_closed(third)
        for one in tasks:
            assert asked(one, Said(2)) == Said(2)
        stack.close()
        until(lambda: found.connections() == 0)
        assert works(found)


class OutOfFiles(socket.socket):
    """A socket that listens in a process that may open no more files."""

    is_out, tries = True, 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.tries += 1
        if self.is_out:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_a_process_out_of_files_accepts_again_later_and_does_not_spin_meanwhile() -> None:
    async def serve() -> None:
        with OutOfFiles(fileno=socket.create_server(("127.0.0.1", 0)).detach()) as listening:
            server = CoordinatorServer(identity(), {}, clock_ms, PATIENT)
            server.start(listening)
            with socket.create_connection(listening.getsockname(), 30):
                for _ in range(2_000):
                    await asyncio.sleep(0)
                assert 1 <= listening.tries < 100
                listening.is_out = False
                until = time.monotonic() + 30
                while not server.connections:
                    assert time.monotonic() < until
                    await asyncio.sleep(0.01)
            server.close()

    asyncio.run(serve())


# -- what a peer may cost ---------------------------------------------------------------------------------


def test_messages_that_make_no_sense_end_the_connection() -> None:
    kinds = b"[]", b"Nobody {}", b'Said {"number":-1}', b'Said {"number":1,"text":"\\ud800"}', b"\xff"
    with serving() as found:
        for data in (*kinds, encode(Full())):
            with task(found) as one:
                one.socket.sendall(framed_bytes(data))
                assert is_closed(one), data
        assert not found.echo.heard
        assert works(found)


def test_a_bug_in_a_service_ends_one_connection(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(Service):
        scope = ServiceScope.APPLICATION

        @receives(Shout)
        def on_shout(self, peer: int, message: Shout, now_ms: float) -> None:
            raise ZeroDivisionError

        def on_gone(self, peer: int, now_ms: float) -> None:
            raise ZeroDivisionError

    with serving(services={Faulty: Faulty}) as found, task(found, None) as one, task(found, None) as other:
        one.send(Shout(1))
        assert is_closed(one)
        assert asked(other, Alive()) == Alive()
        until(lambda: found.connections() == 1)
    assert caplog.text.count("a service failed") == 2


def test_a_peer_that_does_not_read_is_dropped_and_not_heard_after() -> None:
    bounds = replace(PATIENT, frame_ms=300, unread_bytes=400_000, burst=10_000)
    with serving(bounds) as found, task(found) as one:
        one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        # Each draws 1 MB, which is compressed: texts at random are not.
        text = os.urandom(400_000).hex()
        with contextlib.suppress(OSError):
            for number in range(30):
                one.send(Said(number, text))
        until(lambda: found.connections() == 0)
        assert len(found.echo.heard) < 30
        assert len(found.echo.gone) == 1
        assert not found.echo.tasks


def test_a_peer_that_reads_slowly_is_not_dropped() -> None:
    """Catches: tasks that lose their connection because their topics take long to read."""
    bounds = replace(PATIENT, frame_ms=400, unread_bytes=64 * 1024 * 1024, burst=10_000)
    now_ms = 0.0
    text = os.urandom(400_000).hex()
    with serving(bounds, clock=lambda: now_ms) as found, task(found) as one:
        one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        for number in range(5):
            one.send(Said(number, text))
        received: list[Message] = []
        while len(received) < 5:
            received += one.receive()
            # The server's clock goes on with what is read, however long that takes: twice frame_ms in all.
            now_ms += 6.0
            time.sleep(0.001)
        assert now_ms > 2 * bounds.frame_ms


def test_a_peer_that_reads_again_gets_all_that_waits_for_it() -> None:
    """Catches: what one turn left over was written only when somebody else was sent something."""
    bounds = replace(PATIENT, unread_bytes=64 * 1024 * 1024, burst=10_000)
    text = os.urandom(400_000).hex()
    with serving(bounds) as found, task(found) as one:
        for number in range(12):
            one.send(Said(number, text))
        until(lambda: len(found.echo.heard) == 12)
        received: list[Message] = []
        while len(received) < 12:
            received += one.receive()


def test_a_message_to_many_is_in_memory_once_and_reaches_all() -> None:
    with serving(PATIENT) as found, contextlib.ExitStack() as stack:
        tasks = [stack.enter_context(task(found)) for _ in range(30)]
        for one in tasks:
            assert asked(one, Said(1)) == Said(1)
        tasks[0].send(Shout(100_000))
        for one in tasks:
            assert heard(one) == [Said(0, "x" * 100_000)]


def test_a_peer_that_sends_too_much_is_read_from_later_and_loses_nothing() -> None:
    bounds = ServerBounds(messages_per_s=50.0, burst=50.0)
    with serving(bounds) as found, task(found) as one:
        started = time.monotonic()
        for number in range(99):
            one.send(Said(number))
        received: list[Message] = []
        while len(received) < 99:
            received += one.receive()
        assert received == [Said(number) for number in range(99)]
        assert time.monotonic() - started > 0.8


def test_many_messages_in_one_frame_s_time_do_not_keep_others_waiting() -> None:
    """Catches: 43,688 messages of one peer that came together and held the loop for a second. An iteration
    handles so many, or takes so long, at most."""
    bounds = replace(PATIENT, messages_per_s=1e6, burst=1e6, messages_at_once=50)
    with serving(bounds) as found, task(found) as one, task(found) as other:
        assert asked(one, Said(1)) == asked(other, Said(1))
        with found.busy():
            one.socket.sendall(framed(Said(0)) * 5_000)
            other.send(Said(2))
        assert heard(other) == [Said(2)]
        until(lambda: len(found.echo.heard) == 5_003)
        assert found.echo.heard.index(Said(2)) < 1_000


@pytest.mark.parametrize("text", [os.urandom(200_000).hex(), "x" * 400_000], ids=["random", "compressible"])
def test_a_long_message_counts_as_several(text: str) -> None:
    """However short it is on the wire: catches messages of 1.4 KB that took 50 ms each to decode."""
    bounds = ServerBounds(messages_per_s=50.0, burst=50.0)
    with serving(bounds) as found, task(found) as one:
        started = time.monotonic()
        for number in range(4):
            one.send(Said(number, text))
        received: list[Message] = []
        while len(received) < 4:
            received += one.receive()
        # Some 24 each.
        assert time.monotonic() - started > 0.2


def test_peers_that_wait_for_an_iteration_are_not_all_looked_at_in_each() -> None:
    """Catches: thousands that came at once were paused and resumed in each iteration, which left no time for
    their messages. Each look at a peer reads the clock."""
    reads, peers, messages = 0, 100, 5

    def clock() -> float:
        nonlocal reads
        reads += 1
        return 0.0

    bounds = replace(PATIENT, messages_at_once=5)
    with contextlib.ExitStack() as ends, serving(bounds, clock=clock) as found:
        tasks = [ends.enter_context(task(found)) for _ in range(peers)]
        for one in tasks:
            assert asked(one, Said(0)) == Said(0)
        reads = 0
        with found.busy():
            for one in tasks:
                one.socket.sendall(framed(Said(1)) * messages)
        until(lambda: len(found.echo.heard) == peers * (1 + messages))
        assert reads < 20 * peers * messages


class Costly(Service):
    """Takes longer for a message than an iteration may. ``before_long``: messages before one of length 2."""

    scope = ServiceScope.APPLICATION

    def __init__(self, out: Outbox) -> None:
        super().__init__(out)
        self.heard, self.now_ms = 0, 0.0
        self.before_long: int | None = None

    @receives(Shout)
    def on_shout(self, peer: int, message: Shout, now_ms: float) -> None:
        if message.length == 2:
            self.before_long = self.heard
        self.heard += 1
        self.now_ms += 30.0


def test_messages_that_take_long_keep_no_other_waiting() -> None:
    """Catches: messages that came together were all handled before the time they took was counted, and those
    who were named first by the system took the whole of each iteration."""
    made, services = recorded(Costly)

    def clock() -> float:
        return made[0].now_ms if made else 0.0

    with contextlib.ExitStack() as ends, serving(PATIENT, services, clock) as found:
        tasks = [ends.enter_context(task(found, None)) for _ in range(4)]
        for one in tasks:
            assert asked(one, Alive()) == Alive()
        with found.busy():
            for one in tasks[:-1]:
                one.socket.sendall(framed(Shout(1)) * 50)
            tasks[-1].send(Shout(2))
        until(lambda: made and made[0].before_long is not None)
        assert made[0].before_long is not None
        assert made[0].before_long < 50


def test_what_went_wrong_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), serving(SHORT) as found:
        with raw(found) as peer:
            peer.shake_hands().socket.sendall(framed_bytes(bytes((VERSION,)) + b"x" * 32))
            assert is_closed(peer)
        until(lambda: any("did not know the token" in line for line in caplog.messages))
    (line,) = [line for line in caplog.messages if "connections dropped" in line]
    assert "127.0.0.1" in line
    assert identity().token.hex() not in line


def test_peers_may_go_on_after_the_server_stalled() -> None:
    """Catches: after a stall of the driver's process connections went of tasks that had stalled with it."""
    opening, message = framed_bytes(bytes((VERSION,)) + identity().token), framed(Alive())
    bounds = ServerBounds(frame_ms=1_000, sweep_ms=1_000)
    with serving(bounds) as found, raw(found) as half, raw(found) as silent:
        half.shake_hands().socket.sendall(opening + message + message[:2])
        assert half.socket.recv(100)
        until(lambda: found.connections() == 2)
        until_ms = clock_ms() + 2_200.0
        with found.busy():
            until(lambda: clock_ms() > until_ms)
        silent.shake_hands().socket.sendall(opening + message)
        assert silent.socket.recv(100)
        assert found.server is not None
        assert found.server.state()["stalls"] == 1
        half.socket.sendall(message[2:])
        assert half.socket.recv(100)


def test_a_peer_that_waits_for_its_turn_is_not_given_up() -> None:
    """Catches: of many tasks that connect again to a busy process, some were dropped before it heard them."""
    with serving(replace(SHORT, greeting_ms=0.0)) as found, raw(found) as peer:
        peer.plain.sendall(b"x")
        with raw(found) as silent:
            assert is_closed(silent), "its time is over"
        assert found.connections() == 1
    with serving(replace(SHORT, messages_at_once=0)) as found, raw(found) as peer:
        peer.shake_hands().socket.sendall(framed_bytes(bytes((VERSION,)) + identity().token))
        with raw(found) as silent:
            assert is_closed(silent), "its time is over"
        assert found.connections() == 1


# -- groups -----------------------------------------------------------------------------------------------


def test_tasks_share_an_instance_by_group_settings_and_cluster() -> None:
    age = {"kafka.metadata.max.age.ms": "1000"}
    hellos = [
        HELLO,
        HELLO,
        Hello("another", "a-cluster", {}),
        Hello(HELLO.group, "b", {}),
        structs.replace(HELLO, settings=age),
    ]
    with serving() as found, contextlib.ExitStack() as stack:
        for hello in hellos:
            assert asked(stack.enter_context(task(found, hello)), Said(1)) == Said(1)
        assert [len(one.tasks) for one in found.echoes] == [2, 1, 1, 1]
        assert found.echoes[3].options.metadata_max_age_ms == 1000
        assert found.echoes[0].options.metadata_max_age_ms == 300_000


def test_a_task_that_learns_its_cluster_moves() -> None:
    with serving() as found, task(found, structs.replace(HELLO, cluster_id="")) as one:
        assert asked(one, Said(1)) == Said(1)
        one.send(HELLO)
        assert asked(one, Said(2)) == Said(2)
        before, after = found.echoes
        assert (before.tasks, len(before.gone), len(after.tasks)) == (set(), 1, 1)
        one.send(HELLO)
        assert asked(one, Said(3)) == Said(3)
        assert after.gone == []


def test_settings_that_groups_do_not_have_end_the_connection() -> None:
    with serving() as found:
        for settings in ({"kafka.sasl.password": "x"}, {"kafka.metadata.max.age.ms": "soon"}, {"topic": "t"}):
            with task(found, structs.replace(HELLO, settings=settings)) as one:
                assert is_closed(one), settings
        assert not found.echoes


def test_who_has_not_said_hello_has_no_group() -> None:
    with serving() as found, task(found, None) as one:
        assert asked(one, Alive()) == Alive()
        one.send(Said(1))
        assert is_closed(one)
        assert not found.echoes


def test_groups_are_bounded_and_the_longest_unused_goes() -> None:
    with (
        serving(replace(PATIENT, burst=10_000, instances=3)) as found,
        task(found) as kept,
        task(found, None) as one,
    ):
        assert asked(kept, Said(0)) == Said(0)
        for number in range(20):
            one.send(Hello(str(number), "", {}))
            assert asked(one, Said(number)) == Said(number)
        closed = [echo.closed for echo in found.echoes]
        assert closed == [0, *[1] * 18, 0, 0]
        assert asked(kept, Said(1)) == Said(1)


class OfGroup(Echo):
    scope = ServiceScope.GROUP


def test_what_is_kept_of_a_cluster_goes_soon_after_its_last_task() -> None:
    """Catches: a task that named ever new clusters and left filled the memory for ten minutes."""
    made: dict[str, Echo] = {}

    def make(options: SinkOptions, out: Outbox) -> Echo:
        return made.setdefault("cluster", Echo(options, out))

    def make_of_group(options: SinkOptions, out: Outbox) -> OfGroup:
        made["group"] = of_group = OfGroup(options, out)
        return of_group

    now_ms = 0.0
    services: Services = {Echo: make, OfGroup: make_of_group}
    with serving(replace(PATIENT, frame_ms=400), services, lambda: now_ms) as found:
        with task(found):
            until(lambda: len(made) == 2)
        until(lambda: all(one.gone for one in made.values()))
        now_ms = 6_000.0
        until(lambda: made["cluster"].closed)
        assert not made["group"].closed
        now_ms = 601_000.0
        until(lambda: made["group"].closed)


class Timed(Service):
    """Counts its times; the first one fails."""

    scope = ServiceScope.APPLICATION

    def __init__(self, out: Outbox) -> None:
        super().__init__(out)
        self.times = 0
        self.due = False

    @receives(Shout)
    def on_shout(self, peer: int, message: Shout, now_ms: float) -> None:
        self.due = True

    def on_time(self, now_ms: float) -> None:
        self.times += 1
        if self.times == 1:
            raise ZeroDivisionError
        self.due = False

    def next_change_ms(self, now_ms: float) -> float:
        return 0.0 if self.due else float("inf")


def test_a_service_that_fails_at_its_time_gets_it_again_later(caplog: pytest.LogCaptureFixture) -> None:
    made, services = recorded(Timed)
    with serving(services=services) as found, task(found, None) as one:
        one.send(Shout(1))
        until(lambda: made and made[0].times == 2)
    assert caplog.text.count("a service failed") == 1


class Punctual(Service):
    """Due with each message. ``heard_before``: messages before its first time."""

    scope = ServiceScope.APPLICATION

    def __init__(self, out: Outbox) -> None:
        super().__init__(out)
        self.may_go_on = threading.Event()
        self.heard = 0
        self.heard_before: int | None = None

    @receives(Shout)
    def on_shout(self, peer: int, message: Shout, now_ms: float) -> None:
        self.may_go_on.wait(30)
        self.heard += 1

    def on_time(self, now_ms: float) -> None:
        if self.heard_before is None:
            self.heard_before = self.heard

    def next_change_ms(self, now_ms: float) -> float:
        return 0.0 if self.heard and self.heard_before is None else float("inf")


@contextmanager
def tasks_of(kind: type[_Kind], count: int) -> Iterator[tuple[Serving, list[_Kind], list[Connection]]]:
    """A server that takes one message at a time, its services of this kind, and connected tasks."""
    made, services = recorded(kind)
    bounds = replace(PATIENT, messages_at_once=1)
    with contextlib.ExitStack() as ends, serving(bounds, services) as found:
        tasks = [ends.enter_context(task(found, None)) for _ in range(count)]
        for one in tasks:
            assert asked(one, Alive()) == Alive()
        yield found, made, tasks


def test_a_service_gets_its_time_however_many_messages_come() -> None:
    """Each message of an iteration set a timer anew that was due, and timers come last in an iteration."""
    with tasks_of(Punctual, 20) as (_, made, tasks):
        for one in tasks:
            one.send(Shout(1))
        until(lambda: made)
        made[0].may_go_on.set()
        until(lambda: made[0].heard == len(tasks))
        until(lambda: made[0].heard_before is not None)
        assert made[0].heard_before is not None
        assert made[0].heard_before <= 3


class Deadline(Punctual):
    """Due 300 ms after the first message."""

    first_ms = math.inf

    @receives(Shout)
    def on_shout(self, peer: int, message: Shout, now_ms: float) -> None:
        self.first_ms = min(self.first_ms, now_ms)
        self.heard += 1

    def next_change_ms(self, now_ms: float) -> float:
        return math.inf if self.heard_before is not None else max(0.0, self.first_ms + 300.0 - now_ms)


def test_what_came_during_a_stall_is_read_before_a_service_decides_without_it() -> None:
    """Catches: after a stall the first answer decided for all, and a loop always late never decides."""
    with tasks_of(Deadline, 10) as (found, made, tasks):
        tasks[0].send(Shout(1))
        until(lambda: made and made[0].heard)
        with found.busy():
            for one in tasks[1:]:
                one.send(Shout(1))
            time.sleep(1.0)
        until(lambda: made[0].heard == len(tasks))
        with found.busy():
            time.sleep(0.6)
        until(lambda: made[0].heard_before is not None)
        assert made[0].heard_before == len(tasks)


def test_instances_end_with_the_server() -> None:
    with serving() as found:
        assert works(found)
    assert found.echo.closed == 1


def test_sinkoptions_of_a_group_are_kept() -> None:
    """Catches: options parsed again for each of 10,000 tasks."""
    other = structs.replace(HELLO, group="g")
    with serving() as found, task(found) as one, task(found, other) as another:
        assert asked(one, Said(1)) == asked(another, Said(1))
        assert found.echoes[0].options is found.echoes[1].options
