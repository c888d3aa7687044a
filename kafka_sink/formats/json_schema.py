"""JSON Schemas (draft 7): derives one from columns, and compares columns with a given one.

Names, types and required properties are compared. Rules that only values can break (pattern, minimum, enum
...) are not checked: the consumers' deserializers check them if they validate.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from kafka_sink.errors import SchemaError
from kafka_sink.formats.columns import is_list, is_uuid, joined, missing_type, plain_type, unsupported_type
from kafka_sink.formats.schemas import StepBudget, not_json
from kafka_sink.printable import printable

_DRAFT = "http://json-schema.org/draft-07/schema#"
_MAX_DEPTH = 100

JsonSchema = Any


def parsed(text: str) -> JsonSchema:
    """Parse a schema. Raises SchemaError."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise not_json("JSON", text) from None
    if not isinstance(schema, dict | bool):
        raise SchemaError("the JSON schema is neither an object nor true or false")
    return schema


def derived(field: pa.Field, title: str) -> str:
    """The schema of a column. Raises SchemaError, which names the column. Objects do not allow additional
    properties, so that a new nullable column keeps the schema compatible."""
    schema = {"$schema": _DRAFT, "title": title, **_derived(field.type, field.name)}
    return json.dumps(schema, separators=(",", ":"))


def _derived(kind: pa.DataType, path: str) -> dict[str, Any]:
    kind = plain_type(kind)
    if pa.types.is_struct(kind):
        schema: dict[str, Any] = {
            "type": "object",
            "additionalProperties": False,
            "properties": {field.name: _nullable(field, joined(path, field.name)) for field in kind},
        }
        required = [field.name for field in kind if not field.nullable]
        return {**schema, "required": required} if required else schema
    if is_list(kind):
        return {"type": "array", "items": _nullable(kind.value_field, f"{path}[]")}
    if pa.types.is_map(kind):
        return {"type": "object", "additionalProperties": _nullable(kind.item_field, f"{path}{{}}")}
    leaf = _leaf(kind)
    if leaf is None:
        raise missing_type(path, kind, "JSON")
    return leaf


def _nullable(field: pa.Field, path: str) -> dict[str, Any]:
    schema = _derived(field.type, path)
    if not field.nullable or pa.types.is_null(field.type):
        return schema
    return {"oneOf": [{"type": "null"}, schema]}


_LEAVES: Sequence[tuple[Callable[[pa.DataType], bool], Mapping[str, str]]] = (
    (pa.types.is_null, {"type": "null"}),
    (pa.types.is_boolean, {"type": "boolean"}),
    (pa.types.is_integer, {"type": "integer"}),
    (pa.types.is_duration, {"type": "integer"}),
    (pa.types.is_floating, {"type": "number"}),
    (pa.types.is_decimal, {"type": "number"}),
    (is_uuid, {"type": "string", "format": "uuid"}),
    (pa.types.is_date, {"type": "string", "format": "date"}),
    (lambda kind: pa.types.is_timestamp(kind) and bool(kind.tz), {"type": "string", "format": "date-time"}),
    (pa.types.is_binary, {"type": "string", "contentEncoding": "base64"}),
    (lambda kind: kind == pa.string() or pa.types.is_timestamp(kind), {"type": "string"}),
    (pa.types.is_time, {"type": "string"}),
)


def _leaf(kind: pa.DataType) -> dict[str, Any] | None:
    """The schema of a type without children; None for a type that JSON does not have."""
    return next((dict(schema) for is_one, schema in _LEAVES if is_one(kind)), None)


def check(text: str, references: Sequence[tuple[str, str]], kind: pa.DataType, path: str) -> None:
    """Raise SchemaError, which names the field, if no row of this type fits the schema."""
    root = parsed(text)
    others = {name: parsed(own) for name, own in references}
    try:
        _Checker(root, others).check(root, kind, path, 0)
    except (TypeError, AttributeError) as error:
        raise SchemaError(
            f"the JSON schema cannot be read ({printable(str(error))}): {printable(text, 100)}"
        ) from None


