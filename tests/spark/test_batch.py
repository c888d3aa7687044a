"""``df.write`` through real Spark to a real broker: columns, options, refusals."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kafka_sink import register
from local_kafka import LocalBroker
from tests.support.topics import Row, read_topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameWriter, SparkSession

Write = Callable[..., "DataFrameWriter"]


@pytest.fixture
def write(broker: LocalBroker) -> Write:
    def writer(frame: DataFrame, **options: str) -> DataFrameWriter:
        given = {"kafka.bootstrap.servers": broker.bootstrap_servers, **options}
        return frame.write.format("kafka-chunked").mode("append").options(**given)

    return writer


def failure(action: Callable[[], Any]) -> str:
    """What Spark raises, its Python tracebacks included."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Spark's classes differ by version and path
        action()
    return str(caught.value)


def values(rows: list[Row]) -> list[bytes | None]:
    return sorted((row.value for row in rows), key=lambda value: value or b"")


COLUMNS = """
    SELECT * FROM VALUES
      ('k1', X'01', 2, TIMESTAMP '2013-01-01 05:00:00.123456Z', array(struct('h', X'AA'), struct('h', null))),
      ('',   X'',   0, TIMESTAMP '1970-01-01 00:00:00Z', array()),
      (null, null,  1, TIMESTAMP '2013-01-01 05:00:00.999999Z', null)
    AS t(key, value, partition, timestamp, headers)
"""


@pytest.mark.parametrize(("large", "strategy"), [("true", "full"), ("false", "incremental")])
def test_every_column_arrives(
    spark: SparkSession, broker: LocalBroker, write: Write, topic: str, large: str, strategy: str
) -> None:
    frame = spark.sql(COLUMNS).selectExpr(
        "'nobody reads this' AS extra",
        "key",
        "value",
        "partition",
        "timestamp",
        "cast(headers AS array<struct<key:string,value:binary>>) AS headers",
        f"'{topic}' AS topic",
    )
    spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", large)
    try:
        write(frame, **{"kafka.buffer.memory.allocation.strategy": strategy}).save()
    finally:
        spark.conf.unset("spark.sql.execution.arrow.useLargeVarTypes")
    assert sorted(read_topic(broker, topic)) == [
        Row(0, b"", b"", 0, ()),
        Row(1, None, None, 1357016400999, ()),
        Row(2, b"k1", b"\x01", 1357016400123, (("h", b"\xaa"), ("h", None))),
    ]


def test_rows_of_many_small_and_uneven_batches_and_of_none(
    spark: SparkSession, broker: LocalBroker, write: Write, topic: str
) -> None:
    write(spark.range(0).selectExpr("'x' AS value"), topic=topic).save()
    write(spark.createDataFrame([], "value string"), topic=topic).save()
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "7")
    try:
        # Five partitions, of which one is empty and one has a single row.
        frame = (
            spark.range(0, 500, 1, 5).where("id < 301 OR id >= 400").selectExpr("cast(id AS string) AS value")
        )
        write(frame, topic=topic).save()
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    expected = [str(number).encode() for number in [*range(301), *range(400, 500)]]
    assert values(read_topic(broker, topic)) == sorted(expected)


def test_invalid_columns_and_options_are_refused_before_a_task_runs(
    spark: SparkSession, broker: LocalBroker, write: Write
) -> None:
    """The error of planning ends with our text. tests/spark/test_datasource.py and tests/options have all."""
    unknown = "ConfigurationError: Unknown option 'kafka.lingr.ms' (did you mean 'kafka.linger.ms'?)"
    for name, options, text in (
        ("Value", {}, "SchemaError: Required attribute 'value' not found"),
        ("value", {"kafka.lingr.ms": "5"}, unknown),
    ):
        message = failure(write(spark.sql(f"SELECT 'a' AS {name}"), topic="t", **options).save)
        assert text in message
        assert "Failed to initialize Python data source writer" in message
        assert '  File "' not in message
    frame = spark.sql("SELECT 'a' AS value").write.format("kafka-chunked")
    message = failure(lambda: frame.option("kafka.bootstrap.servers", broker.bootstrap_servers).save())
    assert "UNSUPPORTED_DATA_SOURCE_SAVE_MODE" in message, "without mode('append')"
    for reader in (spark.read, spark.readStream):
        assert "kafka-chunked cannot read. Use Spark's own source to read" in failure(
            reader.format("kafka-chunked").load
        )


