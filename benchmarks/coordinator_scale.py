"""What the coordinator costs with many tasks: processor time, latency, memory, and how fast a mute spreads.

    python -m benchmarks.coordinator_scale [NAME ...] [--seconds 5] [--sweeps] [--flood] [--plot]

The coordinator's own server runs in a process of its own, its brokers are scripted. Tasks are modelled in
another process (``modelled_tasks``), eight of an executor on one connection. In each case first nothing is
wrong; then a broker is muted on one task's report, or partitions on their failures. Figures of the server:
processor time in percent of a core, the 99th percentile of its replies' latency as tasks see it,
connections lost, messages, memory at most, and the time from the report that mutes to the last task that
has received it.

``--sweeps`` measures how cost grows with tasks, with partitions and with muted partitions; ``--flood``
whether tasks get in while others open connections as fast as they can. Without arguments all of it, and the
plots.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import charts
from benchmarks.modelled_tasks import SECRET, SETS, Case, Model, key_of
from benchmarks.surroundings import RESULTS, ROOT, environment
from tests.support.fake_broker import FakeCluster

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
FILE = RESULTS / "coordinator_scale.json"

CASES = {
    "1000x12": Case(1000, 12),
    "1000x200": Case(1000, 200),
    "200x2000": Case(200, 2000, topics=20),
    "1000 tasks, 300 muted": Case(1000, 300, muted=300),
    "1000 tasks, 2000 topics": Case(1000, 2000, topics=2000),
    "100 tasks, 10000 topics": Case(100, 10_000, topics=10_000),
    "1000x200, own connections": Case(1000, 200, per_host=0),
    "5000x12, own connections": Case(5000, 12, per_host=0),
    "10000 tasks, 1250 hosts": Case(10_000, 12),
    "100000 tasks, 10000 hosts": Case(100_000, 12, per_host=10, relays=100),
}
SWEEPS = {
    "tasks": {tasks: Case(tasks, 12) for tasks in (250, 500, 1000, 2500, 5000, 10_000)},
    "tasks, own connections": {tasks: Case(tasks, 12, per_host=0) for tasks in (250, 500, 1000, 2500, 5000)},
    "topics": {topics: Case(1000, topics, topics=topics) for topics in (1, 100, 500, 1000, 2000)},
    "muted partitions": {muted: Case(1000, muted, muted=muted) for muted in (1, 30, 100, 300)},
}


@dataclass
class Phase:
    """Figures of some seconds."""

    cpu_percent: float
    p99_ms: float
    lost: int
    messages: int
    frames: int
    bytes_in: int
    bytes_out: int


@dataclass
class Result:
    """Figures of a case. ``connect_cpu_s``: processor seconds until all have connected and their metadata."""

    case: Case
    connect_s: float
    connect_cpu_s: float
    at_rest: Phase
    muted: Phase
    heard: int
    last_heard_ms: float | None
    peak_rss_mib: float


# -- the server's process ---------------------------------------------------------------------------


def serve(fd: int, bootstrap: str, view: str) -> None:
    from kafka_sink.clock import monotonic_ms
    from kafka_sink.coordinator.figures.application_figures import ApplicationFigures
    from kafka_sink.coordinator.figures.live_view import LiveView
    from kafka_sink.coordinator.process.server_process import _handlers, collect_garbage_seldom
    from kafka_sink.coordinator.transport.loop_watch import LoopWatch
    from kafka_sink.coordinator.transport.server import CoordinatorServer
    from kafka_sink.options import parse

    watch = LoopWatch(monotonic_ms)

    async def main() -> None:
        figures = ApplicationFigures()
        server = CoordinatorServer(SECRET, _handlers(figures), monotonic_ms, watch=watch)
        figures.coordinator = server.state
        for number in range(SETS):
            # Options that make another set of the same Kafka.
            given = {"kafka.bootstrap.servers": bootstrap, "kafka.metadata.max.age.ms": str(300_000 - number)}
            server.add_cluster(key_of(number), parse(given).options)
        await server.start(socket.socket(fileno=fd))
        LiveView(figures, Path(view)).open({"address": "127.0.0.1", "port": 0})
        done = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, done.set)
        while not done.is_set():
            figures.sample(monotonic_ms())
            await asyncio.sleep(1.0)

    allow_files()
    collect_garbage_seldom()
    loop = watch.new_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(main())
    os._exit(0)


def allow_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Server:
    """The process as seen from outside. ``listening`` outlives it, as its supervisor's does."""

    def __init__(self, listening: socket.socket, bootstrap: str, folder: Path) -> None:
        self.port = listening.getsockname()[1]
        self._listening = listening
        self._view = folder / "view"
        self._command = [sys.executable, "-m", "benchmarks.coordinator_scale", "--serve"]
        self._command += [str(listening.fileno()), bootstrap, str(self._view)]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, cwd=ROOT, env=environment(), pass_fds=(self._listening.fileno(),)
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def view_port(self) -> int:
        """Of the live view, once it serves."""
        until = time.monotonic() + 30
        while not self._view.exists() and time.monotonic() < until:
            time.sleep(0.05)
        return int(json.loads(self._view.read_text())["port"])

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def peak_rss_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


