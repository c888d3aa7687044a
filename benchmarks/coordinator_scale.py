"""What the coordinator costs with many tasks: processor time, latency, memory, and how fast a mute spreads.

    python -m benchmarks.coordinator_scale [NAME ...] [--seconds 10]

The coordinator's own server runs in a process of its own, its brokers are scripted. Tasks are modelled in
another process: each has a connection, proves the secret, and tells as often and as much as a real task does
(``BreakerChannel``, ``MetadataChannel``), of the worst kind: all its partitions are written in each
interval, and it holds batches for all that is muted. Bodies are encoded once, so that the model costs less
than what it measures. In each case first nothing is wrong, then a broker is muted on one task's word, or
partitions on their failures. Figures of the server: processor time in percent of a core, the 99th percentile
of its responses' latency as tasks see it, connections lost, messages, memory at most, and the time from the
report that mutes to the last task that has heard of it.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import os
import re
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.surroundings import RESULTS, ROOT, environment
from kafka_sink.coordinator.wire.breaker_messages import BreakerReport, MuteReport, encode_report
from kafka_sink.coordinator.wire.metadata_messages import in_parts
from kafka_sink.coordinator.wire.session import MAX_FRAME_BYTES, FrameReader, Session
from kafka_sink.model import TopicPartition
from tests.support.fake_broker import FakeCluster

SECRET = bytes(range(32))
KEY = "modelled"
NODES = 3
SICK = 1
INTERVAL_MS, HEALTHY_MS, HEARTBEAT_MS = 500.0, 2000.0, 5000.0
LARGE_BYTES = 8192
METADATA_HEAD = re.compile(rb'\{"kind":"metadata"(?:,"id":(\d+),"last":(true|false))?,"body"')
# So many connect at a time.
TOGETHER, CONNECT_S = 32, 60.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Case:
    """``muted``: how many partitions are muted; 0: a broker."""

    tasks: int
    partitions: int
    muted: int = 0
    topics: int = 1


CASES = {
    "1000x12": Case(1000, 12),
    "1000x200": Case(1000, 200),
    "200x2000": Case(200, 2000, topics=20),
    "1000x12, 300 muted": Case(1000, 300, muted=300),
    "1000 tasks, 2000 topics": Case(1000, 2000, topics=2000),
    "5000x12": Case(5000, 12),
}


@dataclass
class Phase:
    """Figures of some seconds."""

    cpu_percent: float
    p99_ms: float
    lost: int
    messages: int
    bytes_in: int
    bytes_out: int


@dataclass
class Result:
    """Figures of a case."""

    case: Case
    connect_s: float
    at_rest: Phase
    muted: Phase
    heard: int
    last_heard_ms: float | None
    peak_rss_mib: float


@dataclass
class Task:
    """One modelled task."""

    number: int
    sock: socket.socket
    session: Session = field(default_factory=lambda: Session(SECRET, "client"))
    frames: FrameReader = field(default_factory=lambda: FrameReader(MAX_FRAME_BYTES))
    unsent: bytearray = field(default_factory=bytearray)
    asked: dict[int, float] = field(default_factory=dict)
    count: int = 0
    stage: int = 0
    is_lost: bool = False
    muted: set[str] = field(default_factory=set)
    leased: list[Any] = field(default_factory=list)
    questions: list[Any] = field(default_factory=list)
    holds: bool = False


class Model:
    """All tasks of a case, on one thread."""

    def __init__(self, case: Case, port: int) -> None:
        self.case = case
        self.port = port
        self.selector = selectors.DefaultSelector()
        self.tasks: list[Task] = []
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.latencies: list[float] = []
        self.bytes_in = self.bytes_out = self.messages = 0
        self.failing: set[int] = set()
        self.is_muted = False
        self.sick_told = True
        self.heard_at: dict[int, float] = {}
        per_topic = case.partitions // case.topics or 1
        self.topics = [f"orders-{number}" for number in range(case.topics)]
        self.partitions = [
            TopicPartition(topic, index) for topic in self.topics for index in range(per_topic)
        ][: case.partitions]
        if case.muted:
            self.sick: list[Any] = [[one.topic, one.partition] for one in self.partitions[: case.muted]]
        else:
            self.sick = [SICK]
        self.expected = {json.dumps(one) for one in self.sick}

    # -- connections --------------------------------------------------------------------------------

    def connect(self) -> float:
        started = time.monotonic()
        while len(self.tasks) < self.case.tasks and time.monotonic() < started + CONNECT_S:
            proving = sum(task.stage < 2 and not task.is_lost for task in self.tasks)
            for _ in range(min(TOGETHER - proving, self.case.tasks - len(self.tasks))):
                sock = socket.create_connection(("127.0.0.1", self.port), timeout=10)
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                task = Task(len(self.tasks), sock)
                self.tasks.append(task)
                self.selector.register(sock, selectors.EVENT_READ, task)
            self.run(0.002)
        while any(task.stage < 2 and not task.is_lost for task in self.tasks) and (
            time.monotonic() < started + CONNECT_S
        ):
            self.run(0.05)
        return time.monotonic() - started

    def _lose(self, task: Task) -> None:
        if not task.is_lost:
            task.is_lost = True
            self.selector.unregister(task.sock)
            task.sock.close()

    def _write(self, task: Task, data: bytes) -> None:
        if task.is_lost:
            return
        self.bytes_in += len(data)
        task.unsent += data
        self._flush(task)

    def _flush(self, task: Task) -> None:
        try:
            while task.unsent:
                del task.unsent[: task.sock.send(task.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._lose(task)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if task.unsent else 0)
        if self.selector.get_key(task.sock).events != events:
            self.selector.modify(task.sock, events, task)

    def tell(self, task: Task, kind: str, body: Mapping[str, Any]) -> None:
        if task.is_lost:
            return
        task.count += 1
        task.asked[task.count] = time.monotonic()
        self.messages += 1
        self._write(task, task.session.encode({"id": task.count, "kind": kind, "body": body}))

    def _on_readable(self, task: Task) -> None:
        try:
            data = task.sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose(task)
            return
        self.bytes_out += len(data)
        task.frames.feed(data)
        while (frame := task.frames.next_frame()) is not None:
            self._on_frame(task, frame)

    def _on_frame(self, task: Task, frame: bytes) -> None:
        if task.stage == 0:
            self._write(task, task.session.reply_to_greeting(frame))
            task.stage = 1
        elif task.stage == 1:
            task.session.verify_proof(frame)
            task.stage = 2
            self._write(task, task.session.encode({"cluster": KEY}))
            self._begin(task)
        else:
            self._on_frame_of_session(task, frame)

    def _on_frame_of_session(self, task: Task, frame: bytes) -> None:
        message = _head(frame) if len(frame) > LARGE_BYTES else None
        if message is None:
            message = task.session.decode(frame)
        else:
            task.session._received += 1
        self._on_message(task, message)

    def _on_message(self, task: Task, message: Mapping[str, Any]) -> None:
        now = time.monotonic()
        request = message.get("id")
        if request is not None and message.get("last"):
            self.latencies.append(1000 * (now - task.asked.pop(request)))
        if message["kind"] == "breaker" and message["body"]:
            body = message["body"]
            task.muted.update(json.dumps(target) for target, *_ in body.get("added", []))
            task.muted.difference_update(json.dumps(target) for target in body.get("removed", []))
            if body.get("leases"):
                task.leased = [lease[0] for lease in body["leases"]]
            asked = [one for one in body.get("asks", []) if isinstance(one, list)]
            if asked:
                task.questions += asked
                self.tell(task, "breaker", self._body(task, [0]))
            if self.is_muted and task.number not in self.heard_at and self.expected <= task.muted:
                self.heard_at[task.number] = now

    # -- what a task does ---------------------------------------------------------------------------

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.due, (when, id(act), act))

    def _begin(self, task: Task) -> None:
        now = time.monotonic()
        for names in in_parts(self.topics):
            self.tell(task, "metadata", {"ask": names})
        # Tasks begin at other times than one another.
        share = task.number / self.case.tasks
        self.at(now + share * HEALTHY_MS / 1000, lambda: self._report(task))
        self.at(now + share * HEARTBEAT_MS / 1000, lambda: self._beat(task))

    def _beat(self, task: Task) -> None:
        self.tell(task, "metadata", {"use": [], "stale": []})
        self.at(time.monotonic() + HEARTBEAT_MS / 1000, lambda: self._beat(task))

    def _report(self, task: Task) -> None:
        nodes = [node for node in range(NODES) if node != SICK or self.sick_told]
        self.tell(task, "breaker", self._body(task, nodes))
        interval_ms = INTERVAL_MS if task.muted or task.number in self.failing else HEALTHY_MS
        self.at(time.monotonic() + interval_ms / 1000, lambda: self._report(task))

    def _body(self, task: Task, nodes: list[int]) -> dict[str, Any]:
        body = encode_report(BreakerReport(dict.fromkeys(nodes, 5.0), 400 * len(self.partitions)))
        if task.number in self.failing and not task.muted:
            body["outcomes"] = [
                [topic, index, 0, 5, True, "NOT_ENOUGH_REPLICAS"] for topic, index in self.sick
            ]
        elif task.questions:
            body["outcomes"] = [[*one, 0, 5, True, "NOT_ENOUGH_REPLICAS"] for one in task.questions[:700]]
        task.questions = task.questions[700:]
        if bool(task.muted) != task.holds:
            task.holds = bool(task.muted)
            body["holds"] = self.sick if task.holds else []
        failed, task.leased = task.leased, []
        if failed:
            body["failed"] = [[target, "no response"] for target in failed]
        return body

    def mute(self) -> float:
        """What has it muted; returns when that was told."""
        self.is_muted = True
        self.sick_told = False
        if self.case.muted:
            self.failing = set(range(min(10, self.case.tasks)))
            self.run(0.0)
            started = time.monotonic()
            for number in self.failing:
                self.tell(self.tasks[number], "breaker", self._body(self.tasks[number], [0]))
            return started
        self.run(2.5)  # so long nobody has had a response from it
        started = time.monotonic()
        report = BreakerReport(muted=(MuteReport(SICK, "silent", 2000.0),))
        self.tell(self.tasks[0], "breaker", encode_report(report))
        return started

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            while self.due and self.due[0][0] <= now:
                heapq.heappop(self.due)[2]()
            if now >= until:
                return
            next_s = min(until, self.due[0][0] if self.due else until) - time.monotonic()
            for key, events in self.selector.select(max(0.0, next_s)):
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ and not key.data.is_lost:
                    self._on_readable(key.data)

    def close(self) -> None:
        for task in self.tasks:
            if not task.is_lost:
                task.sock.close()
        self.selector.close()


def _head(frame: bytes) -> dict[str, Any] | None:
    """Of a large frame of metadata: a model that reads it all would be slower than the server."""
    found = METADATA_HEAD.search(frame[:120])
    if found is None:
        return None
    number, last = found.groups()
    return {"kind": "metadata", "id": number and int(number), "last": last == b"true", "body": {}}


# -- the server's process ---------------------------------------------------------------------------


def serve(fd: int, bootstrap: str) -> None:
    from kafka_sink.coordinator.server.connections import ServerBounds
    from kafka_sink.coordinator.server.process import _HANDLERS
    from kafka_sink.coordinator.server.server import CoordinatorServer
    from kafka_sink.options import parse

    async def main() -> None:
        bounds = ServerBounds(connections=20_000)
        server = CoordinatorServer(SECRET, _HANDLERS, lambda: time.monotonic() * 1000, bounds)
        server.add_cluster(KEY, parse({"kafka.bootstrap.servers": bootstrap}).options)
        await server.start(socket.socket(fileno=fd))
        done = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, done.set)
        await done.wait()

    _allow_files()
    asyncio.run(main())
    os._exit(0)


def _allow_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Server:
    """The process as seen from outside."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def peak_rss_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


