"""Avro schemas (Avro 1.12): reads a given schema with its defaults, or derives a schema from columns."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from kafka_sink import varint
from kafka_sink.errors import SchemaError
from kafka_sink.formats.columns import is_list, is_uuid, joined, missing_type, plain_type, require_text_keys
from kafka_sink.formats.schemas import StepBudget, not_json
from kafka_sink.printable import printable

PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
_NAMED = frozenset({"record", "error", "enum", "fixed"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Schemas come from a registry, so their nesting must not decide how deep the recursion goes.
_MAX_DEPTH = 200

AvroType = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AvroSchema:
    """A schema that was read.

    ``root`` is its outermost type. ``named`` are the types that the schema and its references define, by full
    name. Types are mappings with "type". A union has "type": "union" and "branches".
    """

    root: AvroType
    named: Mapping[str, AvroType]
    steps: StepBudget

    @property
    def full_name(self) -> str:
        """The name of the outermost type, as used in subjects; empty for a type without a name."""
        name: str = self.root.get("full_name", "")
        return name


def read(text: str, references: Iterable[tuple[str, str]] = ()) -> AvroSchema:
    """Read a schema from JSON. Raises SchemaError. ``references`` define the names that the schema uses. Each
    comes after the references that it uses itself."""
    named: dict[str, AvroType] = {}
    try:
        for _, reference in references:
            _AvroReader(named).read(_parsed(reference), "", 0)
        return AvroSchema(_AvroReader(named).read(_parsed(text), "", 0), named, StepBudget())
    except SchemaError:
        raise
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise SchemaError(
            f"the Avro schema cannot be read ({printable(str(error))}): {printable(text, 100)}"
        ) from None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        # A schema may consist of a type's name only.
        if _NAME.fullmatch(text.strip()):
            return text.strip()
        raise not_json("Avro", text) from None


class _AvroReader:
    def __init__(self, named: dict[str, AvroType]) -> None:
        self._named = named

    def read(self, definition: Any, namespace: str, depth: int) -> AvroType:
        if depth > _MAX_DEPTH:
            raise SchemaError(f"the Avro schema is nested more than {_MAX_DEPTH} deep")
        if isinstance(definition, str):
            return self._by_name(definition, namespace)
        if isinstance(definition, list):
            branches = [self.read(branch, namespace, depth + 1) for branch in definition]
            return {"type": "union", "branches": branches}
        if not isinstance(definition, dict) or "type" not in definition:
            raise SchemaError(f"the Avro schema has {str(definition)[:100]!r} instead of a type")
        kind = definition["type"]
        if not isinstance(kind, str) or (kind not in PRIMITIVES | _NAMED and kind not in ("array", "map")):
            return self.read(kind, namespace, depth + 1)
        if kind == "array":
            return {"type": "array", "items": self.read(_part(definition, "items"), namespace, depth + 1)}
        if kind == "map":
            return {"type": "map", "values": self.read(_part(definition, "values"), namespace, depth + 1)}
        return self._of_name(definition, kind, namespace, depth) if kind in _NAMED else definition

    def _by_name(self, name: str, namespace: str) -> AvroType:
        if name in PRIMITIVES:
            return {"type": name}
        for full_name in (f"{namespace}.{name}", name) if namespace and "." not in name else (name,):
            if full_name in self._named:
                return {"type": "named", "full_name": full_name}
        raise SchemaError(f"the Avro schema uses a type {name!r} that neither it nor a reference defines")

    def _of_name(self, definition: Mapping[str, Any], kind: str, namespace: str, depth: int) -> AvroType:
        name, _, own = str(_part(definition, "name")).rpartition(".")[::-1]
        namespace = own or definition.get("namespace", namespace) or ""
        full_name = f"{namespace}.{name}" if namespace else name
        schema: dict[str, Any] = {
            **definition,
            "type": "record" if kind == "error" else kind,
            "full_name": full_name,
        }
        # Register the type before its fields are read, because they may refer to it.
        self._named[full_name] = schema
        if schema["type"] == "record":
            schema["fields"] = [
                {
                    **field,
                    "name": _part(field, "name"),
                    "type": self.read(_part(field, "type"), namespace, depth + 1),
                }
                for field in _part(definition, "fields")
            ]
        elif kind == "enum":
            schema["symbols"] = [str(symbol) for symbol in _part(definition, "symbols")]
        else:
            schema["size"] = int(_part(definition, "size"))
        return schema


def _part(definition: Mapping[str, Any], name: str) -> Any:
    if name not in definition:
        raise SchemaError(f"the Avro schema has a {definition.get('type')} without '{name}'")
    return definition[name]


def derived(field: pa.Field, record_name: str) -> str:
    """The schema of a column of any type, as JSON. A struct becomes a record with this name.

    Types and names are those of Spark's ``to_avro``, with two differences that help schemas to evolve. A
    column that may be null becomes a union whose first branch is null, with the default null, so that adding
    such a column keeps the schema compatible. A decimal becomes bytes, as in Kafka Connect and ksqlDB. Raises
    SchemaError, which names the column.
    """
    namespace, _, name = record_name.rpartition(".")
    return json.dumps(_derived(field.type, name, namespace, field.name), separators=(",", ":"))


def _record(fields: Iterable[pa.Field], name: str, namespace: str, path: str) -> dict[str, Any]:
    inner = f"{namespace}.{name}" if namespace else name
    record: dict[str, Any] = {"type": "record", "name": name}
    if namespace:
        record["namespace"] = namespace
    record["fields"] = [_field(field, inner, path) for field in fields]
    return record


def _field(field: pa.Field, namespace: str, path: str) -> dict[str, Any]:
    path = joined(path, field.name)
    if not _NAME.fullmatch(field.name):
        raise SchemaError(
            f"column '{path}' has a name that Avro does not allow: use letters, digits and '_', and no "
            f"digit first. Rename it, as in .withColumnRenamed('{path}', '...')"
        )
    kind = _derived(field.type, field.name, namespace, path)
    if not field.nullable or kind == "null":
        return {"name": field.name, "type": kind}
    return {"name": field.name, "type": ["null", kind], "default": None}


def _nullable(kind: Any, *, nullable: bool) -> Any:
    return ["null", kind] if nullable and kind != "null" else kind


def _derived(kind: pa.DataType, name: str, namespace: str, path: str) -> Any:
    kind = plain_type(kind)
    if pa.types.is_struct(kind):
        return _record(kind, name, namespace, path)
    if is_list(kind):
        items = _derived(kind.value_type, name, namespace, f"{path}[]")
        return {"type": "array", "items": _nullable(items, nullable=kind.value_field.nullable)}
    if pa.types.is_map(kind):
        require_text_keys(kind, path, "Avro's maps")
        values = _derived(kind.item_type, name, namespace, f"{path}{{}}")
        return {"type": "map", "values": _nullable(values, nullable=kind.item_field.nullable)}
    schema = _leaf(kind)
    if schema is None:
        raise missing_type(path, kind, "Avro")
    return schema


_LEAVES: Mapping[pa.DataType, Any] = {
    pa.null(): "null",
    pa.bool_(): "boolean",
    **dict.fromkeys((pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16()), "int"),
    **dict.fromkeys((pa.int64(), pa.uint32()), "long"),
    pa.float16(): "float",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.binary(): "bytes",
    pa.date32(): {"type": "int", "logicalType": "date"},
    pa.date64(): {"type": "int", "logicalType": "date"},
    pa.time32("s"): {"type": "int", "logicalType": "time-millis"},
    pa.time32("ms"): {"type": "int", "logicalType": "time-millis"},
    pa.time64("us"): {"type": "long", "logicalType": "time-micros"},
    pa.time64("ns"): {"type": "long", "logicalType": "time-micros"},
}
_MAX_DIGITS = 38
# Avro's names of Arrow's units of time. Avro has no seconds.
UNIT_NAMES = {"ms": "millis", "us": "micros", "ns": "nanos"}


def _leaf(kind: pa.DataType) -> Any:
    if pa.types.is_timestamp(kind):
        local = "" if kind.tz else "local-"
        return {"type": "long", "logicalType": f"{local}timestamp-{UNIT_NAMES.get(kind.unit, 'millis')}"}
    if pa.types.is_duration(kind):
        return "long"
    if is_uuid(kind):
        return {"type": "string", "logicalType": "uuid"}
    if pa.types.is_decimal128(kind):
        # Avro has no negative scale, and none above the precision.
        scale = max(kind.scale, 0)
        precision = max(kind.precision + scale - kind.scale, scale)
        if precision <= _MAX_DIGITS:
            return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}
    return _LEAVES.get(kind)


# -- defaults, for fields without a column -----------------------------------------------------------------

_WRONG = (KeyError, TypeError, ValueError, AttributeError, OverflowError, struct.error, IndexError)
_END_OF = {"int": 1 << 31, "long": 1 << 63}


def encoded_default(schema: AvroSchema, kind: AvroType, value: Any, path: str) -> bytes:
    """Encode a default, which is JSON in the schema, as the field's type. Raises SchemaError."""
    try:
        return _encoded_default(schema, kind, value)
    except SchemaError:
        raise
    except (*_WRONG, RecursionError):
        raise SchemaError(f"the schema's default of field '{path}' does not have the field's type") from None


