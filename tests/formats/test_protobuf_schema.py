"""Schemas in Protobuf: descriptors that are read, or refused."""

from __future__ import annotations

import base64

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2

from kafka_sink.errors import SchemaError
from kafka_sink.formats import protobuf, protobuf_schema
from tests.support.protobuf_tables import in_base64


def test_a_type_that_is_not_known_takes_no_numbers() -> None:
    """Catches: varints where consumers read messages."""
    file = descriptor_pb2.FileDescriptorProto(name="row.proto")
    file.message_type.add(name="Row").field.add(name="x", number=1, type_name="google.type.Date")
    schema = protobuf_schema.read(in_base64(file))
    with pytest.raises(SchemaError, match=r"the schema requires google\.type\.Date"):
        protobuf.encoder(schema, "", pa.struct([("x", pa.int32())]), "")


def test_a_group_in_a_descriptor_is_refused() -> None:
    file = descriptor_pb2.FileDescriptorProto(name="row.proto")
    row = file.message_type.add(name="Row")
    row.nested_type.add(name="X").field.add(name="y", number=1, type=5, label=1)
    row.field.add(name="x", number=1, type=10, label=1, type_name=".Row.X")
    schema = protobuf_schema.read(in_base64(file))
    with pytest.raises(SchemaError, match=r"the schema requires \.Row\.X"):
        protobuf.encoder(schema, "", pa.struct([("x", pa.struct([("y", pa.int32())]))]), "")


def test_a_schema_that_is_not_a_descriptor_is_refused() -> None:
    file = descriptor_pb2.FileDescriptorProto(name="row.proto")
    field = file.message_type.add(name="Row").field.add(name="without a type", number=1)
    typeless = in_base64(file)
    field.type, file.syntax = 9, "proto3"
    cut = base64.b64encode(file.SerializeToString()[:-1]).decode()
    # A number in the place of a message, and in the place of a name.
    numbers = [base64.b64encode(content).decode() for content in (b"\x20\x01", b"\x08\x01")]
    for text in ["", 'syntax = "proto3"; message Row { string x = 1; }', "CgVvcmRl", typeless, cut, *numbers]:
        with pytest.raises(SchemaError):
            protobuf_schema.read(text).message("")
    # Fields of 8 and 4 bytes that nobody knows.
    unknown = b"\x79" + b"\xff" * 8 + b"\x7d" + b"\xff" * 4
    known = protobuf_schema.read(base64.b64encode(file.SerializeToString() + unknown).decode())
    assert known.message("").full_name == "Row"


def test_editions_are_refused_by_name() -> None:
    """Catches: an error that calls such a file invalid."""
    file = descriptor_pb2.FileDescriptorProto(name="row.proto", syntax="editions")
    with pytest.raises(SchemaError, match="Protobuf editions are not supported"):
        protobuf_schema.read(in_base64(file))