@contextmanager
def serving(bootstrap: str) -> Iterator[Server]:
    with (
        socket.create_server(("127.0.0.1", 0), backlog=4096) as listening,
        tempfile.TemporaryDirectory(prefix="kafka-chunked-bench-") as folder,
    ):
        server = Server(listening, bootstrap, Path(folder))
        try:
            yield server
        finally:
            server.process.send_signal(signal.SIGCONT)
            server.process.terminate()
            server.process.wait(10)


def measure(model: Model, server: Server, seconds: float) -> Phase:
    lost = model.lost
    model.latencies.clear()
    before = model.relayed, model.frames, model.bytes_in, model.bytes_out
    cpu_s, started = server.cpu_s(), time.monotonic()
    model.run(seconds)
    took_s = time.monotonic() - started
    waiting = [1000 * (time.monotonic() - at) for task in model.tasks for at in task.asked.values()]
    latencies = sorted(model.latencies + waiting)
    after = model.relayed, model.frames, model.bytes_in, model.bytes_out
    return Phase(
        round(100 * (server.cpu_s() - cpu_s) / took_s, 1),
        round(latencies[int(0.99 * len(latencies))], 1) if latencies else 0.0,
        model.lost - lost,
        *(now - then for now, then in zip(after, before, strict=True)),
    )


def run_case(case: Case, seconds: float) -> Result:
    per_topic = case.partitions // case.topics or 1
    with (
        FakeCluster({f"orders-{number}": per_topic for number in range(case.topics)}) as cluster,
        serving(cluster.bootstrap_servers) as server,
    ):
        model = Model(case, server.port)
        try:
            cpu_s = server.cpu_s()
            connect_s = model.connect()
            until = time.monotonic() + 30.0
            # Each task's first message asks for its topics.
            while any(1 in task.asked for task in model.tasks) and time.monotonic() < until:
                model.run(0.1)
            connect_cpu_s = server.cpu_s() - cpu_s
            model.run(3.0)
            at_rest = measure(model, server, seconds)
            muted_at = model.mute()
            muted = measure(model, server, seconds)
            heard = model.heard_at
            return Result(
                case,
                round(connect_s, 2),
                round(connect_cpu_s, 2),
                at_rest,
                muted,
                len(heard),
                round(1000 * (max(heard.values()) - muted_at), 1) if heard else None,
                round(server.peak_rss_mib(), 1),
            )
        finally:
            model.close()


# -- a flood ----------------------------------------------------------------------------------------

FLOODERS, FLOOD_SOURCE = 4, "127.0.0.9"
# Linux: choose the port when connecting, which is faster.
IP_BIND_ADDRESS_NO_PORT = 24


