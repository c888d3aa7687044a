"""Framed bytes are those of confluent-kafka's serializers, and Spark's from_avro reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import Schema as ClientSchema
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import HealthCheck, given, settings

from kafka_sink.formats.registry import derived_schema
from kafka_sink.formats.row_encoder import PartEncoder
from kafka_sink.formats.schemas import PartFormat, RegisteredSchema, Schema
from tests.support.avro_cases import tables
from tests.support.effort import tries

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SUBJECT, CONTEXT = "t-value", SerializationContext("t", MessageField.VALUE)
_FRAME = 5
Table = tuple[pa.StructArray, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def client() -> Iterator[SchemaRegistryClient]:
    """confluent-kafka's own registry, in this process."""
    with SchemaRegistryClient.new_client({"url": "mock://"}) as made:
        yield made


def registered(client: SchemaRegistryClient, schema: Schema) -> RegisteredSchema:
    return RegisteredSchema(schema, client.register_schema(SUBJECT, ClientSchema(schema.text, schema.kind)))


def framed(column: pa.StructArray, schema: RegisteredSchema, message: str = "") -> list[bytes]:
    format_name = schema.schema.kind.lower()
    part = PartFormat("value", format_name, 0, (("", schema),), message=message)
    encoder = PartEncoder(part, pa.schema([pa.field("value", column.type, nullable=False)]))
    found: list[bytes] = encoder.encoded(column, None).to_pylist()
    return found


def derived(client: SchemaRegistryClient, column: pa.StructArray, format_name: str) -> RegisteredSchema:
    field = pa.field("value", column.type, nullable=False)
    return registered(client, derived_schema(format_name, field, "com.example.Row"))


@given(tables())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=tries(100))
def test_avro_is_that_of_confluents_serializer(client: SchemaRegistryClient, table: Table) -> None:
    column, rows = table
    schema = derived(client, column, "avro")
    serialize = AvroSerializer(client, schema.schema.text, conf={"auto.register.schemas": False})
    found = framed(column, schema)
    assert found == [serialize(row, CONTEXT) for row in rows]
    deserialize = AvroDeserializer(client)
    # Read back, they are what they were: written again, they are the same bytes.
    assert [serialize(deserialize(value, CONTEXT), CONTEXT) for value in found] == found


def test_json_is_that_of_confluents_serializer(client: SchemaRegistryClient) -> None:
    """Its texts have spaces after commas and colons, so texts are compared once they are read."""
    rows = [{"id": 1, "name": 'a"b', "list": [1, None]}, {"id": None, "name": "\u00e4", "list": None}]
    column = pa.array(rows)
    schema = derived(client, column, "json")
    conf = {"auto.register.schemas": False}
    serialize = JSONSerializer(schema.schema.text, client, conf=conf)
    deserialize = JSONDeserializer(None, schema_registry_client=client)
    for value, row in zip(framed(column, schema), rows, strict=True):
        other = serialize(row, CONTEXT)
        assert value[:_FRAME] == other[:_FRAME]
        assert json.loads(value[_FRAME:]) == json.loads(other[_FRAME:])
        assert deserialize(value, CONTEXT) == row


def test_protobuf_is_that_of_confluents_serializer(client: SchemaRegistryClient) -> None:
    """A message that is not its file's first one, so that its index is written."""
    file = descriptor_pb2.FileDescriptorProto(name="rows.proto", package="p", syntax="proto3")
    file.message_type.add(name="First").field.add(name="x", number=1, type=5, label=1)
    row_type = file.message_type.add(name="Row")
    for name, number, kind, label in (("id", 1, 3, 1), ("name", 2, 9, 1), ("n", 20, 17, 3)):
        row_type.field.add(name=name, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    row_class: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName("p.Row"))
    serialize = ProtobufSerializer(row_class, client, conf={"use.deprecated.format": False})
    rows = [{"id": 7, "name": "a", "n": [1, -1, 1 << 30]}, {"id": 0, "name": "", "n": []}]
    expected = [serialize(row_class(**row), CONTEXT) for row in rows]
    latest = client.get_latest_version(SUBJECT)
    text = latest.schema.schema_str or ""
    schema = RegisteredSchema(Schema("PROTOBUF", text), latest.schema_id or 0)
    kind = pa.struct([("id", pa.int64()), ("name", pa.string()), ("n", pa.list_(pa.int32()))])
    found = framed(pa.array(rows, kind), schema, "Row")
    assert found == expected
    deserialize = ProtobufDeserializer(row_class, {"use.deprecated.format": False}, client)
    assert [deserialize(value, CONTEXT) for value in found] == [row_class(**row) for row in rows]


def test_sparks_from_avro_reads_the_rows(spark: SparkSession, client: SchemaRegistryClient) -> None:
    from pyspark.sql.avro.functions import from_avro

    # The newest spark-avro that can be had. It also works with later Sparks.
    spark.sql("ADD JAR 'ivy://org.apache.spark:spark-avro_2.13:4.1.1'")
    frame = spark.sql("""
        SELECT id, if(id = 1, null, concat('n', id)) AS name, cast(id * -1.5 AS decimal(12,2)) AS amount,
          timestamp_micros(1700000000123456 + id) AS at, date_add(DATE '1969-12-30', cast(id AS int)) AS day,
          array(id, null, -id) AS list, map('k', id * 0.5D) AS map,
          named_struct('a', id = 2, 'b', 1F) AS inner
        FROM range(4)
    """)
    (batch,) = frame.toArrow().combine_chunks().to_batches()
    column = batch.to_struct_array()
    schema = derived(client, column, "avro")
    values = spark.createDataFrame([(value[_FRAME:],) for value in framed(column, schema)], "value binary")
    found = values.select(from_avro("value", schema.schema.text).alias("row")).select("row.*")
    assert found.collect() == frame.collect()
