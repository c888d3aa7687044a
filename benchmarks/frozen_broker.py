"""One of three brokers stands still for 40 seconds under a steady load: who goes on, and at what rate.

    python benchmarks/frozen_broker.py [--part keyless,keyed] [--smoke]

A real three-broker cluster, a topic of 12 partitions without replicas, two Spark tasks that offer rows at a
fixed rate; each contender at its defaults, one after the other. One broker, not the active controller, gets
SIGSTOP in the middle and SIGCONT 40 s later. Brokers stamp what they append (LogAppendTime), and everything
is read back: the rates over time are those of the stamps, and lost, doubled and reordered rows are counted.
The JVM sink needs pyspark 4.1.1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
PATHS = [str(ROOT), str(Path(__file__).resolve().parent)]
sys.path[:0] = PATHS
# The workers import the sink and the source's functions from here too.
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])
os.environ["PYSPARK_PYTHON"] = sys.executable

import numpy as np  # noqa: E402 - needs the path above
import numpy.typing as npt  # noqa: E402 - needs the path above
import paced_rows  # noqa: E402 - needs the path above
import peers  # noqa: E402 - needs the path above

from kafka_sink.local_broker import LocalBroker  # noqa: E402 - needs the path above

PARTITIONS = 12
BROKERS = 3
TASKS = 2
JVM_SINK_SPARK = "4.1.1"
BIN_MS = 500
# A write that goes on for so long after its last row is ended.
GIVE_UP_S = 180
GOAL_RATIO = 0.90
GOAL_EVEN_S = 5.0
# From here on after the freeze the rate counts; it is even again when the thawed broker takes this part of
# an even share, over a window of this length.
REACTION_S = 2.0
EVEN_PART, EVEN_WINDOW_S = 0.75, 2.0

Write = Callable[[Any, str, str], None]


@dataclass(frozen=True)
class Load:
    """Rows per second of all tasks, and seconds of each phase."""

    rate: float = 20_000
    warm: float = 5
    before: float = 8
    frozen: float = 40
    after: float = 12

    @property
    def seconds(self) -> float:
        return self.warm + self.before + self.frozen + self.after


@dataclass(frozen=True)
class Contender:
    name: str
    write: Write
    keyed: bool = False


def sink(form: str, **options: str) -> Write:
    def write(frame: Any, bootstrap: str, topic: str) -> None:
        writer = frame.write.format(form).mode("append")
        for name, value in options.items():
            writer = writer.option("kafka." + name.replace("_", "."), value)
        writer.option("kafka.bootstrap.servers", bootstrap).option("topic", topic).save()

    return write


def confluent(frame: Any, bootstrap: str, topic: str) -> None:
    def send(batches: Iterator[Any]) -> Iterator[Any]:
        from confluent_kafka import Producer

        failures = []

        def delivered(error: Any, _: Any) -> None:
            if error is not None:
                failures.append(error)

        producer = Producer({"bootstrap.servers": bootstrap, "log_level": 0})
        for batch in batches:
            keys, values = (batch.column(name).to_pylist() for name in ("key", "value"))
            for key, value in zip(keys, values, strict=True):
                while True:
                    try:
                        producer.produce(topic, value, key, on_delivery=delivered)
                        break
                    except BufferError:
                        producer.poll(0.01)
            producer.poll(0)
        left = producer.flush()
        if left or failures:
            raise RuntimeError(f"{left} rows left, {len(failures)} failed: {failures[:1]}")
        yield from ()

    frame.mapInArrow(send, "done boolean").collect()


def session(with_jvm_sink: bool, master: str) -> Any:
    from pyspark.sql import SparkSession

    builder = (
        SparkSession.builder.master(master)
        .appName("kafka-chunked frozen broker")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .config("spark.ui.showConsoleProgress", "false")
        # Else Spark would gather half a second's rows for a Python sink.
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "500")
    )
    if with_jvm_sink:
        builder = builder.config("spark.jars", ",".join(peers.jvm_sink_jars()))
    return builder.getOrCreate()


def frame_of(spark: Any, load: Load, keyed: bool, tasks: int) -> Any:
    source = paced_rows.paced(load.rate / tasks, load.seconds, keyed)
    return spark.range(0, tasks, 1, tasks).mapInArrow(source, paced_rows.SCHEMA)


# -- one contender ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """When a write ended and the broker stood still, Unix seconds; the partitions that it leads; what the
    write raised, if anything."""

    froze: float
    thawed: float
    ended: float
    partitions: tuple[int, ...]
    error: str


class Freezer(threading.Thread):
    """Waits for the topic's first rows, then freezes the victim for a while. ``began`` and ``ended`` are Unix
    seconds. Spark's thread is the main one, as it finds Python data sources only there."""

    def __init__(self, cluster: LocalBroker, victim: int, topic: str, load: Load) -> None:
        super().__init__(name="freezer", daemon=True)
        self.began = self.ended = 0.0
        self.given_up = threading.Event()
        self._cluster = cluster
        self._victim = victim
        self._topic = topic
        self._load = load

    def run(self) -> None:
        while not sum(paced_rows.end_offsets(self._cluster.bootstrap_servers, self._topic, PARTITIONS)):
            if self.given_up.wait(0.05):
                return
        self.given_up.wait(self._load.warm + self._load.before)
        self.began = time.time()
        self._cluster.freeze(self._victim)
        try:
            self.given_up.wait(self._load.frozen - (time.time() - self.began))
        finally:
            self.ended = time.time()
            self._cluster.thaw(self._victim)


