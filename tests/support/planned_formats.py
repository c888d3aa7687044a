"""Writes whose values have a schema, planned as the data source does."""

from __future__ import annotations

import pyarrow as pa

from kafka_sink.formats import planning
from kafka_sink.formats.schemas import RowEncoding
from kafka_sink.options import SinkOptions, parse

COLUMNS = [("id", "bigint"), ("name", "string")]
KINDS = pa.schema([("id", pa.int64()), ("name", pa.string())])


def options(**given: str) -> SinkOptions:
    """Names with two underscores for dots."""
    plain = {"kafka.bootstrap.servers": "127.0.0.1:1", "topic": "t", "value.format": "avro"}
    return parse(plain | {name.replace("__", "."): value for name, value in given.items()}).options


def planned(made: SinkOptions, query: str | None = None) -> RowEncoding:
    found = planning.plan(made, COLUMNS, lambda: KINDS, query)
    assert found is not None
    return found
