"""Reduces columns to the few Arrow types that encoders support, and reports rows that do not fit a schema."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kafka_sink.errors import KafkaSinkError, SchemaError
from kafka_sink.formats import byte_columns
from kafka_sink.formats.byte_columns import Piece, join, spread
from kafka_sink.records.arrays import (
    Bools,
    Bytes,
    Int64s,
    UInt64s,
    as_binary,
    indices,
    is_utf8,
    lengths,
    narrow,
    null_mask,
    numbers,
    offsets,
    spans,
    validity,
    with_nulls,
)
from kafka_sink.records.extension_types import BOOL8, UUID, content_type, shown
from kafka_sink.records.record_columns import binary


class UnfitRowsError(KafkaSinkError):
    """Rows that do not fit the schema. ``rows`` marks them, and the message contains the field's ``path``."""

    def __init__(self, rows: Bools, path: str, problem: str) -> None:
        super().__init__(f"field '{path}' {problem}" if path else problem)
        self.rows = rows

    def move(self, places: npt.NDArray[np.signedinteger[Any]], count: int) -> None:
        """Mark the rows at ``places``, of ``count`` rows, in the order in which the user knows them."""
        self.rows = np.zeros(count, dtype=np.bool_)
        self.rows[places] = True


def joined(path: str, name: str) -> str:
    """A field's name after the names of the fields that contain it."""
    return f"{path}.{name}" if path else name


def unsupported_type(path: str, kind: pa.DataType, wanted: object) -> SchemaError:
    """The error for a column whose type does not fit the schema."""
    return SchemaError(
        f"column '{path}' has the type {shown(kind)}, but the schema requires {wanted}: cast it, or "
        "register another schema"
    )


def missing_type(path: str, kind: pa.DataType, whose: str) -> SchemaError:
    """The error for a column whose type has no counterpart in this format."""
    return SchemaError(
        f"column '{path}' has the type {shown(kind)}, which {whose} does not have: cast it, for example to "
        "string"
    )


def require_text_keys(kind: pa.MapType, path: str, whose: str) -> None:
    """Raise SchemaError for a map whose keys are not strings."""
    if plain_type(kind.key_type) != pa.string():
        raise SchemaError(
            f"column '{path}' is a map with keys of type {kind.key_type}, but keys of {whose} are "
            "strings: cast them"
        )


def reject(wrong: Bools, path: str, problem: str, nulls: Bools | None = None) -> None:
    """Raise UnfitRowsError if a row is wrong that is not null."""
    if nulls is not None:
        wrong = wrong & ~nulls
    if wrong.any():
        raise UnfitRowsError(wrong, path, problem)


def require_no_nulls(column: pa.Array, path: str, nulls: Bools | None = None) -> None:
    """Raise UnfitRowsError if a field that must not be null is null. It has no value where ``nulls`` is
    true."""
    if column.null_count:
        reject(null_mask(column), path, "is null, but the schema does not allow null there", nulls)


def require_utf8(column: pa.Array, path: str, problem: str) -> None:
    """Raise UnfitRowsError for texts that are not valid UTF-8."""
    if not is_utf8(column):
        entries = as_binary(column).to_pylist()
        wrong = [entry is not None and entry.decode(errors="replace").encode() != entry for entry in entries]
        reject(np.array(wrong), path, problem)


class Encoder(Protocol):
    """Encodes columns of one Arrow type with one schema."""

    def pieces(self, column: pa.Array, nulls: Bools | None) -> list[Piece]:
        """The pieces of each row. A row has no bytes where ``nulls`` is true; None if no entry is null.
        Raises UnfitRowsError."""
        ...


@dataclass(frozen=True, slots=True)
class Leaf:
    """An encoder that consists of one function."""

    pieces: Callable[[pa.Array, Bools | None], list[Piece]]


def varints(numbers: Callable[[pa.Array, Bools | None], UInt64s]) -> Encoder:
    """Numbers as varints. ``numbers`` returns the numbers of a column."""
    return Leaf(lambda column, nulls: [*byte_columns.varint(numbers(column, nulls), nulls)])


