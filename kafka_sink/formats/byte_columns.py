"""Builds the bytes of rows, for whole columns at once.

A row is a sequence of pieces. A piece is either a word of up to eight bytes, for numbers, or an entry of a
binary array, for texts and for parts that are already encoded. Consecutive words share a slot, which has room
for the widest row. They are written one column at a time. Each word overwrites the unused bytes of the word
before it, so a number of three bytes costs no more than one of eight, and no mask has to remove unused bytes.
Arrow then gathers slots and texts in one pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_sink.records.arrays import (
    Bools,
    Bytes,
    Int64s,
    UInt64s,
    binary_of,
    every_second,
    lengths,
    offsets,
    values_buffer,
    with_nulls,
)

_WORD = 8
_MAX_BYTES = int(np.iinfo(np.int32).max)
# The number of bits in a varint of eight bytes.
_SEPTETS_BITS = 56


@dataclass(frozen=True, slots=True)
class Word:
    """Up to eight bytes of each row: the low ``size`` bytes of ``value``, lowest byte first.

    ``value`` and ``size`` are arrays with one number for each row, or one number for all rows. No size
    exceeds ``widest``. The bytes after a row's size are zero.
    """

    value: UInt64s | int
    size: Int64s | int
    widest: int

    def followed_by(self, other: Word) -> Word:
        """Combine both words into one. Their greatest sizes together must not exceed eight bytes."""
        value: Any
        if isinstance(self.size, int):
            if isinstance(self.value, int) and isinstance(other.value, int):
                value = self.value | other.value << (8 * self.size)
            else:
                value = (_unsigned(other.value) << np.uint64(8 * self.size)) | _unsigned(self.value)
        else:
            value = np.left_shift(_unsigned(other.value), (self.size << 3).view(np.uint64))
            value |= _unsigned(self.value)
        return Word(value, self.size + other.size, self.widest + other.widest)


Piece: TypeAlias = Word | pa.Array


def _unsigned(value: UInt64s | int) -> UInt64s | np.uint64:
    return np.uint64(value) if isinstance(value, int) else value


def constant(content: bytes) -> list[Piece]:
    """The same bytes in every row."""
    return [
        Word(int.from_bytes(part, "little"), len(part), len(part))
        for at in range(0, len(content), _WORD)
        for part in (content[at : at + _WORD],)
    ]


def fixed(value: UInt64s, size: int, nulls: Bools | None = None) -> Word:
    """The low ``size`` bytes of each number; no bytes for null."""
    word = Word(value, size, size)
    return word if nulls is None else nothing_where(nulls, [word])[0]


def zigzag(numbers: npt.NDArray[np.signedinteger[Any]]) -> UInt64s:
    """Map signed numbers to unsigned ones: 0, -1, 1, -2 become 0, 1, 2, 3."""
    wide = numbers.astype(np.int64, copy=False)
    return ((wide << 1) ^ (wide >> 63)).view(np.uint64)


def varint(numbers: UInt64s, nulls: Bools | None = None) -> list[Word]:
    """Varints as in Protocol Buffers and Avro: seven bits in each byte, the lowest bits first."""
    if nulls is not None:
        numbers = np.where(nulls, np.uint64(0), numbers)
    low, high = (int(numbers.min()), int(numbers.max())) if len(numbers) else (0, 0)
    narrowest, widest = (max(1, (bound.bit_length() + 6) // 7) for bound in (low, high))
    sizes = _varint_sizes(numbers, min(narrowest, _WORD), min(widest, _WORD))
    if nulls is not None:
        sizes = sizes * ~nulls
    if widest <= _WORD:
        return [Word(_spread_septets(numbers, sizes, widest), sizes, widest)]
    # The remaining bits go to a second word: at most eight bits, in two bytes.
    rest = numbers >> np.uint64(_SEPTETS_BITS)
    has_rest = rest > 0
    rest_sizes = has_rest * np.int64(1) + (rest > np.uint64(0x7F))
    first = _spread_septets(numbers & np.uint64((1 << _SEPTETS_BITS) - 1), sizes, _WORD)
    first |= has_rest.astype(np.uint64) << np.uint64(63)
    return [Word(first, sizes, _WORD), Word(_spread_septets(rest, rest_sizes, 2), rest_sizes, 2)]


def _varint_sizes(numbers: UInt64s, narrowest: int, widest: int) -> Int64s | int:
    """The size of each varint, at most ``widest``; one number if all have the same size."""
    if narrowest == widest:
        return widest
    if widest - narrowest > 2:
        # The exponent of a float is its number of bits. Numbers that no float represents are capped.
        floats = np.minimum(numbers, np.uint64(_FLOATS_BITS)).astype(np.float64)
        by_exponent: Int64s = _SIZES.take(floats.view(np.int64) >> 52)
        return by_exponent
    sizes = np.full(len(numbers), narrowest, dtype=np.int64)
    for width in range(narrowest, widest):
        sizes += numbers >= np.uint64(1 << (7 * width))
    return sizes


def _spread_septets(numbers: UInt64s, sizes: Int64s | int, widest: int) -> UInt64s:
    """Put seven bits of each number into each byte, with the high bit set in all bytes except the last."""
    if widest == 1:
        return numbers
    spread = numbers
    for above, keep, move, bits in (
        (4, 0x000000000FFFFFFF, 0x00FFFFFFF0000000, 4),
        (2, 0x00003FFF00003FFF, 0x0FFFC0000FFFC000, 2),
        (1, 0x007F007F007F007F, 0x3F803F803F803F80, 1),
    ):
        if widest > above:
            moved = spread & np.uint64(move)
            moved <<= np.uint64(bits)
            spread = spread & np.uint64(keep)
            spread |= moved
    spread |= _CONTINUED[sizes] if isinstance(sizes, int) else _CONTINUED.take(sizes)
    return spread


# For each size of a varint, the high bits of all its bytes except the last.
_CONTINUED = np.array(
    [sum(0x80 << (8 * byte) for byte in range(size - 1)) for size in range(_WORD + 1)], dtype=np.uint64
)
_FLOATS_BITS = (1 << 53) - 1
# The size of the varint of a number, by its exponent as a float. Zero has the exponent 0.
_SIZES = np.array([max(1, (exponent - 1023 + 7) // 7) for exponent in range(1023 + 53)], dtype=np.int64)


def nothing_where(nulls: Bools, pieces: Iterable[Word]) -> list[Word]:
    """The same words, but without bytes where ``nulls`` is true."""
    present = ~nulls
    return [
        Word(np.where(present, word.value, np.uint64(0)), present * np.int64(1) * word.size, word.widest)
        for word in pieces
    ]


def spread(array: pa.Array, nulls: Bools) -> pa.Array:
    """Put the entries of a binary array into the rows that are not null. The other rows are empty."""
    sizes = np.zeros(len(nulls), dtype=np.int32)
    sizes[~nulls] = lengths(array)
    first = int(offsets(array)[0])
    ends = np.empty(len(nulls) + 1, dtype=np.int32)
    ends[0] = first
    np.cumsum(sizes, out=ends[1:])
    ends[1:] += first
    return pa.Array.from_buffers(pa.binary(), len(nulls), [None, pa.py_buffer(ends), array.buffers()[2]])


def join(pieces: Iterable[Piece], rows: int, nulls: Bools | None = None) -> pa.Array:
    """Join each row's pieces to one entry of a binary array, which is null where ``nulls`` is true. Raises
    OverflowError if they take 2 GiB or more."""
    if not rows:
        return binary_of(())
    parts: list[list[Word] | pa.Array] = []
    for piece in pieces:
        if not isinstance(piece, Word):
            parts.append(piece)
        elif parts and isinstance(parts[-1], list):
            parts[-1].append(piece)
        else:
            parts.append([piece])
    parts = [_packed(part) if isinstance(part, list) else part for part in parts]
    is_one = len(parts) == 1 and isinstance(parts[0], pa.Array)
    joined = parts[0] if is_one else _gathered(parts or [[]], rows)
    return joined if nulls is None else with_nulls(joined, nulls)


def _gathered(parts: Sequence[list[Word] | pa.Array], rows: int) -> pa.Array:
    size = sum(_size(part, rows) for part in parts)
    if size > _MAX_BYTES:
        raise OverflowError(f"rows encode to {size} bytes; a table must stay below 2 GiB")
    data = np.empty(size, dtype=np.uint8)
    # For each part and row, its first byte and the byte after its last. Gaps are skipped later.
    bounds = np.empty((len(parts), 2, rows), dtype=np.int32)
    at = 0
    for part, (starts, ends) in zip(parts, bounds, strict=True):
        own = _size(part, rows)
        if isinstance(part, list):
            slots = np.arange(at, at + own, _stride(part))
            starts[:], ends[:] = slots, _write(part, data, slots)
        else:
            first = int(offsets(part)[0])
            data[at : at + own] = values_buffer(part)[first : first + own]
            np.add(offsets(part)[:-1], at - first, out=starts, casting="same_kind")
            np.add(starts, lengths(part), out=ends, casting="same_kind")
        at += own
    edges = np.empty(bounds.size + 1, dtype=np.int32)
    edges[:-1].reshape(rows, -1)[:] = bounds.reshape(-1, rows).T
    # The parts of a row may lie in any order, but Arrow requires that the last edge is not before the first.
    edges[-1] = size
    taken = every_second(edges, data)
    firsts = np.ascontiguousarray(offsets(taken)[:: len(parts)], dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(firsts), taken.buffers()[2]])


def _size(part: list[Word] | pa.Array, rows: int) -> int:
    """The bytes of all slots of a part, or of all its texts."""
    if not isinstance(part, list):
        return int(offsets(part)[-1]) - int(offsets(part)[0])
    # If the bytes are the same in all rows, there is only one slot.
    is_same = all(isinstance(word.value, int) and isinstance(word.size, int) for word in part)
    return _stride(part) * (1 if is_same else rows)


def _stride(words: Sequence[Word]) -> int:
    """The size of a slot. Each word is written as eight bytes, so the last one needs room for these."""
    return sum(word.widest for word in words[:-1]) + _WORD


def _write(words: Sequence[Word], data: Bytes, slots: Int64s) -> Int64s:
    """Write the words of each row from the start of its slot; return the positions where they end."""
    rest, ends = iter(words), slots
    for word in rest:
        np.ndarray((len(ends),), "<u8", data.data, int(ends[0]), (_stride(words),))[:] = word.value
        ends = ends + word.size
        if not isinstance(word.size, int):
            break
    anywhere: UInt64s = np.ndarray((len(data) - _WORD + 1,), "<u8", data.data, 0, (1,))
    for word in rest:
        anywhere[ends] = word.value
        ends += word.size
    return ends


def _packed(words: Iterable[Word]) -> list[Word]:
    """The same bytes in fewer words."""
    packed: list[Word] = []
    for word in words:
        if packed and packed[-1].widest + word.widest <= _WORD:
            packed[-1] = packed[-1].followed_by(word)
        elif word.widest:
            packed.append(word)
    return packed
