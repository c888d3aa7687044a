"""One of three brokers is stopped for 40 seconds under a steady load: which rows go on, and at what rate.

    python -m benchmarks.frozen_broker [--part=keyless|keyed] [--smoke]

A real three-broker cluster, a topic of 12 partitions without replicas, two Spark tasks that offer rows at a
fixed rate; each contender at its defaults, one after the other. One broker, not the active controller, gets
SIGSTOP in the middle and SIGCONT 40 s later. Brokers stamp what they append (LogAppendTime), and everything
is read back: the rates over time are those of the stamps, and lost, doubled and reordered rows are counted.
The JVM sink needs pyspark 4.1.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import charts, frozen_run, paced_rows, peers
from benchmarks.frozen_run import BROKERS, PARTITIONS, Load, Run
from benchmarks.peers import Contender, sink
from benchmarks.surroundings import delete_topic, keep, kept, machine, parser_of
from local_kafka import LocalBroker

BIN_MS = 500
GOAL_RATIO = 0.90
GOAL_EVEN_S = 5.0
# The rate counts from this time after the freeze; it is even again when the thawed broker takes this part of
# an even share, over a window of this length.
REACTION_S = 2.0
EVEN_PART, EVEN_WINDOW_S = 0.75, 2.0


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


# -- the results ---------------------------------------------------------------------------------------


def outcome_of(stored: paced_rows.Stored, run: Run, load: Load, keyed: bool) -> dict[str, Any]:
    appended = stored.appended / 1000
    sick = np.isin(stored.partition, run.partitions)
    starts = stored.offered.min() / 1000
    # A task that started late may still be catching up: that must not count against the rate while frozen.
    before = min(load.rate, _rate(appended, run.froze - load.before, run.froze))
    reaction = min(REACTION_S, load.frozen / 2)
    frozen = _rate(appended, run.froze + reaction, run.thawed)
    healthy = ~sick & (appended >= run.froze) & (appended < run.thawed)
    waits = (appended - stored.offered / 1000)[healthy]
    edges = np.arange(run.froze - load.before, run.thawed + load.after + BIN_MS / 1000, BIN_MS / 1000)
    return {
        "ratio": frozen / before if before else 0.0,
        "rows_per_second_before": before,
        "rows_per_second_frozen": frozen,
        "even_again_s": even_again_s(stored.offered / 1000, appended, sick, run),
        "late_s": run.ended - (starts + load.seconds),
        "wall_s": run.ended - starts,
        "healthy_wait_p99_s": float(np.percentile(waits, 99)) if len(waits) else None,
        "lost": stored.lost(load.rows),
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


def _histogram(times: npt.NDArray[np.float64], edges: npt.NDArray[np.floating[Any]]) -> list[float]:
    return [float(count) / (BIN_MS / 1000) for count in np.histogram(times, edges)[0]]


def even_again_s(
    offered: npt.NDArray[np.float64],
    appended: npt.NDArray[np.float64],
    sick: npt.NDArray[np.bool_],
    run: Run,
) -> float | None:
    """Seconds from the thaw until the start of the first window in which the thawed broker takes its share of
    the rows that are offered then; rows that waited for it while it was stalled do not count. None: never."""
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


def plot(found: dict[str, Any], file: Path) -> None:
    """One file for each part: rows with keys and rows without are different questions."""
    for part, figures in found.items():
        suffix = "" if part == "keyless" else f"_{part}"
        _plot_part(part, figures, file.with_name(f"{file.stem}{suffix}.png"))


def _plot_part(part: str, figures: dict[str, Any], file: Path) -> None:
    outcomes, frozen_s = figures["outcomes"], _frozen_seconds(figures["conditions"])
    rows = "rows without a key" if part == "keyless" else "rows with a key"
    made, all_axes = charts.figure(
        f"One of {BROKERS} brokers freezes: {rows}",
        [figures["conditions"], "Rows that waited for the broker come at once, beyond the frame."],
        (9, 1.5 + 1.55 * len(outcomes)),
        len(outcomes),
        sharex=True,
        sharey=True,
    )
    for axes, (name, found) in zip(all_axes[:, 0], outcomes.items(), strict=True):
        axes.axvspan(0, frozen_s, color=charts.SHADE, label="the broker is frozen")
        total = [rate / 1000 for rate in found["rows_per_second"]]
        sick = [rate / 1000 for rate in found["rows_per_second_frozen_broker"]]
        axes.plot(found["time_s"], total, color=charts.OURS, label="all brokers")
        axes.plot(found["time_s"], sick, color=charts.ALERT, linewidth=1, label="the frozen broker")
        axes.set_title(f"{name}: {found['ratio']:.0%} of the earlier rate while it is frozen")
        axes.set_ylabel("1,000 rows/s")
    # The rows that were held back come at once and would make the rest flat.
    steady = max(found["rows_per_second_before"] for found in outcomes.values())
    all_axes[0, 0].set_ylim(0, 2 * steady / 1000)
    all_axes[0, 0].legend(loc="upper left", ncols=3)
    all_axes[-1, 0].set_xlabel("seconds since the freeze")
    charts.save(made, file)


def _frozen_seconds(conditions: str) -> float:
    found = re.search(r"frozen for (\d+) s", conditions)
    assert found is not None, conditions
    return float(found[1])


# -- the run ------------------------------------------------------------------------------------------


def contenders_of(part: str, with_jvm: bool) -> list[Contender]:
    keyed = part == "keyed"
    if keyed:
        spreading = {"partitioner.spread.keys.when.muted": "true"}
        second = Contender("kafka-chunked, keys spread", sink("kafka-chunked", spreading), keyed=keyed)
    else:
        off = {"producer.circuit.breaker.class": "none"}
        second = Contender("kafka-chunked, breaker off", sink("kafka-chunked", off), keyed=keyed)
    found = [Contender("kafka-chunked", sink("kafka-chunked"), keyed=keyed), second]
    if with_jvm:
        found.append(Contender("JVM sink", sink("kafka"), keyed=keyed))
    return [*found, Contender("confluent-kafka", confluent, keyed=keyed)]


def measure(
    spark: Any, cluster: LocalBroker, victim: int, part: str, contenders: list[Contender], load: Load
) -> dict[str, dict[str, Any]]:
    outcomes = {}
    for place, one in enumerate(contenders):
        topic = f"{part}-{place}"
        frame = frozen_run.frame_of(spark, load, one.keyed)
        run = frozen_run.frozen_run(cluster, victim, one, frame, topic, load)
        stored = paced_rows.read_back(cluster.bootstrap_servers, topic, PARTITIONS)
        outcomes[one.name] = outcome_of(stored, run, load, one.keyed)
        print(f"  {part}: {one.name} ran {outcomes[one.name]['wall_s']:.1f} s", flush=True)
        delete_topic(cluster.bootstrap_servers, topic)
    return outcomes


def keep_part(part: str, conditions: str, outcomes: dict[str, Any]) -> None:
    """Writes one part's figures next to those of the other parts, and of contenders under the same
    conditions."""
    found = kept("frozen_broker") or {}
    before = found.get(part, {})
    if before.get("conditions") == conditions:
        outcomes = {**before["outcomes"], **outcomes}
    found[part] = {"conditions": conditions, "outcomes": outcomes}
    keep("frozen_broker", found, plot)


def main() -> None:
    parser = parser_of(__doc__, "a short freeze")
    parser.add_argument("--part", default="keyless,keyed", help="one or both")
    parser.add_argument("--only", help="contenders whose name contains this")
    options = parser.parse_args()
    import pyspark

    load = Load(2000, 0.5, 0.5, 2, 1) if options.smoke else Load()
    with_jvm = peers.jvm_sink_is_there() and not options.smoke
    conditions = (
        f"{load.rate:,.0f} rows of {paced_rows.ROW_BYTES} bytes a second offered by {load.tasks} tasks, "
        f"defaults, {PARTITIONS} partitions on {BROKERS} brokers without replicas, one frozen for "
        f"{load.frozen:.0f} s; pyspark {pyspark.__version__}, {machine()}"
    )
    print(conditions, flush=True)
    parts = ["keyless"] if options.smoke else options.part.split(",")
    with LocalBroker(brokers=BROKERS) as cluster:
        victim = frozen_run.follower(cluster)
        spark = frozen_run.session(with_jvm, f"local[{load.tasks}]")
        for part in parts:
            contenders = contenders_of(part, with_jvm)
            if options.smoke:
                contenders = [contenders[0], contenders[-1]]
            if options.only:
                contenders = [one for one in contenders if options.only in one.name]
            outcomes = measure(spark, cluster, victim, part, contenders, load)
            report(part, outcomes)
            if not options.smoke:
                keep_part(part, conditions, outcomes)
        spark.stop()
    print(f"\ngoals for kafka-chunked, keyless: ratio {GOAL_RATIO}, even again within {GOAL_EVEN_S:.0f} s")


if __name__ == "__main__":
    main()