def fixed(size: int, numbers: Callable[[pa.Array, Bools | None], UInt64s]) -> Encoder:
    """Numbers in ``size`` bytes each."""
    return Leaf(lambda column, nulls: [byte_columns.fixed(numbers(column, nulls), size, nulls)])


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column after ``plain``. The types of its children are unchanged."""
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_extension(kind)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if pa.types.is_decimal(kind) and kind.bit_width < 128:
        return pa.decimal128(kind.precision, kind.scale)
    return kind


def _plain_extension(kind: pa.BaseExtensionType) -> pa.DataType:
    if kind.extension_name == BOOL8:
        return pa.bool_()
    content = content_type(kind)
    # No encoder knows the types that stay, so that errors name them.
    return kind if content is None or is_uuid(kind) else plain_type(content)


def is_uuid(kind: pa.DataType) -> bool:
    """Whether the entries are UUIDs, in 16 bytes each."""
    return isinstance(kind, pa.BaseExtensionType) and kind.extension_name == UUID


def is_list(kind: pa.DataType) -> bool:
    """Whether a type that ``plain`` returns is a list."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


# The ids of types that ``plain`` need not convert. Most columns have one of them, and this check costs least.
_PLAIN = {kind.id for kind in (pa.bool_(), pa.int32(), pa.int64(), pa.float64(), pa.string(), pa.binary())}


def plain(column: pa.Array) -> pa.Array:
    """The same entries without dictionaries, views, extension types and 64-bit offsets."""
    kind = column.type
    if kind.id in _PLAIN:
        return column
    if isinstance(kind, pa.BaseExtensionType):
        wanted = plain_type(kind)
        return column if kind == wanted else plain(column.storage).cast(wanted)
    if pa.types.is_dictionary(kind):
        return plain(column.dictionary_decode())
    wanted = plain_type(kind)
    if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        return narrow(column, wanted)
    if pa.types.is_fixed_size_list(kind):
        return _as_list(column, wanted)
    return column if kind == wanted else column.cast(wanted)


def _as_list(column: pa.Array, wanted: pa.ListType) -> pa.Array:
    """A fixed-size list as a list over the same elements. Arrow's own cast makes an invalid array if a slice
    has structs with fields of the null type, and reading that array ends the process."""
    size, count = column.type.list_size, len(column)
    ends = pa.py_buffer(np.arange(count + 1, dtype=np.int32) * np.int32(size))
    elements = column.values.slice(column.offset * size, count * size)
    return pa.Array.from_buffers(wanted, count, [validity(null_mask(column)), ends], children=[elements])


def present_only(column: pa.Array, nulls: Bools, encode: Callable[[pa.Array], list[Piece]]) -> list[Piece]:
    """Call ``encode`` with the entries that are not null. The others become empty."""
    present = np.flatnonzero(~nulls)
    try:
        pieces = encode(column.take(indices(present)))
    except UnfitRowsError as error:
        error.move(present[error.rows], len(nulls))
        raise
    return [spread(join(pieces, len(present)), nulls)]


def entries(column: pa.Array) -> tuple[Int64s, list[pa.Array]]:
    """The number of entries of each row of a list or map (0 for null), and the entries of all rows. The
    entries of a list are one array; the keys and values of a map are two."""
    counts = lengths(column).astype(np.int64)
    ends = offsets(column)
    first, last = int(ends[0]), int(ends[-1])
    children = [column.keys, column.items] if pa.types.is_map(column.type) else [column.values]
    children = [child.slice(first, last - first) for child in children]
    if column.null_count and int(counts.sum()) != last - first:
        # In Arrow, a null entry may span elements, which have no meaning.
        kept = indices(np.flatnonzero(np.repeat(~null_mask(column), np.diff(ends))))
        children = [child.take(kept) for child in children]
    return counts, children


def joined_entries(column: pa.Array, encode: Callable[..., list[Piece]]) -> tuple[Int64s, pa.Array]:
    """The number of entries of each row of a list or map, and the bytes of each entry of all rows.

    ``encode`` returns the pieces of the entries, for a list's elements or a map's keys and values. Its errors
    are turned into errors about rows.
    """
    counts, children = entries(column)
    try:
        return counts, join(encode(*map(plain, children)), len(children[0]))
    except UnfitRowsError as error:
        rows = np.searchsorted(np.cumsum(counts), np.flatnonzero(error.rows), side="right")
        error.move(rows, len(counts))
        raise


