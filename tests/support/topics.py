"""Topics as the Spark tests write and read them, and batch headers from the broker's own files."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


@contextmanager
def _consumer(bootstrap: str, isolation_level: str) -> Iterator[Consumer]:
    settings = {"group.id": "tests", "enable.auto.commit": False, "check.crcs": True, "log_level": 0}
    settings |= {"isolation.level": isolation_level, "enable.partition.eof": True}
    made = Consumer({"bootstrap.servers": bootstrap, **settings})
    try:
        yield made
    finally:
        made.close()


def _places(consumer: Consumer, topic: str) -> list[TopicPartition]:
    partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
    return [TopicPartition(topic, partition, 0) for partition in sorted(partitions)]


def messages(bootstrap: str, topic: str, isolation_level: str = "read_committed") -> Iterator[Message]:
    """The records that such a reader sees now, each partition's in order: up to an open transaction that
    holds it up, or to the end. Nothing if the topic does not exist."""
    with _consumer(bootstrap, isolation_level) as consumer:
        places = _places(consumer, topic)
        # A new leader reports the end of its log only once it has it; reading first ends earlier.
        ends = {place.partition: log_end(consumer, place) for place in places}
        consumer.assign(places)
        while ends:
            message = consumer.poll(60)
            assert message is not None, f"{topic}: nothing comes, before {ends} by partition"
            error = message.error()
            if error is None:
                yield message
            elif error.name() != "_PARTITION_EOF":
                # An error of a broker that has just come back, for example: librdkafka goes on. The value is
                # the error's text.
                assert not error.fatal(), error
            elif (message.offset() or 0) >= ends.get(message.partition() or 0, 0):
                ends.pop(message.partition() or 0, None)


def read_topic(broker: LocalBroker, topic: str) -> list[Row]:
    """All rows of a topic, each partition's in order; empty if the topic does not exist."""
    return [
        Row(one.partition(), one.key(), one.value(), one.timestamp()[1], tuple(one.headers() or ()))  # type: ignore[arg-type]
        for one in messages(broker.bootstrap_servers, topic)
    ]


def numbers_in(bootstrap: str, topic: str) -> dict[int, list[int]]:
    """Numbers before the first colon of each value, by partition, in offset order."""
    found: dict[int, list[int]] = defaultdict(list)
    for message in messages(bootstrap, topic):
        found[message.partition() or 0].append(int((message.value() or b"").split(b":")[0]))
    return found


def read_to_end(bootstrap: str, topic: str, isolation_level: str = "read_committed") -> list[bytes]:
    """The values that such a reader sees now."""
    return [one.value() or b"" for one in messages(bootstrap, topic, isolation_level)]


def log_ends(bootstrap: str, topic: str) -> list[int]:
    """The end of each partition's log, rows of open and aborted transactions included."""
    with _consumer(bootstrap, "read_uncommitted") as consumer:
        return [log_end(consumer, place) for place in _places(consumer, topic)]


def log_end(consumer: Consumer, place: TopicPartition) -> int:
    """The end of the partition's log. A broker may refuse to report it if the topic was just created."""
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
    """Rows after a higher one: if rows are numbered by partition, they came from another partition."""
    highest, found = -1, []
    for number in numbers:
        if number < highest:
            found.append(number)
        highest = max(highest, number)
    return found
