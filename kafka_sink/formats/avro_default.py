"""Defaults of an Avro schema in binary form: one value each, for fields without a column."""

from __future__ import annotations

import struct
from typing import Any

from kafka_sink.errors import SchemaError
from kafka_sink.formats.avro_schema import AvroSchema, Schema
from kafka_sink.records import varint

_WRONG = (KeyError, TypeError, ValueError, AttributeError, struct.error, IndexError)


def encoded(schema: AvroSchema, kind: Schema, value: Any, path: str) -> bytes:
    """A default as the schema has it in JSON, by the type of its field. Raises SchemaError."""
    try:
        return _encoded(schema, kind, value)
    except SchemaError:
        raise
    except (*_WRONG, RecursionError):
        raise SchemaError(f"the schema's default of field '{path}' is no value of its type") from None


def _encoded(schema: AvroSchema, kind: Schema, value: Any) -> bytes:
    # A text may be written as often as what has it.
    schema.steps.take(1 + len(value) if isinstance(value, str) else 1)
    name = kind["type"]
    if name == "named":
        return _encoded(schema, schema.named[kind["full_name"]], value)
    if name == "union":
        return _of_union(schema, kind["branches"], value)
    if name == "record":
        return b"".join(
            _encoded(
                schema, field["type"], value[field["name"]] if field["name"] in value else field["default"]
            )
            for field in kind["fields"]
        )
    if name == "array":
        return _block([_encoded(schema, kind["items"], item) for item in value])
    if name == "map":
        return _block(
            [_text(key.encode()) + _encoded(schema, kind["values"], item) for key, item in value.items()]
        )
    return _scalar(name, kind, value)


def _of_union(schema: AvroSchema, branches: list[Schema], value: Any) -> bytes:
    """A default belongs to the first branch, but newer versions take any that fits."""
    for at, branch in enumerate(branches):
        try:
            return varint.scalar(at) + _encoded(schema, branch, value)
        except _WRONG:
            continue
    raise ValueError("fits no branch")


def _block(items: list[bytes]) -> bytes:
    return (varint.scalar(len(items)) + b"".join(items) if items else b"") + b"\0"


def _text(content: bytes) -> bytes:
    return varint.scalar(len(content)) + content


def _scalar(name: str, kind: Schema, value: Any) -> bytes:
    found: bytes | None = None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "null" and value is None:
        found = b""
    elif name == "boolean" and isinstance(value, bool):
        found = b"\1" if value else b"\0"
    elif name in ("int", "long") and is_number and value == int(value):
        found = varint.scalar(int(value))
    elif name in ("float", "double") and is_number:
        found = struct.pack("<f" if name == "float" else "<d", value)
    elif name == "string" and isinstance(value, str):
        found = _text(value.encode())
    elif name == "bytes":
        found = _text(value.encode("iso-8859-1"))
    elif name == "fixed" and len(value) == kind["size"]:
        found = value.encode("iso-8859-1")
    elif name == "enum":
        found = varint.scalar(kind["symbols"].index(value))
    if found is None:
        raise ValueError("no value of the type")
    return found
