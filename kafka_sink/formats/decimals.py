"""Decimals as big-endian two's complement, as Avro and Protobuf's decimals have them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from kafka_sink.dtypes import Bools, Int64s, UInt64s
from kafka_sink.formats import words
from kafka_sink.formats.words import Piece, Word

_64 = np.uint64(64)


def _halves(column: pa.Array) -> tuple[UInt64s, UInt64s]:
    """The low and the high eight bytes of each number of a decimal128 array."""
    if len(column) == 0:
        none = np.zeros(0, dtype=np.uint64)
        return none, none
    both = np.frombuffer(column.buffers()[1], "<u8", 2 * len(column), column.offset * 16).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def big_endian(column: pa.Array, size: int) -> list[Word]:
    """The unscaled numbers in ``size`` bytes each, which hold them."""
    low, high = _halves(column)
    sign = (high.view(np.int64) >> 63).view(np.uint64)
    found = []
    for begin in range(size, 0, -8):
        end = max(begin - 8, 0)
        # Bytes ``end`` to ``begin`` from the right.
        part = _bytes_from(low, high, sign, end) & np.uint64((1 << 8 * (begin - end)) - 1)
        found.append(Word(part.byteswap() >> np.uint64(64 - 8 * (begin - end)), begin - end, begin - end))
    return found


def _bytes_from(low: UInt64s, high: UInt64s, sign: UInt64s, end: int) -> UInt64s:
    """Eight bytes, beginning ``end`` bytes from the right."""
    if end >= 16:
        return sign
    if end >= 8:
        shift = np.uint64(8 * (end - 8))
        return high >> shift | (sign << (_64 - shift) if shift else np.uint64(0))
    shift = np.uint64(8 * end)
    return low >> shift | (high << (_64 - shift) if shift else np.uint64(0))


def minimal(column: pa.Array, nulls: Bools | None, length: Callable[[Int64s], UInt64s]) -> list[Piece]:
    """The unscaled numbers in as few bytes as hold them, after their number; ``length`` prepares it for a
    varint.

    A negative power of two takes a byte more than it needs, as fastavro's do.
    """
    low, high = _halves(column)
    sign = (high.view(np.int64) >> 63).view(np.uint64)
    sizes = _sizes(low, high, sign)
    if nulls is not None:
        sizes[nulls] = 0
    found: list[Piece] = [*words.varint(length(sizes), nulls)]
    if int(sizes.max(initial=0)) > 8:
        upper = np.maximum(sizes - 8, 0)
        found.append(_reversed(np.where(upper > 0, high, np.uint64(0)), upper))
    found.append(_reversed(low, np.minimum(sizes, 8)))
    return found


def _sizes(low: UInt64s, high: UInt64s, sign: UInt64s) -> Int64s:
    # The magnitude of a negative number is its complement and one more.
    least = (low ^ sign) - sign
    most = (high ^ sign) + ((sign & np.uint64(1)) & (least == 0).astype(np.uint64))
    sizes: Int64s = np.ones(len(low), dtype=np.int64)
    for count in range(1, 8):
        sizes += least >= np.uint64(1 << (8 * count - 1))
    sizes += least >= np.uint64(1 << 63)
    if most.any():
        wide = np.full(len(low), 9, dtype=np.int64)
        for count in range(1, 9):
            wide += most >= np.uint64(1 << (8 * count - 1))
        sizes = np.where(most > 0, wide, sizes)
    return sizes


def _reversed(numbers: UInt64s, sizes: Int64s) -> Word:
    """The low ``sizes`` bytes of each number, the highest first."""
    shift = (64 - 8 * sizes).view(np.uint64)
    # numpy defines a shift by 64: it leaves nothing.
    return Word(np.left_shift(numbers, shift).byteswap(), sizes, 8)
