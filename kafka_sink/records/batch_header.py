"""The 61-byte header of a V2 record batch (https://kafka.apache.org/documentation/#recordbatch)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import google_crc32c
import numpy as np

SIZE = 61
MAGIC = 2
NO_PRODUCER_ID = -1
NO_PRODUCER_EPOCH = -1

# baseOffset, batchLength, partitionLeaderEpoch, magic, crc
_HEAD = struct.Struct(">qiibI")
# attributes, lastOffsetDelta, baseTimestamp, maxTimestamp, producerId, producerEpoch, baseSequence, count
_CHECKED = struct.Struct(">hiqqqhii")
# batchLength counts the bytes after itself, so neither baseOffset nor its own four bytes.
_LENGTH_OVERHEAD = 12
TRANSACTIONAL = 0x10
# Up to this many bytes, copying them is faster than making a numpy array over them.
_COPIED_BYTES = 4096


class ProducerSequence(NamedTuple):
    """The three header fields by which a broker recognises a batch that it already has (KIP-98)."""

    producer_id: int
    producer_epoch: int
    base_sequence: int


NO_SEQUENCE = ProducerSequence(NO_PRODUCER_ID, NO_PRODUCER_EPOCH, -1)


def write(
    views: Sequence[memoryview],
    size: int,
    attributes: int,
    record_count: int,
    base_timestamp: int,
    max_timestamp: int,
    sequence: ProducerSequence = NO_SEQUENCE,
) -> None:
    """Write the header of a batch into its first SIZE bytes, which lie in the first of its ``views``.

    The records, compressed or not, follow it. ``size`` is the size of the whole batch. Timestamps are
    milliseconds since the epoch. The CRC32C covers everything from the attributes on, but not the leader
    epoch, so that the broker can set that without computing the CRC again.
    """
    first = views[0]
    _CHECKED.pack_into(
        first,
        _HEAD.size,
        attributes,
        record_count - 1,
        base_timestamp,
        max_timestamp,
        *sequence,
        record_count,
    )
    # The C extension accepts bytes and numpy arrays, but no memoryviews.
    if size <= _COPIED_BYTES and len(views) == 1:
        crc = google_crc32c.value(bytes(first[_HEAD.size :]))
    else:
        crc = google_crc32c.value(np.frombuffer(first[_HEAD.size :], np.uint8))
        for part in views[1:]:
            crc = google_crc32c.extend(crc, np.frombuffer(part, np.uint8))
    _HEAD.pack_into(first, 0, 0, size - _LENGTH_OVERHEAD, -1, MAGIC, crc)
