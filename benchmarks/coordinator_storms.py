"""What the coordinator does in storms: a frozen broker, stalls, kills, churn, with the live view on.

    python -m benchmarks.coordinator_storms [--tasks 1000,10000,100000] [--plot]

The coordinator's own server with its default limits, in a process of its own, scripted brokers, and modelled
tasks, eight of an executor on one connection (``modelled_tasks``), in 70 sets of options for one Kafka.
Hosts report at random moments, a task that waits for a reply for 2 s leaves its relay and enters again, and
the live view is read twice a second. One storm follows another:

- a broker freezes, and 40 % of the tasks mute it by themselves within 2 s
- all relays lose their connections at once, while the broker is muted
- the broker responds again
- 500 short tasks a second
- a third of the relays is killed
- the process stands still for 2, 5 and 20 s (SIGSTOP)
- it is killed (SIGKILL) while the broker is muted, and started again at once, as its supervisor does

From ``--tasks 12500`` on, ten tasks on each executor, without the live view: at rest, a freeze, all
reconnect, the broker responds. 200 executors are modelled as above, the others by a crowd
(``modelled_crowd``).

Of each: until all tasks have been answered since, the slowest reply, tasks that gave up waiting, connections
lost and left, the server's processor time, and what it says of itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import charts
from benchmarks.coordinator_scale import Server, allow_files, serving
from benchmarks.modelled_crowd import Ask, crowd
from benchmarks.modelled_tasks import SETS, Case, StormModel
from benchmarks.surroundings import RESULTS
from tests.support.fake_broker import FakeCluster

FILE = RESULTS / "coordinator_storms.json"
OWN_EVIDENCE, CHURN_PER_S = 0.4, 500
PARTITIONS, TOPICS, LOOK_S = 12, 1, 0.5
# From so many tasks on, a crowd stands for all hosts but so many.
LARGE, REAL_HOSTS = 12_500, 200


@dataclass
class Storm:
    """Figures of one storm. Seconds, percent of a core, milliseconds.

    ``answered_s``: from its end until every task has had a reply since. ``told_s``: until the last task knows
    of the mute from its first report on, or of its end after the first one. ``gave_up``: tasks, and of the
    crowd replies that took longer than tasks wait. ``model_cpu_percent``: what models the tasks.
    ``server``: what the coordinator says of itself.
    """

    name: str
    answered_s: float | None
    told_s: float | None
    slowest_ms: float
    p99_ms: float
    gave_up: int
    lost: int
    connections: int
    cpu_percent: float
    reports_per_s: float
    model_cpu_percent: float
    server: dict[str, Any]


class Looker(threading.Thread):
    """Reads the live view's data and metrics twice a second, as a page and a Prometheus would."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._done = threading.Event()
        self.last: dict[str, Any] = {}

    def run(self) -> None:
        while not self._done.wait(LOOK_S):
            with suppress(OSError, ValueError):
                self.last = json.loads(self._get("figures.json"))
                self._get("metrics")

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/{path}", timeout=5) as response:
            return bytes(response.read())

    def close(self) -> None:
        self._done.set()


def nobody(name: str, *_: Any) -> Any:
    """Answers for a crowd where there is none."""
    if name == "told_s":
        return 0.0
    return {"latencies_ms": (), "answered_at": 0.0, "late": 0, "lost": 0, "connected": 0, "cpu_s": 0.0}