def test_other_threads_write_once_they_have_registered_and_the_jvms_own_writer_does(
    spark: SparkSession, broker: LocalBroker, write: Write, topic: str
) -> None:
    """Without, Spark does not find the data source there, though it does in this thread."""

    def job(name: str) -> None:
        register(spark)
        write(spark.sql(f"SELECT '{name}' AS value"), topic=topic).save()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(job, ("a", "b")))
    # As Scala and Java do.
    writer = spark.sql("SELECT 'jvm' AS value")._jdf.write().format("kafka-chunked").mode("append")
    writer.option("kafka.bootstrap.servers", broker.bootstrap_servers).option("topic", topic).save()
    assert values(read_topic(broker, topic)) == [b"a", b"b", b"jvm"]


def test_sql_writes_by_a_view_and_by_a_table_whose_options_stand_at_the_insert(
    spark: SparkSession, broker: LocalBroker, topic: str
) -> None:
    given = {"kafka.bootstrap.servers": broker.bootstrap_servers, "topic": topic}
    view, at_insert = (
        ", ".join(f"'{name}'{between}'{value}'" for name, value in given.items()) for between in (" ", " = ")
    )
    spark.sql(f"CREATE TEMPORARY VIEW orders (value STRING) USING `kafka-chunked` OPTIONS ({view})")
    spark.sql(f"CREATE TABLE orders_table (value STRING) USING `kafka-chunked` OPTIONS ({view})")
    try:
        spark.sql("INSERT INTO orders VALUES ('by view')")
        spark.sql(f"INSERT INTO orders_table WITH ({at_insert}) VALUES ('by table')")
        message = failure(lambda: spark.sql("INSERT INTO orders_table VALUES ('lost')"))
        assert "write INSERT INTO orders WITH ('kafka.bootstrap.servers' = 'host:port'" in message
        message = failure(lambda: spark.sql("CREATE TEMPORARY VIEW other USING `kafka-chunked`"))
        assert "name the columns: CREATE TEMPORARY VIEW" in message
    finally:
        spark.catalog.dropTempView("orders")
        spark.sql("DROP TABLE orders_table")
    assert values(read_topic(broker, topic)) == [b"by table", b"by view"]


def test_bad_rows_fail_the_job(spark: SparkSession, write: Write, topic: str) -> None:
    """In tasks: the row's fault is named, its content is not. tests/rows/test_columns.py has all faults."""
    frame = spark.sql("SELECT 'hidden' AS value, -1 AS partition")
    message = failure(lambda: write(frame, topic=topic).save())
    assert "InvalidRowError: " in message
    assert "column 'partition' is negative in 1 of 1 rows" in message
    assert message.count('  File "') <= 1, message
    assert "hidden" not in message


def test_keys_fill_batches_above_the_default_size(
    spark: SparkSession, broker: LocalBroker, write: Write
) -> None:
    from pyspark.sql import functions as F

    topic = "batches-above-the-default"
    events = spark.range(21_000, numPartitions=2).select(
        F.concat(F.lit("user-"), F.col("id")).alias("key"),
        F.concat_ws("", *(F.sha2(F.concat("id", F.lit(part)), 256) for part in "abcd")).alias("value"),
    )
    create = {"topic.create": "true", "topic.partitions": "3", "topic.config.max.message.bytes": "2097152"}
    sizes = {"kafka.batch.size": "1MiB", "kafka.max.request.size": "2MiB"}
    write(events, topic=topic, **create, **sizes, **{"kafka.linger.ms": "60000"}).save()
    rows = read_topic(broker, topic)
    assert len({row.value for row in rows}) == len(rows) == 21_000
    found = [size for folder in broker.log_dir(0).glob(f"{topic}-*") for size in batch_sizes(folder)]
    assert len(found) == 6
    assert min(found) > 0.9 * 2**20
    assert max(found) <= 2**20


def batch_sizes(folder: Path) -> Iterator[int]:
    """Bytes of each V2 batch in a partition's segments."""
    for segment in folder.glob("*.log"):
        data, at = segment.read_bytes(), 0
        while at + 12 <= len(data) and (length := struct.unpack_from(">i", data, at + 8)[0]):
            yield length
            at += 12 + length
