"""A real standalone cluster of several executors, each with many Python workers, and their coordinator.

    python -m benchmarks.standalone_scale [--executors 4] [--workers 16] [--smoke]

Each executor is a JVM on a loopback address of its own (127.0.0.2 and following). All workers write keyless
rows at a steady rate to three real brokers. A broker is frozen for a while; each worker writes down when it
mutes that broker and which of its batches are probes. Then the coordinator's process is killed (SIGKILL)
while the job runs, and the next one stands still for 5 s (SIGSTOP). Figures: workers, connections to the
coordinator, the time from the first to the last mute, probes per interval, the time until all executors are
connected to the restarted coordinator, and rows lost or written twice.

Afterwards all workers write a little to a new topic, through proxies that count requests by API. Before and
while the broker is frozen there is no proxy, whose processor time the workers would miss.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import frozen_run, paced_rows
from benchmarks.frozen_run import BROKERS, PARTITIONS, Contender, Load
from benchmarks.muted_together import PREFIX, judged, notes_of
from benchmarks.surroundings import RESULTS
from kafka_sink.local_broker import LocalBroker
from tests.support.proxy import ProxyCluster
from tests.support.standalone_cluster import StandaloneCluster

RATE_OF_A_WORKER = 50
ROWS_OF_A_TASK = 1000
# Else the start of all workers takes the processors for a minute.
SETTINGS = {"spark.python.daemon.module": "kafka_sink.daemon"}
APIS = {0: "Produce", 3: "Metadata", 22: "InitProducerId"}
ESTABLISHED = "01"
# After this the kernel has closed the connections of a process that was killed.
_CLOSED_S = 0.1
# From the kill until the next process stands still, and for how long.
STALL_AFTER_S, STALL_S = 6.0, 5.0


class Watch(threading.Thread):
    """Counts connections to the coordinator, kills its process some time after the broker is back, and stops
    the next one for a while."""

    def __init__(self, folder: Path, executors: int, kill_after_s: float) -> None:
        super().__init__(name="watch", daemon=True)
        self.most_connections = 0
        self.reconnected_s: float | None = None
        self.stalled = False
        # From the stall on, and when the job was over.
        self.most_since_stall = self.connections = 0
        self.ended = threading.Event()
        self._folder = folder
        self._executors = executors
        self._kill_after_s = kill_after_s
        self._connected_at: float | None = None
        self._stopped: tuple[int, float] | None = None

    def run(self) -> None:
        try:
            self._watch()
        finally:
            self._go_on()

    def _go_on(self) -> None:
        if self._stopped is not None:
            os.kill(self._stopped[0], signal.SIGCONT)
            self._stopped = None

    def _stall(self, folder: Path, now: float) -> None:
        """Once, and not for ever."""
        if self._stopped is not None and now > self._stopped[1] + STALL_S:
            self._go_on()
        elif not self.stalled:
            self.stalled = True
            self._stopped = server_of(folder), now
            os.kill(self._stopped[0], signal.SIGSTOP)

    def _watch(self) -> None:
        killed_at = None
        while not self.ended.wait(0.02):
            found = next(iter(self._folder.glob("**/kafka-chunked-coordinator/found")), None)
            if found is None:
                continue
            count = connections_to(json.loads(found.read_bytes())["port"])
            now = time.monotonic()
            self.most_connections, self.connections = max(self.most_connections, count), count
            if self.stalled:
                self.most_since_stall = max(self.most_since_stall, count)
            if killed_at is not None and now > killed_at + STALL_AFTER_S:
                self._stall(found.parent, now)
            if self._connected_at is None and count >= self._executors:
                self._connected_at = now
            if (
                self._connected_at is not None
                and killed_at is None
                and now > self._connected_at + self._kill_after_s
            ):
                os.kill(server_of(found.parent), signal.SIGKILL)
                killed_at = now
            is_back = killed_at is not None and now > killed_at + _CLOSED_S and count >= self._executors
            if is_back and self.reconnected_s is None:
                assert killed_at is not None
                self.reconnected_s = round(now - killed_at, 2)


def connections_to(port: int) -> int:
    """Established connections of the process that listens on a port."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(one[1].endswith(f":{port:04X}") and one[3] == ESTABLISHED for one in lines)


