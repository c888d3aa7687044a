"""Protobuf's bytes are those of Google's library, for descriptors of protoc and of Confluent's registry."""

from __future__ import annotations

import datetime
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry.protobuf import _create_index_array
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

from kafka_sink.errors import SchemaError
from kafka_sink.formats import byte_columns, protobuf, protobuf_schema
from kafka_sink.formats.columns import UnfitRowsError
from tests.support.protobuf_tables import in_base64, without_types


def _class_of(file: descriptor_pb2.FileDescriptorProto, name: str) -> Any:
    pool = descriptor_pool.DescriptorPool()
    from google.protobuf import duration_pb2, timestamp_pb2, wrappers_pb2

    for known in (timestamp_pb2, duration_pb2, wrappers_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def _encoded(text: str, column: pa.Array, name: str = "") -> list[bytes]:
    encoder = protobuf.encoder(protobuf_schema.read(text), name, column.type, "")
    found: list[bytes] = byte_columns.join(encoder.pieces(column, None), len(column)).to_pylist()
    return found


def _order_file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    file.dependency.extend(f"google/protobuf/{name}.proto" for name in ("timestamp", "wrappers", "duration"))
    file.message_type.add(name="Other").field.add(name="x", number=1, type=9, label=1)
    order = file.message_type.add(name="Order")
    item = order.nested_type.add(name="Item")
    item.field.add(name="sku", number=1, type=9, label=1)
    item.field.add(name="count", number=2, type=5, label=1)
    item.field.add(name="prices", number=3, type=11, label=3, type_name=".shop.Order.Item.PricesEntry")
    entry = item.nested_type.add(name="PricesEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=9, label=1)
    entry.field.add(name="value", number=2, type=1, label=1)
    state = order.enum_type.add(name="State")
    for name, number in (("NEW", 0), ("PAID", 1), ("LOST", -1)):
        state.value.add(name=name, number=number)
    order.oneof_decl.add(name="pay")
    order.field.add(name="card", number=8, type=9, label=1, oneof_index=0)
    order.field.add(name="cash", number=9, type=5, label=1, oneof_index=0)
    order.field.add(name="id", number=1, type=3, label=1)
    for name, number, kind, label, type_name in (
        ("items", 2, 11, 3, "shop.Order.Item"),
        ("state", 3, 14, 1, "shop.Order.State"),
        ("states", 4, 14, 3, "shop.Order.State"),
        ("at", 5, 11, 1, "google.protobuf.Timestamp"),
        ("note", 6, 11, 1, "google.protobuf.StringValue"),
        ("total", 7, 11, 1, "google.protobuf.Int64Value"),
        ("first", 13, 11, 1, "shop.Order.Item"),
        ("took", 14, 11, 1, "google.protobuf.Duration"),
    ):
        order.field.add(name=name, number=number, type=kind, label=label, type_name=f".{type_name}")
    return file


NESTED = in_base64(_order_file())


PRICES = pa.map_(pa.string(), pa.float64())
ITEM = pa.struct([("sku", pa.string()), ("count", pa.int32()), ("prices", PRICES)])
ORDER = pa.struct(
    [
        ("id", pa.int64()),
        ("items", pa.list_(ITEM)),
        ("state", pa.string()),
        ("states", pa.list_(pa.string())),
        ("at", pa.timestamp("us", "UTC")),
        ("note", pa.string()),
        ("total", pa.int64()),
        ("card", pa.string()),
        ("cash", pa.int32()),
        ("first", ITEM),
        ("took", pa.duration("ms")),
    ]
)
_NO_TIME = datetime.timedelta(0)
_PLAIN = {field.name: None for field in ORDER}
ROWS: list[dict[str, Any]] = [
    _PLAIN,
    {
        **_PLAIN,
        "id": 7,
        "items": [{"sku": "a", "count": 2, "prices": [("usd", 1.5)]}, {"sku": "", "count": 0, "prices": []}],
        "state": "LOST",
        "states": ["PAID", "NEW", "LOST"],
        "at": datetime.datetime(1969, 12, 31, 23, 59, 59, 250_000, tzinfo=datetime.timezone.utc),
        "note": "",
        "total": 0,
        "cash": 0,
        "first": {"sku": None, "count": None, "prices": None},
        "took": datetime.timedelta(milliseconds=-1500),
    },
    {**_PLAIN, "state": "NEW", "note": "n", "total": -5, "card": "", "items": [], "took": _NO_TIME},
]


def test_messages_enums_maps_oneofs_and_wrappers_are_googles() -> None:
    order_class = _class_of(_order_file(), "shop.Order")
    expected = []
    for row in ROWS:
        made = order_class()
        texts = {name: value for name, value in row.items() if value is not None}
        if "at" in texts:
            texts["at"] = "1969-12-31T23:59:59.250Z"
        if "took" in texts:
            texts["took"] = f"{texts['took'].total_seconds():.1f}s"
        if "items" in texts:
            texts["items"] = [{**one, "prices": dict(one["prices"])} for one in row["items"]]
        if "first" in texts:
            texts["first"] = {}
        json_format.ParseDict(texts, made)
        expected.append(made.SerializeToString())
    column = pa.array(ROWS, ORDER)
    for text in (NESTED, without_types(NESTED)):
        assert _encoded(text, column, "Order") == expected
        own = protobuf.indexes(protobuf_schema.read(text), "shop.Order")
        assert own == bytes([2, 2])
        assert _create_index_array(order_class.DESCRIPTOR) == [1]
        assert protobuf.indexes(protobuf_schema.read(text), "shop.Order.Item") == bytes([4, 2, 0])
        assert protobuf.indexes(protobuf_schema.read(text), "") == b"\0"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"card": "c", "cash": 1}, "has several values of the oneof 'pay'"),
        ({"state": "SOLD"}, "field 'state' is not a name in the schema's enum"),
        ({"states": ["PAID", None]}, r"field 'states\[\]' is null"),
    ],
)
def test_rows_that_do_not_fit_are_marked(row: dict[str, Any], said: str) -> None:
    with pytest.raises(UnfitRowsError, match=said) as caught:
        _encoded(NESTED, pa.array([_PLAIN, {**_PLAIN, **row}], ORDER), "Order")
    assert caught.value.rows.tolist() == [False, True]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (pa.struct([("id", pa.string())]), "column 'id' has the type string, but the schema requires int64"),
        (pa.struct([("nothing", pa.int64())]), "column 'nothing' is not a field of the message shop.Order"),
        (pa.struct([("at", pa.int64())]), "column 'at' has the type int64"),
        (pa.int64(), "a Protobuf message needs a struct"),
    ],
)
def test_planning_reports_columns_that_do_not_fit_the_schema(kind: pa.DataType, said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        protobuf.encoder(protobuf_schema.read(NESTED), "Order", kind, "")


def test_uuids_are_texts_or_bytes_as_the_schema_wants() -> None:
    column = pa.array([b"\0" * 15 + b"\1", None], pa.uuid())
    file = descriptor_pb2.FileDescriptorProto(name="row.proto", syntax="proto3")
    row = file.message_type.add(name="M")
    row.field.add(name="a", number=1, type=9, label=1)
    row.field.add(name="b", number=2, type=12, label=1)
    struct = pa.StructArray.from_arrays([column, column], ["a", "b"])
    written = b"\n$00000000-0000-0000-0000-000000000001\x12\x10" + b"\0" * 15 + b"\1"
    assert _encoded(in_base64(file), struct) == [written, b""]


def test_a_closed_enum_has_only_its_own_numbers() -> None:
    """Google's library refuses other numbers for enums of proto2, and its readers would lose them."""
    file = descriptor_pb2.FileDescriptorProto(name="row.proto", syntax="proto3")
    file.enum_type.add(name="Size").value.add(name="S", number=0)
    file.enum_type[0].value.add(name="M", number=1)
    file.message_type.add(name="Row").field.add(name="size", number=1, type=14, label=1, type_name=".Size")
    column = pa.array([{"size": 1}, {"size": 7}, {"size": None}], pa.struct([("size", pa.int32())]))
    assert _encoded(in_base64(file), column) == [b"\x08\x01", b"\x08\x07", b""]
    file.syntax = "proto2"
    with pytest.raises(UnfitRowsError, match="'size' is not a number in the schema's enum") as caught:
        _encoded(in_base64(file), column)
    assert caught.value.rows.tolist() == [False, True, False]
