"""Writes whose values have a schema, planned against a registry of the test."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from kafka_sink.formats import planning
from kafka_sink.formats.planning import RowEncoding
from kafka_sink.options import SinkOptions, parse
from tests.support.http_server import Server, served

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


@pytest.fixture
def fake() -> Iterator[Server]:
    """A registry that says what a test wants."""
    with served() as running:
        yield running
