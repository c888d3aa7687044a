"""Encodes columns as Protobuf messages, all rows at once (https://protobuf.dev/programming-guides/encoding).

Fields are written in the order of their numbers, as Google's libraries do. Null is encoded as an absent
field, and so is the default value (such as 0) of a field without presence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kafka_sink import varint
from kafka_sink.errors import SchemaError
from kafka_sink.formats import byte_columns, columns
from kafka_sink.formats.byte_columns import Piece, Word
from kafka_sink.formats.columns import Encoder, Leaf
from kafka_sink.formats.protobuf_schema import KNOWN, Field, MessageType, ProtobufSchema
from kafka_sink.records import arrays
from kafka_sink.records.arrays import Bools, Int64s, UInt64s, as_binary, lengths, null_mask
from kafka_sink.records.extension_types import shown

# The wire types, which follow the field number in a tag.
_VARINT, _64_BITS, _BYTES, _32_BITS = 0, 1, 2, 5
_TIMESTAMP, _DURATION = f"{KNOWN}Timestamp", f"{KNOWN}Duration"
_ALL, _LOW_32 = (1 << 64) - 1, (1 << 32) - 1


def encoder(schema: ProtobufSchema, name: str, kind: pa.DataType, path: str) -> Encoder:
    """An encoder of struct columns for this message. Raises SchemaError, which names the field."""
    message = schema.message(name)
    kind = columns.plain_type(kind)
    if not pa.types.is_struct(kind):
        raise SchemaError(
            f"column '{path}' has the type {shown(kind)}, but a Protobuf message needs a struct"
        )
    return _ProtobufCompiler(schema).message(message, kind, path)


def indexes(schema: ProtobufSchema, name: str) -> bytes:
    """The message's position, which follows the schema's id: 0 for the first one, else length and path."""
    place = schema.message(name).place
    if place == (0,):
        return b"\0"
    return b"".join(map(varint.signed, (len(place), *place)))


def _tag(number: int, wire: int) -> list[Word]:
    return byte_columns.constant(varint.unsigned(number << 3 | wire))


@dataclass(frozen=True, slots=True)
class _ProtobufCompiler:
    schema: ProtobufSchema

    def message(self, message: MessageType, kind: pa.StructType, path: str) -> Encoder:
        places = {field.name: index for index, field in enumerate(kind)}
        fields = []
        for field in message.fields:
            own = columns.joined(path, field.name)
            if field.name in places:
                index = places.pop(field.name)
                fields.append((index, self._field(field, kind.field(index).type, own)))
            elif field.is_required:
                raise SchemaError(f"the schema requires field '{own}', for which there is no column: add one")
        if places:
            wrong = next(iter(places))
            raise SchemaError(
                f"column '{columns.joined(path, wrong)}' is not a field of the message "
                f"{message.full_name}: drop it, or register a schema that has it"
            )
        of_oneof: dict[str, list[int]] = {}
        for field in message.fields:
            index = kind.get_field_index(field.name)
            if field.oneof and index >= 0:
                of_oneof.setdefault(field.oneof, []).append(index)
        oneofs = [(name, indexes) for name, indexes in of_oneof.items() if len(indexes) > 1]
        return _Message(fields, oneofs, path)

    def _field(self, field: Field, kind: pa.DataType, path: str) -> Encoder:
        kind = columns.plain_type(kind)
        if field.is_repeated:
            entry = self.schema.messages.get(field.type_name)
            if entry is not None and entry.is_map_entry and pa.types.is_map(kind):
                key = self._element(entry.fields[0], kind.key_type, path)
                value = self._element(entry.fields[1], kind.item_type, f"{path}{{}}")
                return _ProtobufMap(field.number, key, value)
            if not columns.is_list(kind):
                raise columns.unsupported_type(path, kind, f"repeated {field.type_name or field.kind}")
            element = self._element(field, kind.value_type, f"{path}[]")
            is_packed = field.is_packed and element.value.wire != _BYTES
            return _Packed(element) if is_packed else _Repeated(element)
        return _Single(
            field.number, self._value(field, kind, path), path, field.has_presence, field.is_required
        )

    def _element(self, field: Field, kind: pa.DataType, path: str) -> _Single:
        """The encoder of an element, or of a map entry's key or value. These are always written."""
        return _Single(
            field.number, self._value(field, kind, path), path, has_presence=True, is_required=True
        )

    def _value(self, field: Field, kind: pa.DataType, path: str) -> _Value:
        kind = columns.plain_type(kind)
        value: _Value | None
        if field.kind == "message":
            value = self._message_value(self.schema.messages[field.type_name], kind, path)
        elif field.kind == "enum":
            is_closed = field.type_name in self.schema.closed_enums
            value = _enum(self.schema.enums[field.type_name], kind, path, is_closed=is_closed)
        else:
            value = _scalar(field.kind, kind, path)
        if value is None:
            raise columns.unsupported_type(path, kind, field.type_name or field.kind)
        return value

    def _message_value(self, message: MessageType, kind: pa.DataType, path: str) -> _Value | None:
        if pa.types.is_struct(kind):
            return _Value(_BYTES, _Nested(self.message(message, kind, path)))
        if message.full_name == _TIMESTAMP and pa.types.is_timestamp(kind):
            return _Value(_BYTES, _Nested(_Moment(kind.unit, floors=True)))
        if message.full_name == _DURATION and pa.types.is_duration(kind):
            return _Value(_BYTES, _Nested(_Moment(kind.unit, floors=False)))
        if message.full_name.startswith(KNOWN) and len(message.fields) == 1:
            # A wrapper type contains the value as a message, so that the value may be absent.
            inner = self._field(message.fields[0], kind, path)
            return _Value(_BYTES, _Nested(inner))
        return None


