"""Eight worker processes and a broker that freezes: how soon do all know, and how often is it probed.

    python -m benchmarks.muted_together [--masters local[8],standalone] [--smoke]

A real three-broker cluster, 12 partitions without replicas, eight tasks at a steady rate without keys, one
broker frozen for 16 s. Each worker process writes down when it mutes the broker, by its own evidence or by
another's, and which of its batches are probes. ``local[8]`` is one JVM with eight Python workers,
``standalone`` a master and two workers on loopback addresses of their own with four Python workers each.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import frozen_run, paced_rows
from benchmarks.frozen_run import BROKERS, PARTITIONS, Load, Run
from benchmarks.peers import Contender, sink
from benchmarks.surroundings import keep, machine, parser_of
from kafka_sink.options.table import BreakerSettings
from local_kafka import LocalBroker
from tests.support.standalone_cluster import StandaloneCluster

WORKERS = 8
INTERVAL_S = BreakerSettings().mute_retry_interval_ms / 1000
GOAL_S = 1.0
PREFIX = "producer.circuit.breaker"
VARIANTS = {"shared": {}, "each for itself": {"coordinator.enabled": "false"}}
Note = dict[str, Any]


def notes_of(folder: Path) -> dict[str, list[Note]]:
    """The records that each process wrote, by its id."""
    files = sorted(folder.glob("*.jsonl"))
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in files}


def judged(notes: dict[str, list[Note]], run: Run, victim: int) -> dict[str, Any]:
    """Times are seconds. Before a task mutes a broker, it asks the other tasks whether it responds: those
    requests are no probes."""
    first: dict[str, Note] = {}
    back: list[float] = []
    probes: list[float] = []
    for process, lines in notes.items():
        for note in lines:
            if not run.froze <= note["at"]:
                continue
            line = note.get("log", "")
            if line.startswith("circuit breaker: muted broker") and note["at"] < run.thawed:
                first.setdefault(process, note)
            elif line.startswith("circuit breaker: unmuted broker") and note["at"] >= run.thawed:
                back.append(note["at"] - run.thawed)
            elif "probe" in note and (note["probe"] == victim or isinstance(note["probe"], str)):
                probes.append(note["at"])
    muted = sorted(note["at"] for note in first.values())
    while_frozen = sorted(at for at in probes if muted and muted[0] <= at < run.thawed)
    # A probe's interval begins when the one before it is known to be lost, by clocks of several processes.
    crowd = (sum(at <= other < at + 0.95 * INTERVAL_S for other in while_frozen) for at in while_frozen)
    return {
        "workers": len(notes),
        "workers_that_muted": len(muted),
        "by_own_evidence": sum(note["own"] for note in first.values()),
        "first_mute_s": muted[0] - run.froze if muted else None,
        "first_to_last_mute_s": muted[-1] - muted[0] if muted else None,
        "probes_while_frozen": len(while_frozen),
        "intervals_while_muted": (run.thawed - muted[0]) / INTERVAL_S if muted else 0.0,
        "most_probes_in_an_interval": max(crowd, default=0),
        "last_unmute_s": max(back, default=None),
    }


def measure(
    cluster: LocalBroker, masters: list[str], variants: list[str], load: Load
) -> dict[str, dict[str, Any]]:
    victim = frozen_run.follower(cluster)
    outcome: dict[str, dict[str, Any]] = {}
    for place, named in enumerate(masters):
        with contextlib.ExitStack() as stack:
            master = named
            if named == "standalone":
                master = stack.enter_context(StandaloneCluster(cores=WORKERS // 2)).url
            spark = frozen_run.session(False, master)
            stack.callback(spark.stop)
            for variant in variants:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kafka-chunked-bench-")))
                options = {
                    f"{PREFIX}.class": "benchmarks.recording_breaker.RecordingBreaker",
                    f"{PREFIX}.record.folder": str(folder),
                    **VARIANTS[variant],
                }
                one = Contender(f"{named}, {variant}", sink("kafka-chunked", options))
                topic = f"together-{place}-{variant.replace(' ', '-')}"
                frame = frozen_run.frame_of(spark, load, keyed=False)
                run = frozen_run.frozen_run(cluster, victim, one, frame, topic, load)
                stored = paced_rows.read_back(cluster.bootstrap_servers, topic, PARTITIONS)
                found = judged(notes_of(folder), run, victim)
                found |= {
                    "lost": stored.lost(load.rows),
                    "doubled": stored.doubled(),
                    "reordered": stored.reordered(),
                    "error": run.error,
                }
                outcome[one.name] = found
    return outcome


def report(outcome: dict[str, dict[str, Any]]) -> None:
    for name, found in outcome.items():
        print(f"\n{name}")
        for what, value in found.items():
            shown = f"{value:.2f}" if isinstance(value, float) else value
            print(f"  {what.replace('_', ' '):32}{shown}")
    print(f"\ngoals where shared: first to last mute < {GOAL_S} s, at most one probe in an interval")


def main() -> None:
    parser = parser_of(__doc__, "a short freeze")
    parser.add_argument("--masters", default=f"local[{WORKERS}],standalone")
    options = parser.parse_args()
    import pyspark

    load = Load(WORKERS * 1000, 6, 0, 16, 6, tasks=WORKERS)
    masters, variants = options.masters.split(","), list(VARIANTS)
    if options.smoke:
        load, masters, variants = Load(2000, 1, 0, 2, 1, tasks=2), ["local[2]"], ["shared"]
    conditions = (
        f"{load.rate:,.0f} rows of {paced_rows.ROW_BYTES} bytes a second offered by {load.tasks} tasks in "
        f"as many worker processes, defaults, {PARTITIONS} partitions on {BROKERS} brokers without replicas, "
        f"one frozen for {load.frozen:.0f} s; pyspark {pyspark.__version__}, {machine()}"
    )
    print(conditions, flush=True)
    with LocalBroker(brokers=BROKERS) as cluster:
        outcome = measure(cluster, masters, variants, load)
    report(outcome)
    if not options.smoke:
        keep("muted_together", {"conditions": conditions, "outcome": outcome})


if __name__ == "__main__":
    main()
