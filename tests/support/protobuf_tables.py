"""Protobuf schemas of every field type, nested three deep, and tables that are written with them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    message_factory,
    timestamp_pb2,
    wrappers_pb2,
)
from hypothesis import strategies as st

from tests.support.format_tables import LEAVES, array, ints, is_text
from tests.support.format_tables import values as values_of

_NUMBERS = {
    "double": 1,
    "float": 2,
    "int64": 3,
    "uint64": 4,
    "int32": 5,
    "fixed64": 6,
    "fixed32": 7,
    "bool": 8,
    "string": 9,
    "bytes": 12,
    "uint32": 13,
    "sfixed32": 15,
    "sfixed64": 16,
    "sint32": 17,
    "sint64": 18,
}
_SMALL = ("int8", "int16", "uint8", "uint16", "int32")
_ALL = (*_SMALL, "uint32", "int64", "uint64")
_32, _64 = _SMALL, (*_SMALL, "uint32", "int64")
# The Arrow types of the columns that each type of field takes.
_COLUMNS: dict[str, Sequence[str]] = {
    "double": ("halffloat", "float", "double"),
    "float": ("halffloat", "float"),
    **dict.fromkeys(("int32", "sint32", "sfixed32"), _32),
    **dict.fromkeys(("int64", "sint64", "sfixed64"), _64),
    **dict.fromkeys(("uint32", "fixed32", "uint64", "fixed64"), _ALL),
    "bool": ("bool", "extension<arrow.bool8>"),
    "string": ("string", "large_string", "dictionary<values=string, indices=int8, ordered=0>"),
    "bytes": ("binary", "large_binary", "fixed_size_binary[3]"),
}
_WRAPPERS = ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
_SYMBOLS = {"ZERO": 0, "ONE": 1, "LOW": -(1 << 31), "HIGH": (1 << 31) - 1}
_KEYS = st.text(st.characters(codec="utf-8"), max_size=5)
_KNOWN = (timestamp_pb2, duration_pb2, wrappers_pb2)
_ONEOF = "oneof"
_DEPTH = 3
# How many of ten fields are messages, while these may be nested deeper.
_NESTED_OF_TEN = 3
_PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}


def in_base64(file: descriptor_pb2.FileDescriptorProto) -> str:
    return base64.b64encode(file.SerializeToString()).decode()


def without_types(descriptor: str) -> str:
    """The descriptor as Confluent's registry returns it: messages and enums have only their names, and these
    do not begin with the package."""
    file = descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(descriptor))

    def strip(message: descriptor_pb2.DescriptorProto) -> None:
        for field in message.field:
            if field.type_name:
                field.ClearField("type")
                field.type_name = field.type_name.removeprefix(".").removeprefix(f"{file.package}.")
        for nested in message.nested_type:
            strip(nested)

    for message in file.message_type:
        strip(message)
    return in_base64(file)


class _UnfitError(Exception):
    """A row that does not fit the schema."""


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class _Item:
    """One value of a field: its type in the schema and in Arrow. ``fill`` puts the value of a message type
    into a message, and ``scalar`` converts other values. Both raise _UnfitError."""

    word: str
    kind: pa.DataType
    values: st.SearchStrategy[Any]
    scalar: Callable[[Any], Any] = _same
    fill: Callable[[Any, Any], None] | None = None


@dataclass(frozen=True)
class _Field:
    """``label`` is a label of the schema, map, or oneof. If it ``may_lack`` values, elements or a required
    value may be null, which the schema does not allow."""

    name: str
    number: int
    label: str
    item: _Item
    packed: bool | None
    may_lack: bool

    @property
    def kind(self) -> pa.DataType:
        if self.label == "map":
            return pa.map_(pa.string(), pa.field("value", self.item.kind, self.may_lack))
        if self.label == "repeated":
            return pa.list_(pa.field("element", self.item.kind, self.may_lack))
        return self.item.kind

    @property
    def row_values(self) -> st.SearchStrategy[Any]:
        values = self.item.values
        if self.label in ("map", "repeated"):
            element = st.one_of(st.none(), values) if self.may_lack else values
            is_map = self.label == "map"
            values = st.dictionaries(_KEYS, element, max_size=3) if is_map else st.lists(element, max_size=4)
        return values if self.label == "required" and not self.may_lack else st.one_of(st.none(), values)

    def put(self, message: Any, value: Any) -> None:
        """Set the field of a message. Raises _UnfitError."""
        if value is None:
            if self.label == "required":
                raise _UnfitError
            return
        fill, scalar = self.item.fill, self.item.scalar
        if self.label not in ("map", "repeated"):
            if fill is None:
                setattr(message, self.name, scalar(value))
            else:
                own = getattr(message, self.name)
                own.SetInParent()
                fill(own, value)
            return
        own = getattr(message, self.name)
        if None in (value.values() if self.label == "map" else value):
            raise _UnfitError
        for element in value.items() if self.label == "map" else value:
            if self.label == "map":
                key, inner = element
                if fill is None:
                    own[key] = scalar(inner)
                else:
                    fill(own[key], inner)
            elif fill is None:
                own.append(scalar(element))
            else:
                fill(own.add(), element)


@dataclass(frozen=True)
class ProtobufTable:
    """``messages`` are the rows by Google's library; None for a row that does not fit the schema."""

    descriptor: str
    column: pa.StructArray
    messages: list[Any]
    has_large_map: bool