def bits_of_bools(column: pa.Array, _: Bools | None = None) -> UInt64s:
    return numbers(column.cast(pa.uint8()), np.uint8).astype(np.uint64)


def numbers_of(column: pa.Array) -> npt.NDArray[Any]:
    """The whole numbers or floats of a column. Null entries have arbitrary values."""
    kind = column.type
    code = "f" if pa.types.is_floating(kind) else "i" if pa.types.is_signed_integer(kind) else "u"
    return numbers(column, f"{code}{kind.bit_width // 8}")


def bits_of_floats(column: pa.Array, size: int) -> UInt64s:
    """The bits of numbers as floats of ``size`` bytes."""
    floats = numbers_of(column).astype(f"<f{size}", copy=False)
    bits: UInt64s = floats.view(f"<u{size}").astype(np.uint64, copy=False)
    return bits


# How many of each of Arrow's units of time make a second.
PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}
_HEXADECIMAL = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
_UUID_BYTES, _UUID_TEXT = 16, 36
_HYPHENS = (8, 13, 18, 23)


def uuid_texts(column: pa.Array) -> pa.Array:
    """UUIDs in the form with hyphens, as strings."""
    count = len(column)
    halves = np.empty((count, 2 * _UUID_BYTES), dtype=np.uint8)
    given = numbers(column, np.dtype((np.void, _UUID_BYTES))).view(np.uint8).reshape(count, _UUID_BYTES)
    halves[:, 0::2], halves[:, 1::2] = given >> 4, given & 0xF
    texts = np.full((count, _UUID_TEXT), ord("-"), dtype=np.uint8)
    texts[:, np.setdiff1d(np.arange(_UUID_TEXT), _HYPHENS)] = _HEXADECIMAL[halves]
    array = with_nulls(binary(texts.reshape(-1), _UUID_TEXT, count), null_mask(column))
    return array.view(pa.string())


def uuid_bytes(column: pa.Array) -> pa.Array:
    return column.storage.cast(pa.binary())


def converted(convert: Callable[[pa.Array], pa.Array], encoder: Encoder) -> Encoder:
    """Encode columns of another type than the encoder's, once ``convert`` has had them."""
    return Leaf(lambda column, nulls: encoder.pieces(convert(column), nulls))


_DECIMAL_BYTES = 16
# The least numbers that do not fit 1, 2, ... 8 bytes with a sign.
_TOO_LARGE = np.array([1 << bits for bits in range(7, 64, 8)], dtype=np.uint64)


def decimal_sizes(column: pa.Array) -> Int64s:
    """How many bytes each unscaled number of a decimal128 array needs. As in fastavro, negative powers of two
    take a byte too many."""
    halves = numbers(pc.abs(column), np.dtype((np.void, _DECIMAL_BYTES))).view("<u8")
    low, high = halves[0::2], halves[1::2]
    sizes = 1 + np.searchsorted(_TOO_LARGE, low, side="right")
    if high.any():
        sizes = np.where(high > 0, 9 + np.searchsorted(_TOO_LARGE, high, side="right"), sizes)
    return sizes


def decimal_bytes(column: pa.Array, sizes: Int64s, width: int) -> pa.Array:
    """The unscaled numbers of a decimal128 array, highest byte first. ``sizes[i]`` is the size of number i,
    and ``width`` is not less than any size."""
    ends = np.arange(1, len(column) + 1) * width
    return spans(_big_endian(column, width).reshape(-1), ends - sizes, ends)


def _big_endian(column: pa.Array, width: int) -> Bytes:
    """The unscaled numbers of a decimal128 array as rows of ``width`` bytes, highest byte first."""
    given = numbers(column, np.dtype((np.void, _DECIMAL_BYTES))).view(np.uint8)
    reversed_bytes = given.reshape(len(column), _DECIMAL_BYTES)[:, ::-1]
    result: Bytes = np.empty((len(column), width), dtype=np.uint8)
    result[:, -_DECIMAL_BYTES:] = reversed_bytes[:, -width:]
    if width > _DECIMAL_BYTES:
        is_negative = reversed_bytes[:, :1] >= 0x80
        result[:, :-_DECIMAL_BYTES] = np.where(is_negative, np.uint8(0xFF), np.uint8(0))
    return result
