"""Plans which columns are encoded and with which schemas. It runs on the driver, once for each job.

Planning asks the registry for schemas and checks that the columns fit them. The result is kept in a note for
the micro-batches of a query, which therefore do not ask again and go on if the registry is down. This module
imports nothing that is slow to import, because commits also load it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from kafka_sink import spark_application
from kafka_sink.driver import driver_log
from kafka_sink.errors import RegistryError, SchemaError
from kafka_sink.formats.schemas import (
    ID_HEADERS,
    PartFormat,
    RegisteredSchema,
    RowEncoding,
    Schema,
    message_name,
)
from kafka_sink.options import SinkOptions
from kafka_sink.options.table import FORMATS, SPECS
from kafka_sink.rows.column_plan import OWN, named_columns

if TYPE_CHECKING:
    import pyarrow as pa


def layout(
    columns: Sequence[tuple[str, str]], formats: dict[str, str], topic: str | None
) -> tuple[dict[str, int | tuple[tuple[int, str], ...]], tuple[tuple[str, str, int], ...]]:
    """The columns of which each encoded part consists, and the columns that are passed on unchanged.
    ``formats`` are those of value and key, except bytes. A part without a column is left out."""
    places = {name: index for index, (name, _) in enumerate(columns)}
    parts: dict[str, int | tuple[tuple[int, str], ...]] = {}
    for part in formats:
        if part in places:
            parts[part] = places[part]
        elif part == "value":
            parts[part] = tuple((index, name) for name, index in places.items() if name not in OWN)
    kept = tuple(
        (name, kind, index)
        for index, (name, kind) in enumerate(columns)
        if (name in OWN or name == "value")
        and name not in parts
        and not (name == "topic" and topic is not None)
    )
    return parts, kept


# Spark passes a variant as a struct of its two binaries, so it must be recognised by Spark's type.
_VARIANT = re.compile(r"(?:^|[:<,])variant(?:$|[,>])")
Columns = Sequence[tuple[str, str]]
Schemas = tuple[tuple[str, RegisteredSchema], ...]


def plan(
    options: SinkOptions, columns: Columns, arrow_schema: Callable[[], pa.Schema], query: str | None
) -> RowEncoding | None:
    """Plan how rows are encoded. Returns None if key and value are bytes already.

    ``arrow_schema`` returns the columns' Arrow types. ``query`` is set for micro-batches. Raises
    RegistryError, and SchemaError, which names the field.
    """
    named = {part: getattr(options, f"{part}_format") for part in ID_HEADERS}
    formats = {part: name for part, name in named.items() if name != "bytes"}
    if not formats:
        return None
    _check(columns)
    parts, kept = layout(columns, formats, options.topic)
    if "key" in formats and "key" not in parts:
        raise SchemaError(f"key.format={formats['key']} is set, but there is no column 'key'")
    if "value" in parts and parts["value"] == ():
        raise SchemaError("there is no column for the value: all columns are other parts of the record")
    schemas = _known_or_found(options, columns, parts, arrow_schema, query)
    return RowEncoding(
        tuple(
            PartFormat(
                part,
                formats[part],
                column,
                schemas[part],
                options.schema_id_location == "header",
                message_name(options, part),
            )
            for part, column in parts.items()
        ),
        kept,
    )


def _check(columns: Columns) -> None:
    """Raise SchemaError for columns that Spark does not hand over, or not as the type that they have."""
    for name, (_, kind) in named_columns(columns).items():
        if _VARIANT.search(kind):
            raise SchemaError(
                f"column '{name}' has the type {kind}, which has no schema: convert it to text, as in "
                f".withColumn('{name}', to_json('{name}'))"
            )


def _known_or_found(
    options: SinkOptions,
    columns: Columns,
    parts: dict[str, Any],
    arrow_schema: Callable[[], pa.Schema],
    query: str | None,
) -> dict[str, Schemas]:
    key = _key(options, columns, query)
    noted = spark_application.noted_within(key, math.inf, _Note)
    if noted is not None and query is not None:
        return _read(noted)
    try:
        schemas = _found(options, parts, arrow_schema())
    except RegistryError as error:
        if noted is None or not error.is_temporary:
            raise
        driver_log.warn(f"kafka-chunked: {error}. The write continues with the schemas of the previous write")
        return _read(noted)
    spark_application.note(key, _written(schemas))
    return schemas


def _key(options: SinkOptions, columns: Columns, query: str | None) -> str:
    """The key of the note that writes with the same schemas share."""
    settings = [
        (spec.name, spec.kind.show(getattr(options, spec.attribute)))
        for spec in SPECS
        if spec.group == FORMATS and not spec.secret
    ]
    text = json.dumps([settings, options.topic, list(columns), query])
    return f"schemas/{hashlib.sha256(text.encode()).hexdigest()}"


class _Note(msgspec.Struct):
    """``schemas`` are distinct, because many topics may share one. Each part has the topics, the positions of
    their schemas, and the other fields of RegisteredSchema."""

    schemas: list[Schema]
    parts: dict[str, list[tuple[str, int, int, str, str, int]]]


def _written(schemas_of_parts: dict[str, Schemas]) -> _Note:
    distinct = list(
        dict.fromkeys(registered.schema for schemas in schemas_of_parts.values() for _, registered in schemas)
    )
    parts = {
        part: [
            (topic, distinct.index(found.schema), found.id, found.guid, found.subject, found.version)
            for topic, found in schemas
        ]
        for part, schemas in schemas_of_parts.items()
    }
    return _Note(distinct, parts)


def _read(note: _Note) -> dict[str, Schemas]:
    return {
        part: tuple(
            (topic, RegisteredSchema(note.schemas[place], schema_id, guid, subject, version))
            for topic, place, schema_id, guid, subject, version in topics
        )
        for part, topics in note.parts.items()
    }


def _found(options: SinkOptions, parts: dict[str, Any], kinds: pa.Schema) -> dict[str, Schemas]:
    from kafka_sink.formats import row_encoder
    from kafka_sink.formats.registry import Registry, SchemaChoice

    schemas_of_parts: dict[str, Schemas] = {}
    for part, column in parts.items():
        format_name, field = getattr(options, f"{part}_format"), _field(part, column, kinds)
        choice = SchemaChoice(options, part, format_name, field)
        with Registry(options, format_name) as registry:
            schemas = {topic: choice.registered(registry, topic) for topic in choice.topics}
        known: dict[Schema, Schema] = {}
        for topic, registered in schemas.items():
            # Use one object for equal schemas, so that tasks receive it once.
            schemas[topic] = replace(
                registered, schema=known.setdefault(registered.schema, registered.schema)
            )
        for schema in known:
            row_encoder.encoder_of(format_name, schema, field.type, field.name, choice.message)
        schemas_of_parts[part] = tuple(schemas.items())
    return schemas_of_parts


def _field(part: str, column: Any, kinds: pa.Schema) -> pa.Field:
    """The part as one column. Several columns become a struct without a name."""
    import pyarrow as pa

    if isinstance(column, int):
        return kinds.field(column).with_name(part)
    fields = [kinds.field(place).with_name(name) for place, name in column]
    return pa.field("", pa.struct(fields), nullable=False)


def check_schemas(options: SinkOptions) -> Iterator[tuple[str, RegistryError | None]]:
    """For the doctor: each part with its current schema in the registry, or the error. Registers nothing."""
    import pyarrow as pa

    from kafka_sink.formats.registry import Registry, SchemaChoice

    for part in ID_HEADERS:
        format_name = getattr(options, f"{part}_format")
        if format_name == "bytes":
            continue
        choice = SchemaChoice(options, part, format_name, pa.field(part, pa.null()))
        with Registry(options, format_name) as registry:
            for topic in choice.topics:
                try:
                    yield f"{part} as {format_name} by {choice.known(registry, topic)}", None
                except RegistryError as error:
                    yield f"{part} as {format_name}", error
