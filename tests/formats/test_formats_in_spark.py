"""Values that a schema registry knows: written by Spark, read by confluent-kafka's own deserializers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf.descriptor_pb2 import FileDescriptorProto

import kafka_sink
from local_kafka import LocalBroker
from local_kafka.schema_registry import LocalRegistry
from tests.support.protobuf_tables import in_base64
from tests.support.topics import Row, messages, read_to_end, read_topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARTITIONS = 1
Options = Callable[..., dict[str, str]]


@pytest.fixture
def options(broker: LocalBroker, registry: LocalRegistry, topic: str) -> Options:
    def made(**more: str) -> dict[str, str]:
        return {
            "kafka.bootstrap.servers": broker.bootstrap_servers,
            "schema.registry.url": registry.url,
            "topic": topic,
            **{name.replace("__", "."): value for name, value in more.items()},
        }

    return made


@pytest.fixture
def client(registry: LocalRegistry) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistryClient({"url": registry.url}) as made:
        yield made


def save(frame: DataFrame, options: dict[str, str]) -> None:
    frame.write.format("kafka-chunked").mode("append").options(**options).save()


def read_values(client: SchemaRegistryClient, topic: str, rows: list[Row]) -> list[Any]:
    deserialize = AvroDeserializer(client)
    context = SerializationContext(topic, MessageField.VALUE)
    return [deserialize(row.value, context) for row in rows]


def failure(action: Callable[[], Any]) -> str:
    """What Spark raises, its Python tracebacks included."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - Spark's classes differ by version and path
        action()
    return str(caught.value)


def test_a_stream_writes_keys_and_values_and_asks_the_registry_once(
    spark: SparkSession,
    broker: LocalBroker,
    client: SchemaRegistryClient,
    topic: str,
    options: Options,
    tmp_path: Path,
) -> None:
    frame = (
        spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 3).load()
        .selectExpr("struct(value AS id) AS key", "struct(value AS id, timestamp AS at) AS value")
    )  # fmt: skip
    query = (
        frame.writeStream.format("kafka-chunked")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .options(**options(value__format="avro", key__format="avro"))
        .trigger(processingTime="100 milliseconds")
        .start()
    )
    try:
        while len(query.recentProgress) < 3:
            query.awaitTermination(1)
            assert query.exception() is None, query.exception()
    finally:
        query.stop()
    rows = read_topic(broker, topic)
    numbers = [value["id"] for value in read_values(client, topic, rows)]
    assert len(set(numbers)) == len(numbers)
    # What was stopped in its middle is there in part.
    assert set(numbers) >= set(range(3 * len(query.recentProgress)))
    assert client.get_versions(f"{topic}-value") == [1]
    key = AvroDeserializer(client)(rows[4].key, SerializationContext(topic, MessageField.KEY))
    assert key == {"id": numbers[4]}


def test_a_row_that_does_not_fit_becomes_a_dead_letter(
    spark: SparkSession, broker: LocalBroker, client: SchemaRegistryClient, topic: str, options: Options
) -> None:
    """In a transaction, whose first row does not fit: Catches dead letters before a transaction has begun."""
    symbols = {"type": "enum", "name": "Size", "symbols": ["S", "M"]}
    schema = {"type": "record", "name": "Row", "fields": [{"name": "size", "type": symbols}]}
    client.register_schema(f"{topic}-value", Schema(json.dumps(schema), "AVRO"))
    frame = spark.sql("SELECT explode(array('XL', 'S', null, 'M')) AS size").coalesce(1)
    given = options(value__format="avro", use__latest__version="true")
    said = failure(lambda: save(frame, given))
    assert "field 'size' is null, but the schema does not allow null there, in 1 of 4 rows" in said
    dead_letters = f"{topic}-dead-letters"
    broker.create_topic(dead_letters, 1)
    more = {"errors.tolerance": "all", "errors.deadletterqueue.topic.name": dead_letters}
    save(frame, given | more | {"delivery.guarantee": "exactly-once"})
    found = read_to_end(broker.bootstrap_servers, topic)
    deserialize, context = AvroDeserializer(client), SerializationContext(topic, MessageField.VALUE)
    assert [deserialize(value, context) for value in found] == [{"size": "S"}, {"size": "M"}]
    refused = list(messages(broker.bootstrap_servers, dead_letters))
    assert sorted(message.value() or b"" for message in refused) == [b'{"size":"XL"}', b'{"size":null}']
    reasons = {dict(message.headers() or ())["__connect.errors.exception.message"] for message in refused}
    assert b"field 'size' is not a symbol of the schema's enum" in reasons


