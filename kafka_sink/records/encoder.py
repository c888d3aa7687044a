"""Encodes rows as V2 records, a whole table at once.

A record consists of length, attributes (0), timestamp delta, offset delta, key length, key, value length,
value, header count and headers. Every number is a zigzag varint
(https://kafka.apache.org/documentation/#record). The numbers of all rows are laid out as columns of bytes.
Then one call of Arrow (``take`` or a join) interleaves them with keys and values, so no Python code runs per
record.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kafka_sink.records import varint_columns
from kafka_sink.records.arrays import Int32s, Int64s, as_binary, indices, null_mask, offsets, values_buffer
from kafka_sink.records.record_columns import ColumnLengths, RecordColumns, binary, join
from kafka_sink.varint import signed

# A response may reject each record of a batch with its own text, and this bounds the memory of such a
# response. It also keeps an offset delta within three bytes, which keeps the upper bounds of sizes close.
MAX_RECORDS_PER_BATCH = 1 << 17

_MAX_JOIN = int(np.iinfo(np.int32).max)
_ONE_ZERO_BYTE = pa.Array.from_buffers(
    pa.binary(), 1, [None, pa.py_buffer(np.array([0, 1], dtype=np.int32)), pa.py_buffer(b"\0")]
)


# If rows have this many bytes on average, their keys and values are not copied before they are compressed.
# Arrow would copy them twice, outside the CPU's caches, which costs more than slicing in Python: with rows of
# 100 kB, a producer takes 0.83 to 0.92 of the CPU time.
_SLICED_ROW_BYTES = 8 * 1024
# Smaller rows take less time in ``take``, which copies all bytes twice.
_JOINED_ROW_BYTES = 64


class ScatteredBytes:
    """Bytes that lie in many places, read as one sequence. Only slices over several places are copied.

    The places are numbers and not one view per piece, which Python's garbage collector would visit.
    """

    __slots__ = ("_begin", "_end", "_ends", "_places", "_sources")

    def __init__(
        self,
        sources: Sequence[memoryview],
        places: tuple[Sequence[int], Sequence[int]],
        ends: Sequence[int],
        begin: int,
        end: int,
    ) -> None:
        """Bytes ``begin`` to ``end`` of all pieces together.

        Piece i ends at ``ends[i]``. ``places`` contains two sequences: for each piece the index of its
        source, and the distance from a position in all pieces to the position in the source.
        """
        self._sources, self._places, self._ends = sources, places, ends
        self._begin, self._end = begin, end

    def __len__(self) -> int:
        return self._end - self._begin

    def part(self, start: int, stop: int) -> ScatteredBytes:
        """The bytes from ``start`` to ``stop``, without a copy."""
        return ScatteredBytes(
            self._sources, self._places, self._ends, self._begin + start, self._begin + stop
        )

    def __getitem__(self, wanted: slice) -> memoryview:
        start, stop, _ = wanted.indices(len(self))
        start, stop = self._begin + start, self._begin + stop
        parts: list[memoryview] = []
        of, shifts = self._places
        piece = bisect_right(self._ends, start)
        while start < stop:
            end = min(stop, self._ends[piece])
            shift = shifts[piece]
            parts.append(self._sources[of[piece]][start + shift : end + shift])
            start = end
            piece += 1
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


Records = memoryview | ScatteredBytes


def encode(rows: RecordColumns, timestamps: Int64s | int, runs: Sequence[RowRange]) -> list[Records]:
    """Encode every row as one V2 record, and return the records of each run as one sequence of bytes.

    ``timestamps`` are milliseconds since the epoch: one for each row in writing order, or one for all rows.
    The runs cover the rows in order and without gaps. No run is empty.
    """
    count = rows.payload.count
    if count == 0:
        return [memoryview(b"") for _ in runs]
    heads = by_ranges(rows, timestamps, runs) if isinstance(timestamps, int) else None
    if heads is None:
        heads = _by_mask(rows, timestamps, runs)
    size = heads.ends[-1]
    if size > _MAX_JOIN:
        raise OverflowError(f"{count} rows encode to {size} bytes; a table must stay below 2 GiB")
    # Without headers, a record's last byte is its header count 0, which is in the next record's prefix.
    first = 1 if rows.headers is None else 0
    columns = _columns(rows, heads)
    pieces: ScatteredBytes | None = None
    if heads.has_values:
        pieces = _joined(columns)
    elif size >= _SLICED_ROW_BYTES * count and not rows.has_nulls:
        pieces = _sliced(columns)
    elif size >= _JOINED_ROW_BYTES * count and rows.order is None:
        pieces = _joined(columns)
    if pieces is not None:
        return [pieces.part(first + start, first + end) for start, end in pairwise([0, *heads.ends])]
    joined = memoryview(_interleave(rows, columns))[first:]
    return [joined[start:end] for start, end in pairwise([0, *heads.ends])]


# The parts of records, in their order. A part is a list of arrays, and each row's index in them.
_Columns = list[tuple[list[pa.Array], Int32s]]


def _columns(rows: RecordColumns, heads: Heads) -> _Columns:
    here: Int32s = np.arange(rows.payload.count, dtype=np.int32)
    there = here if rows.order is None else rows.order
    columns: _Columns = [([heads.prefix], here)]
    if heads.middle is not None:
        columns += [([as_binary(rows.key)], there), ([heads.middle], here)]
    if not heads.has_values:
        columns.append(([as_binary(chunk) for chunk in rows.value], there))
    if rows.headers is not None:
        columns.append(([rows.headers], there))
    return columns


def _sliced(columns: _Columns) -> ScatteredBytes:
    """All records without a copy of keys and values, which are not null, followed by a header count of 0."""
    count = len(columns[0][1])
    sources: list[memoryview] = []
    # For each part of each record: the index of its source, and its first and last byte there.
    table = np.empty((3, count, len(columns)), dtype=np.int64)
    for number, (arrays, places) in enumerate(columns):
        edges = [offsets(array) for array in arrays]
        numbers = np.arange(len(sources), len(sources) + len(arrays))
        table[0, :, number] = np.repeat(numbers, [len(array) for array in arrays])[places]
        table[1, :, number] = np.concatenate([ends[:-1] for ends in edges])[places]
        table[2, :, number] = np.concatenate([ends[1:] for ends in edges])[places]
        sources += [values_buffer(array).data for array in arrays]
    source, first, last = table.reshape(3, -1)
    ends = np.cumsum(last - first)
    total = int(ends[-1])
    where = [*source.tolist(), len(sources)], [*(last - ends).tolist(), -total]
    return ScatteredBytes([*sources, memoryview(b"\0")], where, [*ends.tolist(), total + 1], 0, total + 1)


def _joined(columns: _Columns) -> ScatteredBytes:
    """All records of rows in their original order, joined with one copy, followed by a header count of 0. A
    single column is not copied."""
    parts = [arrays[0] if len(arrays) == 1 else pa.chunked_array(arrays) for arrays, _ in columns]
    joined = parts[0] if len(parts) == 1 else join(parts)
    chunks = joined.chunks if isinstance(joined, pa.ChunkedArray) else [joined]
    sources = [values_buffer(chunk).data[: int(offsets(chunk)[-1])] for chunk in chunks]
    sources.append(memoryview(b"\0"))
    ends = [*accumulate(map(len, sources))]
    shifts = [-end for end in (0, *ends[:-1])]
    return ScatteredBytes(sources, (range(len(sources)), shifts), ends, 0, ends[-1])


def _interleave(rows: RecordColumns, columns: _Columns) -> pa.Buffer:
    """The bytes of all records, from one ``take`` over an array of all their parts. This orders the rows and
    joins their parts in one pass."""
    count = rows.payload.count
    index: Int32s = np.empty(count * len(columns) + 1, dtype=np.int32)
    matrix = index[:-1].reshape(count, len(columns))
    sources: list[pa.Array] = []
    filled = 0
    for place, (arrays, rows_of_arrays) in enumerate(columns):
        np.add(rows_of_arrays, np.int32(filled), out=matrix[:, place])
        sources += arrays
        filled += sum(map(len, arrays))
    if rows.headers is None:
        sources.append(_ONE_ZERO_BYTE)
        index[-1] = filled
    else:
        index = index[:-1]
    return pc.take(pa.concat_arrays(sources), indices(index), boundscheck=False).buffers()[2]


# The bytes that surround keys and values in records: lengths, attributes and deltas, for whole tables.
#
# There are two ways to make them. If the rows form a few ranges within which each number takes the same
# number of bytes in every row, each range is a matrix of bytes, its numbers come from tables, and it can also
# contain keys and values that all have the same length. Otherwise, columns of varints are laid out with a
# mask.


# A range costs about as much as the mask costs for this many rows.
_MIN_RANGE_ROWS = 512
# Longer keys are not copied into the matrix: two copies cost more than a part of their own in ``take``.
_MAX_INLINE_KEY = 64
# The smallest numbers whose varints take two, three and four bytes.
_TWO_BYTES, _THREE_BYTES, _FOUR_BYTES = 1 << 6, 1 << 13, 1 << 20
_ZERO = varint_columns.same(0)

# Bytes that are the same for all rows, or an array with one item per row, all of the same number of bytes.
Field = bytes | npt.NDArray[Any]


class RowRange(NamedTuple):
    """Rows ``start`` to ``stop`` go to one batch. The first of them gets the offset delta ``base_offset``."""

    start: int
    stop: int
    base_offset: int
    base_timestamp: int


@dataclass(frozen=True, slots=True)
class Heads:
    """The bytes that surround keys and values, in writing order.

    ``prefix`` contains the bytes before each key, ``middle`` the bytes between key and value. ``middle`` is
    None if there are no keys, or if ``prefix`` contains everything before the value, including the key. With
    ``has_values``, ``prefix`` contains whole records. Without headers, each prefix begins with the last byte
    of the previous record, its header count of 0. ``ends`` has, for each run, the number of bytes of all
    records up to the end of the run.
    """

    prefix: pa.Array
    middle: pa.Array | None
    ends: list[int]
    has_values: bool = False


# -- a matrix for each range ----------------------------------------------------------------------------


def _table(width: int, *, continued: bool = False) -> npt.NDArray[np.unsignedinteger[Any]]:
    """The varints of 0, 1, 2 ... as little-endian numbers. Those that take ``width`` bytes are valid. With
    ``continued``, they are the low two bytes of longer varints."""
    zigzag = np.arange(_TWO_BYTES if width == 1 else _THREE_BYTES) << 1
    if width == 1:
        return zigzag.astype(np.uint8)
    high = zigzag >> 7 | (0x80 if continued else 0)
    return ((zigzag & 0x7F) | 0x80 | high << 8).astype("<u2")


_TABLES = (_table(1), _table(2))
_LOW_BYTES = _table(2, continued=True)


# The fields of a row, one after the other: a template that has zeros for the fields that differ from row to
# row, and these fields as columns, each with its position in the template.
_Layout = tuple[bytes, list[tuple[int, npt.NDArray[Any]]]]
# Values of consecutive rows, which all have the same length, and the first of these rows.
_Values = tuple[int, npt.NDArray[np.void]]


def _layout(fields: Sequence[Field]) -> _Layout:
    columns: list[tuple[int, npt.NDArray[Any]]] = []
    template = bytearray()
    for field in fields:
        if isinstance(field, bytes):
            template += field
        else:
            columns.append((len(template), field))
            template += bytes(field.itemsize)
    return bytes(template), columns


def by_ranges(rows: RecordColumns, timestamp: int, runs: Sequence[RowRange]) -> Heads | None:
    """The heads of all rows. The runs cover the rows without gaps. Returns None if there are too many ranges,
    or if the width of a number changes within a range."""
    if len(runs) * _MIN_RANGE_ROWS > rows.payload.count or rows.has_nulls:
        return None
    if max(run.base_offset + run.stop - run.start for run in runs) > _FOUR_BYTES:
        return None
    key = None if rows.key is None else _inline_key(rows.key, rows.key_lengths, rows.order)
    key_length = b"\x01" if rows.key is None else _field(rows.key_lengths)
    value_length = _field(rows.value_lengths)
    if key_length is None or value_length is None:
        return None
    shared: list[Field] = [key_length]
    if key is not None:
        shared.append(key)
    ranges = _ranges(rows, timestamp, runs)
    if ranges is None:
        return None
    if rows.key is not None and key is None:
        middle = _filled([(0, rows.payload.count, _layout(()))], _layout([value_length]))
        return Heads(_filled(ranges[0], _layout(shared)), middle, ranges[1])
    shared.append(value_length)
    values = _inline_values(rows) if ranges[1][-1] <= _MAX_JOIN else []
    return Heads(_filled(ranges[0], _layout(shared), values), None, ranges[1], has_values=bool(values))


def _ranges(
    rows: RecordColumns, timestamp: int, runs: Sequence[RowRange]
) -> tuple[list[tuple[int, int, _Layout]], list[int]] | None:
    """For each range its first row, the row after its last, and its fields up to the offset delta.

    The second result has, for each run, the number of bytes of all records up to its end. Returns None if the
    width of the record length changes within a range.
    """
    begin = b"\0" if rows.headers is None else b""
    ranges, ends, end = [], [], 0
    for run in runs:
        between = b"\0" + signed(timestamp - run.base_timestamp)
        for start, stop, low, high in _offset_ranges(run):
            # The bytes of a record outside the payload: attributes, deltas and a header count of 0.
            extra = len(between) + low.itemsize + len(high) + len(begin)
            body = rows.payload.slice(start, stop)
            length = _field(body, extra)
            if length is None:
                return None
            width = extra + (len(length) if isinstance(length, bytes) else length.itemsize)
            end += (stop - start) * width
            end += body.count * body.largest if body.each is None else int(body.each.sum(dtype=np.int64))
            ranges.append((start, stop, _layout((begin, length, between, low, high))))
        ends.append(end)
    return ranges, ends


def _offset_ranges(run: RowRange) -> Iterator[tuple[int, int, npt.NDArray[np.unsignedinteger[Any]], bytes]]:
    """Split a run into ranges whose offset deltas differ only in the low one or two bytes. Each range has its
    first row, the row after its last, each row's low bytes, and the rows' high byte."""
    at, shift = run.start, run.base_offset - run.start
    while at < run.stop:
        offset = at + shift
        if offset < _TWO_BYTES:
            stop = min(run.stop, _TWO_BYTES - shift)
            yield at, stop, _TABLES[0][offset : stop + shift], b""
        else:
            high, low = divmod(offset, _THREE_BYTES)
            stop = min(run.stop, (high + 1) * _THREE_BYTES - shift)
            table = _LOW_BYTES if high else _TABLES[1]
            yield at, stop, table[low : low + stop - at], bytes([high]) if high else b""
        at = stop


def _field(lengths: ColumnLengths, extra: int = 0) -> Field | None:
    """The lengths plus ``extra`` as varints. None if their widths may differ or exceed two bytes."""
    if lengths.each is None:
        return signed(lengths.largest + extra)
    widest = len(signed(lengths.largest + extra))
    if widest > len(_TABLES) or widest != len(signed(lengths.smallest + extra)):
        return None
    return _TABLES[widest - 1][extra:].take(lengths.each)


def _entries(array: pa.Array, size: int) -> npt.NDArray[np.void]:
    """The entries of an array in which all have ``size`` bytes."""
    first = int(offsets(array)[0])
    return values_buffer(array)[first : first + len(array) * size].view(f"V{size}")


def _inline_key(key: pa.Array, lengths: ColumnLengths, order: Int32s | None) -> Field | None:
    """The keys in writing order if all have the same short length, or None. No key is null."""
    if lengths.each is not None or not 0 < lengths.largest <= _MAX_INLINE_KEY:
        return None
    keys = _entries(key, lengths.largest)
    return keys if order is None else keys.take(order)


def _inline_values(rows: RecordColumns) -> list[_Values]:
    """The values in writing order if all have the same length and are the last bytes of their records. The
    list is empty otherwise, and if the rows are not in long spans of their original order, as rows without
    keys are: numpy would copy scattered values twice, as ``take`` does. No value is null."""
    size, order = rows.value_lengths.largest, rows.order
    if rows.headers is not None or rows.value_lengths.each is not None or not 0 < size < _SLICED_ROW_BYTES:
        return []
    chunks = [_entries(chunk, size) for chunk in rows.value]
    if order is None:
        return list(zip(accumulate(map(len, chunks), initial=0), chunks, strict=False))
    edges = np.flatnonzero(np.diff(order, prepend=-2, append=-2) != 1)
    if len(edges) * _MIN_RANGE_ROWS > len(order):
        return []
    whole = chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
    return [(start, whole[order[start] :][: stop - start]) for start, stop in pairwise(edges.tolist())]


def _filled(
    ranges: Sequence[tuple[int, int, _Layout]], shared: _Layout, values: Sequence[_Values] = ()
) -> pa.Array:
    """One entry for each row: the fields of its range, followed by those of ``shared`` and, if there are any,
    by its value. The ranges cover the rows in order. A range's own columns contain only its rows."""
    count = ranges[-1][1]
    shared_template, shared_columns = shared
    more = len(shared_template) + (values[0][1].itemsize if values else 0)
    sizes = [(stop - start) * (len(own) + more) for start, stop, (own, _) in ranges]
    data = np.empty(sum(sizes), dtype=np.uint8)
    ends = np.empty(count + 1, dtype=np.int32)
    at = 0
    for (start, stop, (own, own_columns)), size in zip(ranges, sizes, strict=True):
        template = own + shared_template
        width = len(own) + more
        ends[start:stop] = np.arange(at, at + size, width, dtype=np.int32)
        np.ndarray((stop - start,), f"V{len(template)}", data.data, at, (width,))[:] = np.void(template)
        columns = [(place, start, column) for place, column in own_columns]
        columns += ((len(own) + place, 0, column) for place, column in shared_columns)
        columns += ((len(template), first, column) for first, column in values)
        for place, first, column in columns:
            low, high = max(start, first), min(stop, first + len(column))
            if low < high:
                cells = data.data, at + (low - start) * width + place, (width,)
                np.ndarray((high - low,), column.dtype, *cells)[:] = column[low - first : high - first]
        at += size
    ends[count] = at
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(data)])


