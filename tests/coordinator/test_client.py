"""A task's client over loopback: what it sends, what it survives, and when it works alone."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from kafka_sink.clock import COORDINATOR_WAIT_MS, Clock
from kafka_sink.coordinator.address import CoordinatorAddress
from kafka_sink.coordinator.client import ClientTimes, CoordinatorClient, ask, tell
from kafka_sink.coordinator.schema import Alive, Hello, Message
from kafka_sink.coordinator.transport import ServerBounds
from tests.support.coordinator_harness import (
    HELLO,
    RecordingChannel,
    Said,
    Shout,
    address_at,
    clock_ms,
    identity,
    serving,
)
from tests.support.surroundings import Environ
from tests.support.waiting import repeat_until, until


@pytest.fixture(autouse=True)
def _alone(environ: Environ, tmp_path: Path) -> None:
    """Warnings are due once an application: every test is one, also if a port is given out again."""
    environ(SPARK_LOCAL_DIRS=str(tmp_path))


@pytest.fixture
def _reconnects_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients reconnect after about 50 ms instead of a second."""
    monkeypatch.setattr("kafka_sink.coordinator.client._BACKOFF_MS", 50.0)


@contextmanager
def client_of(
    address: CoordinatorAddress,
    channel: RecordingChannel | None = None,
    silence_ms: float = 20_000,
    clock: Clock = clock_ms,
    hello: Callable[[], Hello] = lambda: HELLO,
    *,
    starts: bool = True,
    **times: float,
) -> Iterator[tuple[CoordinatorClient, RecordingChannel]]:
    """The client of a task that runs, and its channel. ``starts``: its thread, which the test may start."""
    channel = channel or RecordingChannel()
    bounds = ClientTimes(silence_ms, silence_ms, **times)
    client = CoordinatorClient(address, [channel], hello, clock, bounds)
    if starts:
        client.start()
    client.resume()
    try:
        yield client, channel
    finally:
        client.close()
        client.join(30)
        assert not client.is_alive()


def say(client: CoordinatorClient, channel: RecordingChannel, message: Message) -> None:
    channel.to_tell.append(message)
    client.wake_up.wake()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        one.message for one in caplog.records if "coordinator" in one.message and one.levelno > logging.INFO
    ]


def test_a_client_sends_and_receives() -> None:
    with (
        serving() as found,
        client_of(found.address) as (client, channel),
        client_of(found.address) as (_, other),
    ):
        say(client, channel, Said(1))
        until(lambda: channel.received == [Said(1)])
        until(lambda: len(found.echo.tasks) == 2)
        say(client, channel, Shout(3))
        until(lambda: other.received == [Said(0, "xxx")])
        assert channel.events == ["connected"]


def test_a_task_that_learns_its_cluster_says_hello_again() -> None:
    hello = structs.replace(HELLO, cluster_id="")
    with serving() as found, client_of(found.address, hello=lambda: hello) as (client, channel):
        until(lambda: found.echoes)
        hello = HELLO
        say(client, channel, Said(1))
        until(lambda: channel.received)
        assert channel.events == ["connected", "connected"]
        assert found.echoes[1].heard == [Said(1)]


@pytest.mark.usefixtures("_reconnects_soon")
def test_a_broken_connection_is_made_again_after_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as found, client_of(found.address) as (client, channel):
        channel.received = None  # type: ignore[assignment]  # on_said raises
        say(client, channel, Said(1))
        until(lambda: "lost" in channel.events)
        channel.received = []
        until(lambda: channel.events == ["connected", "lost", "connected"])
    assert len(warnings(caplog)) == 1


@pytest.mark.usefixtures("_reconnects_soon")
def test_a_coordinator_that_never_responds_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        address = address_at(frozen.getsockname()[1], identity())
        with client_of(address, silence_ms=50) as (_, channel):
            until(lambda: channel.events.count("lost") >= 2)
    assert len(warnings(caplog)) == 1
    assert "connected" not in channel.events


