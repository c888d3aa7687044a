"""What TLS costs: rows per second and processor time, in clear and encrypted, beside Spark's JVM sink.

    python -m benchmarks.tls [--rows N] [--repeats N] [--smoke]

Keyed 110-byte rows without compression, as TLS costs by the byte; four partitions, local[2], a real broker on
the same machine with a listener for each. Contenders take turns within a round. Processor time is that of
Spark with its Python workers, the broker's is apart. Needs pyspark 4.1.1 for the JVM sink.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.processor_time import Meter
from benchmarks.surroundings import RESULTS
from benchmarks.throughput import PARTITIONS, count, session, source
from kafka_sink.local_broker import LocalBroker
from tests.support.security.certificates import Authority


def run(rows: int, repeats: int, with_jvm: bool) -> dict[str, Any]:
    folder = tempfile.mkdtemp(prefix="kafka-chunked-bench-")
    trust = str(Path(folder) / "authority.pem")
    authority = Authority()
    authority.pem_file(Path(trust))
    authority.issue("broker", "127.0.0.1").pem_file(Path(folder) / "broker.pem")
    properties = {
        "listener.name.tls.ssl.keystore.type": "PEM",
        "listener.name.tls.ssl.keystore.location": f"{folder}/broker.pem",
    }
    ways = {
        "in clear": {},
        "TLS": {
            "kafka.security.protocol": "SSL",
            "kafka.ssl.truststore.type": "PEM",
            "kafka.ssl.truststore.location": trust,
        },
    }
    sinks = {"kafka-chunked": "kafka-chunked", **({"JVM sink": "kafka"} if with_jvm else {})}
    results: dict[str, list[dict[str, float]]] = {}
    try:
        with LocalBroker(properties=properties, extra_listeners={"TLS": "SSL"}) as broker:
            spark = session(with_jvm)
            frame = source(spark, rows, folder)
            brokers = {"in clear": broker.bootstrap_servers, "TLS": broker.bootstrap_for("TLS")}
            contenders = [(sink, way) for sink in sinks for way in ways]
            for number in range(repeats + 1):
                turn = number % len(contenders)
                for sink, way in contenders[turn:] + contenders[:turn]:
                    topic = f"{sinks[sink]}-{way.replace(' ', '-')}-{number}"
                    broker.create_topic(topic, PARTITIONS)
                    meter = Meter(spark.sparkContext._gateway.proc.pid, {broker.pid(0)})
                    started = time.perf_counter()
                    writer = frame.write.format(sinks[sink]).mode("append").options(**ways[way])
                    writer.option("kafka.bootstrap.servers", brokers[way]).option("topic", topic).save()
                    taken = time.perf_counter() - started
                    spark_s, broker_s = meter.read()
                    assert count(broker.bootstrap_servers, topic) == rows
                    one = {
                        "rows_per_s": rows / taken,
                        "spark_ns_a_row": spark_s / rows * 1e9,
                        "broker_ns_a_row": broker_s / rows * 1e9,
                    }
                    print(f"  {number} {sink:14} {way:9}", {k: round(v) for k, v in one.items()}, flush=True)
                    if number:
                        results.setdefault(f"{sink}, {way}", []).append(one)
            spark.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        name: {field: statistics.median(one[field] for one in found) for field in found[0]}
        for name, found in results.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="tiny input, no files: does it run at all")
    options = parser.parse_args()
    rows, repeats = (4000, 1) if options.smoke else (options.rows, options.repeats)

    medians = run(rows, repeats, peers.jvm_sink_is_there() and not options.smoke)
    print(f"\n{'medians':26}{'rows/s':>12}{'Spark ns/row':>14}{'broker ns/row':>15}")
    for name, one in medians.items():
        print(
            f"{name:26}{one['rows_per_s']:12,.0f}{one['spark_ns_a_row']:14,.0f}{one['broker_ns_a_row']:15,.0f}"
        )
    if not options.smoke:
        RESULTS.mkdir(exist_ok=True)
        shown = {"rows": rows, "repeats": repeats, "medians": medians}
        (RESULTS / "tls.json").write_text(json.dumps(shown, indent=1) + "\n")


if __name__ == "__main__":
    main()
