"""The server and the client over loopback: who is let in, what is bounded, what a task suffers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import json
import logging
import math
import os
import socket
import threading
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kafka_sink.coordinator.client.client import CoordinatorClient
from kafka_sink.coordinator.transport import connections
from kafka_sink.coordinator.transport.connections import ServerBounds
from kafka_sink.coordinator.transport.handlers import SharedBody, with_facts
from kafka_sink.coordinator.transport.loop_watch import LoopWatch
from kafka_sink.coordinator.transport.message_format import unpacked
from kafka_sink.coordinator.transport.peer_connection import encode_message
from kafka_sink.coordinator.transport.server import CoordinatorServer
from kafka_sink.coordinator.transport.session import MAX_FRAME_BYTES, FrameReader, Session
from kafka_sink.errors import ProtocolError
from tests.support.coordinator_harness import KEY, SECRET, Serving, clock_ms, eventually, serving
from tests.support.recording_channel import RecordingChannel, client_of

# For peers that prove nothing, and for peers that do and are as slow as a busy machine.
SHORT = ServerBounds(challenge_ms=200, silence_ms=60_000)
PATIENT = ServerBounds(challenge_ms=60_000, frame_ms=60_000, silence_ms=60_000)


class Raw:
    """A peer that knows the protocol but need not keep to it."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.frames = FrameReader(MAX_FRAME_BYTES)
        self.session = Session(SECRET, "client")

    def frame(self) -> bytes:
        while (frame := self.frames.next_frame()) is None:
            data = self.socket.recv(65536)
            if not data:
                raise EOFError
            self.frames.feed(data)
        return frame

    def prove(self, cluster: str = KEY) -> Raw:
        self.socket.sendall(self.session.reply_to_greeting(self.frame()))
        self.session.verify_proof(self.frame())
        self.tell({"cluster": cluster})
        return self

    def tell(self, message: dict[str, Any]) -> None:
        self.socket.sendall(self.session.encode(message))

    def ask(self, body: dict[str, Any]) -> Any:
        self.tell({"id": 1, "kind": "echo", "body": body})
        return self.session.decode(self.frame())["body"]

    def is_closed(self) -> bool:
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionError:
            pass
        return True


@contextmanager
def raw(port: int) -> Iterator[Raw]:
    peer = Raw(port)
    try:
        yield peer
    finally:
        peer.socket.close()


def works(found: Serving) -> bool:
    with raw(found.port) as peer:
        return bool(peer.prove().ask({"n": 1}) == {"n": 1})


def test_who_knows_the_secret_is_answered() -> None:
    with serving() as found:
        assert works(found)
        eventually(lambda: found.echo.gone)


def test_a_wrong_secret_is_turned_away() -> None:
    with serving() as found, raw(found.port) as peer:
        peer.session = Session(b"wrong" * 6, "client")
        peer.socket.sendall(peer.session.reply_to_greeting(peer.frame()))
        assert peer.is_closed()
        assert works(found)


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 600, b"\0\0\0\x20" + b"x" * 32]
)
def test_garbage_ends_only_its_own_connection(garbage: bytes) -> None:
    with serving() as found, raw(found.port) as peer:
        peer.socket.sendall(garbage)
        assert peer.is_closed()
        assert works(found)


def test_silence_instead_of_a_proof_is_bounded() -> None:
    with serving(SHORT) as found, raw(found.port) as peer:
        assert peer.is_closed()
        eventually(lambda: found.connections() == 0)


def test_a_frame_that_never_ends_is_bounded_in_time() -> None:
    with serving(replace(PATIENT, frame_ms=200)) as found, raw(found.port) as peer:
        peer.prove().socket.sendall(b"\0\0\1\0abc")
        assert peer.is_closed()
        eventually(lambda: found.connections() == 0)


