"""Zigzag varints for whole columns, in the encoding of Protocol Buffers that the V2 record format uses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kafka_sink.records.arrays import Bools, Bytes, Int32s, Int64s, UInt32s, UInt64s
from kafka_sink.varint import signed

_MAX_NARROW = (1 << 31) - 1
_NO_NUMBERS = np.zeros(0, dtype=np.uint32)

Unsigned = UInt64s | UInt32s
Signed = Int64s | Int32s
Widths = Bytes | int


@dataclass(frozen=True, slots=True)
class Column:
    """Zigzag-encoded numbers, and the size of each as a varint (1 to 10 bytes).

    ``widths`` is one int if all varints have the same size. If all numbers are the same, as timestamps and
    key lengths often are, ``constant`` is their varint and ``numbers`` is empty.
    """

    numbers: Unsigned
    widths: Widths
    narrowest: int
    widest: int
    constant: bytes | None = None


def same(value: int) -> Column:
    """A column that has the same number in every row."""
    encoded = signed(value)
    return Column(_NO_NUMBERS, len(encoded), len(encoded), len(encoded), encoded)


def column(values: Signed) -> Column:
    """Zigzag-encode signed numbers, so that small magnitudes stay small."""
    if len(values) == 0:
        return same(0)
    low, high = int(values.min()), int(values.max())
    if low == high:
        return same(low)
    numbers: Unsigned
    if low >= -_MAX_NARROW // 2 and high <= _MAX_NARROW // 2:
        # 32 bits suffice for nearly every column, and halve the memory traffic.
        narrow = values.astype(np.int32, copy=False)
        numbers = ((narrow << 1) ^ (narrow >> 31)).view(np.uint32)
    else:
        wide = values.astype(np.int64, copy=False)
        numbers = ((wide << 1) ^ (wide >> 63)).view(np.uint64)
    extremes = (len(signed(low)), len(signed(high)))
    # A varint grows with the magnitude, so the widest one belongs to the lowest or the highest number.
    widest = max(extremes)
    if widest == 1 or (low >= 0 and extremes[0] == widest) or (high < 0 and extremes[1] == widest):
        return Column(numbers, widest, widest, widest)
    widths = np.ones(len(values), dtype=np.uint8)
    for index in range(1, widest):
        widths += numbers >= numbers.dtype.type(1 << (7 * index))
    return Column(numbers, widths, int(widths.min()), widest)


def widths(values: Signed, low: int | None = None, high: int | None = None) -> Widths:
    """The size of each number as a zigzag varint; one int if all have the same size. No number may be
    negative. ``low`` and ``high`` are bounds of the numbers, if the caller knows them."""
    if len(values) == 0:
        return 1
    narrowest = len(signed(int(values.min()) if low is None else low))
    widest = len(signed(int(values.max()) if high is None else high))
    if narrowest == widest:
        return widest
    sizes = np.full(len(values), narrowest, dtype=np.uint8)
    for width in range(narrowest, widest):
        sizes += values >= 1 << (7 * width - 1)
    return sizes


def read_column(data: Bytes, at: Int64s) -> tuple[Int64s, Int64s]:
    """Read the zigzag varint at each position; return the numbers, and the position after each."""
    numbers, ends = np.zeros(len(at), dtype=np.int64), at.copy()
    unread = np.arange(len(at))
    shift = 0
    while len(unread):
        septets = data[ends[unread]]
        numbers[unread] |= (septets & 0x7F).astype(np.int64) << shift
        ends[unread] += 1
        unread = unread[septets >= 0x80]
        shift += 7
    return (numbers >> 1) ^ -(numbers & 1), ends


def lay_out(columns: list[Column], rows: int) -> Bytes:
    """All varints of the rows, row after row.

    The columns form a matrix of bytes in which each varint has the width of the widest one of its column. At
    the end, one mask removes the unused bytes of shorter varints. Most columns have one width, so few tables
    need the mask.
    """
    total = sum(item.widest for item in columns)
    matrix = np.empty((rows, total), dtype=np.uint8)
    mask: Bools | None = None
    at = 0
    for item in columns:
        if item.constant is not None:
            matrix[:, at : at + item.widest] = np.frombuffer(item.constant, dtype=np.uint8)
        else:
            _write_varints(matrix, at, item)
        if item.narrowest != item.widest:
            if mask is None:
                mask = np.ones((rows, total), dtype=np.bool_)
            for index in range(item.narrowest, item.widest):
                np.greater(item.widths, index, out=mask[:, at + index])
        at += item.widest
    return matrix.reshape(-1) if mask is None else matrix[mask]


def _write_varints(matrix: Bytes, at: int, item: Column) -> None:
    numbers = item.numbers
    for index in range(item.widest):
        septet = numbers.astype(np.uint8)
        if index + 1 < item.widest:
            septet &= 0x7F
            if index + 1 < item.narrowest:
                septet |= 0x80
            else:
                septet |= np.greater(item.widths, index + 1).view(np.uint8) << np.uint8(7)
            numbers = numbers >> numbers.dtype.type(7)
        matrix[:, at + index] = septet
