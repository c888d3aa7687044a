"""Rows that can never be written are taken out of a table, and the others stay in order."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.cluster.topic_state import MetadataSnapshot, TopicSnapshot
from kafka_sink.dead_letters.rejected_rows import DeadLetters, RejectedRows
from kafka_sink.dead_letters.row_rejection import RowRejection
from kafka_sink.errors import InvalidRowError, MetadataTimeoutError, MissingPartitionError
from kafka_sink.model import PartitionMetadata, TopicMetadata
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.rows.columns import extract
from tests.support.topic_metadata import topic_of

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
PLAN = ColumnPlan(value=0, topic_column=1, partition=2, headers=3, timestamp=4)
GOOD = {"topic": "t", "partition": 1, "headers": [{"key": "h", "value": b"x"}], "timestamp": 5_000_000}
FLAWS: dict[str, dict[str, Any]] = {
    "column 'topic' is null": {"topic": None},
    "the topic's name": {"topic": "no/topic"},
    "column 'partition' is negative": {"partition": -4},
    "column 'headers' has a null header": {"headers": [None]},
    "column 'headers' has a header without a key": {
        "headers": [{"key": "a", "value": None}, {"key": None, "value": b"x"}]
    },
    "column 'timestamp' is before 1970": {"timestamp": -2_000_000},
}


def table(rows: list[dict[str, Any]]) -> pa.Table:
    schema = pa.schema(
        [
            ("value", pa.binary()),
            ("topic", pa.string()),
            ("partition", pa.int32()),
            ("headers", HEADERS),
            ("timestamp", pa.timestamp("us", tz="UTC")),
        ]
    )
    return pa.Table.from_pylist(rows, schema)


def rejection() -> RowRejection:
    return RowRejection(None, lambda: 0.0, 1000, 1000)  # type: ignore[arg-type]  # asks no brokers here


def taken(dead_letters: DeadLetters) -> list[RejectedRows]:
    """The rows that wait for their dead letters, one by one."""
    found: list[RejectedRows] = []
    while isinstance(rows := dead_letters.take(), RejectedRows):
        found += (rows.slice(row, row + 1) for row in range(rows.count))
    return found


def value_of(row: RejectedRows) -> bytes | None:
    [value] = row.value.to_pylist()
    return value  # type: ignore[no-any-return]


def headers_of(row: RejectedRows) -> list[tuple[bytes, bytes | None]]:
    return list(zip(row.headers.keys.to_pylist(), row.headers.values.to_pylist(), strict=True))


def split(rows: pa.Table, plan: ColumnPlan = PLAN) -> tuple[list[bytes], list[RejectedRows]]:
    """The values that are left, and the rows that are not."""
    dead_letters = DeadLetters("dead", -1, 1000)
    left: list[bytes] = []

    def order(plan: ColumnPlan, rest: pa.Table) -> Any:
        extract(plan, rest, 0)
        left.extend(rest.column(0).to_pylist())
        return rest

    rejection().order(plan, rows, order, dead_letters)
    return left, taken(dead_letters)


@given(st.lists(st.sampled_from([None, *FLAWS]), max_size=30), st.integers(0, 5))
def test_each_invalid_row_has_its_dead_letter_and_its_reason(flaws: list[str | None], skip: int) -> None:
    rows = [
        GOOD | {"value": b"%d" % number} | (FLAWS[flaw] if flaw else {}) for number, flaw in enumerate(flaws)
    ]
    left, dead_letters = split(table(rows).slice(min(skip, len(rows))))
    expected = list(enumerate(flaws))[skip:]
    assert left == [b"%d" % number for number, flaw in expected if flaw is None]
    found = {value_of(dead_letter): dead_letter.reason for dead_letter in dead_letters}
    assert len(found) == len(dead_letters)
    assert found.keys() == {b"%d" % number for number, flaw in expected if flaw is not None}
    for number, flaw in expected:
        if flaw is not None:
            assert found[b"%d" % number].startswith(flaw)


def test_a_dead_letter_keeps_all_of_its_row() -> None:
    bad = GOOD | {"value": None, "headers": [None, {"key": None, "value": b"x"}], "timestamp": 5_000_999}
    _, [dead_letter] = split(table([bad]))
    assert (dead_letter.topic_of(0), value_of(dead_letter)) == ("t", None)
    assert dead_letter.key.to_pylist() == [None]
    assert (dead_letter.partition, dead_letter.timestamps_ms) == (np.array([1]), np.array([5_000]))
    assert headers_of(dead_letter) == [(b"", None), (b"", b"x")]
    # Spark's cast of binary to string keeps any bytes.
    garbage = pa.array([b"\xff\xfe"], pa.binary()).view(pa.string())
    entries = pa.StructArray.from_arrays([garbage, pa.array([b"x"])], ["key", "value"])
    headers = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), entries)
    bad = table([{"partition": 1, "timestamp": 5}])
    _, [dead_letter] = split(bad.set_column(0, "value", garbage).set_column(3, "headers", headers))
    assert value_of(dead_letter) == b"\xff\xfe"
    # Other bytes than UTF-8 break its readers.
    assert headers_of(dead_letter) == [("\ufffd\ufffd".encode(), b"x")]
    # Headers go by position, as Spark compares their names without case.
    kind = pa.list_(pa.struct([("Key", pa.string()), ("VALUE", pa.binary())]))
    headers = pa.array([[{"Key": "trace", "VALUE": b"v3"}], [], None], kind)
    plan = ColumnPlan(value=0, topic="t", partition=1, headers=2)
    rows = pa.table([pa.array([b"v"] * 3), pa.array([-1] * 3, pa.int32()), headers], ["v", "p", "h"])
    assert list(map(headers_of, split(rows, plan)[1])) == [[(b"trace", b"v3")], [], []]


def test_errors_not_about_rows_still_fail_the_task() -> None:
    def no_metadata(_plan: ColumnPlan, _rest: pa.Table) -> Any:
        raise MetadataTimeoutError("no broker responded")

    def unknown_rows(_plan: ColumnPlan, _rest: pa.Table) -> Any:
        raise InvalidRowError("some row is wrong")

    def no_rows(_plan: ColumnPlan, rest: pa.Table) -> Any:
        raise InvalidRowError("no row is wrong", np.zeros(rest.num_rows, dtype=np.bool_))

    rows = table([GOOD | {"value": b"v"}])
    for order in (no_metadata, unknown_rows, no_rows):
        with pytest.raises((MetadataTimeoutError, InvalidRowError)):
            rejection().order(PLAN, rows, order, DeadLetters("dead", -1, 1000))


def test_metadata_from_before_a_row_proves_nothing_however_slowly_the_thread_runs() -> None:
    """The age and the time since the row were of two looks at the clock. A thread that had to wait between
    them took what it had known for news, and skipped the row."""
    clock_ms = count(50.0, 50.0)
    topic = topic_of("t", None, (PartitionMetadata("t", 0, 0),))

    def await_topics(*asked: object, **_: float) -> dict[str, TopicMetadata]:
        if len(asked) > 3:
            raise MissingPartitionError("no broker has responded")
        return {"t": topic}

    def snapshot(now_ms: float, _: object) -> MetadataSnapshot:
        return MetadataSnapshot((TopicSnapshot(topic, now_ms),))

    cluster: Any = SimpleNamespace(await_topics=await_topics, snapshot=snapshot, topic=lambda _: topic)
    rejected = RowRejection(cluster, lambda: next(clock_ms), 1000, 1000)
    rows = extract(PLAN, table([GOOD | {"value": b"v"}]), 0)
    with pytest.raises(MetadataTimeoutError, match="whether topic 't' has the partitions"):
        rejected.await_topics(rows, lambda: None)
