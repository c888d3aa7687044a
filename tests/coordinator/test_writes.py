"""Attempts end when the driver says that their write is over."""

from __future__ import annotations

from functools import partial

import pytest

from kafka_sink.coordinator.address import CoordinatorAddress, PlannedCoordinator
from kafka_sink.coordinator.client import CoordinatorClient
from kafka_sink.coordinator.live.application import ApplicationMetrics
from kafka_sink.coordinator.schema import Message, decode, deliver, encode
from kafka_sink.coordinator.server import Services
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
from tests.support.waiting import until

DRIVER = 99


SERVICES: Services = {WriteService: partial(WriteService, listener=ApplicationMetrics())}


class Coordinator:
    """A service with what it sends."""

    def __init__(self, listener: ApplicationMetrics | None = None) -> None:
        self.out = FakeOutbox()
        self.service = WriteService(self.out, listener or ApplicationMetrics())

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
        def note_failure(self, write: str, cause: str) -> None:
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


def test_what_is_over_is_remembered_within_a_bound() -> None:
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
def test_what_makes_no_sense_is_refused(wrong: Message) -> None:
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
        assert end_attempts(server.address, "q/1", again=True) == ""
        began_ms = clock_ms()
        for _ in range(10):
            assert end_attempts(server.address, "q/1", again=True) == ""
        assert clock_ms() - began_ms < 2_000


def test_a_task_at_work_is_ended_by_the_commit_on_the_driver() -> None:
    causes: list[Exception] = []
    with serving(services=SERVICES) as server:
        channel = WriteChannel(causes.append)
        client = CoordinatorClient(server.address, [channel], lambda: HELLO, clock_ms)
        client.start()
        client.resume()
        options = parse({"kafka.bootstrap.servers": "h:1", "topic": "t", "log.summary": "false"}).options
        planned = PlannedCoordinator(server.address, None, server.address)
        other, mine = (PlannedWrite(options, ColumnPlan(value=0, topic="t"), planned) for _ in range(2))
        channel.begin(mine.name)
        until(lambda: server.messages() >= 2)
        other.commit([])
        mine.commit([])
        until(lambda: causes)
        assert isinstance(causes[0], WriteOverError)
        channel.end()
        client.close()
        client.join(30)
