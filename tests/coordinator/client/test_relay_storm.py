"""Worker processes of one executor while their relay is killed, frozen and replaced, and a broker is
muted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from kafka_sink.coordinator.breaker.handler import BreakerHandler
from kafka_sink.coordinator.breaker.votes import PartitionVotes
from kafka_sink.coordinator.client.relay import RelayFolder
from kafka_sink.coordinator.transport.handlers import Handler
from tests.support.coordinator_harness import Serving, eventually, serving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/locks")
ROOT = Path(__file__).resolve().parents[3]
SICK, OTHER = "1", "2"


class Worker:
    """See tests.support.breaker_worker. ``muted``: what it has said last."""

    def __init__(self, found: Serving) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.breaker_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        self.muted: Sequence[str] | None = None
        rendezvous = found.address.rendezvous
        self.tell(port=rendezvous.port, cluster=rendezvous.cluster, secret=rendezvous.secret.hex())
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.muted = json.loads(line)

    def tell(self, **command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Executor:
    """Its workers and the coordinator's breaker."""

    def __init__(self, found: Serving, breaker: BreakerHandler, workers: list[Worker]) -> None:
        self.found, self.breaker, self.workers = found, breaker, workers

    def relay(self) -> Worker:
        """The worker that holds the relay's lock."""
        folder = RelayFolder.of(self.found.address)
        assert folder is not None
        inode = folder.lock_path.stat().st_ino
        held = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        pids = [int(one[4]) for one in held if one[1] == "POSIX" and one[5].endswith(f":{inode}")]
        return next(one for one in self.workers if one.process.pid in pids)

    def others(self, than: Worker) -> list[Worker]:
        return [one for one in self.workers if one is not than]

    def all_know(self, *muted: str, of: Sequence[Worker] | None = None) -> None:
        for one in self.workers if of is None else of:
            eventually(lambda one=one: one.muted == sorted(muted))  # type: ignore[misc]

    def unmute(self, finder: Worker, *muted: str) -> None:
        """As one whose probes are responded to. What is told to a relay that is just being left is lost, and
        so the broker is probed again."""
        for _ in range(20):
            for one in muted:
                finder.tell(unmute=int(one))
            until = time.monotonic() + 2.0
            while time.monotonic() < until:
                if not any(one.muted for one in self.workers):
                    return
                time.sleep(0.01)
        pytest.fail(f"muted: {[one.muted for one in self.workers]}")

    def kill(self, worker: Worker) -> None:
        self.workers.remove(worker)
        worker.close()

    def rows(self) -> int:
        assert self.breaker.votes is not None
        return self.breaker.votes._rows

    def tasks(self) -> int:
        """How many tasks its groups have."""
        return sum(self.breaker._tasks.size(one) for one in list(self.breaker._tasks))


@pytest.fixture
def executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    breaker = BreakerHandler(60_000.0, PartitionVotes(1, 50), 500.0)

    def make(*_: object) -> Handler:
        return breaker

    with ExitStack() as stack:
        found = stack.enter_context(serving(factories={"breaker": make}))
        workers = [Worker(found) for _ in range(4)]
        try:
            scene = Executor(found, breaker, workers)
            scene.all_know()
            eventually(lambda: scene.tasks() == 4)
            assert found.connections() == 1
            yield scene
        finally:
            for one in workers:
                one.close()


def test_mutes_and_unmutes_reach_every_task_whatever_becomes_of_the_relay(executor: Executor) -> None:
    for one in executor.workers:
        one.tell(rows=100)
    eventually(lambda: executor.rows() == 400)
    first = executor.relay()
    finder, *_ = executor.others(first)
    finder.tell(mute=int(SICK))
    executor.all_know(SICK)

    # Killed. What was muted stays muted, and is not muted again by anybody; rows are not counted again.
    executor.kill(first)
    finder.tell(mute=int(OTHER))
    executor.all_know(SICK, OTHER)
    eventually(lambda: executor.tasks() == 3)
    assert executor.found.connections() == 1
    assert executor.rows() == 400
    second = executor.relay()
    assert second is not first

    # Frozen, as a worker that swaps: the others leave it, and come to know of what changes meanwhile.
    os.kill(second.process.pid, signal.SIGSTOP)
    left = executor.others(second)
    teller = next(one for one in left if one is not finder) if finder is second else finder
    teller.tell(rows=7)
    teller.tell(unmute=int(OTHER))
    os.kill(second.process.pid, signal.SIGCONT)

    # It is back, and replaced at last.
    executor.unmute(finder, OTHER, SICK)
    for one in executor.workers:
        one.tell(rows=1_000)
    eventually(lambda: executor.rows() % 1_000 in (400, 407) and executor.rows() > 3_000)
    executor.kill(executor.relay())
    eventually(lambda: executor.tasks() == 2)
    assert executor.rows() in (3_400, 3_407), (
        "what was told while it was frozen may be lost, never counted twice"
    )
