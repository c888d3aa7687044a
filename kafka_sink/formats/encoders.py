"""The encoder of a schema, by its format."""

from __future__ import annotations

import pyarrow as pa

from kafka_sink.errors import SchemaError
from kafka_sink.formats.columns import Encoder
from kafka_sink.formats.registered import KINDS, Schema


def encoder(format_name: str, schema: Schema, kind: pa.DataType, path: str, message: str = "") -> Encoder:
    """Encode columns of this type. ``path`` is the column's name in errors, empty for a record of columns.
    ``message`` names one of Protobuf's, which is the schema's first one otherwise.

    Raises SchemaError, naming the field, where they do not fit the schema.
    """
    if schema.kind != KINDS[format_name]:
        raise SchemaError(f"the schema is {schema.kind}, and {path or 'value'}.format={format_name}")
    if format_name == "avro":
        from kafka_sink.formats import avro, avro_schema

        return avro.encoder(
            avro_schema.read(schema.text, [text for _, text in schema.references]), kind, path
        )
    if format_name == "json":
        from kafka_sink.formats import json_values

        return json_values.encoder(schema.text, schema.references, kind, path)
    from kafka_sink.formats import protobuf, protobuf_schema

    return protobuf.encoder(protobuf_schema.read(schema.text, schema.references), message, kind, path)


def message_indexes(format_name: str, schema: Schema, message: str) -> bytes:
    """What follows the schema's id: for Protobuf, which message of the schema's file it is."""
    if format_name != "protobuf":
        return b""
    from kafka_sink.formats import protobuf, protobuf_schema

    return protobuf.indexes(protobuf_schema.read(schema.text, schema.references), message)


def derived(format_name: str, field: pa.Field, record_name: str) -> Schema:
    """The schema of a column's type. Raises SchemaError, naming the column."""
    if format_name == "avro":
        from kafka_sink.formats import avro_schema

        return Schema("AVRO", avro_schema.derived_type(field, record_name))
    if format_name == "json":
        from kafka_sink.formats import json_schema

        return Schema("JSON", json_schema.derived(field, record_name))
    raise SchemaError(
        "no Protobuf schema is derived from columns: their fields would have no lasting numbers"
    )


def full_name(format_name: str, schema: Schema, message: str) -> str:
    """The record's name in a schema, as subjects have it; empty if it has none."""
    if format_name == "avro":
        from kafka_sink.formats import avro_schema

        return avro_schema.read(schema.text, [text for _, text in schema.references]).full_name
    if format_name == "json":
        from kafka_sink.formats import json_schema

        found = json_schema.parsed(schema.text)
        return str(found.get("title", "")) if isinstance(found, dict) else ""
    from kafka_sink.formats import protobuf_schema

    return protobuf_schema.read(schema.text, schema.references).message(message).full_name
