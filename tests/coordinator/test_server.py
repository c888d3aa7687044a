"""The server over loopback: who is let in, what is bounded, which tasks share an instance of a service."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from msgspec import structs

from kafka_sink.coordinator import server
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
from tests.support.effort import tries
from tests.support.waiting import until

# For peers that do not authenticate, and for peers that do and are as slow as a busy machine.
SHORT = ServerBounds(frame_ms=200, silence_ms=60_000, sweep_ms=50)
PATIENT = ServerBounds(frame_ms=60_000, silence_ms=60_000, sweep_ms=100)
# Bytes that TLS does not compress.
RANDOM_TEXT = os.urandom(400_000).hex()


class Raw:
    """A peer that knows the protocol but need not keep to it."""

    def __init__(self, found: Serving, source: str = "127.0.0.1") -> None:
        self.plain = socket.create_connection(("127.0.0.1", found.port), 30, source_address=(source, 0))
        self.socket: Any = self.plain

    def shake_hands(self, say: bytes = b"") -> Raw:
        self.socket = _client_context().wrap_socket(self.plain, server_hostname=identity().name)
        self.socket.sendall(say)
        return self

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def opening() -> bytes:
    return framed_bytes(bytes((VERSION,)) + identity().token)


@contextmanager
def task(found: Serving, hello: Hello | None = HELLO) -> Iterator[Connection]:
    connection = Connection(found.address, 30_000)
    try:
        if hello is not None:
            connection.send(hello)
        yield connection
    finally:
        connection.socket.close()


@contextmanager
def tasks(found: Serving, count: int, hello: Hello | None = HELLO) -> Iterator[list[Connection]]:
    """Tasks that have had an answer."""
    with ExitStack() as stack:
        made = [stack.enter_context(task(found, hello)) for _ in range(count)]
        for one in made:
            assert asked(one, Alive()) == Alive()
        yield made


def heard(connection: Connection, count: int = 1) -> list[Message]:
    found: list[Message] = []
    while len(found) < count:
        found += connection.receive()
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


def test_garbage_a_wrong_token_or_version_end_only_their_own_connection() -> None:
    token = identity().token
    tokens = [bytes((VERSION,)) + b"x" * 32, bytes((VERSION + 1,)) + token, b"x" * 34]
    with serving() as found:
        for sent in (bytes(4), *map(framed_bytes, tokens)):
            with Raw(found) as peer:
                assert is_closed(peer.shake_hands(sent))
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 600):
            with Raw(found) as peer:
                peer.socket.sendall(garbage)
                assert is_closed(peer)
        assert works(found)
    assert found.echo.closed == 1, "instances end with the server"


def test_a_conversation_that_was_recorded_says_nothing_again() -> None:
    """TLS has it; catches a token that could be taken from another connection."""
    with serving() as found, Raw(found) as far:
        recorded = b""
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = _client_context().wrap_bio(incoming, outgoing, server_hostname=identity().name)
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                sent = outgoing.read()
                recorded += sent
                far.socket.sendall(sent)
                incoming.write(far.socket.recv(65536))
        client.write(opening() + framed(HELLO) + framed(Said(1)))
        sent = outgoing.read()
        recorded += sent
        far.socket.sendall(sent)
        until(lambda: found.echoes and found.echo.heard)
        with Raw(found) as again:
            again.socket.sendall(recorded)
            assert is_closed(again)
        assert found.echo.heard == [Said(1)]


def test_silence_is_bounded_in_time() -> None:
    """Instead of the token, before it, and in the middle of a message."""
    now_ms = 0.0
    with (
        serving(SHORT, clock=lambda: now_ms) as found,
        Raw(found) as peer,
        Raw(found) as half,
        Raw(found) as one,
    ):
        half.shake_hands()
        one.shake_hands(opening() + framed(Alive()) + b"\0\0\1\0abc")
        assert one.socket.recv(100)
        until(lambda: found.connections() == 3)
        now_ms = SHORT.frame_ms + 1
        assert is_closed(peer)
        assert is_closed(half)
        assert is_closed(one)
        until(lambda: found.connections() == 0)


def test_a_thousand_silent_connections_do_not_keep_a_task_out() -> None:
    bounds = ServerBounds(unauthenticated=256)
    with serving(bounds) as found, ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(Raw(found))
        assert works(found)
        assert found.connections() <= bounds.unauthenticated + 1


def test_a_flood_from_one_address_keeps_no_task_of_another_out() -> None:
    """Catches: room for a flood that connections of all addresses make."""
    with serving(replace(PATIENT, unauthenticated=8)) as found, ExitStack() as stack:
        slow = stack.enter_context(Raw(found))
        for _ in range(100):
            stack.enter_context(Raw(found, "127.0.0.2"))
        assert works(found), "it is accepted after all of the flood"
        slow.shake_hands()


def test_a_task_too_many_is_told_so() -> None:
    now_ms = 0.0
    with serving(replace(PATIENT, connections=2, frame_ms=1_000), clock=lambda: now_ms) as found:
        with tasks(found, 2) as (one, other):
            with task(found, None) as third:
                assert heard(third) == [Full()]
                now_ms = 1_001.0
                assert is_closed(third)
            assert asked(one, Said(2)) == asked(other, Said(2)) == Said(2)
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


def test_a_process_out_of_files_accepts_again_later_and_does_not_spin_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "_ACCEPT_AGAIN_S", 0.2)

    async def serve() -> None:
        with OutOfFiles(fileno=socket.create_server(("127.0.0.1", 0)).detach()) as listening:
            coordinator = CoordinatorServer(identity(), {}, clock_ms, PATIENT)
            coordinator.start(listening)
            with socket.create_connection(listening.getsockname(), 30):
                for _ in range(2_000):
                    await asyncio.sleep(0)
                assert 1 <= listening.tries < 100
                listening.is_out = False
                until = time.monotonic() + 60
                while not coordinator.connections:
                    assert time.monotonic() < until
                    await asyncio.sleep(0.01)
            coordinator.close()

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

    with serving(services={Faulty: Faulty}) as found, tasks(found, 2, None) as (one, other):
        one.send(Shout(1))
        assert is_closed(one)
        assert asked(other, Alive()) == Alive()
        until(lambda: found.connections() == 1)
    assert caplog.text.count("a service failed") == 2


def test_a_service_that_cannot_tell_its_time_holds_up_no_other() -> None:
    class Faulty(Service):
        scope = ServiceScope.APPLICATION
        fails = False

        @receives(Shout)
        def on_shout(self, peer: int, message: Shout, now_ms: float) -> None:
            self.fails = True

        def next_change_ms(self, now_ms: float) -> float:
            return 1 / 0 if self.fails else math.inf

    with serving(PATIENT, {Faulty: Faulty}) as found, tasks(found, 3, None) as (one, *others):
        with found.busy():
            one.send(Shout(1))
            # More than a turn, so that they wait when it fails.
            for other in others:
                other.socket.sendall(framed(Alive()) * 11)
        for other in others:
            other.socket.settimeout(60)
            assert heard(other, 11) == [Alive()] * 11
        assert found.connections() == 2


def test_a_peer_that_does_not_read_is_dropped_and_not_heard_after() -> None:
    bounds = replace(PATIENT, frame_ms=300, unread_bytes=400_000, burst=10_000)
    now_ms = 0.0
    with serving(bounds, clock=lambda: now_ms) as found, task(found) as one:
        one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with contextlib.suppress(OSError):
            for number in range(30):
                one.send(Said(number, RANDOM_TEXT))
        now_ms = 301.0
        until(lambda: found.connections() == 0)
        assert len(found.echo.heard) < 30
        assert len(found.echo.gone) == 1
        assert not found.echo.tasks


def test_a_peer_that_reads_slowly_is_not_dropped() -> None:
    """Catches: tasks that lose their connection because their topics take long to read."""
    bounds = replace(PATIENT, frame_ms=400, unread_bytes=64 * 1024 * 1024, burst=10_000)
    now_ms = 0.0
    with serving(bounds, clock=lambda: now_ms) as found, task(found) as one:
        one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        for number in range(5):
            one.send(Said(number, RANDOM_TEXT))
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
    with serving(bounds) as found, task(found) as one:
        for number in range(12):
            one.send(Said(number, RANDOM_TEXT))
        until(lambda: len(found.echo.heard) == 12)
        assert len(heard(one, 12)) == 12


def test_a_message_to_many_is_in_memory_once_and_reaches_all() -> None:
    with serving(PATIENT) as found, tasks(found, 30) as made:
        made[0].send(Shout(100_000))
        for one in made:
            assert heard(one) == [Said(0, "x" * 100_000)]


@pytest.mark.parametrize(
    ("texts", "least_s"),
    [([""] * 99, 0.8), ([RANDOM_TEXT] * 4, 0.2), (["x" * 400_000] * 4, 0.2)],
    ids=["many", "long", "long, short on the wire"],
)
def test_a_peer_that_sends_too_much_is_read_from_later_and_loses_nothing(
    texts: list[str], least_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A long message counts as several: catches messages of 1.4 KB that took 50 ms each to decode."""
    bounds = ServerBounds(messages_per_s=50.0, burst=50.0, sweep_ms=50)
    with serving(bounds) as found, task(found) as one:
        started, sent = time.monotonic(), [Said(number, text) for number, text in enumerate(texts)]
        for message in sent:
            one.send(message)
        assert heard(one, len(sent)) == sent
        assert time.monotonic() - started > least_s
        until(lambda: "sent more messages than allowed" in caplog.text)


