"""The coordinator at scale: up to 10,000 tasks at rest, with a frozen broker, after a stall and a kill.

    python -m benchmarks.coordinator [--tasks N,...] [--smoke]

The coordinator's own process with its default bounds, and modelled tasks (``modelled_tasks``) on another
core, each with a connection of its own. The live view is read twice a second. One thing follows another:

- all tasks start, 500 a second, then nothing happens
- a broker freezes, and 40 % of the tasks mute it by themselves within 2 s
- the network drops all connections at once, while the broker is muted
- the broker responds again
- the process stalls for 5 s (SIGSTOP) while a broker is muted: tasks give it up, and all come back at once
- it is killed (SIGKILL) while the broker is muted; the next write starts another, and all its tasks connect

Then with a tenth of the tasks: 5,000 partitions fail for all of them at once, and are written again.

Of each: seconds until the last task has been told of the change, and until all are connected and answered;
the slowest reply, attempts to connect that took too long, tasks that gave up waiting for a reply, connections
lost, processor time of both.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import charts
from benchmarks.modelled_tasks import Crowd
from benchmarks.processor_time import of_process
from benchmarks.sampler import Sampler
from benchmarks.surroundings import ROOT, environment, keep, kept, parser_of
from kafka_sink.coordinator.client import ask
from kafka_sink.coordinator.live.messages import OpenView, ViewOpened
from kafka_sink.coordinator.rendezvous import LocationFolder
from kafka_sink.driver import driver_process
from kafka_sink.spark_application import SparkApplication, planning_for
from tests.support.waiting import until

OWN_EVIDENCE, FEW, MANY = 0.4, 12, 5_000
STALL_S, LOOK_S, START_S, NEXT_WRITE_S = 5.0, 0.5, 10.0, 2.0


class Server:
    """The process as planning starts it, seen from outside."""

    def __init__(self, folder: str) -> None:
        self._place = LocationFolder.make(folder)
        self.start()

    def start(self) -> None:
        with planning_for(SparkApplication("", os.getpid(), {})):
            driver = driver_process.find_driver_process()
        assert driver is not None
        self._place.withdraw()
        with socket.create_server(("127.0.0.1", 0), backlog=4096) as listening:
            settings = {
                "folder": str(self._place.parent),
                "driver": [driver.pid, driver.started],
                "address": "127.0.0.1",
                "listening": listening.fileno(),
            }
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kafka_sink.coordinator.server_process", json.dumps(settings)],
                cwd=ROOT,
                env=environment(),
                pass_fds=(listening.fileno(),),
            )
        self.found = until(self._place.found, "a coordinator that serves", START_S, 0.02)
        opened = ask(self.found.of_driver, OpenView("127.0.0.1", 0), ViewOpened, 1000 * START_S)
        self.view = opened.url

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def cpu_s(self) -> float:
        return of_process(self.process.pid)

    def peak_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


class Looker(Sampler):
    """Reads the live view's data and metrics twice a second, as a page and a Prometheus would."""

    def __init__(self, server: Server) -> None:
        super().__init__("benchmark-looker", LOOK_S)
        self._server = server

    def sample(self) -> None:
        """See Sampler."""
        with suppress(OSError, ValueError):
            for path in ("metrics.json", "metrics"):
                with urllib.request.urlopen(self._server.view + path, timeout=5) as response:
                    response.read()


@dataclass(frozen=True)
class Event:
    """The figures of one event: seconds, milliseconds, percent of a core. Reports: to the live view."""

    name: str
    told_s: float | None
    back_s: float | None
    slowest_ms: float
    p99_ms: float
    unconnected: int
    gave_up: int
    lost: int
    cpu_percent: float
    model_percent: float
    reports_per_s: float