def server_of(folder: Path) -> int:
    """The process that serves: the younger of the two that log to the coordinator's folder."""
    log = str(folder / "log")
    pids = [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit()]
    mine = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/2") == log:
                mine.append(pid)
    return max(mine)


def measure(executors: int, workers: int, load: Load) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        local = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kafka-chunked-local-")))
        notes = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kafka-chunked-bench-")))
        os.environ["SPARK_LOCAL_DIRS"] = str(local)
        brokers = stack.enter_context(LocalBroker(brokers=BROKERS))
        cluster = stack.enter_context(StandaloneCluster(executors, workers))
        spark = frozen_run.session(False, cluster.url, SETTINGS)
        stack.callback(spark.stop)
        options = {
            f"{PREFIX}.class": "benchmarks.recording_breaker.RecordingBreaker",
            f"{PREFIX}.record.folder": str(notes),
        }
        watch = Watch(local, executors, load.warm + load.before + load.frozen + 4)
        watch.start()
        victim = frozen_run.follower(brokers)
        one = Contender("standalone", frozen_run.sink("kafka-chunked", options))
        run = frozen_run.frozen_run(
            brokers, victim, one, frozen_run.frame_of(spark, load, keyed=False), "standalone", load
        )
        watch.ended.set()
        watch.join()
        stored = paced_rows.read_back(brokers.bootstrap_servers, "standalone", PARTITIONS)
        requests = [] if run.error else requests_of(spark, brokers, executors * workers)
        return {
            **judged(notes_of(notes), run, victim),
            "most_connections": watch.most_connections,
            "reconnected_after_kill_s": watch.reconnected_s,
            "stalled": watch.stalled,
            "most_connections_since_stall": watch.most_since_stall,
            "connections_at_the_end": watch.connections,
            "rows": load.rows,
            "lost": stored.lost(load.rows),
            "doubled": stored.doubled(),
            "error": run.error,
            "requests_first_and_second_write": requests,
        }


def requests_of(spark: Any, brokers: LocalBroker, tasks: int) -> list[dict[str, int]]:
    """Requests by API of a write by all workers to a new topic, and of another."""
    brokers.create_topic("counted", PARTITIONS, 1)
    frame = spark.range(0, tasks * ROWS_OF_A_TASK, 1, tasks).selectExpr("cast(id as string) as value")
    found = []
    with ProxyCluster(brokers.bootstrap_servers) as proxies:
        for _ in range(2):
            before = proxies.requests
            frozen_run.sink("kafka-chunked")(frame, proxies.bootstrap_servers, "counted")
            counted = proxies.requests - before
            found.append({name: counted[api] for api, name in APIS.items()})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executors", type=int, default=4)
    parser.add_argument("--workers", type=int, default=16, help="of each executor")
    parser.add_argument("--smoke", action="store_true", help="a short freeze, no files: does it run at all")
    options = parser.parse_args()
    executors, workers = (1, 2) if options.smoke else (options.executors, options.workers)
    tasks = executors * workers
    load = Load(tasks * RATE_OF_A_WORKER, 30, 0, 12, 30, tasks=tasks)
    if options.smoke:
        load = Load(200, 2, 0, 3, 17, tasks=tasks)
    outcome = measure(executors, workers, load)
    print(json.dumps(outcome, indent=1))
    if not options.smoke:
        conditions = (
            f"{executors} executors with {workers} Python workers each, {RATE_OF_A_WORKER} rows a second of "
            f"each, kafka_sink.daemon, {PARTITIONS} partitions on {BROKERS} brokers, one frozen for "
            f"{load.frozen:.0f} s; Kafka 4.3.0 on the same machine, {os.cpu_count()} cores, "
            f"Python {platform.python_version()}"
        )
        text = json.dumps({"conditions": conditions, "outcome": outcome}, indent=1)
        (RESULTS / "standalone_scale.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