@pytest.mark.parametrize(("count", "each_ms"), [(5_000, 0.0), (50, 30.0)])
def test_many_messages_in_one_frame_s_time_do_not_keep_others_waiting(count: int, each_ms: float) -> None:
    """Catches: 43,688 messages of one peer that came together and held the loop for a second; and messages
    that take longer than an iteration may."""
    bounds = replace(PATIENT, messages_per_s=1e6, burst=1e6)

    def clock() -> float:
        return each_ms * sum(len(one.heard) for one in found.echoes)

    with serving(bounds, clock=clock) as found, tasks(found, 3) as (one, other, last):
        with found.busy():
            one.socket.sendall(framed(Said(0)) * count)
            other.send(Said(2))
            last.socket.sendall(framed(Said(0)) * count)
        assert heard(other) == [Said(2)]
        until(lambda: len(found.echo.heard) == 2 * count + 1)
        assert found.echo.heard.index(Said(2)) <= 20


def test_peers_that_wait_for_an_iteration_are_not_all_looked_at_in_each() -> None:
    """Catches: thousands that came at once were paused and resumed in each iteration, which left no time for
    their messages. Each look at a peer reads the clock."""
    reads, peers, messages = 0, 100, 5

    def clock() -> float:
        nonlocal reads
        reads += 1
        return 0.0

    bounds = replace(PATIENT, messages_at_once=5)
    with serving(bounds, clock=clock) as found, tasks(found, peers) as made:
        reads = 0
        with found.busy():
            for one in made:
                one.socket.sendall(framed(Said(1)) * messages)
        until(lambda: len(found.echo.heard) == peers * messages)
        assert reads < 20 * peers * messages


