"""Encodes columns as Avro's binary form, all rows at once, with a given schema.

Most problems are found at planning: ``encoder`` compares the schema with the columns' types, and its errors
name the field. Only nulls, enum symbols and sizes have to be checked for each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kafka_sink import varint
from kafka_sink.errors import SchemaError
from kafka_sink.formats import avro_schema, byte_columns, columns
from kafka_sink.formats.avro_schema import AvroSchema, AvroType
from kafka_sink.formats.byte_columns import Piece, Word
from kafka_sink.formats.columns import Encoder, Leaf
from kafka_sink.records import arrays
from kafka_sink.records.arrays import Bools, UInt64s, as_binary, lengths, null_mask

_ZERO = byte_columns.constant(b"\0")


def encoder(schema: AvroSchema, kind: pa.DataType, column: str) -> Encoder:
    """Return an encoder for columns of this type. It reports rows with nulls that the schema does not allow.
    Raises SchemaError, which names the field, if no row of this type fits the schema."""
    return _AvroCompiler(schema).of(schema.root, kind, column)


@dataclass(frozen=True, slots=True)
class _AvroCompiler:
    schema: AvroSchema

    def of(self, schema: AvroType, kind: pa.DataType, path: str) -> Encoder:
        schema = self._named(schema)
        if schema["type"] == "union":
            return self._of_union(schema["branches"], kind, path)
        return _Required(self._of_value(schema, kind, path), path)

    def _named(self, schema: AvroType) -> AvroType:
        return self.schema.named[schema["full_name"]] if schema["type"] == "named" else schema

    def _of_union(self, branches: Sequence[AvroType], kind: pa.DataType, path: str) -> Encoder:
        null = next((at for at, branch in enumerate(branches) if branch["type"] == "null"), None)
        problems = []
        for at, branch in enumerate(branches):
            self.schema.steps.take()
            if at == null and not pa.types.is_null(columns.plain_type(kind)):
                continue
            try:
                value = self._of_value(self._named(branch), kind, path)
            except SchemaError as error:
                problems.append(str(error))
                continue
            return _Union(value, at, null, path)
        raise (
            SchemaError(problems[0])
            if len(problems) == 1
            else columns.unsupported_type(path, kind, _shown(branches))
        )

    def _of_value(self, schema: AvroType, kind: pa.DataType, path: str) -> Encoder:
        """Return an encoder for a type that is not a union. The caller handles nulls."""
        name = schema["type"]
        plain_kind = columns.plain_type(kind)
        if name == "record" and pa.types.is_struct(plain_kind):
            return self._of_record(schema, plain_kind, path)
        if name == "array" and columns.is_list(plain_kind):
            return _Block([self.of(schema["items"], plain_kind.value_type, f"{path}[]")])
        if name == "map" and pa.types.is_map(plain_kind):
            columns.require_text_keys(plain_kind, path, "Avro's maps")
            return _Block([_TEXT, self.of(schema["values"], plain_kind.item_type, f"{path}{{}}")])
        leaf = _leaf(schema, plain_kind, path)
        if leaf is None:
            raise columns.unsupported_type(path, kind, _shown(schema))
        return leaf

    def _of_record(self, schema: AvroType, kind: pa.StructType, path: str) -> Encoder:
        places = {field.name: index for index, field in enumerate(kind)}
        fields: list[tuple[int, Encoder] | list[Piece]] = []
        for field in schema["fields"]:
            name = field["name"]
            if name in places:
                index = places.pop(name)
                fields.append(
                    (index, self.of(field["type"], kind.field(index).type, columns.joined(path, name)))
                )
            else:
                fields.append(byte_columns.constant(self._missing(field, path, places)))
        if places:
            known = [field["name"] for field in schema["fields"]]
            wrong = next(iter(places))
            raise SchemaError(
                f"column '{columns.joined(path, wrong)}' is not a field of the schema's record "
                f"'{schema['full_name']}'{_near(wrong, known)}: drop it, or register a schema that has it"
            )
        return _Record(fields)

    def _missing(self, field: AvroType, path: str, places: dict[str, int]) -> bytes:
        """The bytes of a field without a column: those of its default, or of null."""
        kind = self._named(field["type"])
        if "default" in field:
            return avro_schema.encoded_default(
                self.schema, kind, field["default"], columns.joined(path, field["name"])
            )
        for at, branch in enumerate(kind.get("branches", ())):
            if branch["type"] == "null":
                return varint.signed(at)
        raise SchemaError(
            f"the schema requires field '{columns.joined(path, field['name'])}', for which there is no "
            f"column{_near(field['name'], list(places))}: add one, or give the field a default"
        )


def _near(name: str, known: Sequence[str]) -> str:
    """A hint about a name that differs in case only, or an empty text."""
    near = next((field_name for field_name in known if field_name.lower() == name.lower()), None)
    return "" if near is None else f" (found '{near}', and names are case-sensitive)"


def _shown(schema: AvroType | Sequence[AvroType]) -> str:
    if isinstance(schema, Sequence):
        return f"[{', '.join(map(_shown, schema))}]"
    name = str(schema.get("full_name") or schema["type"])
    logical = schema.get("logicalType")
    if logical == "decimal":
        logical = f"decimal({schema.get('precision')},{schema.get('scale', 0)})"
    return f"{name} ({logical})" if logical else name


# -- around values -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Required:
    """A value for which the schema does not allow null."""

    value: Encoder
    path: str

    def pieces(self, column: pa.Array, nulls: Bools | None) -> list[Piece]:
        if not pa.types.is_null(column.type):
            columns.require_no_nulls(column, self.path, nulls)
        return self.value.pieces(column, nulls)


@dataclass(frozen=True, slots=True)
class _Union:
    """A union. The column's values are encoded as branch ``branch``, and its nulls as branch ``null``."""

    value: Encoder
    branch: int
    null: int | None
    path: str

    def pieces(self, column: pa.Array, nulls: Bools | None) -> list[Piece]:
        if not column.null_count or pa.types.is_null(column.type):
            lead = byte_columns.constant(varint.signed(self.branch))
            if nulls is not None:
                lead = byte_columns.nothing_where(nulls, lead)
            return [*lead, *self.value.pieces(column, nulls)]
        if self.null is None:
            columns.require_no_nulls(column, self.path, nulls)
        own = null_mask(column)
        branches = byte_columns.zigzag(np.where(own, self.null or 0, self.branch))
        return [*byte_columns.varint(branches, nulls), *self.value.pieces(column, own)]


