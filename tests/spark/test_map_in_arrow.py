"""``kafka_sink.write`` and ``foreach_batch`` through real Spark to a real broker.

``make matrix`` runs the same on PySpark 3.5 and 4.0, with retries and speculation.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import kafka_sink
from kafka_sink import spark_application
from kafka_sink.coordinator.rendezvous import LocationFolder
from kafka_sink.driver import driver_process
from kafka_sink.errors import ChangedBatchError, ConfigurationError, SchemaError
from kafka_sink.options import texts
from kafka_sink.spark import map_in_arrow
from local_kafka import LocalBroker
from tests.support.commands import printed_by
from tests.support.surroundings import Environ, Modules
from tests.support.topics import read_to_end, read_topic, save
from tests.support.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Options = Callable[..., dict[str, Any]]


@pytest.fixture
def options(broker: LocalBroker, topic: str) -> Options:
    def given(**more: Any) -> dict[str, Any]:
        return {"kafka.bootstrap.servers": broker.bootstrap_servers, "topic": topic, **more}

    return given


def numbers(spark: SparkSession, count: int, tasks: int = 2) -> DataFrame:
    return spark.range(0, count, 1, tasks).selectExpr("cast(id as string) value")


def values(broker: LocalBroker, topic: str) -> list[int]:
    """What readers of committed rows see."""
    return sorted(int(value) for value in read_to_end(broker.bootstrap_servers, topic))


def await_values(broker: LocalBroker, topic: str, expected: list[int]) -> None:
    """Brokers write the markers of a commit after their response to it."""

    def arrived() -> bool:
        found = values(broker, topic)
        assert len(found) <= len(expected)
        return found == expected

    until(arrived, f"{len(expected)} rows", within_s=240, poll_s=0.1)


def test_every_row_arrives_and_the_result_says_where(
    spark: SparkSession, broker: LocalBroker, topic: str, options: Options, tmp_path: Path
) -> None:
    frame = spark.range(0, 3000, 1, 3).selectExpr(
        "cast(id as string) value",
        "cast(id % 7 as string) key",
        "array(named_struct('key', 'h', 'value', X'AA')) headers",
        "timestamp'2013-01-01 05:00:00Z' timestamp",
        "if(id = 5, 77, null) partition",
    )
    more = {"errors.tolerance": "all", "kafka.max.block.ms": 10_000}
    report = {"delivery.report.path": str(tmp_path / "report.jsonl")}
    written = kafka_sink.write(frame, options(**more, **report))
    rows = read_topic(broker, topic)
    assert {row.value for row in rows} == {str(number).encode() for number in range(3000) if number != 5}
    assert {(row.headers, row.timestamp_ms) for row in rows} == {((("h", b"\xaa"),), 1357016400000)}
    assert (written.rows, written.skipped, written.already_written) == (2999, 1, False)
    assert list(written.skip_reasons.values()) == [1]
    ends = {row.partition: sum(one.partition == row.partition for one in rows) for row in rows}
    assert {one["partition"]: one["endOffset"] for one in written.partitions} == ends
    line = json.loads((tmp_path / "report.jsonl").read_text())
    assert (line["outcome"], line["partitions"]) == ("committed", written.partitions)


def test_map_in_arrow_shares_the_application_with_the_data_source(
    spark: SparkSession, options: Options, environ: Environ
) -> None:
    """Catches: a coordinator of its own, in a folder that the user's applications share."""
    environ(SPARK_LOCAL_DIRS="/nonexistent/folder of many applications")
    frame = numbers(spark, 10)
    save(frame, options())
    application = map_in_arrow.application_of(spark.sparkContext)
    place = LocationFolder.of(application.local_dirs)
    before = place.found()
    assert before is not None
    kafka_sink.write(frame, options())
    assert place.found() == before
    with spark_application.planning_for(application):
        assert spark_application.folder() in application.local_dirs
        driver = driver_process.find_driver_process()
        assert driver is not None
        assert "org.apache.spark.deploy.SparkSubmit" in driver.arguments()