def test_an_oversized_frame_is_refused_by_its_length() -> None:
    with serving() as found, raw(found.port) as peer:
        peer.prove().socket.sendall((ServerBounds().request_bytes + 1).to_bytes(4, "big"))
        assert peer.is_closed()


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"id": 1, "kind": "nobody's", "body": {}},
        {"id": 1, "kind": "echo", "body": []},
        {"id": "x", "kind": "echo"},
    ],
)
def test_messages_that_make_no_sense_end_the_connection(message: dict[str, Any]) -> None:
    with serving() as found, raw(found.port) as peer:
        peer.prove().tell(message)
        assert peer.is_closed()
        assert not found.echo.heard


def test_an_unknown_cluster_is_not_served() -> None:
    with serving() as found, raw(found.port) as peer:
        peer.prove("another")
        assert peer.is_closed()


def test_a_cluster_that_nobody_is_connected_for_rests_and_comes_back() -> None:
    with serving(replace(PATIENT, frame_ms=2_000, cluster_idle_ms=100)) as found:
        with raw(found.port) as peer:
            assert peer.prove().ask({"n": 1}) == {"n": 1}
            time.sleep(1.3)  # longer than the server's sweep takes to come
            assert peer.ask({"n": 2}) == {"n": 2}
            assert not found.echo.closed
        eventually(lambda: found.echo.closed == 1)
        assert works(found)


def test_what_a_peer_says_after_it_had_to_go_is_not_heard() -> None:
    """Otherwise a handler would keep it for ever, as it hears only once that a task has gone."""
    bounds = replace(PATIENT, unread_bytes=100_000)
    with serving(bounds) as found, raw(found.port) as peer:
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.prove()
        message = {"id": 1, "kind": "echo", "body": {"bytes": 3_500_000}}
        # In one piece, so that the last ones lie there when the first ones are not read.
        peer.socket.sendall(b"".join(peer.session.encode(message) for _ in range(12)))
        eventually(lambda: found.connections() == 0 and found.echo.gone)
        time.sleep(0.1)
        assert 1 <= len(found.echo.heard) < 12
        assert len(found.echo.gone) == 1


def test_a_peer_that_does_not_read_is_dropped() -> None:
    bounds = replace(PATIENT, frame_ms=200, unread_bytes=8 * 1024 * 1024)
    with serving(bounds) as found, raw(found.port) as peer:
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.prove()
        message = {"id": 1, "kind": "echo", "body": {"bytes": 1_500_000}}
        # In one piece, because it may be dropped before the last one.
        peer.socket.sendall(b"".join(peer.session.encode(message) for _ in range(5)))
        eventually(lambda: found.connections() == 0)


def test_a_peer_that_reads_slowly_is_not_dropped() -> None:
    """Catches: tasks that lose their connection because their topics take long to read."""
    bounds = replace(PATIENT, frame_ms=400, unread_bytes=64 * 1024 * 1024)
    now_ms = 0.0
    with serving(bounds, clock=lambda: now_ms) as found, raw(found.port) as peer:
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        peer.prove()
        for _ in range(3):
            peer.tell({"id": 1, "kind": "echo", "body": {"bytes": 3_500_000}})
        read = 0
        while read < 10_500_000:
            data = peer.socket.recv(65536)
            assert data, f"dropped after {read} bytes"
            read += len(data)
            # The server's clock goes on with what is read, however long that takes: twice frame_ms in all.
            now_ms += len(data) / 13_000
            time.sleep(0.012)
        assert now_ms > 2 * bounds.frame_ms


def test_a_thousand_silent_connections_do_not_keep_a_task_out() -> None:
    bounds = ServerBounds(unproved=256)
    with serving(bounds) as found:
        crowd = [socket.create_connection(("127.0.0.1", found.port), timeout=5) for _ in range(1000)]
        try:
            assert works(found)
            assert found.connections() <= bounds.unproved + 1
        finally:
            for one in crowd:
                one.close()


