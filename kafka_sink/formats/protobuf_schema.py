"""Protobuf schemas, as text of a .proto file or as FileDescriptorProto or FileDescriptorSet in Base64.

Tasks also read them, with this module, so that they need no Protobuf library. The fields of a descriptor are
those of google/protobuf/descriptor.proto.
"""

from __future__ import annotations

import base64
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from kafka_sink.errors import SchemaError
from kafka_sink.varint import read_unsigned

SCALARS = (
    *("double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string", "group"),
    *("message", "bytes", "uint32", "enum", "sfixed32", "sfixed64", "sint32", "sint64"),
)
# The types by their number in a descriptor, which starts at 1.
_TYPES = dict(enumerate(SCALARS, 1))
KNOWN = "google.protobuf."
_WRAPPED = {
    "DoubleValue": "double",
    "FloatValue": "float",
    "Int64Value": "int64",
    "UInt64Value": "uint64",
    "Int32Value": "int32",
    "UInt32Value": "uint32",
    "BoolValue": "bool",
    "StringValue": "string",
    "BytesValue": "bytes",
}
_MAX_DEPTH = 100


@dataclasses.dataclass(slots=True)
class Field:
    """``kind`` is a name in SCALARS. ``type_name`` is the full name of the field's message or enum. ``oneof``
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
    for name, known in _WRAPPED.items():
        schema.messages[KNOWN + name] = MessageType(KNOWN + name, [Field("value", 1, known)])
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
        data: bytes | None = base64.b64decode(text, validate=True)
    except ValueError:
        data = None
    try:
        for file in [_SchemaText(text).read()] if data is None else _files(data):
            schema.own.clear()
            _Descriptor(schema, file).read()
    except SchemaError:
        # It is a ValueError, and its message is more precise.
        raise
    except (LookupError, ValueError):
        raise SchemaError(
            "the Protobuf schema is neither text of a .proto file nor a descriptor in Base64"
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


# The values of each field of a descriptor by its number: numbers, texts as bytes or str, and messages, which
# are bytes or also values by number.
_Values = dict[int, list[Any]]


def _files(data: bytes) -> list[_Values]:
    """The files of a FileDescriptorSet, each after its imports, or the one file of a FileDescriptorProto."""
    values = _grouped(data)
    # A set contains only files, in field 1. Field 1 of a file is its name.
    is_set = set(values) == {1} and all(isinstance(file, bytes) and file[:1] == b"\n" for file in values[1])
    return [_grouped(file) for file in values[1]] if is_set else [values]


def _grouped(data: bytes | _Values) -> _Values:
    """The values in a descriptor. Raises ValueError and LookupError."""
    if isinstance(data, dict):
        return data
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
    value = values[number][-1] if number in values else ""
    return value if isinstance(value, str) else str(value.decode())


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
        label, kind = values.get(4, [1])[-1], _TYPES[values[5][-1]]
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


# -- text --------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    # A comment or text without an end extends to the end of the schema, so that no character is read twice.
    r"\s+|//[^\n]*|/\*.*?(?:\*/|\Z)|(?P<text>\"(?:[^\"\\]|\\.)*(?:\"|\\?\Z)|'(?:[^'\\]|\\.)*(?:'|\\?\Z))"
    r"|(?P<word>[\w.+-]+)|(?P<sign>[^\s\w])",
    re.DOTALL,
)


class _SchemaText:
    """Reads messages, enums, maps and oneofs of a .proto file. Skips services, options and extensions."""

    def __init__(self, text: str) -> None:
        self._tokens = [match[0] for match in _TOKEN.finditer(text) if match.lastgroup]
        self._at = 0
        self._is_proto3 = False

    def read(self) -> _Values:
        """The values of a FileDescriptorProto. Raises IndexError and ValueError."""
        file: _Values = {4: [], 5: []}
        while self._at < len(self._tokens):
            word = self._next()
            if word == "syntax":
                self._is_proto3 = any("proto3" in token for token in self._skip())
                file[12] = ["proto3" if self._is_proto3 else "proto2"]
            elif word == "edition":
                file[12] = ["editions"]
                self._skip()
            elif word == "package":
                file[2] = [self._next()]
            elif word == "message":
                file[4].append(self._message(1))
            elif word == "enum":
                file[5].append(self._enum())
            elif word != ";":
                self._skip()
        return file

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _skip(self) -> list[str]:
        """Move past the end of a statement, including its block; return its tokens."""
        depth, begin = 0, self._at
        while True:
            sign = self._next()
            depth += (sign in "{[") - (sign in "}]")
            if depth == 0 and sign in (";", "}"):
                return self._tokens[begin : self._at]

    def _expect(self, sign: str) -> None:
        if self._next() != sign:
            raise ValueError(f"no {sign}")

    def _name_and_number(self) -> tuple[str, int]:
        name = self._next()
        self._expect("=")
        return name, int(self._next(), 0)

    def _enum(self) -> _Values:
        enum: _Values = {1: [self._next()], 2: []}
        self._expect("{")
        while (word := self._next()) != "}":
            if word in ("option", "reserved"):
                self._skip()
            elif word != ";":
                self._at -= 1
                name, number = self._name_and_number()
                enum[2].append({1: [name], 2: [number]})
                self._skip()
        return enum

    def _message(self, depth: int) -> _Values:
        if depth > _MAX_DEPTH:
            raise SchemaError(f"the Protobuf schema is nested more than {_MAX_DEPTH} deep")
        message: _Values = {1: [self._next()], 2: [], 3: [], 4: [], 8: []}
        self._expect("{")
        self._body(message, depth, in_oneof=False)
        return message

    def _body(self, message: _Values, depth: int, *, in_oneof: bool) -> None:
        while (word := self._next()) != "}":
            if word == "message":
                message[3].append(self._message(depth + 1))
            elif word == "enum":
                message[4].append(self._enum())
            elif word == "oneof":
                message[8].append({1: [self._next()]})
                self._expect("{")
                self._body(message, depth, in_oneof=True)
            elif word in ("option", "reserved", "extensions", "extend"):
                self._skip()
            elif word == "map":
                self._map(message)
            elif word != ";":
                self._field(message, word, in_oneof=in_oneof)

    def _map(self, message: _Values) -> None:
        """Add the field and the message of its entries, as protoc does."""
        self._expect("<")
        key = self._next()
        self._expect(",")
        value = self._next()
        self._expect(">")
        name, number = self._name_and_number()
        self._skip()
        fields = [_typed("key", 1, key), _typed("value", 2, value)]
        message[3].append({1: [f"{name}Entry"], 2: fields, 7: [{7: [True]}]})
        message[2].append(_typed(name, number, f"{name}Entry", 3))

    def _field(self, message: _Values, word: str, *, in_oneof: bool) -> None:
        label = {"optional": 1, "required": 2, "repeated": 3}.get(word)
        kind = word if label is None else self._next()
        name, number = self._name_and_number()
        options = self._skip()
        field = _typed(name, number, kind, label or 1)
        if "packed" in options:
            field[8] = [{2: [options[options.index("packed") + 2] == "true"]}]
        if label == 1 and self._is_proto3:
            message[8].append({1: [f"_{name}"]})
            in_oneof = True
        if in_oneof:
            field[9] = [len(message[8]) - 1]
        message[2].append(field)


def _typed(name: str, number: int, kind: str, label: int = 1) -> _Values:
    """The values of a FieldDescriptorProto. ``_resolve`` finds out whether a named type is an enum."""
    is_scalar = kind in SCALARS
    type_number = SCALARS.index(kind if is_scalar else "message") + 1
    return {1: [name], 3: [number], 4: [label], 5: [type_number], 6: ["" if is_scalar else kind]}