def frozen_run(cluster: LocalBroker, victim: int, one: Contender, frame: Any, topic: str, load: Load) -> Run:
    """Runs a contender, and freezes the victim in the middle."""
    cluster.create_topic(topic, PARTITIONS, 1, {"message.timestamp.type": "LogAppendTime"})
    led = led_by(cluster, topic, victim)
    freezer = Freezer(cluster, victim, topic, load)
    stop = threading.Timer(load.seconds + GIVE_UP_S, frame.sparkSession.sparkContext.cancelAllJobs)
    freezer.start()
    stop.start()
    error = ""
    try:
        one.write(frame, cluster.bootstrap_servers, topic)
    except Exception as raised:  # noqa: BLE001 - that a contender gives up is an outcome
        error = f"{type(raised).__name__}: {str(raised)[:500]}"
    ended = time.time()
    stop.cancel()
    freezer.given_up.set()
    freezer.join()
    if not freezer.began:
        raise RuntimeError(f"{one.name} wrote nothing: {error}")
    return Run(freezer.began, freezer.ended, ended, led, error)


def led_by(cluster: LocalBroker, topic: str, node: int) -> tuple[int, ...]:
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    partitions = admin.list_topics(topic, timeout=10).topics[topic].partitions
    return tuple(sorted(one.id for one in partitions.values() if one.leader == node))


def follower(cluster: LocalBroker) -> int:
    """A broker that is not the active controller, so that the cluster's own fail-over plays no part."""
    command = ("--bootstrap-server", cluster.bootstrap_servers, "describe", "--status")
    status = cluster.run_tool("org.apache.kafka.tools.MetadataQuorumCommand", *command).stdout
    leader = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("LeaderId:"))
    return (leader + 1) % BROKERS


# -- what came of it ----------------------------------------------------------------------------------


