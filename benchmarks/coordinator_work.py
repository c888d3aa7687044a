"""The coordinator's processor time for so many tasks, without sockets: what a busy machine cannot blur.

    python -m benchmarks.coordinator_work [--tasks 1000,10000] [--per-host 8]

All that its server does with a frame is done (decrypting, decoding, deciding, encoding, encrypting), in this
process and with a clock that the benchmark sets; bytes go nowhere. So system calls are missing. Eight tasks
share a relay, whose code is the real one (``modelled_relay``), and hold batches for what is muted, as the
worst do. Only the server's time counts. All tasks and relays are in this process, too, so its memory says
nothing.

- all enter within a second
- 2 s at rest
- a broker freezes: 40 % of the tasks mute it by themselves within 2 s, and all report what they hold. How
  long it takes until the last task knows is by the benchmark's clock, in steps of 10 ms, as if the server
  took no time
- 2 s while it is muted, and 4 s in which it responds again
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import heapq
import json
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.modelled_relay import ModelledRelay, in_steps
from benchmarks.modelled_tasks import SECRET, SICK
from benchmarks.surroundings import RESULTS
from kafka_sink.coordinator.breaker.messages import (
    MAX_MUTES,
    BreakerReport,
    BreakerUpdate,
    MuteReport,
    UnmuteReport,
    decode_update,
    encode_report,
)
from kafka_sink.coordinator.figures.application_figures import ApplicationFigures
from kafka_sink.coordinator.process.server_process import _handlers
from kafka_sink.coordinator.transport.connections import ServerBounds
from kafka_sink.coordinator.transport.message_format import split_lines
from kafka_sink.coordinator.transport.peer_connection import PeerConnection
from kafka_sink.coordinator.transport.server import CoordinatorServer
from kafka_sink.coordinator.transport.session import MAX_FRAME_BYTES, FrameReader, Session
from kafka_sink.options import parse
from kafka_sink.timing_bounds import HEALTHY_REPORT_MS
from tests.support.fake_broker import FakeCluster

FILE = RESULTS / "coordinator_work.json"
PER_HOST, OWN_EVIDENCE, KEY = 8, 0.4, "modelled"
STEP_MS = 10.0
HEALTHY, OTHERS = BreakerReport({0: 5.0, 1: 5.0, 2: 5.0}, 4800), BreakerReport({0: 5.0, 2: 5.0}, 4800)


class Nowhere(asyncio.Transport):
    """Takes all that is written, and keeps what has not been taken."""

    def __init__(self) -> None:
        super().__init__()
        self._kept = bytearray()
        self.bytes = 0

    @property
    def has_more(self) -> bool:
        return bool(self._kept)

    def taken(self, *, with_length: bool = False) -> bytes:
        """What was written since the last time."""
        found, self._kept = bytes(self._kept), bytearray()
        return found if with_length else found[4:]

    def write(self, data: Any) -> None:
        self._kept += data
        self.bytes += len(data)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def abort(self) -> None:
        raise AssertionError("the server has dropped a connection")


class Host:
    """An executor: its connection, and the relay that adds up what its tasks say."""

    def __init__(self, work: Work, number: int, tasks: int) -> None:
        self.work = work
        self.tasks = tasks
        self.client, self.written = Session(SECRET, "client"), Nowhere()
        server = work.server
        self.peer = PeerConnection(number + 1, f"h{number}", Session(SECRET, "server"), server, work.now_ms)
        server._count += 1
        server._connections.add(self.peer)
        self.peer.connection_made(self.written)
        server.on_bytes(self.peer, self.client.reply_to_greeting(self.written.taken()))
        self.client.verify_proof(self.written.taken())
        server.on_bytes(self.peer, self.client.encode({"cluster": KEY, "relay": True}))
        self.relay = ModelledRelay(work.chance.random() * HEALTHY_REPORT_MS, work.now_ms, self._hear)
        self.frames = FrameReader(MAX_FRAME_BYTES)

    def say(self, task: int, report: BreakerReport) -> None:
        self.relay.say(task, 1, "breaker", encode_report(report), self.work.now_ms)

    def receive(self) -> None:
        """What the server has written."""
        self.frames.feed(self.written.taken(with_length=True))
        while (frame := self.frames.next_frame()) is not None:
            for line in split_lines(self.client.payload(frame)):
                self.relay.receive(line.message, self.work.now_ms)

    def _hear(self, task: int, _kind: str, _request: int | None, body: Mapping[str, Any]) -> None:
        update = decode_update(body, MAX_MUTES) if body else BreakerUpdate()
        work = self.work
        if SICK in update.added and not update.whole:
            work.knowing += 1
            # It reports the batches that wait, within the time for which it gathers them.
            work.at(work.chance.random() * 100, partial(self.say, task, BreakerReport(holds=(SICK,))))
        if SICK in update.removed:
            work.knowing -= 1
            work.at(update.delay_ms, partial(self.say, task, BreakerReport(holds=())))
        if SICK in update.leases and work.responds:
            work.at(1.0, partial(self.say, task, BreakerReport(unmuted=(UnmuteReport(SICK, "it responds"),))))


class Work:
    """A server with so many tasks. ``knowing``: how many know of the mute."""

    def __init__(self, tasks: int, per_host: int, bootstrap: str) -> None:
        self.now_ms = 1_000_000.0
        self.chance = random.Random(3)
        bounds = ServerBounds(connections=100_000, messages_per_s=1e9)
        self.server = CoordinatorServer(SECRET, _handlers(ApplicationFigures()), lambda: self.now_ms, bounds)
        self.server.add_cluster(KEY, parse({"kafka.bootstrap.servers": bootstrap}).options)
        self.server._loop = asyncio.get_running_loop()
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.responds, self.knowing = True, 0
        self.hosts = [Host(self, number, per_host) for number in range(-(-tasks // per_host))]

    def at(self, delay_ms: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.due, (self.now_ms + delay_ms, id(act), act))

    def all_report(self, over_ms: float) -> None:
        """Each task reports once, at a moment of this time, as often as real ones do."""
        for host in self.hosts:
            for task in range(1, host.tasks + 1):
                self.at(
                    self.chance.random() * over_ms,
                    partial(host.say, task, HEALTHY if self.responds else OTHERS),
                )

    async def run(self, ms: float, until: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Let so much time pass. Seconds of the server's processor time, and what it wrote and read."""
        before = sum(host.written.bytes for host in self.hosts)
        spent: list[float] = []
        frames, started_ms = 0, self.now_ms
        for now_ms in in_steps(self.now_ms + ms, self.now_ms, STEP_MS):
            self.now_ms = now_ms
            while self.due and self.due[0][0] <= now_ms:
                heapq.heappop(self.due)[2]()
            # Together, so that the server's code finds its caches as it left them.
            sent = [
                (host.peer, host.client.encode_payload(payload))
                for host in self.hosts
                if host.relay.due_ms(now_ms) <= now_ms and (payload := host.relay.payload(now_ms))
            ]
            frames += len(sent)
            spent += [timed(partial(self.server.on_bytes, *one)) for one in sent]
            cluster = self.server._clusters.running(KEY)
            if cluster is not None and cluster.next_change_ms(now_ms) <= 0:
                spent.append(timed(lambda: self.server._on_time(KEY)))
            started = time.thread_time()
            # The rest of what it writes.
            await asyncio.sleep(0)
            spent.append(time.thread_time() - started)
            for host in self.hosts:
                if host.written.has_more:
                    host.receive()
            if until():
                break
        return {
            "seconds": round(sum(spent), 3),
            "longest_ms": round(1000 * max(spent), 1),
            "frames": frames,
            "mib_written": round((sum(host.written.bytes for host in self.hosts) - before) / 2**20, 1),
            "after_ms": round(self.now_ms - started_ms),
        }


