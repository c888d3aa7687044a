"""The 61-byte header of a V2 record batch (https://kafka.apache.org/documentation/#recordbatch)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import google_crc32c

from kafka_sink.model import CompressionType

SIZE = 61
MAGIC = 2
NO_PRODUCER_ID = -1
NO_PRODUCER_EPOCH = -1

# baseOffset, batchLength, partitionLeaderEpoch, magic, crc
_HEAD = struct.Struct(">qiibI")
# attributes, lastOffsetDelta, baseTimestamp, maxTimestamp, producerId, producerEpoch, baseSequence, count
_CHECKED = struct.Struct(">hiqqqhii")
# batchLength does not count baseOffset and itself.
_LENGTH_OVERHEAD = 12
_TRANSACTIONAL = 0x10
# So many bytes are copied sooner than a numpy array over them is made.
_COPIED_BYTES = 4096


class ProducerSequence(NamedTuple):
    """By these three fields of the header a broker recognises a batch that it has already (KIP-98)."""

    producer_id: int
    producer_epoch: int
    base_sequence: int


NO_SEQUENCE = ProducerSequence(NO_PRODUCER_ID, NO_PRODUCER_EPOCH, -1)


def build(  # noqa: PLR0913 - the fields of the header, by name
    body: Sequence[memoryview],
    body_size: int,
    *,
    compression: CompressionType,
    record_count: int,
    base_timestamp: int,
    max_timestamp: int,
    sequence: ProducerSequence = NO_SEQUENCE,
    transactional: bool = False,
) -> bytes:
    """The header of a batch whose records section is ``body`` (``body_size`` bytes, compressed or not).

    Timestamps are milliseconds since the epoch. The CRC32C covers everything from the attributes on,
    so that the broker may set the leader epoch without computing it again.
    """
    attributes = int(compression) | (_TRANSACTIONAL if transactional else 0)
    checked = _CHECKED.pack(
        attributes,
        record_count - 1,
        base_timestamp,
        max_timestamp,
        *sequence,
        record_count,
    )
    if len(body) == 1 and body_size <= _COPIED_BYTES:
        crc = google_crc32c.value(checked + body[0])
    else:
        crc = google_crc32c.value(checked)
        for part in body:
            # The C extension takes bytes and numpy arrays but no memoryviews; see as_checkable.
            crc = google_crc32c.extend(crc, as_checkable(part))
    return _HEAD.pack(0, SIZE + body_size - _LENGTH_OVERHEAD, -1, MAGIC, crc) + checked


def as_checkable(part: memoryview) -> object:
    """A view of ``part`` in a form that google_crc32c accepts, without a copy."""
    import numpy as np

    return np.frombuffer(part, dtype=np.uint8)