def test_failed_job_logs_the_rows_that_were_written(
    spark: SparkSession, options: Options, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark gives no row of such a job to the driver."""
    # Of two cores, one is free for the third task once the first or the second one has finished.
    frame = spark.range(0, 3, 1, 3).selectExpr("'hidden' value", "if(id = 2, 99, null) partition")
    with pytest.raises(Exception, match=r"MissingPartitionError: .*column 'partition' has 99") as failed:
        kafka_sink.write(frame, options(**{"kafka.max.block.ms": 8000}))
    assert "hidden" not in str(failed.value)
    assert re.search("aborted; Kafka keeps what the other tasks wrote: [12] rows acknowledged", caplog.text)


def test_exactly_once_a_job_that_fails_leaves_nothing_and_a_version_is_written_once(
    spark: SparkSession, broker: LocalBroker, topic: str, options: Options
) -> None:
    """Catches: a version without partitions, for which no task runs, was not recorded."""
    once = options(**{"delivery.guarantee": "exactly-once", "txnAppId": topic})
    failing = spark.range(0, 100, 1, 4).selectExpr("cast(if(id = 99, raise_error('no'), id) as string) value")
    with pytest.raises(Exception, match="no"):
        kafka_sink.write(failing, {**once, "txnVersion": 1})
    assert values(broker, topic) == []
    first, second = (kafka_sink.write(numbers(spark, 100), {**once, "txnVersion": 1}) for _ in range(2))
    assert (first.rows, first.already_written) == (100, False)
    assert (second.rows, second.already_written) == (0, True)
    empty = numbers(spark, 0)
    assert empty.rdd.getNumPartitions() == 0
    first, second = (kafka_sink.write(empty, {**once, "txnVersion": 2}) for _ in range(2))
    assert (first.rows, first.already_written, second.already_written) == (0, False, True)
    with pytest.raises(ChangedBatchError, match="was written before with 0 rows"):
        kafka_sink.write(numbers(spark, 100), {**once, "txnVersion": 2})
    assert kafka_sink.write(empty, options()).rows == 0
    await_values(broker, topic, list(range(100)))


def test_a_query_writes_each_micro_batch_once_even_if_spark_runs_it_again(
    spark: SparkSession, broker: LocalBroker, topic: str, options: Options, tmp_path: Path
) -> None:
    write = kafka_sink.foreach_batch(options(**{"delivery.guarantee": "exactly-once"}))
    checkpoint = tmp_path / "checkpoint"
    for part in range(2):
        rows = spark.range(part * 100, part * 100 + 100).selectExpr("cast(id as string) value")
        rows.coalesce(1).write.mode("append").text(str(tmp_path / "in"))
        for _ in range(2):
            source = spark.readStream.text(str(tmp_path / "in")).writeStream.foreachBatch(write)
            query = source.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
            assert query.awaitTermination(240)
            # So Spark runs the micro-batch again.
            shutil.rmtree(checkpoint / "commits")
            (checkpoint / "commits").mkdir()
            for done in range(part):
                (checkpoint / "commits" / str(done)).write_text('v1\n{"nextBatchWatermarkMs":0}')
    await_values(broker, topic, list(range(200)))


def test_invalid_writes_are_refused_with_the_reason(spark: SparkSession, options: Options) -> None:
    frame = numbers(spark, 1)
    with pytest.raises(ConfigurationError, match=r"foreachBatch\(kafka_sink.foreach_batch\(options\)\)"):
        kafka_sink.foreach_batch(frame, 0)  # type: ignore[arg-type]  # as Spark calls it, if it was not called
    with pytest.raises(ConfigurationError, match=r"foreachBatch\(kafka_sink.foreach_batch\(options\)\)"):
        kafka_sink.write(spark.readStream.format("rate").load(), options())
    with pytest.raises(SchemaError, match="Required attribute 'value' not found"):
        kafka_sink.write(spark.range(1), options())
    with pytest.raises(ConfigurationError, match="txnVersion"):
        kafka_sink.foreach_batch(options(txnVersion=1))
    with pytest.raises(ConfigurationError, match=r"elsewhere use kafka_sink\.write"):
        kafka_sink.foreach_batch(options())(frame, 1)
    with pytest.raises(ConfigurationError, match=r"did you mean 'kafka\.linger\.ms'"):
        kafka_sink.foreach_batch(options(**{"kafka.lingerms": 1}))


def test_write_refuses_data_that_is_not_a_spark_dataframe() -> None:
    with pytest.raises(ConfigurationError, match=r"not pyarrow\.lib\.Table; kafka_sink\.write_arrow accepts"):
        kafka_sink.write(pa.table({"value": ["a"]}), {})  # type: ignore[arg-type]


def test_options_may_be_python_values() -> None:
    assert texts({"a": True, "b": 1, "c": 0.5, "d": None, "e": "E"}) == {
        "a": "true",
        "b": "1",
        "c": "0.5",
        "e": "E",
    }
    with pytest.raises(ConfigurationError, match=r"sasl\.password' must be a text.* not bytes") as caught:
        texts({"kafka.sasl.password": b"hunter2"})
    assert "hunter2" not in str(caught.value)


def test_a_pyspark_without_data_sources_is_enough() -> None:
    """As 3.5. Catches: an import of a class that only later versions have."""
    code = """
        import sys
        sys.modules["pyspark.sql.datasource"] = None
        import pickle
        import kafka_sink.spark.map_in_arrow
        from kafka_sink.model import TaskResult
        from kafka_sink.spark.write import TaskCommitted
        print(pickle.loads(pickle.dumps(TaskCommitted(TaskResult(records=3)))).result.records)
    """
    assert printed_by(code) == "3"


def test_missing_pandas_is_said_before_anything_starts(
    spark: SparkSession, options: Options, modules: Modules
) -> None:
    """Catches: PySpark's bare PACKAGE_NOT_INSTALLED, once the topic was created."""
    modules(pandas=None)
    with pytest.raises(ConfigurationError, match=r"need pandas on the driver.*-m pip install 'pandas>=2,<3'"):
        kafka_sink.write(numbers(spark, 1), options())


def test_register_on_spark_3_5_names_what_to_use() -> None:
    of_3_5: Any = SimpleNamespace(version="3.5.9", conf={})
    with pytest.raises(ConfigurationError, match=r"has no data sources in Python: use kafka_sink\.write"):
        kafka_sink.register(of_3_5)
