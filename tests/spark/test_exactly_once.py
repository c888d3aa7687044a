"""``delivery.guarantee=exactly-once`` through real Spark: jobs, queries, foreachBatch, and what failed ones
leave."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer

from kafka_sink.options import parse
from kafka_sink.transactions import planning
from kafka_sink.transactions.client import TransactionClient
from kafka_sink.transactions.operations import ListOpen, TransactionSteps, describe
from local_kafka import LocalBroker
from tests.support.topics import log_ends, read_to_end
from tests.support.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.readwriter import DataFrameWriter
    from pyspark.sql.streaming.readwriter import DataStreamWriter

Job = Callable[..., "DataFrameWriter"]
Stream = Callable[..., "DataStreamWriter"]


@pytest.fixture
def options(broker: LocalBroker, topic: str) -> dict[str, str]:
    servers = broker.bootstrap_servers
    return {"kafka.bootstrap.servers": servers, "topic": topic, "delivery.guarantee": "exactly-once"}


@pytest.fixture
def job(options: dict[str, str]) -> Job:
    def writer(frame: DataFrame, **more: str) -> DataFrameWriter:
        rows = frame.selectExpr("cast(id as string) value")
        return rows.write.format("kafka-chunked").mode("append").options(**options, **more)

    return writer


@pytest.fixture
def stream(options: dict[str, str], tmp_path: Path) -> Stream:
    """A writer with the test's checkpoint and report."""
    paths = {"delivery.report.path": tmp_path / "report", "checkpointLocation": tmp_path / "checkpoint"}

    def writer(frame: DataFrame, **more: str) -> DataStreamWriter:
        given = {**options, **{name: str(path) for name, path in paths.items()}, **more}
        return frame.writeStream.format("kafka-chunked").options(**given)

    return writer


