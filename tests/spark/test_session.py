"""Settings of a session with which Spark passes rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
from pyspark.sql import SparkSession

import kafka_sink
from kafka_sink.errors import ConfigurationError

ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"


@pytest.fixture
def session(spark: SparkSession) -> Iterator[SparkSession]:
    """A session of its own, with Spark's defaults."""
    found = spark.newSession()
    for name in (ROWS, BYTES):
        found.conf.unset(name)
    yield found
    # The one that other tests find.
    spark.createDataFrame([], "value string")


def batch_rows(session: SparkSession) -> list[int]:
    """Rows of each Arrow batch that a function in Python gets of 25,000."""

    def count(batches):  # type: ignore[no-untyped-def]
        import pyarrow as pa

        for batch in batches:
            yield pa.record_batch([pa.array([batch.num_rows])], names=["rows"])

    frame = session.range(0, 25_000, 1, 1).mapInArrow(count, "rows long")
    return [row.rows for row in frame.collect()]


def test_rows_come_in_batches_of_4_megabytes(session: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "kafka_sink"):
        assert kafka_sink.tune(session, row_bytes=495) == {ROWS: "8000", BYTES: "2147483647"}
        assert batch_rows(session) == [8000, 8000, 8000, 1000]
        # What is set stays, and the log says so.
        assert kafka_sink.tune(session, row_bytes=444) == {}
        assert kafka_sink.tune(session, row_bytes=4000) == {}
    assert caplog.messages == [
        f"kafka_sink.tune: set {ROWS}=8000, set {BYTES}=2147483647",
        f"kafka_sink.tune: left {ROWS}=8000 (it would be 9000)",
        f"kafka_sink.tune: left {ROWS}=8000 (it would be 1000)",
    ]


def test_tune_changes_only_settings_that_the_session_lacks() -> None:
    conf = {ROWS: "8000"}
    session = SimpleNamespace(conf=SimpleNamespace(get=conf.get, set=conf.__setitem__))
    assert kafka_sink.tune(cast("SparkSession", session), row_bytes=495) == {BYTES: "2147483647"}
    assert conf == {ROWS: "8000", BYTES: "2147483647"}


def test_settings_follow_the_size_of_rows(session: SparkSession) -> None:
    for row_bytes, rows in ((20, "10000"), (511, "7000"), (10_000, "400"), (5_000_000, "1")):
        for name in (ROWS, BYTES):
            session.conf.unset(name)
        made = kafka_sink.tune(session, row_bytes)
        assert made[ROWS] == rows
        assert made.get(BYTES) == ("2147483647" if row_bytes < 512 else None)
    for wrong in (0, "10kB", None, float("nan")):
        with pytest.raises(ValueError, match=f"row_bytes is {wrong!r}: give the bytes"):
            kafka_sink.tune(session, cast("int", wrong))


def test_an_argument_that_is_not_a_session_is_an_error() -> None:
    for call in (kafka_sink.register, partial(kafka_sink.tune, row_bytes=1000)):
        with pytest.raises(ConfigurationError, match="must be a SparkSession, not NoneType"):
            call(cast("SparkSession", None))
