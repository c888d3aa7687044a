"""Arrow data to Kafka without Spark, against other Python clients: rows and processor time, in one run.

    python -m benchmarks.arrow_clients [--rows N] [--repeats N] [--beside PYTHON] [--smoke]

Each client gets the same Arrow table of keyed rows, has one process, compresses with lz4, and is done when
brokers have acknowledged all rows. Each measurement is a process of its own, in an order drawn anew for each
round, and does a short write first. Processor time is that of all threads of the client, without the
broker's. The lower bound is shown next to the clients: LZ4, CRC and one copy of the same bytes, and nothing
else. Slow clients write a share of the rows. ``--beside`` names the interpreter of clients that are not
installed here, as Ray's libraries conflict with ours. A client that is in neither is left out, which the
output says. Daft 0.7 has no sink of its own for Kafka.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks import charts, python_clients
from benchmarks.direct_producer import BATCH_ROWS, row_batches
from benchmarks.surroundings import environment, keep, machine, parser_of, rows_in
from local_kafka import LocalBroker
from tests.support.http_server import Server

PARTITIONS = 4
OURS, BOUND = "kafka-chunked write_arrow", "LZ4, CRC and a copy alone"
# Goals, at 110 bytes: rows a second of ours by the best other's, processor time of ours by the bound's.
TIMES_FASTER, TIMES_BOUND = 2.0, 1.3
# Bytes of a value: rows, of all that were asked for.
SHAPES = {110: 1.0, 1000: 0.25}
_BLOCK = 65_536
_REGISTRY_JSON = "application/vnd.schemaregistry.v1+json"


def rows_of(count: int, size: int) -> pa.Table:
    """Keys of 10 bytes, and values of JSON in ``size`` bytes."""
    batches = max(1, count // BATCH_ROWS)
    parts = [row_batches(batches, seed=seed) for seed in range(1, size // 110 + 1)]
    values = [
        pc.binary_join_element_wise(*(one.column("value") for one in row), ",")
        for row in zip(*parts, strict=True)
    ]
    sized = [pc.utf8_rpad(value, size) for value in values]
    keys = [batch.column("key") for batch in parts[0]]
    return pa.table({"key": pa.chunked_array(keys), "value": pa.chunked_array(sized)})


# -- the clients: each writes a table to a topic and returns when all is acknowledged ----------------


def ours(table: pa.Table, bootstrap: str, topic: str) -> None:
    import kafka_sink

    options = {"kafka.bootstrap.servers": bootstrap, "topic": topic, "kafka.compression.type": "lz4"}
    written = kafka_sink.write_arrow(table, {**options, "log.summary": False})
    assert written.rows == table.num_rows


def _confluent(bootstrap: str) -> Any:
    from confluent_kafka import Producer

    return Producer({"bootstrap.servers": bootstrap, **python_clients.LIBRDKAFKA})


def produce(table: pa.Table, bootstrap: str, topic: str) -> None:
    producer = _confluent(bootstrap)
    for batch in table.to_batches():
        rows = zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True)
        for key, value in rows:
            while True:
                try:
                    producer.produce(topic, value, key)
                    break
                except BufferError:
                    producer.poll(0.01)
        producer.poll(0)
    assert producer.flush() == 0


def produce_batch(table: pa.Table, bootstrap: str, topic: str) -> None:
    producer = _confluent(bootstrap)
    for batch in table.to_batches():
        pairs = zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True)
        rows = [{"key": key, "value": value} for key, value in pairs]
        while producer.produce_batch(topic, rows) < len(rows):
            # Messages that did not fit carry an error; the other messages are in the queue.
            rows = [row for row in rows if row.pop("_error", None) is not None]
            producer.poll(0.01)
        producer.poll(0)
    assert producer.flush() == 0


def by_row(client: Callable[[python_clients.Rows, str, str], None]) -> Callable[[pa.Table, str, str], None]:
    """A client that takes one row at a time."""

    def write(table: pa.Table, bootstrap: str, topic: str) -> None:
        rows = zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True)
        client(rows, bootstrap, topic)

    return write


def arrow_kafka(table: pa.Table, bootstrap: str, topic: str) -> None:
    """It writes Avro under a schema of a registry, so its values are the table's columns in Avro."""
    from arrow_kafka_pyo3 import ArrowKafkaSink

    with Server() as registry:
        registry.respond = lambda _: (200, {"Content-Type": _REGISTRY_JSON}, b'{"id": 1}')
        sink = ArrowKafkaSink(
            bootstrap,
            registry.url,
            linger_ms=20,
            batch_size=1 << 20,
            compression_type="lz4",
            acks="all",
            max_in_flight=5,
        )
        sink.consume_arrow(table, topic, key_cols=["key"])
        sink.flush(timeout_ms=120_000)
        sink.close()