@dataclass(frozen=True, slots=True)
class _Record:
    """``fields`` in the schema's order: a column's index and its encoder, or a default's bytes."""

    fields: Sequence[tuple[int, Encoder] | list[Word]]

    def pieces(self, column: pa.Array, nulls: Bools | None) -> list[Piece]:
        if nulls is not None:
            return columns.present_only(column, nulls, lambda present: self.pieces(present, None))
        children = column.flatten()
        pieces: list[Piece] = []
        for field in self.fields:
            if isinstance(field, tuple):
                pieces += field[1].pieces(columns.plain(children[field[0]]), None)
            else:
                pieces += field
        return pieces


@dataclass(frozen=True, slots=True)
class _Block:
    """An array or a map: the number of entries (left out if there are none), the entries, and a zero.
    ``children`` are the encoders of an array's items, or of a map's keys and values."""

    children: Sequence[Encoder]

    def pieces(self, column: pa.Array, nulls: Bools | None) -> list[Piece]:
        def encode(*entries: pa.Array) -> list[Piece]:
            pairs = zip(self.children, entries, strict=True)
            return [piece for encoder, child in pairs for piece in encoder.pieces(child, None)]

        counts, encoded = columns.joined_entries(column, encode)
        end: list[Word] = _ZERO if nulls is None else byte_columns.nothing_where(nulls, _ZERO)
        sizes = byte_columns.varint(byte_columns.zigzag(counts), counts == 0)
        return [*sizes, arrays.grouped(encoded, counts), *end]


