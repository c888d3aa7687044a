"""The sentence that helps is the last line of the driver's log, whatever Spark and Python print after it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kafka_sink import spark_application
from kafka_sink.driver import last_line
from kafka_sink.spark_application import SparkApplication, planning_for
from local_kafka import LocalBroker
from tests.support.commands import run
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the driver's stderr is found in /proc")


class Driver:
    """``sleep`` stands in for the driver's JVM."""

    def __init__(self, log: Path) -> None:
        self.log = log
        with log.open("ab") as stderr:
            self.process = subprocess.Popen(["sleep", "600"], stderr=stderr)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    started = Driver(tmp_path / "log")
    try:
        with planning_for(SparkApplication(str(tmp_path), started.process.pid, {})):
            yield started
    finally:
        started.end()
        for waiting in last_line.STARTED:
            waiting.wait()


def test_the_last_failure_comes_behind_all_that_the_driver_prints(driver: Driver) -> None:
    last_line.leave("a stream", "an earlier failure")
    last_line.leave("", "what to do")
    waiting = last_line.STARTED[-1]
    until(lambda: str(driver.log) in opened_by(waiting.pid))
    with driver.log.open("a") as log:
        log.write("a traceback\n")
    driver.end()
    waiting.wait()
    assert driver.log.read_text().splitlines() == ["a traceback", "what to do"]


def test_a_write_that_is_committed_later_takes_the_line_back(driver: Driver) -> None:
    last_line.leave("", "what to do")
    waiting = last_line.STARTED[-1]
    last_line.take_back("another stream")
    assert waiting.poll() is None
    last_line.take_back("")
    assert waiting.wait() == -signal.SIGTERM
    driver.end()
    assert driver.log.read_text() == ""


def test_a_pid_that_another_process_has_by_now_is_left_alone(driver: Driver) -> None:
    spark_application.note(last_line.NOTE, json.dumps([driver.process.pid, "another start", ""]))
    last_line.take_back("")
    assert driver.process.poll() is None


def opened_by(pid: int) -> list[str]:
    found = []
    for one in Path(f"/proc/{pid}/fd").iterdir():
        # A process that starts opens and closes files meanwhile.
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(one))
    return found


JOB = """
import sys, traceback
from pyspark.sql import SparkSession
from pyspark.sql.functions import udf
servers, checkpoint = sys.argv[1:]
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()

def options(writer):
    return (writer.format("kafka-chunked").option("kafka.bootstrap.servers", servers)
        .option("topic", "last-line").option("topic.create", "true").option("kafka.max.block.ms", "3000"))

def fails(write, name):
    print("begin", name, file=sys.stderr, flush=True)
    try:
        write()
    except Exception:
        print("end", name, file=sys.stderr, flush=True)
    else:
        sys.exit("it succeeded")

rows = spark.range(20).selectExpr("cast(id as string) value", "7 as partition").coalesce(1)
fails(options(spark.range(1).write).mode("append").save, "planning")
fails(options(rows.write).mode("append").save, "task")
for name, rows in {
    "cast": spark.sql("SELECT string(int(id || 'x')) AS value FROM range(9)"),
    "raise": spark.sql("SELECT if(id = 8, raise_error('mine'), 'x') AS value FROM range(9)"),
    "udf": spark.range(9).select(udf(lambda id: str(1 / 0))("id").alias("value")),
}.items():
    # One task: Spark waits for others that it kills.
    fails(options(rows.coalesce(1).write).mode("append").save, name)
from_rate = spark.readStream.format("rate").option("rowsPerSecond", 100).load()
from_rate = from_rate.selectExpr("cast(value as string) value", "7 as partition").coalesce(1)
options(from_rate.writeStream).option("checkpointLocation", checkpoint).start().awaitTermination()
"""


def test_planning_tasks_and_streams(
    broker: LocalBroker, project_environment: dict[str, str], tmp_path: Path
) -> None:
    """Catches: 16 lines of traceback and a bare SQLSTATE behind the sentence, 200 lines of tasks, and 109 of
    a stream's Java frames. An application of its own, because the last line comes when the driver has ended.
    """
    script = tmp_path / "job.py"
    script.write_text(JOB)
    done = run(
        [sys.executable, script, broker.bootstrap_servers, tmp_path / "checkpoint"],
        project_environment,
        code=1,
    )
    log = done.stderr
    assert "short_tracebacks.py" not in log
    planning = log[log.index("begin planning") : log.index("end planning")].splitlines()
    (line,) = [one for one in planning if " ERROR kafka_sink: " in one]
    assert "Required attribute 'value' not found" in line
    assert len(planning) <= 4, "lines up to the one that helps"
    task = log[log.index("begin task") : log.index("end task")].splitlines()
    partition = "Invalid partition: column 'partition' has 7 in a row for topic 'last-line'"
    (line,) = [one for one in task if " ERROR kafka_sink: " in one]
    assert "kafka-chunked: aborted, 1 of 1 tasks did not finish: task 0 on " in line
    assert partition in line
    assert task.index(line) >= len(task) - 3
    assert "ArrowInvalid" not in log
    for name, cause in (("cast", "CAST_INVALID_INPUT"), ("raise", "mine"), ("udf", "ZeroDivisionError")):
        above, said, _ = log[log.index(f"begin {name}") : log.index(f"end {name}")].partition(
            "Spark failed while it computed the rows: its error stands above"
        )
        assert said
        assert cause in above
    last = log.splitlines()[-1]
    assert " ERROR kafka_sink: kafka-chunked, micro-batch " in last
    assert partition in last
    assert last.endswith("or set errors.tolerance=all to skip such rows")