class Run:
    """One size: the server, its tasks, and what each storm has shown."""

    def __init__(self, server: Server, model: StormModel, looker: Looker, ask: Ask = nobody) -> None:
        self.server, self.model, self.looker, self.ask = server, model, looker, ask
        self.storms: list[Storm] = []

    def both(self, name: str, *given: Any) -> None:
        """Have the model and the crowd do it."""
        self.ask(name, *given)
        getattr(self.model, name)(*given)

    def told_s(self) -> float | None:
        """Of the last of both."""
        found = self.model.told_s(), self.ask("told_s")
        return None if None in found else round(max(found), 2)

    def storm(
        self,
        name: str,
        cause: Callable[[], None],
        seconds: float,
        told: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Cause it, watch it for so long, and until all tasks are answered again."""
        model, server = self.model, self.server
        lost, gave_up = model.lost, model.gave_up
        crowd_cpu_s = self.ask("figures")["cpu_s"]
        reports = self.looker.last.get("reports", 0)
        model.latencies.clear()
        pid, cpu_s, started = server.process.pid, server.cpu_s(), time.monotonic()
        model_cpu_s = time.thread_time()
        cause()
        ended = time.monotonic()
        self.ask("mark")
        answered = model.run_until_answered(ended, 30.0)
        model.run(max(0.0, started + seconds - time.monotonic()))
        took_s = time.monotonic() - started
        others = self.ask("figures")
        answered_s = max(answered or math.inf, others["answered_at"]) - ended
        latencies = sorted([*model.latencies, *others["latencies_ms"]]) or [0.0]
        before_s = cpu_s if server.process.pid == pid else 0.0
        found = Storm(
            name,
            round(answered_s, 2) if math.isfinite(answered_s) else None,
            told(),
            round(latencies[-1], 1),
            round(latencies[int(0.99 * len(latencies))], 1),
            model.gave_up - gave_up + others["late"],
            model.lost - lost + others["lost"],
            sum(not host.is_lost for host in model.hosts) + others["connected"],
            round(100 * (server.cpu_s() - before_s) / took_s, 1),
            round((self.looker.last.get("reports", 0) - reports) / took_s, 1),
            round(100 * (time.thread_time() - model_cpu_s + others["cpu_s"] - crowd_cpu_s) / took_s, 1),
            self.looker.last.get("coordinator", {}),
        )
        self.storms.append(found)
        print(json.dumps(asdict(found)), flush=True)

    def all(self) -> None:
        model = self.model
        self.storm("at rest", lambda: None, 8.0)
        self.storm("broker frozen", lambda: model.freeze(OWN_EVIDENCE), 8.0, model.told_s)
        self.storm("all reconnect, while muted", lambda: model.cut(1.0), 6.0)
        self.storm("broker back", model.thaw, 8.0, model.told_s)
        self.storm("500 short tasks a second", lambda: model.churn(CHURN_PER_S, 5.0), 6.0)
        self.storm("a third of the relays killed", lambda: model.cut(1 / 3), 6.0)
        for seconds in (2, 5, 20):
            name = f"stands still for {seconds} s"
            self.storm(name, lambda seconds=seconds: self.stand_still(seconds), seconds + 6.0)
        model.freeze(OWN_EVIDENCE)
        model.run(4.0)
        self.storm("killed, while a broker is muted", self.kill, 8.0)

    def stand_still(self, seconds: float) -> None:
        os.kill(self.server.process.pid, signal.SIGSTOP)
        self.model.run(seconds)
        os.kill(self.server.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.server.kill()
        self.server.start()


def run_size(tasks: int) -> dict[str, Any]:
    case = Case(tasks, PARTITIONS, topics=TOPICS)
    with FakeCluster({"orders-0": PARTITIONS}) as cluster, serving(cluster.bootstrap_servers) as server:
        model = StormModel(case, server.port, random.Random(7))
        looker = Looker(server.view_port())
        try:
            connect_s = model.connect()
            model.run(3.0)
            looker.start()
            run = Run(server, model, looker)
            run.all()
            return {
                **described(run, len(model.hosts), connect_s),
                "metadata_requests": looker.last["clusters"][0]["lookups"]["coordinator"],
            }
        finally:
            looker.close()
            model.close()


def run_large(tasks: int) -> dict[str, Any]:
    """Ten tasks of an executor. Relays and tasks of some are modelled, of the others one connection."""
    case = Case(min(REAL_HOSTS, tasks // 10) * 10, PARTITIONS, topics=TOPICS, per_host=10)
    others = tasks // 10 - case.tasks // 10
    with FakeCluster({"orders-0": PARTITIONS}) as cluster, serving(cluster.bootstrap_servers) as server:
        model = StormModel(case, server.port, random.Random(7), has_view=False)
        looker = Looker(server.view_port())
        try:
            with crowd(server.port, others, case.per_host, model.topics) as ask:
                started = time.monotonic()
                model.connect()
                while ask("figures")["connected"] < others and time.monotonic() < started + 90:
                    model.run(0.5)
                connect_s = time.monotonic() - started
                model.run(5.0)
                looker.start()
                run = Run(server, model, looker, ask)
                run.storm("at rest", lambda: None, 10.0)
                run.storm("broker frozen", lambda: run.both("freeze", OWN_EVIDENCE), 10.0, run.told_s)
                run.storm("all reconnect, while muted", lambda: run.both("cut", 1.0), 10.0)
                run.storm("broker back", lambda: run.both("thaw"), 10.0, run.told_s)
                return described(run, tasks // 10, connect_s)
        finally:
            looker.close()
            model.close()


def described(run: Run, hosts: int, connect_s: float) -> dict[str, Any]:
    return {
        "hosts": hosts,
        "hosts_with_real_relays": len(run.model.hosts),
        "option_sets": SETS,
        "connect_s": round(connect_s, 2),
        "storms": [asdict(one) for one in run.storms],
        "peak_rss_mib": round(run.server.peak_rss_mib(), 1),
    }


def plot(kept: dict[str, Any]) -> None:
    made, axes = charts.figure(
        "The coordinator in storms", [kept["conditions"]], (10, 6.4), 1, 3, sharey=True
    )
    sizes = list(kept["sizes"].values())
    names = [one["name"] for one in sizes[0]["storms"]]
    height = 0.8 / len(sizes)
    parts = (
        ("answered_s", "Until all are answered, s"),
        ("slowest_ms", "Slowest reply, ms"),
        ("cpu_percent", "% of a core"),
    )
    looks = list(zip(sizes, (charts.LIGHT, charts.OURS, charts.SECOND), strict=False))
    for axis, (key, title) in zip(axes[0], parts, strict=True):
        for number, (size, colour) in enumerate(looks):
            found = {one["name"]: one[key] for one in size["storms"]}
            values = [found.get(name) or 0.0 for name in names]
            places = [place + (number - (len(sizes) - 1) / 2) * height for place in range(len(names))]
            label = f"{size['tasks']:,} tasks"
            drawn = axis.barh(places, values, height=height, color=colour, label=label)
            charts.label(
                axis, drawn, [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values]
            )
        axis.set_title(title)
        axis.set_yticks(range(len(names)), names)
        if not axis.yaxis_inverted():
            axis.invert_yaxis()
    axes[0][0].legend()
    charts.save(made, FILE.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", default="1000,10000")
    parser.add_argument("--plot", action="store_true", help="draw the plot of what was measured")
    arguments = parser.parse_args()
    allow_files()
    kept = json.loads(FILE.read_text()) if FILE.exists() else {"sizes": {}}
    if not arguments.plot:
        for tasks in map(int, arguments.tasks.split(",")):
            kept["sizes"][str(tasks)] = (run_size if tasks < LARGE else run_large)(tasks)
            kept["sizes"][str(tasks)] |= {"tasks": tasks, "load": round(os.getloadavg()[0], 1)}
        kept["conditions"] = (
            f"modelled tasks, eight on a connection, {SETS} sets of options for one Kafka, live view read "
            f"twice a second; {os.cpu_count()} cores shared with the model and other work (load "
            f"{os.getloadavg()[1]:.0f}), Python {platform.python_version()}"
        )
        FILE.write_text(json.dumps(kept, indent=1) + "\n")
    plot(kept)


if __name__ == "__main__":
    main()