# -- values ------------------------------------------------------------------------------------------------


def _integers(numbers: Callable[[pa.Array], Any]) -> Encoder:
    """int and long. ``numbers`` returns the numbers of a column."""
    return columns.varints(lambda column, _: byte_columns.zigzag(numbers(column)))


def _finer(factor: int, path: str) -> Encoder:
    """Instants in a finer unit than the column's. ``factor`` finer units make one unit of the column, so the
    latest instants do not fit."""
    last = np.iinfo(np.int64).max // factor

    def numbers(column: pa.Array, nulls: Bools | None) -> UInt64s:
        given = arrays.numbers(column, np.int64)
        wrong = (given > last) | (given < -last)
        columns.reject(wrong, path, "is too far from 1970 for the unit in the schema", nulls)
        return byte_columns.zigzag(given * factor)

    return columns.varints(numbers)


def _text(column: pa.Array, nulls: Bools | None) -> list[Piece]:
    """string and bytes: the length, followed by the content."""
    sizes = lengths(column).astype(np.int64)
    return [*byte_columns.varint(byte_columns.zigzag(sizes), nulls), as_binary(column)]


_TEXT = Leaf(_text)


def _fixed_bytes(size: int, path: str) -> Encoder:
    """fixed: content of exactly ``size`` bytes."""

    def pieces(column: pa.Array, nulls: Bools | None) -> list[Piece]:
        columns.reject(lengths(column) != size, path, f"does not have the {size} bytes of the schema", nulls)
        return [as_binary(column)]

    return Leaf(pieces)


def _enum(schema: AvroType, path: str) -> Encoder:
    """Symbols of an enum, which are strings in the column."""
    symbols = arrays.strings_of(schema["symbols"])

    def numbers(column: pa.Array, nulls: Bools | None) -> UInt64s:
        index = pc.index_in(column, value_set=symbols)
        if index.null_count:
            columns.reject(null_mask(index), path, "is not a symbol of the schema's enum", nulls)
        return byte_columns.zigzag(arrays.numbers(index, np.int32))

    return columns.varints(numbers)


def _leaf(schema: AvroType, kind: pa.DataType, path: str) -> Encoder | None:
    """The encoder for a type without children; None if schema and type do not match."""
    name, logical = schema["type"], schema.get("logicalType")
    encoder: Encoder | None = None
    if pa.types.is_decimal(kind):
        encoder = _decimal(schema, kind, path) if logical == "decimal" else None
    elif columns.is_uuid(kind):
        encoder = _uuid(schema, path)
    elif name in ("int", "long"):
        encoder = _whole(name, logical, kind, path)
    elif (name, kind) in (("string", pa.string()), ("bytes", pa.binary())):
        encoder = _TEXT
    elif name == "enum" and kind == pa.string():
        encoder = _enum(schema, path)
    elif name == "fixed" and kind == pa.binary():
        encoder = _fixed_bytes(schema["size"], path)
    elif name == "null" and pa.types.is_null(kind):
        encoder = Leaf(lambda column, nulls: [])
    elif name == "boolean" and kind == pa.bool_():
        encoder = columns.fixed(1, columns.bits_of_bools)
    elif name in _EXACT and _bits(kind) <= _EXACT[name]:
        size = 4 if name == "float" else 8
        encoder = columns.fixed(size, lambda column, _: columns.bits_of_floats(column, size))
    return encoder


def _uuid(schema: AvroType, path: str) -> Encoder | None:
    """An encoder for UUIDs, which are written as text or as 16 bytes."""
    is_text = schema["type"] == "string"
    encoder = _leaf(schema, pa.string() if is_text else pa.binary(), path)
    convert = columns.uuid_texts if is_text else columns.uuid_bytes
    return None if encoder is None else columns.converted(convert, encoder)


# The number of bits up to which each type represents every whole number exactly.
_EXACT = {"int": 31, "long": 63, "float": 24, "double": 53}
_FLOATS = {pa.float16(): 11, pa.float32(): 24, pa.float64(): 53}