def _scalar(draw: st.DrawFn, word: str) -> _Item:
    kind = LEAVES[draw(st.sampled_from(_COLUMNS[word]))].kind

    def convert(value: Any) -> Any:
        if word.startswith(("u", "fixed")) and not 0 <= value < 1 << int(word[-2:]):
            raise _UnfitError
        return value.decode() if is_text(kind) else bool(value) if word == "bool" else value

    values = values_of(kind)
    if word.startswith(("u", "fixed")) and draw(st.integers(0, 7)):
        values = ints(0, min((1 << int(word[-2:])) - 1, (1 << (kind.bit_width - 1)) - 1))
    return _Item(word, kind, values, convert)


def _moment(draw: st.DrawFn, name: str) -> _Item:
    unit = draw(st.sampled_from(sorted(_PER_SECOND)))
    per_second = _PER_SECOND[unit]

    def fill(message: Any, value: int) -> None:
        seconds, rest = divmod(value, per_second)
        if name == "Duration" and value < 0 and rest:
            seconds, rest = seconds + 1, rest - per_second
        message.seconds, message.nanos = seconds, rest * (10**9 // per_second)

    kind = pa.timestamp(unit) if name == "Timestamp" else pa.duration(unit)
    return _Item(f"google.protobuf.{name}", kind, values_of(kind), fill=fill)


def _wrapper(draw: st.DrawFn, name: str) -> _Item:
    inner = _scalar(draw, name.lower())

    def fill(message: Any, value: Any) -> None:
        message.value = inner.scalar(value)

    return _Item(f"google.protobuf.{name}Value", inner.kind, inner.values, fill=fill)


def _enum(draw: st.DrawFn, *, is_proto3: bool) -> _Item:
    if draw(st.booleans()):
        symbols = st.sampled_from([name.encode() for name in _SYMBOLS])
        return _Item("Symbol", pa.string(), symbols, lambda value: _SYMBOLS[value.decode()])

    def convert(number: int) -> int:
        if not is_proto3 and number not in _SYMBOLS.values():
            raise _UnfitError
        return number

    numbers = st.sampled_from(sorted(_SYMBOLS.values()))
    return _Item("Symbol", pa.int32(), st.one_of(numbers, ints(-(1 << 31), (1 << 31) - 1)), convert)


class _Maker:
    """Makes the messages of one schema. The first one is the type of the rows."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self._is_proto3 = draw(st.booleans())
        self.file = descriptor_pb2.FileDescriptorProto(name="row.proto", package="p.q")
        self.file.syntax = "proto3" if self._is_proto3 else "proto2"
        for known in _KNOWN:
            self.file.dependency.append(known.DESCRIPTOR.name)
        symbols = self.file.enum_type.add(name="Symbol")
        for name, number in _SYMBOLS.items():
            symbols.value.add(name=name, number=number)

    def message(self, depth: int) -> _Item:
        described = self.file.message_type.add(name=f"M{len(self.file.message_type)}")
        numbers = self._draw(st.lists(st.integers(1, 3000), min_size=1, max_size=4, unique=True))
        fields = [self._field(f"f{at}", number, depth) for at, number in enumerate(numbers)]
        if any(field.label == _ONEOF for field in fields):
            described.oneof_decl.add(name="choice")
        for field in fields:
            _describe(described, field, is_proto3=self._is_proto3)
        kind = pa.struct([pa.field(field.name, field.kind) for field in fields])
        values = st.fixed_dictionaries({field.name: field.row_values for field in fields})

        def fill(message: Any, row: Any) -> None:
            if sum(row[field.name] is not None for field in fields if field.label == _ONEOF) > 1:
                raise _UnfitError
            for field in fields:
                field.put(message, row[field.name])

        return _Item(described.name, kind, values, fill=fill)

    def _field(self, name: str, number: int, depth: int) -> _Field:
        draw = self._draw
        labels = ["", "", "optional", "repeated", "map", _ONEOF]
        if not self._is_proto3:
            labels = ["optional", "required", "repeated", "map", _ONEOF]
        label = draw(st.sampled_from(labels))
        item = self._item(depth)
        packed = None
        if label == "repeated" and (item.word == "Symbol" or _NUMBERS.get(item.word, 9) not in (9, 12)):
            packed = draw(st.sampled_from([None, True, False]))
        # Some rows lack a value that the schema requires.
        return _Field(name, number, label, item, packed, may_lack=draw(st.integers(0, 5)) == 0)

    def _item(self, depth: int) -> _Item:
        draw = self._draw
        choice = draw(st.integers(0, 9))
        if depth and choice < _NESTED_OF_TEN:
            return self.message(depth - 1)
        if choice == _NESTED_OF_TEN:
            return _moment(draw, draw(st.sampled_from(["Timestamp", "Duration"])))
        if choice == _NESTED_OF_TEN + 1:
            return _wrapper(draw, draw(st.sampled_from(_WRAPPERS)))
        return (
            _enum(draw, is_proto3=self._is_proto3)
            if choice == _NESTED_OF_TEN + 2
            else _scalar(draw, draw(st.sampled_from(sorted(_NUMBERS))))
        )


def _describe(described: descriptor_pb2.DescriptorProto, field: _Field, *, is_proto3: bool) -> None:
    added = described.field.add(name=field.name, number=field.number)
    added.label = {"required": 2, "repeated": 3, "map": 3}.get(field.label, 1)
    target = added
    if field.label == "map":
        # The name of the message that protoc makes for the entries.
        entry = described.nested_type.add(name=f"{field.name.capitalize()}Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=_NUMBERS["string"], label=1)
        target = entry.field.add(name="value", number=2, label=1)
        added.type, added.type_name = 11, f".p.q.{described.name}.{entry.name}"
    elif field.label == _ONEOF:
        added.oneof_index = 0
    elif field.label == "optional" and is_proto3:
        added.proto3_optional = True
        added.oneof_index = len(described.oneof_decl)
        described.oneof_decl.add(name=f"_{field.name}")
    if field.packed is not None:
        added.options.packed = field.packed
    word = field.item.word
    if word in _NUMBERS:
        target.type = _NUMBERS[word]
    else:
        target.type = 14 if word == "Symbol" else 11
        target.type_name = f".{word}" if word.startswith("google.") else f".p.q.{word}"


@st.composite
def protobuf_tables(draw: st.DrawFn) -> ProtobufTable:
    maker = _Maker(draw)
    row = maker.message(_DEPTH)
    rows = draw(st.lists(row.values, max_size=6))
    pool = descriptor_pool.DescriptorPool()
    for known in _KNOWN:
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    pool.Add(maker.file)
    row_class: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName("p.q.M0"))
    messages: list[Any] = []
    for values in rows:
        message = row_class()
        try:
            assert row.fill is not None
            row.fill(message, values)
        except _UnfitError:
            message = None
        messages.append(message)
    return ProtobufTable(
        in_base64(maker.file), array(row.kind, rows), messages, _has_large_map(rows, row.kind)
    )


def _has_large_map(entry: Any, kind: pa.DataType) -> bool:
    """Whether a map has several entries."""
    if isinstance(entry, list):
        return any(_has_large_map(element, getattr(kind, "value_type", kind)) for element in entry)
    if not isinstance(entry, dict):
        return False
    if pa.types.is_map(kind):
        return len(entry) > 1 or any(_has_large_map(value, kind.item_type) for value in entry.values())
    return any(_has_large_map(entry[field.name], field.type) for field in kind)
