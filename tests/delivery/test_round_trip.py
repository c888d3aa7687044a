"""DataFrames to a real broker and back, through readers that share no code with the sink."""

from __future__ import annotations

import datetime
import random
from collections import defaultdict
from typing import TYPE_CHECKING

from local_kafka import LocalBroker
from tests.support.topics import Row, log_ends, read_topic, save

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 1_500
PARTITIONS = 4
ANY = -1
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
SCHEMA = (
    "key binary, value binary, timestamp timestamp, "
    "headers array<struct<key:string,value:binary>>, topic string"
)


def mixed_records(seed: int) -> list[Row]:
    """Null and empty keys, values and header values, many headers, times that go back, one large value."""
    chance = random.Random(seed)
    records = []
    for number in range(ROWS):
        key = chance.choice([None, b"", b"k%d" % (number % 500), b"key-%06d" % number])
        kind = chance.random()
        value = b"%d:" % number + chance.randbytes(chance.randrange(200))
        if kind < 0.02:
            value = None  # type: ignore[assignment]
        elif kind < 0.04:
            value = b""
        elif number == 700:
            value = b"%d:" % number + chance.randbytes(700_000)
        headers: list[tuple[str, bytes | None]] = []
        if chance.random() < 0.2:
            names = ["a", "a", "trace-id", "ключ", ""]
            values = [None, b"", b"v", chance.randbytes(20)]
            count = 200 if number % 1000 == 0 else chance.randrange(4)
            headers = [(chance.choice(names), chance.choice(values)) for _ in range(count)]
        timestamp = 1_700_000_000_000 + number - (10_000_000 if chance.random() < 0.01 else 0)
        records.append(Row(ANY, key, value, timestamp, tuple(headers)))
    return records


def write(spark: SparkSession, broker: LocalBroker, topic: str, records: list[Row], codec: str) -> None:
    rows = [
        (
            record.key,
            record.value,
            datetime.datetime.fromtimestamp(record.timestamp_ms / 1000, datetime.timezone.utc),
            list(record.headers) or None,
            topic,
        )
        for record in records
    ]
    options = {
        "kafka.bootstrap.servers": broker.bootstrap_servers,
        "kafka.compression.type": codec,
        "kafka.batch.size": "65536",
        # What is sent is the same with both (tests/scenarios/test_equal_batches.py).
        "kafka.buffer.memory.allocation.strategy": ("incremental", "full")[CODECS.index(codec) % 2],
    }
    save(spark.createDataFrame(rows, SCHEMA).coalesce(1), options)


def positions(records: list[Row]) -> dict[bytes, list[bytes | None]]:
    by_key: dict[bytes, list[bytes | None]] = defaultdict(list)
    for record in records:
        if record.key is not None:
            by_key[record.key].append(record.value)
    return by_key


def test_records_arrive_once_and_in_order_with_each_codec(spark: SparkSession, broker: LocalBroker) -> None:
    for codec in CODECS:
        topic = f"round-trip-{codec}"
        broker.create_topic(topic, PARTITIONS)
        records = mixed_records(CODECS.index(codec))
        write(spark, broker, topic, records, codec)

        found = read_topic(broker, topic)
        arrived = sorted((row._replace(partition=ANY) for row in found), key=repr)
        assert arrived == sorted(records, key=repr), codec
        assert positions(found) == positions(records), "a key's rows changed their order"
        homes = defaultdict(set)
        for row in found:
            homes[row.key].add(row.partition)
        assert all(len(places) == 1 for key, places in homes.items() if key is not None)
    check_with_java(broker)


def check_with_java(broker: LocalBroker) -> None:
    """Kafka's own tool walks every batch, deeply: CRC, sizes, offsets, codec."""
    segments = sorted(broker.log_dir(0).glob("round-trip-*/*.log"))
    tool = ("org.apache.kafka.tools.DumpLogSegments", "--deep-iteration", "--files")
    dumped = broker.run_tool(*tool, ",".join(map(str, segments))).stdout.splitlines()
    batches = [line for line in dumped if line.startswith("baseOffset")]
    assert all("isvalid: true" in line for line in batches)
    # The broker keeps a producer's codec, so this is what the sink sent.
    assert {line.split("compresscodec: ")[1].split()[0] for line in batches} == set(CODECS)
    assert sum(line.startswith("| offset") for line in dumped) == ROWS * len(CODECS)


def test_a_topic_per_row_group(spark: SparkSession, broker: LocalBroker) -> None:
    """The topic column: rows of one batch go to many topics, each with its own partitions."""
    names = [f"fan-out-{number}" for number in range(12)]
    for number, name in enumerate(names):
        broker.create_topic(name, 1 + number % 3)
    frame = spark.range(2_400).selectExpr(
        "concat('fan-out-', id % 12) as topic", "cast(id as string) as value", "cast(id % 7 as string) as key"
    )
    save(frame, {"kafka.bootstrap.servers": broker.bootstrap_servers})
    for name in names:
        assert sum(log_ends(broker.bootstrap_servers, name)) == 200, name