def rates(spark: SparkSession, rows: int, tasks: int, column: str = "value") -> DataFrame:
    """So many rows a micro-batch, by numbers, in so many tasks."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows)
    return source.option("numPartitions", tasks).load().selectExpr(column)


@pytest.fixture(autouse=True)
def _no_query_is_left(spark: SparkSession) -> Iterator[None]:
    yield
    for query in spark.streams.active:
        query.stop()


def committed(broker: LocalBroker, topic: str) -> list[int]:
    """What readers of committed rows see, once markers are written."""
    return sorted(int(value) for value in read_to_end(broker.bootstrap_servers, topic))


def await_rows(broker: LocalBroker, topic: str, expected: list[int]) -> None:
    def arrived() -> bool:
        rows = committed(broker, topic)
        assert len(rows) <= len(expected), Counter(rows).most_common(3)
        return rows == expected

    until(arrived, f"{len(expected)} rows", within_s=240, poll_s=0.1)


def asked(broker: LocalBroker, steps: TransactionSteps[Any]) -> Any:
    parsed = parse({"kafka.bootstrap.servers": broker.bootstrap_servers})
    with closing(TransactionClient(parsed.options)) as client:
        return client.run(steps, 30_000)


def open_under(prefix: str) -> TransactionSteps[list[str]]:
    (names,) = yield (ListOpen(prefix),)
    return list(names)


def hold_up_readers(prefix: str) -> TransactionSteps[bool]:
    """Whether rows of an open transaction of the prefix are in the topic."""
    found = yield from describe(*(yield from open_under(prefix)))
    return any(one.partitions for one in found.values())


def test_a_job_that_is_run_again_under_its_version_writes_nothing_and_says_so(
    spark: SparkSession, job: Job, broker: LocalBroker, topic: str, tmp_path: Path
) -> None:
    """Catches: a lower version that was never written was skipped, and a skip was reported as a write."""
    named = {"txnAppId": "nightly", "delivery.report.path": str(tmp_path / "report")}
    job(spark.range(10).repartition(3), txnVersion="20260131", **named).save()
    # However its rows are split by then.
    job(spark.range(10).repartition(5), txnVersion="20260131", **named).save()
    job(spark.range(10, 20), txnVersion="20260130", **named).save()
    assert outcomes(tmp_path / "report") == ["committed", "skipped", "committed"]
    await_rows(broker, topic, list(range(20)))


def test_failed_job_leaves_no_visible_rows_and_no_open_transaction(
    spark: SparkSession, job: Job, broker: LocalBroker, topic: str
) -> None:
    failing = spark.range(0, 1000, 1, 4).selectExpr("if(id = 999, raise_error('no'), id) id")
    prefix = {"transactional.id.prefix": f"failing-{topic}"}
    with pytest.raises(Exception, match="no"):
        job(failing, **prefix).save()
    assert asked(broker, open_under(f"failing-{topic}")) == []
    assert committed(broker, topic) == []
    job(spark.range(10), **prefix).save()
    await_rows(broker, topic, list(range(10)))


def test_a_query_with_for_each_batch_that_fails_after_its_write_writes_each_row_once(
    spark: SparkSession, job: Job, broker: LocalBroker, topic: str, tmp_path: Path
) -> None:
    """It fails behind its commit, is started again, and loses a commit file: its batch runs three times."""
    checkpoint = tmp_path / "checkpoint"
    runs: Counter[int] = Counter()

    def run(until: int, tasks: int) -> None:
        """Ends by an error, as ``stop`` may interrupt a batch before or after its rows are committed."""

        def write(frame: DataFrame, batch_id: int) -> None:
            if batch_id > until:
                raise RuntimeError("enough")
            named = frame.withColumnRenamed("value", "id")
            job(named, txnAppId="for each batch", txnVersion=str(batch_id)).save()
            runs[batch_id] += 1
            if batch_id == 1 and runs[batch_id] == 1:
                raise RuntimeError("after the write")

        writer = rates(spark, 100, tasks).writeStream.foreachBatch(write)
        query = writer.option("checkpointLocation", str(checkpoint)).start()
        with pytest.raises(Exception, match="RuntimeError"):
            query.awaitTermination(240)

    run(1, 2)
    assert runs == {0: 1, 1: 1}
    run(1, 3)
    assert lose_commit(checkpoint) == 1
    # Spark runs only the last batch of its offset log again: as if the driver had died before the next one.
    for name in ("2", ".2.crc"):
        (checkpoint / "offsets" / name).unlink()
    run(2, 1)
    assert runs == {0: 1, 1: 3, 2: 1}
    assert committed(broker, topic) == list(range(300))


def lose_commit(checkpoint: Path) -> int:
    """Delete the last file of Spark's commit log; returns its batch."""
    lost = max(int(name) for name in os.listdir(checkpoint / "commits") if name.isdigit())
    for name in (str(lost), f".{lost}.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)
    return lost


def test_a_completed_batch_whose_commit_file_is_lost_is_run_again_and_writes_nothing(
    spark: SparkSession, broker: LocalBroker, stream: Stream, topic: str, tmp_path: Path
) -> None:
    """No marker, either. Catches: rows doubled by other ids, where the checkpoint was spelt otherwise."""

    def run(tasks: int, spelt: str) -> list[int]:
        rows = rates(spark, 100, tasks, "cast(value as string) value")
        query = stream(rows, checkpointLocation=spelt).trigger(once=True).start()
        assert query.awaitTermination(240)
        return log_ends(broker.bootstrap_servers, topic)

    checkpoint = tmp_path / "checkpoint"
    written = run(2, f"{checkpoint}")
    for tasks, spelt in ((1, f"file://{checkpoint}/"), (3, f"file:{tmp_path}//checkpoint")):
        assert lose_commit(checkpoint) == 0
        assert run(tasks, spelt) == written
    run(2, f"{checkpoint}")
    assert outcomes(tmp_path / "report") == ["committed", "skipped", "skipped", "committed"]
    await_rows(broker, topic, list(range(200)))


def test_a_checkpoint_that_lost_its_last_batch_loses_no_rows(
    spark: SparkSession, broker: LocalBroker, stream: Stream, topic: str, tmp_path: Path
) -> None:
    """Catches: Spark plans another batch under the number that was lost, and all its rows were skipped."""
    checkpoint, source, report = (tmp_path / name for name in ("checkpoint", "source", "report"))
    source.mkdir()

    def run(**options: str) -> None:
        query = stream(spark.readStream.text(str(source)), **options).trigger(availableNow=True).start()
        assert query.awaitTermination(240)

    def add(first: int, last: int) -> None:
        (source / str(first)).write_text("".join(f"{row}\n" for row in range(first, last)))

    def lose(batch: int) -> None:
        for log in ("offsets", "commits", "sources/0"):
            for name in (str(batch), f".{batch}.crc"):
                (checkpoint / log / name).unlink(missing_ok=True)

    for first in (0, 100):
        add(first, first + 100)
        run()
    lose(1)
    add(200, 250)
    with pytest.raises(Exception, match=r"batch 1 .* written before with 100 rows.* this run has 150"):
        run()
    assert committed(broker, topic) == list(range(200))
    assert outcomes(report) == ["committed", "committed", "aborted"]
    run(**{"transaction.rerun.compare": "none"})
    lose(1)
    (source / "200").unlink()
    run()
    assert outcomes(report)[3:] == ["skipped", "skipped"]
    lose(1)
    lose(0)
    with pytest.raises(Exception, match=r"batch 0 .* comes after batch 1 was written"):
        run()
    assert committed(broker, topic) == list(range(200))


def outcomes(report: Path) -> list[str]:
    """Of the writes with this delivery.report.path, in turn."""
    return [json.loads(line)["outcome"] for line in report.read_text().splitlines()]


def test_two_sinks_of_one_name_do_not_lose_the_second_ones_rows(
    spark: SparkSession, broker: LocalBroker, topic: str, options: dict[str, str]
) -> None:
    """Catches: the second write was skipped as if it were the first, as no option told the two apart."""

    def save(first: int, **more: str) -> None:
        rows = spark.range(first, first + 50).selectExpr(f"'{topic}' topic", "cast(id as string) value")
        rows.write.format("kafka-chunked").mode("append").options(**of_rows, **more).save()

    of_rows = {"transaction.progress.topic": options.pop("topic"), **options}
    save(0, txnAppId="sinks", txnVersion="0")
    with pytest.raises(Exception, match="give each write a txnAppId of its own"):
        save(50, txnAppId="sinks", txnVersion="0")
    save(50, txnAppId="other sink", txnVersion="0")
    save(0, txnAppId="sinks", txnVersion="0")
    await_rows(broker, topic, list(range(100)))


def test_a_query_that_is_stopped_in_a_batch_holds_up_nobody(
    spark: SparkSession,
    broker: LocalBroker,
    stream: Stream,
    topic: str,
    options: dict[str, str],
    tmp_path: Path,
) -> None:
    """Catches: an abort that is left to the next run or to kafka.transaction.timeout.ms."""

    def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # 10,000 rows each. Spark's buffers keep the last ones from the sink.
        for number, batch in enumerate(batches):
            if number > 5:
                threading.Event().wait(120)
            yield batch

    prefix = {"transactional.id.prefix": f"stopped-{topic}"}
    slow = rates(spark, 80_000, 1, "lpad(value, 50, '0') value").mapInArrow(slowly, "value string")
    query = stream(slow, **prefix).start()

    def is_open() -> str:
        assert query.isActive, query.exception()
        # It has another name until the checkpoint has the query's id.
        raw, ours = {"checkpointlocation": str(tmp_path / "checkpoint")}, parse(options | prefix).options
        planned = planning.plan(ours, raw, is_streaming=True, for_tasks=False)
        assert planned is not None
        return planned.scope.prefix if asked(broker, hold_up_readers(planned.scope.prefix)) else ""

    name = until(is_open, "an open transaction", within_s=240, poll_s=0.05)
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    producer.produce(topic, b"1000000")
    assert producer.flush(60) == 0
    query.stop()
    assert asked(broker, open_under(name)) == [], "when stop returns"
    await_rows(broker, topic, [1000000])


def test_impossible_guarantee_is_refused_at_planning(spark: SparkSession, job: Job) -> None:
    for option, value, reason in (
        ("kafka.acks", "1", "needs kafka.acks=all"),
        ("kafka.transaction.timeout.ms", "86400000", "transaction.max.timeout.ms"),
    ):
        with pytest.raises(Exception, match=reason):
            job(spark.range(1), **{option: value}).save()
