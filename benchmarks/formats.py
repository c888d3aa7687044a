"""Rows as Avro, JSON and Protobuf, by this sink, by Spark's functions with its JVM sink, and by serializers.

    python -m benchmarks.formats [--rows N] [--repeats N] [--formats NAME,...] [--smoke]

Rows of 10 flat and of 40 nested fields from Parquet, lz4, four partitions, local[2], a real broker on this
machine, a registry that answers every request with one id. Contenders take turns, in an order drawn anew for
each round; the first round is apart, since caches are cold in it. "tune" is with the settings of
``kafka_sink.tune``. Spark's functions neither register schemas nor write their ids. Serializers that take one
row at a time write a share of the rows. Needs pyspark 4.1.1 for the JVM sink and its functions. A contender
that is not installed, or whose jar Maven Central does not have, is left out, which the output says.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2

from benchmarks import charts, peers
from benchmarks.surroundings import delete_topic, keep, machine, parser_of
from benchmarks.throughput import PARTITIONS, Job, medians, run_job, session
from benchmarks.value_sizes import with_tune
from kafka_sink.formats.registry import derived_schema
from local_kafka import LocalBroker
from tests.support.http_server import Response, Server

FORMATS = ("avro", "json", "protobuf")
FLAT, NESTED = "10 flat fields", "40 nested fields"
OURS, TUNE = "kafka-chunked", "kafka-chunked, tune"
SPARK, CONFLUENT, PYO3 = "to_{}, JVM sink", "confluent-kafka's serializer", "arrow-kafka-pyo3"
# Ours, theirs: at most this share of their processor time, for Avro.
GOALS = ((OURS, SPARK.format("avro"), 1.0), (TUNE, SPARK.format("avro"), 0.8))
# About the bytes of a row, for ``kafka_sink.tune``.
ROW_BYTES = {FLAT: 120, NESTED: 350}
# The share of all rows that serializers write which take one row at a time.
SHARE = 0.1
_REGISTRY_JSON = "application/vnd.schemaregistry.v1+json"
_SAMPLE = 10_000

COLUMNS: Mapping[str, tuple[str, ...]] = {
    FLAT: (
        "id",
        "cast(id % 999983 as int) as user",
        "concat('event-', id % 17) as event",
        "concat('/item/', (id * 31) % 99999989) as page",
        "cast((id * 17) % 9973 as int) as ms",
        "id % 3 = 0 as ok",
        "id * 0.25D as price",
        "timestamp_micros(1700000000000000 + id * 1000) as at",
        "cast(id % 1000 as float) as score",
        "if(id % 5 = 0, null, concat('session-', id % 4001)) as session",
    ),
    NESTED: (
        "id",
        "timestamp_micros(1700000000000000 + id * 1000) as at",
        "concat('kind-', id % 7) as kind",
        "cast(3 as int) as version",
        """named_struct('id', id % 9973, 'name', concat('name ', id % 9973), 'email',
            concat('user', id % 9973, '@example.com'), 'age', cast(id % 90 as int), 'vip', id % 11 = 0,
            'since', timestamp_micros(1600000000000000 + id * 77), 'score', id * 0.5D,
            'segment', if(id % 4 = 0, null, concat('s', id % 5)),
            'address', named_struct('street', concat(id % 300, ' Main Street'),
                'city', concat('City ', id % 50), 'zip', format_string('%05d', id % 99999), 'country', 'DE',
                'lat', 48 + id * 1e-7D, 'lon', 11 + id * 1e-7D)) as customer""",
        """named_struct('number', id * 3, 'currency', 'EUR', 'total', id * 1.25D, 'discount', 0.1D,
            'items', transform(sequence(1, cast(id % 3 + 1 as int)), n -> named_struct(
                'sku', concat('sku-', n), 'quantity', n, 'price', n * 9.99D, 'gift', n = 2))) as purchase""",
        """named_struct('os', concat('os', id % 3), 'model', concat('model ', id % 40), 'release', '17.2',
            'screen', named_struct('width', 1170, 'height', 2532, 'ratio', cast(2.5 as float))) as device""",
        """named_struct('a', id * 0.1D, 'b', id * 0.2D, 'c', id * 0.3D, 'd', id * 0.4D, 'e', id * 0.5D,
            'f', id * 0.6D) as metrics""",
        "array(concat('tag', id % 9), concat('tag', id % 8)) as tags",
        "map('source', 'bench', 'run', concat('r', id % 100)) as labels",
    ),
}  # fmt: skip


# -- Protobuf's schema of a DataFrame ----------------------------------------------------------------------

_SCALARS = {
    "string": 9,
    "bigint": 3,
    "int": 5,
    "boolean": 8,
    "double": 1,
    "float": 2,
    "timestamp": ".google.protobuf.Timestamp",
}
_MESSAGE, _REPEATED = 11, 3


def protobuf_files(schema: Any) -> descriptor_pb2.FileDescriptorSet:
    """The message ``Row`` with the DataFrame's columns, after the files that it imports."""
    file = descriptor_pb2.FileDescriptorProto(name="row.proto", package="bench", syntax="proto3")
    file.dependency.append(timestamp_pb2.DESCRIPTOR.name)
    _add_fields(file.message_type.add(name="Row"), schema, ".bench.Row")
    known = descriptor_pb2.FileDescriptorProto.FromString(timestamp_pb2.DESCRIPTOR.serialized_pb)
    return descriptor_pb2.FileDescriptorSet(file=[known, file])