@dataclass(frozen=True, slots=True)
class _Value:
    """How a value is written after its tag. ``zeros`` marks values that fields without presence omit."""

    wire: int
    encode: Encoder
    zeros: Callable[[pa.Array], Bools] | None = None


@dataclass(frozen=True, slots=True)
class _Message:
    """``fields`` are the index of each field's column and its encoder. ``oneofs`` are the indexes of the
    columns of which a row may have only one value."""

    fields: Sequence[tuple[int, Encoder]]
    oneofs: Sequence[tuple[str, Sequence[int]]]
    path: str

    def pieces(self, column: pa.Array, nulls: Bools | None) -> list[Piece]:
        if nulls is not None:
            return columns.present_only(column, nulls, lambda present: self.pieces(present, None))
        children = [columns.plain(child) for child in column.flatten()]
        for name, places in self.oneofs:
            held = np.zeros(len(column), dtype=np.int64)
            for place in places:
                held += ~null_mask(children[place])
            columns.reject(held > 1, self.path, f"has several values of the oneof '{name}'")
        pieces: list[Piece] = []
        for place, encode in self.fields:
            child = children[place]
            pieces += encode.pieces(child, _nulls(child))
        return pieces


@dataclass(frozen=True, slots=True)
class _Single:
    """A field that is not repeated. If it is absent, its tag is also omitted."""

    number: int
    value: _Value
    path: str
    has_presence: bool
    is_required: bool

    def pieces(self, column: pa.Array, nulls: Bools | None) -> list[Piece]:
        absent = nulls
        if self.is_required:
            columns.require_no_nulls(column, self.path)
        if not self.has_presence and self.value.zeros is not None:
            zeros = self.value.zeros(column)
            absent = zeros if absent is None else absent | zeros
        tag = _tag(self.number, self.value.wire)
        lead = tag if absent is None else byte_columns.nothing_where(absent, tag)
        return [*lead, *self.value.encode.pieces(column, absent)]


@dataclass(frozen=True, slots=True)
class _Nested:
    """A message within another message: its length, followed by its bytes."""

    message: Encoder

    def pieces(self, column: pa.Array, nulls: Bools | None) -> list[Piece]:
        if nulls is not None:
            return columns.present_only(column, nulls, lambda present: self.pieces(present, None))
        encoded = byte_columns.join(self.message.pieces(column, None), len(column))
        return [*byte_columns.varint(lengths(encoded).astype(np.uint64)), encoded]


