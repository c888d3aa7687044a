"""Attempts end when the driver says that their write is over."""

from __future__ import annotations

from functools import partial

import pytest

from kafka_sink.coordinator import writes
from kafka_sink.coordinator.address import CoordinatorAddress, PlannedCoordinator
from kafka_sink.coordinator.client import CoordinatorClient, connect, tell
from kafka_sink.coordinator.live.application import ApplicationMetrics, ReportService
from kafka_sink.coordinator.live.messages import DriverWaits, OpenView
from kafka_sink.coordinator.live.view import ViewService
from kafka_sink.coordinator.schema import MESSAGES, Alive, Message, decode, deliver, encode
from kafka_sink.coordinator.server import Services
from kafka_sink.coordinator.transport import ServerBounds
from kafka_sink.coordinator.writes import (
    MAX_CAUSE,
    MAX_FAILED,
    MAX_OVER,
    AttemptFailed,
    WriteCause,
    WriteChannel,
    WriteEnding,
    WriteOver,
    WriteService,
    Writing,
    end_attempts,
    report_failure,
)
from kafka_sink.errors import ProtocolError, WriteOverError
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.spark.write import PlannedWrite
from tests.support.coordinator_harness import HELLO, clock_ms, serving
from tests.support.fake_outbox import FakeOutbox
from tests.support.task_reports import final
from tests.support.waiting import until

DRIVER = 99


SERVICES: Services = {WriteService: partial(WriteService, on_failed=ApplicationMetrics().on_attempt_failed)}


class Coordinator:
    """A service with what it sends."""

    def __init__(self, listener: ApplicationMetrics | None = None) -> None:
        self.out = FakeOutbox()
        self.service = WriteService(self.out, (listener or ApplicationMetrics()).on_attempt_failed)

    def receive(self, peer: int, message: Message) -> list[tuple[int, Message]]:
        deliver(self.service, peer, message, 0.0)
        return self.out.taken()

    def end(self, write: str, *, again: bool = False) -> list[tuple[int, Message]]:
        return self.receive(DRIVER, WriteEnding(write, again))


ANSWER = (DRIVER, WriteCause(""))


def test_only_tasks_of_a_write_that_is_over_are_notified() -> None:
    coordinator = Coordinator()
    assert coordinator.receive(1, Writing("a")) == []
    coordinator.receive(2, Writing("a"))
    coordinator.receive(3, Writing("b"))
    coordinator.receive(4, Writing("a"))
    coordinator.receive(4, Writing("b"))
    coordinator.service.on_gone(2, 0.0)
    assert coordinator.end("a") == [(1, WriteOver("a")), ANSWER]


def test_the_driver_hears_once_why_the_last_attempt_failed_and_the_live_view_of_each() -> None:
    heard: list[tuple[str, str]] = []

    class Listener(ApplicationMetrics):
        def on_attempt_failed(self, write: str, cause: str) -> None:
            heard.append((write, cause))

    coordinator = Coordinator(listener=Listener())
    for cause in ("the first", "the\nlast"):
        assert coordinator.receive(1, AttemptFailed("a", cause)) == []
    assert coordinator.end("b") == [ANSWER]
    assert coordinator.end("a") == [(DRIVER, WriteCause("the last"))]
    assert coordinator.end("a") == [ANSWER]
    assert heard == [("a", "the first"), ("a", "the last")]


def test_causes_of_failures_are_kept_within_bounds() -> None:
    """A task decides neither how many nor how long they are."""
    coordinator = Coordinator()
    for number in range(MAX_FAILED + 1):
        coordinator.receive(1, AttemptFailed(str(number), "x" * MAX_CAUSE))
    assert coordinator.end("0") == [ANSWER]
    assert coordinator.end("1") == [(DRIVER, WriteCause("x" * MAX_CAUSE))]
    with pytest.raises(ProtocolError):
        decode(encode(AttemptFailed("1", "x" * (MAX_CAUSE + 1))))


def test_finished_writes_are_remembered_within_a_bound() -> None:
    coordinator = Coordinator()
    for number in range(MAX_OVER + 1):
        coordinator.end(str(number))
    assert coordinator.receive(1, Writing("0")) == []
    assert coordinator.receive(1, Writing("1")) == [(1, WriteOver("1"))]


def test_a_name_that_comes_again_is_not_remembered() -> None:
    """Catches: a restarted query could not write its micro-batch again, as the abort had ended it."""
    coordinator = Coordinator()
    coordinator.receive(1, Writing("query/5"))
    assert coordinator.end("query/5", again=True) == [(1, WriteOver("query/5")), ANSWER]
    assert coordinator.receive(2, Writing("query/5")) == []


