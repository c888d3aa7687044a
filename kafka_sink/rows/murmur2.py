"""Java's murmur2 for a column of keys, so that keys get the partition that all Kafka clients choose.

The algorithm is chosen for speed. In numpy, gathering single unaligned words costs 4.5 ns per key, and
gathering 16 bytes costs the same. So all keys advance in rounds of 16 bytes: one gather, then four words.
Masks handle different lengths, so that nothing has to be sorted. Short keys of one length need no gather.
Rows are processed in blocks whose working memory stays in the L2 cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_sink.records.arrays import (
    Bools,
    Bytes,
    Int32s,
    Int64s,
    Offsets,
    UInt32s,
    null_mask,
    offsets,
    values_buffer,
)

_SEED = 0x9747B28C
_FACTOR = 0x5BD1E995
_MASK = 0xFFFFFFFF
_M = np.uint32(_FACTOR)
_24, _15, _13 = np.uint32(24), np.uint32(15), np.uint32(13)
_ROUND = 16
_BLOCK = 16384
# Masks for the last word of a key, of which 0 to 3 bytes count.
_TAILS = np.array([0, 0xFF, 0xFFFF, 0xFFFFFF], dtype=np.uint32)
# Measured costs in us: the least for a round over columns; a key in plain Python; a word of that key.
_ROUND_US, _KEY_US, _WORD_US = 25.0, 3.0, 0.1
# Keys that all have the same length, up to this many bytes, are hashed as a matrix of words.
_MAX_ALIKE = 64
# For so small a column, plain Python is faster, because each call of numpy has a fixed cost.
_FEW_KEYS, _FEW_BYTES = 12, 400


def murmur2(keys: pa.Array) -> UInt32s:
    """Each key's hash, for a (large_)binary or (large_)string array or slice. Null hashes as empty.

    The hashes equal org.apache.kafka.common.utils.Utils.murmur2, taken as unsigned. Time and memory are
    bounded by the total size of the keys, even if a few keys are far longer: those are hashed one by one.
    """
    count = len(keys)
    if count == 0:
        return np.zeros(0, dtype=np.uint32)
    ends, data = offsets(keys), values_buffer(keys)
    if count <= _FEW_KEYS and int(ends[-1]) - int(ends[0]) <= _FEW_BYTES:
        return np.array([_hash_one(key or b"") for key in _as_bytes(keys)], dtype=np.uint32)
    nulls: Bools | None = None
    if keys.null_count:
        nulls = null_mask(keys)
    hashes = np.empty(count, dtype=np.uint32)
    size = int(ends[1]) - int(ends[0])
    alike = nulls is None and 0 < size <= _MAX_ALIKE and bool((ends[1:] - ends[:-1] == size).all())
    for start in range(0, count, _BLOCK):
        end = min(start + _BLOCK, count)
        if alike:
            _hash_alike(data[int(ends[start]) : int(ends[end])], size, hashes[start:end])
            continue
        block_nulls = None if nulls is None else nulls[start:end]
        _hash_block(ends[start : end + 1], data, block_nulls, hashes[start:end])
    return hashes


def partitions_for(keys: pa.Array, partition_count: int | Int32s) -> Int32s:
    """Kafka's default partition of each key: toPositive(murmur2(key)) % partitions. ``partition_count`` is
    one number for all keys, or an array with one number per key."""
    hashes = murmur2(keys)
    if not isinstance(partition_count, int):
        hashes &= np.uint32(0x7FFFFFFF)
        hashes %= partition_count.view(np.uint32)
    elif partition_count & (partition_count - 1):
        hashes &= np.uint32(0x7FFFFFFF)
        hashes %= np.uint32(partition_count)
    else:
        hashes &= np.uint32(partition_count - 1)
    return hashes.view(np.int32)


def _as_bytes(keys: pa.Array) -> list[bytes | None]:
    values: list[bytes | str | None] = keys.to_pylist()
    return [value.encode() if isinstance(value, str) else value for value in values]


def _hash_alike(data: Bytes, size: int, hashes: UInt32s) -> None:
    """Hash keys that all have ``size`` bytes and follow each other. This halves the cost."""
    whole, rest = divmod(size, 4)
    # Each key is padded with zeros to whole words: they do not count in the tail's hash.
    padded = np.zeros((len(hashes), whole + (rest > 0)), dtype="<u4")
    np.ndarray((len(hashes),), f"V{size}", padded.data, 0, (padded.strides[0],))[:] = data.view(f"V{size}")
    hashes[:] = _SEED ^ size
    for column in range(whole):
        word = padded[:, column] * _M
        word ^= word >> _24
        word *= _M
        hashes *= _M
        hashes ^= word
    if rest:
        hashes ^= padded[:, whole]
        hashes *= _M
    _finish(hashes)


def _finish(hashes: UInt32s) -> None:
    hashes ^= hashes >> _13
    hashes *= _M
    hashes ^= hashes >> _15


def _hash_block(ends: Offsets, data: Bytes, nulls: Bools | None, hashes: UInt32s) -> None:
    """Write the hashes of consecutive keys into ``hashes``."""
    first, last = int(ends[0]), int(ends[-1])
    # A copy with room at its end, because the last round of a key always reads 16 bytes.
    raw = np.empty(last - first + _ROUND, dtype=np.uint8)
    raw[: last - first] = data[first:last]
    rounds: npt.NDArray[np.void] = np.ndarray((last - first + 1,), "V16", raw.data, strides=(1,))
    at = np.subtract(ends[:-1], first, dtype=np.int64)
    left = np.subtract(ends[1:], ends[:-1], dtype=np.int32, casting="same_kind")
    if nulls is not None:
        left[nulls] = 0
    np.bitwise_xor(left.view(np.uint32), np.uint32(_SEED), out=hashes)
    shortest, longest = int(left.min()), int(left.max())
    _round(hashes, rounds[at], left, shortest, longest)
    if longest > _ROUND:
        _later_rounds(hashes, raw, rounds, at, left)
    _finish(hashes)


def _round(
    hashes: UInt32s, gathered: npt.NDArray[np.void], left: Int32s, shortest: int, longest: int
) -> None:
    """Hash up to 16 bytes of every key, in place. Includes the tail of a key with fewer bytes left."""
    words = gathered.view("<u4").reshape(-1, 4)
    for column in range(min(longest >> 2, 4)):
        word = words[:, column] * _M
        word ^= word >> _24
        word *= _M
        needed = 4 * (column + 1)
        if shortest >= needed:
            hashes *= _M
            hashes ^= word
        else:
            word ^= hashes * _M
            _replace(hashes, word, needed - 1 - left)
    if shortest < _ROUND:
        _tails(hashes, words, left, longest)


def _tails(hashes: UInt32s, words: UInt32s, left: Int32s, longest: int) -> None:
    """Hash the last 1 to 3 bytes of keys that end in this round and whose length is not a multiple of 4."""
    tail = left & 3
    if longest >= _ROUND:
        tail &= (left - _ROUND) >> 31
    place = np.arange(0, 4 * len(left), 4, dtype=np.int64)
    place += left >> 2
    # Longer keys would point after their four words. Their index is clipped; they have no tail yet.
    word = words.reshape(-1).take(place, mode="clip")
    word &= _TAILS.take(tail, mode="clip")
    word ^= hashes
    word *= _M
    _replace(hashes, word, -tail)


def _replace(hashes: UInt32s, others: UInt32s, sign: Int32s) -> None:
    """Replace each hash by the one in ``others`` if ``sign`` is negative there. Overwrites both. Bit masks
    are used, because boolean masks cost 2 to 5 ns per key if lengths differ, and these 0.6 ns."""
    sign >>= 31
    others ^= hashes
    others &= sign.view(np.uint32)
    hashes ^= others


def _later_rounds(
    hashes: UInt32s, raw: Bytes, rounds: npt.NDArray[np.void], at: Int64s, left: Int32s
) -> None:
    """Run all rounds after the first, over the keys that have bytes left."""
    rows: npt.NDArray[np.signedinteger[Any]] = np.arange(len(left))
    part = hashes
    while True:
        going = np.flatnonzero(left > _ROUND)
        if len(going) < len(left):
            hashes[rows] = part
            if len(going) == 0:
                return
            rows, part, at, left = rows[going], part[going], at[going], left[going]
        at = at + _ROUND
        left = left - np.int32(_ROUND)
        longest = int(left.max())
        words = int(left.sum(dtype=np.int64)) >> 2
        if len(left) * _KEY_US + words * _WORD_US < (longest / _ROUND) * _ROUND_US and len(left) <= 64:
            for row, start, length in zip(rows.tolist(), at.tolist(), left.tolist(), strict=True):
                hashes[row] = _continue_one(int(part[0]), raw[start : start + length])
                part = part[1:]
            return
        _round(part, rounds[at], left, int(left.min()), longest)


def _continue_one(value: int, data: Bytes) -> int:
    """Hash the rest of one long key. numpy multiplies the words, and Python's integers chain the hashes."""
    words = len(data) >> 2
    mixed = data[: 4 * words].view("<u4") * _M
    mixed ^= mixed >> _24
    mixed *= _M
    for word in mixed.tolist():
        value = ((value * _FACTOR) & _MASK) ^ word
    tail = data[4 * words :].tobytes()
    return ((value ^ int.from_bytes(tail, "little")) * _FACTOR) & _MASK if tail else value


def _hash_one(key: bytes) -> int:
    """Hash one short key with Python's integers."""
    whole = len(key) & ~3
    value = _SEED ^ len(key)
    for start in range(0, whole, 4):
        word = (int.from_bytes(key[start : start + 4], "little") * _FACTOR) & _MASK
        word = ((word ^ (word >> 24)) * _FACTOR) & _MASK
        value = ((value * _FACTOR) & _MASK) ^ word
    if whole < len(key):
        value = ((value ^ int.from_bytes(key[whole:], "little")) * _FACTOR) & _MASK
    value = ((value ^ (value >> 13)) * _FACTOR) & _MASK
    return value ^ (value >> 15)
