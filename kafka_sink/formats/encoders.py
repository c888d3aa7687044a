"""The encoder of a schema, by its format."""

from __future__ import annotations

import pyarrow as pa

from kafka_sink.errors import SchemaError
from kafka_sink.formats.columns import Encoder
from kafka_sink.formats.registered import Schema

KINDS = {"avro": "AVRO", "json": "JSON", "protobuf": "PROTOBUF"}


def encoder(format_name: str, schema: Schema, kind: pa.DataType, path: str) -> Encoder:
    """Encode columns of this type. ``path`` is the column's name in errors, empty for a record of columns.

    Raises SchemaError, naming the field, where they do not fit the schema.
    """
    if schema.kind != KINDS[format_name]:
        raise SchemaError(f"the schema is {schema.kind}, and {path or 'value'}.format={format_name}")
    if format_name == "avro":
        from kafka_sink.formats import avro, avro_schema

        return avro.encoder(
            avro_schema.read(schema.text, [text for _, text in schema.references]), kind, path
        )
    raise SchemaError(f"the format {format_name} is not supported yet")


def message_indexes(format_name: str, schema: Schema) -> bytes:  # noqa: ARG001
    """What follows the schema's id: for Protobuf, which message of the schema's file it is."""
    return b""


def derived(format_name: str, field: pa.Field, record_name: str) -> Schema:
    """The schema of a column's type. Raises SchemaError, naming the column."""
    if format_name == "avro":
        from kafka_sink.formats import avro_schema

        return Schema("AVRO", avro_schema.derived_type(field, record_name))
    raise SchemaError(f"the format {format_name} is not supported yet")


def full_name(format_name: str, schema: Schema) -> str:
    """The record's name in a schema, as subjects have it; empty if it has none."""
    if format_name == "avro":
        from kafka_sink.formats import avro_schema

        return avro_schema.read(schema.text, [text for _, text in schema.references]).full_name
    return ""
