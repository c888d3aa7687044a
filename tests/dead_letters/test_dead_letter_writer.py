"""Dead letters: Kafka Connect's headers, cuts that say so, and the error of a task that cannot write them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.dead_letters.dead_letter_writer import (
    DeadLetterWriter,
    dead_letter_plan,
    dead_letter_table,
    slices,
)
from kafka_sink.dead_letters.rejected_rows import UNLIMITED, DeadLetters, RejectedRows
from kafka_sink.dead_letters.row_rejection import rows_of_records
from kafka_sink.errors import BufferExhaustedError
from kafka_sink.model import TopicPartition
from kafka_sink.rows.columns import extract
from kafka_sink.varint import signed
from tests.support.rejected_rows import rejected_rows


def test_exhausted_memory_of_dead_letters_names_the_dead_letters_and_their_topic() -> None:
    """They have memory of their own, so kafka.buffer.memory is not to blame."""

    def append(_: object) -> None:
        raise BufferExhaustedError("no memory: 0 of kafka.buffer.memory = 8388608 bytes are free")

    dead_letters = DeadLetters("graveyard", UNLIMITED, 1 << 20)
    dead_letters.add(rejected_rows([b"v"] * 3, "t"))
    ordered: Any = None
    writer = DeadLetterWriter(dead_letters, lambda *_: ordered, append)
    with pytest.raises(BufferExhaustedError, match=r"3 dead letters.*topic\.name = 'graveyard'") as caught:
        writer.write()
    assert "buffer.memory" not in str(caught.value)


Header = tuple[bytes, bytes | None]
Content = tuple[bytes | None, bytes | None, tuple[Header, ...]]
OWN: tuple[Header, ...] = ((b"own", b"1"),)
MEGABYTE = 1_000_000


def field(content: bytes | None) -> bytes:
    return signed(-1) if content is None else signed(len(content)) + content


def body(key: bytes | None, value: bytes | None, headers: tuple[Header, ...]) -> bytes:
    """A record from its key's length on."""
    encoded = b"".join(field(name) + field(content) for name, content in headers)
    return field(key) + field(value) + signed(len(headers)) + encoded


def rejected(*rows: Content, max_bytes: int = MEGABYTE) -> RejectedRows:
    """Rows that a broker rejected."""
    bodies = [body(*row) for row in rows]
    ends = np.cumsum([len(one) for one in bodies], dtype=np.int64)
    times = np.arange(5, 5 + len(rows), dtype=np.int64)
    partition = TopicPartition("t", 3)
    return rows_of_records(b"".join(bodies), ends, times, partition, "because", "InvalidRowError", max_bytes)


def dead_letters(rows: RejectedRows, max_bytes: int = 10_000) -> list[dict[str, Any]]:
    found = dead_letter_table(rows, max_bytes, "7").to_pylist()
    return [{**one, "headers": [(entry["key"], entry["value"]) for entry in one["headers"]]} for one in found]


def dead_letter(
    key: bytes | None = b"k",
    value: bytes | None = b"v",
    headers: tuple[Header, ...] = OWN,
    max_bytes: int = 10_000,
) -> dict[str, Any]:
    [found] = dead_letters(rejected((key, value, headers), max_bytes=max_bytes), max_bytes)
    return found


def test_a_dead_letter_has_its_content_and_the_headers_of_kafka_connect() -> None:
    found = dead_letter()
    assert (found["key"], found["value"]) == (b"k", b"v")
    assert found["headers"] == [
        (b"own", b"1"),
        (b"__connect.errors.topic", b"t"),
        (b"__connect.errors.partition", b"3"),
        (b"__connect.errors.connector.name", b"kafka-chunked"),
        (b"__connect.errors.task.id", b"7"),
        (b"__connect.errors.stage", b"KAFKA_PRODUCE"),
        (b"__connect.errors.class.name", b"kafka_sink"),
        (b"__connect.errors.exception.class.name", b"InvalidRowError"),
        (b"__connect.errors.exception.message", b"because"),
        (b"kafka-chunked.errors.timestamp", b"5"),
    ]