def test_of_those_that_have_proved_nothing_any_one_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: the oldest of an address went, which may be an executor in the middle of its challenge."""
    monkeypatch.setattr(connections, "RANDOM", Random(5))
    gone: set[int] = set()
    for _ in range(5):
        with serving(replace(PATIENT, unproved=3)) as found, contextlib.ExitStack() as stack:
            peers = [stack.enter_context(raw(found.port)) for _ in range(4)]
            eventually(lambda found=found: found.server is not None and found.server._count == 4)
            assert found.connections() == 3
            assert peers[3].prove().ask({"n": 1}) == {"n": 1}
            assert found.server is not None
            kept = {peer.number for peer in found.server._connections._unproved.values()}
            gone |= {1, 2, 3} - kept
    assert len(gone) > 1


def test_frames_that_have_begun_are_bounded_over_all_peers() -> None:
    bounds = replace(PATIENT, unfinished_bytes=1_000_000)
    with serving(bounds) as found, raw(found.port) as one, raw(found.port) as other, raw(found.port) as third:
        for peer in (one, other, third):
            peer.prove()
        one.socket.sendall((1_500_000).to_bytes(4, "big") + bytes(600_000))
        other.socket.sendall((1_500_000).to_bytes(4, "big") + bytes(600_000))
        # One of the two goes, the bytes that it held with it: the third may send as many.
        eventually(lambda: found.connections() == 2)
        filler = "x" * 300_000
        assert third.ask({"filler": filler}) == {"filler": filler}


def test_a_client_sends_and_receives_late_replies_too() -> None:
    with (
        serving() as found,
        client_of(found.address) as (client, talker),
        client_of(found.address) as (two, other),
    ):
        talker.to_tell.append({"later": True})
        client.wake()
        eventually(lambda: talker.replies == [({"pending": 1}, False)])
        other.to_tell.append({"n": 7})
        two.wake()
        eventually(lambda: talker.replies[1:] == [({"n": 7}, True)])
        assert other.replies == [({"n": 7}, True)]


def test_one_tasks_message_is_pushed_to_others() -> None:
    with (
        serving() as found,
        client_of(found.address) as (client, talker),
        client_of(found.address) as (two, other),
    ):
        talker.to_tell.append({"later": True})
        client.wake()
        eventually(lambda: talker.replies)
        other.to_tell.append({"shout": "news"})
        two.wake()
        eventually(lambda: talker.pushes == [{"shout": "news"}])
        assert not other.pushes
        eventually(lambda: other.replies == [({}, True)])


def test_a_channel_with_a_bug_costs_its_connection_and_no_task(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as found, client_of(found.address) as (client, talker):
        talker.replies = None  # type: ignore[assignment]  # on_reply raises
        talker.to_tell.append({"n": 1})
        client.wake()
        eventually(lambda: "lost" in talker.events)
        talker.replies = []
        eventually(lambda: talker.events == ["connected", "lost", "connected"])
        client.wake()
    assert len([line for line in caplog.messages if "coordinator" in line]) == 1


def test_a_coordinator_that_never_responds_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING),
        socket.create_server(("127.0.0.1", 0)) as frozen,
        client_of(Serving(frozen.getsockname()[1]).address, silence_ms=50) as (_client, talker),
    ):
        eventually(lambda: talker.events.count("lost") >= 2)
    assert len([line for line in caplog.messages if "coordinator" in line]) == 1
    assert "connected" not in talker.events


def test_a_client_takes_no_response_from_who_does_not_know_the_secret() -> None:
    with serving() as found:
        address = replace(found.address, rendezvous=replace(found.address.rendezvous, secret=b"x" * 32))
        with client_of(address) as (_client, talker):
            eventually(lambda: "lost" in talker.events)
            assert "connected" not in talker.events


def test_a_client_comes_back_to_a_coordinator_that_closed_its_connection() -> None:
    now_ms = 0.0
    bounds = ServerBounds(silence_ms=1_000)
    with serving(bounds, clock=lambda: now_ms) as found, client_of(found.address) as (client, talker):
        talker.to_tell.append({"n": 1})
        client.wake()
        eventually(lambda: talker.replies)
        now_ms += 1_001
        eventually(lambda: talker.events[:3] == ["connected", "lost", "connected"])


def test_a_client_that_is_taken_in_and_then_turned_away_comes_back_ever_later() -> None:
    """Its cluster is not served: each connection is made, and ends before anything was said."""
    with serving() as found:
        address = replace(found.address, rendezvous=replace(found.address.rendezvous, cluster="another"))
        with client_of(address) as (client, talker):
            eventually(lambda: talker.events.count("lost") >= 2)
            assert client._failures == 2
            assert client._connect_after_ms - clock_ms() > 1200


def test_who_knows_no_secret_but_saw_a_challenge_is_turned_away() -> None:
    """A whole conversation, sent again byte by byte to the same coordinator."""
    with serving() as found:
        with raw(found.port) as peer:
            proof = peer.session.reply_to_greeting(peer.frame())
            peer.socket.sendall(proof)
            peer.session.verify_proof(peer.frame())
            rest = [peer.session.encode({"cluster": KEY})]
            rest += [peer.session.encode({"id": 1, "kind": "echo", "body": {"n": 1}})]
            peer.socket.sendall(b"".join(rest))
            peer.frame()
        assert len(found.echo.heard) == 1
        with raw(found.port) as again:
            again.socket.sendall(b"".join([proof, *rest]))
            assert again.is_closed()
        assert len(found.echo.heard) == 1


@pytest.mark.parametrize(
    "says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4, bytes(64), b"\0\0\0\x20" + b"x" * 32, None]
)
def test_another_process_at_the_coordinators_port_is_not_taken_for_it(says: bytes | None) -> None:
    """It says nothing and closes, says something else, or (None) whatever it hears."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = Serving(other.getsockname()[1]).address

        def serve() -> None:
            with other.accept()[0] as peer:
                peer.settimeout(2)
                if says is not None:
                    peer.sendall(says)
                    return
                peer.sendall(Session(b"another" * 4, "server").greeting())
                peer.sendall(peer.recv(65536))
                peer.recv(1)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with client_of(address, silence_ms=1000) as (_client, talker):
            eventually(lambda: "lost" in talker.events)
            assert "connected" not in talker.events
        thread.join(5)