def test_reasons_for_dropped_connections_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with serving(PATIENT) as found:
        with Raw(found) as peer:
            assert is_closed(peer.shake_hands(framed_bytes(bytes((VERSION,)) + b"x" * 32)))
        until(lambda: any("used a wrong token" in line for line in caplog.messages))
    (line,) = [line for line in caplog.messages if "connections dropped" in line]
    assert "127.0.0.1" in line
    assert identity().token.hex() not in line


def test_peers_may_go_on_after_the_server_stalled() -> None:
    """Catches: after a stall of the driver's process connections went of tasks that had stalled with it."""
    message = framed(Alive())
    bounds = ServerBounds(frame_ms=1_000, sweep_ms=1_000)
    has_stalled = False

    def clock() -> float:
        """Two seconds late from the stall on, until the sweep that meets it is over."""
        return 2_200.0 if has_stalled and not found.state()["stalls"] else 0.0

    with serving(bounds, clock=clock) as found, Raw(found) as half, Raw(found) as silent:
        assert half.shake_hands(opening() + message + message[:2]).socket.recv(100)
        until(lambda: found.connections() == 2)
        # A sweep is late by the loop's own time, which is real.
        until_ms = clock_ms() + 2_200.0
        with found.busy():
            until(lambda: clock_ms() > until_ms)
            has_stalled = True
        until(lambda: found.state()["stalls"])
        assert silent.shake_hands(opening() + message).socket.recv(100)
        half.socket.sendall(message[2:])
        assert half.socket.recv(100)


@pytest.mark.parametrize(
    "bounds",
    [replace(SHORT, greeting_ms=0.0), replace(SHORT, messages_at_once=0)],
    ids=["handshake", "message"],
)
def test_a_peer_that_waits_for_its_turn_is_not_given_up(bounds: ServerBounds) -> None:
    """Catches: of many tasks that connect again to a busy process, some were dropped before it heard them."""
    now_ms = 0.0
    with serving(bounds, clock=lambda: now_ms) as found, Raw(found) as peer:
        if bounds.greeting_ms:
            peer.shake_hands(opening())
        else:
            peer.plain.sendall(b"x")
        with Raw(found) as silent:
            until(lambda: found.connections() == 2 and found.waiting() == 1)
            now_ms = SHORT.frame_ms + 1
            assert is_closed(silent), "its time is over"
        assert found.connections() == 1