@dataclass(frozen=True, slots=True)
class _Repeated:
    item: _Single

    def pieces(self, column: pa.Array, nulls: Bools | None) -> list[Piece]:
        counts, encoded = columns.joined_entries(column, lambda items: self.item.pieces(items, _nulls(items)))
        return [arrays.grouped(encoded, counts)]


@dataclass(frozen=True, slots=True)
class _Packed:
    """Repeated numbers: one tag, the length in bytes, and the numbers."""

    element: _Single

    def pieces(self, column: pa.Array, nulls: Bools | None) -> list[Piece]:
        def encode(numbers: pa.Array) -> list[Piece]:
            columns.require_no_nulls(numbers, self.element.path)
            return self.element.value.encode.pieces(numbers, None)

        counts, encoded = columns.joined_entries(column, encode)
        content = arrays.grouped(encoded, counts)
        empty = counts == 0
        size = byte_columns.varint(lengths(content).astype(np.uint64), empty)
        return [*byte_columns.nothing_where(empty, _tag(self.element.number, _BYTES)), *size, content]


@dataclass(frozen=True, slots=True)
class _ProtobufMap:
    """A map. Its entries are messages with a key and a value."""

    number: int
    key: _Single
    value: _Single

    def pieces(self, column: pa.Array, nulls: Bools | None) -> list[Piece]:
        def encode(keys: pa.Array, values: pa.Array) -> list[Piece]:
            parts = [*self.key.pieces(keys, _nulls(keys)), *self.value.pieces(values, _nulls(values))]
            content = byte_columns.join(parts, len(keys))
            size = byte_columns.varint(lengths(content).astype(np.uint64))
            return [*_tag(self.number, _BYTES), *size, content]

        counts, encoded = columns.joined_entries(column, encode)
        return [arrays.grouped(encoded, counts)]


# -- scalars -----------------------------------------------------------------------------------------------


def _content(path: str, *, is_text: bool) -> Encoder:
    """string and bytes: the length, followed by the content."""

    def pieces(column: pa.Array, nulls: Bools | None) -> list[Piece]:
        if is_text:
            columns.require_utf8(column, path, "is not valid UTF-8, which Protobuf strings require")
        return [*byte_columns.varint(lengths(column).astype(np.uint64), nulls), as_binary(column)]

    return Leaf(pieces)


