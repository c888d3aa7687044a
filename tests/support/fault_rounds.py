"""Rounds of tasks that write while their coordinator suffers a fault; ``make faults`` runs a hundred.

``python -m tests.support.fault_rounds 100 [seed]`` takes each fault in turn and prints its observations.

In each round, a real coordinator process serves four tasks that keep needing new topics of a scripted
cluster. Every row must be there once, in a bounded time, with at most one warning, and no process may be
left.
"""

from __future__ import annotations

import logging
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kafka_sink.coordinator.address import CoordinatorAddress
from kafka_sink.coordinator.client import ask
from kafka_sink.coordinator.launcher import plan_coordinator
from kafka_sink.coordinator.schema import Alive
from kafka_sink.errors import ProtocolError
from kafka_sink.options import SinkOptions, parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer import Producer
from tests.support.application import Application
from tests.support.fake_broker import FakeCluster
from tests.support.lookups import rows, written

TASKS, UNITS, NEW_TOPICS = 4, 20, 3
# The longest that a fault may cost is far below: a second for each unit with new topics, for two seconds.
BOUND_S = 120.0
PLAN = ColumnPlan.of([("topic", "string"), ("value", "binary")], None)
TOPICS = [f"t{number}" for number in range(UNITS * NEW_TOPICS)]


@dataclass
class Round:
    fault: str
    seconds: float
    warnings: list[str]


@dataclass
class Scene:
    application: Application
    address: CoordinatorAddress
    random: random.Random

    @property
    def where(self) -> tuple[str, int]:
        return "127.0.0.1", self.address.port

    def signal(self, number: signal.Signals) -> None:
        self.application.processes[-1].send_signal(number)


def kill(scene: Scene) -> None:
    scene.signal(signal.SIGKILL)


def freeze(scene: Scene) -> None:
    scene.signal(signal.SIGSTOP)


def freeze_and_thaw(scene: Scene) -> None:
    scene.signal(signal.SIGSTOP)
    time.sleep(scene.random.random())
    scene.signal(signal.SIGCONT)


def kill_driver(scene: Scene) -> None:
    scene.application.driver.kill()


def garbage(scene: Scene) -> None:
    for _ in range(50):
        with suppress(OSError), socket.create_connection(scene.where, timeout=2) as peer:
            peer.sendall(scene.random.randbytes(scene.random.randrange(2000)))


def crowd(scene: Scene) -> None:
    peers: list[socket.socket] = []
    with suppress(OSError):
        peers += (socket.create_connection(scene.where, timeout=2) for _ in range(1000))
    for peer in peers:
        peer.close()


def wrong_token(scene: Scene) -> None:
    wrong = replace(scene.address, token=b"w" * 32)
    for _ in range(50):
        with suppress(OSError, ProtocolError):
            ask(wrong, Alive(), Alive, 2000)
            raise AssertionError("a coordinator took a wrong token for the right one")


FAULTS: dict[str, Callable[[Scene], None]] = {
    one.__name__: one for one in (kill, freeze, freeze_and_thaw, kill_driver, garbage, crowd, wrong_token)
}


def run_tasks(
    options: SinkOptions,
    begins: Iterable[Callable[[Producer], None]],
    tables: Sequence[Sequence[str]],
    what: str,
    befall: Callable[[], None] = lambda: None,
) -> None:
    """Tasks that begin so write to the topics of each table, whatever befalls them meanwhile."""
    failures: list[BaseException] = []

    def write(begin: Callable[[Producer], None]) -> None:
        producer = Producer(options)
        try:
            begin(producer)
            for topics in tables:
                producer.send(rows(*topics), plan=PLAN)
            producer.finish()
        except BaseException as failure:  # noqa: BLE001 - whatever it is fails the round
            failures.append(failure)
        finally:
            producer.close()

    tasks = [threading.Thread(target=write, args=(begin,), daemon=True) for begin in begins]
    started = time.monotonic()
    for task in tasks:
        task.start()
    befall()
    for task in tasks:
        task.join(max(0.0, started + BOUND_S - time.monotonic()))
    assert not any(task.is_alive() for task in tasks), f"a task hangs after {what}"
    assert not failures, f"{failures[0]!r} after {what}"


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run_round(fault: str, seed: int, folder: Path) -> Round:
    chance = random.Random(seed)
    heard = _Warnings()
    logging.getLogger("kafka_sink").addHandler(heard)
    try:
        with FakeCluster(dict.fromkeys(TOPICS, 1)) as cluster, Application(folder) as application:
            options = parse(
                {
                    "kafka.bootstrap.servers": cluster.bootstrap_servers,
                    "kafka.linger.ms": "0",
                    "kafka.retry.backoff.ms": "20",
                }
            ).options
            address = plan_coordinator(options).address
            assert address is not None
            scene = Scene(application, address, chance)
            tables = [TOPICS[: (unit + 1) * NEW_TOPICS] for unit in range(UNITS)]

            def befall() -> None:
                time.sleep(chance.random() ** 2)
                FAULTS[fault](scene)

            started = time.monotonic()
            begins = [lambda producer: producer.begin(address)] * TASKS
            run_tasks(options, begins, tables, f"{fault} (seed {seed})", befall)
            seconds = time.monotonic() - started
            for number, topic in enumerate(TOPICS):
                found = written(cluster, topic)
                assert found == TASKS * (UNITS - number // NEW_TOPICS), f"{topic}: {found} (seed {seed})"
            scene.signal(signal.SIGCONT)
            application.driver.kill()
            for process in application.processes:
                process.wait(60)
    finally:
        logging.getLogger("kafka_sink").removeHandler(heard)
    # On a busy machine tasks also wait long for brokers that are well, and mute brokers that are only slow.
    lines = [line for line in heard.lines if not line.startswith(("waits for ", "circuit breaker: "))]
    assert len(lines) <= 1, lines
    return Round(fault, seconds, lines)


def main() -> None:
    """Arguments: how many rounds, and the first one's seed."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    rounds = []
    for number in range(count):
        fault = list(FAULTS)[number % len(FAULTS)]
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(run_round(fault, first + number, Path(folder)))
        latest = rounds[-1]
        print(f"{number + 1:4} {fault}: {latest.seconds:.1f} s", *latest.warnings, flush=True)
    for fault in FAULTS:
        mine = [one for one in rounds if one.fault == fault]
        if mine:
            print(
                f"{fault}: {len(mine)} rounds, slowest {max(one.seconds for one in mine):.1f} s, "
                f"{sum(bool(one.warnings) for one in mine)} warned"
            )


if __name__ == "__main__":
    main()
