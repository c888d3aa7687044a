"""80,000 rows to 2,000 topics in 8 tasks: what is asked of Kafka and how long it takes, against the JVM sink.

    python -m benchmarks.many_topics [--masters local[2],local[16],standalone] [--repeats N]

Each run is a Spark application of its own that writes twice: cold, then again. Requests are counted by API in
runs through a proxy; times are of other runs without one, since a proxy costs more per request than Kafka
does. The clock runs from ``save()`` to its return, so cold includes all that Spark and either sink start for
it. Processor time is of Spark with its workers and the coordinator, without the broker; on a cluster it is
not measured. Every task holds rows of every topic. ``local[16]`` has 16 tasks in 16 Python workers at once;
``standalone`` is a master and two workers on loopback addresses of their own. Ours runs again with the daemon
that imports it before workers are forked. The JVM sink needs pyspark 4.1.1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import charts, peers
from benchmarks.processor_time import Meter
from benchmarks.surroundings import environment, keep, kept, parser_of, rows_in, spark_session
from local_kafka import LocalBroker
from tests.support.proxy import ProxyCluster
from tests.support.standalone_cluster import StandaloneCluster

OURS, JVM = "kafka-chunked", "kafka"
# This contender runs with spark.python.daemon.module=kafka_sink.daemon.
WITH_DAEMON = "kafka-chunked, kafka_sink.daemon"
APIS = {0: "Produce", 3: "Metadata", 22: "InitProducerId"}


# -- one application: a process of its own ------------------------------------------------------------


class Write(NamedTuple):
    """Seconds, of these processor time of Spark, and requests by API."""

    took_s: float
    spark_s: float
    requests: Counter[int]


def job(form: str, bootstrap: str, master: str, rows: int, topics: int, tasks: int) -> None:
    """Writes twice; prints the time after each write, and waits for a command to go on."""
    settings = {"spark.python.daemon.module": "kafka_sink.daemon"} if form == WITH_DAEMON else {}
    spark = spark_session(master, settings, with_jvm_sink=form == JVM)
    frame = spark.range(0, rows, 1, tasks).selectExpr(
        f"format_string('many-%05d', (id * 7919) % {topics}) as topic",
        "cast(id as string) as key",
        "rpad(cast(id as string), 100, 'x') as value",
    )
    # Executors are up and Spark's code is loaded; neither sink, nor Python workers.
    frame.selectExpr("max(length(topic))").collect()
    gateway: Any = spark.sparkContext._gateway
    for _ in range(2):
        meter = Meter(gateway.proc.pid, ())
        started = time.perf_counter()
        writer = frame.write.format(JVM if form == JVM else OURS).mode("append")
        writer.option("kafka.bootstrap.servers", bootstrap).save()
        print(f"TOOK {time.perf_counter() - started} {meter.read()[0]}", flush=True)
        sys.stdin.readline()
    spark.stop()


def application(
    form: str, bootstrap: str, master: str, size: tuple[int, int, int], counts: Any = None
) -> list[Write]:
    """The cold write and the next."""
    module = [sys.executable, "-m", "benchmarks.many_topics"]
    command = [*module, "--job", form, bootstrap, master, *map(str, size)]
    outcome: list[Write] = []
    before: Counter[int] = Counter()
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("TOOK"):
                continue
            now = counts() if counts is not None else Counter()
            _, took, spark_s = line.split()
            outcome.append(Write(float(took), float(spark_s), now - before))
            before = now
            process.stdin.write("\n")
            process.stdin.flush()
    if process.returncode or len(outcome) != 2:
        raise RuntimeError(f"{form} on {master} ended with {process.returncode}")
    return outcome


# -- measuring ----------------------------------------------------------------------------------------


def _topic(number: int) -> str:
    return f"many-{number:05}"


def create_topics(bootstrap: str, topics: int) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": bootstrap})
    for start in range(0, topics, 500):
        names = map(_topic, range(start, min(start + 500, topics)))
        for future in admin.create_topics([NewTopic(name, 1, 1) for name in names]).values():
            future.result(120)


def count_requests(
    broker: LocalBroker, form: str, master: str, size: tuple[int, int, int]
) -> tuple[list[dict[str, int]], list[float]]:
    """Requests by API, cold and again; the seconds that both writes took through the proxy."""
    with ProxyCluster(broker.bootstrap_servers) as proxies:
        runs = application(form, proxies.bootstrap_servers, master, size, lambda: Counter(proxies.requests))
    requests = [{name: one.requests[api] for api, name in APIS.items()} for one in runs]
    return requests, [one.took_s for one in runs]


def measure(
    broker: LocalBroker, masters: list[str], forms: list[str], size: tuple[int, int], repeats: int
) -> dict[str, Any]:
    outcome: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
    rows, topics = size
    written = 0
    for named in masters:
        tasks = 16 if named == "local[16]" else 8
        with contextlib.ExitStack() as stack:
            master = named
            if named == "standalone":
                master = stack.enter_context(StandaloneCluster(cores=4, environ=environment())).url
            for form in forms:
                requests, through_proxy = count_requests(broker, form, master, (rows, topics, tasks))
                outcome[named][form] = {"requests": requests, "seconds": [] if repeats else [through_proxy]}
                outcome[named][form]["processor_s"] = []
                print(f"  {named:12}{form:34}requests cold {requests[0]}, again {requests[1]}", flush=True)
            for turn in range(repeats):
                for form in forms:
                    runs = application(form, broker.bootstrap_servers, master, (rows, topics, tasks))
                    seconds, spark_s = [one.took_s for one in runs], [one.spark_s for one in runs]
                    outcome[named][form]["seconds"].append(seconds)
                    if named != "standalone":
                        outcome[named][form]["processor_s"].append(spark_s)
                    print(
                        f"  {named:12}{form:34}turn {turn}: "
                        f"cold {seconds[0]:.2f} s, again {seconds[1]:.2f} s; "
                        f"processor {spark_s[0]:.2f} s, {spark_s[1]:.2f} s",
                        flush=True,
                    )
        written += 2 * rows * len(forms) * (1 + repeats)
        arrived = rows_in(broker.bootstrap_servers, *map(_topic, range(topics)))
        assert arrived == written, f"{arrived} of {written} rows arrived"
    decoded: dict[str, Any] = json.loads(json.dumps(outcome))
    return decoded


def report(outcome: dict[str, Any]) -> None:
    print(f"\n{'':47}{'Metadata requests':>20}{'seconds (median)':>22}{'processor':>18}")
    print(f"{'':47}" + f"{'cold':>10}{'again':>10}" * 3)
    for master, forms in outcome.items():
        medians = {form: _medians(figures) for form, figures in forms.items()}
        for form, figures in forms.items():
            asked = [one["Metadata"] for one in figures["requests"]]
            took = "".join(f"{seconds:10.2f}" for seconds in medians[form])
            print(f"{master:13}{form:34}{asked[0]:10,}{asked[1]:10,}{took}")
        if JVM in forms:
            for ours in (OURS, WITH_DAEMON):
                ratios = zip(medians[ours], medians[JVM], strict=True)
                cold, again, *processor = (one / other for one, other in ratios)
                texts = [f"{ratio:.2f}" for ratio in processor]
                print(f"{'':13}{ours} / JVM sink: cold {cold:.2f} (goal 1), again {again:.2f}", end="")
                print(f"; processor time {', '.join(texts)}" if texts else "")
        asked = [one["Metadata"] for one in forms[OURS]["requests"]]
        print(f"{'':13}goals: Metadata requests cold {asked[0]} <= 30, again {asked[1]} <= 5")


def _medians(figures: dict[str, Any]) -> list[float]:
    """Seconds cold and again, then processor seconds if they were measured."""
    columns = [column for name in ("seconds", "processor_s") for column in zip(*figures[name], strict=True)]
    return [statistics.median(column) for column in columns]


def plot(found: dict[str, Any], file: Path) -> None:
    from matplotlib.patches import Patch

    outcome = found["outcome"]
    heights = [len(forms) for forms in outcome.values()]
    made, all_axes = charts.figure(
        "80,000 rows to 2,000 topics",
        [found["conditions"]],
        (11, 1.7 + 0.5 * sum(heights)),
        len(outcome),
        2,
        height_ratios=heights,
        sharex="col",
        sharey="row",
    )
    for (left, right), (master, forms) in zip(all_axes, outcome.items(), strict=True):
        for turn, name in enumerate(("first write", "second write")):
            requests = [figures["requests"][turn]["Metadata"] for figures in forms.values()]
            seconds = [
                statistics.median(one[turn] for one in figures["seconds"]) for figures in forms.values()
            ]
            for axes, values in ((left, requests), (right, seconds)):
                _draw_turn(axes, list(forms), values, turn, name)
        left.set_title(master)
        # Zero has a place on this scale.
        left.set_xscale("symlog", linthresh=1)
        left.set_xlim(0, 60_000)
        left.set_xticks([0, 1, 10, 100, 1000, 10_000], ["0", "1", "10", "100", "1,000", "10,000"])
    all_axes[-1, 0].set_xlabel("Metadata requests of the whole job")
    all_axes[-1, 1].set_xlabel("seconds from save() to its return (median)")
    all_axes[0, 1].legend(
        handles=[
            Patch(color=colour, alpha=alpha, label=f"{text}, {turn} write")
            for colour, text in ((charts.OURS, "kafka-chunked"), (charts.OTHER, "JVM sink"))
            for alpha, turn in ((1.0, "first"), (0.5, "second"))
        ],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=2,
    )
    charts.save(made, file)


def _draw_turn(axes: Any, forms: list[str], values: list[float], turn: int, name: str) -> None:
    colours = [charts.OTHER if form == JVM else charts.OURS for form in forms]
    places = [place + 0.4 * turn - 0.2 for place in range(len(forms))]
    drawn = axes.barh(places, values, height=0.36, color=colours, alpha=0.5 if turn else 1.0, label=name)
    digits = 0 if all(isinstance(value, int) for value in values) else 1
    charts.label(axes, drawn, [f"{value:,.{digits}f}" for value in values])
    if not turn:
        axes.set_yticks(range(len(forms)), ["JVM sink" if form == JVM else form for form in forms])
        axes.set_ylim(len(forms) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)


def main() -> None:
    parser = parser_of(__doc__, "a few topics")
    parser.add_argument("--masters", default="local[2],local[16],standalone")
    parser.add_argument("--topics", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=80_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--job", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        form, bootstrap, master, *size = options.job
        job(form, bootstrap, master, *map(int, size))
        return
    import pyspark

    if options.smoke:
        options.masters, options.topics, options.rows, options.repeats = "local[2]", 20, 800, 0
    masters = options.masters.split(",")
    forms = [OURS, WITH_DAEMON]
    if options.smoke:
        forms = [OURS]
    elif peers.jvm_sink_is_there():
        forms.append(JVM)
    conditions = (
        f"{options.rows:,} rows of 100 bytes to {options.topics:,} topics of 1 partition, 8 tasks (16 on "
        f"local[16]), defaults, pyspark {pyspark.__version__}, Kafka 4.3.0 on the "
        f"same machine, {os.cpu_count()} cores"
    )
    print(conditions, flush=True)
    with LocalBroker() as broker:
        create_topics(broker.bootstrap_servers, options.topics)
        outcome = measure(broker, masters, forms, (options.rows, options.topics), options.repeats)
    report(outcome)
    if not options.smoke:
        # Masters may come from runs of their own.
        known = kept("many_topics")
        if known is not None and known["conditions"] == conditions:
            outcome = {**known["outcome"], **outcome}
        keep("many_topics", {"conditions": conditions, "outcome": outcome}, plot)


if __name__ == "__main__":
    main()
