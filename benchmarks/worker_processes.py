"""Real producers in many worker processes, of several executors, with one coordinator. No Spark, no JVM.

    python -m benchmarks.worker_processes

Each process is what Spark's daemon forks; those of an executor share a folder, and so a relay. They write
keyless rows to three scripted brokers. One broker is frozen for a while, and later the coordinator's
process is killed (SIGKILL).
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.standalone_scale import connections_to
from benchmarks.surroundings import RESULTS
from kafka_sink.coordinator.process.planning import plan_coordinator
from kafka_sink.coordinator.transport.address import CoordinatorAddress, Rendezvous
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer import Producer
from tests.support.application import Application
from tests.support.fake_broker import METADATA, FakeCluster

EXECUTORS, WORKERS, PARTITIONS, VICTIM = 4, 16, 12, 1
FREEZE_S, THAW_S, KILL_S, END_S = 8.0, 16.0, 22.0, 30.0
PLAN = ColumnPlan.of([("topic", "string"), ("value", "binary")], None)
ROWS = pa.record_batch({"topic": pa.array(["t"] * 4), "value": pa.array([b"x"] * 4, pa.binary())})


@dataclass
class Outcome:
    """Of one worker. Times are those of the system's clock."""

    rows: int = 0
    acknowledged: int = 0
    probes: int = 0
    muted_at: float = 0.0
    unmuted_at: float = 0.0


def work(folder: Path, told: dict[str, Any]) -> Outcome:
    os.environ["SPARK_LOCAL_DIRS"] = str(folder)
    secret = bytes.fromhex(told.pop("secret"))
    producer = Producer(parse(told.pop("options")).options)
    found = Outcome()

    def watch() -> None:
        breaker = producer.breaker
        while breaker is not None:
            if breaker.mutes and not found.muted_at:
                found.muted_at = time.time()
            if not breaker.mutes and found.muted_at and not found.unmuted_at:
                found.unmuted_at = time.time()
            time.sleep(0.02)

    producer.begin(CoordinatorAddress("127.0.0.1", Rendezvous(secret=secret, **told)))
    threading.Thread(target=watch, daemon=True).start()
    until = time.time() + END_S
    while time.time() < until:
        producer.send(ROWS, plan=PLAN)
        found.rows += ROWS.num_rows
        time.sleep(0.4)
    found.acknowledged = producer.finish().records
    found.probes = int(producer.metrics()["breaker-probes-total"])
    return found


def fork_worker(folder: Path) -> int:
    """Returns the pipe through which the worker is told what to do."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(reading)
        return writing
    os.close(writing)
    try:
        with os.fdopen(reading) as pipe:
            outcome = work(folder, json.loads(pipe.readline()))
        draft = folder / f"draft-{os.getpid()}"
        draft.write_text(json.dumps(asdict(outcome)))
        draft.rename(folder / f"outcome-{os.getpid()}")
    finally:
        os._exit(0)


def measure(folder: Path) -> dict[str, Any]:
    pipes: list[int] = []
    for number in range(EXECUTORS):
        local = folder / f"executor-{number}"
        local.mkdir()
        pipes += [fork_worker(local) for _ in range(WORKERS)]
    (folder / "driver").mkdir()
    with FakeCluster({"t": PARTITIONS}, brokers=3) as cluster, Application(folder / "driver") as application:
        options = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "topic": "t"}
        rendezvous = plan_coordinator(parse(options).options, is_streaming=False).rendezvous
        assert rendezvous is not None
        told = {**asdict(rendezvous), "secret": rendezvous.secret.hex(), "options": options}
        for pipe in pipes:
            os.write(pipe, json.dumps(told).encode() + b"\n")
            os.close(pipe)
        begun = time.time()
        events = [
            (FREEZE_S, lambda: cluster.freeze(VICTIM)),
            (THAW_S, lambda: cluster.thaw(VICTIM)),
            (KILL_S, lambda: os.kill(application.processes[0].server, signal.SIGKILL)),
        ]
        at: list[float] = []
        shared_again = None
        connections: list[int] = []
        while time.time() < begun + END_S:
            if len(at) < len(events) and time.time() > begun + events[len(at)][0]:
                events[len(at)][1]()
                at.append(time.time())
            connections.append(connections_to(rendezvous.port))
            # After a moment the kernel has closed the old connections.
            is_back = len(at) == len(events) and time.time() > at[-1] + 0.1 and connections[-1] >= EXECUTORS
            if is_back and shared_again is None:
                shared_again = time.time() - at[-1]
            time.sleep(0.02)
        with suppress(ChildProcessError):
            while len(list(folder.glob("*/outcome-*"))) < len(pipes):
                os.wait()
        outcomes = [Outcome(**json.loads(path.read_text())) for path in folder.glob("*/outcome-*")]
        muted = sorted(one.muted_at for one in outcomes if one.muted_at)
        unmuted = [one.unmuted_at for one in outcomes if one.unmuted_at]
        return {
            "executors": EXECUTORS,
            "workers": len(outcomes),
            "connections_at_most": max(connections),
            "connections_at_the_end": connections[-1],
            "metadata_requests": len(cluster.received(METADATA)),
            "workers_that_muted": len(muted),
            "first_mute_after_s": round(muted[0] - at[0], 2) if muted else None,
            "first_to_last_mute_s": round(muted[-1] - muted[0], 2) if muted else None,
            "probes": sum(one.probes for one in outcomes),
            "last_unmute_after_s": round(max(unmuted) - at[1], 2) if unmuted else None,
            "connected_again_after_kill_s": None if shared_again is None else round(shared_again, 2),
            "rows": sum(one.rows for one in outcomes),
            "acknowledged": sum(one.acknowledged for one in outcomes),
        }


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kafka-chunked-bench-") as folder:
        found = measure(Path(folder))
    text = json.dumps(found, indent=1)
    print(text)
    (RESULTS / "worker_processes.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
