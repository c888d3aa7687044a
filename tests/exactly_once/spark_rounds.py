"""``python -m tests.exactly_once.spark_rounds --rounds 10``: rounds of kills on Spark and three brokers.

As the rounds of ``python -m tests.exactly_once``, with real drivers and executors. A driver is slow to start,
so each runs several queries, and a fault that kills it finds each at another moment. Each query has a topic
and a checkpoint of its own and is checked by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from local_kafka import LocalBroker
from tests.exactly_once import dying
from tests.exactly_once.rounds import await_ended_transactions, children, create_topic, read_committed
from tests.support.broker_settings import SHORT_SESSIONS
from tests.support.standalone_cluster import StandaloneCluster
from tests.support.waiting import within

ROOT = Path(__file__).resolve().parents[2]
FAULTS = (
    "driver JVM killed",
    "driver and its workers killed",
    "executor killed",
    "executor frozen",
    "Python worker killed",
    "driver killed between two EndTxns",
    "last commit file deleted",
    "driver frozen, second driver on the checkpoint",
    "restarted with other tasks",
    "broker killed",
    "broker frozen",
)
IN_ONE_JVM = tuple(fault for fault in FAULTS if not fault.startswith("executor"))
_EXECUTORS = 2
_PATIENCE_S = 400.0


def main() -> int:
    """0 where no row was lost or doubled; with at-least-once, where some round has found doubled ones."""
    parser = argparse.ArgumentParser(prog="python -m tests.exactly_once.spark_rounds", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--queries", type=int, default=4, help="of each driver")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=0, help="start no further round after that long")
    parser.add_argument(
        "--executors", action="store_true", help="on a standalone cluster, else all in the driver's JVM"
    )
    parser.add_argument("--guarantee", choices=("exactly-once", "at-least-once"), default="exactly-once")
    arguments = parser.parse_args()
    environ = environment()
    totals: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    began = time.monotonic()
    with (
        LocalBroker(brokers=3, properties=SHORT_SESSIONS) as brokers,
        # Room for a second driver's executors, too.
        StandaloneCluster(workers=_EXECUTORS, cores=4, memory="2g", environ=environ)
        if arguments.executors
        else contextlib.nullcontext() as cluster,
    ):
        for seed in range(arguments.seed, arguments.seed + arguments.rounds):
            if arguments.minutes and time.monotonic() - began > arguments.minutes * 60:
                break
            one = SparkRound(brokers, cluster, environ, seed, arguments.guarantee, arguments.queries)
            one.run()
            totals.update(one.found)
            faults.update(one.faults)
            print(one, flush=True)
    kinds = ", ".join(f"{count} x {name}" for name, count in faults.most_common())
    where = f"{_EXECUTORS} executors' hosts" if arguments.executors else "local[3]"
    print(
        f"{totals['rounds']} rounds of {arguments.queries} queries with {arguments.guarantee} on Spark: "
        f"{totals['rows']:,} rows, {totals['lost']} lost, {totals['doubled']} doubled, "
        f"{totals['unfinished']} queries unfinished; "
        f"{totals['drivers']} drivers; {totals['written before']} batches found written before; "
        f"{sum(faults.values())} faults: {kinds}.\n"
        f"{where}, 3 brokers, replication 3, {time.monotonic() - began:.0f} s in all."
    )
    if arguments.guarantee == "at-least-once":
        return 0 if totals["doubled"] else 1
    return 1 if totals["lost"] or totals["doubled"] or totals["unfinished"] else 0


def environment() -> dict[str, str]:
    """For drivers, and for executors' workers: this checkout, and the hook that kills in mid-commit."""
    path = [str(ROOT / "tests" / "exactly_once" / "hook"), str(ROOT)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


@dataclass
class Query:
    """One query's topic and checkpoint, and the arguments of ``spark_job.py``."""

    topic: str
    checkpoint: Path
    settings: dict[str, Any] = field(default_factory=dict)

    def committed(self) -> int:
        """The last batch of the commit log; -1 if it is empty."""
        folder = self.checkpoint / "commits"
        if not folder.exists():
            return -1
        return max((int(name) for name in os.listdir(folder) if name.isdigit()), default=-1)

    def lose_last_commit(self) -> None:
        """As a file system does that kept neither this file nor later ones: Spark runs that batch again.

        With the offsets of a later batch it would go on with that one.
        """
        last = self.committed()
        offsets = self.checkpoint / "offsets"
        later = [int(name) for name in os.listdir(offsets) if name.isdigit()] if last >= 0 else []
        lost = [self.checkpoint / "commits" / str(last)]
        lost += [offsets / str(number) for number in later if number > last]
        for file in lost:
            file.unlink(missing_ok=True)
            file.with_name(f".{file.name}.crc").unlink(missing_ok=True)


class SparkRound:
    """Drivers one after the other with the same queries, and faults drawn from the seed."""

    def __init__(
        self,
        brokers: LocalBroker,
        cluster: StandaloneCluster | None,
        environ: dict[str, str],
        seed: int,
        guarantee: str,
        queries: int,
    ) -> None:
        self.found: Counter[str] = Counter(rounds=1)
        self.faults: Counter[str] = Counter()
        self._brokers = brokers
        self._cluster = cluster
        self._environ = environ
        self._seed = seed
        self._chance = random.Random(seed)
        self._folder = Path(tempfile.mkdtemp(prefix="exactly-once-spark-"))
        self._speculation = self._chance.choice(("true", "false"))
        self._queries = [self._drawn(number, guarantee) for number in range(queries)]
        self._log = self._folder / "log"
        self._drivers: list[subprocess.Popen[bytes]] = []
        self._frozen: list[int] = []
        self._began = time.monotonic()

    def _drawn(self, number: int, guarantee: str) -> Query:
        topic = f"spark-{guarantee[:2]}-{self._seed}-{number}-{os.getpid()}"
        checkpoint = self._folder / f"checkpoint-{number}"
        settings = {
            "rows": self._chance.choice((300, 3000)),
            "tasks": self._chance.randint(1, 3),
            "until": 0,
            "pause_ms": self._chance.choice((0, 200)),
            "checkpoint": str(checkpoint),
            "options": {
                "kafka.bootstrap.servers": self._brokers.bootstrap_servers,
                "topic": topic,
                "delivery.guarantee": guarantee,
                "kafka.request.timeout.ms": "5000",
                "coordinator.enabled": "false",
            },
        }
        return Query(topic, checkpoint, settings)

    def __str__(self) -> str:
        faults = ", ".join(f"{name} x {count}" for name, count in self.faults.items())
        found = self.found
        broken = found["lost"] or found["doubled"] or found["unfinished"]
        verdict = f"BROKEN: {found['lost']} lost, {found['doubled']} doubled" if broken else "ok"
        if found["unfinished"]:
            verdict += f", {found['unfinished']} queries unfinished"
        counts = (
            f"{found['rows']} rows, {found['drivers']} drivers, {found['written before']} batches found "
            f"written before, {time.monotonic() - self._began:.0f} s"
        )
        return f"seed {self._seed} [{faults}] {counts}: {verdict}"

    def run(self) -> None:
        """Faults; then two more batches of each query without faults; then the topics are read."""
        for query in self._queries:
            create_topic(self._brokers, query.topic)
        try:
            for fault in self._chance.choices(
                FAULTS if self._cluster else IN_ONE_JVM, k=self._chance.randint(1, 3)
            ):
                for query in self._queries:
                    query.settings["until"] = 1_000_000
                self._ensure_running()
                self._await_progress()
                self._wait(1.5)
                self._strike(fault)
                self.faults[fault] += 1
            self._thaw()
            self._finish()
        finally:
            self._thaw()
            for driver in self._drivers:
                _kill_group(driver)
        for query in self._queries:
            self._check(query)
        self.found["written before"] = self._log.read_text(errors="replace").count("written before")
        if self.found["unfinished"]:
            print(self._log.read_text(errors="replace")[-8000:], file=sys.stderr)
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- drivers ----------------------------------------------------------------------------------

    def _start(self, die_before_commit: int = 0) -> subprocess.Popen[bytes]:
        self.found["drivers"] += 1
        environ = dict(self._environ)
        if die_before_commit:
            environ[dying.VARIABLE] = str(die_before_commit)
        settings = {
            "master": self._cluster.url if self._cluster else "local[3]",
            "speculation": self._speculation,
            "queries": [query.settings for query in self._queries],
        }
        job = Path(__file__).with_name("spark_job.py")
        with self._log.open("ab") as log:
            driver = subprocess.Popen(
                [sys.executable, str(job), json.dumps(settings)],
                env=environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._drivers.append(driver)
        return driver

    def _ensure_running(self) -> subprocess.Popen[bytes]:
        alive = [driver for driver in self._drivers if driver.poll() is None]
        return alive[-1] if alive else self._start()

    def _end_all(self) -> None:
        for driver in self._drivers:
            _kill_group(driver)
            driver.wait()

    def _await_progress(self) -> None:
        """Some query's batch is committed, so that its next one may be under way; others are anywhere."""
        before = [query.committed() for query in self._queries]
        self._until(lambda: [query.committed() for query in self._queries] > before, _PATIENCE_S / 2)

    def _until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Keeps a driver running until then; false where the time was over before."""
        return within(lambda: done() or not self._ensure_running(), seconds, 0.05)

    def _wait(self, at_most_s: float) -> None:
        time.sleep(self._chance.random() * at_most_s)

    def _finish(self) -> None:
        self._end_all()
        for query in self._queries:
            query.settings["until"] = query.committed() + 2
        self._until(lambda: not self._undone(), _PATIENCE_S)
        self.found["unfinished"] += self._undone()
        for driver in self._drivers:
            try:
                driver.wait(60)
            except subprocess.TimeoutExpired:
                _kill_group(driver)

    def _undone(self) -> int:
        return sum(query.committed() < query.settings["until"] for query in self._queries)

    # -- faults -----------------------------------------------------------------------------------

    def _strike(self, fault: str) -> None:
        driver = self._ensure_running()
        jvm = next(iter(children(driver.pid)), driver.pid)
        if fault == "driver JVM killed":
            _signal(jvm, signal.SIGKILL)
        elif fault == "driver and its workers killed":
            _kill_group(driver)
        elif fault == "executor killed":
            _signal(self._executor("CoarseGrainedExecutorBackend"), signal.SIGKILL)
        elif fault == "executor frozen":
            self._freeze(self._executor("CoarseGrainedExecutorBackend"))
            self._wait(5)
            self._thaw()
        elif fault == "Python worker killed":
            _signal(self._executor("pyspark.daemon") if self._cluster else self._worker(jvm), signal.SIGKILL)
        elif fault == "driver killed between two EndTxns":
            self._end_all()
            dead = self._start(self._chance.randint(1, 4))
            try:
                dead.wait(150)
            except subprocess.TimeoutExpired:
                _kill_group(dead)
        elif fault == "last commit file deleted":
            self._end_all()
            for query in self._queries:
                query.lose_last_commit()
        elif fault == "driver frozen, second driver on the checkpoint":
            self._freeze(jvm)
            self._start()
            self._await_progress()
            self._thaw()
        elif fault == "restarted with other tasks":
            self._end_all()
            for query in self._queries:
                query.settings["tasks"] = self._chance.randint(1, 4)
        else:
            self._strike_broker(fault)

    def _strike_broker(self, fault: str) -> None:
        broker = self._chance.randrange(3)
        if fault == "broker killed":
            self._brokers.kill(broker)
            self._wait(8)
            self._brokers.start(broker)
        else:
            self._brokers.freeze(broker)
            self._wait(8)
            self._brokers.thaw(broker)

    def _worker(self, jvm: int) -> int:
        """A Python worker of a driver's JVM: a child of one of its daemons."""
        found = [worker for daemon in children(jvm) for worker in children(daemon)]
        return self._chance.choice(found) if found else 0

    def _executor(self, main: str) -> int:
        """A process of this cluster's executors; 0 if there is no such process."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                where = os.readlink(entry / "cwd")
            except OSError:
                continue
            if self._cluster and main in command and where.startswith(str(self._cluster.folder)):
                found.append(int(entry.name))
        return self._chance.choice(sorted(found)) if found else 0

    def _freeze(self, pid: int) -> None:
        _signal(pid, signal.SIGSTOP)
        self._frozen.append(pid)

    def _thaw(self) -> None:
        for pid in self._frozen:
            _signal(pid, signal.SIGCONT)
        self._frozen.clear()

    def _check(self, query: Query) -> None:
        """Rows of whole batches, from the first on; the last may be decided and not in the commit log."""
        rows = int(query.settings["rows"])
        await_ended_transactions(self._brokers.bootstrap_servers, query.topic)
        seen = Counter(row for _, row in read_committed(self._brokers.bootstrap_servers, query.topic))
        batches = max(query.committed() + 1, (max(seen, default=-1) + rows) // rows)
        self.found["rows"] += batches * rows
        self.found["lost"] += sum(1 for row in range(batches * rows) if not seen[row])
        self.found["doubled"] += sum(count - 1 for count in seen.values() if count > 1)


def _signal(pid: int, number: signal.Signals) -> None:
    # 0 would be this process's whole group.
    if pid > 0:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _kill_group(driver: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(driver.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
