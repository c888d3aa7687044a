"""``df.writeStream`` through real Spark to a real broker: micro-batches, checkpoints, modes, triggers."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from local_kafka import LocalBroker
from tests.support.topics import producer_ids, read_topic
from tests.support.waiting import throughout, until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_numbers = itertools.count()
PARTITIONS = 2
Stream = Callable[..., "DataStreamWriter"]


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    folder = tmp_path / "inbox"
    folder.mkdir()
    return folder


@pytest.fixture
def stream(broker: LocalBroker, topic: str, tmp_path: Path) -> Stream:
    """A writer to the test's topic; all queries of a test share a checkpoint."""

    def writer(frame: DataFrame, mode: str = "append", **options: str) -> DataStreamWriter:
        return (
            frame.writeStream.format("kafka-chunked")
            .outputMode(mode)
            .option("kafka.bootstrap.servers", broker.bootstrap_servers)
            .option("topic", topic)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .options(**options)
        )

    return writer


@pytest.fixture(autouse=True)
def _no_query_is_left(spark: SparkSession) -> Iterator[None]:
    yield
    for query in spark.streams.active:
        query.stop()


def lines_of(spark: SparkSession, folder: Path) -> DataFrame:
    """A stream of the lines of a folder's files, one file a micro-batch, oldest first."""
    return spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(folder))


def put(folder: Path, name: str, lines: list[str]) -> None:
    # Renamed into place: the file source must not see half a file.
    draft = folder.parent / name
    draft.write_text("".join(f"{line}\n" for line in lines))
    # Spark reads the oldest first, by milliseconds: files of the same one would come in any order.
    made = 1_700_000_000 + next(_numbers)
    os.utime(draft, (made, made))
    draft.rename(folder / name)


def run_to_end(writer: DataStreamWriter) -> StreamingQuery:
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(240), "the query did not end"
    return query


def values(broker: LocalBroker, topic: str) -> list[str]:
    return [(row.value or b"").decode() for row in read_topic(broker, topic)]


def test_micro_batches_one_after_another_by_the_same_producers(
    spark: SparkSession, broker: LocalBroker, stream: Stream, topic: str, inbox: Path
) -> None:
    """Some of them empty; a restart goes on where the query stopped."""
    contents = [["dropped"], ["a", "b"], [], *([str(number)] for number in range(5))]
    for number, lines in enumerate(contents):
        put(inbox, f"{number}.txt", lines)
    frame = lines_of(spark, inbox).where("value <> 'dropped'")
    query = run_to_end(stream(frame))
    with_rows = [progress["batchId"] for progress in query.recentProgress if progress["numInputRows"]]
    assert with_rows == [0, 1, 3, 4, 5, 6, 7]
    expected = ["a", "b", *map(str, range(5))]
    assert sorted(values(broker, topic)) == sorted(expected)
    ids = producer_ids(broker.log_dir(0).glob(f"{topic}-*"))
    # Spark has two workers here and gives a task to either; each keeps its producer.
    assert 1 <= len(ids) <= 2, f"{len(ids)} producers wrote {len(contents)} micro-batches"
    assert -1 not in ids, "not idempotent"
    put(inbox, "last.txt", ["last"])
    for _ in range(2):
        run_to_end(stream(frame))
    assert sorted(values(broker, topic)) == sorted([*expected, "last"])


def test_a_failed_micro_batch_is_written_after_the_restart(
    spark: SparkSession, broker: LocalBroker, stream: Stream, topic: str, inbox: Path
) -> None:
    put(inbox, "0.txt", ["a"])
    put(inbox, "1.txt", ["b"])
    frame = lines_of(spark, inbox)
    # The second micro-batch fails in its task, as its row is too large for what these options allow.
    failing = frame.selectExpr("CASE WHEN value = 'b' THEN repeat('b', 5000) ELSE value END AS value")
    query = stream(failing, **{"kafka.max.request.size": "1000"}).trigger(availableNow=True).start()
    with pytest.raises(Exception, match="RecordTooLargeError"):
        query.awaitTermination(240)
    assert values(broker, topic) == ["a"]
    run_to_end(stream(frame))
    assert sorted(values(broker, topic)) == ["a", "b"]


def test_stopped_at_any_moment_loses_nothing(
    spark: SparkSession, broker: LocalBroker, stream: Stream, topic: str
) -> None:
    def start() -> StreamingQuery:
        rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 2000).load()
        writer = stream(rows.selectExpr("cast(value AS string) AS value"))
        return writer.trigger(processingTime="0 seconds").start()

    done = 0
    for pause in (0.0, 0.35):
        query = start()
        until(
            lambda query=query, least=done: (query.lastProgress or {}).get("batchId", -1) > least, "progress"
        )
        throughout(lambda query=query: query.isActive, pause)
        progress = query.lastProgress
        assert progress is not None
        done = progress["batchId"]
        query.stop()
    counts = Counter(map(int, values(broker, topic)))
    # What was in flight when a query stopped is written again. Of the last query's, any part may be there.
    assert set(range(2000 * (done + 1))) <= set(counts)


def test_complete_mode_appends_every_result(
    spark: SparkSession, broker: LocalBroker, stream: Stream, topic: str, inbox: Path
) -> None:
    put(inbox, "0.txt", ["a", "a", "b"])
    put(inbox, "1.txt", ["a", "c"])
    counts = lines_of(spark, inbox).groupBy("value").count()
    # One partition: the order of the results then is that of the micro-batches.
    frame = counts.selectExpr("value AS key", "cast(count AS string) AS value", "0 AS partition")
    run_to_end(stream(frame, mode="complete"))
    rows = [(row.key, row.value) for row in read_topic(broker, topic)]
    assert sorted(rows[:2]) == [(b"a", b"2"), (b"b", b"1")]
    assert sorted(rows[2:]) == [(b"a", b"3"), (b"b", b"1"), (b"c", b"1")]


def test_refused_by_spark_and_at_planning(spark: SparkSession, stream: Stream, inbox: Path) -> None:
    put(inbox, "0.txt", ["a"])
    lines = lines_of(spark, inbox)
    for writer, reason in (
        (stream(lines.groupBy("value").count().select("value"), mode="update"), "not support Update mode"),
        (stream(lines, **{"kafka.acks": "2"}), r"ConfigurationError: Option 'kafka\.acks' is not one of all"),
    ):
        query = writer.trigger(availableNow=True).start()
        with pytest.raises(Exception, match=reason):
            query.awaitTermination(240)


def test_continuous_trigger_commits_nothing(
    spark: SparkSession, broker: LocalBroker, stream: Stream, topic: str, tmp_path: Path
) -> None:
    rate = spark.readStream.format("rate").option("rowsPerSecond", 10).option("numPartitions", 1).load()
    query = (
        stream(rate.selectExpr("cast(value AS string) AS value"))
        .trigger(continuous="200 milliseconds")
        .start()
    )
    checkpoint = tmp_path / "checkpoint"
    # Epochs end, but the sink refuses each: Spark logs the refusal and counts nothing as written.
    until(lambda: len(list((checkpoint / "offsets").glob("[0-9]*"))) >= 3, "epochs")
    throughout(lambda: not list((checkpoint / "commits").glob("[0-9]*")), 2, "no epoch is committed")
    query.stop()
    assert list((checkpoint / "commits").glob("[0-9]*")) == []
    assert values(broker, topic) == []