def _encoded_default(schema: AvroSchema, kind: AvroType, value: Any) -> bytes:
    # A text counts by its length, because a type that contains it may occur very often.
    schema.steps.take(1 + len(value) if isinstance(value, str) else 1)
    name = kind["type"]
    if name == "named":
        return _encoded_default(schema, schema.named[kind["full_name"]], value)
    if name == "union":
        return _default_of_union(schema, kind["branches"], value)
    if name == "record":
        return b"".join(
            _encoded_default(
                schema, field["type"], value[field["name"]] if field["name"] in value else field["default"]
            )
            for field in kind["fields"]
        )
    if name == "array":
        return _encoded_block([_encoded_default(schema, kind["items"], item) for item in value])
    if name == "map":
        return _encoded_block(
            [
                _encoded_text(key.encode()) + _encoded_default(schema, kind["values"], item)
                for key, item in value.items()
            ]
        )
    return _encoded_scalar(name, kind, value)


def _default_of_union(schema: AvroSchema, branches: list[AvroType], value: Any) -> bytes:
    """Encode a union's default. It belongs to the first branch, but newer Avro accepts any."""
    for at, branch in enumerate(branches):
        try:
            return varint.signed(at) + _encoded_default(schema, branch, value)
        except _WRONG:
            continue
    raise ValueError("fits no branch")


def _encoded_block(items: list[bytes]) -> bytes:
    return (varint.signed(len(items)) + b"".join(items) if items else b"") + b"\0"


def _encoded_text(content: bytes) -> bytes:
    return varint.signed(len(content)) + content


def _encoded_scalar(name: str, kind: AvroType, value: Any) -> bytes:
    encoded: bytes | None = None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "null" and value is None:
        encoded = b""
    elif name == "boolean" and isinstance(value, bool):
        encoded = b"\1" if value else b"\0"
    elif name in _END_OF and is_number and -_END_OF[name] <= value < _END_OF[name] and value == int(value):
        encoded = varint.signed(int(value))
    elif name in ("float", "double") and is_number:
        encoded = struct.pack("<f" if name == "float" else "<d", value)
    elif name == "string" and isinstance(value, str):
        encoded = _encoded_text(value.encode())
    elif name == "bytes":
        encoded = _encoded_text(value.encode("iso-8859-1"))
    elif name == "fixed" and len(value) == kind["size"]:
        encoded = value.encode("iso-8859-1")
    elif name == "enum":
        encoded = varint.signed(kind["symbols"].index(value))
    if encoded is None:
        raise ValueError("not a value of the type")
    return encoded
