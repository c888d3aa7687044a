"""The fake broker's partitions: what a real one checks of a V2 batch before it appends it.

Facts from KIP-98 (sequences), KIP-679 and the log layer of Apache Kafka 4: a producer's last five batches
are remembered, a repeat of one of them is answered with its offset, a gap is OUT_OF_ORDER_SEQUENCE_NUMBER.
"""

from __future__ import annotations

import re
import struct
from collections import deque
from dataclasses import dataclass, field

import google_crc32c

NONE = 0
CORRUPT_MESSAGE = 2
MESSAGE_TOO_LARGE = 10
OUT_OF_ORDER_SEQUENCE_NUMBER = 45
INVALID_PRODUCER_EPOCH = 47
INVALID_RECORD = 87

_HEADER = struct.Struct(">qiibIhiqqqhii")
_CRC_FROM = 21
_SEQUENCES = 2**31
# The limits of a topic, as brokers have them by default.
MAX_MESSAGE_BYTES = 1_048_588
_REMEMBERED = 5
_NUMBER = re.compile(rb"<(\d+)>")


def numbers_in(data: bytes) -> list[int]:
    """The numbers of a batch's rows, each of which contains its own as `<12>`; the batch is not compressed.

    The header is left out: one checksum in a million looks like such a number.
    """
    return [int(number) for number in _NUMBER.findall(data[_HEADER.size :])]


@dataclass(frozen=True)
class RecordBatch:
    """One batch as it arrived. ``base_offset`` is the offset of its append, -1 if it was not appended."""

    topic: str
    partition: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int
    attributes: int
    base_timestamp: int
    max_timestamp: int
    base_offset: int
    data: bytes

    @property
    def last_sequence(self) -> int:
        return (self.base_sequence + self.record_count - 1) % _SEQUENCES


def parse_batch(topic: str, partition: int, data: bytes) -> RecordBatch | int:
    """A batch's header, or the error code of bytes that are not exactly one valid batch."""
    if len(data) < _HEADER.size:
        return CORRUPT_MESSAGE
    _, length, _, magic, crc, attributes, last_delta, *rest = _HEADER.unpack_from(data)
    first_ms, last_ms, producer_id, epoch, sequence, count = rest
    if magic != 2 or length != len(data) - 12:
        return INVALID_RECORD if magic == 2 and 0 < length < len(data) - 12 else CORRUPT_MESSAGE
    if crc != google_crc32c.value(data[_CRC_FROM:]):
        return CORRUPT_MESSAGE
    if count < 1 or last_delta != count - 1:
        return INVALID_RECORD
    return RecordBatch(
        topic, partition, producer_id, epoch, sequence, count, attributes, first_ms, last_ms, -1, data
    )


@dataclass
class _Producer:
    epoch: int
    recent: deque[RecordBatch] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


class PartitionLog:
    """One partition: batches in order, and the state of the producers that wrote them."""

    def __init__(self, max_message_bytes: int) -> None:
        self.batches: list[RecordBatch] = []
        self.next_offset = 0
        self.log_start_offset = 0
        self._max_message_bytes = max_message_bytes
        self._producers: dict[int, _Producer] = {}

    def forget_producers(self) -> None:
        """Forget all producers, as brokers do after producer.id.expiration.ms."""
        self._producers.clear()

    def append(self, batch: RecordBatch) -> tuple[int, int]:
        """(error code, base offset); a batch that was appended before keeps its offset and is not doubled."""
        if len(batch.data) > self._max_message_bytes:
            return MESSAGE_TOO_LARGE, -1
        if batch.producer_id >= 0:
            code, offset = self._check_producer(batch)
            if code or offset >= 0:
                return code, offset
        appended = RecordBatch(**{**batch.__dict__, "base_offset": self.next_offset})
        self.batches.append(appended)
        self.next_offset += batch.record_count
        if batch.producer_id >= 0:
            self._producers[batch.producer_id].recent.append(appended)
        return NONE, appended.base_offset

    def _check_producer(self, batch: RecordBatch) -> tuple[int, int]:
        known = self._producers.setdefault(batch.producer_id, _Producer(batch.producer_epoch))
        if batch.producer_epoch < known.epoch:
            return INVALID_PRODUCER_EPOCH, -1
        if batch.producer_epoch > known.epoch:
            if batch.base_sequence != 0:
                return OUT_OF_ORDER_SEQUENCE_NUMBER, -1
            self._producers[batch.producer_id] = _Producer(batch.producer_epoch)
            return NONE, -1
        for earlier in known.recent:
            if (earlier.base_sequence, earlier.record_count) == (batch.base_sequence, batch.record_count):
                return NONE, earlier.base_offset
        # A producer that is new to the partition may begin anywhere, as after its state expired.
        if known.recent and batch.base_sequence != (known.recent[-1].last_sequence + 1) % _SEQUENCES:
            return OUT_OF_ORDER_SEQUENCE_NUMBER, -1
        return NONE, -1