@dataclass(frozen=True, slots=True)
class _Moment:
    """Timestamp and Duration, as seconds and nanoseconds. The nanoseconds of a timestamp always count
    forward, also before 1970. Those of a duration have its sign."""

    unit: str
    floors: bool

    def pieces(self, column: pa.Array, nulls: Bools | None) -> list[Piece]:
        given = arrays.numbers(column, np.int64)
        per_second = columns.PER_SECOND[self.unit]
        seconds = given // per_second
        if not self.floors:
            seconds = np.where((given < 0) & (given % per_second != 0), seconds + 1, seconds)
        nanos = (given - seconds * per_second) * (1_000_000_000 // per_second)
        pieces: list[Piece] = []
        for number, values in ((1, seconds), (2, nanos)):
            zero = values == 0
            pieces += byte_columns.nothing_where(zero, _tag(number, _VARINT))
            pieces += byte_columns.varint(values.view(np.uint64), zero)
        return pieces


def _scalar(name: str, kind: pa.DataType, path: str) -> _Value | None:
    """How a scalar is written; None if the schema's type and the column's type do not match."""
    if name in ("double", "float"):
        return _float(8 if name == "double" else 4, kind)
    if name not in _KINDS:
        return _integer(name, kind, path)
    if columns.is_uuid(kind) and name != "bool":
        convert = columns.uuid_texts if name == "string" else columns.uuid_bytes
        return _Value(_BYTES, columns.converted(convert, _content(path, is_text=False)))
    if kind != _KINDS[name]:
        return None
    if name == "bool":
        return _Value(
            _VARINT,
            columns.fixed(1, columns.bits_of_bools),
            lambda column: columns.bits_of_bools(column) == 0,
        )
    return _Value(_BYTES, _content(path, is_text=name == "string"), lambda column: lengths(column) == 0)


_KINDS = {"string": pa.string(), "bytes": pa.binary(), "bool": pa.bool_()}


def _integer(name: str, kind: pa.DataType, path: str, allowed: Int64s | None = None) -> _Value | None:
    """How a whole number is written. A row is rejected if its number is not ``allowed``."""
    whole = _whole(name, kind, path)
    if whole is None:
        return None

    def numbers(column: pa.Array, nulls: Bools | None) -> UInt64s:
        result = whole(column, nulls)
        if allowed is not None:
            wrong = ~np.isin(result, allowed)
            columns.reject(wrong, path, "is not a number in the schema's enum", _nulls(column, nulls))
        # Without zigzag, a negative int32 is written like an int64.
        bits = byte_columns.zigzag(result) if name.startswith("sint") else result.view(np.uint64)
        return bits & np.uint64(_LOW_32) if name.endswith("fixed32") else bits

    wire, encode = _VARINT, columns.varints(numbers)
    if "fixed" in name:
        wire, size = (_64_BITS, 8) if name.endswith("64") else (_32_BITS, 4)
        encode = columns.fixed(size, numbers)
    return _Value(wire, encode, lambda column: whole(column, None) == 0)


def _nulls(column: pa.Array, nulls: Bools | None = None) -> Bools | None:
    return null_mask(column) if nulls is None and column.null_count else nulls


def _float(size: int, kind: pa.DataType) -> _Value | None:
    if not pa.types.is_floating(kind) or kind.bit_width > 8 * size:
        return None

    def bits(column: pa.Array, _: Bools | None) -> UInt64s:
        return columns.bits_of_floats(column, size)

    wire = _64_BITS if size == 8 else _32_BITS
    return _Value(wire, columns.fixed(size, bits), lambda column: bits(column, None) == 0)


def _whole(name: str, kind: pa.DataType, path: str) -> Callable[[pa.Array, Bools | None], Int64s] | None:
    """The function that converts a column to numbers; None if they may not fit or are not numbers."""
    if not name.endswith(("32", "64")):
        return None
    is_signed = pa.types.is_signed_integer(kind)
    bits = 64 if name.endswith("64") else 32
    is_unsigned = name in ("uint32", "uint64", "fixed32", "fixed64")
    if not pa.types.is_integer(kind) or (kind.bit_width > bits and not (is_unsigned and bits == 32)):
        return None
    if not is_signed and not is_unsigned and kind.bit_width >= bits:
        return None
    high = (1 << bits) - 1

    def numbers(column: pa.Array, nulls: Bools | None) -> Int64s:
        given = columns.numbers_of(column)
        if is_unsigned and (is_signed or kind.bit_width > bits):
            wrong = (given < 0) | ((given > high) if bits < 64 else False)
            columns.reject(wrong, path, f"is out of range for {name}", _nulls(column, nulls))
        wide: Any = given.astype(np.int64, copy=False) if is_signed else given.astype(np.uint64)
        result: Int64s = wide.view(np.int64)
        return result

    return numbers


def _enum(symbols: dict[str, int], kind: pa.DataType, path: str, *, is_closed: bool) -> _Value | None:
    """How an enum is written. The column contains its names or its numbers."""
    names = arrays.strings_of([*symbols])
    values = np.array([number & _ALL for number in symbols.values()], dtype=np.uint64).view(np.int64)
    if kind != pa.string():
        return _integer("int32", kind, path, values if is_closed else None)

    def numbers(column: pa.Array) -> Int64s:
        index = pc.index_in(column, value_set=names)
        columns.reject(null_mask(index), path, "is not a name in the schema's enum", _nulls(column))
        places = np.where(null_mask(index), 0, arrays.numbers(index, np.int32))
        result: Int64s = values[places]
        return result

    return _Value(
        _VARINT,
        columns.varints(lambda column, _: numbers(column).view(np.uint64)),
        lambda column: numbers(column) == 0,
    )
