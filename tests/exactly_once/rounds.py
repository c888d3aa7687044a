"""Rounds of kills: a query on three real brokers, faults at drawn moments, and what readers of committed
rows see."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from kafka_sink.errors import KafkaSinkError
from kafka_sink.network.blocking import KeyType
from kafka_sink.options import SinkOptions
from kafka_sink.transactions import driver, planning
from kafka_sink.transactions.client import TransactionClient
from kafka_sink.transactions.operations import Scope, describe
from local_kafka import LocalBroker
from local_kafka.errors import LocalBrokerError
from tests.exactly_once import engine
from tests.exactly_once.engine import Settings
from tests.support.topics import read_to_end
from tests.support.waiting import until, within

PARTITIONS = 3
# The session's timeout and an election.
_REPLACED_AFTER_S = 5.0
_PATIENCE_S = 240.0
_MAX_RUNS = 30


class Fault(Enum):
    """What a round does to the query, from its first start on."""

    KILL_DRIVER = "driver killed"
    KILL_JOB = "driver and workers killed"
    KILL_WORKER = "worker killed"
    FREEZE_DRIVER = "driver frozen"
    FREEZE_WORKER = "worker frozen"
    DIE_IN_COMMIT = "driver killed between two EndTxns"
    LOSE_COMMIT = "last commit file deleted"
    SECOND_DRIVER = "second driver on the checkpoint"
    OTHER_TASKS = "restarted with other tasks"
    KILL_BROKER = "broker killed"
    FREEZE_BROKER = "broker frozen"
    OUTLAST_TIMEOUT = "driver away for longer than the transaction timeout after a decision"
    MEET_THAWING_BROKER = "driver restarted at a thawing broker that was replaced meanwhile"
    FREEZE_COORDINATOR = "the driver's transaction coordinator frozen, replaced and thawed"


# Kills of brokers take longest to heal.
_WEIGHTS = {fault: 1 if "BROKER" in fault.name else 3 for fault in Fault}


# Starts drivers: a process without threads, with everything loaded.
_ZYGOTE = get_context("forkserver")
_ZYGOTE.set_forkserver_preload([engine.__name__])


def _drive(settings: Settings) -> None:
    """A driver that leads a group of its own."""
    os.setsid()
    code = 70
    try:
        code = engine.drive(settings)
    finally:
        os._exit(code)


WRONG = ("lost", "doubled", "out of order", "of no committed batch", "never finished")


@dataclass
class Report:
    """What a round did and found. ``counts``: rows, runs of the query, runs that said that a batch is
    incomplete, and what is ``WRONG`` for readers of committed rows. Rows are out of order behind a later row
    of their key, and of no committed batch if it was aborted, or nobody planned them."""

    what: str
    faults: Counter[Fault] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def is_broken(self) -> bool:
        return any(self.counts[name] for name in WRONG)

    def __str__(self) -> str:
        faults = ", ".join(f"{count} x {fault.value}" for fault, count in self.faults.most_common())
        counts = ", ".join(f"{count:,} {name}" for name, count in self.counts.items())
        verdict = "BROKEN" if self.is_broken else "ok"
        return f"{self.what} [{faults}] {counts}, {self.seconds:.1f} s: {verdict}"


class Round:
    """One topic, one checkpoint, faults drawn from the seed."""

    def __init__(self, cluster: LocalBroker, seed: int) -> None:
        self._cluster = cluster
        self._chance = random.Random(seed)
        self._report = Report(f"seed {seed}")
        self._topic = f"rounds-{seed}-{os.getpid()}"
        self._checkpoint = Path(tempfile.mkdtemp(prefix="exactly-once-"))
        (self._checkpoint / "commits").mkdir()
        (self._checkpoint / "metadata").write_text(json.dumps({"id": self._checkpoint.name}))
        kinds = list(Fault)
        count = self._chance.randint(1, 4)
        self._faults = self._chance.choices(kinds, [_WEIGHTS[one] for one in kinds], k=count)
        self._times_out = Fault.OUTLAST_TIMEOUT in self._faults
        options = {"transactional.id.prefix": self._topic}
        options |= {"kafka.transaction.timeout.ms": "4000"} if self._times_out else {}
        self._settings = Settings(
            cluster.bootstrap_servers,
            self._topic,
            str(self._checkpoint),
            batches=self._chance.randint(3, 6),
            rows=self._chance.choice((60, 600, 3000)),
            tasks=self._chance.randint(1, 4),
            seed=seed,
            options=options,
        )
        self._prefix = self._writer_name()
        self._drivers: dict[int, ForkServerProcess] = {}
        self._frozen: list[int] = []
        # Until when, what, and what heals it. One broker is down at a time.
        self._down: list[tuple[float, str, Callable[[], None]]] = []

    def _writer_name(self) -> str:
        raw = {"checkpointlocation": str(self._checkpoint)}
        options = self._settings.sink_options()
        planned = planning.plan(options, raw, is_streaming=True, for_tasks=False)
        assert planned is not None
        return planned.scope.prefix

    def run(self) -> Report:
        """Runs the query under faults, then without, and reads the topic."""
        began = time.monotonic()
        create_topic(self._cluster, self._topic)
        try:
            for fault in self._faults:
                self._ensure_running()
                self._pause(self._chance.random() * 1.5)
                self._strike(fault)
                self._report.faults[fault] += 1
            self._heal(wait=True)
            self._finish()
        finally:
            self._heal(wait=True)
            for pid in self._drivers:
                self._kill_group(pid)
        self._check()
        shutil.rmtree(self._checkpoint, ignore_errors=True)
        self._report.seconds = time.monotonic() - began
        return self._report

    # -- the query --------------------------------------------------------------------------------

    def _start(self, **changes: object) -> int:
        self._report.counts["runs"] += 1
        settings = replace(self._settings, seed=self._chance.randrange(1 << 30), **changes)  # type: ignore[arg-type]
        driver = _ZYGOTE.Process(target=_drive, args=(settings,))
        driver.start()
        assert driver.pid is not None
        self._drivers[driver.pid] = driver
        return driver.pid

    def _running(self) -> list[int]:
        ended = {pid: one.exitcode for pid, one in self._drivers.items() if one.exitcode is not None}
        self._report.counts["runs with an incomplete batch"] += list(ended.values()).count(engine.INCOMPLETE)
        self._drivers = {pid: one for pid, one in self._drivers.items() if pid not in ended}
        return list(self._drivers)

    def _ensure_running(self) -> int:
        alive = self._running()
        return alive[-1] if alive else self._start()

    def _finish(self) -> None:
        def is_over() -> bool:
            if is_done() or self._report.counts["runs"] > _MAX_RUNS:
                return True
            self._ensure_running()
            return False

        def is_done() -> bool:
            return engine.committed(self._settings) >= self._settings.batches

        within(is_over, _PATIENCE_S, 0.1)
        self._report.counts["never finished"] += not is_done()

    # -- faults -----------------------------------------------------------------------------------

    def _pause(self, seconds: float) -> None:
        within(self._healed, seconds, 0.05)

    def _healed(self) -> bool:
        """Heals what is due, and goes on."""
        self._heal()
        return False

    def _strike(self, fault: Fault) -> None:
        driver = self._ensure_running()
        if fault is Fault.KILL_DRIVER:
            # Its workers go on with what they are at, as executors that lost their driver.
            self._signal(driver, signal.SIGKILL)
        elif fault is Fault.KILL_JOB:
            self._kill_group(driver)
        elif fault is Fault.KILL_WORKER:
            self._signal(self._worker_of(driver), signal.SIGKILL)
        elif fault in (Fault.FREEZE_DRIVER, Fault.FREEZE_WORKER):
            victim = driver if fault is Fault.FREEZE_DRIVER else self._worker_of(driver)
            self._freeze(victim)
            if fault is Fault.FREEZE_DRIVER and self._chance.random() < 0.7:
                self._pause(self._chance.random())
                self._start()
        elif fault is Fault.DIE_IN_COMMIT:
            self._restart(die_before_commit=self._chance.randint(1, 2 * self._settings.tasks))
            self._await_end(8)
        elif fault is Fault.LOSE_COMMIT:
            self._kill_group(driver)
            self._await_end(5)
            self._lose_commit()
        elif fault is Fault.SECOND_DRIVER:
            self._start()
        elif fault is Fault.OTHER_TASKS and not self._times_out:
            self._kill_group(driver)
            self._settings = replace(self._settings, tasks=self._chance.randint(1, 5))
        elif fault is Fault.OUTLAST_TIMEOUT:
            self._restart(die_before_commit=self._chance.randint(1, 2 * self._settings.tasks))
            self._await_end(8)
            self._pause(6)
        elif fault is Fault.MEET_THAWING_BROKER:
            self._meet_thawing_broker()
        elif fault in (Fault.KILL_BROKER, Fault.FREEZE_BROKER):
            self._strike_broker(fault)
        elif fault is Fault.FREEZE_COORDINATOR:
            self._freeze_coordinator()

    def _end_drivers(self) -> None:
        for pid in self._running():
            self._kill_group(pid)
        self._await_end(5)

    def _restart(self, **changes: object) -> None:
        self._end_drivers()
        self._start(**changes)

    def _await_end(self, seconds: float) -> None:
        within(lambda: self._healed() or not self._running(), seconds, 0.02)

    def _lose_commit(self) -> None:
        """Not where the batch behind it was decided: Spark goes on with the last one that it has planned, and
        the engine would go back."""
        done = engine.committed(self._settings)
        is_last = last_decided(self._settings.sink_options(), self._prefix) < done
        if done and is_last:
            (self._settings.commits / str(done - 1)).unlink()

    def _freeze_coordinator(self) -> None:
        """For long enough that another broker replaces it, while a driver waits for its response. What it
        says when it thaws is of what it remembers."""
        if self._has_broker_down():
            return
        broker = coordinator_of(self._settings.sink_options(), self._prefix)
        if broker is None:
            return
        self._cluster.freeze(broker)
        try:
            self._pause(_REPLACED_AFTER_S + self._chance.random() * 3)
        finally:
            self._cluster.thaw(broker)
        self._pause(self._chance.random() * 2)

    def _worker_of(self, driver: int) -> int:
        workers = children(driver)
        return self._chance.choice(workers) if workers else driver

    def _freeze(self, pid: int) -> None:
        if self._signal(pid, signal.SIGSTOP):
            self._frozen.append(pid)
            until = time.monotonic() + 0.3 + self._chance.random() * 4
            self._down.append((until, "process", lambda: self._thaw(pid)))

    def _thaw(self, pid: int) -> None:
        if pid in self._frozen:
            self._frozen.remove(pid)
            self._signal(pid, signal.SIGCONT)

    def _strike_broker(self, fault: Fault) -> None:
        broker = self._chance.randrange(3)
        if not self._cluster.is_running(broker) or self._has_broker_down():
            return
        until = time.monotonic() + 0.5 + self._chance.random() * 6
        if fault is Fault.KILL_BROKER:
            self._cluster.kill(broker)
            self._down.append((until, "broker", lambda: self._cluster.start(broker)))
        else:
            self._cluster.freeze(broker)
            self._down.append((until, "broker", lambda: self._cluster.thaw(broker)))

    def _meet_thawing_broker(self) -> None:
        """It answers for groups that have other coordinators by now, until it learns of it. Batches were
        decided meanwhile, and the commit log has lost the last one."""
        broker = self._chance.randrange(3)
        if self._has_broker_down():
            return
        self._cluster.freeze(broker)
        try:
            self._pause(_REPLACED_AFTER_S)
            until = time.monotonic() + 3 * _REPLACED_AFTER_S
            while engine.committed(self._settings) < self._settings.batches and time.monotonic() < until:
                self._ensure_running()
                self._pause(0.1)
            self._end_drivers()
            self._lose_commit()
            self._start(bootstrap_servers=self._cluster.bootstrap_servers.split(",")[broker])
            self._pause(0.5 + self._chance.random() * 1.5)
        finally:
            self._cluster.thaw(broker)
        self._pause(1)

    def _heal(self, *, wait: bool = False) -> None:
        """What was to be down until now comes back; with ``wait`` everything does."""
        due = [one for one in self._down if wait or one[0] <= time.monotonic()]
        self._down = [one for one in self._down if one not in due]
        for *_, act in due:
            act()

    def _has_broker_down(self) -> bool:
        return any(what == "broker" for _, what, _ in self._down)

    def _signal(self, pid: int, number: signal.Signals) -> bool:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def _kill_group(self, driver: int) -> None:
        try:
            os.killpg(driver, signal.SIGKILL)
        except ProcessLookupError:
            # It leads none yet, or is gone.
            self._signal(driver, signal.SIGKILL)

    # -- the check --------------------------------------------------------------------------------

    def _check(self) -> None:
        done = engine.committed(self._settings)
        total = done * self._settings.rows
        await_ended_transactions(self._cluster.bootstrap_servers, self._topic)
        rows = list(map(int, read_to_end(self._cluster.bootstrap_servers, self._topic)))
        seen = Counter(rows)
        self._report.counts += Counter(
            {
                "rows": total,
                "lost": sum(1 for row in range(total) if not seen[row]),
                "doubled": sum(count - 1 for count in seen.values()),
                "out of order": disordered((engine.key_of(self._settings, row), row) for row in rows),
                "of no committed batch": sum(1 for row in seen if row >= total),
            }
        )


def coordinator_of(options: SinkOptions, prefix: str) -> int | None:
    """The broker that coordinates the driver's id; None where nobody says so now."""
    name = Scope(prefix, "", 1).driver_id
    with closing(TransactionClient(options)) as client, suppress(KafkaSinkError):
        client.run(describe(name), 5000.0)
        return client.coordinators.get((KeyType.TRANSACTION, name))
    return None


