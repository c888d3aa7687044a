"""Protobuf schemas, as FileDescriptorProto or FileDescriptorSet in Base64.

Tasks also read them, with this module, so that they need no Protobuf library. The fields of a descriptor are
those of google/protobuf/descriptor.proto.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Sequence
from typing import Any

from kafka_sink.errors import SchemaError
from kafka_sink.printable import printable
from kafka_sink.varint import read_unsigned

# The types by their number in a descriptor, which starts at 1.
_TYPES = dict(
    enumerate(
        (
            *("double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string", "group"),
            *("message", "bytes", "uint32", "enum", "sfixed32", "sfixed64", "sint32", "sint64"),
        ),
        1,
    )
)
KNOWN = "google.protobuf."
# The messages that wrap a scalar: DoubleValue wraps double, and so on.
_WRAPPERS = ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
_MAX_DEPTH = 100


@dataclasses.dataclass(slots=True)
class Field:
    """``kind`` is a name in _TYPES. ``type_name`` is the full name of the field's message or enum. ``oneof``
    is the name of the oneof that contains the field. A proto3 optional field has its own oneof."""

    name: str
    number: int
    kind: str
    type_name: str = ""
    is_repeated: bool = False
    is_required: bool = False
    is_packed: bool = False
    oneof: str = ""
    has_presence: bool = False


@dataclasses.dataclass(slots=True)
class MessageType:
    """A message type. ``fields`` are ordered by number."""

    full_name: str
    fields: list[Field] = dataclasses.field(default_factory=list)
    is_map_entry: bool = False
    place: tuple[int, ...] = ()


@dataclasses.dataclass(slots=True)
class ProtobufSchema:
    """All messages and enums of a schema and its imports, by full name. An enum maps names to numbers. A
    field of a closed enum, which proto2 has, can have no other number.

    ``own`` are the messages of the schema's file. Their ``place`` is the path of indexes after a schema's id.
    """

    messages: dict[str, MessageType] = dataclasses.field(default_factory=dict)
    enums: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    closed_enums: set[str] = dataclasses.field(default_factory=set)
    own: list[str] = dataclasses.field(default_factory=list)

    def message(self, name: str) -> MessageType:
        """The message with this name or full name; without, the file's first message. Raises SchemaError."""
        if not name and self.own:
            return self.messages[self.own[0]]
        for own in self.own:
            if name in (own, own.rpartition(".")[2]):
                return self.messages[own]
        raise SchemaError(
            f"the Protobuf schema has no message {name!r}; it has {', '.join(self.own[:10]) or 'none'}"
        )


def read(text: str, references: Sequence[tuple[str, str]] = ()) -> ProtobufSchema:
    """Read a schema. Raises SchemaError."""
    schema = ProtobufSchema()
    for wrapper in _WRAPPERS:
        name = f"{KNOWN}{wrapper}Value"
        schema.messages[name] = MessageType(name, [Field("value", 1, wrapper.lower())])
    for name in ("Timestamp", "Duration"):
        parts = [Field("seconds", 1, "int64"), Field("nanos", 2, "int32")]
        schema.messages[KNOWN + name] = MessageType(KNOWN + name, parts)
    for _, own in references:
        _add(schema, own)
    schema.own.clear()
    _add(schema, text)
    for message in list(schema.messages.values()):
        for field in message.fields:
            _resolve(schema, message, field)
    return schema


def _add(schema: ProtobufSchema, text: str) -> None:
    try:
        for file in _files(base64.b64decode(text, validate=True)):
            schema.own.clear()
            _Descriptor(schema, file).read()
    except SchemaError:
        # It is a ValueError, and its message is more precise.
        raise
    except (LookupError, ValueError, TypeError, AttributeError):
        raise SchemaError(
            f"the Protobuf schema is not a descriptor in Base64: {printable(text, 100)}. The text of a "
            ".proto file is not supported, and some registries return nothing else: set value.schema or "
            "key.schema to a descriptor, in Python base64.b64encode(order_pb2.DESCRIPTOR.serialized_pb)"
        ) from None


def _resolve(schema: ProtobufSchema, message: MessageType, field: Field) -> None:
    """Find the type of a field by name, from the innermost scope outwards."""
    if not field.type_name or field.kind == "group":
        return
    name = field.type_name.removeprefix(".")
    scope = "" if field.type_name.startswith(".") else message.full_name
    while True:
        full_name = f"{scope}.{name}" if scope else name
        if full_name in schema.messages or full_name in schema.enums:
            field.type_name = full_name
            field.kind = "enum" if full_name in schema.enums else "message"
            if field.kind == "message" and not field.is_repeated:
                field.has_presence = True
            return
        if not scope:
            # It is an unsupported well-known type, or the schema's references are missing.
            field.kind = "unknown"
            return
        scope = scope.rpartition(".")[0]


