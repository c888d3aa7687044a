"""The daemon that imports the sink before it forks Spark's workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from local_kafka import LocalBroker
from tests.support.commands import run
from tests.support.topics import numbers_in
from tests.support.waiting import until

linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="elsewhere PySpark's own daemon runs")

JOB = """
    import json, os, sys
    from pyspark.sql import SparkSession

    def look(batches):
        import random
        import numpy
        import pyarrow as pa
        loaded = {"kafka_sink.task.producer_cache", "pyspark.worker", "pyarrow.compute"} <= set(sys.modules)
        parent = open(f"/proc/{os.getppid()}/cmdline").read().split("\\0")
        for _ in batches:
            pass
        seen = [os.getpid(), loaded, parent, random.random(), float(numpy.random.random())]
        yield pa.record_batch([pa.array([json.dumps(seen)])], names=["seen"])

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .config("spark.python.daemon.module", "kafka_sink.daemon")
        .getOrCreate()
    )
    # Looks first: a worker that has run another task has imported what that needed.
    seen = [json.loads(row.seen) for row in spark.range(0, 2, 1, 2).mapInArrow(look, "seen string").collect()]
    rows = spark.range(0, 1000, 1, 2).selectExpr("cast(id as string) as value")
    rows.write.format("kafka-chunked").mode("append").options(**json.loads(sys.argv[1])).save()
    print(json.dumps(seen))
    print(spark.sparkContext._gateway.proc.pid, flush=True)
    sys.stdin.read()
"""


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


@linux
def test_workers_share_what_the_daemon_imported_and_nothing_is_left_of_a_driver_that_was_killed(
    broker: LocalBroker, project_environment: dict[str, str], tmp_path: Path
) -> None:
    broker.create_topic("by-daemon", 3)
    script, log = tmp_path / "job.py", tmp_path / "log"
    script.write_text(textwrap.dedent(JOB))
    options = {"kafka.bootstrap.servers": broker.bootstrap_servers, "kafka.compression.type": "zstd"}
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, script, json.dumps(options | {"topic": "by-daemon"})],
            env=project_environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as driver,
    ):
        try:
            assert driver.stdout is not None
            seen, jvm = (json.loads(driver.stdout.readline() or "null") for _ in range(2))
            assert jvm, log.read_text()
            found = coordinators_under(jvm)
            assert len(found) == 1
            # The script lives on and waits for nothing: its JVM stays as a zombie.
            os.kill(jvm, signal.SIGKILL)
            until(lambda: not children().keys() & set(found), within_s=60)
        finally:
            driver.kill()
    assert "kafka_sink.daemon" not in log.read_text()
    workers = {worker for worker, *_ in seen}
    assert all(loaded for _, loaded, *_ in seen)
    assert all("kafka_sink.daemon" in parent for _, _, parent, *_ in seen)
    assert len({first for *_, first, _ in seen}) == len(workers), "workers share a random generator"
    assert len({second for *_, second in seen}) == len(workers), "workers share numpy's random generator"
    rows = numbers_in(broker.bootstrap_servers, "by-daemon", 3)
    values = [number for numbers in rows.values() for number in numbers]
    assert sorted(values) == list(range(1000))


def preloaded(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A new process that has imported kafka_sink.daemon, but whose PySpark daemon only says that it runs."""
    before = """
        import os, sys, types
        from kafka_sink import daemon
        stand_in = types.ModuleType("pyspark.daemon")
        stand_in.manager = lambda: print("manager runs in", "pandas" in sys.modules)
        sys.modules["pyspark.daemon"] = stand_in
        os.execv = lambda path, arguments: (print("exec", *arguments[1:], flush=True), os._exit(0))
        sys.argv = ["daemon", "pyspark.worker"]
    """
    program = textwrap.dedent(before) + textwrap.dedent(code)
    return run([sys.executable, "-c", program], {**os.environ, "OMP_NUM_THREADS": "1", **environment})


@linux
def test_no_import_starts_a_thread() -> None:
    done = preloaded(
        "daemon.main(); print(daemon.is_single_threaded(), os.environ.get('JE_ARROW_MALLOC_CONF'))"
    )
    assert done.stdout.splitlines()[-1] == "True None", done.stderr
    assert done.stdout.startswith("manager runs")


@linux
def test_users_settings_of_jemalloc_stay() -> None:
    done = preloaded(
        "daemon.preload(); print(os.environ['JE_ARROW_MALLOC_CONF'])", JE_ARROW_MALLOC_CONF="narenas:1"
    )
    assert done.stdout.strip() == "narenas:1"


def test_sparks_own_daemon_runs_where_an_import_starts_a_thread(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = preloaded("daemon.MODULES = ('threaded',); daemon.main()", PYTHONPATH=path)
    assert done.stdout.strip() == "exec -m pyspark.daemon pyspark.worker"
    assert "pyspark.daemon runs in its place" in done.stderr


def test_sparks_own_daemon_runs_where_threads_cannot_be_counted() -> None:
    done = preloaded("daemon._THREADS = '/no/such/folder'; daemon.main()")
    assert done.stdout.strip() == "exec -m pyspark.daemon pyspark.worker"
    assert not done.stdout.startswith("manager")


def test_modules_that_cannot_be_imported_are_left_to_the_workers(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('broken')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = preloaded(
        "daemon.MODULES = ('broken', 'no_such', 'json.tool'); daemon.preload(); "
        "print('json.tool' in sys.modules)",
        PYTHONPATH=path,
    )
    assert done.stdout.strip() == "True"