def last_decided(options: SinkOptions, prefix: str) -> int:
    """The number of the batch, -1 where none was."""
    with closing(TransactionClient(options)) as client:
        decision = client.run(driver.read_decision(Scope(prefix, "", 1)), 60_000.0)
    return -1 if decision is None else decision.batch.number


def children(pid: int) -> list[int]:
    """The pids of a process's children."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except OSError:
        return []
    return [int(one) for one in text.split()]


def create_topic(cluster: LocalBroker, name: str) -> None:
    """Three replicas, two of them in sync. A client that repeats a slow request finds its own topic."""
    try:
        cluster.create_topic(name, PARTITIONS, config={"min.insync.replicas": 2})
    except LocalBrokerError as error:
        if "TOPIC_ALREADY_EXISTS" not in str(error):
            raise


def disordered(rows: Iterable[tuple[int, int]]) -> int:
    """How many of these rows, as they were read, stand behind a later one of their key."""
    last: dict[int, int] = {}
    count = 0
    for key, row in rows:
        count += row < last.get(key, row)
        last[key] = max(row, last.get(key, row))
    return count


def await_ended_transactions(bootstrap_servers: str, topic: str) -> None:
    """Until readers of committed rows can read to the topic's end: a coordinator answers EndTxn before the
    partitions know of it, and one that was frozen long before."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
    ends = {TopicPartition(topic, partition): OffsetSpec.latest() for partition in range(PARTITIONS)}  # type: ignore[no-untyped-call]

    def are_over() -> bool:
        stable, all_rows = (
            [one.result(30).offset for one in admin.list_offsets(ends, isolation_level=level).values()]
            for level in (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED)
        )
        return stable == all_rows

    until(are_over, f"the end of all transactions in {topic}", poll_s=0.1)
