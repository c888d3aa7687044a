"""Dead letters as rows: Kafka Connect's headers, and cuts that say so."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.dead_letters.context_headers import can_be_cut, is_letter
from kafka_sink.dead_letters.letter import DeadLetter, RefusedLetter
from kafka_sink.rows.columns import extract
from kafka_sink.rows.letter_table import letter_plan, letter_table


def letter(**parts: Any) -> DeadLetter:
    known: dict[str, Any] = {
        "topic": "t",
        "partition": 3,
        "key": b"k",
        "value": b"v",
        "headers": (("own", b"1"),),
        "timestamp_ms": 5,
        "reason": "because",
        "error": "InvalidRowError",
    }
    return DeadLetter(**(known | parts))


def row(one: DeadLetter | RefusedLetter, max_bytes: int = 10_000) -> dict[str, Any]:
    [found] = letter_table([one], max_bytes, "7").to_pylist()
    return {**found, "headers": [(entry["key"], entry["value"]) for entry in found["headers"]]}


def test_a_letter_has_its_content_and_the_headers_of_kafka_connect() -> None:
    found = row(letter())
    assert (found["key"], found["value"]) == (b"k", b"v")
    assert found["headers"] == [
        ("own", b"1"),
        ("__connect.errors.topic", b"t"),
        ("__connect.errors.partition", b"3"),
        ("__connect.errors.connector.name", b"kafka-chunked"),
        ("__connect.errors.task.id", b"7"),
        ("__connect.errors.stage", b"KAFKA_PRODUCE"),
        ("__connect.errors.class.name", b"kafka_sink"),
        ("__connect.errors.exception.class.name", b"InvalidRowError"),
        ("__connect.errors.exception.message", b"because"),
        ("kafka-chunked.errors.timestamp", b"5"),
    ]


def test_what_a_row_lacks_is_left_out() -> None:
    found = row(letter(topic=None, partition=-1, key=None, value=None, headers=(), timestamp_ms=-1))
    assert (found["key"], found["value"]) == (None, None)
    names = [name for name, _ in found["headers"]]
    assert "__connect.errors.topic" not in names
    assert "__connect.errors.partition" not in names


@given(st.integers(0, 50_000), st.integers(0, 50_000), st.integers(0, 5_000), st.integers(2_000, 20_000))
def test_a_letter_fits_and_says_what_was_cut(key: int, value: int, header: int, limit: int) -> None:
    found = row(letter(key=b"k" * key, value=b"v" * value, headers=(("own", b"h" * header),)), limit)
    size = len(found["key"]) + len(found["value"])
    size += sum(len(name) + len(content) for name, content in found["headers"])
    assert size <= limit
    headers = dict(found["headers"])
    assert (len(found["key"]) < key) == ("kafka-chunked.errors.key.length" in headers)
    assert (len(found["value"]) < value) == ("kafka-chunked.errors.value.length" in headers)
    if len(found["value"]) < value:
        assert headers["kafka-chunked.errors.value.length"] == b"%d" % value


def test_a_letter_that_is_cut_again_keeps_the_first_length() -> None:
    first = row(letter(value=b"v" * 50_000), 20_000)
    refused = RefusedLetter(first["key"], first["value"], tuple(first["headers"]))
    again = row(refused, 5_000)
    assert len(again["value"]) < 5_000
    names = [name for name, _ in again["headers"]]
    assert names == [name for name, _ in first["headers"]]
    assert dict(again["headers"])["kafka-chunked.errors.value.length"] == b"50000"


def test_letters_have_the_present_time() -> None:
    """The row's own may be why it was refused, or so old that brokers delete the letter at once."""
    table = letter_table([letter(), letter(timestamp_ms=-7)], 10_000, "7")
    rows = extract(letter_plan("dead"), table, 1_700_000_000_000)
    assert rows.topics == ("dead",)
    assert rows.timestamps_ms is not None
    assert rows.timestamps_ms.tolist() == [1_700_000_000_000] * 2


def test_a_letter_that_is_only_context_cannot_be_cut() -> None:
    """Else it would be sent again for ever."""
    only = row(letter(value=None, key=None, headers=(), reason="r" * 10_000))
    assert sum(len(content) for _, content in only["headers"]) < 1_000
    assert not can_be_cut(RefusedLetter(None, b"", tuple(only["headers"])))
    assert can_be_cut(RefusedLetter(None, b"v", tuple(only["headers"])))
    stack = ("__connect.errors.exception.stacktrace", b"a row that is reprocessed has Kafka Connect's own")
    assert can_be_cut(RefusedLetter(None, None, (*only["headers"], stack)))


def test_a_row_of_the_users_own_is_no_letter() -> None:
    assert is_letter(row(letter())["headers"])
    assert not is_letter([("own", b"1")])
