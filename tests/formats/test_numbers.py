"""Columns of numbers go where all of their values fit, or are checked, and arrive as they are."""

from __future__ import annotations

import io
import json
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from kafka_sink.errors import SchemaError
from kafka_sink.formats import avro, avro_schema, byte_columns, protobuf, protobuf_schema
from kafka_sink.formats.columns import UnfitRowsError
from tests.support.avro_cases import field, record
from tests.support.protobuf_tables import in_base64

SMALL = ["int8", "int16", "uint8", "uint16"]
INTS = [*SMALL, "int32", "uint32", "int64", "uint64"]
FLOATS = ["float16", "float32", "float64"]
OF_32 = [*SMALL, "int32"]
OF_64 = [*OF_32, "uint32", "int64"]


def extremes(name: str) -> list[Any]:
    info: Any = np.finfo(name) if name in FLOATS else np.iinfo(name)
    return [np.dtype(name).type(one).item() for one in (info.min, 0, info.max)]


def encoded(encoder_of: Any, name: str, values: list[Any]) -> list[bytes]:
    column = pa.array([{"x": one} for one in values], pa.struct([("x", getattr(pa, name)())]))
    found: list[bytes] = byte_columns.join(
        encoder_of(column.type).pieces(column, None), len(column)
    ).to_pylist()
    return found


def taken(encoder_of: Any) -> list[str]:
    """The types of columns that are not refused when a write is planned."""
    names = []
    for name in (*INTS, *FLOATS):
        try:
            encoder_of(pa.struct([("x", getattr(pa, name)())]))
        except SchemaError:
            continue
        names.append(name)
    return names


def test_avro() -> None:
    for kind, fitting in {
        "int": OF_32,
        "long": OF_64,
        "float": [*SMALL, *FLOATS[:2]],
        "double": [*OF_32, "uint32", *FLOATS],
    }.items():
        text = record(field("x", kind))

        def encoder(columns: pa.DataType, text: str = text) -> Any:
            return avro.encoder(avro_schema.read(text), columns, "")

        assert sorted(taken(encoder)) == sorted(fitting), kind
        for name in fitting:
            schema = fastavro.parse_schema(json.loads(text))
            read: list[Any] = [
                fastavro.schemaless_reader(io.BytesIO(one), schema, None)
                for one in encoded(encoder, name, extremes(name))
            ]
            assert [one["x"] for one in read] == extremes(name), (kind, name)


# The numbers of types in descriptors.
TYPES = {"int32": 5, "sint32": 17, "sfixed32": 15, "int64": 3, "sint64": 18, "sfixed64": 16}
TYPES |= {"uint32": 13, "fixed32": 7, "uint64": 4, "fixed64": 6, "float": 2, "double": 1}


def test_protobuf() -> None:
    for kind, number in TYPES.items():
        file = descriptor_pb2.FileDescriptorProto(name="row.proto", syntax="proto3")
        file.message_type.add(name="Row").field.add(name="x", number=1, type=number, label=1)
        pool = descriptor_pool.DescriptorPool()
        pool.Add(file)
        row_class: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName("Row"))

        def encoder(columns: pa.DataType, text: str = in_base64(file)) -> Any:
            return protobuf.encoder(protobuf_schema.read(text), "", columns, "")

        low, high = -np.inf, np.inf
        if kind in ("float", "double"):
            fitting = FLOATS[: 2 if kind == "float" else 3]
        elif kind.startswith(("u", "f")):
            fitting, low, high = INTS, 0, 2 ** int(kind[-2:]) - 1
        else:
            fitting = OF_32 if kind.endswith("32") else OF_64
        assert sorted(taken(encoder)) == sorted(fitting), kind
        for name in fitting:
            fit = [one for one in extremes(name) if low <= one <= high]
            read = [row_class.FromString(one).x for one in encoded(encoder, name, fit)]
            assert read == fit, (kind, name)
            for one in set(extremes(name)).difference(fit):
                with pytest.raises(UnfitRowsError, match="is out of range"):
                    encoded(encoder, name, [one])
