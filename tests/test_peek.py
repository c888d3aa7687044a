"""Rows and dead letters are shown in the terminal, and mended letters are written back."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from kafka_sink import peek
from kafka_sink.errors import ConfigurationError, DeliveryError
from kafka_sink.local_broker import LocalBroker
from kafka_sink.peek import line_of, main, write_back

CONTEXT = [
    ("__connect.errors.topic", b"peek-orders"),
    ("__connect.errors.exception.message", b"the record is larger\x1b[2J than 1000"),
]


def produce(broker: LocalBroker, topic: str, *records: dict[str, Any]) -> None:
    broker.create_topic(topic, 2)
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    for record in records:
        producer.produce(topic, **record)
    assert producer.flush(60) == 0


def peeked(broker: LocalBroker, *arguments: str) -> list[str]:
    out = io.StringIO()
    assert main([*arguments, "--bootstrap-servers", broker.bootstrap_servers], out) == 0
    return out.getvalue().splitlines()


def test_the_last_rows_are_shown_on_a_line_each(broker: LocalBroker) -> None:
    records = [{"key": f"k{number}", "value": "v" * 300, "partition": 0} for number in range(5)]
    produce(broker, "peek-rows", *records, {"value": b"\xff\x00", "partition": 1, "headers": [("h", b"1")]})
    lines = peeked(broker, "peek-rows", "--count", "2")
    assert len(lines) == 3, "two of each partition"
    assert any("peek-rows-0 @ 4  2" in line and "key=k4  value=vvv" in line for line in lines)
    assert any("key=null  value=(2 bytes)  headers: h=1" in line for line in lines)
    assert max(map(len, lines)) < 300
    (first,) = peeked(broker, "peek-rows", "--from", "beginning", "--partition", "0", "--count", "1")
    assert "key=k0" in first


def test_letters_are_shown_mended_and_written_back(broker: LocalBroker, tmp_path: Path) -> None:
    letter = {"key": "a", "value": "too large", "headers": [("own", b"\xff"), *CONTEXT], "timestamp": 5000}
    produce(broker, "peek-letters", letter)
    broker.create_topic("peek-orders", 1)
    (shown,) = peeked(broker, "peek-letters")
    assert "rejected by peek-orders: the record is larger [2J than 1000" in shown
    (whole,) = peeked(broker, "peek-letters", "--json")
    file = tmp_path / "letters.jsonl"
    file.write_text(json.dumps({**json.loads(whole), "value": "small"}) + "\n")
    assert peeked(broker, "--write-back", str(file)) == ["1 letters written back"]
    (back,) = peeked(broker, "peek-orders", "--json")
    found = json.loads(back)
    assert (found["key"], found["value"], found["timestamp"]) == ("a", "small", 5000)
    assert found["headers"] == [["own", {"base64": "/w=="}]]


def test_what_is_missing_is_named(broker: LocalBroker, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nowhere", "--bootstrap-servers", broker.bootstrap_servers]) == 1
    assert "there is no topic 'nowhere'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"key": None, "value": "v", "headers": []}, "name the topic by --to"),
        ({"key": 1, "value": "v", "headers": [], "origin": "t"}, "is a text"),
        (
            {
                "key": None,
                "value": "v",
                "headers": [["kafka-chunked.errors.value.length", "9"]],
                "origin": "t",
            },
            "the letter was cut",
        ),
    ],
)
def test_a_letter_that_cannot_be_written_keeps_all_from_being_written(
    row: dict[str, Any], problem: str
) -> None:
    class Producer:
        def send(self, *_: object, **__: object) -> None:
            raise AssertionError("it was written")

    good: dict[str, Any] = {"key": None, "value": "v", "headers": [], "origin": "t"}
    with pytest.raises(ConfigurationError, match=rf"^line 2: .*{problem}.*Nothing was written"):
        write_back(Producer(), [json.dumps(good), json.dumps(row)], None)


def test_a_line_holds_no_control_characters() -> None:
    row = {"topic": "t", "partition": 0, "offset": 1, "timestamp": 0, "key": "\x1b[2J", "value": "a\nb"}
    assert line_of({**row, "headers": []}) == "t-0 @ 1  1970-01-01T00:00:00.000Z  key= [2J  value=a b"


def test_a_line_shows_an_instant_that_is_no_date() -> None:
    """Catches: an end of the whole output at one row with microseconds in place of milliseconds."""
    row = {"topic": "t", "partition": 0, "offset": 1, "key": None, "value": None, "headers": []}
    assert "  1700000000000000 ms  " in line_of({**row, "timestamp": 1_700_000_000_000_000})


def test_a_letter_that_the_client_refuses_does_not_hide_those_that_are_written() -> None:
    class Sent:
        def get(self, timeout: float) -> None: ...

    class Producer:
        def send(self, topic: str, **_: object) -> Sent:
            if " " in topic:
                raise ValueError("a topic has no spaces")
            return Sent()

    letters = [
        json.dumps({"key": None, "value": "v", "headers": [], "origin": name}) for name in ("t", "t t")
    ]
    with pytest.raises(DeliveryError, match=r"^1 of 2 letters .*the others are written.*line 2: ValueError"):
        write_back(Producer(), letters, None)


def test_a_place_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["t", "--bootstrap-servers", "h:1", "--from", "begining"])
    assert "'begining' is neither 'beginning', 'end' nor an offset" in capsys.readouterr().err


def test_an_interrupted_write_back_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(peek, "_write_back", interrupt)
    assert main(["--write-back", str(tmp_path), "--bootstrap-servers", "h:1"]) == 1
    assert "some letters may be written" in capsys.readouterr().err
