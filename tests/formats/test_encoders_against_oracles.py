"""Nested tables of every type are encoded as by fastavro and Google's library, and as JSON that means them.

Confluent's serializers call fastavro and Google's library, and put five bytes or a message's index in front.
``make fuzz`` tries 10,000 tables for each format.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import io
import json
import math
from collections.abc import Callable
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

from kafka_sink.formats import avro, avro_schema, json_schema, json_values, protobuf, protobuf_schema
from tests.support.effort import EFFORT
from tests.support.format_tables import LEAVES, Rows, encoded_rows, mapped, tables
from tests.support.protobuf_tables import ProtobufTable, protobuf_tables, without_types

pytestmark = pytest.mark.timeout(10_800 if EFFORT > 1 else 300)
_SEARCH: Callable[[Any], Any] = settings(
    max_examples=int(1000 * EFFORT) if EFFORT > 1 else 25,
    # Few tables must be the same ones in every run.
    derandomize=EFFORT <= 1,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# Avro has no unsigned 64-bit numbers.
_AVRO_LEAVES = tuple(name for name in LEAVES if name != "uint64")
_PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}


class _UnfitError(Exception):
    """A value that the format cannot represent."""


def _fitting(column: pa.StructArray, rows: Rows, of_leaf: Callable[[pa.DataType, Any], Any]) -> list[Any]:
    """The rows as an oracle takes them; None for rows that do not fit."""
    fitting: list[Any] = []
    for row in rows:
        try:
            fitting.append(mapped(column.type, row, of_leaf))
        except _UnfitError:
            fitting.append(None)
    return fitting


def _for_fastavro(kind: pa.DataType, value: Any) -> Any:
    if kind == pa.time32("s"):
        return value * 1000
    if kind == pa.time64("ns"):
        return value // 1000
    if pa.types.is_timestamp(kind) and kind.unit == "s":
        # Avro has no seconds, so that they are written as milliseconds.
        if abs(value) > ((1 << 63) - 1) // 1000:
            raise _UnfitError
        return value * 1000
    return value


@given(tables(_AVRO_LEAVES))
@_SEARCH
def test_avro_is_that_of_fastavro(table: tuple[pa.StructArray, Rows]) -> None:
    column, rows = table
    text = avro_schema.derived(pa.field("value", column.type, nullable=False), "n.Row")
    schema = fastavro.parse_schema(json.loads(text))
    fitting = _fitting(column, rows, _for_fastavro)
    expected = []
    for row in fitting:
        out = io.BytesIO()
        if row is not None:
            fastavro.schemaless_writer(out, schema, row)
            expected.append(out.getvalue())
    encoder = avro.encoder(avro_schema.read(text), column.type, "")
    assert encoded_rows(encoder, column, [row is not None for row in fitting]) == expected


def _for_json(kind: pa.DataType, value: Any) -> Any:
    """A value as ``_NUMBERS`` reads it from JSON."""
    if pa.types.is_floating(kind):
        if not math.isfinite(value):
            raise _UnfitError
        return _Float(value, kind)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return base64.b64encode(value).decode()
    if pa.types.is_date(kind):
        return _instant(value * 86_400, 1, "")[:10]
    if pa.types.is_timestamp(kind):
        zone = "Z" if kind.tz else ""
        return _instant(value, _PER_SECOND[kind.unit], zone)
    if pa.types.is_time(kind):
        return _instant(value, _PER_SECOND[kind.unit], "")[11:]
    return value


class _Float:
    """Equal to a text that means the same float of this type."""

    def __init__(self, value: float, kind: pa.DataType) -> None:
        self._value = value
        self._type = {16: np.float16, 32: np.float32, 64: np.float64}[kind.bit_width]

    def __eq__(self, other: object) -> bool:
        return bool(self._type(float(str(other))) == self._value)

    def __repr__(self) -> str:
        return repr(self._value)

    __hash__ = None  # type: ignore[assignment]


def _instant(value: int, per_second: int, zone: str) -> str:
    seconds, rest = divmod(value, per_second)
    try:
        whole = datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=seconds)
    except OverflowError:
        raise _UnfitError from None
    digits = len(str(per_second)) - 1
    return whole.isoformat() + (f".{rest:0{digits}}" if digits else "") + zone


@given(tables())
@_SEARCH
def test_json_means_the_rows_and_fits_the_derived_schema(table: tuple[pa.StructArray, Rows]) -> None:
    column, rows = table
    text = json_schema.derived(pa.field("", column.type, nullable=False), "Row")
    fitting = _fitting(column, rows, _for_json)
    encoder = json_values.encoder(text, (), column.type, "")
    encoded = encoded_rows(encoder, column, [row is not None for row in fitting])
    read = [json.loads(row, parse_float=decimal.Decimal) for row in encoded]
    expected = [row for row in fitting if row is not None]
    assert read == expected
    assert [list(row) for row in read] == [list(row) for row in expected]
    validator = pytest.importorskip("jsonschema").Draft7Validator(json.loads(text))
    for row in encoded:
        validator.validate(json.loads(row))


@given(protobuf_tables())
@_SEARCH
def test_protobuf_is_that_of_googles_library(table: ProtobufTable) -> None:
    """Maps of several entries have no order in Protobuf, so messages are compared after Google's library has
    read and written them again."""
    for text in (table.descriptor, without_types(table.descriptor)):
        encoder = protobuf.encoder(protobuf_schema.read(text), "", table.column.type, "")
        encoded = encoded_rows(encoder, table.column, [message is not None for message in table.messages])
        messages = [message for message in table.messages if message is not None]
        for row, message in zip(encoded, messages, strict=True):
            expected = message.SerializeToString(deterministic=True)
            assert type(message).FromString(row).SerializeToString(deterministic=True) == expected
            if not table.has_large_map:
                assert row == expected