def _add_fields(message: Any, struct: Any, scope: str) -> None:
    for number, column in enumerate(struct.fields, 1):
        field = message.field.add(name=column.name, number=number, label=1)
        kind = column.dataType
        if kind.typeName() == "array":
            field.label, kind = _REPEATED, kind.elementType
        name = f"{column.name.capitalize()}Entry"
        if kind.typeName() == "map":
            entry = message.nested_type.add(name=name)
            entry.options.map_entry = True
            entry.field.add(name="key", number=1, label=1, type=_SCALARS["string"])
            entry.field.add(name="value", number=2, label=1, type=_SCALARS[kind.valueType.simpleString()])
            field.label, field.type, field.type_name = _REPEATED, _MESSAGE, f"{scope}.{name}"
        elif kind.typeName() == "struct":
            _add_fields(message.nested_type.add(name=name), kind, f"{scope}.{name}")
            field.type, field.type_name = _MESSAGE, f"{scope}.{name}"
        elif isinstance(named := _SCALARS[kind.simpleString()], str):
            field.type, field.type_name = _MESSAGE, named
        else:
            field.type = named


def _message_class(files: bytes) -> Any:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(files).file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("bench.Row"))


# -- the contenders ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """``avro`` and ``json`` are schemas, ``protobuf`` is a FileDescriptorSet."""

    shape: str
    frame: Any
    avro: str
    json: str
    protobuf: bytes
    registry: str

    def schema(self, format_name: str) -> str:
        if format_name == "protobuf":
            file = descriptor_pb2.FileDescriptorSet.FromString(self.protobuf).file[1]
            return base64.b64encode(file.SerializeToString()).decode()
        return str(getattr(self, format_name))


def case_of(shape: str, frame: Any, registry: str) -> Case:
    field = pa.field("value", pa.struct(list(frame.limit(0).toArrow().schema)), nullable=False)
    avro, schema = (derived_schema(name, field, "bench.Row").text for name in ("avro", "json"))
    return Case(shape, frame, avro, schema, protobuf_files(frame.schema).SerializeToString(), registry)


def _ours(case: Case, format_name: str) -> peers.Write:
    options = {
        "value.format": format_name,
        "value.schema": case.schema(format_name),
        "schema.registry.url": case.registry,
    }

    def write(frame: Any, bootstrap: str, topic: str) -> None:
        given = {**options, "kafka.bootstrap.servers": bootstrap, "kafka.compression.type": "lz4"}
        frame.write.format("kafka-chunked").mode("append").options(**given).option("topic", topic).save()

    return write


def _spark(case: Case, format_name: str, folder: str) -> peers.Write:
    """Spark's function for the format, followed by Spark's sink."""
    from pyspark.sql import functions
    from pyspark.sql.avro.functions import to_avro
    from pyspark.sql.protobuf.functions import to_protobuf

    file = Path(folder) / f"{case.shape.split()[0]}.desc"
    file.write_bytes(case.protobuf)
    row = functions.struct("*")
    encoded = {
        "avro": lambda: to_avro(row, case.avro),
        "json": lambda: functions.to_json(row),
        "protobuf": lambda: to_protobuf(row, "bench.Row", str(file)),
    }

    def write(frame: Any, bootstrap: str, topic: str) -> None:
        values = frame.select(encoded[format_name]().alias("value"))
        peers.sink("kafka", peers.LZ4)(values, bootstrap, topic)

    return write


def _serializer(schema: str, files: bytes, registry: str, format_name: str) -> Any:
    """Confluent's serializer of dictionaries."""
    from confluent_kafka.schema_registry import SchemaRegistryClient
    from confluent_kafka.schema_registry.avro import AvroSerializer
    from confluent_kafka.schema_registry.json_schema import JSONSerializer
    from confluent_kafka.schema_registry.protobuf import ProtobufSerializer

    client = SchemaRegistryClient({"url": registry})
    if format_name == "avro":
        return AvroSerializer(client, schema)
    if format_name == "json":

        def texts(row: dict[str, Any], _: Any) -> Any:
            return json.loads(json.dumps(row, default=lambda value: value.isoformat() + "Z"))

        return JSONSerializer(schema, client, texts, {"auto.register.schemas": True, "validate": False})
    row_class = _message_class(files)
    serialize = ProtobufSerializer(row_class, client, {"use.deprecated.format": False})
    return lambda row, context: serialize(row_class(**row), context)