def ray_data(table: pa.Table, bootstrap: str, topic: str) -> None:
    """Its sink alone, without Ray around it. It writes whole rows as JSON."""
    from ray.data._internal.datasource.kafka_datasink import KafkaDatasink

    KafkaDatasink(topic, bootstrap, key_field="key", producer_config=python_clients.LIBRDKAFKA).write(
        [table], None
    )


def bound(table: pa.Table, _bootstrap: str, _topic: str) -> None:
    """Keys and values are copied once, compressed in the blocks of a batch, and summed."""
    from kafka_sink.records.compression import Lz4Codec

    codec = Lz4Codec(9)
    chunk = np.zeros(_BLOCK, np.uint8)
    for batch in table.to_batches():
        for column in batch.columns:
            data = np.frombuffer(column.buffers()[2], np.uint8)
            for at in range(0, len(data), _BLOCK):
                block = chunk[: min(_BLOCK, len(data) - at)]
                block[:] = data[at : at + _BLOCK]
                for part in codec.compress_block(block.data):
                    google_crc32c.value(bytes(part))


@dataclass(frozen=True)
class Client:
    """A slow client writes only ``share`` of the rows. ``module``: the module that must be installed."""

    write: Callable[[pa.Table, str, str], None]
    module: str = "kafka_sink"
    share: float = 1.0
    writes: bool = True


CLIENTS = {
    OURS: Client(ours),
    "confluent-kafka produce_batch": Client(produce_batch, "confluent_kafka", 0.5),
    "confluent-kafka produce": Client(produce, "confluent_kafka", 0.25),
    "confluent-kafka AIOProducer": Client(by_row(python_clients.aio_producer), "confluent_kafka.aio", 0.05),
    "arrow-kafka-pyo3, as Avro": Client(arrow_kafka, "arrow_kafka_pyo3", 0.25),
    "Ray Data's sink, rows as JSON": Client(ray_data, "ray", 0.05),
    "aiokafka": Client(by_row(python_clients.aiokafka), "aiokafka", 0.05),
    "kafka-python": Client(by_row(python_clients.kafka_python), "kafka", 0.05),
    BOUND: Client(bound, writes=False),
}


# -- one measurement, in a process of its own -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """Rows a second, and nanoseconds of the client's processor time a row."""

    rows_per_s: float
    client_ns: float


def measure(name: str, rows: int, size: int, bootstrap: str, topic: str) -> Job:
    """Measure in this process. Imports and the first connections come before the measurement."""
    client = CLIENTS[name]
    table = rows_of(rows, size)
    client.write(table.slice(0, 1000), bootstrap, f"{topic}-first")
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    client.write(table, bootstrap, topic)
    taken, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Job(table.num_rows / taken, cpu_s / table.num_rows * 1e9)


