"""Values that a schema registry knows: written by Spark, read by confluent-kafka's own deserializers."""

from __future__ import annotations

import datetime
import decimal
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from kafka_sink.local_broker import LocalBroker
from kafka_sink.local_broker.schema_registry import LocalRegistry
from tests.support.topics import Row, read_topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_numbers = itertools.count()
Options = Callable[..., dict[str, str]]

COLUMNS = """
    SELECT id, concat('name ', id) AS name, id % 3 = 0 AS even, cast(id * 0.5 AS double) AS half,
      cast(id * 1.25 AS decimal(12,2)) AS amount, date_add(DATE '2024-01-01', cast(id AS int)) AS day,
      timestamp_micros(1700000000123456 + id) AS at, if(id % 2 = 0, null, array(id, id + 1)) AS list,
      map('k', cast(id AS int)) AS map,
      named_struct('a', cast(id AS int), 'b', if(id = 1, null, 'x')) AS inner
    FROM range(5)
"""


@pytest.fixture
def topic(broker: LocalBroker) -> str:
    name = f"formats-{next(_numbers)}"
    broker.create_topic(name, 1)
    return name


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


def test_a_table_arrives_as_avro_that_confluents_deserializer_reads(
    spark: SparkSession, broker: LocalBroker, client: SchemaRegistryClient, topic: str, options: Options
) -> None:
    save(spark.sql(COLUMNS), options(value__format="avro"))
    found = sorted(read_values(client, topic, read_topic(broker, topic)), key=lambda row: row["id"])
    assert len(found) == 5
    assert found[1] == {
        "id": 1,
        "name": "name 1",
        "even": False,
        "half": 0.5,
        "amount": decimal.Decimal("1.25"),
        "day": datetime.date(2024, 1, 2),
        "at": datetime.datetime(2023, 11, 14, 22, 13, 20, 123457, tzinfo=datetime.timezone.utc),
        "list": [1, 2],
        "map": {"k": 1},
        "inner": {"a": 1, "b": None},
    }
    assert found[2]["list"] is None
    latest = client.get_latest_version(f"{topic}-value")
    assert json.loads(latest.schema.schema_str or "")["name"] == "topLevelRecord"


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
    assert sorted(numbers) == list(range(len(numbers)))
    assert len(numbers) >= 6
    assert client.get_versions(f"{topic}-value") == [1]
    key = AvroDeserializer(client)(rows[4].key, SerializationContext(topic, MessageField.KEY))
    assert key == {"id": numbers[4]}


def test_a_field_that_does_not_fit_the_registered_schema_is_named_at_planning(
    spark: SparkSession, broker: LocalBroker, client: SchemaRegistryClient, topic: str, options: Options
) -> None:
    fields = [{"name": "id", "type": "int"}, {"name": "name", "type": "string", "default": "x"}]
    schema = json.dumps({"type": "record", "name": "Row", "fields": fields})
    client.register_schema(f"{topic}-value", Schema(schema, "AVRO"))
    said = failure(lambda: save(spark.range(3), options(value__format="avro", use__latest__version="true")))
    assert "column 'id' has the type int64, and the schema wants int" in said
    save(
        spark.range(3).selectExpr("cast(id AS int)"),
        options(value__format="avro", use__latest__version="true"),
    )
    found = read_values(client, topic, read_topic(broker, topic))
    assert {row["id"] for row in found} == {0, 1, 2}
    assert {row["name"] for row in found} == {"x"}