def test_dead_letter_omits_missing_fields_and_bounds_its_context() -> None:
    rows = replace(rejected((None, None, ())), topic=pa.nulls(1, pa.binary()))
    rows = replace(rows, partition=np.array([-1]), timestamps_ms=np.array([-1]))
    [found] = dead_letters(rows)
    assert (found["key"], found["value"]) == (None, None)
    names = [name for name, _ in found["headers"]]
    assert len(names) == 6
    assert b"__connect.errors.topic" not in names
    assert b"__connect.errors.partition" not in names
    # A reason may be long.
    rows = replace(rejected((None, None, ())), reason="r" * 10_000)
    [only] = dead_letters(rows)
    assert sum(len(content) for _, content in only["headers"]) < 1_000


def contents() -> st.SearchStrategy[bytes | None]:
    return st.none() | st.binary(max_size=200) | st.sampled_from([b"x" * 5_000, b"y" * 70_000])


@given(
    st.lists(
        st.tuples(
            contents(), contents(), st.lists(st.tuples(st.binary(max_size=100), contents()), max_size=4)
        ),
        min_size=1,
        max_size=20,
    ),
    st.integers(1_500, 60_000),
    st.integers(0, 10),
)
def test_each_dead_letter_fits_and_is_what_one_row_alone_makes(
    given_rows: list[tuple[bytes | None, bytes | None, list[Header]]], limit: int, skip: int
) -> None:
    """Columns of many rows, sliced or not, mean the same as each row alone."""
    contents = [(key, value, tuple(headers)) for key, value, headers in given_rows]
    skip = min(skip, len(contents) - 1)
    rows = rejected(*contents, max_bytes=limit).slice(skip, len(contents))
    for found, (key, value, headers) in zip(dead_letters(rows, limit), contents[skip:], strict=True):
        said = dict(found["headers"][-12:])
        size = sum(len(name) + len(content or b"") for name, content in found["headers"])
        assert size + len(found["key"] or b"") + len(found["value"] or b"") <= limit
        for name, full, kept in (("key", key, found["key"]), ("value", value, found["value"])):
            assert (full is None) == (kept is None)
            assert kept is None or full is None or full.startswith(kept)
            length = said.get(b"kafka-chunked.errors.%s.length" % name.encode())
            assert length == (None if full == kept else b"%d" % len(full or b""))
        dropped = said.get(b"kafka-chunked.errors.headers.dropped")
        if dropped is None:
            assert tuple(found["headers"][: len(headers)]) == headers
        else:
            assert dropped == b"%d" % len(headers)
            assert found["headers"][0][0] == b"__connect.errors.topic"


def test_dead_letters_have_the_present_time() -> None:
    """The row's own may be why it was rejected, or so old that brokers delete the dead letter at once."""
    table = dead_letter_table(rejected((b"k", b"v", OWN), (None, b"w", ())), 10_000, "7")
    rows = extract(dead_letter_plan("dead"), table, 1_700_000_000_000)
    assert rows.topics == ("dead",)
    assert rows.timestamps_ms is None, "all rows get the present time then"


def test_headers_that_are_too_many_for_any_dead_letter_are_counted_and_not_decoded() -> None:
    found = dead_letter(headers=((b"", None),) * 300_000, max_bytes=MEGABYTE)
    assert dict(found["headers"])[b"kafka-chunked.errors.headers.dropped"] == b"300000"
    assert len(found["headers"]) == 10


def test_dead_letters_are_made_a_megabyte_at_once() -> None:
    rows = rejected(
        *[(b"%d" % number, b"v" * 1000, ()) for number in range(5000)], (None, b"x" * 3_000_000, ())
    )
    found = list(slices(rows))
    assert sum(piece.count for piece in found) == rows.count
    assert len(found) == 9
    assert all(piece.count < 1000 for piece in found)
    assert [key for piece in found for key in piece.key.to_pylist()] == [
        *(b"%d" % number for number in range(5000)),
        None,
    ]
