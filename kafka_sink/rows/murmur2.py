"""Java's murmur2 over a column of keys, so that a key lands where every Kafka client puts it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_SEED = 0x9747B28C
_M = np.uint32(0x5BD1E995)
# Below this many keys left, one by one costs less than another step over columns.
_FEW_KEYS = 8

UInt32s = npt.NDArray[np.uint32]


def murmur2(keys: pa.Array) -> UInt32s:
    """The hash of every key of a (large_)binary array; nulls hash as empty keys.

    Equal to org.apache.kafka.common.utils.Utils.murmur2 (as unsigned). Works on all keys at once, one
    four-byte word per step; the few keys that are much longer than the rest are finished one by one.
    """
    count = len(keys)
    if count == 0:
        return np.zeros(0, dtype=np.uint32)
    words, starts, lengths = _word_view(keys)
    hashes = np.uint32(_SEED) ^ lengths.astype(np.uint32)
    steps = lengths >> 2
    shortest, longest = int(steps.min()), int(steps.max())
    at = starts.copy()
    for _ in range(shortest):
        hashes = _mix(hashes, words[at])
        at += 4
    if longest > shortest:
        _mix_longer(hashes, words, at, steps - shortest)
    return _finish(hashes, words, at, lengths & 3)


def partitions_for(keys: pa.Array, partition_count: int) -> npt.NDArray[np.int32]:
    """Kafka's default partition of each key: toPositive(murmur2(key)) % partitions."""
    positive = murmur2(keys) & np.uint32(0x7FFFFFFF)
    partitions: npt.NDArray[np.int32] = (positive % np.uint32(partition_count)).astype(np.int32)
    return partitions


def _word_view(keys: pa.Array) -> tuple[UInt32s, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Four-byte little-endian words at every byte of the keys' data, each key's start, and its length."""
    large = pa.types.is_large_binary(keys.type)
    dtype = np.dtype(np.int64 if large else np.int32)
    buffers = keys.buffers()
    offsets = np.frombuffer(buffers[1], dtype, len(keys) + 1, keys.offset * dtype.itemsize).astype(np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    # A copy, because the last key's tail is read as a whole word.
    data = np.zeros(last - first + 8, dtype=np.uint8)
    if last > first:
        data[: last - first] = np.frombuffer(buffers[2], np.uint8, last - first, first)
    words = np.ndarray((len(data) - 3,), dtype="<u4", buffer=data.data, strides=(1,))
    starts = offsets[:-1] - first
    lengths = np.diff(offsets)
    if keys.null_count:
        lengths = np.where(keys.is_null().to_numpy(zero_copy_only=False), 0, lengths)
    return words, starts, lengths


def _mix(hashes: UInt32s, word: UInt32s) -> UInt32s:
    word = word * _M
    word ^= word >> np.uint32(24)
    word *= _M
    hashes = hashes * _M
    hashes ^= word
    return hashes


def _mix_longer(
    hashes: UInt32s, words: UInt32s, at: npt.NDArray[np.int64], steps: npt.NDArray[np.int64]
) -> None:
    """The words past the shortest key's, in place; only keys that still have some take part."""
    rows = np.flatnonzero(steps)
    done = 0
    while len(rows) > _FEW_KEYS:
        # All rows in hand take the steps that the shortest of them has left.
        until = int(steps[rows].min())
        place = at[rows]
        part = hashes[rows]
        for _ in range(until - done):
            part = _mix(part, words[place])
            place += 4
        hashes[rows], at[rows] = part, place
        done = until
        rows = rows[steps[rows] > done]
    for row in rows.tolist():
        left = int(steps[row]) - done
        start = int(at[row])
        hashes[row] = _mix_one(int(hashes[row]), words[start : start + 4 * left : 4])
        at[row] = start + 4 * left


def _mix_one(value: int, words: UInt32s) -> int:
    """One long key: the multiplications in bulk, the chain of hashes in plain integers."""
    mixed = words * _M
    mixed ^= mixed >> np.uint32(24)
    mixed *= _M
    factor = int(_M)
    for word in mixed.tolist():
        value = ((value * factor) & 0xFFFFFFFF) ^ word
    return value


def _finish(
    hashes: UInt32s, words: UInt32s, at: npt.NDArray[np.int64], tail: npt.NDArray[np.int64]
) -> UInt32s:
    """The last 0 to 3 bytes, then the final avalanche."""
    kept = np.array([0, 0xFF, 0xFFFF, 0xFFFFFF], dtype=np.uint32)[tail]
    with_tail = (hashes ^ (words[at] & kept)) * _M
    hashes = np.where(tail > 0, with_tail, hashes)
    hashes ^= hashes >> np.uint32(13)
    hashes *= _M
    hashes ^= hashes >> np.uint32(15)
    return hashes