def test_the_end_of_a_write_of_thousands_of_tasks_is_encoded_once() -> None:
    coordinator = Coordinator()
    for peer in range(2_000):
        coordinator.receive(peer, Writing("a"))
    coordinator.out.encoded = 0
    assert len(coordinator.end("a")) == 2_000 + len([ANSWER])
    assert coordinator.out.encoded == 1 + len([ANSWER])


@pytest.mark.parametrize("wrong", [Writing("x" * 201), WriteEnding("x" * 201, False)])
def test_names_that_are_too_long_are_rejected(wrong: Message) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(wrong))


# -- a task's side ----------------------------------------------------------------------------------------


def test_a_task_that_has_ended_is_left_alone() -> None:
    causes: list[Exception] = []
    channel = WriteChannel(causes.append)
    channel.begin("a")
    assert channel.next_message(0) == Writing("a")
    assert channel.next_message(0) is None
    deliver(channel, WriteOver("b"), 0.0)
    channel.end()
    deliver(channel, WriteOver("a"), 0.0)
    assert causes == []
    channel.on_connected(0)
    assert channel.next_message(0) is None
    channel.begin("c")
    channel.next_message(0)
    channel.on_connected(0)
    assert channel.next_message(0) == Writing("c"), "a new coordinator gets it, too"
    deliver(channel, WriteOver("c"), 0.0)
    assert isinstance(causes[0], WriteOverError)


# -- the driver's side ------------------------------------------------------------------------------------


def test_a_driver_without_coordinator_goes_on() -> None:
    nobody = CoordinatorAddress("127.0.0.1", 1, b"f" * 32, "name", b"t" * 32)
    assert end_attempts(nobody, "a") == ""
    report_failure(nobody, "a", "no disk")


@pytest.mark.usefixtures("application")
def test_micro_batches_do_not_wait_for_a_frozen_coordinator_again_and_again() -> None:
    with serving(services=SERVICES) as server, server.busy():
        assert end_attempts(server.driver_address, "q/1", again=True) == ""
        began_ms = clock_ms()
        for _ in range(10):
            assert end_attempts(server.driver_address, "q/1", again=True) == ""
        assert clock_ms() - began_ms < 4_500, "each wait takes half a second"


def test_only_the_driver_ends_writes_and_opens_the_live_view() -> None:
    """Catches: every task could, so one ended the attempts of other jobs, and opened a page without login on
    any address although ui.port=-1."""
    metrics = ApplicationMetrics()
    services: Services = {
        WriteService: partial(WriteService, on_failed=metrics.on_attempt_failed),
        ViewService: partial(ViewService, metrics=metrics),
        ReportService: partial(ReportService, metrics=metrics),
    }
    of_driver = WriteEnding("w", True), OpenView("127.0.0.1", 0), final(1), DriverWaits("c", "w", "starting")
    assert {type(message) for message in of_driver} == {one for one in MESSAGES.values() if one.is_of_driver}
    with serving(services=services) as server:
        for message in of_driver:
            with pytest.raises(ConnectionError):
                tell(server.address, message, 30_000)
            tell(server.driver_address, message, 30_000)


def test_the_driver_is_served_while_tasks_have_all_connections() -> None:
    """Catches: one peer could take all of them, and the ends of writes were not told any more."""
    bounds = ServerBounds(connections=1, reserved=1)
    with serving(services=SERVICES, bounds=bounds) as server:
        task = connect(server.address, 30_000)
        with task.socket:
            task.send(Alive())
            assert task.receive() == [Alive()]
            with pytest.raises(TimeoutError):
                tell(server.address, Writing("w"), 500)
            tell(server.driver_address, WriteEnding("w", False), 30_000)


def test_a_task_at_work_is_ended_by_the_commit_on_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine may need longer for a connection than the driver waits.
    monkeypatch.setattr(writes, "_DRIVER_TIMEOUT_MS", 60_000.0)
    causes: list[Exception] = []
    with serving(services=SERVICES) as server:
        channel = WriteChannel(causes.append)
        client = CoordinatorClient(server.address, [channel], lambda: HELLO, clock_ms)
        client.start()
        client.resume()
        options = parse({"kafka.bootstrap.servers": "h:1", "topic": "t", "log.summary": "false"}).options
        planned = PlannedCoordinator(server.address)
        other, mine = (PlannedWrite(options, ColumnPlan(value=0, topic="t"), planned) for _ in range(2))
        channel.begin(mine.name)
        until(lambda: server.messages() >= 2)
        with server.has_driver():
            other.commit([])
            mine.commit([])
        until(lambda: causes)
        assert isinstance(causes[0], WriteOverError)
        channel.end()
        client.close()
        client.join(30)