def outcome_of(stored: paced_rows.Stored, run: Run, load: Load, keyed: bool) -> dict[str, Any]:
    appended = stored.appended / 1000
    sick = np.isin(stored.partition, run.partitions)
    starts = stored.offered.min() / 1000
    # Who started late may still be catching up: that must not count against the rate while frozen.
    before = min(load.rate, _rate(appended, run.froze - load.before, run.froze))
    reaction = min(REACTION_S, load.frozen / 2)
    frozen = _rate(appended, run.froze + reaction, run.thawed)
    healthy = ~sick & (appended >= run.froze) & (appended < run.thawed)
    waits = (appended - stored.offered / 1000)[healthy]
    edges = np.arange(run.froze - load.before, run.thawed + load.after + BIN_MS / 1000, BIN_MS / 1000)
    sent = int(load.rate / TASKS * load.seconds) * TASKS
    return {
        "ratio": frozen / before if before else 0.0,
        "rows_per_second_before": before,
        "rows_per_second_frozen": frozen,
        "even_again_s": even_again_s(stored.offered / 1000, appended, sick, run),
        "late_s": run.ended - (starts + load.seconds),
        "wall_s": run.ended - starts,
        "healthy_wait_p99_s": float(np.percentile(waits, 99)) if len(waits) else None,
        "lost": stored.lost(sent),
        "doubled": stored.doubled(),
        "reordered": stored.reordered(),
        "reordered_in_key": stored.reordered_in_key() if keyed else None,
        "error": run.error,
        "time_s": [round(float(edge - run.froze), 3) for edge in edges[:-1]],
        "rows_per_second": _histogram(appended, edges),
        "rows_per_second_frozen_broker": _histogram(appended[sick], edges),
    }


def _rate(times: npt.NDArray[np.float64], start: float, end: float) -> float:
    return float(np.count_nonzero((times >= start) & (times < end)) / (end - start))


def _histogram(times: npt.NDArray[np.float64], edges: npt.NDArray[np.float64]) -> list[float]:
    return [float(count) / (BIN_MS / 1000) for count in np.histogram(times, edges)[0]]


def even_again_s(
    offered: npt.NDArray[np.float64],
    appended: npt.NDArray[np.float64],
    sick: npt.NDArray[np.bool_],
    run: Run,
) -> float | None:
    """Seconds from the thaw until the start of the first window in which the thawed broker takes its share of
    the rows that are offered then: what waited for it while it stood still does not count. None: never."""
    fresh = offered >= run.thawed
    share = EVEN_PART * len(run.partitions) / PARTITIONS
    start = run.thawed
    while start + EVEN_WINDOW_S <= offered.max(initial=0.0):
        window = fresh & (appended >= start) & (appended < start + EVEN_WINDOW_S)
        if np.count_nonzero(window) and np.count_nonzero(window & sick) >= share * np.count_nonzero(window):
            return start - run.thawed
        start += 0.1
    return None


def report(part: str, outcomes: dict[str, dict[str, Any]]) -> None:
    print(
        f"\n{part:42}{'before':>9}{'frozen':>9}{'ratio':>7}{'even again':>12}{'late by':>9}{'lost':>7}"
        f"{'doubled':>9}{'reordered':>11}"
    )
    for name, found in outcomes.items():
        even = "never" if found["even_again_s"] is None else f"{found['even_again_s']:.1f} s"
        print(
            f"{name:42}{found['rows_per_second_before']:9,.0f}{found['rows_per_second_frozen']:9,.0f}"
            f"{found['ratio']:7.2f}{even:>12}{found['late_s']:7.1f} s{found['lost']:7,}{found['doubled']:9,}"
            f"{found['reordered']:11,}{'   ' + found['error'][:150] if found['error'] else ''}"
        )
        if found["reordered_in_key"] is not None:
            print(f"{'':4}rows behind a later one of their key: {found['reordered_in_key']:,}")


