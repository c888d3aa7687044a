"""The reports of tasks and of the driver: on the wire, and when a task sends it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from kafka_sink.clock import STARTING, WAIT_LISTENER
from kafka_sink.coordinator.address import CoordinatorAddress
from kafka_sink.coordinator.live import messages
from kafka_sink.coordinator.live.application import ReportService
from kafka_sink.coordinator.live.messages import (
    AboutJob,
    DriverWaiting,
    DriverWaits,
    ReportChannel,
    TaskReport,
    about_job,
    report_end,
)
from kafka_sink.coordinator.schema import Message, decode, deliver, encode
from kafka_sink.errors import DeliveryError, ProtocolError
from kafka_sink.options import parse
from tests.support.fake_outbox import FakeOutbox
from tests.support.task_reports import TASK, Board, final, full_report, of, report


def test_messages_survive_the_wire() -> None:
    about = AboutJob("nightly orders", {"kafka.linger.ms": "5"})
    for sent in (full_report(), report(1, of(about=about))):
        assert decode(encode(sent)) == sent
    ended = final(5, query="q", batch=3, cause="no disk", transactions={"committed": 2})
    assert decode(encode(ended)) == ended


def test_a_report_that_makes_no_sense_is_refused() -> None:
    kind, _, sent = encode(report(5)).partition(b" ")
    for name in TaskReport.__struct_fields__:
        for value in ([1], {"a": "1"}, [[1]], [["t", -1, 0, 0, 0]]):
            values = json.loads(sent) | {name: value}
            with pytest.raises(ProtocolError, match=name):
                decode(kind + b" " + json.dumps(values).encode())


@pytest.mark.parametrize(
    "wrong",
    [
        report(1, state="asleep"),
        final(1, outcome="lost"),
        final(1, outcome="committed\n"),
        DriverWaits("b:1", "w", "asleep"),
    ],
)
def test_a_state_an_outcome_or_a_step_that_nobody_knows_is_refused(wrong: Message) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(wrong))


def test_the_description_of_a_job_is_cut_to_the_bounds_of_a_message() -> None:
    """Catches: an application's name of 301 characters, and each report ended the connection."""
    about = about_job("n" * 500, {f"option-{number}": "v" * 500 for number in range(100)})
    task = Task()
    task.channel.begin(of(application="n" * 301, host="\ud800", about=about))
    (sent,) = task.send(300.0)
    assert decode(encode(sent)) == sent