def flood(port: int) -> None:
    """Opens and closes connections as fast as it can, until it is ended; says how many on SIGTERM."""
    count = 0

    def end(*_: object) -> None:
        print(count, flush=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    while True:
        with suppress(OSError), socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            peer.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
            peer.bind((FLOOD_SOURCE, 0))
            peer.connect(("127.0.0.1", port))
            count += 1


def run_flood(seconds: float) -> dict[str, Any]:
    """Executors of another address, and of the flood's own, connect one after another during a flood."""
    case = Case(1000, 12)
    with FakeCluster({"orders-0": 12}) as cluster, serving(cluster.bootstrap_servers) as server:
        model = Model(case, server.port)
        command = [sys.executable, "-m", "benchmarks.coordinator_scale", "--flooder", str(server.port)]
        try:
            model.connect()
            model.run(3.0)
            flooders = [
                subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
                for _ in range(FLOODERS)
            ]
            model.run(1.0)
            started = time.monotonic()
            joined = {source: _join(model, source, 20) for source in ("127.0.0.1", FLOOD_SOURCE)}
            phase = measure(model, server, seconds)
            took_s = time.monotonic() - started
            for flooder in flooders:
                flooder.terminate()
            opened = sum(int(flooder.communicate()[0] or 0) for flooder in flooders)
            return {
                "connections_per_s": round(opened / took_s),
                "joined_ms": joined,
                "tasks": asdict(phase),
                "peak_rss_mib": round(server.peak_rss_mib(), 1),
            }
        finally:
            model.close()


def _join(model: Model, source: str, count: int) -> list[float | None]:
    """How long each of some executors took from its first attempt; None: longer than 30 s."""
    took: list[float | None] = []
    for _ in range(count):
        started = time.monotonic()
        while time.monotonic() < started + 30:
            try:
                host = model.add_host(1, source)
            except OSError:
                model.run(0.05)
                continue
            while host.stage < 2 and not host.is_lost and time.monotonic() < started + 30:
                model.run(0.002)
            if host.stage == 2:
                break
            model.hosts.remove(host)
            model.run(0.05)
        is_in = model.hosts[-1].stage == 2
        took.append(round(1000 * (time.monotonic() - started), 1) if is_in else None)
        # At all times of the second over which an address's connections are counted.
        model.run(0.13)
    return took


# -- plots ------------------------------------------------------------------------------------------


def plot(kept: dict[str, Any], file: Path) -> None:
    sweeps = kept["sweeps"]
    made, axes = charts.figure(
        "What the coordinator costs",
        ["modelled tasks that send what real ones do; the coordinator is a process of its own; 2 cores"],
        (10, 7.6),
        2,
        2,
    )
    lines = (
        ("tasks", "8 tasks a connection", charts.OURS),
        ("tasks, own connections", "1 task a connection", charts.OTHER),
    )
    for name, label, colour in lines:
        found = sorted((int(size), one) for size, one in sweeps[name].items())
        sizes = [size for size, _ in found]
        for phase, style in (("at_rest", "o-"), ("muted", "s--")):
            text = f"{label}, {'at rest' if phase == 'at_rest' else 'a broker muted'}"
            values = [one[phase]["cpu_percent"] for _, one in found]
            axes[0][0].plot(sizes, values, style, color=colour, label=text)
        axes[0][1].plot(sizes, [one["last_heard_ms"] for _, one in found], "o-", color=colour, label=label)
        axes[1][0].plot(sizes, [one["peak_rss_mib"] for _, one in found], "o-", color=colour, label=label)
    for axis, text, unit in (
        (axes[0][0], "Processor time", "% of a core"),
        (axes[0][1], "Until the last task knows of a mute", "ms"),
        (axes[1][0], "Memory at most", "MiB"),
    ):
        axis.set_title(text)
        axis.set_xlabel("tasks")
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.set_ylabel(unit)
    right = axes[1][1]
    for name, colour in (("topics", charts.SECOND), ("muted partitions", charts.ALERT)):
        found = sorted((int(size), one) for size, one in sweeps[name].items())
        sizes = [size for size, _ in found]
        starting = [one["connect_cpu_s"] for _, one in found]
        right.plot(sizes, starting, "o-", color=colour, label=f"{name}: seconds for all to start")
        values = [one["muted"]["cpu_percent"] / 100 for _, one in found]
        right.plot(sizes, values, "s--", color=colour, label=f"{name}: share of a core, while muted")
    right.set_title("1,000 tasks, by topics or muted partitions")
    right.set_xlabel("topics or muted partitions")
    right.set_ylabel("processor time")
    right.set_xscale("log")
    right.xaxis.set_major_formatter("{x:,.0f}")
    for axis in axes.flat:
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.6)
        axis.legend()
    charts.save(made, file)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*CASES, []])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--sweeps", action="store_true")
    parser.add_argument("--flood", action="store_true")
    parser.add_argument("--plot", action="store_true")
    arguments = parser.parse_args()
    allow_files()
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    is_all = not (arguments.names or arguments.sweeps or arguments.flood or arguments.plot)

    def keep(found: dict[str, Any], group: str, name: str) -> None:
        kept.setdefault(group, {})[name] = found
        print(f"{group}, {name}: {json.dumps(found)}", flush=True)
        FILE.write_text(json.dumps(kept, indent=2) + "\n")

    for name in CASES if is_all else arguments.names:
        keep(asdict(run_case(CASES[name], arguments.seconds)), "cases", name)
    if is_all or arguments.sweeps:
        for sweep, cases in SWEEPS.items():
            for size, case in cases.items():
                kept.setdefault("sweeps", {}).setdefault(sweep, {})[str(size)] = None
                found = asdict(run_case(case, arguments.seconds))
                kept["sweeps"][sweep][str(size)] = found
                keep(kept["sweeps"][sweep], "sweeps", sweep)
    if is_all or arguments.flood:
        keep(run_flood(arguments.seconds), "flood", "1000 tasks")
    if is_all or arguments.plot:
        plot(kept, FILE.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(int(sys.argv[2]), sys.argv[3], sys.argv[4])
    if sys.argv[1:2] == ["--flooder"]:
        flood(int(sys.argv[2]))
    sys.exit(main())
