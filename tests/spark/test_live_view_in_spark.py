"""The live view and the delivery report of real Spark jobs: metrics equal what was written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from local_kafka import LocalBroker
from tests.support import live_view_client
from tests.support.planned_writes import lines
from tests.support.topics import save

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 20_000


def samples(view: str, name: str, topic: str) -> float:
    families = text_string_to_metric_families(live_view_client.get(f"{view}/metrics"))
    found = [one for family in families for one in family.samples if one.name == f"kafka_chunked_{name}"]
    return sum(one.value for one in found if one.labels["topic"] == topic)


def jobs(view: str, topic: str) -> list[dict[str, Any]]:
    shown = live_view_client.metrics(view)["jobs"]
    return [one for one in shown if topic in one["topics"]]


@pytest.fixture
def view(live_view_port: int) -> str:
    return f"http://127.0.0.1:{live_view_port}"


def options(broker: LocalBroker, topic: str, **more: str) -> dict[str, str]:
    return {"kafka.bootstrap.servers": broker.bootstrap_servers, "topic": topic, **more}


def test_the_metrics_of_a_batch_write_are_those_of_its_report(
    spark: SparkSession, broker: LocalBroker, tmp_path: Path, view: str
) -> None:
    topic, path = "live-batch", tmp_path / "report.jsonl"
    broker.create_topic(topic, 3)
    rows = spark.range(ROWS, numPartitions=4).selectExpr("cast(id AS string) AS value")
    save(rows, options(broker, topic, **{"delivery.report.path": str(path)}))
    (line,) = lines(path)
    assert (line["outcome"], line["queryId"], line["batchId"]) == ("committed", None, None)
    assert sum(one["rows"] for one in line["partitions"]) == ROWS
    offsets = {one["partition"]: one["offsets"] for one in line["partitions"]}
    assert all(ranges[0][0] == 0 and len(ranges) == 1 for ranges in offsets.values())
    assert sum(one["endOffset"] for one in line["partitions"]) == ROWS
    (job,) = jobs(view, topic)
    assert (job["state"], job["query"], job["counters"]["records"]) == ("committed", "", ROWS)
    assert job["tasks_done"] == 4
    assert samples(view, "record_send_total", topic) == ROWS
    assert samples(view, "sent_bytes_total", topic) == sum(one["bytes"] for one in line["partitions"])
    assert job["job"] not in {task["job"] for task in live_view_client.metrics(view)["tasks"]}
    live_view_client.eventually(view, lambda shown: shown["application"] == "kafka-chunked tests")


def test_micro_batches_are_one_job_under_the_id_of_their_query(
    spark: SparkSession, broker: LocalBroker, tmp_path: Path, view: str
) -> None:
    topic, path = "live-stream", tmp_path / "report.jsonl"
    broker.create_topic(topic, 2)
    for number in range(3):
        rows = spark.range(100 * number, 100 * number + 100, numPartitions=1)
        rows.write.mode("append").parquet(str(tmp_path / "source"))
    source = spark.readStream.schema("id long").option("maxFilesPerTrigger", "1")
    writer = (
        source.parquet(str(tmp_path / "source"))
        .selectExpr("cast(id AS string) AS value")
        .writeStream.format("kafka-chunked")
        .options(**options(broker, topic, **{"kafka.linger.ms": "7", "delivery.report.path": str(path)}))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
    )
    query = writer.queryName("live clicks").trigger(availableNow=True).start()
    assert query.awaitTermination(240)
    found = lines(path)
    assert [(line["queryId"], line["batchId"], line["outcome"]) for line in found] == [
        (str(query.id), batch, "committed") for batch in range(3)
    ]
    assert {(one["id"], one["batchId"]) for one in query.recentProgress} >= {
        (line["queryId"], line["batchId"]) for line in found
    }, "a StreamingQueryListener gets the same keys"
    assert [sum(one["rows"] for one in line["partitions"]) for line in found] == [100, 100, 100]
    (job,) = jobs(view, topic)
    assert (job["query"], job["batch"]) == (str(query.id), 2)
    assert job["counters"]["records"] == 300
    assert job["name"] == "live clicks"
    assert job["options"].items() >= {"topic": topic, "kafka.linger.ms": "7"}.items()
    assert job["state"] == "waiting for rows"
    assert job["acknowledged"] >= job["ended"] >= 0
    assert samples(view, "record_send_total", topic) == 300


def test_a_job_that_fails_says_why(spark: SparkSession, broker: LocalBroker, view: str) -> None:
    topic = "live-failed"
    broker.create_topic(topic, 1)
    rows = spark.range(10, numPartitions=1).selectExpr("repeat('x', 20000) AS value")
    given = options(broker, topic, **{"kafka.max.request.size": "10000"})
    spark.sparkContext.setJobDescription("nightly orders")
    try:
        with pytest.raises(Exception, match=r"kafka\.max\.request\.size"):
            save(rows, given)
    finally:
        spark.sparkContext.setJobDescription("")
    live_view_client.eventually(
        view, lambda shown: any(one["name"] == "nightly orders" for one in shown["jobs"])
    )
    shown = live_view_client.metrics(view)
    (job,) = (one for one in shown["jobs"] if one["name"] == "nightly orders")
    assert job["state"] == "aborted"
    assert "task 0 on " in job["cause"]
    assert "more than kafka.max.request.size = 10000" in job["cause"]
    live_view_client.eventually(
        view,
        lambda shown: any("write nightly orders aborted: task 0" in one["text"] for one in shown["events"]),
    )