def _bits(kind: pa.DataType) -> float:
    """The number of value bits of a numeric type, without the sign; infinity for other types."""
    if pa.types.is_integer(kind):
        return int(kind.bit_width) - bool(pa.types.is_signed_integer(kind))
    return _FLOATS.get(kind, math.inf)


def _whole(name: str, logical: str | None, kind: pa.DataType, path: str) -> Encoder | None:
    if name == "long" and pa.types.is_timestamp(kind):
        return _instants(logical, kind, path)
    numbers = _whole_numbers(name, logical, kind)
    return None if numbers is None else _integers(numbers)


def _whole_numbers(name: str, logical: str | None, kind: pa.DataType) -> Callable[[pa.Array], Any] | None:
    """The function that converts a column to numbers of int or long; None if there is no such conversion."""
    if pa.types.is_integer(kind) and _bits(kind) <= _EXACT[name]:
        # A plain number is accepted for any logical type, and is written as it is.
        return columns.numbers_of
    if pa.types.is_date(kind) and name == "int" and logical == "date":
        return lambda column: arrays.numbers(column.cast(pa.date32()), np.int32)
    if pa.types.is_time(kind) and logical == ("time-millis" if name == "int" else "time-micros"):
        unit = columns.PER_SECOND[kind.unit]
        wanted = 1000 if name == "int" else 1_000_000
        width = np.int32 if kind.bit_width == 32 else np.int64
        return lambda column: _scaled(arrays.numbers(column, width), unit, wanted)
    if name == "long" and pa.types.is_duration(kind) and logical is None:
        return lambda column: arrays.numbers(column, np.int64)
    return None


def _instants(logical: str | None, kind: pa.DataType, path: str) -> Encoder | None:
    local = "" if kind.tz else "local-"
    names = {f"{local}timestamp-{name}": unit for unit, name in avro_schema.UNIT_NAMES.items()}
    if logical not in names:
        return None
    unit, wanted = columns.PER_SECOND[kind.unit], columns.PER_SECOND[names[logical]]
    if wanted > unit:
        return _finer(wanted // unit, path)
    return _integers(lambda column: _scaled(arrays.numbers(column, np.int64), unit, wanted))


def _scaled(numbers: Any, unit: int, wanted: int) -> Any:
    """Convert numbers from ``unit`` to ``wanted``, both given as units per second. An instant is rounded down
    to the coarser unit in which it lies, also before 1970."""
    if unit == wanted:
        return numbers
    return numbers // (unit // wanted) if unit > wanted else numbers.astype(np.int64) * (wanted // unit)


# The schema must not decide how much memory a row takes. No number needs more than 16 bytes.
_MAX_DECIMAL_BYTES = 256


def _decimal(schema: AvroType, kind: pa.DataType, path: str) -> Encoder | None:
    """Avro's fixed, or as few bytes as possible after their count."""
    precision, scale = int(schema.get("precision", 0)), int(schema.get("scale", 0))
    fits = scale >= kind.scale and precision - scale >= kind.precision - kind.scale
    if schema["type"] not in ("bytes", "fixed") or not fits or precision > 38 or kind.bit_width > 128:
        return None
    size = schema["size"] if schema["type"] == "fixed" else None
    if size is not None and not (10**precision).bit_length() < 8 * size <= 8 * _MAX_DECIMAL_BYTES:
        raise SchemaError(
            f"the schema's fixed of {size} bytes at '{path}' is too small for {precision} digits, or larger "
            f"than {_MAX_DECIMAL_BYTES} bytes"
        )
    wanted = pa.decimal128(precision, scale)

    def pieces(column: pa.Array, nulls: Bools | None) -> list[Piece]:
        column = column if column.type == wanted else column.cast(wanted)
        sizes = columns.decimal_sizes(column) if size is None else np.full(len(column), size)
        if nulls is not None:
            sizes[nulls] = 0
        content = columns.decimal_bytes(column, sizes, size or int(sizes.max(initial=1)))
        return [content] if size else [*byte_columns.varint(byte_columns.zigzag(sizes), nulls), content]

    return Leaf(pieces)
