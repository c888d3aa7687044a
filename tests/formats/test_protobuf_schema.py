"""Schemas in Protobuf, as text and as descriptors: read once, within bounds, or refused."""

from __future__ import annotations

import base64

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2

from kafka_sink.errors import SchemaError
from kafka_sink.formats import protobuf, protobuf_schema


@pytest.mark.parametrize(
    "declared", ["google.type.Date x = 1;", "optional group X = 1 { optional int32 y = 1; } int32 x = 2;"]
)
def test_a_type_that_is_not_known_takes_no_numbers(declared: str) -> None:
    """Catches: varints where consumers read messages."""
    name = "X" if "group" in declared else "x"
    schema = protobuf_schema.read(f"message Row {{ {declared} }}")
    with pytest.raises(SchemaError, match=r"the schema requires (google\.type\.Date|group)"):
        protobuf.encoder(schema, "", pa.struct([(name, pa.int32())]), "")


def test_a_group_in_a_descriptor_is_refused() -> None:
    file = descriptor_pb2.FileDescriptorProto(name="row.proto")
    row = file.message_type.add(name="Row")
    row.nested_type.add(name="X").field.add(name="y", number=1, type=5, label=1)
    row.field.add(name="x", number=1, type=10, label=1, type_name=".Row.X")
    schema = protobuf_schema.read(base64.b64encode(file.SerializeToString()).decode())
    with pytest.raises(SchemaError, match=r"the schema requires \.Row\.X"):
        protobuf.encoder(schema, "", pa.struct([("x", pa.struct([("y", pa.int32())]))]), "")


def test_invalid_schema_is_refused_and_unterminated_text_is_read_once() -> None:
    """Catches: a search to the end from each sign, which takes half an hour."""
    file = descriptor_pb2.FileDescriptorProto(name="row.proto")
    file.message_type.add(name="Row").field.add(name="without a type", number=1)
    typeless = base64.b64encode(file.SerializeToString()).decode()
    file.message_type[0].field[0].type, file.syntax = 9, "proto3"
    cut = base64.b64encode(file.SerializeToString()[:-1]).decode()
    endless = ['"' + '\\"' * 100_000, "/*" * 100_000, "'" * 99_999]
    for text in [
        "",
        "message {",
        "CgVvcmRl",
        "no schema at all",
        typeless,
        cut,
        *endless,
    ]:
        with pytest.raises(SchemaError):
            protobuf_schema.read(text).message("")
    # Fields of 8 and 4 bytes that nobody knows.
    unknown = b"\x79" + b"\xff" * 8 + b"\x7d" + b"\xff" * 4
    known = protobuf_schema.read(base64.b64encode(file.SerializeToString() + unknown).decode())
    assert known.message("").full_name == "Row"


def test_editions_are_refused_by_name() -> None:
    """Catches: an error that calls such a file neither text nor a descriptor."""
    file = descriptor_pb2.FileDescriptorProto(name="row.proto", syntax="editions")
    described = base64.b64encode(file.SerializeToString()).decode()
    for text in ('edition = "2023"; message M { string a = 1; }', described):
        with pytest.raises(SchemaError, match="Protobuf editions are not supported"):
            protobuf_schema.read(text)
