"""Rows of other shapes and settings, against Spark's JVM sink and a sink that only counts, in one run.

    python -m benchmarks.throughput_shapes [--cases NAME,...] [--repeats N] [--smoke]

Values of 20 and 110 bytes and 10 kB, these also in Arrow batches of 100 rows; rows without keys, with
headers, each codec, replication factor 3, TLS; four partitions, local[2], Parquet to a real broker on the
same machine. Both sinks are tuned: linger.ms 20, batch.size 1 MiB. Sinks take turns within a round. The first
round is apart, since caches are cold in it.
Needs pyspark 4.1.1 for the JVM sink.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import charts, peers
from benchmarks.surroundings import keep, kept, parser_of
from benchmarks.throughput import JSON, KEY, PARTITIONS, Job, medians, run_job, session
from local_kafka import LocalBroker
from tests.support.security.certificates import Authority

OURS, JVM, COUNTING = "kafka-chunked", "JVM sink", "counting sink"
ARROW_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"


def _digests(size: int) -> str:
    """Hexadecimal digests in a frame of text: lz4 makes two thirds of it."""
    return f"""rpad(array_join(transform(sequence(1, {size // 71}), n -> concat('{{"part":', n, ',"digest":"',
        substring(sha2(concat(id, n), 256), 1, 40), '","ok":true}}')), ','), {size}, ' ')"""


VALUES = {
    20: "format_string('%012d-%07d', id, id % 9999991)",
    110: JSON,
    1_000: _digests(1_000),
    10_000: _digests(10_000),
    100_000: _digests(100_000),
}
HEADERS = """array(named_struct('key', 'trace', 'value', cast(lpad(hex(id), 16, '0') as binary)),
    named_struct('key', 'source', 'value', cast('bench' as binary))) as headers"""


@dataclass(frozen=True)
class Case:
    """Rows and settings. ``brokers`` is also the replication factor.

    ``arrow_rows`` is spark.sql.execution.arrow.maxRecordsPerBatch, which the JVM sink does not use; 0 leaves
    Spark's default.
    """

    name: str
    rows: int = 2_000_000
    value_bytes: int = 110
    keyed: bool = True
    headers: bool = False
    codec: str = "lz4"
    brokers: int = 1
    tls: bool = False
    arrow_rows: int = 0

    def frame(self, spark: Any, folder: str) -> Any:
        """The rows as Parquet, which cases share."""
        path = f"{folder}/{self.rows}-{self.value_bytes}-{self.keyed}-{self.headers}"
        if not Path(path).exists():
            columns = [f"{VALUES[self.value_bytes]} as value"]
            columns += [KEY] if self.keyed else []
            columns += [HEADERS] if self.headers else []
            spark.range(0, self.rows, 1, 2).selectExpr(*columns).write.parquet(path)
        return spark.read.parquet(path)


CASES = (
    Case("20-byte values", rows=4_000_000, value_bytes=20),
    Case("110-byte values"),
    Case("10 kB values", rows=40_000, value_bytes=10_000),
    Case("10 kB by hundreds", rows=40_000, value_bytes=10_000, arrow_rows=100),
    Case("no keys", keyed=False),
    Case("two headers", rows=1_000_000, headers=True),
    Case("no compression", codec="none"),
    Case("gzip", rows=1_000_000, codec="gzip"),
    Case("snappy", codec="snappy"),
    Case("zstd", codec="zstd"),
    Case("TLS", tls=True),
    Case("three replicas", brokers=3),
)


@dataclass
class Found:
    """The jobs of each sink, the cold one first."""

    case: Case
    jobs: dict[str, list[Job]] = field(default_factory=dict)


@contextmanager
def arrow_batches_of(spark: Any, rows: int) -> Iterator[None]:
    """Lets Spark hand over this many rows at a time within the block; 0: as many as by default."""
    if rows:
        spark.conf.set(ARROW_ROWS, str(rows))
    try:
        yield
    finally:
        spark.conf.unset(ARROW_ROWS)


def measure(spark: Any, broker: LocalBroker, case: Case, repeats: int, folder: str, trust: str) -> Found:
    frame = case.frame(spark, folder)
    settings: dict[str, str] = {**peers.TUNED, "compression.type": case.codec}
    servers = {broker.pid(number) for number in range(case.brokers)}
    plain = bootstrap = broker.bootstrap_servers
    if case.tls:
        bootstrap = broker.bootstrap_for("TLS")
        settings["security.protocol"] = "SSL"
        settings |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": trust}

    def writes(form: str) -> Callable[[Any, str, str], None]:
        write = peers.sink(form, settings)
        return lambda rows, _, topic: write(rows, bootstrap, topic)

    contenders = [
        peers.Contender(OURS, writes("kafka-chunked")),
        peers.Contender(COUNTING, peers.count_only, writes=False),
    ]
    if "spark-sql-kafka" in (spark.conf.get("spark.jars", None) or ""):
        contenders.insert(1, peers.Contender(JVM, writes("kafka")))
    found = Found(case, {one.name: [] for one in contenders})
    for number in range(repeats + 1):
        turn = number % len(contenders)
        for one in contenders[turn:] + contenders[:turn]:
            topic = f"{case.name}-{one.name}-{number}".replace(" ", "-")
            broker.create_topic(topic, PARTITIONS, replication_factor=case.brokers)
            with arrow_batches_of(spark, case.arrow_rows):
                found.jobs[one.name].append(run_job(one, frame, case.rows, servers, plain, topic))
    shown = {name: f"{medians(jobs[1:]).rows_per_s:,.0f}" for name, jobs in found.jobs.items()}
    print(f"  {case.name:18} {shown}", flush=True)
    return found


def run(cases: list[Case], repeats: int, with_jvm: bool) -> list[Found]:
    """All cases: first the cases with one broker, then the cases with three."""
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="kafka-chunked-bench-", ignore_cleanup_errors=True) as folder,
        session(with_jvm) as spark,
    ):
        trust = Path(folder) / "authority.pem"
        authority = Authority()
        authority.pem_file(trust)
        authority.issue("broker", "127.0.0.1").pem_file(Path(folder) / "broker.pem")
        properties = {
            "listener.name.tls.ssl.keystore.type": "PEM",
            "listener.name.tls.ssl.keystore.location": f"{folder}/broker.pem",
        }
        for brokers in sorted({case.brokers for case in cases}):
            with LocalBroker(
                brokers=brokers, properties=properties, extra_listeners={"TLS": "SSL"}
            ) as broker:
                here = [case for case in cases if case.brokers == brokers]
                found += [measure(spark, broker, case, repeats, folder, str(trust)) for case in here]
    return found


def report(found: list[Found]) -> None:
    """Prints medians, ratios and the processor time of a million rows."""
    print(f"\n{'rows/s':19}{'ours':>11}{'JVM':>11}{'ratio':>7}{'cold: ours':>12}{'JVM':>11}", end="")
    print(f"   s/M: {'ours':>5}{'JVM':>7}{'counting':>10}   broker: {'ours':>5}{'JVM':>7}")
    for one in found:
        steady = {name: medians(jobs[1:]) for name, jobs in one.jobs.items()}
        ours, theirs, counting = steady[OURS], steady.get(JVM), steady[COUNTING]
        if theirs is None:
            print(
                f"{one.case.name:19}{ours.rows_per_s:11,.0f}   JVM sink: needs pyspark {peers.JVM_SINK_SPARK}"
            )
            continue
        print(
            f"{one.case.name:19}{ours.rows_per_s:11,.0f}{theirs.rows_per_s:11,.0f}"
            f"{ours.rows_per_s / theirs.rows_per_s:7.2f}"
            f"{one.jobs[OURS][0].rows_per_s:12,.0f}{one.jobs[JVM][0].rows_per_s:11,.0f}"
            f"        {ours.spark_s:5.2f}{theirs.spark_s:7.2f}{counting.spark_s:10.2f}"
            f"           {ours.broker_s:5.2f}{theirs.broker_s:7.2f}"
        )


def plot(shown: list[dict[str, Any]], file: Path) -> None:
    """Ratios of rates, and processor time stacked: Spark to Python, sink, broker."""
    steady = {
        one["case"]["name"]: {
            name: medians([Job(**job) for job in jobs[1:]]) for name, jobs in one["jobs"].items()
        }
        for one in shown
    }
    names = list(steady)
    made, [[rates, costs]] = charts.figure(
        "kafka-chunked and the tuned JVM sink, by the shape of the rows",
        [
            "on the right, the unit of each case is what Spark takes with the JVM sink",
            "labels: processor seconds for a million rows, Spark + broker",
        ],
        (11, 1.8 + 0.45 * len(names)),
        1,
        2,
        sharey=True,
    )
    ratios = [found[OURS].rows_per_s / found[JVM].rows_per_s for found in steady.values()]
    drawn = charts.bars(rates, names, ratios, color=charts.OURS)
    texts = [
        f"{ratio:.2f}   ({found[OURS].rows_per_s:,.0f} rows/s)"
        for ratio, found in zip(ratios, steady.values(), strict=True)
    ]
    charts.label(rates, drawn, texts)
    rates.axvline(1, color="black", linewidth=0.8)
    rates.set_xlabel("our rate, as times the JVM sink's")
    for place, found in enumerate(steady.values()):
        _draw_costs(costs, place, found)
    for colour, text in (
        (charts.LIGHT, "Spark to Python"),
        (charts.OURS, "our sink"),
        (charts.OTHER, "the JVM sink, with reading"),
        (charts.BROKER, "broker"),
    ):
        costs.barh([0], [0], color=colour, label=text)
    costs.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    costs.set_xlabel("processor time, JVM sink's Spark = 1")
    charts.save(made, file)


def _draw_costs(axes: Any, place: int, found: dict[str, Job]) -> None:
    whole = found[JVM].spark_s
    for name, shift, colour in ((OURS, -0.2, charts.OURS), (JVM, 0.2, charts.OTHER)):
        total = found[name].spark_s / whole
        # The counting sink's jobs may have met with a neighbour that ours did not.
        hand_over = min(found[COUNTING].spark_s / whole, total) if name == OURS else 0.0
        axes.barh([place + shift], [hand_over], color=charts.LIGHT, height=0.38)
        axes.barh([place + shift], [total - hand_over], left=[hand_over], color=colour, height=0.38)
        broker = found[name].broker_s / whole
        drawn = axes.barh([place + shift], [broker], left=[total], color=charts.BROKER, height=0.38)
        text = f"{found[name].spark_s:.2f} + {found[name].broker_s:.2f}"
        axes.bar_label(drawn, [text], padding=3, fontsize=7)


def with_earlier(found: list[Found], earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases that were measured now, and those of earlier runs."""
    by_name = {one["case"]["name"]: one for one in [*earlier, *map(asdict, found)]}
    return [by_name[case.name] for case in CASES if case.name in by_name]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", help="names, separated by commas; the results of others are kept")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    chosen = [case for case in CASES if options.cases is None or case.name in options.cases.split(",")]
    if options.smoke:
        chosen = [Case("smoke", rows=2000, arrow_rows=100)]
        chosen += [Case("headers", rows=2000, headers=True, tls=True)]
    repeats = 1 if options.smoke else options.repeats
    found = run(chosen, repeats, peers.jvm_sink_is_there() and not options.smoke)
    report(found)
    if options.smoke:
        return
    shown = with_earlier(found, kept("throughput_shapes") or [])
    keep("throughput_shapes", shown, plot if all(JVM in one["jobs"] for one in shown) else None)


if __name__ == "__main__":
    main()
