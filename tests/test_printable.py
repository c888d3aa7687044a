"""What comes of rows, brokers, other tasks and users' classes forges no line of a log or a terminal."""

from __future__ import annotations

import io
import logging
from types import SimpleNamespace

import pytest

from kafka_sink.dead_letters.rejected_rows import DeadLetters
from kafka_sink.driver import driver_log
from kafka_sink.driver.command_line import note, ok, problem
from kafka_sink.printable import MAX_CHARACTERS, first_of, one_line, printable, printable_list
from kafka_sink.transactions import __main__ as transactions
from tests.support.breaker_cluster import Cluster
from tests.support.rejected_rows import rejected_rows

FORGED = "t\n26/01/01 00:00:00 ERROR kafka_sink: all is lost\r\x1b[2J\x1b]0;title\x07\u202ereversed"


def assert_plain(text: str) -> None:
    assert "all is lost" in text, "it is quoted"
    assert text.isprintable()


def test_printable_text_is_one_line_without_control_characters() -> None:
    assert_plain(one_line(FORGED))
    assert_plain(printable(FORGED))
    assert_plain(printable_list([FORGED, FORGED]))
    assert one_line("x" * 400) == "x" * 297 + "..."
    assert one_line("äöü 漢字 \u00a0") == "äöü 漢字  "
    assert printable("a\nb\r\x1b[31m\u202e\ud800c") == "a b  [31m  c"
    assert printable_list(["a", "b"]) == "a, b"
    many = printable_list(f"t\n-{index}" for index in range(10**6))
    assert many.isprintable()
    assert len(many) <= MAX_CHARACTERS


def test_first_of_tells_how_many_more_there_are() -> None:
    assert first_of([1, 2], 2) == "1, 2"
    assert first_of(dict.fromkeys(range(1003)), 3) == "0, 1, 2 and 1,000 more"


def test_a_rows_topic_in_the_line_about_a_dead_letter(caplog: pytest.LogCaptureFixture) -> None:
    """And names that a broker or another application has chosen in lines of the driver."""
    for log in (driver_log.report, driver_log.warn, driver_log.error):
        log(f"kafka-chunked: an earlier run with transactional.id.prefix '{FORGED}' 100 %")
        assert_plain(caplog.records[-1].getMessage())
    assert len(caplog.records) == 3
    dead_letters = DeadLetters("dead-letters", 10, 1000)
    dead_letters.add(rejected_rows([b"v"], FORGED, f"why {FORGED}"))
    record = caplog.records[-1]
    assert record.levelno == logging.WARNING
    assert_plain(record.getMessage())


def test_the_reason_of_a_users_breaker_class() -> None:
    manager = Cluster(a=[1]).manager()
    manager.mute(1, FORGED)
    manager.unmute(1, FORGED)
    for change in manager.task_mutes.take_changes():
        assert_plain(change.reason)


def test_findings_of_the_doctor_and_prefixes_in_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any application that may write transactions chooses its own prefix."""
    for finding in (ok, note, problem):
        assert_plain(str(finding(FORGED)))
    monkeypatch.setattr(transactions, "_decided", lambda *_: "decided")
    client = SimpleNamespace(run=lambda *_: {})
    out = io.StringIO()
    assert transactions._list_prefixes(client, [FORGED], out) == 0  # type: ignore[arg-type]
    (line,) = out.getvalue().splitlines()
    assert_plain(line)
