"""The coordinator in a Spark application on a real broker: what jobs ask, and where its process is."""

from __future__ import annotations

import itertools
import subprocess
from typing import TYPE_CHECKING

from local_kafka import LocalBroker
from tests.support.proxy import ProxyCluster
from tests.support.topics import save

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

METADATA = 3
TOPICS = 10
# How many jobs may be disturbed by the machine's other work.
_JOBS = 5


def test_a_second_job_asks_for_no_metadata(spark: SparkSession, broker: LocalBroker) -> None:
    jobs = itertools.count()
    with ProxyCluster(broker.bootstrap_servers) as proxies:

        def asked(prefix: str) -> int:
            """The metadata requests of a job that writes to these topics."""
            before = proxies.requests[METADATA]
            frame = spark.range(TOPICS * 8, numPartitions=8).selectExpr(
                f"concat('{prefix}-', id % {TOPICS}) AS topic", "cast(id AS string) AS value"
            )
            # Another batch.size is another producer in each worker: it knows only what the coordinator sends.
            options = {"kafka.linger.ms": "0", "kafka.batch.size": str(100_000 + next(jobs))}
            save(frame, {"kafka.bootstrap.servers": proxies.bootstrap_servers, **options})
            return proxies.requests[METADATA] - before

        # Tasks ask by themselves if the coordinator takes over 200 ms: on a busy machine, not in all jobs.
        for number in range(_JOBS):
            prefix = f"shared-{number}"
            for topic in range(TOPICS):
                broker.create_topic(f"{prefix}-{topic}", 1)
            first = asked(prefix)
            if first <= 5:
                break
        later = next((count for _ in range(_JOBS) if (count := asked(prefix)) <= 2), None)
    # The plan's and the coordinator's. Tasks on their own make 8 or more.
    assert first <= 5
    assert later is not None
    assert coordinator_is_alone_in_its_group(of_driver(spark))


def of_driver(spark: SparkSession) -> int:
    """The process id of the session's JVM, which its coordinator is started for."""
    jvm = spark._jvm
    assert jvm is not None
    return int(jvm.java.lang.ProcessHandle.current().pid())


def coordinator_is_alone_in_its_group(driver: int) -> bool:
    """Python's daemon hangs up its process group, and Spark kills its workers: neither must reach it.

    Other tests start coordinators at the same time, some of them in pytest's own group.
    """
    shown = subprocess.run(["ps", "-axww", "-o", "pgid=,args="], capture_output=True, text=True)
    processes = [line.split(maxsplit=1) for line in shown.stdout.splitlines()]
    texts = ("-m kafka_sink.coordinator", f'"driver": [{driver}, ')
    (group,) = (group for group, args in processes if all(text in args for text in texts))
    return [group for group, _ in processes].count(group) == 1