class Task:
    """A task with a counter, and the messages that it sends."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.rows = 0
        self.channel = ReportChannel(lambda identity: report(self.rows, identity), lambda: self.now_ms)

    def send(self, now_ms: float | None = None) -> list[TaskReport]:
        """At this time from now on."""
        self.now_ms = self.now_ms if now_ms is None else now_ms
        return list(iter(lambda: self.channel.next_message(self.now_ms), None))


def test_a_task_reports_soon_then_every_second_and_at_its_end() -> None:
    task = Task()
    assert task.send() == []
    task.channel.begin(TASK)
    assert task.send() == []
    assert task.channel.next_message_delay_ms(0.0) == 300.0
    assert len(task.send(300.0)) == 1
    assert task.send(1_200.0) == []
    assert task.channel.next_message_delay_ms(1_200.0) == pytest.approx(100.0)
    task.rows = 5
    assert [one.counters.get("records", 0) for one in task.send(1_300.0)] == [5]
    task.channel.end(report(9, done=True))
    # The next task begins before the last report has gone out.
    task.channel.begin(of(8))
    assert [(one.identity.task, one.done) for one in task.send()] == [(7, True)]
    assert [(one.identity.task, one.done) for one in task.send(2_300.0)] == [(8, False)]


def test_a_short_task_of_a_worker_reports_once_in_an_interval() -> None:
    """Catches: 500 short tasks a second sent 1,000 reports a second."""
    task, board, sent = Task(), Board(), []
    for number in range(100):
        task.now_ms = 100.0 * number
        task.channel.begin(of(number))
        task.channel.end(report(3, of(number), done=True))
        sent += task.send()
    assert len(sent) == 10
    for one in sent:
        board.report(one)
    assert (board.total(), board.job()["tasks_done"]) == (30, 10)
    board.end(final(300, tasks=100))
    assert (board.total(), board.topic(), board.job()["tasks_done"]) == (300, 300, 100)


def test_a_task_that_has_failed_or_has_reported_is_always_told_of() -> None:
    task = Task()
    task.channel.end(report(1, done=True))
    assert task.send() == [], "no task has begun"
    for number, failed in ((1, False), (2, True), (3, False)):
        task.channel.begin(of(number))
        task.channel.end(report(1, of(number), done=True, failed=failed))
    task.channel.begin(of(4))
    assert [one.identity.task for one in task.send(300.0)] == [1, 2, 4]
    task.channel.end(report(1, of(4), done=True))
    assert [one.identity.task for one in task.send(1_400.0)] == [4]


def test_thousands_that_report_at_once_take_turns_and_lose_nothing() -> None:
    """Catches: after a restart 4,000 reports of 0.4 ms each held up what tasks need."""
    board, out = Board(), FakeOutbox()
    service = ReportService(out, board.metrics)
    tasks = [Task() for _ in range(500)]
    came: list[float] = []
    for number, task in enumerate(tasks):
        task.rows = 1
        task.channel.begin(of(number))
    for now_ms in range(0, 6_001, 100):
        for number, task in enumerate(tasks):
            for message in task.send(float(now_ms)):
                deliver(service, number, message, task.now_ms)
                came.append(task.now_ms)
        for number, reply in out.taken():
            deliver(tasks[number].channel, reply, float(now_ms))
        board.metrics.sample(float(now_ms))
        assert board.metrics.reports <= 200 * (1 + now_ms / 1000)
    # Each of them, the last one after 2.5 s, and no more of them than were asked for.
    assert board.total() == 500
    assert sum(1_000 <= one <= 3_500 for one in came) == pytest.approx(500, abs=200)
    assert sum(one > 3_500 for one in came) < 2.5 * 250
    # The last reports of tasks are taken, however many come.
    for number in range(500):
        deliver(service, number, report(2, of(number), done=True), 6_000.0)
    assert board.total() == 1_000


# -- the driver ---------------------------------------------------------------------------------------


ADDRESS = CoordinatorAddress("127.0.0.1", 1, b"", "", b"", has_view=True)


class Waiting:
    """A driver that waits for brokers: its clock, and what it tells the coordinator."""

    def __init__(self, patch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.now_ms = 0.0
        self.error = error
        self.sent: list[Message] = []
        self.timeouts_ms: list[float] = []
        patch.setattr(messages, "tell", self.tell)

    def tell(self, _: CoordinatorAddress, message: Message, timeout_ms: float) -> None:
        self.timeouts_ms.append(timeout_ms)
        if self.error is not None:
            self.now_ms += timeout_ms
            raise self.error
        self.sent.append(message)

    def waits(self, for_ms: float, what: str = "broker 1") -> None:
        """What the network says while it waits since 0, each 100 ms."""
        while self.now_ms < for_ms:
            WAIT_LISTENER.get()(lambda: what, 0.0, 60_000.0)
            self.now_ms += 100

    def starts(self, find: Callable[[], CoordinatorAddress] = lambda: ADDRESS) -> DriverWaiting:
        options = parse({"kafka.bootstrap.servers": "b:1", "topic": "t"}).options
        return DriverWaiting(*(options, "q", STARTING, "a micro-batch", find, lambda: self.now_ms))


# The folder where processes of the driver leave word.
pytestmark = pytest.mark.usefixtures("application")


def test_a_wait_of_the_driver_is_logged_once_after_three_seconds_and_told_every_second(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a broker froze between micro-batches, and for a minute nothing said so."""
    waiting = Waiting(monkeypatch)

    def start() -> None:
        with waiting.starts():
            waiting.waits(5_000, "broker 1 (h:9) to begin a transaction")
            raise DeliveryError("InitProducerId did not succeed")

    with pytest.raises(DeliveryError):
        start()
    (line,) = caplog.messages
    assert line == (
        "kafka-chunked: starting a micro-batch: waits for broker 1 (h:9) to begin a transaction, 3 s, "
        "fails in 57 s"
    )
    sent = [one for one in waiting.sent if isinstance(one, DriverWaits)]
    assert [one.age_ms for one in sent] == [1_000.0, 2_000.0, 3_000.0, 4_000.0, 0.0]
    assert (sent[3].awaited, sent[3].left_ms) == ("broker 1 (h:9) to begin a transaction", 56_000.0)
    assert (sent[4].awaited, sent[4].cause) == ("", "InitProducerId did not succeed")
    with waiting.starts():
        WAIT_LISTENER.get()(lambda: "", waiting.now_ms, 60_000.0)
    assert len(sent) == 5, "nothing of a wait that was short"


def test_a_frozen_coordinator_does_not_hold_up_a_driver_that_waits_for_brokers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: half of each second spent on telling the coordinator, which the responses of brokers had to
    wait for."""
    waiting = Waiting(monkeypatch, TimeoutError("frozen"))
    with waiting.starts():
        waiting.waits(60_000)
    # The clock of files has not moved.
    assert waiting.timeouts_ms == [500.0]


def test_a_folder_that_others_can_write_to_does_not_fail_a_driver_that_waits_for_brokers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find() -> CoordinatorAddress:
        raise PermissionError("other users have access to it")

    with Waiting(monkeypatch).starts(find):
        WAIT_LISTENER.get()(lambda: "broker 1", -5_000.0, 60_000.0)


@pytest.mark.parametrize(
    ("error", "timeouts_ms"),
    [
        (TimeoutError("frozen"), [5000.0, 500.0]),
        (ProtocolError("no greeting within 5000 ms"), [5000.0, 500.0]),
        (ConnectionRefusedError("another one will start"), [5000.0, 5000.0]),
    ],
)
def test_a_coordinator_that_was_silent_holds_up_no_further_write_for_long(
    error: Exception, timeouts_ms: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: beside a frozen coordinator, each micro-batch took 5 s longer."""
    waiting = Waiting(monkeypatch, error)
    for number in range(2):
        report_end(ADDRESS, final(1, write=f"write-{number}", query="q-1", batch=number))
    assert waiting.timeouts_ms == timeouts_ms