@pytest.mark.usefixtures("_reconnects_soon")
def test_a_coordinator_that_stalls_is_left() -> None:
    later_ms = 0.0

    def pass_time() -> None:
        nonlocal later_ms
        later_ms += 25_000.0

    with (
        serving() as found,
        client_of(found.address, clock=lambda: clock_ms() + later_ms, alive_ms=100.0) as (_, channel),
    ):
        until(lambda: "connected" in channel.events)
        until(lambda: found.messages() > 3)
        assert "lost" not in channel.events
        with found.busy():
            repeat_until(lambda: "lost" in channel.events, pass_time, pause_s=0.2)
        until(lambda: channel.events.count("connected") >= 2)


def test_a_task_that_relies_on_the_coordinator_asks_for_signs_of_life_sooner() -> None:
    with serving() as found, client_of(found.address, alive_waiting_ms=50.0) as (client, channel):
        # Hello and one sign of life.
        until(lambda: found.messages() == 2)
        channel.is_waiting = True
        client.wake_up.wake()
        until(lambda: found.messages() > 5)


def test_a_process_that_stalled_takes_nobody_for_silent() -> None:
    """It ran neither when the answer came nor when its time was over."""
    now_ms = 0.0
    with serving() as found:

        class Stalls(RecordingChannel):
            """Once the first sign of life is sent, until its time is over and its answer is there."""

            def next_message_delay_ms(self, _: float) -> float:
                nonlocal now_ms
                until(lambda: found.messages() >= 2)
                found.settle()
                now_ms = 50_000.0
                return math.inf

        with client_of(found.address, Stalls(), clock=lambda: now_ms) as (client, channel):
            until(lambda: now_ms)
            say(client, channel, Said(1))
            until(lambda: channel.received)
            assert channel.events == ["connected"]


def test_a_task_that_says_something_else_sends_no_sign_of_life() -> None:
    """Catches: 10,000 tasks at rest whose signs of life took a fifth of a core beside their reports."""
    now_ms = 0.0
    with serving() as found, client_of(found.address, clock=lambda: now_ms) as (client, channel):
        # Hello and the first, whose answer shows that the token is right.
        until(lambda: found.messages() == 2)
        said: list[Said] = []
        for at_ms in (0.0, 50_000.0, 100_000.0, 150_000.0):
            now_ms = at_ms
            said.append(Said(len(said)))
            say(client, channel, said[-1])
            until(lambda: channel.received == said)
        assert found.messages() == 6
        now_ms = 210_000.0
        client.wake_up.wake()
        until(lambda: found.messages() > 6)
        say(client, channel, Said(5))
        until(lambda: len(channel.received) == 5)
        assert found.messages() == 8


def test_a_driver_that_stalls_for_five_seconds_loses_no_task() -> None:
    """Catches: 10,000 tasks that give it up while a broker is muted, and 7 s of handshakes after it."""
    assert ClientTimes().silence_ms > 5_000.0


