"""What befalls the coordinator while tasks write: a round of each, and a driver that is killed for real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.coordinator_harness import eventually
from tests.support.fake_broker import FakeCluster
from tests.support.fault_rounds import FAULTS, run_round

ROOT = Path(__file__).resolve().parents[2]
DRIVER = """
import sys
from pyspark.sql import SparkSession

spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.log.level", "ERROR")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.bindAddress", "127.0.0.1")
    .getOrCreate()
)
spark.sql("SELECT 't' AS topic, 'v' AS value").write.format("kafka-chunked").mode("append").option(
    "kafka.bootstrap.servers", sys.argv[1]
).save()
print(spark.sparkContext._gateway.proc.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_no_row_and_no_hang(fault: str, tmp_path: Path) -> None:
    # Chance decides when; every run of the tests is another round.
    run_round(fault, int.from_bytes(os.urandom(4), "big"), tmp_path)


def children() -> dict[int, tuple[int, str]]:
    """Parent and command of every process."""
    shown = subprocess.run(["ps", "-axww", "-o", "pid=,ppid=,stat=,args="], capture_output=True, text=True)
    fields = (line.split(None, 3) for line in shown.stdout.splitlines())
    return {int(one[0]): (int(one[1]), one[3]) for one in fields if len(one) == 4 and one[2][0] != "Z"}


def coordinators_under(ancestor: int) -> list[int]:
    known = children()

    def is_under(pid: int) -> bool:
        while pid in known and pid != ancestor:
            pid = known[pid][0]
        return pid == ancestor

    return [pid for pid, (_, args) in known.items() if "-m kafka_sink.coordinator" in args and is_under(pid)]


def test_nothing_is_left_of_a_driver_that_was_killed(project_environment: dict[str, str]) -> None:
    with FakeCluster({"t": 1}) as cluster:
        script = subprocess.Popen(
            [sys.executable, "-c", DRIVER, cluster.bootstrap_servers],
            cwd=ROOT,
            env=project_environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert script.stdout is not None
            jvm = int(script.stdout.readline())
            assert sum(batch.record_count for batch in cluster.batches("t", 0)) == 1
            found = coordinators_under(jvm)
            assert len(found) == 2, "a supervisor and the process that serves"
            # The script lives on and waits for nothing: its JVM stays as a zombie.
            os.kill(jvm, signal.SIGKILL)
            eventually(lambda: not children().keys() & set(found), within_s=60)
        finally:
            script.kill()
            script.communicate()