def _confluent(case: Case, format_name: str) -> peers.Write:
    schema = case.avro if format_name == "avro" else case.json
    files, registry = case.protobuf, case.registry

    def write(frame: Any, bootstrap: str, topic: str) -> None:
        def send(rows: Iterator[Any]) -> None:
            from confluent_kafka import Producer
            from confluent_kafka.serialization import MessageField, SerializationContext

            producer = Producer({"bootstrap.servers": bootstrap, **peers.TUNED})
            serialize = _serializer(schema, files, registry, format_name)
            context = SerializationContext(topic, MessageField.VALUE)
            for row in rows:
                producer.produce(topic, serialize(row.asDict(recursive=True), context))
                producer.poll(0)
            assert producer.flush() == 0

        frame.foreachPartition(send)

    return write


def _pyo3(case: Case) -> peers.Write:
    registry = case.registry

    def write(frame: Any, bootstrap: str, topic: str) -> None:
        def send(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            from arrow_kafka_pyo3 import ArrowKafkaSink

            sink = ArrowKafkaSink(bootstrap, registry, linger_ms=20, batch_size=1 << 20,
                                  compression_type="lz4", acks="all", max_in_flight=5)  # fmt: skip
            for batch in batches:
                sink.consume_arrow(pa.Table.from_batches([batch]), topic)
            sink.flush(timeout_ms=120_000)
            sink.close()
            yield from ()

        frame.mapInArrow(send, "done boolean").collect()

    return write


def contenders(case: Case, format_name: str, functions: set[str], folder: str) -> list[peers.Contender]:
    """The contenders that can run here. ``functions`` are the formats for which Spark has its function."""
    ours = peers.Contender(OURS, _ours(case, format_name))
    everyone = [ours, with_tune(ours, ROW_BYTES[case.shape])]
    if format_name in functions:
        everyone.append(peers.Contender(SPARK.format(format_name), _spark(case, format_name, folder)))
    everyone.append(peers.Contender(CONFLUENT, _confluent(case, format_name), SHARE))
    # It has no Avro for nested columns.
    if format_name == "avro" and case.shape == FLAT and importlib.util.find_spec("arrow_kafka_pyo3"):
        everyone.append(peers.Contender(PYO3, _pyo3(case), SHARE))
    return everyone


# -- measuring ---------------------------------------------------------------------------------------------


def spark_functions() -> tuple[set[str], list[str]]:
    """The formats for which Spark's function is there, and the jars of these and of Spark's sink."""
    found, jars = {"json"}, peers.jvm_sink_jars()
    for name in ("avro", "protobuf"):
        try:
            jars = [*jars, *peers.jvm_sink_jars([_jar_of(name)])[len(peers.JVM_SINK) :]]
            found.add(name)
        except subprocess.CalledProcessError:
            print(f"to_{name} is not measured: its jar cannot be fetched", flush=True)
    return found, jars


def _jar_of(format_name: str) -> tuple[str, str, str]:
    return ("org.apache.spark", f"spark-{format_name}_2.13", peers.JVM_SINK_SPARK)


def _respond(request: BaseHTTPRequestHandler) -> Response:
    """The responses of a registry in which every schema has the same id."""
    is_about_subjects = "/associations/" in request.path
    return 200, {"Content-Type": _REGISTRY_JSON}, b"[]" if is_about_subjects else b'{"id": 1, "version": 1}'


def source(spark: Any, shape: str, rows: int, folder: str) -> Any:
    path = f"{folder}/{shape.split()[0]}-{rows}"
    spark.range(0, rows, 1, 2).selectExpr(*COLUMNS[shape]).write.mode("overwrite").parquet(path)
    return spark.read.parquet(path)


def value_bytes(bootstrap: str, topic: str, count: int) -> float:
    """The average size of ``count`` of a topic's values."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": topic})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    try:
        sizes = [len(message.value() or b"") for message in consumer.consume(count, 30)]
    finally:
        consumer.close()
    return statistics.mean(sizes)


def measure(
    broker: LocalBroker, everyone: list[peers.Contender], frames: Mapping[float, Any], rows: int, repeats: int
) -> dict[str, dict[str, Any]]:
    """The jobs of each contender, the cold one first, and the bytes of a value."""
    jobs: dict[str, dict[str, Any]] = {one.name: {"bytes": 0.0, "jobs": []} for one in everyone}
    for number in range(repeats + 1):
        for one in random.Random(number).sample(everyone, len(everyone)):
            topic = f"t{time.monotonic_ns()}"
            broker.create_topic(topic, PARTITIONS)
            os.sync()  # the previous contender's data is on the disk
            sent = frames[one.share]
            bootstrap = broker.bootstrap_servers
            job = run_job(one, sent, int(rows * one.share), {broker.pid(0)}, bootstrap, topic)
            jobs[one.name]["jobs"].append(asdict(job))
            print(
                f"  {number} {one.name:32} {job.rows_per_s:12,.0f} rows/s {job.spark_s:8.2f} us", flush=True
            )
            if number == 0:
                sample = min(_SAMPLE, int(rows * one.share))
                jobs[one.name]["bytes"] = value_bytes(bootstrap, topic, sample)
            delete_topic(bootstrap, topic)
    return jobs


def steady(found: Mapping[str, Any]) -> Job:
    """The medians of all rounds but the first."""
    return medians([Job(**job) for job in found["jobs"][1:]])


def report(run: Mapping[str, Any]) -> None:
    for name, jobs in run["jobs"].items():
        print(f"\n{name:42}{'bytes':>8}{'rows/s':>12}{'Spark us':>10}{'broker us':>10}", flush=True)
        for contender, found in jobs.items():
            job = steady(found)
            print(
                f"{contender:42}{found['bytes']:8.0f}{job.rows_per_s:12,.0f}{job.spark_s:10.2f}{job.broker_s:10.2f}"
            )
        for ours, theirs, goal in GOALS:
            if theirs in jobs:
                share = steady(jobs[ours]).spark_s / steady(jobs[theirs]).spark_s
                print(f"{ours} / {theirs}: {share:.2f} of the processor time (goal {goal})", flush=True)


def plot(run: Mapping[str, Any], file: Path) -> None:
    """Rates and processor time, one row of axes for each format and shape."""
    heights = [len(jobs) for jobs in run["jobs"].values()]
    made, all_axes = charts.figure(
        "Rows as Avro, JSON and Protobuf: rate, and what it costs",
        [run["conditions"], "labels: microseconds of processor time a row, Spark with its workers + broker"],
        (11, 1.6 + 0.4 * sum(heights)),
        len(heights),
        2,
        height_ratios=heights,
        sharey="row",
    )
    for (rates, costs), (title, jobs) in zip(all_axes, run["jobs"].items(), strict=True):
        found = {f"{name} ({one['bytes']:.0f} B)": steady(one) for name, one in jobs.items()}
        names = list(found)
        colours = [charts.OURS if name.startswith("kafka-chunked") else charts.OTHER for name in names]
        millions = [job.rows_per_s / 1e6 for job in found.values()]
        charts.label(
            rates, charts.bars(rates, names, millions, color=colours), [f"{one:.2f}" for one in millions]
        )
        spark, brokers = [job.spark_s for job in found.values()], [job.broker_s for job in found.values()]
        drawn = charts.bars(costs, names, spark, color=colours)
        charts.label(
            costs, drawn, [f"{one:.2f} + {other:.2f}" for one, other in zip(spark, brokers, strict=True)]
        )
        costs.set_xscale("log")
        costs.set_xlim(0.5 * min(spark), 4 * max(spark))
        rates.set_title(title)
    all_axes[-1, 0].set_xlabel("million rows per second, acknowledged (median)")
    all_axes[-1, 1].set_xlabel("microseconds of processor time a row (median, logarithmic)")
    charts.save(made, file)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of 10 fields; a quarter of 40 fields")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--formats", default=",".join(FORMATS))
    options = parser.parse_args()
    rows, repeats = (4000, 1) if options.smoke else (options.rows, options.repeats)
    functions, jars = (set(), []) if options.smoke or not peers.jvm_sink_is_there() else spark_functions()
    import pyspark

    conditions = f"{rows:,} rows of 10 fields, {rows // 4:,} of 40, lz4, {PARTITIONS} partitions, "
    conditions += f"pyspark {pyspark.__version__} local[2], {machine()}"
    run: dict[str, Any] = {"conditions": conditions, "jobs": {}}
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        LocalBroker() as broker,
        Server() as registry,
        session(False, {"spark.jars": ",".join(jars)} if jars else {}) as spark,
    ):
        registry.respond = _respond
        for shape, of_shape in ((FLAT, rows), (NESTED, rows // 4)):
            frames = {share: source(spark, shape, int(of_shape * share), folder) for share in (1.0, SHARE)}
            case = case_of(shape, frames[1.0], registry.url)
            for name in options.formats.split(","):
                everyone = contenders(case, name, functions, folder)
                run["jobs"][f"{name}, {shape}"] = measure(broker, everyone, frames, of_shape, repeats)
    report(run)
    if not options.smoke:
        keep("formats", run, plot)


if __name__ == "__main__":
    main()