def test_a_client_with_a_wrong_token_gets_no_response() -> None:
    with serving() as found:
        address = replace(found.address, token=b"x" * 32)
        with client_of(address) as (_, channel):
            until(lambda: "lost" in channel.events)
            assert not channel.received
            assert not found.echoes


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4, bytes(64)])
def test_another_process_at_the_coordinators_port_is_not_taken_for_it(says: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = address_at(other.getsockname()[1], identity())
        with client_of(address, silence_ms=1000) as (_, channel):
            peer, _ = other.accept()
            with peer:
                peer.sendall(says)
            until(lambda: "lost" in channel.events)
            assert "connected" not in channel.events


@pytest.mark.usefixtures("_reconnects_soon")
def test_a_client_comes_back_to_a_coordinator_that_closed_its_connection_while_a_task_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_ms = 0.0
    bounds = ServerBounds(silence_ms=1_000, sweep_ms=100)
    with serving(bounds, clock=lambda: now_ms) as found, client_of(found.address) as (client, channel):
        say(client, channel, Said(1))
        # Hello, what is said, and a sign of life, which would count as heard after the minute.
        until(lambda: channel.received and found.messages() == 3)
        now_ms += 60_000
        until(lambda: channel.events == ["connected", "lost", "connected"], lambda: channel.events)
        client.pause()
        say(client, channel, Said(2))
        until(lambda: len(channel.received) == 2)
        now_ms += 60_000
        until(lambda: found.connections() == 0)
        client.resume()
        until(lambda: channel.events.count("connected") == 3)
    assert not warnings(caplog)


def test_a_client_that_is_let_in_and_then_turned_away_comes_back_ever_later() -> None:
    later_ms = 0.0
    with (
        serving() as found,
        client_of(
            found.address, hello=lambda: Hello("g", "c", {"topic": "t"}), clock=lambda: clock_ms() + later_ms
        ) as (client, channel),
    ):
        until(lambda: channel.events.count("lost") >= 2)
        later_ms = 500.0
        until(lambda: not client.is_due)
        later_ms = 10_000.0
        assert client.is_due


def test_no_task_waits_again_for_a_connection_that_takes_long() -> None:
    """Catches: behind a firewall, each micro-batch waited another second for the coordinator."""
    later_ms = 0.0
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address, times = address_at(silent.getsockname()[1], identity()), ClientTimes(connect_ms=30_000)
        client = CoordinatorClient(address, [], lambda: HELLO, lambda: clock_ms() + later_ms, times)
        assert client.is_connecting
        client.start()
        client.resume()
        with silent.accept()[0]:
            assert client.is_connecting
            later_ms = COORDINATOR_WAIT_MS
            assert not client.is_connecting
            assert client.is_lost
            client.close()
    client.join(30)
    assert not client.is_alive()


def test_a_task_too_many_works_alone_after_one_line(caplog: pytest.LogCaptureFixture) -> None:
    later_ms = 0.0
    with (
        caplog.at_level(logging.INFO),
        serving(ServerBounds(connections=1)) as found,
        client_of(found.address) as (_, first),
    ):
        until(lambda: first.events == ["connected"])
        until(lambda: found.state()["connections"]["joined"] == 1)
        with client_of(found.address, clock=lambda: clock_ms() + later_ms) as (client, second):
            until(lambda: "lost" in second.events)
            later_ms = 25_000.0
            until(lambda: not client.is_due)
        # A task that has failed does not wait for an answer: 2 s for each of them.
        with client_of(found.address, silence_ms=60_000, starts=False) as (failed, _):
            failed.close()
            failed.start()
            failed.join(30)
            assert not failed.is_alive()
        assert first.events == ["connected"]
    lines = [one for one in caplog.records if "is at its task limit" in one.message]
    assert [one.levelno for one in lines] == [logging.INFO]
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_last_reports_are_sent_even_if_the_task_ended_before_the_client_connected() -> None:
    with serving() as found, client_of(found.address, starts=False) as (client, channel):
        channel.to_tell.append(Said(1))
        client.pause()
        client.start()
        until(lambda: channel.received)


def test_a_task_that_has_ended_tries_once_to_reach_the_coordinator() -> None:
    """Catches: the client's thread tries again and again while no task runs."""
    tries = 0
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = address_at(nobody.getsockname()[1], identity())
        # A client whose clock runs a hundred times as fast: any backoff would be over.
        with client_of(address, clock=lambda: 100 * clock_ms(), starts=False) as (client, _):
            client.pause()
            client.start()
            nobody.settimeout(30)
            while tries < 2:
                try:
                    nobody.accept()[0].close()
                except TimeoutError:
                    break
                tries += 1
                nobody.settimeout(0.5)
    assert tries == 1


def test_a_client_that_closes_has_told_the_coordinator_all() -> None:
    """A connection that is closed early is reset, and the coordinator loses what it has not read."""
    said: list[Message] = [Said(number) for number in range(100)]
    with serving() as found:
        with client_of(found.address, starts=False) as (client, channel):
            channel.to_tell.extend(said)
            # Before its thread has begun, as where a task fails at once.
            client.close()
            client.start()
        assert found.echo.heard == said


# -- the driver -------------------------------------------------------------------------------------------


def test_a_question_gets_its_answer_and_a_statement_is_handled_when_it_returns() -> None:
    with serving() as found:
        assert ask(found.address, Said(7), Said, 20_000, HELLO) == Said(7)
        tell(found.address, Alive(), 20_000)
        with pytest.raises(TimeoutError, match="has not answered with Shout"):
            ask(found.address, Said(7), Shout, 1_500, HELLO)
