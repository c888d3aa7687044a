"""A digest of a task's rows, which recognises the same rows in any order and split into any tasks.

Each row has a checksum of all its parts, and the digest is the sum of these modulo 2^64. A value is cut into
words of 8 bytes, the last of which is filled up with zeros. The value's checksum is the sum of mix(word) *
R^place.

Why other rows have another digest: mix is bijective and R is odd, so if all words but one are fixed, the
checksum is a bijective function of that word. So one word that differs is always noticed. 8 random bytes make
the checksum uniform, so random tables collide with a probability of 2^-64.

Two words that differ: a word that changes adds some d to the sum. The same change k words further on adds d *
R^k. Together they add d * (R^k + 1), or d * (R^k - 1) if one undoes the other, as when two words trade
places. R is 5 modulo 8, so R^k + 1 is divisible by 2 once, and R^k - 1 at most 2 + log2(k) times. So the sum
stays the same only if d ends in at least 62 - log2(k) zeros. As mix is bijective, at most 4k - 1 of all other
words have such a d to a given word. Which words these are is left to chance: mix is a product between two
shifts, so that each bit of its result depends on all of the word. With shifts alone they were words that
differ in bytes 3 and 7, as text does.

Rows are mixed before they are added up, so that changes of several rows do not make up for each other. All
this holds for data, not against somebody who constructs collisions.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from pyarrow import compute

from kafka_sink.records.arrays import UInt64s, has_byte_offsets, lengths, null_mask, numbers, offsets
from kafka_sink.transactions.decision import RowsDigest

# Measured: smaller blocks pay for calls, and larger blocks do not fit into the processor's caches.
BLOCK_BYTES = 2 * 1024 * 1024
# This many words of a value have their power of R in a table. The words after them get one more factor.
SEGMENT = 16 * 1024
_32, _33 = np.uint64(32), np.uint64(33)
# The constants are odd, with about as many ones as zeros. They come from a linear congruential generator,
# splitmix64 and murmur3.
R = 0xD1342543DE82EF95
_FOLD, LENGTH = np.uint64(0x9E3779B97F4A7C15), np.uint64(0x94D049BB133111EB)
MIX = np.uint64(0xFF51AFD7ED558CCD)
POWERS = np.cumprod(np.array([1] + [R] * (SEGMENT - 1), dtype=np.uint64))
# There is one factor for each column of a row, as if its words began far after those of the column before.
_FACTORS = np.array([pow(R, place * (2**24 + 1), 1 << 64) for place in range(8)], dtype=np.uint64)
# The memory of one block, which each thread keeps: allocating it again costs as much as the sums.
_kept = threading.local()


class RunningDigest:
    """The digest of Arrow batches, in any order of rows and however they are split into batches.

    ``indices`` are the columns of a record's parts; None is a part that the rows do not have. A part is
    identified by its place in ``indices``, so the columns may have another order in the next run.
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
            if has_byte_offsets(batch.column(index).type):
                self._size += int(lengths(batch.column(index)).sum())
        self._checksum += int(_mixed(rows, rows, np.empty_like(rows)).sum())

    def result(self) -> RowsDigest:
        return RowsDigest.total([RowsDigest(self._rows, self._size, self._checksum)])


def _checksums(column: pa.Array) -> UInt64s:
    """The checksum of each entry; 0 for null."""
    kind = column.type
    if has_byte_offsets(kind):
        checksums = of_bytes(column)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        checksums = _of_lists(column)
    elif kind == pa.null():
        return np.zeros(len(column), dtype=np.uint64)
    else:
        # LENGTH is added so that a zero differs from null.
        checksums = numbers(column, f"i{kind.bit_width // 8}").astype(np.uint64) * _FOLD + LENGTH
        _mixed(checksums, checksums, np.empty_like(checksums))
    if column.null_count:
        checksums[null_mask(column)] = 0
    return checksums


def _mixed(values: UInt64s, out: UInt64s, spare: UInt64s) -> UInt64s:
    """Mix each value into ``out``: bijectively, 0 to 0, and each bit depends on all bits of the value."""
    np.right_shift(values, _33, out=spare)
    np.bitwise_xor(values, spare, out=out)
    out *= MIX
    np.right_shift(out, _32, out=spare)
    out ^= spare
    return out


def _memory(rows: int, words: int) -> tuple[UInt64s, UInt64s]:
    """Two matrices in this thread's memory, which the thread's next call uses again."""
    size = rows * words
    memory: UInt64s | None = getattr(_kept, "memory", None)
    if memory is None or len(memory) < 2 * size:
        memory = _kept.memory = np.empty(2 * size, dtype=np.uint64)
    return memory[:size].reshape(rows, words), memory[size : 2 * size].reshape(rows, words)


def of_bytes(column: pa.Array) -> UInt64s:
    """The checksum of each text or binary value."""
    ends = offsets(column)
    sizes = ends[1:] - ends[:-1]
    count, total = len(column), int(ends[-1]) - int(ends[0])
    checksums = np.empty(count, dtype=np.uint64)
    if not count:
        return checksums
    if int(sizes.max()) * count > 2 * total + BLOCK_BYTES:
        # Otherwise short values would be filled up to the size of a few long ones.
        are_long = sizes > total // count
        for part in (are_long, np.logical_not(are_long)):
            checksums[part] = of_bytes(column.filter(pa.array(part)))
        return checksums
    words = max(1, (int(sizes.max()) + 7) // 8)
    rows = min(count, max(1, BLOCK_BYTES // (8 * words)))
    for start in range(0, count, rows):
        block = checksums[start : start + rows]
        matrix = _filled_up(column, start, len(block), words)
        block[:] = (sizes[start : start + rows].astype(np.uint64) + np.uint64(1)) * LENGTH
        for first in range(0, words, SEGMENT):
            part = matrix[:, first : first + SEGMENT]
            mixed = _mixed(part, *_memory(*part.shape))
            sums = np.einsum("ij,j->i", mixed, POWERS[: part.shape[1]])
            block += sums * np.uint64(pow(R, first, 1 << 64))
    return checksums


def _filled_up(column: pa.Array, start: int, count: int, words: int) -> UInt64s:
    """The values from ``start`` on, one in each row, each filled up to this many words; null is empty."""
    # The values are declared to be text, because pyarrow then pads them. It only copies their bytes.
    kind = pa.large_string() if column.type in (pa.large_binary(), pa.large_string()) else pa.string()
    buffers = [None, *column.buffers()[1:]]
    values = pa.Array.from_buffers(kind, count, buffers, offset=column.offset + start)
    filled = compute.ascii_rpad(values, 8 * words, padding="\0").buffers()[2]
    return np.frombuffer(filled, np.uint64, count * words).reshape(count, words)


def _of_lists(column: pa.Array) -> UInt64s:
    """The checksum of each list of structs, that is, of headers. The order of a list's entries counts."""
    entries = column.flatten()
    each: UInt64s = np.zeros(len(entries), dtype=np.uint64)
    for place, child in enumerate(entries.flatten()):
        each += _checksums(child) * _FACTORS[place]
    sizes = lengths(column).astype(np.int64)
    ends = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes)))
    places = np.arange(len(entries), dtype=np.int64) - np.repeat(ends[:-1], sizes)
    each = _mixed(each, each, np.empty_like(each)) * (2 * places + 1).view(np.uint64)
    sums = np.concatenate((np.zeros(1, dtype=np.uint64), np.cumsum(each)))
    checksums: UInt64s = sums[ends[1:]] - sums[ends[:-1]] + (sizes + 1).view(np.uint64) * LENGTH
    return checksums