@contextmanager
def serving(bootstrap: str) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listening:
        command = [sys.executable, "-m", "benchmarks.coordinator_scale", "--serve", str(listening.fileno())]
        process = subprocess.Popen(
            [*command, bootstrap], cwd=ROOT, env=environment(), pass_fds=(listening.fileno(),)
        )
        try:
            yield Server(process, listening.getsockname()[1])
        finally:
            process.terminate()
            process.wait(10)


def measure(model: Model, server: Server, seconds: float) -> Phase:
    lost = sum(task.is_lost for task in model.tasks)
    model.latencies.clear()
    messages, bytes_in, bytes_out = model.messages, model.bytes_in, model.bytes_out
    cpu_s, started = server.cpu_s(), time.monotonic()
    model.run(seconds)
    took_s = time.monotonic() - started
    waiting = [1000 * (time.monotonic() - at) for task in model.tasks for at in task.asked.values()]
    latencies = sorted(model.latencies + waiting)
    return Phase(
        cpu_percent=round(100 * (server.cpu_s() - cpu_s) / took_s, 1),
        p99_ms=round(latencies[int(0.99 * len(latencies))], 1) if latencies else 0.0,
        lost=sum(task.is_lost for task in model.tasks) - lost,
        messages=model.messages - messages,
        bytes_in=model.bytes_in - bytes_in,
        bytes_out=model.bytes_out - bytes_out,
    )