def test_a_peer_that_drips_is_given_up_though_it_has_turns() -> None:
    """Catches: a time that begins anew with each turn."""
    now_ms = 0.0
    with serving(replace(SHORT, frame_ms=2_000), clock=lambda: now_ms) as found, Raw(found) as peer:
        peer.shake_hands(opening() + framed(HELLO) + b"\0\0\x7f\xff")
        until(lambda: found.echoes)

        def drip() -> bool:
            nonlocal now_ms
            now_ms += 100.0
            with contextlib.suppress(OSError):
                peer.socket.sendall(b"\0")
            return found.connections() == 0

        until(drip, poll_s=0.05)


def test_the_time_in_which_a_peer_waits_for_its_turn_does_not_count() -> None:
    """Catches: it was given up right after its turn."""
    now_ms = until_ms = 0.0

    def clock() -> float:
        """While it runs, no iteration has time for a turn."""
        nonlocal now_ms
        now_ms = min(now_ms + 50.0, until_ms)
        return now_ms

    bounds = ServerBounds(frame_ms=2_000, silence_ms=10_000, sweep_ms=50)
    with (
        serving(bounds, clock=clock) as found,
        tasks(found, 2, None) as (idle, other),
        Raw(found) as peer,
    ):
        until(lambda: found.connections() == 3)
        with found.busy():
            peer.plain.sendall(b"\x16")
            until_ms = 9_000.0
        until(lambda: now_ms == until_ms)
        assert asked(other, Alive()) == Alive()
        until_ms = 10_500.0
        assert is_closed(idle), "its time is over"
        assert asked(other, Alive()) == Alive(), "it has been heard since"
        assert found.connections() == 2


def test_peers_that_leave_while_they_wait_for_their_turn_do_no_harm() -> None:
    """Catches: its turn read from the descriptor, which was another connection's by then."""
    with serving(replace(PATIENT, messages_at_once=1)) as found:
        for _ in range(tries(300)):
            with task(found) as one:
                one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.socket.sendall(framed(Said(1)) * 100)
        assert works(found)
        until(lambda: found.connections() == 0)


def test_each_message_has_its_own_time() -> None:
    """Catches: who sent the end of each message with the beginning of the next was given up."""
    now_ms, message = 0.0, framed(Alive())
    bounds = replace(SHORT, burst=1e9)
    with serving(bounds, clock=lambda: now_ms) as found, Raw(found) as peer, Raw(found):
        peer.shake_hands(opening() + message[:2])
        until(lambda: found.connections() == 2)
        while found.connections() == 2:  # until the silent one is given up
            now_ms += 10.0
            peer.socket.sendall(message[2:] + message[:2])
            assert peer.socket.recv(100)
        peer.socket.sendall(message[2:])
        assert peer.socket.recv(100)


# -- groups -----------------------------------------------------------------------------------------------


def test_tasks_share_an_instance_by_group_settings_and_cluster() -> None:
    age = {"kafka.metadata.max.age.ms": "1000"}
    another = Hello("another", "a-cluster", {})
    hellos = [HELLO, HELLO, another, Hello(HELLO.group, "b", {}), structs.replace(HELLO, settings=age)]
    with serving() as found, ExitStack() as stack:
        for hello in hellos:
            assert asked(stack.enter_context(task(found, hello)), Said(1)) == Said(1)
        assert [len(one.tasks) for one in found.echoes] == [2, 1, 1, 1]
        assert found.echoes[3].options.metadata_max_age_ms == 1000
        assert found.echoes[0].options.metadata_max_age_ms == 300_000
        assert found.echoes[0].options is found.echoes[1].options, "not parsed for each of 10,000 tasks"


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


def test_peers_without_hello_or_with_unknown_settings_are_dropped() -> None:
    wrong = {"kafka.sasl.password": "x"}, {"kafka.metadata.max.age.ms": "soon"}, {"topic": "t"}
    with serving() as found:
        for settings in wrong:
            with task(found, structs.replace(HELLO, settings=settings)) as one:
                assert is_closed(one), settings
        with tasks(found, 1, None) as (one,):
            one.send(Said(1))
            assert is_closed(one)
        assert not found.echoes


