"""Encodes columns as JSON, all rows at once, and compares them with a JSON Schema at planning.

Objects contain all fields of a struct, including null ones, in the columns' order and without spaces. Dates
and times are in ISO 8601 and binary is in Base64, as Java's serializers write them.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kafka_sink.formats import byte_columns, columns, json_schema
from kafka_sink.formats.byte_columns import Piece
from kafka_sink.formats.columns import Encoder, Leaf
from kafka_sink.records.arrays import (
    Bools,
    as_binary,
    grouped,
    lengths,
    null_mask,
    numbers,
    offsets,
    spans,
    values_buffer,
)

_NULL = b"null"
_FIRST_PRINTABLE = 0x20
# The short escapes that json.dumps also writes. Other characters are escaped as \u00XX.
_SHORT = {0x22: '\\"', 0x5C: "\\\\", 0x08: "\\b", 0x0C: "\\f", 0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t"}
_ESCAPED = np.array([byte < _FIRST_PRINTABLE or byte in (0x22, 0x5C) for byte in range(256)])


def encoder(text: str, references: Sequence[tuple[str, str]], kind: pa.DataType, path: str) -> Encoder:
    """An encoder for columns of this type. Raises SchemaError, which names the field, if they do not fit."""
    json_schema.check(text, references, kind, path)
    return of_type(kind, path)


def of_type(kind: pa.DataType, path: str) -> Encoder:
    """An encoder for columns of this type, without a schema. Raises SchemaError."""
    return _OrNull(_of_value(kind, path))


def _of_value(kind: pa.DataType, path: str) -> Encoder:
    kind = columns.plain_type(kind)
    if pa.types.is_struct(kind):
        return _Object(
            [(field.name, of_type(field.type, columns.joined(path, field.name))) for field in kind]
        )
    if columns.is_list(kind):
        return _List(of_type(kind.value_type, f"{path}[]"))
    if pa.types.is_map(kind):
        columns.require_text_keys(kind, path, "JSON's objects")
        return _JsonMap(_text(path), of_type(kind.item_type, f"{path}{{}}"))
    if kind == pa.string():
        return _text(path)
    if kind == pa.binary():
        return _printed(lambda column: _quoted(base64(column), ""), path)
    texts = _printer(kind)
    if texts is None:
        raise columns.missing_type(path, kind, "JSON")
    return _printed(texts, path)


@dataclass(frozen=True, slots=True)
class _OrNull:
    value: Encoder

    def pieces(self, column: pa.Array, nulls: Bools | None) -> list[Piece]:
        if nulls is not None:
            return columns.present_only(column, nulls, lambda present: self.pieces(present, None))
        if not column.null_count:
            return self.value.pieces(column, None)
        own = null_mask(column)
        pieces = columns.present_only(column, own, lambda present: self.value.pieces(present, None))
        return [*byte_columns.nothing_where(~own, byte_columns.constant(_NULL)), *pieces]


@dataclass(frozen=True, slots=True)
class _Object:
    fields: Sequence[tuple[str, Encoder]]

    def pieces(self, column: pa.Array, nulls: Bools | None) -> list[Piece]:
        pieces: list[Piece] = []
        before = "{"
        for (name, encode), child in zip(self.fields, column.flatten(), strict=True):
            pieces += byte_columns.constant(f"{before}{json.dumps(name, ensure_ascii=False)}:".encode())
            pieces += encode.pieces(columns.plain(child), None)
            before = ","
        return [*pieces, *byte_columns.constant(b"}" if self.fields else b"{}")]


@dataclass(frozen=True, slots=True)
class _List:
    items: Encoder

    def pieces(self, column: pa.Array, nulls: Bools | None) -> list[Piece]:
        return _listed(column, lambda items: self.items.pieces(items, None), "[]")


@dataclass(frozen=True, slots=True)
class _JsonMap:
    keys: Encoder
    values: Encoder

    def pieces(self, column: pa.Array, nulls: Bools | None) -> list[Piece]:
        def entries(keys: pa.Array, values: pa.Array) -> list[Piece]:
            before = [*self.keys.pieces(keys, None), *byte_columns.constant(b":")]
            return [*before, *self.values.pieces(values, None)]

        return _listed(column, entries, "{}")


def _listed(column: pa.Array, entries: Callable[..., list[Piece]], brackets: str) -> list[Piece]:
    """The entries of each row of a list or map, between brackets and with commas between them."""

    def encode(*children: pa.Array) -> list[Piece]:
        return [*byte_columns.constant(b","), *entries(*children)]

    first, last = (byte_columns.constant(bracket.encode()) for bracket in brackets)
    counts, encoded = columns.joined_entries(column, encode)
    rows = offsets(grouped(encoded, counts)).astype(np.int64)
    # The first entry of a row loses the comma in front of it.
    separated = spans(values_buffer(encoded), rows[:-1] + (counts > 0), rows[1:])
    return [*first, separated, *last]


def _text(path: str) -> Encoder:
    def pieces(column: pa.Array, _: Bools | None) -> list[Piece]:
        columns.require_utf8(column, path, "is not valid UTF-8, which JSON strings require")
        return [*byte_columns.constant(b'"'), as_binary(escaped(column)), *byte_columns.constant(b'"')]

    return Leaf(pieces)


def escaped(column: pa.Array) -> pa.Array:
    """Escape strings for JSON. An array in which nothing has to be escaped is not copied."""
    ends = offsets(column)
    content = values_buffer(column)[int(ends[0]) : int(ends[-1])]
    flagged = _ESCAPED[content]
    if not flagged.any():
        return column
    present = set(np.unique(content[flagged]).tolist())
    # Replace the backslash first, because the other replacements add backslashes.
    for byte in sorted(present, key=lambda byte: byte != 0x5C):
        column = pc.replace_substring(column, chr(byte), _SHORT.get(byte, f"\\u{byte:04x}"))
    return column


def base64(column: pa.Array) -> pa.Array:
    """Each entry of a binary array without nulls, in Base64."""
    sizes, begins = lengths(column).astype(np.int64), offsets(column)
    content = values_buffer(column)[int(begins[0]) : int(begins[-1])]
    groups = (sizes + 2) // 3
    ends = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(groups, out=ends[1:])
    # A group has three bytes. Bytes after the end of an entry count as zero.
    padded = np.zeros(3 * int(ends[-1]), dtype=np.uint8)
    moved = 3 * ends[:-1] - (begins[:-1] - begins[0])
    padded[np.arange(len(content)) + np.repeat(moved, sizes)] = content
    out = np.frombuffer(bytearray(b64encode(padded.data)), dtype=np.uint8)
    last = 4 * ends[1:]
    out[last[sizes % 3 == 1] - 2] = out[last[sizes % 3 > 0] - 1] = ord("=")
    buffers = [None, pa.py_buffer((4 * ends).astype(np.int32)), pa.py_buffer(out)]
    return pa.Array.from_buffers(pa.binary(), len(sizes), buffers)


def _printed(texts: Callable[[pa.Array], pa.Array], path: str) -> Encoder:
    """Values whose texts need no escaping."""

    def pieces(column: pa.Array, _: Bools | None) -> list[Piece]:
        if pa.types.is_floating(column.type):
            wrong = ~np.isfinite(numbers(column, f"f{column.type.bit_width // 8}"))
            columns.reject(wrong, path, "is NaN or infinite, which JSON cannot represent")
        if pa.types.is_date(column.type) or pa.types.is_timestamp(column.type):
            days = _days(column)
            wrong = (days < _FIRST_DAY) | (days > _LAST_DAY)
            columns.reject(wrong, path, "is outside the years 1 to 9999, the range of dates in JSON")
        return [as_binary(texts(column))]

    return Leaf(pieces)


# The first day of year 1 and the last day of year 9999, as days since 1970.
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
_DAY_S = 86_400


def _days(column: pa.Array) -> npt.NDArray[np.signedinteger[Any]]:
    if pa.types.is_date32(column.type):
        return numbers(column, np.int32)
    unit = "ms" if pa.types.is_date64(column.type) else column.type.unit
    return numbers(column, np.int64) // (_DAY_S * columns.PER_SECOND[unit])


_PLAIN_TEXTS = (
    *(pa.types.is_null, pa.types.is_boolean, pa.types.is_integer),
    *(pa.types.is_decimal, pa.types.is_floating),
)


def _printer(kind: pa.DataType) -> Callable[[pa.Array], pa.Array] | None:
    if any(is_one(kind) for is_one in _PLAIN_TEXTS):
        return lambda column: column.cast(pa.string())
    if pa.types.is_date(kind) or pa.types.is_time(kind):
        return lambda column: _quoted(column.cast(pa.string()), "")
    if pa.types.is_timestamp(kind):
        return _instant
    if columns.is_uuid(kind):
        return lambda column: _quoted(columns.uuid_texts(column), "")
    if pa.types.is_duration(kind):
        return lambda column: column.cast(pa.int64()).cast(pa.string())
    return None


def _instant(column: pa.Array) -> pa.Array:
    zone = "Z" if column.type.tz else ""
    # Without a zone, the text of an instant is the same, and needs no time zone database.
    text = column.cast(pa.int64()).cast(pa.timestamp(column.type.unit)).cast(pa.string())
    return _quoted(pc.replace_substring(text, " ", "T"), zone)


def _quoted(texts: pa.Array, suffix: str) -> pa.Array:
    rows = len(texts)
    joined = [*byte_columns.constant(b'"'), as_binary(texts), *byte_columns.constant(f'{suffix}"'.encode())]
    return byte_columns.join(joined, rows)
