"""The example that shows rows and dead letters in the terminal, and writes fixed ones back."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import Producer
from kafka.errors import KafkaTimeoutError

from kafka_sink.dead_letters.rejected_rows import CUT_PREFIX, PREFIX
from local_kafka import LocalBroker

PEEK = str(Path(__file__).resolve().parents[2] / "examples" / "peek.py")
CONTEXT = [
    ("__connect.errors.topic", b"peek-orders"),
    ("__connect.errors.exception.message", b"the record is larger\x1b[2J than 1000"),
]
ROW = {"topic": "t", "partition": 0, "offset": 1, "timestamp": 0, "key": None, "value": None, "headers": []}


@pytest.fixture(scope="module")
def peek() -> Any:
    return runpy.run_path(PEEK)


def produce(broker: LocalBroker, topic: str, *records: dict[str, Any]) -> None:
    broker.create_topic(topic, 2)
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    for record in records:
        producer.produce(topic, **record)
    assert producer.flush(60) == 0


@pytest.fixture
def peeked(broker: LocalBroker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [PEEK, broker.bootstrap_servers, *arguments])
        runpy.run_path(PEEK, run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_the_last_rows_are_shown_on_a_line_each(broker: LocalBroker, peeked: Any) -> None:
    records = [{"key": f"k{number}", "value": "v" * 300, "partition": 0} for number in range(5)]
    produce(broker, "peek-rows", *records, {"value": b"\xff\x00", "partition": 1, "headers": [("h", b"1")]})
    lines = peeked("peek-rows", "--count", "2")
    assert len(lines) == 3, "two of each partition"
    assert any("peek-rows-0 @ 4  2" in line and "key=k4  value=vvv" in line for line in lines)
    assert any("key=null  value=(2 bytes)  headers: h=1" in line for line in lines)
    assert max(map(len, lines)) < 300
    assert len(peeked("peek-rows", "--from", "beginning", "--count", "1")) == 1
    assert any("key=k3" in line for line in peeked("peek-rows", "--from", "3"))


def test_dead_letters_are_shown_and_written_back(broker: LocalBroker, tmp_path: Path, peeked: Any) -> None:
    dead_letter = {"key": "a", "value": "too large", "headers": [("own", b"\xff"), *CONTEXT]}
    produce(broker, "peek-dead-letters", {**dead_letter, "timestamp": 5000})
    broker.create_topic("peek-orders", 1)
    (shown,) = peeked("peek-dead-letters")
    assert "rejected by peek-orders: the record is larger [2J than 1000" in shown
    (whole,) = peeked("peek-dead-letters", "--json")
    file = tmp_path / "dead-letters.jsonl"
    mended = {**json.loads(whole), "value": "small"}
    file.write_text("".join(json.dumps(one) + "\n" for one in (mended, {**mended, "origin": "peek-rows"})))
    (line,) = peeked("peek-orders", "--write-back", str(file))
    assert line == "1 dead letters written back to peek-orders; 1 that other topics rejected were left out"
    (back,) = peeked("peek-orders", "--json")
    found = json.loads(back)
    assert (found["key"], found["value"], found["timestamp"]) == ("a", "small", 5000)
    assert found["headers"] == [["own", {"base64": "/w=="}]]


def test_a_login_stands_in_a_file(tmp_path: Path, peeked: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "client.json"
    login = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "none", "sasl_plain_password": "s3cret"}
    given: dict[str, object] = {**login, "bootstrap_timeout_ms": 1000}
    file.write_text(json.dumps(given))
    with pytest.raises(SystemExit) as ended:
        peeked("peek-rows", "--client", str(file))
    assert "error: " in str(ended.value)
    assert "s3cret" not in str(ended.value) + "".join(capsys.readouterr())


def test_dead_letters_that_fail_do_not_hide_those_that_are_written(peek: Any) -> None:
    sent = (Mock(), Mock(**{"get.side_effect": KafkaTimeoutError("no broker")}), Mock())
    with pytest.raises(RuntimeError, match=r"^1 of 3 dead letters .*others are written.*line 2: .*no broker"):
        peek["write_back"](Mock(**{"send.side_effect": sent}), "t", [json.dumps(DEAD_LETTER)] * 3)


class Refuses:
    def send(self, *_: object, **__: object) -> None:
        raise AssertionError("it was written")


DEAD_LETTER: dict[str, Any] = {"key": None, "value": "v", "headers": [], "origin": "t"}


def test_a_dead_letter_that_cannot_be_written_keeps_all_from_being_written(peek: Any) -> None:
    cut_off = DEAD_LETTER | {"headers": [["kafka-chunked.errors.value.length", "9"]]}
    bad: list[tuple[Any, str]] = [
        (DEAD_LETTER | {"key": 1}, "is a text"),
        (cut_off, "was cut"),
        ([], "attribute"),
    ]
    for row, problem in bad:
        with pytest.raises(ValueError, match=rf"^line 2: .*{problem}.*Nothing was written"):
            peek["write_back"](Refuses(), "t", [json.dumps(DEAD_LETTER), json.dumps(row)])
    # Whoever writes to the topic of dead letters does not choose what is written, and where.
    for origin in ("other", None, 7, ["t"]):
        assert peek["write_back"](Refuses(), "t", [json.dumps(DEAD_LETTER | {"origin": origin})]) == (0, 1)


def test_a_line_holds_no_control_characters(peek: Any) -> None:
    """Catches: an end of the whole output at one row with microseconds in place of milliseconds."""
    row = {**ROW, "key": "\x1b[2J", "value": "a\nb", "headers": [["\x1b]0;h\x07", "1"]]}
    expected = "t-0 @ 1  1970-01-01T00:00:00.000Z  key= [2J  value=a b  headers:  ]0;h =1"
    assert peek["line_of"](row) == expected
    assert "  1700000000000000 ms  " in peek["line_of"]({**ROW, "timestamp": 1_700_000_000_000_000})
    assert peek["CONTEXT"] == (PREFIX.decode(), CUT_PREFIX.decode()), "it knows the headers of the sink"


def test_a_place_that_is_none_is_refused_and_what_is_missing_is_named(
    peeked: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="there is no topic 'nowhere'"):
        peeked("nowhere")
    with pytest.raises(SystemExit):
        peeked("t", "--from", "begining")
    assert "'begining' is neither 'beginning', 'end' nor an offset" in capsys.readouterr().err