def plot(part: str, outcomes: dict[str, dict[str, Any]], frozen_s: float, conditions: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(
        len(outcomes), figsize=(9, 1 + 1.9 * len(outcomes)), sharex=True, sharey=True, squeeze=False
    )
    for axes, (name, found) in zip(all_axes[:, 0], outcomes.items(), strict=True):
        axes.axvspan(0, frozen_s, color="#e8e8e8")
        total = [rate / 1000 for rate in found["rows_per_second"]]
        sick = [rate / 1000 for rate in found["rows_per_second_frozen_broker"]]
        axes.plot(found["time_s"], total, color="#1f77b4", label="all brokers")
        axes.plot(found["time_s"], sick, color="#d62728", linewidth=1, label="the frozen broker")
        axes.set_title(f"{name}: {found['ratio']:.0%} of the rate before while frozen", fontsize=9)
        axes.set_ylabel("1,000 rows/s")
    # What was held back comes at once and would make the rest flat.
    steady = max(found["rows_per_second_before"] for found in outcomes.values())
    all_axes[0, 0].set_ylim(0, 2.5 * steady / 1000)
    all_axes[0, 0].legend(loc="upper left", fontsize=8)
    all_axes[-1, 0].set_xlabel(f"seconds since one of {BROKERS} brokers stopped; grey: it stands still")
    figure.suptitle(conditions, fontsize=7)
    figure.tight_layout()
    suffix = "" if part == "keyless" else f"_{part}"
    figure.savefig(RESULTS / f"frozen_broker{suffix}.png", dpi=120)


# -- the run ------------------------------------------------------------------------------------------


def contenders_of(part: str, with_jvm: bool) -> list[Contender]:
    keyed = part == "keyed"
    ours = [Contender("kafka-chunked", sink("kafka-chunked"), keyed)]
    if with_jvm:
        ours.append(Contender("JVM sink", sink("kafka"), keyed))
    ours.append(Contender("confluent-kafka", confluent, keyed))
    return ours


def measure(
    spark: Any, cluster: LocalBroker, victim: int, part: str, contenders: list[Contender], load: Load
) -> dict[str, dict[str, Any]]:
    outcomes = {}
    for place, one in enumerate(contenders):
        topic = f"{part}-{place}"
        frame = frame_of(spark, load, one.keyed, TASKS)
        run = frozen_run(cluster, victim, one, frame, topic, load)
        stored = paced_rows.read_back(cluster.bootstrap_servers, topic, PARTITIONS)
        outcomes[one.name] = outcome_of(stored, run, load, one.keyed)
        print(f"  {part}: {one.name} ran {outcomes[one.name]['wall_s']:.1f} s", flush=True)
        delete_topic(cluster, topic)
    return outcomes


def delete_topic(cluster: LocalBroker, topic: str) -> None:
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    admin.delete_topics([topic])[topic].result(30)


def keep(part: str, conditions: str, outcomes: dict[str, Any], frozen_s: float) -> None:
    """Writes one part's figures beside those of the others."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "frozen_broker.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[part] = {"conditions": conditions, "outcomes": outcomes}
    path.write_text(json.dumps(kept, indent=1) + "\n")
    plot(part, outcomes, frozen_s, conditions)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default="keyless", help="keyless, keyed, or both with a comma")
    parser.add_argument("--only", help="contenders whose name contains this; writes no files")
    parser.add_argument("--smoke", action="store_true", help="a short freeze, no files: does it run at all")
    options = parser.parse_args()
    import pyspark

    load = Load(2000, 0.5, 1.5, 3, 2) if options.smoke else Load()
    with_jvm = pyspark.__version__ == JVM_SINK_SPARK and not options.smoke
    conditions = (
        f"{load.rate:,.0f} rows of {paced_rows.ROW_BYTES} bytes a second offered by {TASKS} tasks, defaults, "
        f"{PARTITIONS} partitions on {BROKERS} brokers without replicas, one frozen for {load.frozen:.0f} s; "
        f"pyspark {pyspark.__version__}, Kafka 4.3.0 on the same machine, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}"
    )
    print(conditions, flush=True)
    with LocalBroker(brokers=BROKERS) as cluster:
        victim = follower(cluster)
        spark = session(with_jvm, f"local[{TASKS}]")
        for part in options.part.split(","):
            contenders = contenders_of(part, with_jvm)
            if options.only:
                contenders = [one for one in contenders if options.only in one.name]
            outcomes = measure(spark, cluster, victim, part, contenders, load)
            report(part, outcomes)
            if not options.smoke and not options.only:
                keep(part, conditions, outcomes, load.frozen)
        spark.stop()
    print(f"\ngoals for kafka-chunked, keyless: ratio {GOAL_RATIO}, even again within {GOAL_EVEN_S:.0f} s")


if __name__ == "__main__":
    main()