class Run:
    """The server, its tasks, and the figures of each event."""

    def __init__(self, server: Server, crowd: Crowd, seconds: float) -> None:
        self.server, self.crowd = server, crowd
        self.events: list[Event] = []
        self._seconds = seconds

    def event(
        self, name: str, cause: Callable[[], None], *, tells: bool = False, brings_back: bool = False
    ) -> None:
        """Cause it, and watch it until it is over, and for some seconds."""
        crowd, server = self.crowd, self.server
        crowd.mark()
        pid, used_s, own_s, started = server.process.pid, server.cpu_s(), time.thread_time(), time.monotonic()
        cause()
        back_s = crowd.run_until(lambda: crowd.is_back, 60.0) if brings_back else None
        if tells:
            crowd.run_until(lambda: crowd.are_told, 30.0)
        crowd.run(max(0.5, started + self._seconds - time.monotonic()))
        took_s = time.monotonic() - started
        used_s = server.cpu_s() - (used_s if server.process.pid == pid else 0.0)
        latencies = sorted(crowd.latencies) or [0.0]
        told_s = crowd.told_s() if tells else None
        found = Event(
            name,
            None if told_s is None else round(told_s, 2),
            None if back_s is None else round(back_s, 2),
            round(1000 * latencies[-1], 1),
            round(1000 * latencies[int(0.99 * len(latencies))], 1),
            crowd.unconnected,
            crowd.gave_up,
            crowd.lost,
            round(100 * used_s / took_s, 1),
            round(100 * (time.thread_time() - own_s) / took_s, 1),
            round(crowd.reports / took_s, 1),
        )
        self.events.append(found)
        print(json.dumps(asdict(found)), flush=True)

    def brokers(self) -> None:
        crowd = self.crowd
        self.event("all start", crowd.connect_all, brings_back=True)
        self.event("at rest", lambda: None)
        self.event("a broker freezes", lambda: crowd.freeze(OWN_EVIDENCE), tells=True)
        self.event("all reconnect, while muted", crowd.cut, brings_back=True)
        self.event("the broker responds again", crowd.thaw, tells=True)
        crowd.freeze(OWN_EVIDENCE)
        crowd.run_until(lambda: crowd.are_told, 30.0)
        self.event("stalls for 5 s, while muted", self.stall, brings_back=True)
        self.event("killed, while muted", self.kill, tells=True, brings_back=True)

    def partitions(self) -> None:
        crowd = self.crowd
        count = f"{len(crowd.partitions):,} partitions"
        crowd.connect_all()
        crowd.run_until(lambda: crowd.is_back, 60.0)
        self.event(f"{count} fail", crowd.fail, tells=True)
        self.event("they stay muted", lambda: None)
        self.event("they are written again", crowd.recover, tells=True)

    def stall(self) -> None:
        os.kill(self.server.process.pid, signal.SIGSTOP)
        self.crowd.run(STALL_S)
        os.kill(self.server.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """The tasks of the next write connect to the next coordinator, and find the broker frozen."""
        self.server.kill()
        self.crowd.leave()
        self.server.start()
        self.crowd.freeze(OWN_EVIDENCE)
        self.crowd.connect_all(NEXT_WRITE_S)


@contextmanager
def running(tasks: int, partitions: int, seconds: float) -> Iterator[Run]:
    """A coordinator with its tasks. ``seconds``: how long an event is watched at least."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    with tempfile.TemporaryDirectory(prefix="kafka-chunked-bench-") as folder:
        server = Server(folder)
        crowd = Crowd(lambda: server.found, tasks, partitions)
        try:
            with Looker(server):
                yield Run(server, crowd, seconds)
        finally:
            crowd.leave()
            server.kill()


def measure(tasks: int, partitions: int, seconds: float) -> dict[str, Any]:
    with running(tasks, FEW, seconds) as run:
        run.brokers()
        peak_mib = round(run.server.peak_mib(), 1)
    with running(max(10, tasks // 10), partitions, seconds) as wide:
        wide.partitions()
    conditions = (
        f"{tasks:,} modelled tasks, a connection each, and {tasks // 10:,} where partitions fail; live view "
        f"read twice a second; {os.cpu_count()} cores shared with the model (load {os.getloadavg()[1]:.0f}), "
        f"Python {platform.python_version()}"
    )
    events = [asdict(one) for one in (*run.events, *wide.events)]
    return {"conditions": conditions, "tasks": tasks, "peak_mib": peak_mib, "events": events}


def plot(found: dict[str, Any], file: Path) -> None:
    """Bars by event and number of tasks."""
    parts = (
        ("told_s", "Until the last task is told, s", "{:.2f}"),
        ("slowest_ms", "Slowest reply, ms", "{:,.0f}"),
        ("cpu_percent", "% of a core", "{:.0f}"),
    )
    sizes = [found[tasks] for tasks in sorted(found, key=int)]
    names = [one["name"] for one in sizes[0]["events"]]
    conditions = [one["conditions"] for one in sizes]
    made, axes = charts.figure("The coordinator at scale", conditions, (10, 6.4), 1, 3, sharey=True)
    height = 0.8 / len(sizes)
    for axis, (key, title, form) in zip(axes[0], parts, strict=True):
        for number, (size, colour) in enumerate(zip(sizes, (charts.LIGHT, charts.OURS), strict=False)):
            places = [place + (number - (len(sizes) - 1) / 2) * height for place in range(len(names))]
            values = [one[key] for one in size["events"]]
            drawn = axis.barh(
                places,
                [value or 0.0 for value in values],
                height=height,
                color=colour,
                label=f"{size['tasks']:,} tasks",
            )
            charts.label(axis, drawn, ["" if value is None else form.format(value) for value in values])
        axis.set_title(title)
    axes[0][0].set_yticks(range(len(names)), names)
    axes[0][0].invert_yaxis()
    axes[0][0].legend()
    charts.save(made, file)


def main() -> None:
    parser = parser_of(__doc__, "few tasks")
    parser.add_argument("--tasks", default="2500,10000", help="numbers; the figures of others are kept")
    options = parser.parse_args()
    if options.smoke:
        measure(20, 50, 0.1)
        return
    found = kept("coordinator") or {}
    for tasks in options.tasks.split(","):
        found[tasks] = measure(int(tasks), MANY, 10.0)
        keep("coordinator", found)
    keep("coordinator", found, plot)


if __name__ == "__main__":
    main()
