"""Topics as the Spark tests read them: with librdkafka, and batch headers from the broker's own files."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaException, TopicPartition

from local_kafka import LocalBroker
from tests.support.waiting import retry


class Row(NamedTuple):
    partition: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: tuple[tuple[str, bytes | None], ...]


def read_topic(broker: LocalBroker, topic: str) -> list[Row]:
    """All rows of a topic, each partition's in order; empty if the topic does not exist."""
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "spark-tests",
            "enable.auto.commit": False,
        }
    )
    try:
        metadata = consumer.list_topics(topic, timeout=30).topics[topic]
        ends = {}
        for partition in metadata.partitions:
            # A topic that was just made may have no leader yet.
            ends[partition] = log_end(consumer, TopicPartition(topic, partition))
        consumer.assign([TopicPartition(topic, partition, 0) for partition in ends])
        rows: list[Row] = []
        while len(rows) < sum(ends.values()):
            # consume() waits until it has as many as it is asked for.
            messages = consumer.consume(min(1000, sum(ends.values()) - len(rows)), timeout=30)
            assert messages, f"{len(rows)} of {sum(ends.values())} rows came"
            for message in messages:
                assert message.error() is None, message.error()
                headers = tuple(message.headers() or ())
                rows.append(
                    Row(message.partition(), message.key(), message.value(), message.timestamp()[1], headers)  # type: ignore[arg-type]
                )
        return rows
    finally:
        consumer.close()


def numbers_in(bootstrap: str, topic: str, partitions: int) -> dict[int, list[int]]:
    """Numbers before the first colon of each value, by partition, in offset order."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "check", "enable.auto.commit": False})
    ends = {p: log_end(consumer, TopicPartition(topic, p)) for p in range(partitions)}
    consumer.assign([TopicPartition(topic, p, 0) for p in range(partitions)])
    found: dict[int, list[int]] = {p: [] for p in range(partitions)}
    # consume() waits for all it was asked for, so never for more than there is.
    while left := sum(ends.values()) - sum(map(len, found.values())):
        messages = consumer.consume(min(left, 10_000), timeout=30)
        assert messages
        for message in messages:
            if (error := message.error()) is not None:
                # Of a broker that has just come back, say: librdkafka goes on. The value is the error's text.
                assert not error.fatal(), error
                continue
            found[message.partition() or 0].append(int((message.value() or b"").split(b":")[0]))
    consumer.close()
    return found


def read_to_end(
    bootstrap: str, topic: str, partitions: int, isolation_level: str = "read_committed"
) -> list[bytes]:
    """The values that such a reader sees now: to where an open transaction holds it up, or to the end."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "read-to-end",
            "enable.auto.commit": False,
            "isolation.level": isolation_level,
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    values: list[bytes] = []
    ended = 0
    try:
        while ended < partitions:
            message = consumer.poll(30)
            assert message is not None, f"{len(values)} rows came, and {ended} of {partitions} ends"
            error = message.error()
            if error is None:
                values.append(message.value() or b"")
            elif error.name() == "_PARTITION_EOF":
                ended += 1
            else:
                assert error.retriable(), error
    finally:
        consumer.close()
    return values


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
