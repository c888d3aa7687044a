"""Planning of formats: asks the registry for schemas, and checks that the columns fit them.

It runs on the driver, once for each job. What it has found is noted for the micro-batches of a query, which
ask no more and go on if the registry is down.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from kafka_sink import spark_application
from kafka_sink.driver import driver_log
from kafka_sink.errors import RegistryError, SchemaError
from kafka_sink.formats.row_encoding import (
    ID_HEADERS,
    PartFormat,
    RegisteredSchema,
    RowEncoding,
    Schema,
    layout,
    message_name,
)
from kafka_sink.options import SinkOptions
from kafka_sink.options.table import FORMATS, SPECS
from kafka_sink.rows.column_plan import named_columns

if TYPE_CHECKING:
    import pyarrow as pa

    from kafka_sink.formats.registry import Registry

# What Spark passes for a variant is a struct of its two binaries.
_VARIANT = re.compile(r"(?:^|[:<,])variant(?:$|[,>])")
# Beyond what is read of a note.
_MAX_NOTE = 1_000_000
Columns = Sequence[tuple[str, str]]
Schemas = tuple[tuple[str, RegisteredSchema], ...]


def plan(
    options: SinkOptions, columns: Columns, arrow_schema: Callable[[], pa.Schema], query: str | None
) -> RowEncoding | None:
    """How rows are encoded; None if key and value are bytes already.

    ``arrow_schema`` gives the columns' types in Arrow. ``query`` is set for micro-batches. Raises
    RegistryError and, naming the field, SchemaError.
    """
    formats = {
        part: getattr(options, f"{part}_format")
        for part in ID_HEADERS
        if getattr(options, f"{part}_format") != "bytes"
    }
    if not formats:
        return None
    _check(columns)
    parts, kept = layout(columns, formats, options.topic)
    if "key" in formats and "key" not in parts:
        raise SchemaError(f"key.format={formats['key']}, but there is no column 'key'")
    if "value" in parts and parts["value"] == ():
        raise SchemaError("there is no column for the value: each is another part of the record")
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
    """Raise SchemaError for columns that Spark does not hand over, or not as what they are."""
    for name, (_, kind) in named_columns(columns).items():
        if _VARIANT.search(kind):
            raise SchemaError(
                f"column '{name}' has the type {kind}, and variants have no schema: make it text, as in "
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
    noted = spark_application.noted_within(key, math.inf)
    if noted is not None and query is not None:
        return _read(noted)
    try:
        found = _found(options, parts, arrow_schema())
    except RegistryError as error:
        if noted is None or not error.is_temporary:
            raise
        driver_log.warn(f"kafka-chunked: {error}. The write goes on with the schemas of the one before")
        return _read(noted)
    written = _written(found)
    if len(written) < _MAX_NOTE:
        spark_application.note(key, written)
    return found


def _key(options: SinkOptions, columns: Columns, query: str | None) -> str:
    """Of writes that use the same schemas."""
    settings = [
        (spec.name, spec.kind.show(getattr(options, spec.attribute)))
        for spec in SPECS
        if spec.group == FORMATS and not spec.secret
    ]
    text = json.dumps([settings, options.topic, list(columns), query])
    return f"schemas/{hashlib.sha256(text.encode()).hexdigest()}"


def _written(found: dict[str, Schemas]) -> str:
    """Each schema once: many topics may share one."""
    distinct = list(dict.fromkeys(one.schema for schemas in found.values() for _, one in schemas))
    parts = {
        part: [(topic, {**asdict(one), "schema": distinct.index(one.schema)}) for topic, one in schemas]
        for part, schemas in found.items()
    }
    return json.dumps({"schemas": [asdict(schema) for schema in distinct], "parts": parts})


def _read(noted: str) -> dict[str, Schemas]:
    read = json.loads(noted)
    distinct = [
        Schema(one["kind"], one["text"], tuple((name, text) for name, text in one["references"]))
        for one in read["schemas"]
    ]
    return {
        part: tuple(
            (topic, RegisteredSchema(**{**fields, "schema": distinct[fields["schema"]]}))
            for topic, fields in schemas
        )
        for part, schemas in read["parts"].items()
    }


def _found(options: SinkOptions, parts: dict[str, Any], kinds: pa.Schema) -> dict[str, Schemas]:
    from kafka_sink.formats.registry import Registry

    found = {}
    for part, column in parts.items():
        with Registry(options, getattr(options, f"{part}_format")) as registry:
            found[part] = _of_part(options, registry, part, _field(part, column, kinds))
    return found


def _field(part: str, column: Any, kinds: pa.Schema) -> pa.Field:
    """The part as one column; of several columns a struct without a name."""
    import pyarrow as pa

    if isinstance(column, int):
        return kinds.field(column).with_name(part)
    fields = [kinds.field(place).with_name(name) for place, name in column]
    return pa.field("", pa.struct(fields), nullable=False)


def check_schemas(options: SinkOptions) -> Iterator[tuple[str, RegistryError | None]]:
    """For the doctor: each part with the schema that the registry has for it now, or the error. Nothing is
    registered."""
    import pyarrow as pa

    from kafka_sink.formats.registry import Registry, Wanted

    for part in ID_HEADERS:
        format_name = getattr(options, f"{part}_format")
        if format_name == "bytes":
            continue
        wanted = Wanted(options, part, format_name, pa.field(part, pa.null()))
        with Registry(options, format_name) as registry:
            for topic in wanted.topics:
                try:
                    yield f"{part} as {format_name} by {wanted.known(registry, topic)}", None
                except RegistryError as error:
                    yield f"{part} as {format_name}", error


def _of_part(options: SinkOptions, registry: Registry, part: str, field: pa.Field) -> Schemas:
    from kafka_sink.formats import row_encoder
    from kafka_sink.formats.registry import Wanted

    format_name = getattr(options, f"{part}_format")
    found: dict[str, RegisteredSchema] = {}
    known: dict[Schema, Schema] = {}
    wanted = Wanted(options, part, format_name, field)
    for topic in wanted.topics:
        one = wanted.registered(registry, topic)
        # The same object for all: tasks get it once.
        found[topic] = replace(one, schema=known.setdefault(one.schema, one.schema))
    for schema in dict.fromkeys(one.schema for one in found.values()):
        row_encoder.encoder_of(format_name, schema, field.type, field.name, wanted.message)
    return tuple(found.items())