class _Checker:
    def __init__(self, root: JsonSchema, others: Mapping[str, JsonSchema]) -> None:
        self._root = root
        self._others = others
        self._steps = StepBudget()

    def check(self, schema: JsonSchema, kind: pa.DataType, path: str, depth: int) -> None:
        self._steps.take()
        if depth > _MAX_DEPTH:
            raise SchemaError(f"the JSON schema is nested more than {_MAX_DEPTH} deep at '{path}'")
        kind = plain_type(kind)
        if schema is True or pa.types.is_null(kind):
            return
        if schema is False:
            raise SchemaError(f"the JSON schema allows no value for column '{path}'")
        if "$ref" in schema:
            self.check(self._referenced(str(schema["$ref"])), kind, path, depth + 1)
            return
        for choice in ("oneOf", "anyOf"):
            if choice in schema:
                self._check_any(schema[choice], kind, path, depth)
        for part in schema.get("allOf", ()):
            self.check(part, kind, path, depth + 1)
        self._check_type(schema, kind, path)
        self._check_inside(schema, kind, path, depth)

    def _check_inside(self, schema: Mapping[str, Any], kind: pa.DataType, path: str, depth: int) -> None:
        if pa.types.is_struct(kind):
            self._check_object(schema, kind, path, depth)
        elif is_list(kind) and isinstance(schema.get("items"), dict | bool):
            # A list of schemas applies to elements by position, so only values can break it.
            self.check(schema["items"], kind.value_type, f"{path}[]", depth + 1)
        elif pa.types.is_map(kind):
            self.check(_of_unlisted(schema), kind.item_type, f"{path}{{}}", depth + 1)

    def _check_any(self, choices: Sequence[JsonSchema], kind: pa.DataType, path: str, depth: int) -> None:
        problems = []
        for choice in choices:
            if isinstance(choice, dict) and choice.get("type") == "null":
                continue
            try:
                self.check(choice, kind, path, depth + 1)
                return
            except SchemaError as error:
                problems.append(error)
        raise problems[0] if problems else SchemaError(f"the JSON schema allows only null in column '{path}'")

    def _check_type(self, schema: Mapping[str, Any], kind: pa.DataType, path: str) -> None:
        wanted = schema.get("type")
        if wanted is None:
            return
        names = [wanted] if isinstance(wanted, str) else list(wanted)
        own = _name_of(kind)
        if own not in names and not (own == "integer" and "number" in names):
            raise unsupported_type(path, kind, " or ".join(map(str, names)))

    def _check_object(self, schema: Mapping[str, Any], kind: pa.StructType, path: str, depth: int) -> None:
        own = {field.name: field for field in kind}
        for name in schema.get("required", ()):
            if name not in own:
                raise SchemaError(
                    f"the schema requires field '{joined(path, name)}', for which there is no column: add one"
                )
        properties = schema.get("properties", {})
        more = _of_unlisted(schema)
        for name, field in own.items():
            if name in properties:
                self.check(properties[name], field.type, joined(path, name), depth + 1)
            elif more is False:
                raise SchemaError(
                    f"column '{joined(path, name)}' is not a property of the schema, which allows no others: "
                    "drop it, or register a schema that has it"
                )
            else:
                self.check(more, field.type, joined(path, name), depth + 1)

    def _referenced(self, name: str) -> JsonSchema:
        document, _, pointer = name.partition("#")
        target = self._others.get(document) if document else self._root
        for part in filter(None, pointer.split("/")):
            key = part.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, dict) else None
        if target is None:
            raise SchemaError(f"the JSON schema refers to {name!r}, which is not in it or a reference")
        return target


def _of_unlisted(schema: Mapping[str, Any]) -> JsonSchema:
    """The schema of properties that are not listed. Which of them match a pattern depends on the rows."""
    return "patternProperties" in schema or schema.get("additionalProperties", True)


def _name_of(kind: pa.DataType) -> str:
    if pa.types.is_struct(kind) or pa.types.is_map(kind):
        return "object"
    if is_list(kind):
        return "array"
    leaf = _leaf(kind)
    return str(kind) if leaf is None else str(leaf["type"])