def timed(act: Callable[[], None]) -> float:
    started = time.thread_time()
    act()
    return time.thread_time() - started


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


async def measure(tasks: int, per_host: int, bootstrap: str) -> dict[str, Any]:
    # The model's objects are many times those of the server, which hardly collects any.
    gc.disable()
    before = resident_mib()
    work = Work(tasks, per_host, bootstrap)
    found: dict[str, Any] = {"tasks": tasks, "hosts": len(work.hosts)}
    total = len(work.hosts) * per_host
    found["relays_mib"] = round(resident_mib() - before, 1)
    for host in work.hosts:
        for task in range(1, per_host + 1):
            first = BreakerReport(rows=1, cluster_id="modelled-kafka")
            work.at(work.chance.random() * 1000, partial(host.say, task, first))
    found["entering"] = await work.run(1100.0)
    work.all_report(2000.0)
    await work.run(2000.0)
    work.all_report(2000.0)
    found["at_rest_2_s"] = await work.run(2000.0)
    # Nobody has had a response for two seconds.
    work.responds = False
    work.all_report(2000.0)
    await work.run(2500.0)
    own = BreakerReport(muted=(MuteReport(SICK, "silent", 2000.0),))
    for host in work.hosts:
        for task in range(1, per_host + 1):
            if work.chance.random() < OWN_EVIDENCE:
                work.at(work.chance.random() * 2000, partial(host.say, task, own))
    work.all_report(2000.0)
    found["until_all_know"] = await work.run(2000.0, until=lambda: work.knowing >= total)
    found["rest_of_2_s"] = await work.run(2000.0 - found["until_all_know"]["after_ms"])
    work.all_report(2000.0)
    found["muted_2_s"] = await work.run(2000.0)
    work.responds = True
    work.all_report(4000.0)
    found["back_4_s"] = await work.run(4000.0)
    assert not work.knowing, f"{work.knowing} tasks do not know that the broker responds"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", default="1000,10000")
    parser.add_argument("--per-host", type=int, default=PER_HOST)
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    arguments = parser.parse_args()
    for tasks in map(int, arguments.tasks.split(",")):
        with FakeCluster({"orders": 12}) as cluster:
            found = asyncio.run(measure(tasks, arguments.per_host, cluster.bootstrap_servers))
        kept[f"{tasks} on {found['hosts']}"] = found
        print(json.dumps(found), flush=True)
        FILE.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