# -- columns with a mask --------------------------------------------------------------------------------


def _by_mask(rows: RecordColumns, timestamps: Int64s | int, runs: Sequence[RowRange]) -> Heads:
    count = rows.payload.count
    lengths = np.array([run.stop - run.start for run in runs])
    shifts = np.array([run.base_offset - run.start for run in runs], dtype=np.int64)
    offsets = varint_columns.column(np.arange(count, dtype=np.int64) + np.repeat(shifts, lengths))
    bases = np.repeat(np.array([run.base_timestamp for run in runs], dtype=np.int64), lengths)
    deltas = varint_columns.column(timestamps - bases)
    key = (
        varint_columns.same(-1)
        if rows.key is None
        else _length_column([rows.key], rows.key_lengths, rows.order)
    )
    value = _length_column(rows.value, rows.value_lengths, rows.order)
    body = rows.body.numbers() + (deltas.widths + offsets.widths)
    length = varint_columns.column(body)
    numbers = [length, _ZERO, deltas, offsets, key]
    if rows.headers is None:
        # The header count of the previous record.
        numbers.insert(0, _ZERO)
    ends = np.cumsum(np.add.reduceat(body + length.widths, [run.start for run in runs], dtype=np.int64))
    if rows.key is None:
        return Heads(_varints([*numbers, value], count), None, ends.tolist())
    return Heads(_varints(numbers, count), _varints([value], count), ends.tolist())


def _varints(columns: list[varint_columns.Column], count: int) -> pa.Array:
    widths: npt.NDArray[np.integer[Any]] | int = 0
    for column in columns:
        widths = widths + column.widths
    return binary(varint_columns.lay_out(columns, count), widths, count)


def _length_column(
    chunks: Sequence[pa.Array], lengths: ColumnLengths, order: Int32s | None
) -> varint_columns.Column:
    """A length field, with -1 for null. ``order`` has the position in the chunks of each length's row."""
    if any(chunk.null_count for chunk in chunks):
        nulls = np.concatenate([null_mask(chunk) for chunk in chunks])
        return varint_columns.column(
            np.where(nulls if order is None else nulls[order], -1, lengths.numbers())
        )
    return (
        varint_columns.same(lengths.largest) if lengths.each is None else varint_columns.column(lengths.each)
    )
