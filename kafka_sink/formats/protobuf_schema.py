"""Protobuf schemas, as text of a .proto file or as FileDescriptorProto or FileDescriptorSet in Base64.

Tasks also read them, with this module, so that they need no Protobuf library. The fields of a descriptor are
those of google/protobuf/descriptor.proto.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kafka_sink.errors import SchemaError
from kafka_sink.varint import read_unsigned

SCALARS = (
    *("double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string", "group"),
    *("message", "bytes", "uint32", "enum", "sfixed32", "sfixed64", "sint32", "sint64"),
)
# The types by their number in a descriptor, which starts at 1.
_TYPES = dict(enumerate(SCALARS, 1))
_NOT_PACKED = ("string", "bytes", "message", "group")
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


@dataclass(slots=True)
class Field:
    """``kind`` is a name in SCALARS. ``type_name`` is the full name of the field's message or enum.

    ``oneof`` is the name of the oneof that contains the field. A proto3 optional field has its own oneof.
    """

    name: str
    number: int
    kind: str
    type_name: str = ""
    is_repeated: bool = False
    is_required: bool = False
    is_packed: bool | None = None
    oneof: str = ""
    has_presence: bool = False


@dataclass(slots=True)
class MessageType:
    """A message type. ``fields`` are ordered by number."""

    full_name: str
    fields: list[Field] = field(default_factory=list)
    is_map_entry: bool = False
    place: tuple[int, ...] = ()


@dataclass(slots=True)
class ProtobufSchema:
    """All messages and enums of a schema and its imports, by full name. An enum maps names to numbers.

    ``own`` are the messages of the schema's file. Their ``place`` is the path of indexes after a schema's id.
    """

    messages: dict[str, MessageType] = field(default_factory=dict)
    enums: dict[str, dict[str, int]] = field(default_factory=dict)
    own: list[str] = field(default_factory=list)

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
        for one in message.fields:
            _resolve(schema, message, one)
    return schema


def _add(schema: ProtobufSchema, text: str) -> None:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        _SchemaText(schema, text).read()
        return
    try:
        for file in _files(data):
            schema.own.clear()
            _Descriptor(schema, file).read()
    except SchemaError:
        # It is a ValueError, and knows better what is wrong.
        raise
    except (LookupError, ValueError):
        raise SchemaError("the Protobuf schema is neither text nor a descriptor in Base64") from None


def _resolve(schema: ProtobufSchema, message: MessageType, one: Field) -> None:
    """Find the type of a field by name, from the innermost scope outwards."""
    if not one.type_name or one.kind == "group":
        return
    name = one.type_name.removeprefix(".")
    scope = "" if one.type_name.startswith(".") else message.full_name
    while True:
        full_name = f"{scope}.{name}" if scope else name
        if full_name in schema.messages or full_name in schema.enums:
            one.type_name = full_name
            one.kind = "enum" if full_name in schema.enums else "message"
            if one.kind == "message" and not one.is_repeated:
                one.has_presence = True
            return
        if not scope:
            # It is an unsupported well-known type, or the schema's references are missing.
            one.kind = "unknown"
            return
        scope = scope.rpartition(".")[0]


# -- descriptors -------------------------------------------------------------------------------------------


def _files(data: bytes) -> list[dict[int, list[Any]]]:
    """The files of a FileDescriptorSet, each after its imports, or the one file of a FileDescriptorProto."""
    found = _grouped(data)
    # A set contains only files, in field 1. Field 1 of a file is its name.
    is_set = set(found) == {1} and all(isinstance(one, bytes) and one[:1] == b"\n" for one in found[1])
    return [_grouped(one) for one in found[1]] if is_set else [found]


def _grouped(data: bytes) -> dict[int, list[Any]]:
    """The values of each field by its number, as numbers or bytes. Raises ValueError and LookupError."""
    found: dict[int, list[Any]] = {}
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
        found.setdefault(tag >> 3, []).append(value)
    return found


def _string(found: Mapping[int, list[Any]], number: int) -> str:
    return str(found[number][-1].decode()) if number in found else ""


class _Descriptor:
    def __init__(self, schema: ProtobufSchema, file: Mapping[int, list[Any]]) -> None:
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
            found = _grouped(data)
            values = [_grouped(one) for one in found.get(2, ())]
            name = _inside(scope, _string(found, 1))
            self._schema.enums[name] = {_string(one, 1): one.get(2, [0])[-1] for one in values}

    def _message(self, data: bytes, scope: str, place: tuple[int, ...]) -> None:
        if len(place) > _MAX_DEPTH:
            raise SchemaError(f"the Protobuf schema is nested more than {_MAX_DEPTH} deep")
        found = _grouped(data)
        full_name = _inside(scope, _string(found, 1))
        options = _grouped(found[7][-1]) if 7 in found else {}
        oneofs = [_string(_grouped(one), 1) for one in found.get(8, ())]
        message = MessageType(full_name, is_map_entry=bool(options.get(7, [0])[-1]), place=place)
        message.fields = [self._field(_grouped(one), oneofs) for one in found.get(2, ())]
        message.fields.sort(key=lambda one: one.number)
        self._schema.messages[full_name] = message
        if not message.is_map_entry:
            self._schema.own.append(full_name)
        self._enums(found.get(4, ()), full_name)
        for number, nested in enumerate(found.get(3, ())):
            self._message(nested, full_name, (*place, number))

    def _field(self, found: Mapping[int, list[Any]], oneofs: Sequence[str]) -> Field:
        label, kind = found.get(4, [1])[-1], _TYPES[found[5][-1]]
        options = _grouped(found[8][-1]) if 8 in found else {}
        oneof = oneofs[found[9][-1]] if 9 in found else ""
        return Field(
            _string(found, 1),
            found[3][-1],
            kind,
            _string(found, 6),
            is_repeated=label == 3,
            is_required=label == 2,
            is_packed=_packed(
                kind, bool(options[2][-1]) if 2 in options else None, is_proto3=self._is_proto3
            ),
            oneof=oneof,
            has_presence=bool(oneof) or (label != 3 and (not self._is_proto3 or kind == "message")),
        )


def _inside(scope: str, name: str) -> str:
    return f"{scope}.{name}" if scope else name


def _packed(kind: str, said: bool | None, *, is_proto3: bool) -> bool:
    return False if kind in _NOT_PACKED else is_proto3 if said is None else said


# -- text --------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    # A comment or text without an end extends to the end of the schema, so that no character is read twice.
    r"\s+|//[^\n]*|/\*.*?(?:\*/|\Z)|(?P<text>\"(?:[^\"\\]|\\.)*(?:\"|\\?\Z)|'(?:[^'\\]|\\.)*(?:'|\\?\Z))"
    r"|(?P<word>[\w.+-]+)|(?P<sign>[^\s\w])",
    re.DOTALL,
)


class _SchemaText:
    """Reads messages, enums, maps and oneofs of a .proto file. Skips services, options and extensions."""

    def __init__(self, schema: ProtobufSchema, text: str) -> None:
        self._schema = schema
        self._tokens = [found[0] for found in _TOKEN.finditer(text) if found.lastgroup]
        self._at = 0
        self._is_proto3 = False

    def read(self) -> None:
        package, count = "", 0
        try:
            while self._at < len(self._tokens):
                word = self._next()
                if word == "syntax":
                    self._is_proto3 = any("proto3" in token for token in self._skip())
                elif word == "package":
                    package = self._next()
                elif word == "edition":
                    raise SchemaError("Protobuf editions are not supported: use proto3 or proto2")
                elif word == "message":
                    self._message(package, (count,))
                    count += 1
                elif word == "enum":
                    self._enum(package)
                elif word != ";":
                    self._skip()
        except SchemaError:
            raise
        except (IndexError, ValueError):
            raise SchemaError(
                "the Protobuf schema is neither text of a .proto file nor a descriptor"
            ) from None

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

    def _enum(self, scope: str) -> None:
        values: dict[str, int] = {}
        full_name = _inside(scope, self._next())
        self._expect("{")
        while (name := self._next()) != "}":
            if name in ("option", "reserved"):
                self._skip()
            elif name != ";":
                self._expect("=")
                values[name] = int(self._next(), 0)
                self._skip()
        self._schema.enums[full_name] = values

    def _expect(self, sign: str) -> None:
        if self._next() != sign:
            raise ValueError(f"no {sign}")

    def _message(self, scope: str, place: tuple[int, ...]) -> None:
        if len(place) > _MAX_DEPTH:
            raise SchemaError(f"the Protobuf schema is nested more than {_MAX_DEPTH} deep")
        message = MessageType(_inside(scope, self._next()), place=place)
        self._schema.messages[message.full_name] = message
        self._schema.own.append(message.full_name)
        self._expect("{")
        self._body(message, "", [0])
        message.fields.sort(key=lambda one: one.number)

    def _body(self, message: MessageType, oneof: str, nested: list[int]) -> None:
        while (word := self._next()) != "}":
            if word == "message":
                self._message(message.full_name, (*message.place, nested[0]))
                nested[0] += 1
            elif word == "enum":
                self._enum(message.full_name)
            elif word == "oneof":
                name = self._next()
                self._expect("{")
                self._body(message, name, nested)
            elif word in ("option", "reserved", "extensions", "extend"):
                self._skip()
            elif word == "map":
                self._map(message, nested)
            elif word != ";":
                message.fields.append(self._field(word, oneof))

    def _map(self, message: MessageType, nested: list[int]) -> None:
        self._expect("<")
        key = self._next()
        self._expect(",")
        value = self._next()
        self._expect(">")
        name = self._next()
        entry = MessageType(f"{message.full_name}.{name}Entry", is_map_entry=True, place=())
        entry.fields = [self._typed("key", 1, key), self._typed("value", 2, value)]
        self._schema.messages[entry.full_name] = entry
        # protoc treats the entry as a nested message, so the indexes of later nested messages increase.
        nested[0] += 1
        self._expect("=")
        number = int(self._next(), 0)
        self._skip()
        message.fields.append(Field(name, number, "message", f".{entry.full_name}", is_repeated=True))

    def _typed(self, name: str, number: int, kind: str) -> Field:
        return Field(name, number, kind) if kind in SCALARS else Field(name, number, "message", kind)

    def _field(self, word: str, oneof: str) -> Field:
        label = word if word in ("optional", "repeated", "required") else ""
        kind = self._next() if label else word
        name = self._next()
        self._expect("=")
        number = int(self._next(), 0)
        rest = self._skip()
        found = self._typed(name, number, kind)
        said = rest[rest.index("packed") + 2] == "true" if "packed" in rest else None
        found.is_repeated, found.is_required = label == "repeated", label == "required"
        found.is_packed = (
            None if said is None and found.type_name else _packed(kind, said, is_proto3=self._is_proto3)
        )
        if found.is_packed is None:
            # An enum is packed and a message is not. Which one it is turns out when the type is resolved.
            found.is_packed = self._is_proto3
        found.oneof = oneof or (f"_{name}" if label == "optional" and self._is_proto3 else "")
        found.has_presence = not found.is_repeated and (bool(found.oneof) or not self._is_proto3)
        return found
