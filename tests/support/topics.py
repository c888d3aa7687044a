"""Topics as the Spark tests write and read them, and batch headers from the broker's own files."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from local_kafka import LocalBroker
from tests.support.waiting import retry

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Row(NamedTuple):
    partition: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: tuple[tuple[str, bytes | None], ...]


def save(frame: DataFrame, options: Mapping[str, str]) -> None:
    """Appends the rows by the data source."""
    frame.write.format("kafka-chunked").mode("append").options(**options).save()


def messages(
    bootstrap: str, topic: str, partitions: int | None = None, isolation_level: str = "read_committed"
) -> Iterator[Message]:
    """What such a reader sees now, each partition's in order: to where an open transaction holds it up, or to
    the end. None: all partitions that the topic has, which may be none."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "tests",
            "enable.auto.commit": False,
            "isolation.level": isolation_level,
            "enable.partition.eof": True,
            "check.crcs": True,
        }
    )
    try:
        if partitions is None:
            partitions = len(consumer.list_topics(topic, timeout=30).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
        came = ended = 0
        while ended < partitions:
            message = consumer.poll(30)
            assert message is not None, f"{came} rows came, and {ended} of {partitions} ends"
            error = message.error()
            if error is None:
                came += 1
                yield message
            elif error.name() == "_PARTITION_EOF":
                ended += 1
            else:
                # Of a broker that has just come back, or a leader to be elected, say: librdkafka goes on.
                assert error.retriable() or not error.fatal(), error
    finally:
        consumer.close()


def read_topic(broker: LocalBroker, topic: str) -> list[Row]:
    """All rows of a topic, each partition's in order; empty if the topic does not exist."""
    return [
        Row(one.partition(), one.key(), one.value(), one.timestamp()[1], tuple(one.headers() or ()))  # type: ignore[arg-type]
        for one in messages(broker.bootstrap_servers, topic)
    ]


def numbers_in(bootstrap: str, topic: str, partitions: int) -> dict[int, list[int]]:
    """Numbers before the first colon of each value, by partition, in offset order."""
    found: dict[int, list[int]] = {partition: [] for partition in range(partitions)}
    for message in messages(bootstrap, topic, partitions):
        found[message.partition() or 0].append(int((message.value() or b"").split(b":")[0]))
    return found


def read_to_end(
    bootstrap: str, topic: str, partitions: int, isolation_level: str = "read_committed"
) -> list[bytes]:
    """The values that such a reader sees now."""
    return [one.value() or b"" for one in messages(bootstrap, topic, partitions, isolation_level)]


def log_ends(bootstrap: str, topic: str, partitions: int) -> list[int]:
    """Where each partition's log ends, rows of open and aborted transactions included."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "log-ends", "isolation.level": "read_uncommitted"}
    )
    try:
        return [log_end(consumer, TopicPartition(topic, partition)) for partition in range(partitions)]
    finally:
        consumer.close()


def log_end(consumer: Consumer, place: TopicPartition) -> int:
    """Where the partition's log ends. A broker may still refuse to say, if the topic was just created."""
    return retry(lambda: int(consumer.get_watermark_offsets(place, timeout=10)[1]), KafkaException)


def producer_ids(folders: Iterator[Path]) -> set[int]:
    """Ids of the producers whose batches these folders of segments hold (V2 batch header, bytes 43-50)."""
    found = set()
    for folder in folders:
        for segment in folder.glob("*.log"):
            data, at = segment.read_bytes(), 0
            while at + 61 <= len(data):
                length = struct.unpack_from(">i", data, at + 8)[0]
                found.add(struct.unpack_from(">q", data, at + 43)[0])
                at += 12 + length
    return found


def moved_in(numbers: list[int]) -> list[int]:
    """Those behind a higher one: of a partition whose rows are numbered, rows that came from another one."""
    highest, found = -1, []
    for number in numbers:
        if number < highest:
            found.append(number)
        highest = max(highest, number)
    return found
