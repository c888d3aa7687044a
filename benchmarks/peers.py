"""The peers, each writing (key, value) rows of a DataFrame to a topic in its usual way."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage

from benchmarks import python_clients

CACHE = Path.home() / ".cache" / "kafka-chunked" / "benchmark-jars"
# The last Spark whose own sink can be had whole, and that the benchmarks compare with.
JVM_SINK_SPARK = "4.1.1"
# Later versions of the token provider are not on Maven Central; nothing of it is used here.
JVM_SINK = (
    ("org.apache.spark", "spark-sql-kafka-0-10_2.13", JVM_SINK_SPARK),
    ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.0.0"),
    ("org.apache.kafka", "kafka-clients", "3.9.1"),
    ("org.apache.commons", "commons-pool2", "2.12.1"),
)
LZ4 = {"compression.type": "lz4"}
TUNED = {"linger.ms": "20", "batch.size": str(1 << 20), **LZ4}
UNPREFIXED = ("coordinator.enabled", "delivery.guarantee")
Write = Callable[[Any, str, str], None]


@dataclass(frozen=True)
class Contender:
    """``write(frame, bootstrap, topic)`` returns when all rows are acknowledged. ``share`` of the rows is
    enough for a slow one: rates are compared, not times. ``writes`` is false if no row reaches the topic.
    ``keyed``: rows have keys."""

    name: str
    write: Write
    share: float = 1.0
    writes: bool = True
    keyed: bool = True


def jvm_sink_is_there() -> bool:
    """Whether this interpreter's PySpark is the one that Spark's JVM sink is compared on."""
    import pyspark

    return pyspark.__version__ == JVM_SINK_SPARK


def jvm_sink_jars(more: Sequence[tuple[str, str, str]] = ()) -> list[str]:
    """The jars of Spark's own sink and more ones, fetched once by the Ivy that PySpark carries."""
    import pyspark

    jars = Path(pyspark.__file__).parent / "jars"
    CACHE.mkdir(parents=True, exist_ok=True)
    for organisation, module, revision in (*JVM_SINK, *more):
        if (CACHE / f"{module}-{revision}.jar").exists():
            continue
        print(f"fetching {module} {revision}", flush=True)
        pattern = f"{CACHE}/[artifact]-[revision].[ext]"
        command = ["java", "-cp", f"{jars}/*", "org.apache.ivy.Main", "-notransitive", "-types", "jar"]
        command += ["-dependency", organisation, module, revision, "-confs", "default"]
        subprocess.run([*command, "-retrieve", pattern], check=True, capture_output=True)
    return [str(CACHE / f"{module}-{revision}.jar") for _, module, revision in (*JVM_SINK, *more)]


def sink(form: str, options: Mapping[str, str] = MappingProxyType({})) -> Write:
    def write(frame: Any, bootstrap: str, topic: str) -> None:
        given = {f"kafka.{name}": value for name, value in options.items() if name not in UNPREFIXED}
        given |= {name: options[name] for name in UNPREFIXED if name in options}
        given |= {"kafka.bootstrap.servers": bootstrap, "topic": topic}
        frame.write.format(form).mode("append").options(**given).save()

    return write


def _confluent(bootstrap: str, settings: Mapping[str, Any]) -> Any:
    from confluent_kafka import Producer

    return Producer({"bootstrap.servers": bootstrap, **settings})


def _produce(frame: Any, bootstrap: str, topic: str) -> None:
    def send(rows: Iterator[Any]) -> None:
        producer = _confluent(bootstrap, python_clients.LIBRDKAFKA)
        for row in rows:
            while True:
                try:
                    producer.produce(topic, row.value, row.key)
                    break
                except BufferError:
                    producer.poll(0.01)
            producer.poll(0)
        assert producer.flush() == 0

    frame.foreachPartition(send)


def produce_batches(settings: Mapping[str, Any]) -> Write:
    """confluent-kafka's ``produce_batch`` with these settings. Rows without keys have no column ``key``."""

    def send(bootstrap: str, topic: str, batches: Iterator[Any]) -> Iterator[Any]:
        producer = _confluent(bootstrap, settings)
        for batch in batches:
            values = batch.column("value").to_pylist()
            keys = batch.column("key").to_pylist() if "key" in batch.schema.names else [None] * len(values)
            rows = [{"key": key, "value": value} for key, value in zip(keys, values, strict=True)]
            while producer.produce_batch(topic, rows) < len(rows):
                # Messages that did not fit carry an error; the other messages are in the queue.
                rows = [row for row in rows if row.pop("_error", None) is not None]
                producer.poll(0.01)
            producer.poll(0)
        assert producer.flush() == 0
        yield from ()

    def write(frame: Any, bootstrap: str, topic: str) -> None:
        frame.mapInArrow(partial(send, bootstrap, topic), "done boolean").collect()

    return write


class CountingSource(DataSource):
    """Counts rows and drops them: the cost for Spark of passing rows to a Python sink."""

    @classmethod
    def name(cls) -> str:
        return "counting"

    def writer(self, schema: Any, overwrite: bool) -> CountingWriter:
        return CountingWriter()


class CountingWriter(DataSourceArrowWriter):
    """Its tasks report how many rows they got."""

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        for batch in iterator:
            len(batch)
        return WriterCommitMessage()


def count_only(frame: Any, _bootstrap: str, _topic: str) -> None:
    """Hands the rows to a sink that drops them."""
    frame.sparkSession.dataSource.register(CountingSource)
    frame.write.format("counting").mode("append").save()


def _by_row(client: Callable[[python_clients.Rows, str, str], None]) -> Write:
    """A client that takes one row at a time, in each partition of the frame."""

    def send(bootstrap: str, topic: str, rows: Iterator[Any]) -> None:
        client(((row.key, row.value) for row in rows), bootstrap, topic)

    def write(frame: Any, bootstrap: str, topic: str) -> None:
        frame.foreachPartition(partial(send, bootstrap, topic))

    return write


CONTENDERS = (
    Contender("kafka-chunked, defaults", sink("kafka-chunked", LZ4)),
    Contender("JVM sink, defaults", sink("kafka", LZ4)),
    Contender("kafka-chunked, tuned", sink("kafka-chunked", TUNED)),
    Contender("JVM sink, tuned", sink("kafka", TUNED)),
    Contender("a sink that only counts", count_only, writes=False),
    Contender("confluent-kafka produce_batch", produce_batches(python_clients.LIBRDKAFKA)),
    Contender("confluent-kafka produce", _produce, 0.5),
    Contender("confluent-kafka AIOProducer", _by_row(python_clients.aio_producer), 0.05),
    Contender("kafka-python", _by_row(python_clients.kafka_python), 0.1),
    Contender("aiokafka", _by_row(python_clients.aiokafka), 0.05),
)