def run_case(case: Case, seconds: float) -> Result:
    per_topic = case.partitions // case.topics or 1
    with (
        FakeCluster({f"orders-{number}": per_topic for number in range(case.topics)}) as cluster,
        serving(cluster.bootstrap_servers) as server,
    ):
        model = Model(case, server.port)
        try:
            connect_s = model.connect()
            model.run(3.0)
            at_rest = measure(model, server, seconds)
            muted_at = model.mute()
            muted = measure(model, server, seconds)
            heard = model.heard_at
            return Result(
                case,
                round(connect_s, 2),
                at_rest,
                muted,
                len(heard),
                round(1000 * (max(heard.values()) - muted_at), 1) if heard else None,
                round(server.peak_rss_mib(), 1),
            )
        finally:
            model.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*CASES, []])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--label", default="now", help="under which name the figures are kept")
    arguments = parser.parse_args()
    _allow_files()
    file = RESULTS / "coordinator_scale.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    for name in arguments.names or CASES:
        result = run_case(CASES[name], arguments.seconds)
        kept.setdefault(arguments.label, {})[name] = asdict(result)
        print(f"{name}: {json.dumps(asdict(result))}", flush=True)
        file.write_text(json.dumps(kept, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(int(sys.argv[2]), sys.argv[3])
    sys.exit(main())
