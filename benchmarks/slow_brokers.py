"""Writing to a broker that is far away: the rate by the round trip, against the peers, in one run.

    python -m benchmarks.slow_brokers [--points NAME,...] [--repeats N] [--seconds N] [--only TEXT] [--smoke]
    python -m benchmarks.slow_brokers --rising

Keyed and keyless 110-byte rows, lz4, four partitions, local[2], a real broker behind proxies that delay each
direction by half of the round trip (``benchmarks.far_brokers``). At "250 ms with a tail", one response in
twenty comes after 2 s. Each job has the rows for ``--seconds`` of work, as far as its client's requests in
flight allow; contenders take turns in an order drawn anew for each round, after a short job of each that
does not count. "Running" is the rate in the middle of a job, as the broker's log grows: it leaves out the
start and the end, which take some round trips whatever the number of rows.
The bound is ours: requests in flight times their largest size, for each connection, in each round trip.
Spark's JVM sink has no exactly-once guarantee to compare with. Needs pyspark 4.1.1 for that sink.

``--rising``: three brokers whose round trip rises from 5 to 600 ms within a minute while two tasks write a
steady 20,000 rows a second, and how often the circuit breaker mutes meanwhile.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import charts, frozen_run, muted_together, paced_rows, peers, python_clients
from benchmarks.far_brokers import TAIL_EVERY, FarBrokers, far_brokers
from benchmarks.frozen_run import Load
from benchmarks.processor_time import Meter
from benchmarks.sampler import Sampler
from benchmarks.surroundings import keep, kept, machine, parser_of, rows_in
from benchmarks.throughput import PARTITIONS, session, source
from benchmarks.worker_memory import WorkerMemory
from local_kafka import LocalBroker

TASKS = 2
MIB = 1 << 20
IN_FLIGHT = 5
# Requests that carry a batch of each partition. With the default of 1 MiB, a request carries one such batch.
TUNED = {**peers.TUNED, "max.request.size": str(4 * MIB), "buffer.memory": str(64 * MIB)}
# librdkafka's batches have at most 10,000 messages by default. The guarantee is that of the other two.
CONFLUENT_TUNED = {**python_clients.LIBRDKAFKA, "batch.num.messages": 100_000, "enable.idempotence": True}
OURS, JVM, CONFLUENT = "kafka-chunked", "JVM sink", "confluent-kafka"
_COLOURS = {OURS: charts.OURS, JVM: charts.OTHER, CONFLUENT: charts.SECOND}
_LINES_MEAN = (
    "lines: whole jobs; circles: 250 ms with one response in twenty after 2 s; dashed: ours in the middle of "
    "a job; dotted: five requests of max.request.size in flight from each of our two tasks"
)
_TUNED_MEANS = (
    "tuned: linger.ms 20, batch.size 1 MiB, max.request.size 4 MiB; confluent-kafka: linger.ms 20, "
    "batch.size 1 MiB, 100,000 messages in a batch, idempotent"
)
SHAPES = ("keyed", "keyless")
_SMALLEST = 25_000
_SAMPLE_S = 0.02
# The rate is measured over at least this long.
_SHORTEST_S = 0.25
# The top of the plot.
_MOST_ROWS_S = 4e6
# The conditions of --rising.
LOW_MS, HIGH_MS, RISE_S, STEPS = 5.0, 600.0, 60.0, 120


@dataclass(frozen=True)
class Point:
    """Milliseconds of a round trip, and of the late responses; 0 if none is late."""

    name: str
    round_trip_ms: float
    tail_ms: float = 0.0

    @property
    def window_s(self) -> float:
        """How long a full window of requests in flight takes on average. The requests after a late response
        wait for it, so that one window in four takes as long as the tail."""
        windows = TAIL_EVERY / IN_FLIGHT
        late_ms = self.tail_ms or self.round_trip_ms
        return ((windows - 1) * self.round_trip_ms + late_ms) / windows / 1000

    @property
    def period_s(self) -> float:
        """After this time everything repeats: whole round trips, or the windows from one late response to the
        next."""
        once_s = self.window_s * (TAIL_EVERY / IN_FLIGHT if self.tail_ms else 1)
        return once_s * math.ceil(_SHORTEST_S / once_s)


POINTS = (
    *(Point(f"{ms} ms", ms) for ms in (1, 20, 100, 250, 600)),
    Point("250 ms with a tail", 250, 2000),
)


@dataclass(frozen=True)
class Contender:
    """``rows_in_flight`` and ``rows_per_s`` are rough: they only decide how many rows a job has.
    ``window_bytes``: the most that ours may have in flight with its settings."""

    name: str
    write: peers.Write
    rows_in_flight: int
    rows_per_s: int
    window_bytes: int = 0
    shapes: tuple[str, ...] = SHAPES
    most_markers: int = 0

    @property
    def client(self) -> str:
        return self.name.split(",")[0]

    @property
    def settings(self) -> str:
        return self.name.split(", ")[1]

    def rows(self, point: Point, seconds: float) -> int:
        """A power of two times the smallest number, so that few files have to be made."""
        # The first windows are not full, and half of a job must be several windows.
        wanted = (seconds + 6 * point.window_s) / (1 / self.rows_per_s + point.window_s / self.rows_in_flight)
        doublings = round(math.log2(max(1.0, wanted / _SMALLEST)))
        return _SMALLEST << doublings


_EXACTLY_ONCE = {**peers.LZ4, "delivery.guarantee": "exactly-once"}
CONTENDERS = (
    Contender(f"{OURS}, defaults", peers.sink(OURS, peers.LZ4), 240_000, 900_000, TASKS * IN_FLIGHT * MIB),
    Contender(f"{OURS}, tuned", peers.sink(OURS, TUNED), 900_000, 900_000, TASKS * IN_FLIGHT * 4 * MIB),
    # One producer for both tasks, with a batch of 16 KiB for each partition in a request.
    Contender(f"{JVM}, defaults", peers.sink("kafka", peers.LZ4), 6_000, 600_000),
    Contender(f"{JVM}, tuned", peers.sink("kafka", TUNED), 450_000, 700_000),
    # It has no limit on requests in flight by default, but one of 100,000 messages.
    Contender(f"{CONFLUENT}, defaults", peers.produce_batches(peers.LZ4), 200_000, 400_000),
    Contender(f"{CONFLUENT}, tuned", peers.produce_batches(CONFLUENT_TUNED), 85_000, 400_000),
    Contender(
        f"{OURS}, exactly once",
        peers.sink(OURS, _EXACTLY_ONCE),
        240_000,
        900_000,
        TASKS * IN_FLIGHT * MIB,
        shapes=("keyed",),
        most_markers=TASKS * PARTITIONS,
    ),
)


@dataclass(frozen=True)
class Job:
    """One write. ``running`` is the rate in its middle; ``row_bytes`` are those of a row in the log;
    ``worker_bytes`` is the private memory of the largest Python worker."""

    rows: int
    rows_per_s: float
    running: float
    spark_s: float
    broker_s: float
    row_bytes: float
    worker_bytes: int


class LogGrowth(Sampler):
    """Samples the size of a topic's log while the block runs."""

    def __init__(self, broker: LocalBroker, topic: str) -> None:
        super().__init__("log-growth", _SAMPLE_S)
        self.samples: list[tuple[float, int]] = []
        self._data, self._topic = broker.log_dir(0), topic

    def sample(self) -> None:
        """See Sampler."""
        self.samples.append((time.monotonic(), self.size()))

    def size(self) -> int:
        return sum(file.stat().st_size for file in self._data.glob(f"{self._topic}-*/*.log"))

    def middle_rate(self, period_s: float) -> float:
        """Bytes a second in the middle of the job: the mean growth within a period that begins after a fifth
        of all bytes and ends before the last twentieth. Far brokers get their bytes in bursts, one for each
        round trip, so a period of whole round trips has the same number of bursts wherever it begins."""
        times, sizes = np.array(self.samples).T
        total = sizes[-1]
        start, end = times[np.searchsorted(sizes, (0.2 * total, 0.95 * total))]
        begins = np.arange(start, max(end - period_s, start) + _SAMPLE_S / 2, _SAMPLE_S)

        def size_at(moments: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            return sizes[np.searchsorted(times, moments, side="right") - 1]  # type: ignore[no-any-return]

        return float((size_at(begins + period_s) - size_at(begins)).mean() / period_s)


def run_job(
    one: Contender, frame: Any, rows: int, point: Point, broker: LocalBroker, far: FarBrokers, topic: str
) -> Job:
    """Writes the frame to a new topic through the proxies, and checks that every row arrived."""
    broker.create_topic(topic, PARTITIONS)
    os.sync()  # the previous contender's data is on the disk
    jvm = frame.sparkSession.sparkContext._gateway.proc.pid
    meter, growth, memory = Meter(jvm, [broker.pid(0)]), LogGrowth(broker, topic), WorkerMemory(jvm)
    started = time.perf_counter()
    with growth, memory:
        one.write(frame, far.bootstrap_servers, topic)
        taken = time.perf_counter() - started
    spark_s, broker_s = meter.read()
    growth.sample()
    # The end of a transaction takes an offset in each of its partitions.
    arrived, most = rows_in(broker.bootstrap_servers, topic), rows + one.most_markers
    assert rows <= arrived <= most, f"{one.name}: {arrived} of {rows} rows arrived"
    row_bytes = growth.size() / rows
    million = rows / 1e6
    return Job(
        rows,
        rows / taken,
        growth.middle_rate(point.period_s) / row_bytes,
        spark_s / million,
        broker_s / million,
        row_bytes,
        memory.peak.private,
    )


class Bench:
    """A broker far away, a Spark, and frames of any number of rows."""

    def __init__(self, spark: Any, broker: LocalBroker, far: FarBrokers, folder: str) -> None:
        self._spark, self._broker, self._far, self._folder = spark, broker, far, folder
        self._frames: dict[int, Any] = {}
        self._topics = 0

    def run(self, one: Contender, shape: str, rows: int, point: Point = POINTS[0]) -> Job:
        frame = self._frames.get(rows)
        if frame is None:
            frame = self._frames[rows] = source(self._spark, rows, self._folder).coalesce(TASKS)
        self._topics += 1
        chosen = frame if shape == "keyed" else frame.select("value")
        return run_job(one, chosen, rows, point, self._broker, self._far, f"far-{self._topics}")

    def measure(
        self, point: Point, shape: str, contenders: list[Contender], repeats: int, seconds: float
    ) -> dict[str, list[Job]]:
        jobs: dict[str, list[Job]] = {one.name: [] for one in contenders}
        self._far.delay(point.round_trip_ms, point.tail_ms)
        for turn in range(repeats):
            for one in random.Random(f"{point.name} {shape} {turn}").sample(contenders, len(contenders)):
                job = self.run(one, shape, one.rows(point, seconds), point)
                jobs[one.name].append(job)
                print(
                    f"  {point.name:20}{shape:9}{one.name:30}{job.rows:10,} rows"
                    f"{job.rows_per_s:12,.0f} rows/s{job.running:12,.0f} running",
                    flush=True,
                )
        self._far.delay(0.0)
        return jobs


def medians(jobs: list[dict[str, Any]]) -> Job:
    """Each figure's median."""
    return Job(*(statistics.median(job[field] for job in jobs) for field in Job.__dataclass_fields__))


def share_of_bound(point: Point, one: Contender, job: Job) -> float:
    """The rate while running, of what the window of requests in flight allows."""
    return job.running * job.row_bytes * point.window_s / one.window_bytes


def lines(figures: dict[str, Any]) -> Iterator[str]:
    """The table of docs/benchmarks.md."""
    yield (
        f"| round trip | rows | settings | {OURS} | running, of the bound | {JVM} | ratio | {CONFLUENT} | "
        "processor seconds for a million rows |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for point in POINTS:
        for shape in SHAPES:
            jobs = figures["jobs"].get(point.name, {}).get(shape, {})
            for settings in ("defaults", "tuned", "exactly once"):
                found = {
                    client: medians(jobs[name])
                    for client in (OURS, JVM, CONFLUENT)
                    if jobs.get(name := f"{client}, {settings}")
                }
                if OURS in found:
                    cells = _cells(point, settings, found)
                    yield f"| {point.name} | {shape} | {settings} | " + " | ".join(cells) + " |"


def _cells(point: Point, settings: str, found: dict[str, Job]) -> list[str]:
    ours, jvm = found[OURS], found.get(JVM)
    running = ""
    # Tuned, a task's buffer takes most rows of a job: they are sent in one burst.
    if settings != "tuned":
        one = next(one for one in CONTENDERS if one.name == f"{OURS}, {settings}")
        running = f"{ours.running:,.0f}, {share_of_bound(point, one, ours):.2f}"
    rates = {client: f"{job.rows_per_s:,.0f}" for client, job in found.items()}
    ratio = "" if jvm is None else f"{ours.rows_per_s / jvm.rows_per_s:.2f}"
    costs = ", ".join(f"{job.spark_s:.2f}" for job in found.values())
    return [rates[OURS], running, rates.get(JVM, ""), ratio, rates.get(CONFLUENT, ""), costs]


def plot(figures: dict[str, Any], file: Path) -> None:
    """Rates of whole jobs by round trip: a column for each kind of rows, a row for each kind of settings."""
    made, all_axes = charts.figure(
        "Writing from Spark to a far broker: rate by round trip",
        [figures["conditions"], _LINES_MEAN, _TUNED_MEANS],
        (10, 7.5),
        2,
        2,
        sharex=True,
        sharey=True,
    )
    for row, settings in zip(all_axes, ("defaults", "tuned"), strict=True):
        for axes, shape in zip(row, SHAPES, strict=True):
            _draw(axes, figures["jobs"], shape, settings)
            axes.set_title(f"{shape} rows, {settings}")
    for axes in all_axes[:, 0]:
        axes.set_ylabel("rows per second")
    for axes in all_axes[-1]:
        axes.set_xlabel("round trip, milliseconds")
    all_axes[0, 0].legend(loc="lower left")
    charts.save(made, file)


def _draw(axes: Any, jobs: dict[str, Any], shape: str, settings: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(alpha=0.6)
    for client, colour in _COLOURS.items():
        name = f"{client}, {settings}"
        found = {
            point: medians(jobs[point.name][shape][name])
            for point in POINTS
            if jobs.get(point.name, {}).get(shape, {}).get(name)
        }
        fixed = {point.round_trip_ms: job for point, job in found.items() if not point.tail_ms}
        rates = [job.rows_per_s for job in fixed.values()]
        axes.plot(fixed.keys(), rates, "o-", color=colour, label=client, markersize=4)
        for point, job in found.items():
            if point.tail_ms:
                axes.plot(point.round_trip_ms, job.rows_per_s, "o", color=colour, fillstyle="none")
        if client == OURS and settings == "defaults":
            axes.plot(fixed.keys(), [job.running for job in fixed.values()], "--", color=colour, linewidth=1)
            window = next(one.window_bytes for one in CONTENDERS if one.name == name)
            bound = [window / job.row_bytes / ms * 1000 for ms, job in fixed.items()]
            axes.plot(fixed.keys(), bound, ":", color=colour, linewidth=1)
    axes.set_ylim(top=_MOST_ROWS_S)
    axes.set_xticks([1, 20, 100, 250, 600], ["1", "20", "100", "250", "600"])
    axes.minorticks_off()


# -- latency that rises ---------------------------------------------------------------------------------


def rising(smoke: bool) -> dict[str, Any]:
    """The events that the breaker of each worker recorded while the round trip rose."""
    rise_s = 2.0 if smoke else RISE_S
    load = Load(2000, 0.5, 0.5, rise_s, 1) if smoke else Load(20_000, 5, 5, rise_s, 20)
    prefix = muted_together.PREFIX
    with (
        tempfile.TemporaryDirectory(prefix="kafka-chunked-bench-") as folder,
        LocalBroker(brokers=frozen_run.BROKERS) as cluster,
        far_brokers(cluster.bootstrap_servers, LOW_MS) as far,
        frozen_run.session(False, f"local[{load.tasks}]") as spark,
    ):
        options = {
            f"{prefix}.class": "benchmarks.recording_breaker.RecordingBreaker",
            f"{prefix}.record.folder": folder,
        }
        cluster.create_topic("rising", frozen_run.PARTITIONS, 1)
        frame = frozen_run.frame_of(spark, load, keyed=False)
        with _raising(far, load.warm + load.before, rise_s):
            peers.sink(OURS, options)(frame, far.bootstrap_servers, "rising")
        arrived = rows_in(cluster.bootstrap_servers, "rising")
        notes = muted_together.notes_of(Path(folder))
    logs = [note["log"] for written in notes.values() for note in written if "log" in note]
    return {
        "conditions": f"{load.rate:,.0f} rows of {paced_rows.ROW_BYTES} bytes a second, {load.tasks} tasks, "
        f"{frozen_run.BROKERS} brokers, {LOW_MS:.0f} to {HIGH_MS:.0f} ms in {rise_s:.0f} s, {machine()}",
        "rows": arrived,
        "offered": load.rows,
        "workers": len(notes),
        "mutes": [line for line in logs if line.startswith("circuit breaker: muted")],
    }


@contextmanager
def _raising(far: FarBrokers, after_s: float, rise_s: float) -> Iterator[None]:
    """Raises the round trip in small steps while the block runs."""
    ended = threading.Event()

    def rise() -> None:
        ended.wait(after_s)
        for step in range(1, STEPS + 1):
            far.delay(LOW_MS + (HIGH_MS - LOW_MS) * step / STEPS)
            if ended.wait(rise_s / STEPS):
                return

    thread = threading.Thread(target=rise, name="raising", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


# -- the run ------------------------------------------------------------------------------------------


def run(
    points: list[Point],
    contenders: list[Contender],
    repeats: int,
    seconds: float,
    on_point: Callable[[dict[str, Any]], object],
) -> None:
    """Calls ``on_point`` with the figures of each point, when it has them."""
    import pyspark

    with_jvm = peers.jvm_sink_is_there()
    contenders = [one for one in contenders if with_jvm or one.client != JVM]
    conditions = (
        f"{_SMALLEST:,} rows or more of 110 bytes for some seconds of work, lz4, {PARTITIONS} partitions, "
        f"pyspark {pyspark.__version__} local[{TASKS}], {machine(' behind a proxy')}"
    )
    print(conditions, flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="kafka-chunked-bench-", ignore_cleanup_errors=True) as folder,
        session(with_jvm) as spark,
        LocalBroker() as broker,
        far_brokers(broker.bootstrap_servers) as far,
    ):
        bench = Bench(spark, broker, far, folder)
        for one in contenders:
            bench.run(one, "keyed", _SMALLEST)
        for point in points:
            jobs: dict[str, Any] = {}
            for shape in SHAPES:
                here = [one for one in contenders if shape in one.shapes]
                found = bench.measure(point, shape, here, repeats, seconds)
                jobs[shape] = {name: list(map(asdict, of_one)) for name, of_one in found.items()}
            on_point({"conditions": conditions, "jobs": {point.name: jobs}})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--points", help="names, separated by commas; the results of others are kept")
    parser.add_argument("--only", default="", help="contenders whose name contains this; nothing is kept")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rising", action="store_true", help="only the latency that rises")
    options = parser.parse_args()
    figures = kept("slow_brokers") or {}

    def on_found(found: dict[str, Any]) -> None:
        nonlocal figures
        figures = {**figures, **found, "jobs": {**figures.get("jobs", {}), **found.get("jobs", {})}}
        if not (options.smoke or options.only):
            keep("slow_brokers", figures, plot if "conditions" in figures else None)

    if options.rising:
        on_found({"rising": rising(options.smoke)})
        print(figures["rising"])
        return
    points = [one for one in POINTS if options.points is None or one.name in options.points.split(",")]
    contenders = [one for one in CONTENDERS if options.only in one.name]
    repeats, seconds = options.repeats, options.seconds
    if options.smoke:
        points, contenders = list(POINTS[:1]), [CONTENDERS[0], CONTENDERS[-1]]
        repeats, seconds = 1, 0.0
    run(points, contenders, repeats, seconds, on_found)
    print("\n".join(lines(figures)))


if __name__ == "__main__":
    main()
