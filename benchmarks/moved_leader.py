"""Leaders move under a steady load, by an election and by a broker's death: how long until rows flow again?

    python -m benchmarks.moved_leader [--part elected,killed] [--only NAME] [--out FILE] [--smoke]

Three brokers, a topic of 12 partitions with three replicas, four Spark tasks that offer keyed rows at a
fixed rate, each contender at its defaults. ``elected``: all leaders move to the next broker at once, by a
preferred election; brokers are behind proxies, which count requests by API. ``killed``: one broker, not the
active controller, gets SIGKILL; until the cluster misses it (broker.session.timeout.ms, 6 s here) no acks=all
write can be confirmed. Another client asks for the leaders every 20 ms. A partition's gap is from when that
client last saw the old leader, to the first row that the new one appended, by its epoch and the broker's
clock: what the producers take beyond the cluster's own election, or a little more. Everything is read back,
and lost, doubled and reordered rows are counted. The JVM sink needs pyspark 4.1.1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import charts, paced_rows, peers
from benchmarks import frozen_run as scene
from benchmarks.surroundings import RESULTS
from kafka_sink.local_broker import LocalBroker
from tests.support.proxy import ProxyCluster

PARTITIONS, BROKERS = 12, 3
POLL_S = 0.02
BIN_MS = 200
# A move that is not seen by then, or a write that goes on for so long after its last row, is given up.
GIVE_UP_S = 60
GOAL_GAP_S = 2.0
METADATA = 3


@dataclass(frozen=True)
class Load:
    """Rows per second of all tasks, and seconds before and after the move."""

    rate: float = 8_000
    before: float = 8
    after: float = 18
    tasks: int = 4

    @property
    def seconds(self) -> float:
        return self.before + self.after


class Mover(threading.Thread):
    """Lets rows flow for a while, moves the leaders, and watches until all have moved.

    ``moved_at``: Unix seconds; ``seen``: per partition that moves, when its old leader was last seen, and its
    new one first. Spark's thread is the main one, as it finds Python data sources only there.
    """

    def __init__(self, bootstrap: str, topic: str, load: Load, move: Callable[[], None]) -> None:
        super().__init__(name="mover", daemon=True)
        self.moved_at = 0.0
        self.seen: dict[int, tuple[float, float]] = {}
        self.requests: tuple[Counter[int], Counter[int]] | None = None
        self.given_up = threading.Event()
        self.counts: Callable[[], Counter[int]] | None = None
        self._servers = bootstrap
        self._topic = topic
        self._load = load
        self._move = move

    def run(self) -> None:
        from confluent_kafka.admin import AdminClient

        while not sum(paced_rows.end_offsets(self._servers, self._topic, PARTITIONS)):
            if self.given_up.wait(0.05):
                return
        admin = AdminClient({"bootstrap.servers": self._servers, "log_level": 0})
        if self.given_up.wait(self._load.before):
            return
        old = leaders(admin, self._topic)
        before = self.counts() if self.counts else Counter()
        self.moved_at = time.time()
        self._move()
        last_old = dict.fromkeys(old, self.moved_at)
        while time.time() < self.moved_at + GIVE_UP_S and not self.given_up.is_set():
            asked = time.time()
            now = leaders(admin, self._topic)
            for partition, leader in now.items():
                if leader in (old[partition], -1):
                    last_old[partition] = asked
                elif partition not in self.seen:
                    self.seen[partition] = (last_old[partition], time.time())
            if self.seen and asked > max(first for _, first in self.seen.values()) + 3:
                break
            time.sleep(POLL_S)
        if self.counts:
            self.requests = before, self.counts()


def leaders(admin: Any, topic: str) -> dict[int, int]:
    from confluent_kafka import KafkaException

    while True:
        try:
            found = admin.list_topics(topic, timeout=2).topics[topic].partitions
        except KafkaException:
            continue  # it asked the one that was just killed
        return {number: one.leader for number, one in found.items()}


# -- the two ways to move -----------------------------------------------------------------------------


@contextlib.contextmanager
def by_election(cluster: LocalBroker, topic: str) -> Iterator[Callable[[], None]]:
    """Makes the second replica of every partition the preferred one, and moves to it on command."""
    from confluent_kafka import ElectionType, TopicPartition
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    found = admin.list_topics(topic, timeout=10).topics[topic].partitions
    order = [
        {"topic": topic, "partition": number, "replicas": [*one.replicas[1:], one.replicas[0]]}
        for number, one in found.items()
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"version": 1, "partitions": order}, file)
        file.flush()
        tool = "org.apache.kafka.tools.reassign.ReassignPartitionsCommand"
        servers = ("--bootstrap-server", cluster.bootstrap_servers)
        cluster.run_tool(tool, *servers, "--reassignment-json-file", file.name, "--execute")
    places = [TopicPartition(topic, number) for number in found]
    yield lambda: admin.elect_leaders(ElectionType.PREFERRED, places).result(30)


@contextlib.contextmanager
def by_killing(cluster: LocalBroker, topic: str) -> Iterator[Callable[[], None]]:
    """Kills one broker on command; starts it again at the end, and waits for its replicas."""
    from confluent_kafka.admin import AdminClient

    victim = scene.follower(cluster)
    try:
        yield lambda: cluster.kill(victim)
    finally:
        if not cluster.is_running(victim):
            cluster.start(victim)
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
        while any(
            len(one.isrs) < BROKERS
            for one in admin.list_topics(topic, timeout=10).topics[topic].partitions.values()
        ):
            time.sleep(0.2)


# -- one contender ------------------------------------------------------------------------------------


def moved_run(
    spark: Any, cluster: LocalBroker, part: str, one: scene.Contender, topic: str, load: Load
) -> dict[str, Any]:
    """Runs one contender and moves leaders in the middle."""
    cluster.create_topic(topic, PARTITIONS, BROKERS, {"message.timestamp.type": "LogAppendTime"})
    source = paced_rows.paced(load.rate / load.tasks, load.seconds, keyed=True)
    frame = spark.range(0, load.tasks, 1, load.tasks).mapInArrow(source, paced_rows.SCHEMA)
    with contextlib.ExitStack() as stack:
        move = stack.enter_context((by_election if part == "elected" else by_killing)(cluster, topic))
        bootstrap = cluster.bootstrap_servers
        mover = Mover(bootstrap, topic, load, move)
        if part == "elected":
            proxies = stack.enter_context(ProxyCluster(bootstrap))
            bootstrap = proxies.bootstrap_servers
            mover.counts = lambda: Counter(proxies.requests)
        stop = threading.Timer(load.seconds + GIVE_UP_S, spark.sparkContext.cancelAllJobs)
        stop.start()
        mover.start()
        error = ""
        try:
            one.write(frame, bootstrap, topic)
        except Exception as raised:  # noqa: BLE001 - that a contender gives up is an outcome
            error = f"{type(raised).__name__}: {str(raised)[:500]}"
        ended = time.time()
        stop.cancel()
        mover.join(5)
        mover.given_up.set()
        mover.join()
    if not mover.seen:
        raise RuntimeError(f"{one.name}: no leader moved: {error}")
    stored = paced_rows.read_back(cluster.bootstrap_servers, topic, PARTITIONS)
    return {**outcome_of(stored, mover, ended, load), "error": error}


def outcome_of(stored: paced_rows.Stored, mover: Mover, ended: float, load: Load) -> dict[str, Any]:
    appended = stored.appended / 1000
    gaps, silences = [], []
    for partition, (last_old, _) in mover.seen.items():
        rows = stored.partition == partition
        epochs, times = stored.epoch[rows], appended[rows]
        # An epoch also rises when a replica leaves: the first that rises after the move is the new leader's.
        newer = times[(epochs > epochs[times < mover.moved_at].max(initial=-1)) & (times >= mover.moved_at)]
        first = float(newer.min()) if len(newer) else float("inf")
        gaps.append(first - last_old)
        silences.append(first - float(times[times < first].max(initial=mover.moved_at)))
    late = np.diff(np.sort(appended[(appended >= mover.moved_at - 1) & (appended <= ended)]))
    edges = np.arange(mover.moved_at - load.before, mover.moved_at + load.after, BIN_MS / 1000)
    sent = int(load.rate / load.tasks * load.seconds) * load.tasks
    asked = None
    if mover.requests:
        before, after = mover.requests
        asked = {"before": before[METADATA], "in the move and 3 s": after[METADATA] - before[METADATA]}
    return {
        "partitions_moved": len(mover.seen),
        "election_s": max(new for _, new in mover.seen.values()) - mover.moved_at,
        "gap_beyond_election_s": max(gaps),
        "gap_beyond_election_median_s": float(np.median(gaps)),
        "longest_silence_of_a_partition_s": max(silences),
        "longest_silence_of_the_topic_s": float(late.max(initial=0.0)),
        "late_s": ended - float(stored.offered.min()) / 1000 - load.seconds,
        "metadata_requests": asked,
        "lost": stored.lost(sent),
        "doubled": stored.doubled(),
        "reordered": stored.reordered(),
        "time_s": [round(float(edge - mover.moved_at), 3) for edge in edges[:-1]],
        "rows_per_second": [float(count) / (BIN_MS / 1000) for count in np.histogram(appended, edges)[0]],
    }


# -- telling ------------------------------------------------------------------------------------------


def report(part: str, outcomes: dict[str, dict[str, Any]]) -> None:
    print(
        f"\n{part:18}{'moved':>7}{'election':>11}{'gap beyond it':>15}{'(median)':>10}{'topic silent':>14}"
        f"{'lost':>6}{'doubled':>9}{'reordered':>11}  Metadata requests"
    )
    for name, found in outcomes.items():
        asked = found["metadata_requests"]
        print(
            f"{name:18}{found['partitions_moved']:7}{found['election_s']:9.2f} s"
            f"{found['gap_beyond_election_s']:13.2f} s{found['gap_beyond_election_median_s']:8.2f} s"
            f"{found['longest_silence_of_the_topic_s']:12.2f} s{found['lost']:6,}{found['doubled']:9,}"
            f"{found['reordered']:11,}  {asked or ''}{'   ' + found['error'][:150] if found['error'] else ''}"
        )


def plot(parts: dict[str, Any], file: Path) -> None:
    shown = [
        (part, name, one) for part, figures in parts.items() for name, one in figures["outcomes"].items()
    ]
    made, all_axes = charts.figure(
        "Rows at the brokers while the partitions' leaders move",
        [next(iter(parts.values()))["conditions"], "Rows that waited come at once and go beyond the frame."],
        (9, 1.5 + 1.5 * len(shown)),
        len(shown),
        sharex=True,
        sharey=True,
    )
    for axes, (part, name, found) in zip(all_axes[:, 0], shown, strict=True):
        axes.axvspan(0, found["election_s"], color=charts.SHADE, label="the cluster elects leaders")
        colour = charts.OTHER if name.startswith("JVM") else charts.OURS
        axes.plot(found["time_s"], [rate / 1000 for rate in found["rows_per_second"]], color=colour)
        moved = "preferred leaders elected" if part == "elected" else "a broker killed"
        axes.set_title(
            f"{name}, {moved}: last partition {found['gap_beyond_election_s']:.2f} s after the election, "
            f"{found['lost']:,} rows lost"
        )
        axes.set_ylabel("1,000 rows/s")
    steady = statistics.median(rate for _, _, one in shown for rate in one["rows_per_second"] if rate)
    all_axes[0, 0].set_ylim(0, 4 * steady / 1000)
    all_axes[0, 0].legend(loc="upper right")
    all_axes[-1, 0].set_xlabel("seconds since the move began")
    charts.save(made, file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default="elected,killed")
    parser.add_argument("--only", default="", help="contenders whose name contains this; writes no files")
    parser.add_argument("--out", type=Path, default=RESULTS / "moved_leader.json", help="and .png beside it")
    parser.add_argument("--smoke", action="store_true", help="an election only, no files: does it run at all")
    options = parser.parse_args()
    import pyspark

    load = Load(1000, 1, 5, tasks=2) if options.smoke else Load()
    parts = ["elected"] if options.smoke else options.part.split(",")
    with_jvm = peers.jvm_sink_is_there() and not options.smoke
    contenders = [scene.Contender("kafka-chunked", scene.sink("kafka-chunked"), keyed=True)]
    if with_jvm:
        contenders.append(scene.Contender("JVM sink", scene.sink("kafka"), keyed=True))
    conditions = (
        f"{load.rate:,.0f} keyed rows of {paced_rows.ROW_BYTES} bytes a second offered by {load.tasks} "
        f"tasks, defaults, {PARTITIONS} partitions with {BROKERS} replicas on {BROKERS} brokers; pyspark "
        f"{pyspark.__version__}, Kafka 4.3.0 on the same machine, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}"
    )
    print(conditions, flush=True)
    figures: dict[str, Any] = {}
    with LocalBroker(brokers=BROKERS) as cluster:
        spark = scene.session(with_jvm, f"local[{load.tasks}]")
        # Spark gathers that many rows for a Python sink, which must not pass for a gap.
        spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "50")
        for part in parts:
            outcomes = {
                one.name: moved_run(spark, cluster, part, one, f"{part}-{place}", load)
                for place, one in enumerate(contenders)
                if options.only in one.name
            }
            report(part, outcomes)
            figures[part] = {"conditions": conditions, "outcomes": outcomes}
        spark.stop()
    print(f"\ngoals for kafka-chunked: less than {GOAL_GAP_S:.0f} s beyond the election, 0 rows lost")
    if not options.smoke and not options.only:
        options.out.parent.mkdir(exist_ok=True)
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
        plot(figures, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