# -- descriptors -------------------------------------------------------------------------------------------


# The values of each field of a descriptor by its number: numbers, and texts and messages as bytes.
_Values = dict[int, list[Any]]


def _files(data: bytes) -> list[_Values]:
    """The files of a FileDescriptorSet, each after its imports, or the one file of a FileDescriptorProto."""
    values = _grouped(data)
    # A set contains only files, in field 1. Field 1 of a file is its name.
    is_set = set(values) == {1} and all(isinstance(file, bytes) and file[:1] == b"\n" for file in values[1])
    return [_grouped(file) for file in values[1]] if is_set else [values]


def _grouped(data: bytes) -> _Values:
    """The values in a descriptor. Raises ValueError and LookupError."""
    values: _Values = {}
    at = 0
    while at < len(data):
        tag, at = read_unsigned(data, at)
        kind = tag & 7
        value: Any
        if kind == 0:
            value, at = read_unsigned(data, at)
        else:
            size, at = read_unsigned(data, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            value = data[at : at + size]
            if len(value) < size:
                raise ValueError("cut off")
            at += size
        values.setdefault(tag >> 3, []).append(value)
    return values


def _string(values: _Values, number: int) -> str:
    value: bytes = values[number][-1] if number in values else b""
    return value.decode()


class _Descriptor:
    def __init__(self, schema: ProtobufSchema, file: _Values) -> None:
        self._schema = schema
        self._file = file
        self._is_proto3 = _string(file, 12) == "proto3"
        if _string(file, 12) == "editions":
            raise SchemaError("Protobuf editions are not supported: use proto3 or proto2")

    def read(self) -> None:
        package = _string(self._file, 2)
        for place, data in enumerate(self._file.get(4, ())):
            self._message(data, package, (place,))
        self._enums(self._file.get(5, ()), package)

    def _enums(self, enums: Sequence[bytes], scope: str) -> None:
        for data in enums:
            enum = _grouped(data)
            entries = [_grouped(entry) for entry in enum.get(2, ())]
            name = _inside(scope, _string(enum, 1))
            self._schema.enums[name] = {_string(entry, 1): entry.get(2, [0])[-1] for entry in entries}
            if not self._is_proto3:
                self._schema.closed_enums.add(name)

    def _message(self, data: bytes, scope: str, place: tuple[int, ...]) -> None:
        if len(place) > _MAX_DEPTH:
            raise SchemaError(f"the Protobuf schema is nested more than {_MAX_DEPTH} deep")
        values = _grouped(data)
        full_name = _inside(scope, _string(values, 1))
        options = _grouped(values[7][-1]) if 7 in values else {}
        oneofs = [_string(_grouped(entry), 1) for entry in values.get(8, ())]
        message = MessageType(full_name, is_map_entry=bool(options.get(7, [0])[-1]), place=place)
        message.fields = [self._field(_grouped(entry), oneofs) for entry in values.get(2, ())]
        message.fields.sort(key=lambda entry: entry.number)
        self._schema.messages[full_name] = message
        if not message.is_map_entry:
            self._schema.own.append(full_name)
        self._enums(values.get(4, ()), full_name)
        for number, nested in enumerate(values.get(3, ())):
            self._message(nested, full_name, (*place, number))

    def _field(self, values: _Values, oneofs: Sequence[str]) -> Field:
        label = values.get(4, [1])[-1]
        # Confluent's registry leaves out the type of a field whose type has a name.
        kind = "message" if 6 in values and 5 not in values else _TYPES[values[5][-1]]
        options = _grouped(values[8][-1]) if 8 in values else {}
        oneof = oneofs[values[9][-1]] if 9 in values else ""
        return Field(
            _string(values, 1),
            values[3][-1],
            kind,
            _string(values, 6),
            is_repeated=label == 3,
            is_required=label == 2,
            is_packed=bool(options[2][-1]) if 2 in options else self._is_proto3,
            oneof=oneof,
            # ``_resolve`` adds the presence of messages.
            has_presence=bool(oneof) or (label != 3 and not self._is_proto3),
        )


def _inside(scope: str, name: str) -> str:
    return f"{scope}.{name}" if scope else name
