"""The coordinator's processor time for so many tasks, without sockets: what a busy machine cannot blur.

    python -m benchmarks.coordinator_work [--tasks 1000,10000,100000]

All that its server does with a frame is done (decrypting, decoding, deciding, encoding, encrypting), in this
process and with a clock that the benchmark sets; bytes go nowhere. So system calls are missing. Eight tasks
share a connection, and hold batches for what is muted, as the worst do.

- an interval of 2 s at rest: a report of each task, and a third of the checks that come every 6 s
- a broker freezes: 40 % of the tasks mute it by themselves within 2 s, and all report again what they hold
- it responds again
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.modelled_tasks import SECRET, SICK
from benchmarks.surroundings import RESULTS
from kafka_sink.coordinator.breaker.messages import BreakerReport, MuteReport, UnmuteReport, encode_report
from kafka_sink.coordinator.figures.application_figures import ApplicationFigures
from kafka_sink.coordinator.process.server_process import _handlers
from kafka_sink.coordinator.transport.connections import ServerBounds
from kafka_sink.coordinator.transport.message_format import prefixed
from kafka_sink.coordinator.transport.peer_connection import PeerConnection
from kafka_sink.coordinator.transport.server import CoordinatorServer
from kafka_sink.coordinator.transport.session import Session
from kafka_sink.options import parse
from tests.support.fake_broker import FakeCluster

FILE = RESULTS / "coordinator_work.json"
PER_HOST, OWN_EVIDENCE, KEY = 8, 0.4, "modelled"
HEALTHY = encode_report(BreakerReport({0: 5.0, 2: 5.0}, 4800))


class Nowhere(asyncio.Transport):
    """Takes all that is written."""

    def __init__(self) -> None:
        super().__init__()
        self.last = b""
        self.bytes = 0

    def write(self, data: Any) -> None:
        self.last = bytes(data)
        self.bytes += len(data)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def abort(self) -> None:
        raise AssertionError("the server has dropped a connection")


class Work:
    """A server with so many tasks connected."""

    def __init__(self, tasks: int, bootstrap: str) -> None:
        self.now_ms = 1_000_000.0
        bounds = ServerBounds(connections=100_000, messages_per_s=1e9)
        self.server = CoordinatorServer(SECRET, _handlers(ApplicationFigures()), lambda: self.now_ms, bounds)
        self.server.add_cluster(KEY, parse({"kafka.bootstrap.servers": bootstrap}).options)
        self.server._loop = asyncio.get_running_loop()
        self.peers: list[tuple[PeerConnection, Session, Nowhere]] = []
        self.tasks = tasks
        self.count = 0
        for number in range(-(-tasks // PER_HOST)):
            client, written = Session(SECRET, "client"), Nowhere()
            peer = PeerConnection(
                number + 1, f"h{number}", Session(SECRET, "server"), self.server, self.now_ms
            )
            self.server._count += 1
            self.server._connections.add(peer)
            peer.connection_made(written)
            self.server.on_bytes(peer, client.reply_to_greeting(written.last[4:]))
            client.verify_proof(written.last[4:])
            self.server.on_bytes(peer, client.encode({"cluster": KEY}))
            self.peers.append((peer, client, written))

    def frame(
        self, host: int, said: Mapping[int, tuple[str, Mapping[str, Any]]]
    ) -> tuple[PeerConnection, bytes]:
        """Of an executor: by its tasks' numbers, what they say."""
        peer, client, _ = self.peers[host]
        lines = []
        for number, (kind, body) in said.items():
            self.count += 1
            message = {"id": self.count, "kind": kind, "body": body}
            lines.append(prefixed((number,), json.dumps(message, separators=(",", ":")).encode()))
        return peer, client.encode_payload(b"\n".join(lines))

    def all_say(
        self, kind: str, body: Mapping[str, Any], every: int = 1
    ) -> list[tuple[PeerConnection, bytes]]:
        """A frame of each executor, or of one in ``every``."""
        said = dict.fromkeys(range(1, PER_HOST + 1), (kind, body))
        return [self.frame(host, said) for host in range(0, len(self.peers), every)]

    async def take(self, frames: Iterable[tuple[PeerConnection, bytes]], over_ms: float) -> dict[str, float]:
        """They come in ``over_ms`` of the server's clock. Seconds of processor time, and bytes written."""
        frames = list(frames)
        written = sum(one.bytes for _, _, one in self.peers)
        spent_s = longest_s = 0.0
        for peer, data in frames:
            self.now_ms += over_ms / len(frames)
            started = time.thread_time()
            self.server.on_bytes(peer, data)
            took_s = time.thread_time() - started
            spent_s, longest_s = spent_s + took_s, max(longest_s, took_s)
        started = time.thread_time()
        self.now_ms += 100.0
        self.server._on_time(KEY)
        await asyncio.sleep(0)
        took_s = time.thread_time() - started
        return {
            "seconds": round(spent_s + took_s, 3),
            "longest_ms": round(1000 * max(longest_s, took_s), 1),
            "mib_written": round((sum(one.bytes for _, _, one in self.peers) - written) / 2**20, 1),
        }


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


async def measure(tasks: int, bootstrap: str) -> dict[str, Any]:
    before = resident_mib()
    work = Work(tasks, bootstrap)
    chance = random.Random(3)
    first = encode_report(BreakerReport(rows=1, cluster_id="modelled-kafka"))
    found: dict[str, Any] = {"tasks": tasks, "hosts": len(work.peers)}
    found["entering"] = await work.take(work.all_say("breaker", first), 1000.0)
    found["memory_mib_at_most"] = round(resident_mib() - before, 1)
    rest = work.all_say("breaker", HEALTHY)
    beats = work.all_say("metadata", {"use": [], "stale": []}, every=3)
    found["at_rest_2_s"] = await work.take([*rest, *beats], 2000.0)
    own = encode_report(BreakerReport(muted=(MuteReport(SICK, "silent", 2000.0),)))
    work.now_ms += 2000.0
    said = [
        {number: ("breaker", own) for number in range(1, PER_HOST + 1) if chance.random() < OWN_EVIDENCE}
        for _ in work.peers
    ]
    frozen = [work.frame(host, one) for host, one in enumerate(said) if one]
    holds = encode_report(BreakerReport(holds=(SICK,)))
    found["frozen"] = await work.take([*frozen, *work.all_say("breaker", holds)], 2000.0)
    found["muted_2_s"] = await work.take(work.all_say("breaker", HEALTHY), 2000.0)
    over = encode_report(BreakerReport(unmuted=(UnmuteReport(SICK, "it responds"),)))
    witness = next(iter(work.server._clusters.running(KEY).handlers["breaker"]._breakers.values()))  # type: ignore[union-attr,attr-defined]
    peer, task = work.server._tasks[next(iter(witness._evidence._witnesses[SICK]))]
    host = next(index for index, (one, _, _) in enumerate(work.peers) if one is peer)
    found["back"] = await work.take([work.frame(host, {int(task or 0): ("breaker", over)})], 1.0)
    found["freed"] = await work.take(work.all_say("breaker", encode_report(BreakerReport(holds=()))), 1000.0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", default="1000,10000,100000")
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    for tasks in map(int, parser.parse_args().tasks.split(",")):
        with FakeCluster({"orders": 12}) as cluster:
            kept[str(tasks)] = asyncio.run(measure(tasks, cluster.bootstrap_servers))
        print(json.dumps(kept[str(tasks)]), flush=True)
        FILE.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
