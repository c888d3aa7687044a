"""The relay of an executor's workers: one connection for all, and nothing lost where it fails."""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kafka_sink.coordinator.client import executor_relay, relay
from kafka_sink.coordinator.client.client import CoordinatorClient
from kafka_sink.coordinator.client.executor_relay import ExecutorRelay
from kafka_sink.coordinator.client.relay import RelayFolder
from kafka_sink.coordinator.transport.connection import CoordinatorConnection
from kafka_sink.coordinator.transport.group import Group, Groups, ToTask
from kafka_sink.coordinator.transport.handlers import SharedBody
from kafka_sink.errors import ProtocolError
from tests.support.coordinator_harness import Serving, clock_ms, eventually, serving
from tests.support.ports import refusing_port
from tests.support.recording_channel import RecordingChannel, client_of

ROOT = Path(__file__).resolve().parents[3]
# Another worker of the executor: connects, says hello, and waits.
WORKER = """
import sys, time
sys.path.insert(0, {root!r})
from kafka_sink.coordinator.client import executor_relay
from kafka_sink.coordinator.client.executor_relay import ExecutorRelay
from kafka_sink.coordinator.transport.address import CoordinatorAddress, Rendezvous
executor_relay._CHALLENGE_MS = 20_000.0
clock = lambda: time.monotonic() * 1000
address = CoordinatorAddress("127.0.0.1", Rendezvous({port}, {cluster!r}, {secret!r}))
connection = ExecutorRelay(address, 20_000.0, clock).connect()
connection.send("echo", {{"n": 0}}, clock())
connection.receive(clock())
print(connection.is_relayed, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def _relays_may_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_relay, "_CHALLENGE_MS", 20_000.0)


@contextmanager
def worker(found: Serving) -> Iterator[subprocess.Popen[str]]:
    """A worker's process, which was served."""
    rendezvous = found.address.rendezvous
    code = WORKER.format(
        root=str(ROOT), port=rendezvous.port, cluster=rendezvous.cluster, secret=rendezvous.secret
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def tell(one: tuple[CoordinatorClient, RecordingChannel], body: dict[str, Any]) -> None:
    one[1].to_tell.append(body)
    one[0].wake()


def connected(found: Serving) -> CoordinatorConnection:
    return ExecutorRelay(found.address, 20_000.0, clock_ms).connect()


def test_all_tasks_share_one_connection_and_each_gets_its_own_replies() -> None:
    with serving() as found, ExitStack() as stack:
        clients = [stack.enter_context(client_of(found.address)) for _ in range(8)]
        for number, one in enumerate(clients):
            tell(one, {"n": number})
        for number, (_, talker) in enumerate(clients):
            eventually(lambda talker=talker, number=number: talker.replies == [({"n": number}, True)])  # type: ignore[misc]
        assert found.connections() == 1


def test_a_worker_of_another_process_uses_the_relay_and_is_missed_when_it_is_killed() -> None:
    with serving() as found, client_of(found.address) as one:
        tell(one, {"n": 1})
        eventually(lambda: one[1].replies)
        with worker(found) as process:
            assert found.connections() == 1
            assert not found.echo.gone
            process.kill()
            eventually(lambda: len(found.echo.gone) == 1)
        tell(one, {"n": 2})
        eventually(lambda: len(one[1].replies) == 2)
        assert found.connections() == 1


def test_when_the_relays_worker_is_killed_its_tasks_connect_again_without_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: the backoff after a failure, which here is longer than the test waits."""
    monkeypatch.setattr("kafka_sink.coordinator.client.client._BACKOFF_MS", 60_000.0)
    monkeypatch.setattr("kafka_sink.coordinator.client.client._BACKOFF_MAX_MS", 60_000.0)
    with serving() as found, worker(found) as process, client_of(found.address) as one:
        tell(one, {"n": 1})
        eventually(lambda: one[1].replies)
        assert found.connections() == 1
        process.kill()
        eventually(lambda: one[1].events[:3] == ["connected", "lost", "connected"])
        tell(one, {"n": 2})
        eventually(lambda: len(one[1].replies) == 2)
        # The survivor is the relay now.
        with worker(found):
            assert found.connections() == 1
    assert not [line for line in caplog.messages if "coordinator" in line]


def test_a_frozen_relay_costs_a_moment_and_no_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as found, worker(found) as process, client_of(found.address, silence_ms=2000) as one:
        tell(one, {"n": 1})
        eventually(lambda: one[1].replies)
        # The task finds out by the relay's challenge, which it waits for no longer than this.
        monkeypatch.setattr(executor_relay, "_CHALLENGE_MS", 100.0)
        os.kill(process.pid, signal.SIGSTOP)
        try:
            tell(one, {"n": 2})
            eventually(lambda: one[1].events.count("connected") == 2)
            tell(one, {"n": 3})
            eventually(lambda: len(one[1].replies) == 2)
            assert found.connections() == 2
            # A task that starts now waits for the challenge, too.
            started = time.monotonic()
            late = connected(found)
            assert not late.is_relayed
            assert time.monotonic() - started < 15, "it took the time that a coordinator has"
            late.close()
        finally:
            os.kill(process.pid, signal.SIGCONT)
    assert not [line for line in caplog.messages if "coordinator" in line]


class Asking(Group):
    """Asks the coordinator for each of its tasks, which it answers itself."""

    kind = "echo"

    def __init__(self) -> None:
        super().__init__()
        self.asks: list[Mapping[str, Any]] = []
        self.replies = 0

    def on_task(self, task: int, request: int, body: Mapping[str, Any], now_ms: float) -> bool:
        self.asks.append(body)
        self.outgoing.append(ToTask(task, request, body))
        return True

    def due_ms(self, now_ms: float) -> float:
        return -math.inf if self.asks else math.inf

    def next_message(self, now_ms: float) -> Mapping[str, Any] | None:
        return self.asks.pop() if self.asks else None

    def on_reply(self, body: Mapping[str, Any], took_ms: float, now_ms: float) -> None:
        self.replies += 1


def test_a_relay_that_stood_still_does_not_take_the_coordinator_for_silent() -> None:
    """Catches: a relay that was stopped for 2 s let all its tasks go, with the reply in its socket."""
    stood_ms, group = 0.0, Asking()
    with serving() as found:
        way = ExecutorRelay(found.address, 20_000.0, lambda: clock_ms() + stood_ms, [lambda: group])
        one = way.connect()
        with found.busy():
            one.send("echo", {"n": 1}, clock_ms())
            one.receive(clock_ms())
            eventually(lambda: not group.asks)
            stood_ms += 25_000.0
            one.send("echo", {"n": 2}, clock_ms())
            assert one.receive(clock_ms())[0].body == {"n": 2}
        eventually(lambda: group.replies == 2)
        one.close()


def test_a_task_that_stood_still_does_not_take_the_coordinator_for_silent() -> None:
    stood_ms = 0.0
    with serving() as found:
        talker = RecordingChannel()
        client = CoordinatorClient(found.address, [talker], lambda: clock_ms() + stood_ms, 20_000.0)
        client.start()
        client.resume()
        try:
            eventually(lambda: talker.events == ["connected"])
            with found.busy():
                tell((client, talker), {"n": 1})
                eventually(lambda: not talker.to_tell)
                stood_ms += 25_000.0
                client.wake()
            eventually(lambda: talker.replies)
            assert talker.events == ["connected"]
        finally:
            client.close()
            client.join(20)


def test_who_stands_still_again_and_again_gives_a_silent_coordinator_up() -> None:
    """Catches: a busy worker that was late for half a second now and then kept a dead connection for ever."""
    group = Asking()
    with serving() as found:
        one, groups = CoordinatorConnection(found.address, 2000.0, clock_ms), Groups([group], 0.0)
        one.send("echo", {}, 0.0)
        groups.on_task(1, {"kind": "echo", "id": 1, "body": {}}, 0.0)
        sent = list(groups.messages(0.0))
        for turn in range(1, 100):
            one.wait_anew(1900.0 * turn)
            groups.wait_anew(1900.0 * turn)
        assert one.silent_at_ms < 10_000
        assert groups.unheard_since_ms() < 10_000
        # One that responds may be waited for anew.
        one.receive(200_000.0)
        one.send("echo", {}, 200_000.0)
        one.wait_anew(201_000.0)
        assert one.silent_at_ms == 203_000
        groups.on_coordinator({"id": len(sent), "body": {}}, 200_000.0)
        groups.hear(200_000.0)
        group.asks.append({})
        assert list(groups.messages(200_000.0))
        groups.wait_anew(201_000.0)
        assert groups.unheard_since_ms() == 201_000
        one.close()


class Answering(Asking):
    """Asks nobody."""

    def due_ms(self, now_ms: float) -> float:
        return math.inf

    def next_message(self, now_ms: float) -> Mapping[str, Any] | None:
        return None


def test_a_relay_that_stands_still_now_and_then_lets_a_silent_task_go() -> None:
    """Catches: each time that a busy worker was late, all tasks counted as heard."""
    passed_ms = 0.0
    with serving() as found:
        way = ExecutorRelay(found.address, 20_000.0, lambda: clock_ms() + passed_ms, [Answering])
        silent, one = way.connect(), way.connect()
        for turn in range(400):
            passed_ms += 30_000.0 if turn % 20 == 0 else 400.0
            one.send("echo", {"n": turn}, clock_ms())
            one.receive(clock_ms())
        with pytest.raises(ConnectionError):
            silent.receive(clock_ms())
        one.close()
        silent.close()


def _unknown_kind(wrong: CoordinatorConnection, _: Serving) -> None:
    wrong.send("nobody's", {}, clock_ms())


def _invalid_kind(wrong: CoordinatorConnection, _: Serving) -> None:
    wrong.socket.sendall(wrong._session.encode({"id": 1, "kind": ["breaker"], "body": {}}))


def _too_large(wrong: CoordinatorConnection, _: Serving) -> None:
    wrong.send("echo", {"n": "x" * (3 * 1024 * 1024)}, clock_ms())


def _more_than_is_taken(wrong: CoordinatorConnection, found: Serving) -> None:
    with found.busy():
        for _ in range(80):
            wrong.send("echo", {"n": "x" * 500_000}, clock_ms())


def _until_it_ends(wrong: CoordinatorConnection, speak: Callable[[], None] = lambda: None) -> None:
    speak()
    while True:
        wrong.receive(clock_ms())


@pytest.mark.parametrize("speak", [_unknown_kind, _invalid_kind, _too_large, _more_than_is_taken])
def test_a_task_that_the_coordinator_would_not_take_is_ended_alone(
    speak: Callable[[CoordinatorConnection, Serving], None],
) -> None:
    """Catches: messages of one worker that ended the relay, or filled its queue, and so the connection of
    all."""
    with serving() as found, client_of(found.address) as one:
        tell(one, {"n": 1})
        eventually(lambda: one[1].replies)
        wrong = connected(found)
        with pytest.raises(ConnectionError):
            _until_it_ends(wrong, partial(speak, wrong, found))
        wrong.close()
        tell(one, {"n": 2})
        eventually(lambda: len(one[1].replies) == 2)
        assert one[1].events == ["connected"]
        assert found.connections() == 1


def test_a_task_that_had_to_leave_does_not_come_back_by_what_it_sent_before() -> None:
    """Catches: the coordinator kept such a task, and sent for it, as long as the relay lived."""
    with serving() as found, client_of(found.address) as one:
        tell(one, {"n": 1})
        eventually(lambda: one[1].replies)
        wrong = connected(found)
        said = [{"id": 1, "kind": "nobody's", "body": {}}, {"id": 2, "kind": "echo", "body": {"n": "late"}}]
        wrong.socket.sendall(b"".join(map(wrong._session.encode, said)))
        eventually(lambda: {"n": "late"} in found.echo.heard)
        server = found.server
        assert server is not None
        eventually(lambda: server.state()["tasks"] == 1)
        wrong.close()


def test_while_the_coordinator_is_silent_a_relay_holds_so_much_for_all_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: 2 MiB of each of 512 tasks."""
    monkeypatch.setattr(relay, "_MAX_HELD", 1_000_000)
    with serving() as found:
        first = ExecutorRelay(found.address, 300.0, clock_ms, [Asking]).connect()
        assert first.is_relayed
        first.socket.settimeout(20)
        with found.busy():
            with pytest.raises(ConnectionError):
                _until_it_ends(first, lambda: first.send("echo", {}, clock_ms()))
            tasks = [connected(found) for _ in range(3)]
            for one in tasks:
                one.send("echo", {"n": "x" * 400_000}, clock_ms())
            ended, _, _ = select.select([one.socket for one in tasks], [], [], 20)
        assert len(ended) == 1
        for one in tasks:
            assert one.socket in ended or one.receive(clock_ms())
            one.close()
        first.close()


def test_where_a_relay_cannot_be_only_the_first_task_looks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: 1.3 s for each connection, and a new one for each task, with the holder on another host."""
    monkeypatch.setattr(RelayFolder, "try_lock", lambda _: None)
    monkeypatch.setattr(executor_relay, "_WAITS_S", (0.0, 0.1))
    now_ms = 0.0
    with serving() as found:
        way = ExecutorRelay(found.address, 2000.0, lambda: now_ms)
        for usable_at_ms in (60_000.0, 180_000.0, 420_000.0):
            assert way.retry_in_ms == 0
            one = way.connect()
            assert not one.is_relayed
            assert way.retry_in_ms == usable_at_ms - now_ms
            now_ms = usable_at_ms - 1
            assert way.connect_by_relay() is None
            now_ms = usable_at_ms
            one.close()


def test_a_coordinator_that_stands_still_keeps_one_connection_for_an_executor() -> None:
    """Catches: a late reply made each task leave its relay, though the coordinator was at fault. After a
    stall of 5 s, two executors had 14 connections until their tasks ended."""
    with serving() as found, ExitStack() as stack:
        clients = [stack.enter_context(client_of(found.address, silence_ms=500)) for _ in range(4)]
        for one in clients:
            tell(one, {"n": 1})
        eventually(lambda: all(talker.replies for _, talker in clients))
        assert found.connections() == 1
        with found.busy():
            for one in clients:
                tell(one, {"n": 2})
            eventually(lambda: all(talker.events.count("lost") for _, talker in clients))
        # Each has connected again by now, or does as soon as the coordinator goes on.
        eventually(lambda: all(talker.events.count("connected") > 1 for _, talker in clients))
        for one in clients:
            replies = len(one[1].replies)

            # What was told before the connection was lost is gone.
            def replied(one: tuple[Any, Any] = one, replies: int = replies) -> bool:
                if one[0].is_alive() and not one[1].to_tell:
                    tell(one, {"n": 3})
                time.sleep(0.1)
                return len(one[1].replies) > replies

            eventually(replied)
        eventually(lambda: found.connections() == 1)


def test_a_task_that_is_connected_directly_comes_back_to_the_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a connection for each task, as long as tasks last, because relays were busy for a moment."""
    monkeypatch.setattr(executor_relay, "_AVOID_BUSY_MS", 300.0)
    is_busy = True
    connect = RelayFolder.connect

    def busy(folder: RelayFolder, timeout_ms: float) -> socket.socket:
        if is_busy:
            raise TimeoutError
        return connect(folder, timeout_ms)

    monkeypatch.setattr(RelayFolder, "connect", busy)
    with serving() as found, ExitStack() as stack:
        clients = [stack.enter_context(client_of(found.address)) for _ in range(3)]
        for one in clients:
            tell(one, {"n": 1})
        eventually(lambda: all(talker.replies for _, talker in clients))
        assert found.connections() >= 3
        is_busy = False
        eventually(lambda: found.connections() == 1)
        for one in clients:
            tell(one, {"n": 2})
        eventually(lambda: all(talker.replies[-1][0] == {"n": 2} for _, talker in clients))


def test_a_relay_that_is_busy_is_tried_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a connection for each worker for a minute, because all had started at once."""

    def busy(*_: object) -> socket.socket:
        raise TimeoutError

    monkeypatch.setattr(RelayFolder, "try_lock", lambda _: None)
    monkeypatch.setattr(RelayFolder, "connect", busy)
    now_ms = 0.0
    with serving() as found:
        way = ExecutorRelay(found.address, 2000.0, lambda: now_ms)
        way.connect().close()
        assert way.retry_in_ms == 5_000.0


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EAGAIN, errno.EACCES])
def test_a_file_system_without_locks_is_not_taken_for_a_lock_that_another_holds(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, closed = [], []
    close = os.close

    def refuse(handle: int, _: int) -> None:
        opened.append(handle)
        raise OSError(number, os.strerror(number))

    def noted(handle: int) -> None:
        closed.append(handle)
        close(handle)

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(os, "close", noted)
    monkeypatch.setattr(executor_relay, "_WAITS_S", (0.0,))
    with serving() as found:
        folder = RelayFolder.of(found.address)
        assert folder is not None
        if number in (errno.EAGAIN, errno.EACCES):
            assert folder.try_lock() is None
        else:
            with pytest.raises(OSError, match=os.strerror(number)):
                folder.try_lock()
        assert opened == [handle for handle in closed if handle in opened], "a descriptor for each task"
        way = ExecutorRelay(found.address, 2000.0, clock_ms)
        one = way.connect()
        assert not one.is_relayed
        assert way.retry_in_ms > 0
        one.close()


def test_without_sockets_of_the_file_system_nobody_connects_to_the_coordinator_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: RelayFolder) -> socket.socket:
        raise OSError(errno.EOPNOTSUPP, "no sockets here")

    def connect_in_vain(*_: object) -> socket.socket:
        raise AssertionError("connected for a relay that cannot listen")

    monkeypatch.setattr(RelayFolder, "listen", refuse)
    monkeypatch.setattr(executor_relay, "connect", connect_in_vain)
    with serving() as found:
        way = ExecutorRelay(found.address, 2000.0, clock_ms)
        one = way.connect()
        assert not one.is_relayed
        assert way.retry_in_ms > 0
        one.close()


def test_a_relay_serves_nobody_who_does_not_know_the_secret() -> None:
    with serving() as found:
        relayed = connected(found)
        folder = RelayFolder.of(found.address)
        assert folder is not None
        wrong = replace(found.address, rendezvous=replace(found.address.rendezvous, secret=b"w" * 32))
        with pytest.raises((ProtocolError, ConnectionError)):
            CoordinatorConnection(wrong, 2000.0, clock_ms, folder.connect(500.0), 500.0)
        relayed.send("echo", {"n": 1}, clock_ms())
        assert relayed.receive(clock_ms())[0].body == {"n": 1}
        relayed.close()


def test_a_relay_of_another_application_is_not_met() -> None:
    with serving() as found:
        names = {
            RelayFolder(Path("/x"), replace(found.address, rendezvous=one)).name
            for one in (
                found.address.rendezvous,
                replace(found.address.rendezvous, secret=b"o" * 32),
                replace(found.address.rendezvous, cluster="o"),
                replace(found.address.rendezvous, port=1),
            )
        }
        assert len(names) == 4


def test_a_folder_that_others_can_write_to_is_not_used(folder: Path) -> None:
    (folder / relay.FOLDER).mkdir()
    (folder / relay.FOLDER).chmod(0o770)
    with serving() as found:
        one, other = connected(found), connected(found)
        assert not one.is_relayed
        eventually(lambda: found.connections() == 2)
        one.close()
        other.close()


def test_a_folder_too_deep_for_a_socket_is_used_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = folder / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(deep))
    with serving() as found:
        one, other = connected(found), connected(found)
        assert one.is_relayed == other.is_relayed == (sys.platform == "linux")
        one.close()
        other.close()


def test_a_forked_process_becomes_no_second_relay_and_uses_the_first() -> None:
    """Catches: a child that takes its parent's relay for its own, which has no thread there."""
    with serving() as found:
        one = connected(found)
        child = os.fork()
        if child == 0:
            try:
                two = connected(found)
                two.send("echo", {"n": 2}, clock_ms())
                os._exit(0 if two.is_relayed and two.receive(clock_ms())[0].body == {"n": 2} else 1)
            except BaseException:  # noqa: BLE001 - whatever it is must not run the parent's code
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        one.send("echo", {"n": 1}, clock_ms())
        assert one.receive(clock_ms())[0].body == {"n": 1}
        assert found.connections() == 1
        one.close()


def test_the_relay_ends_some_time_after_its_last_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafka_sink.coordinator.client.relay._LINGER_MS", 50.0)
    with serving() as found:
        connected(found).close()
        eventually(lambda: found.connections() == 0)
        again = connected(found)
        assert again.is_relayed
        again.close()


def test_without_a_coordinator_there_is_no_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a wait for another worker's relay."""
    monkeypatch.setattr(executor_relay, "_WAITS_S", (0.0, 60.0))
    started = time.monotonic()
    with refusing_port() as port, pytest.raises(ConnectionRefusedError):
        connected(Serving(port))
    assert time.monotonic() - started < 20


def test_what_is_pushed_to_all_crosses_to_an_executor_once(caplog: pytest.LogCaptureFixture) -> None:
    """Catches: a mute that is encoded and sent once a task instead of once an executor."""
    caplog.set_level(logging.WARNING)

    with serving() as found, ExitStack() as stack:
        clients = [stack.enter_context(client_of(found.address)) for _ in range(5)]
        for one in clients:
            tell(one, {"later": True})
        eventually(lambda: len(found.echo.waiting) == 5)
        assert found.server is not None
        (peer,) = {peer for peer, _ in found.server._tasks.values()}
        sent: list[bytes] = []
        enqueue = peer.enqueue
        peer.enqueue = lambda start, shared: sent.append(start) or enqueue(start, shared)  # type: ignore[method-assign, func-returns-value]
        tell(clients[0], {"shout": SharedBody({"muted": [1]}, 0.0)})
        for _, talker in clients:
            eventually(lambda talker=talker: talker.pushes == [{"shout": {"muted": [1]}}])  # type: ignore[misc]
        assert len(sent) == 2, "one push for five tasks, and the reply"