def run_client(name: str, rows: int, size: int, broker: LocalBroker, topic: str, python: str) -> Job:
    """Creates its topics, and checks that all rows arrived. ``python`` is the client's interpreter."""
    for one in (topic, f"{topic}-first"):
        broker.create_topic(one, PARTITIONS)
    os.sync()  # the previous client's data is on the disk
    command = [python, "-m", "benchmarks.arrow_clients", "--client", name, "--rows", str(rows)]
    command += ["--size", str(size), "--bootstrap", broker.bootstrap_servers, "--topic", topic]
    done = subprocess.run(command, env=environment(python), check=True, stdout=subprocess.PIPE, text=True)
    job = Job(**json.loads(done.stdout.splitlines()[-1]))
    if CLIENTS[name].writes:
        arrived = rows_in(broker.bootstrap_servers, topic)
        wanted = max(1, rows // BATCH_ROWS) * BATCH_ROWS
        assert arrived == wanted, f"{name}: {arrived} of {wanted} rows arrived"
    return job


def has(python: str, module: str) -> bool:
    """Whether a module can be imported in this interpreter."""
    done = subprocess.run([python, "-c", f"import {module}"], stderr=subprocess.DEVNULL, check=False)
    return done.returncode == 0


def run_all(rows: int, repeats: int, shapes: dict[int, float], beside: str | None = None) -> dict[str, Any]:
    pythons = {
        name: next((python for python in (sys.executable, beside) if python and has(python, one.module)), "")
        for name, one in CLIENTS.items()
    }
    installed = [name for name, python in pythons.items() if python]
    for name in set(CLIENTS) - set(installed):
        print(f"{name}: not measured, as {CLIENTS[name].module} is not installed")
    jobs: dict[str, dict[str, list[dict[str, float]]]] = {}
    with LocalBroker() as broker:
        for size, share in shapes.items():
            found: dict[str, list[dict[str, float]]] = {name: [] for name in installed}
            for number in range(repeats):
                for place, name in enumerate(random.Random(number).sample(installed, len(installed))):
                    wanted = int(rows * share * CLIENTS[name].share)
                    job = run_client(
                        name, wanted, size, broker, f"clients-{size}-{number}-{place}", pythons[name]
                    )
                    found[name].append(asdict(job))
                    print(f"  {size} B, round {number}  {name:32}{job.rows_per_s:12,.0f} rows/s"
                          f"{job.client_ns:9,.0f} ns a row", flush=True)  # fmt: skip
            jobs[str(size)] = found
    conditions = (
        f"lz4, keys of 10 bytes, {PARTITIONS} partitions, all rows acknowledged, one process each; medians "
        f"of {repeats} rounds; {machine()}"
    )
    return {"rows": rows, "conditions": conditions, "jobs": jobs}


def medians(jobs: list[dict[str, float]]) -> Job:
    """Each figure's median."""
    return Job(*(statistics.median(job[field] for job in jobs) for field in Job.__slots__))


def report(run: dict[str, Any]) -> None:
    """Prints medians and ratios."""
    print(f"\n{run['conditions']}")
    for size, jobs in run["jobs"].items():
        found = {name: medians(of_one) for name, of_one in jobs.items()}
        mine = found[OURS]
        print(
            f"\n{size + ' B':34}{'rows/s':>12}{'ns a row':>10}{'ours is faster by':>20}{'and cheaper by':>16}"
        )
        for name, job in found.items():
            ratios = f"{mine.rows_per_s / job.rows_per_s:20.2f}{job.client_ns / mine.client_ns:16.2f}"
            print(f"{name:34}{job.rows_per_s:12,.0f}{job.client_ns:10,.0f}{ratios}")
        best = max(job.rows_per_s for name, job in found.items() if name not in (OURS, BOUND))
        faster, dearer = mine.rows_per_s / best, mine.client_ns / found[BOUND].client_ns
        print(f"rows a second beside the best other client: {faster:.2f} (goal {TIMES_FASTER})")
        print(f"processor time beside the bound: {dearer:.2f} (goal {TIMES_BOUND})")


def plot(run: dict[str, Any], file: Path) -> None:
    """A row of axes for each size of rows."""
    made, all_axes = charts.figure(
        "Arrow data to Kafka without Spark: rate, and what it costs",
        [run["conditions"], f"{BOUND}: no client can take less with this codec"],
        (11, 5.6),
        len(run["jobs"]),
        2,
        sharey="row",
    )
    for (rates, costs), (size, jobs) in zip(all_axes, run["jobs"].items(), strict=True):
        found = {name: medians(of_one) for name, of_one in jobs.items()}
        names = list(found)
        colours = [
            charts.OURS if name == OURS else charts.SHADE if name == BOUND else charts.OTHER for name in names
        ]
        millions = [found[name].rows_per_s / 1e6 for name in names]
        charts.label(
            rates, charts.bars(rates, names, millions, color=colours), [f"{one:.2f}" for one in millions]
        )
        micros = [found[name].client_ns / 1e3 for name in names]
        charts.label(
            costs, charts.bars(costs, names, micros, color=colours), [f"{one:.2f}" for one in micros]
        )
        rates.set_title(f"values of {int(size):,} bytes")
        costs.set_xscale("log")
        costs.set_xlim(right=2 * max(micros))
    all_axes[-1, 0].set_xlabel("million rows per second, acknowledged")
    all_axes[-1, 1].set_xlabel("microseconds of processor time a row (logarithmic)")
    charts.save(made, file)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--beside", metavar="PYTHON", help="the interpreter of clients not installed here")
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--client", choices=CLIENTS, help="one measurement in this process")
    parser.add_argument("--size", type=int, default=110)
    parser.add_argument("--bootstrap")
    parser.add_argument("--topic")
    options = parser.parse_args()
    if options.client:
        job = measure(options.client, options.rows, options.size, options.bootstrap, options.topic)
        print(json.dumps(asdict(job)))
        return
    if options.smoke:
        report(run_all(1, 1, {110: 1.0}))
        return
    run = run_all(options.rows, options.repeats, SHAPES, options.beside)
    report(run)
    keep("arrow_clients", run, plot)


if __name__ == "__main__":
    main()