def test_groups_are_bounded_and_the_longest_unused_goes() -> None:
    bounds = replace(PATIENT, burst=10_000, instances=3)
    with serving(bounds) as found, task(found) as kept, task(found, None) as one:
        assert asked(kept, Said(0)) == Said(0)
        for number in range(20):
            one.send(Hello(str(number), "", {}))
            assert asked(one, Said(number)) == Said(number)
        closed = [echo.closed for echo in found.echoes]
        assert closed == [0, *[1] * 18, 0, 0]
        assert asked(kept, Said(1)) == Said(1)


class OfGroup(Echo):
    scope = ServiceScope.GROUP


def test_services_of_a_cluster_end_soon_after_its_last_task() -> None:
    """Catches: a task that named ever new clusters and left filled the memory for ten minutes."""
    made: dict[type[Echo], Echo] = {}

    def make(kind: type[Echo], options: SinkOptions, out: Outbox) -> Echo:
        return made.setdefault(kind, kind(options, out))

    now_ms = 0.0
    services: Services = {kind: partial(make, kind) for kind in (Echo, OfGroup)}
    with serving(replace(PATIENT, frame_ms=400), services, lambda: now_ms) as found:
        with task(found):
            until(lambda: len(made) == 2)
        until(lambda: all(one.gone for one in made.values()))
        now_ms = 6_000.0
        until(lambda: made[Echo].closed)
        assert not made[OfGroup].closed
        now_ms = 601_000.0
        until(lambda: made[OfGroup].closed)


# -- the time of a service --------------------------------------------------------------------------------


class Timed(Service):
    """Due once, so many milliseconds after its first message as that is long; length 1 fails at first.
    ``heard_before``: messages before that."""

    scope = ServiceScope.APPLICATION

    def __init__(self, out: Outbox) -> None:
        super().__init__(out)
        self.heard, self.due_ms, self.times = 0, math.inf, 0
        self.fails = False
        self.heard_before: int | None = None

    @receives(Shout)
    def on_shout(self, peer: int, message: Shout, now_ms: float) -> None:
        self.due_ms = min(self.due_ms, now_ms + message.length)
        self.fails = message.length == 1
        self.heard += 1

    def on_time(self, now_ms: float) -> None:
        self.times += 1
        if self.fails and self.times == 1:
            raise ZeroDivisionError
        self.heard_before = self.heard

    def next_change_ms(self, now_ms: float) -> float:
        return math.inf if self.heard_before is not None else max(0.0, self.due_ms - now_ms)


@contextmanager
def timed(count: int) -> Iterator[tuple[Serving, list[Timed], list[Connection]]]:
    """A server that takes one message at a time, its service, and connected tasks."""
    made, services = recorded(Timed)
    with (
        serving(replace(PATIENT, messages_at_once=1), services) as found,
        tasks(found, count, None) as connected,
    ):
        yield found, made, connected


def test_a_service_that_fails_at_its_time_gets_it_again_later(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_AFTER_BUG_S", 0.05)
    with timed(1) as (_, made, (one,)):
        one.send(Shout(1))
        until(lambda: made and made[0].times == 2)
    assert caplog.text.count("a service failed") == 1


def test_a_service_gets_its_time_however_many_messages_come() -> None:
    """Each message of an iteration set a timer anew that was due, and timers come last in an iteration."""
    with timed(20) as (found, made, connected):
        with found.busy():
            for one in connected:
                one.send(Shout(0))
        until(lambda: made and made[0].heard == len(connected))
        until(lambda: made[0].heard_before is not None)
        assert made[0].heard_before is not None
        assert made[0].heard_before <= 3


def test_messages_from_a_stall_are_read_before_a_service_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: after a stall the first answer decided for all, and a loop always late never decides."""
    # A busy machine may take long to read them.
    monkeypatch.setattr(server, "_READ_FIRST_S", 1.0)
    with timed(10) as (found, made, connected):
        connected[0].send(Shout(1_000))
        until(lambda: made and made[0].heard)
        with found.busy():
            for one in connected[1:]:
                one.send(Shout(1_000))
            time.sleep(1.3)
        until(lambda: made[0].heard == len(connected))
        with found.busy():
            time.sleep(1.3)
        until(lambda: made[0].heard_before is not None)
        assert made[0].heard_before == len(connected)