def test_topics_of_a_column_have_a_subject_each(
    spark: SparkSession, broker: LocalBroker, client: SchemaRegistryClient, topic: str, options: Options
) -> None:
    """Topic a has an older schema than topic b; a row for topic c is refused."""
    names = [f"{topic}-{one}" for one in "abc"]
    for name, kind in zip(names, ("long", "double"), strict=False):
        broker.create_topic(name, 1)
        fields = [{"name": "id", "type": "int"}, {"name": "n", "type": kind}]
        schema = json.dumps({"type": "record", "name": "Row", "fields": fields})
        client.register_schema(f"{name}-value", Schema(schema, "AVRO"))
    given = options(value__format="avro", use__latest__version="true")
    del given["topic"]
    said = failure(lambda: save(spark.range(1).selectExpr("'x' AS topic", "id"), given))
    assert "list the topics of the column 'topic' in schema.registry.topics" in said
    given["schema.registry.topics"] = ",".join(names[:2])
    frame = spark.range(6).selectExpr(
        f"concat('{topic}-', if(id % 2 = 0, 'a', 'b')) AS topic", "cast(id AS int)", "cast(id AS int) AS n"
    )
    save(frame, given)
    found = [read_values(client, name, read_topic(broker, name)) for name in names[:2]]
    assert sorted((row["id"], row["n"]) for row in found[0]) == [(0, 0), (2, 2), (4, 4)]
    assert sorted((row["id"], row["n"]) for row in found[1]) == [(1, 1.0), (3, 3.0), (5, 5.0)]
    other = frame.selectExpr(f"'{names[2]}' AS topic", "id", "n")
    assert "is not in schema.registry.topics" in failure(lambda: save(other, given))


def test_json_and_protobuf_arrive_from_every_way_of_writing(
    spark: SparkSession, broker: LocalBroker, client: SchemaRegistryClient, topic: str, options: Options
) -> None:
    frame = spark.range(3).selectExpr("id", "concat('n', id) AS name", "nullif(id, 1) AS odd")
    given = options(value__format="json")
    save(frame, given)
    kafka_sink.write(frame, given)
    kafka_sink.write_arrow(frame.toArrow(), given)
    deserialize = JSONDeserializer(None, schema_registry_client=client)
    context = SerializationContext(topic, MessageField.VALUE)
    found = [deserialize(row.value, context) for row in read_topic(broker, topic)]
    meant = [{"id": n, "name": f"n{n}", "odd": None if n == 1 else n} for n in range(3)]
    assert sorted(found, key=lambda row: row["id"]) == [row for row in meant for _ in range(3)]

    file = FileDescriptorProto(name="rows.proto", syntax="proto3")
    file.message_type.add(name="First").field.add(name="x", number=1, type=5, label=1)
    row = file.message_type.add(name="Row")
    for name, number, kind in (("id", 1, 3), ("name", 2, 9), ("odd", 3, 3)):
        row.field.add(name=name, number=number, type=kind, label=1)
    other = f"{topic}-protobuf"
    broker.create_topic(other, 1)
    given = options(value__format="protobuf", value__schema=in_base64(file), value__record__name="Row") | {
        "topic": other
    }
    save(frame, given)
    schema_id = client.get_latest_version(f"{other}-value").schema_id or 0
    values = [row.value for row in read_topic(broker, other)]
    # The message's index, as an array of one entry: length 1 and 1, zigzag.
    lead = b"\0" + schema_id.to_bytes(4, "big") + b"\x02\x02"
    assert lead + b"\x08\x02\x12\x02n2\x18\x02" in values
    assert lead + b"\x12\x02n0" in values
