"""Bytes of rows, put together for whole columns.

A row is a sequence of pieces: words of up to eight bytes, for numbers, and binary arrays, for texts and for
what was encoded before. Words are written one over the end of the other, so that a number of three bytes
costs no more than one of eight, and no mask drops the bytes that it does not need.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kafka_sink.records.arrays import binary_of, indices, lengths, offsets, with_nulls

_WORD = 8
_MAX_BYTES = int(np.iinfo(np.int32).max)
# A varint of eight bytes holds as many bits.
_SEPTETS_BITS = 56

UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Word:
    """Up to eight bytes of each row: the low ``size`` bytes of ``value``, the lowest first.

    Each is an array with one number a row, or one number for all rows. No size exceeds ``widest``. Bytes
    beyond a row's size are zero.
    """

    value: UInt64s | int
    size: Int64s | int
    widest: int

    def followed_by(self, other: Word) -> Word:
        """Both in one word; their widest must fit."""
        value: Any
        if isinstance(self.size, int):
            if isinstance(self.value, int) and isinstance(other.value, int):
                value = self.value | other.value << (8 * self.size)
            else:
                value = _shifted(other.value, 8 * self.size) | _unsigned(self.value)
        else:
            value = np.left_shift(_unsigned(other.value), (self.size << 3).view(np.uint64))
            value |= _unsigned(self.value)
        return Word(value, self.size + other.size, self.widest + other.widest)


Piece: TypeAlias = Word | pa.Array


def _unsigned(value: UInt64s | int) -> UInt64s | np.uint64:
    return np.uint64(value) if isinstance(value, int) else value


def _shifted(value: UInt64s | int, bits: int) -> UInt64s | np.uint64:
    return np.uint64(value << bits) if isinstance(value, int) else value << np.uint64(bits)


def constant(content: bytes) -> list[Piece]:
    """The same bytes in every row."""
    return [
        Word(int.from_bytes(part, "little"), len(part), len(part))
        for at in range(0, len(content), _WORD)
        for part in (content[at : at + _WORD],)
    ]


def fixed(value: UInt64s, size: int, nulls: Mask | None = None) -> Word:
    """The low ``size`` bytes of each number, none of a null."""
    if nulls is None:
        return Word(value, size, size)
    present = ~nulls
    return Word(np.where(present, value, np.uint64(0)), present * np.int64(size), size)


def zigzag(numbers: npt.NDArray[np.signedinteger[Any]]) -> UInt64s:
    """Small magnitudes as small numbers without a sign: 0, -1, 1, -2 become 0, 1, 2, 3."""
    wide = numbers.astype(np.int64, copy=False)
    return ((wide << 1) ^ (wide >> 63)).view(np.uint64)


def varint(numbers: UInt64s, nulls: Mask | None = None) -> list[Word]:
    """Varints of Protocol Buffers and Avro: seven bits a byte, the lowest first."""
    if nulls is not None:
        numbers = np.where(nulls, np.uint64(0), numbers)
    high = int(numbers.max(initial=0))
    widest = max(1, (high.bit_length() + 6) // 7)
    low_size = _varint_sizes(numbers, min(widest, _WORD), nulls)
    if widest <= _WORD:
        return [Word(_spread_septets(numbers, low_size, widest), low_size, widest)]
    # The rest goes to a word of its own: at most eight bits, in two bytes.
    rest = numbers >> np.uint64(_SEPTETS_BITS)
    has_rest = rest > 0
    sizes = has_rest * np.int64(1) + (rest > np.uint64(0x7F))
    low = _spread_septets(numbers & np.uint64((1 << _SEPTETS_BITS) - 1), low_size, _WORD)
    low |= has_rest.astype(np.uint64) << np.uint64(63)
    return [Word(low, low_size, _WORD), Word(_spread_septets(rest, sizes, 2), sizes, 2)]


def _varint_sizes(numbers: UInt64s, widest: int, nulls: Mask | None) -> Int64s | int:
    """Bytes of each number, at most ``widest``."""
    if nulls is None and widest == 1:
        return 1
    sizes = np.ones(len(numbers), dtype=np.int64)
    for width in range(1, widest):
        sizes += numbers >= np.uint64(1 << (7 * width))
    if nulls is not None:
        sizes[nulls] = 0
    return sizes


def _spread_septets(numbers: UInt64s, sizes: Int64s | int, widest: int) -> UInt64s:
    """Seven bits of each number in each byte, with the high bit set in all bytes but the last."""
    if widest == 1:
        return numbers
    spread = numbers
    for keep, move, bits in (
        (0x000000000FFFFFFF, 0x00FFFFFFF0000000, 4),
        (0x00003FFF00003FFF, 0x0FFFC0000FFFC000, 2),
        (0x007F007F007F007F, 0x3F803F803F803F80, 1),
    ):
        if widest * 8 > {4: 32, 2: 16, 1: 8}[bits]:
            spread = (spread & np.uint64(keep)) | (spread & np.uint64(move)) << np.uint64(bits)
    return spread | _CONTINUED.take(sizes)


# By the size of a varint: the high bits of all of its bytes but the last.
_CONTINUED = np.array(
    [sum(0x80 << (8 * byte) for byte in range(size - 1)) for size in range(_WORD + 1)], dtype=np.uint64
)


def nothing_where(nulls: Mask, pieces: Iterable[Word]) -> list[Word]:
    """The same words, without a byte where ``nulls`` is true."""
    present = ~nulls
    return [
        Word(np.where(present, word.value, np.uint64(0)), present * np.int64(1) * word.size, word.widest)
        for word in pieces
    ]


def spread(array: pa.Array, nulls: Mask) -> pa.Array:
    """The entries of a binary array at the rows that are not null, in order; the other rows are empty."""
    sizes = np.zeros(len(nulls), dtype=np.int32)
    sizes[~nulls] = lengths(array)
    first = int(offsets(array)[0])
    ends = np.empty(len(nulls) + 1, dtype=np.int32)
    ends[0] = first
    np.cumsum(sizes, out=ends[1:])
    ends[1:] += first
    return pa.Array.from_buffers(pa.binary(), len(nulls), [None, pa.py_buffer(ends), array.buffers()[2]])


def grouped(array: pa.Array, counts: Int64s) -> pa.Array:
    """Neighbouring entries of a binary array without nulls as one: the next ``counts[i]`` become entry i."""
    ends = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=ends[1:])
    bounds = np.ascontiguousarray(offsets(array)[ends], dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(counts), [None, pa.py_buffer(bounds), array.buffers()[2]])


def join(pieces: Sequence[Piece], rows: int, nulls: Mask | None = None) -> pa.Array:
    """Each row's pieces as one entry of a binary array, null where ``nulls`` is true.

    Raises OverflowError where they take 2 GiB or more.
    """
    if not rows:
        return binary_of(())
    parts: list[pa.Array] = []
    for is_word, run in groupby(pieces, lambda piece: isinstance(piece, Word)):
        found = list(run)
        parts += [_joined_words(_packed(found), rows)] if is_word else found
    joined = parts[0] if len(parts) == 1 else _interleaved(parts, rows)
    return joined if nulls is None else with_nulls(joined, nulls)


def _packed(words: Iterable[Word]) -> list[Word]:
    """The same bytes in fewer words."""
    packed: list[Word] = []
    for word in words:
        if packed and packed[-1].widest + word.widest <= _WORD:
            packed[-1] = packed[-1].followed_by(word)
        elif word.widest:
            packed.append(word)
    return packed


def _joined_words(words: list[Word], rows: int) -> pa.Array:
    if all(isinstance(word.size, int) for word in words):
        return _in_columns(words, rows)
    sizes = np.empty((rows, len(words)), dtype=np.int64)
    values = np.empty((rows, len(words)), dtype=np.uint64)
    for place, word in enumerate(words):
        sizes[:, place] = word.size
        values[:, place] = word.value
    flat = sizes.reshape(-1)
    ends = np.cumsum(flat)
    data = _buffer(int(ends[-1]))
    # numpy assigns in order: what a word writes beyond its size, the next one overwrites.
    np.ndarray((len(data) - _WORD + 1,), "<u8", data.data, 0, (1,))[ends - flat] = values.reshape(-1)
    bounds = np.zeros(rows + 1, dtype=np.int32)
    bounds[1:] = ends[len(words) - 1 :: len(words)]
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(bounds), pa.py_buffer(data)])


def _in_columns(words: list[Word], rows: int) -> pa.Array:
    """Where each word has the same size in all rows, rows are as long, and no position need be computed."""
    width = sum(int(word.size) for word in words)
    data = _buffer(width * rows)
    at = 0
    for word in words:
        # In this order, for the same reason.
        for place in _byte_runs(int(word.size)):
            column: npt.NDArray[Any] = np.ndarray((rows,), place[1], data.data, at + place[0], (width,))
            column[:] = _shifted_down(word.value, 8 * place[0])
        at += int(word.size)
    bounds = (
        np.arange(0, (rows + 1) * width, width, dtype=np.int32) if width else np.zeros(rows + 1, np.int32)
    )
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(bounds), pa.py_buffer(data)])


def _byte_runs(size: int) -> list[tuple[int, str]]:
    """Numbers of eight, four, two and one bytes that make up so many, each with its place."""
    found, at = [], 0
    for width in (8, 4, 2, 1):
        if size - at >= width:
            found.append((at, f"<u{width}"))
            at += width
    return found


def _shifted_down(value: UInt64s | int, bits: int) -> UInt64s | np.uint64:
    return np.uint64(value >> bits) if isinstance(value, int) else value >> np.uint64(bits)


def _buffer(size: int) -> npt.NDArray[np.uint8]:
    """Room for so many bytes and the rest of a last word."""
    if size + _WORD > _MAX_BYTES:
        raise OverflowError(f"rows encode to {size} bytes; a table stays below 2 GiB")
    return np.empty(size + _WORD, dtype=np.uint8)


def _interleaved(parts: list[pa.Array], rows: int) -> pa.Array:
    count = len(parts)
    places = np.arange(rows, dtype=np.int32)[:, None] + np.arange(count, dtype=np.int32) * np.int32(rows)
    if sum(int(offsets(part)[-1]) - int(offsets(part)[0]) for part in parts) > _MAX_BYTES:
        raise OverflowError(f"{rows} rows encode to 2 GiB or more")
    taken = pc.take(pa.concat_arrays(parts), indices(places.reshape(-1)), boundscheck=False)
    bounds = np.ascontiguousarray(offsets(taken)[::count], dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(bounds), taken.buffers()[2]])
