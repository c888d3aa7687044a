"""A digest of a task's rows, to recognise the same rows in a later run, in whatever order and tasks.

Each row has a checksum of all its parts, and the digest is the sum of these. numpy has no hash of bytes, and
no loop over values of different lengths that is fast enough, but two steps cost little: the XOR of all 8-byte
words up to any place of a buffer (``bitwise_xor.accumulate``), and looking that up where values begin and
end. What differs between the two is the XOR of the value's words, up to a rotation by where in a word it
begins. So every byte counts. What folds away is the order of words: bytes that trade places over a distance
of 8, 16, ... bytes within one value are not noticed behind its first 8, nor are equal changes at two such
places.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from kafka_sink.dtypes import Bytes, UInt64s
from kafka_sink.records.arrays import (
    Offsets,
    has_byte_offsets,
    lengths,
    null_mask,
    numbers,
    offsets,
    values_buffer,
)
from kafka_sink.transactions.decision import RowsDigest

# Measured: smaller blocks pay for numpy's calls, larger ones fall out of the processor's caches.
_BLOCK_BYTES = 1024 * 1024
# The bytes of a word that count where 0 to 8 of them do.
_LOW = np.array([(1 << 8 * count) - 1 for count in range(9)], dtype=np.uint64)
_3, _29, _32, _64 = (np.uint64(one) for one in (3, 29, 32, 64))
# Odd and with about as many ones as zeros: of splitmix64 and murmur3.
_FOLD, _HEAD, _LENGTH = (
    np.uint64(one) for one in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_MIX_1, _MIX_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
# One for each column of a row, so that values do not trade places unnoticed.
_FACTORS = np.array([pow(0xD1342543DE82EF95, power, 1 << 64) for power in range(1, 9)], dtype=np.uint64)


class RunningDigest:
    """Of Arrow batches, however their rows are ordered and split into batches.

    ``indices`` are the columns of a record's parts; None is a part that rows do not have. A part is known by
    its place among them, so columns may be in another order the next time.
    """

    def __init__(self, indices: Sequence[int | None]) -> None:
        self._indices = [(place, index) for place, index in enumerate(indices) if index is not None]
        self._rows = 0
        self._size = 0
        self._checksum = 0

    def update(self, batch: pa.RecordBatch) -> None:
        self._rows += batch.num_rows
        if not batch.num_rows or not self._indices:
            return
        rows = np.zeros(batch.num_rows, dtype=np.uint64)
        for place, index in self._indices:
            rows += _checksums(batch.column(index)) * _FACTORS[place]
            self._size += _bytes(batch.column(index))
        self._checksum += int(_mixed(rows).sum())

    def result(self) -> RowsDigest:
        return RowsDigest.total([RowsDigest(self._rows, self._size, self._checksum)])


def _bytes(column: pa.Array) -> int:
    if not has_byte_offsets(column.type):
        return 0
    if column.null_count:
        return int(lengths(column).sum())
    ends = offsets(column)
    return int(ends[-1]) - int(ends[0])


def _checksums(column: pa.Array) -> UInt64s:
    """One for each entry; 0 for null."""
    kind = column.type
    if has_byte_offsets(kind):
        found = _of_bytes(column)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        found = _of_lists(column)
    elif kind == pa.null():
        return np.zeros(len(column), dtype=np.uint64)
    else:
        # One more, so that a zero is not null.
        found = numbers(column, f"i{kind.bit_width // 8}").astype(np.uint64) * _FOLD + _LENGTH
    if column.null_count:
        found[null_mask(column)] = 0
    return found


def _mixed(values: UInt64s) -> UInt64s:
    """Each bit depends on all bits of its value; 0 stays 0. In place."""
    values ^= values >> _32
    values *= _MIX_1
    values ^= values >> _29
    values *= _MIX_2
    return values


def _of_bytes(column: pa.Array) -> UInt64s:
    ends, data = offsets(column), values_buffer(column)
    first, last = int(ends[0]), int(ends[-1])
    found = np.empty(len(column), dtype=np.uint64)
    rows = max(1, len(column) * _BLOCK_BYTES // max(last - first, 1))
    for start in range(0, len(column), rows):
        _fold(ends[start : start + rows + 1], data, found[start : start + rows])
    return found


def _fold(ends: Offsets, data: Bytes, found: UInt64s) -> None:
    """Checksums of neighbouring values into ``found``."""
    words, start = _words(data, int(ends[0]), int(ends[-1]))
    before = np.empty(len(words) + 1, dtype=np.uint64)
    before[0] = 0
    np.bitwise_xor.accumulate(words, out=before[1:])
    places = np.subtract(ends, start, dtype=np.int64)
    word = places >> 3
    lane = places & 7
    # Behind the last word, where it is looked up, none of its bytes count.
    at = words.take(word, mode="clip")
    # The XOR of all bytes before each place, each in the lane that it has in its word.
    folds = before.take(word)
    folds ^= at & _LOW.take(lane)
    sizes = places[1:] - places[:-1]
    shift = lane[:-1].view(np.uint64) << _3
    back = _64 - shift
    # numpy defines a shift by 64: it leaves nothing.
    head = words.take(word[:-1] + 1, mode="clip")
    head <<= back
    head |= at[:-1] >> shift
    if int(sizes.min()) < 8:
        head &= _LOW.take(sizes, mode="clip")
    fold = folds[1:] ^ folds[:-1]
    np.left_shift(fold, back, out=found)
    fold >>= shift
    found |= fold
    # Else the upper bits of a word would reach few bits of a product, and could make up for each other.
    found ^= found >> _32
    found *= _FOLD
    head ^= head >> _29
    head *= _HEAD
    found += head
    sizes += 1
    found += sizes.view(np.uint64) * _LENGTH


def _words(data: Bytes, first: int, last: int) -> tuple[UInt64s, int]:
    """The bytes from ``first`` to ``last`` as words, and the place at which these begin. Mostly no copy."""
    start = first & ~7
    count = max(1, (last - start + 7) // 8)
    if data.ctypes.data % 8 == 0 and start + 8 * count <= len(data):
        return data[start : start + 8 * count].view(np.uint64), start
    words = np.zeros(count, dtype=np.uint64)
    words.view(np.uint8)[: last - start] = data[start:last]
    return words, start


def _of_lists(column: pa.Array) -> UInt64s:
    """Of lists of structs: headers. The order of a list counts."""
    entries = column.flatten()
    each: UInt64s = np.zeros(len(entries), dtype=np.uint64)
    for place, child in enumerate(entries.flatten()):
        each += _checksums(child) * _FACTORS[place]
    sizes = lengths(column).astype(np.int64)
    ends = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes)))
    places = np.arange(len(entries), dtype=np.int64) - np.repeat(ends[:-1], sizes)
    each = _mixed(each) * (2 * places + 1).view(np.uint64)
    sums = np.concatenate((np.zeros(1, dtype=np.uint64), np.cumsum(each)))
    found: UInt64s = sums[ends[1:]] - sums[ends[:-1]] + (sizes + 1).view(np.uint64) * _LENGTH
    return found
