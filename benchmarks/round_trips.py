"""The requests of a job and of a micro-batch, in the order of time, with brokers that respond late.

    python -m benchmarks.round_trips [--delay 500] [--brokers 1] [--batches 6]

Each line is one request: when it was sent, how long its response took, the connection, the broker and the
API. A write cannot be faster than its longest chain of requests of which each was sent after the response to
the one before, so the length of that chain is printed for each write.
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.far_brokers import FarProxy
from benchmarks.streaming import await_batches
from benchmarks.surroundings import parser_of, spark_session
from kafka_sink.network.apis import APIS
from local_kafka import LocalBroker
from tests.support.proxy import REQUEST, RESPONSE, frames

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GUARANTEES = ("at-least-once", "exactly-once")
# These requests are not part of a write: client metrics send them.
_OF_METRICS = ("GetTelemetrySubscriptions", "PushTelemetry")


@dataclass
class Exchange:
    """One request and when its response was passed on, in seconds."""

    connection: str
    api: str
    sent_s: float
    answered_s: float = 0.0


class Log:
    """The exchanges of all proxies, in the order in which they were sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards both collections: each connection has its own threads
        self._exchanges: list[Exchange] = []
        self._connections: dict[Any, str] = {}

    def sent(self, pair: Any, port: int, api_key: int, version: int) -> Exchange:
        name = f"{APIS[api_key].name} v{version}" if api_key in APIS else f"API {api_key} v{version}"
        with self._lock:
            number = self._connections.setdefault(pair, f"{len(self._connections) + 1:3} to :{port}")
            self._exchanges.append(Exchange(number, name, time.monotonic()))
            return self._exchanges[-1]

    def taken(self) -> list[Exchange]:
        """The exchanges since the last call, without those that are not part of a write."""
        with self._lock:
            exchanges, self._exchanges = self._exchanges, []
        return [one for one in exchanges if one.answered_s and not one.api.startswith(_OF_METRICS)]


class LoggedProxy(FarProxy):
    """A FarProxy that records the requests."""

    def __init__(self, target: tuple[str, int], round_trip_s: float, log: Log) -> None:
        self._log = log
        self._seen: dict[Any, dict[int, Exchange]] = {}
        super().__init__(target)
        self.round_trip_s = round_trip_s

    def _questions(self, pair: Any) -> None:
        received = bytearray()
        open_ones = self._seen.setdefault(pair.client, {})
        while data := pair.client.recv(64 * 1024):
            received += data
            for frame in frames(received):
                api_key, version, correlation = struct.unpack_from(">hhi", frame, 4)
                pair.asked[correlation] = (api_key, version)
                open_ones[correlation] = self._log.sent(pair, self.target[1], api_key, version)
            self._forward(pair.broker, data, REQUEST)

    def _forward(self, sink: Any, data: bytes, direction: str) -> None:
        if direction == RESPONSE:
            exchange = self._seen[sink].pop(int.from_bytes(data[4:8], "big"), None)
            if exchange is not None:
                exchange.answered_s = time.monotonic() + self.round_trip_s / 2
        super()._forward(sink, data, direction)


def chain(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """The longest chain of exchanges of which each was sent after the response to the one before."""
    longest: list[Exchange] = []
    for exchange in sorted(exchanges, key=lambda one: one.answered_s):
        if not longest or exchange.sent_s >= longest[-1].answered_s:
            longest.append(exchange)
    return longest


def report(title: str, began_s: float, ended_s: float, exchanges: Sequence[Exchange]) -> None:
    links = chain(exchanges)
    print(f"\n== {title}: {ended_s - began_s:.2f} s, {len(exchanges)} requests, {len(links)} in sequence")
    for one in exchanges:
        mark = "*" if one in links else " "
        took_ms = (one.answered_s - one.sent_s) * 1000
        print(f"{mark} {(one.sent_s - began_s) * 1000:8.0f} ms {took_ms:6.0f} ms {one.connection}  {one.api}")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--delay", type=float, default=500.0)
    parser.add_argument("--brokers", type=int, default=1)
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--guarantees", nargs="+", choices=GUARANTEES, default=GUARANTEES)
    arguments = parser.parse_args()
    log = Log()
    with LocalBroker(brokers=arguments.brokers) as cluster, tempfile.TemporaryDirectory() as folder:
        for topic in ("jobs", "warm-up", *(f"stream-{one}" for one in GUARANTEES)):
            cluster.create_topic(topic, 4)
        spark = spark_session()
        # This starts Spark's Python processes and the brokers' internal topics, without the delay.
        for guarantee in GUARANTEES:
            _write(spark, cluster.bootstrap_servers, "warm-up", guarantee)
        targets = [entry.rpartition(":") for entry in cluster.bootstrap_servers.split(",")]
        proxies = [LoggedProxy((host, int(port)), arguments.delay / 1000, log) for host, _, port in targets]
        for proxy in proxies:
            proxy.rewrite = {other.target: ("127.0.0.1", other.port) for other in proxies}
        bootstrap = ",".join(proxy.address for proxy in proxies)
        try:
            for guarantee in arguments.guarantees:
                began = time.monotonic()
                _write(spark, bootstrap, "jobs", guarantee)
                report(f"cold job of 1,000 rows, {guarantee}", began, time.monotonic(), log.taken())
            for guarantee in arguments.guarantees:
                _stream(spark, bootstrap, guarantee, Path(folder), arguments.batches, log)
        finally:
            # The proxies' threads end with this process.
            spark.stop()
    return 0


def _write(spark: SparkSession, bootstrap: str, topic: str, guarantee: str) -> None:
    rows = spark.range(0, 1000, 1, 2).selectExpr("cast(id as string) value")
    rows.write.format("kafka-chunked").mode("append").options(**_options(bootstrap, topic, guarantee)).save()


def _stream(
    spark: SparkSession, bootstrap: str, guarantee: str, folder: Path, batches: int, log: Log
) -> None:
    """Report the last of these micro-batches; the ones before open the connections."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1000)
    frame = source.option("numPartitions", 2).load().selectExpr("cast(value as string) value")
    options = _options(bootstrap, f"stream-{guarantee}", guarantee)
    writer = frame.writeStream.format("kafka-chunked").options(**options)
    query = writer.option("checkpointLocation", str(folder / guarantee)).start()
    await_batches(query, batches)
    query.stop()
    progress = [json.loads(one.json) for one in query.recentProgress][:batches]
    times = [one["durationMs"].get("triggerExecution", 0) for one in progress]
    print(f"\nmicro-batches {guarantee}: {times} ms")
    exchanges = log.taken()
    last = progress[-1]["durationMs"]["triggerExecution"] / 1000
    # The clock of the progress is the wall clock.
    began_wall = _wall(progress[-1]["timestamp"])
    began = began_wall - time.time() + time.monotonic()
    inside = [one for one in exchanges if began <= one.sent_s <= began + last]
    report(f"warm micro-batch, {guarantee}", began, began + last, inside)


def _wall(timestamp: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()


def _options(bootstrap: str, topic: str, guarantee: str) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": bootstrap,
        "topic": topic,
        "delivery.guarantee": guarantee,
        "log.summary": "false",
    }


if __name__ == "__main__":
    sys.exit(main())