def test_what_nobody_reads_is_bounded_over_all_peers() -> None:
    bounds = replace(PATIENT, unread_bytes=64 * 1024 * 1024, unread_bytes_of_all=20_000_000)
    with serving(bounds) as found, contextlib.ExitStack() as stack:
        peers = [stack.enter_context(raw(found.port)) for _ in range(10)]
        for number, peer in sorted(enumerate(peers), key=lambda one: one[0] != 3):
            peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.prove()
            for _ in range(2 + (number == 3)):
                peer.tell({"id": 1, "kind": "echo", "body": {"bytes": 3_900_000}})
            # Each has its own before the next, so that the one with three has most when they are too many.
            eventually(lambda: len(found.echo.heard) >= 3)
        eventually(lambda: found.echo.gone)
        # Who has most unread goes first; the others stay.
        eventually(lambda: found.connections() < 10)
        assert works(found)
        assert found.connections() >= 2
        assert 4 in found.echo.gone


def test_a_resting_client_does_not_come_back_before_the_next_task(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a failure would cost: more than the test waits.
    monkeypatch.setattr("kafka_sink.coordinator.client.client._BACKOFF_MS", 60_000.0)
    monkeypatch.setattr("kafka_sink.coordinator.client.client._BACKOFF_MAX_MS", 60_000.0)
    now_ms = 0.0
    bounds = ServerBounds(silence_ms=1_000)
    with serving(bounds, clock=lambda: now_ms) as found, client_of(found.address) as (client, talker):
        talker.to_tell.append({"n": 1})
        client.wake()
        eventually(lambda: talker.replies)
        client.pause()
        now_ms += 1_001
        eventually(lambda: found.connections() == 0)
        client.resume()
        eventually(lambda: talker.events.count("connected") == 2)
    assert not [line for line in caplog.messages if "coordinator" in line]


def test_what_a_task_reports_at_its_end_is_sent_though_it_ended_before_the_client_connected() -> None:
    with serving() as found:
        talker = RecordingChannel()
        client = CoordinatorClient(found.address, [talker], clock_ms)
        client.resume()
        talker.to_tell.append({"n": 1})
        client.pause()
        client.start()
        try:
            eventually(lambda: talker.replies, within_s=60)
        finally:
            client.close()
            client.join(60)


def test_a_task_that_has_ended_tries_once_to_reach_the_coordinator() -> None:
    """Catches: the client's thread tries again and again while no task runs."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    client = CoordinatorClient(Serving(port).address, [RecordingChannel()], clock_ms)
    client.resume()
    client.pause()
    with pytest.raises(OSError, match="refused"):
        client._run_once()
    assert client._delay_ms(None, clock_ms()) == math.inf
    assert not client._leaving
    client.close()
    client._wake_reader.close()


@pytest.mark.parametrize(
    ("secret", "expected"), [(b"wrong" * 6, "did not prove that they know"), (None, "did not prove in time")]
)
def test_refused_proofs_and_dropped_connections_are_logged(
    secret: bytes | None, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    now_ms = 0.0
    with caplog.at_level(logging.WARNING), serving(SHORT, clock=lambda: now_ms) as found:
        with raw(found.port) as peer:
            greeting = peer.frame()
            if secret is not None:
                peer.session = Session(secret, "client")
                peer.socket.sendall(peer.session.reply_to_greeting(greeting))
            else:
                now_ms += 201
            assert peer.is_closed()
        assert works(found)
        eventually(lambda: any(expected in line for line in caplog.messages))
    (line,) = [line for line in caplog.messages if "connections dropped" in line]
    assert "127.0.0.1" in line


def test_a_peer_may_prove_itself_after_the_server_stood_still() -> None:
    now_ms = 0.0
    watch = LoopWatch(lambda: now_ms)
    with (
        serving(ServerBounds(challenge_ms=1_000), clock=lambda: now_ms, watch=watch) as found,
        contextlib.ExitStack() as stack,
    ):
        peers = [stack.enter_context(raw(found.port))]
        server = found.server
        assert server is not None
        for others in range(2, 4):
            watch.turn_begins(now_ms, now_ms + 10_000.0, 0.0)
            now_ms += 10_000.0
            peers.append(stack.enter_context(raw(found.port)))
            eventually(lambda others=others: server.state()["connections"]["unproved"] == others)  # type: ignore[misc]
        for peer in peers:
            assert peer.prove().ask({"n": 1}) == {"n": 1}


def test_a_flood_from_one_address_keeps_no_task_of_another_out() -> None:
    """Catches: connections without proof that are closed by age alone, whatever their addresses."""
    bounds = replace(PATIENT, unproved=8)
    with serving(bounds) as found, contextlib.ExitStack() as stack:
        slow = stack.enter_context(raw(found.port))
        flood = [
            stack.enter_context(
                socket.create_connection(("127.0.0.1", found.port), 5, source_address=("127.0.0.2", 0))
            )
            for _ in range(100)
        ]
        eventually(lambda: found.server is not None and found.server._count == 101)
        assert found.connections() == 8
        assert slow.prove().ask({"n": 1}) == {"n": 1}
        assert flood


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
            server = CoordinatorServer(SECRET, {}, clock_ms, PATIENT)
            await server.start(listening)
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
            await asyncio.sleep(0.01)

    asyncio.run(serve())


def test_one_address_makes_only_so_many_connections_in_a_second(caplog: pytest.LogCaptureFixture) -> None:
    bounds = replace(PATIENT, new_of_one_address=20)
    with caplog.at_level(logging.WARNING), serving(bounds) as found, contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(
                socket.create_connection(("127.0.0.1", found.port), 5, source_address=("127.0.0.2", 0))
            )
        assert works(found)
        # Twenty in each second that a slow machine takes.
        assert found.connections() <= 160
        eventually(lambda: any("one address may open in a second" in line for line in caplog.messages))


def test_a_task_is_never_dropped_for_who_has_proved_nothing(caplog: pytest.LogCaptureFixture) -> None:
    bounds = replace(PATIENT, connections=3)
    with caplog.at_level(logging.WARNING), serving(bounds) as found, contextlib.ExitStack() as stack:
        tasks = [stack.enter_context(raw(found.port)).prove() for _ in range(3)]
        for task in tasks:
            assert task.ask({"n": 1}) == {"n": 1}
        for _ in range(5):
            assert stack.enter_context(raw(found.port)).is_closed()
        for task in tasks:
            assert task.ask({"n": 2}) == {"n": 2}
        eventually(lambda: any("all connections are in use by tasks" in line for line in caplog.messages))


def test_a_peer_that_sends_too_much_is_read_from_later_and_loses_nothing() -> None:
    bounds = ServerBounds(messages_per_s=50.0)
    with serving(bounds) as found, raw(found.port) as peer:
        peer.prove()
        started = time.monotonic()
        messages = [{"id": number, "kind": "echo", "body": {"n": number}} for number in range(100)]
        peer.socket.sendall(b"".join(peer.session.encode(one) for one in messages))
        received = [peer.session.decode(peer.frame())["body"]["n"] for _ in messages]
        assert received == list(range(100))
        assert time.monotonic() - started > 0.8


def test_a_body_for_many_peers_is_in_memory_once() -> None:
    """Catches: a copy of all topics' metadata for each of a thousand tasks that do not read."""
    shared = SharedBody({"topics": ["x" * 1000] * 1000}, 0.0)
    parts = [
        encode_message({"kind": "metadata", "id": number}, with_facts({"n": number}, shared))
        for number in range(3)
    ]
    assert len({id(rest) for _, rest in parts}) == 1
    for number, (start, rest) in enumerate(parts):
        assert len(start) < 100
        message = json.loads(start + rest)
        assert (message["kind"], message["id"]) == ("metadata", number)
        assert unpacked(message["body"]) == {"n": number, "topics": ["x" * 1000] * 1000}
    for body in (
        {},
        {"a": 1},
        SharedBody({}, 0.0),
        with_facts({}, shared),
        with_facts({"a": 1}, SharedBody({}, 0.0)),
    ):
        assert unpacked(json.loads(b"".join(encode_message({"kind": "x"}, body)))["body"]) == dict(body)


def test_a_body_that_unpacks_to_far_more_than_any_metadata_is_refused() -> None:
    """Catches: 64 KiB that became 64 MiB of JSON, and ten times that as objects."""
    bomb = zlib.compress(b'{"topics":[' + b"0," * 8_000_000 + b"0]}", 1)
    body = {"packed": base64.b64encode(bomb).decode()}
    del bomb
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="too large"):
            unpacked(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 25 * 2**20


def test_the_largest_snapshot_unpacks() -> None:
    names = [f"{number:05}".ljust(249, "x") for number in range(5_000)]
    topics = [[name, "f" * 32, 123456.789012, [[2**31 - 1, 2**31 - 1]] * 10] for name in names]
    nodes = [[number, f"{number}".ljust(255, "h"), 9092, "r" * 300] for number in range(5_000)]
    shared = SharedBody({"topics": topics, "nodes": nodes}, 0.0)
    start, rest = encode_message({"kind": "metadata"}, shared)
    assert unpacked(json.loads(start + rest)["body"])["topics"] == topics
