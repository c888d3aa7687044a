"""Columns of all kinds are encoded, kept and rejected, whatever the library that made them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import kafka_sink
from kafka_sink.arrow.columns import EncodedColumns
from kafka_sink.dead_letters.rejected_rows import RejectedRows
from kafka_sink.errors import InvalidRowError, SchemaError
from kafka_sink.formats.columns import plain
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from tests.support.fake_broker import FakeCluster
from tests.support.http_server import Server
from tests.support.scripted_cluster import TOPIC, task_options

GUID = uuid.UUID(int=7)
_HEADER = {"key": "__value_schema_id", "value": b"\1" + GUID.bytes}
_FRAME = 5
_IN_HEADER = {"schema.id.location": "header"}


@pytest.fixture
def registry() -> Iterator[Server]:
    """Knows each schema, in versions as they come, and of any subject a latest one."""
    texts: list[str] = []

    def respond(request: Any) -> tuple[int, dict[str, str], bytes]:
        subject = request.path.split("/")[2]
        fields = [{"name": "x", "type": "long"}]
        text = json.dumps({"type": "record", "name": subject.removesuffix("-value"), "fields": fields})
        if request.command == "POST":
            text = json.loads(running.requests[-1][3])["schema"]
        texts.extend([] if text in texts else [text])
        found = {"id": 1, "guid": str(GUID), "version": texts.index(text) + 1, "schema": text}
        return 200, {}, json.dumps(found).encode()

    with Server() as running:
        running.respond = respond
        yield running


def columns_of(
    registry: Server,
    schema: pa.Schema,
    more: Mapping[str, str],
    reject: Callable[[RejectedRows, ColumnPlan], None] | None = None,
) -> EncodedColumns:
    given = {
        "kafka.bootstrap.servers": "127.0.0.1:1",
        "topic": "t",
        "value.format": "json",
        "schema.registry.url": registry.url,
        **more,
    }
    return EncodedColumns(schema, parse({n: text for n, text in given.items() if text}).options, reject)


def encoded(registry: Server, batch: pa.RecordBatch, more: Mapping[str, str]) -> list[dict[str, Any]]:
    columns = columns_of(registry, batch.schema, more)
    return [row for one in columns.converted(batch) for row in one.to_pylist()]


def values(registry: Server, batch: pa.RecordBatch) -> list[Any]:
    found = [row["value"] for row in encoded(registry, batch, {})]
    return [one if one is None else json.loads(one[_FRAME:]) for one in found]


_VIEW = pa.string_view()
_UUIDS = pa.array([b"\0" * 15 + b"\1", None], pa.uuid())
_TEXT = str(uuid.UUID(int=1))
_BOOLS = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([5, 0, None], pa.int8()))


def avro_of(registry: Server, column: pa.Array) -> tuple[Any, list[bytes | None]]:
    """The schema that is derived for a column of values, and the values."""
    found = encoded(registry, pa.record_batch([column], ["value"]), {"value.format": "avro"})
    schema = json.loads(json.loads(registry.requests[-1][3])["schema"])
    return schema, [row["value"] and row["value"][_FRAME:] for row in found]


def test_extension_types_are_written_as_what_they_mean_and_refused_if_that_is_unknown(
    registry: Server,
) -> None:
    """Catches: a number of DuckDB that becomes its storage in Base64."""
    for column, wanted in (
        (_UUIDS, [_TEXT, None]),
        (pa.ListArray.from_arrays(pa.array([0, 1, 2]), _UUIDS), [[_TEXT], [None]]),
        (pa.StructArray.from_arrays([_UUIDS], ["a"]), [{"a": _TEXT}, {"a": None}]),
        (pa.DictionaryArray.from_arrays(pa.array([1, 0]), _UUIDS), [None, _TEXT]),
        (_BOOLS, [True, False, None]),
        (
            pa.ExtensionArray.from_storage(pa.json_(_VIEW), pa.array(["x" * 20, None], _VIEW)),
            ["x" * 20, None],
        ),
    ):
        for start in (0, 1):
            batch = pa.record_batch([column.slice(start)], ["value"])
            assert values(registry, batch) == wanted[start:], column.type
    assert avro_of(registry, _UUIDS) == (
        {"type": "string", "logicalType": "uuid"},
        [b"H" + _TEXT.encode(), None],
    )
    assert avro_of(registry, _BOOLS) == ("boolean", [b"\1", b"\0", None])
    number = pa.opaque(pa.binary(16), "hugeint", "DuckDB")
    hidden = pa.field("value", pa.binary(16), metadata={"ARROW:extension:name": "a.number"})
    for field, words in (
        (pa.field("value", number), "'value' has the type hugeint of DuckDB"),
        (pa.field("x", pa.list_(number)), r"'x\[\]' has the type hugeint of DuckDB"),
        (hidden, r"'value' has the type a\.number"),
        (pa.field("x", pa.struct([hidden])), r"'x' has the type a\.number"),
    ):
        for name in ("json", "avro"):
            with pytest.raises(SchemaError, match=words):
                columns_of(registry, pa.schema([field]), {"value.format": name})


def test_decimals_with_a_scale_that_avro_does_not_have(registry: Server) -> None:
    """Catches: a schema with "scale": -2, which Avro's libraries refuse."""
    hundreds = pa.array([Decimal("1200"), None], pa.decimal128(5, -2))
    wanted: dict[str, Any] = {"type": "bytes", "logicalType": "decimal"}
    assert avro_of(registry, hundreds) == ({**wanted, "precision": 7, "scale": 0}, [b"\4\4\xb0", None])
    small = pa.Array.from_buffers(pa.decimal128(3, 5), 1, [None, pa.py_buffer((12).to_bytes(16, "little"))])
    assert avro_of(registry, small) == ({**wanted, "precision": 5, "scale": 5}, [b"\2\x0c"])
    with pytest.raises(SchemaError, match=r"decimal128\(38, -2\), which Avro does not have"):
        columns_of(registry, pa.schema([("value", pa.decimal128(38, -2))]), {"value.format": "avro"})


def test_views_are_encoded_beside_nulls_and_headers_of_another_type_are_refused(registry: Server) -> None:
    """Catches: errors of Arrow, which takes no entries of views."""
    deep = pa.struct([("a", pa.list_(pa.struct([("b", pa.large_list(_VIEW))])))])
    for column in (
        pa.array([{"a": "x"}, None, {"a": None}], pa.struct([("a", _VIEW)])),
        pa.array([["x", None], None, []], pa.list_(_VIEW)),
        pa.array([["x", None], None, []], pa.large_list(_VIEW)),
        pa.array([["x", None], None, ["", "y"]], pa.list_(_VIEW, 2)),
        pa.array([{"a": [{"b": ["x"]}]}, None, {"a": None}]).cast(deep),
        pa.DictionaryArray.from_arrays(pa.array([0, None, 1]), pa.array(["x", "y"]).cast(_VIEW)),
        pa.array(["x", None, "a text that is no short one"]).cast(_VIEW),
    ):
        batch = pa.record_batch([column], ["value"])
        assert values(registry, batch) == column.to_pylist(), column.type
        assert values(registry, batch.slice(1)) == column.to_pylist()[1:], column.type
    column = pa.array([[("k", "v")], None, []], pa.map_(_VIEW, _VIEW))
    assert values(registry, pa.record_batch([column], ["value"])) == [{"k": "v"}, None, {}]
    with pytest.raises(SchemaError, match="headers attribute unsupported type int64"):
        columns_of(registry, pa.schema([("id", pa.int64()), ("headers", pa.int64())]), _IN_HEADER)


def test_damaged_columns_are_errors_at_any_depth(registry: Server) -> None:
    """Catches: the process ends."""
    ends = pa.py_buffer(np.array([0, 900_000_000, 2, 3], dtype=np.int32))
    text = pa.Array.from_buffers(pa.string(), 3, [None, ends, pa.py_buffer(b"abc")])
    for column in (
        text,
        pa.StructArray.from_arrays([text], ["a"]),
        pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), text),
        pa.DictionaryArray.from_arrays(pa.array([0, 1, 2]), text),
    ):
        batch = pa.record_batch([column], ["value"])
        with pytest.raises(InvalidRowError, match="column 'value' is damaged"):
            values(registry, batch)


def test_rows_that_share_long_values_are_encoded_in_small_pieces(registry: Server) -> None:
    """Catches: all rows that share a value as bytes at once."""
    text = "y" * 60_000
    places = pa.array([0, None] + [0] * 300)
    for kind in (pa.string(), _VIEW):
        column = pa.DictionaryArray.from_arrays(places, pa.array([text], kind))
        for field in (column, pa.StructArray.from_arrays([column], ["a"])):
            batch = pa.record_batch([field], ["value"])
            pieces = list(columns_of(registry, batch.schema, {}).converted(batch))
            assert max(piece.nbytes for piece in pieces) < 9 << 20
            found = [
                json.loads(one[_FRAME:]) if one else one for piece in pieces for one in piece[0].to_pylist()
            ]
            assert found == field.to_pylist()


def test_a_small_slice_beyond_2_gib() -> None:
    """Catches: Arrow's cast to 32-bit offsets, which counts what the slice leaves out."""
    data = np.zeros((1 << 31) + 100, dtype=np.uint8)
    data[-6:] = list(b"abcdef")
    ends = np.array([0, len(data) - 6, len(data) - 3, len(data)], dtype=np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(data)]
    for kind, narrow in ((pa.large_string(), pa.string()), (pa.large_binary(), pa.binary())):
        found = plain(pa.Array.from_buffers(kind, 3, buffers).slice(1))
        assert found.type == narrow
        assert found.cast(pa.binary()).to_pylist() == [b"abc", b"def"]


def _structs(**kinds: pa.DataType) -> pa.DataType:
    return pa.list_(pa.struct(kinds.items()))


def test_a_schemas_header_follows_headers_of_all_types(registry: Server) -> None:
    """Catches: a key and a value that change places, and types that cannot be put together."""
    mine = {"key": "k", "value": b"v"}
    for kind in (
        _structs(key=pa.string(), value=pa.binary()),
        _structs(value=pa.binary(), key=pa.string()),
        _structs(key=pa.string(), value=pa.string()),
        _structs(key=pa.large_string(), value=pa.large_binary()),
        _structs(key=_VIEW, value=_VIEW),
        pa.large_list(pa.struct([("key", pa.string()), ("value", pa.binary())])),
        pa.map_(pa.string(), pa.binary()),
    ):
        entry: Any = ("k", b"v") if pa.types.is_map(kind) else mine
        batch = pa.record_batch([pa.array([1, 2]), pa.array([[entry], None], kind)], ["id", "headers"])
        found = [row["headers"] for row in encoded(registry, batch, _IN_HEADER)]
        shown = [[{**one, "key": _text(one["key"])} for one in row] for row in found]
        assert shown == [[mine, _HEADER], [_HEADER]], kind


def _text(key: str | bytes) -> str:
    return key if isinstance(key, str) else key.decode()


def test_every_refused_row_has_its_dead_letter(registry: Server) -> None:
    """Catches: dead letters of the first rows only, where a column beside the value comes in slices."""
    count = 20_000
    rejected: list[RejectedRows] = []
    schema = pa.schema([("x", pa.float64()), ("timestamp", pa.timestamp("ns", "UTC"))])
    columns = columns_of(registry, schema, {"errors.tolerance": "all"}, lambda rows, _: rejected.append(rows))
    instants = pa.array(np.arange(count) * 1_000_000).cast(schema.field("timestamp").type)
    batch = pa.RecordBatch.from_arrays([pa.array(np.full(count, np.nan)), instants], schema=schema)
    assert sum(one.num_rows for one in columns.converted(batch)) == 0
    assert sum(rows.count for rows in rejected) == count


def test_batches_of_two_kinds_in_turns_ask_the_registry_twice(
    registry: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: a request for each batch, and a summary that names the last schema only."""
    with FakeCluster({TOPIC: 1}) as cluster:
        given = {"value.format": "json", "schema.registry.url": registry.url}
        with caplog.at_level("INFO"), kafka_sink.producer({**task_options(cluster), **given}) as writing:
            for number in range(3):
                writing.send(pa.table({"a": [number]}))
                writing.send(pa.table({"b": [str(number)]}))
        data = b"".join(batch.data for batch in cluster.batches(TOPIC, 0))
    assert len(registry.requests) == 2
    assert f"value as json by {TOPIC}-value version 1 (id 1)" in caplog.text
    assert f"value as json by {TOPIC}-value version 2 (id 1)" in caplog.text
    rows = [text for number in range(3) for text in (b'{"a":%d}' % number, b'{"b":"%d"}' % number)]
    places = [data.index(row) for row in rows]
    assert places == sorted(places)


def test_a_row_that_became_a_dead_letter_was_taken(registry: Server) -> None:
    """Catches: a send that fails behind it, is repeated, and has the dead letter twice."""

    def source() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"value": [float("nan")]})
        raise KeyError

    with FakeCluster({TOPIC: 1}) as cluster:
        given = {**task_options(cluster), "value.format": "json", "schema.registry.url": registry.url}
        failed = pytest.raises(KeyError)
        with failed, kafka_sink.producer({**given, "errors.tolerance": "all"}) as writing:
            for data in (source(), pa.record_batch({"value": [1.0]})):
                with pytest.raises(KeyError):
                    writing.send(data)


def test_null_values_of_topics_with_schemas_of_their_own(registry: Server) -> None:
    """Catches: a batch of tombstones alone, which fails."""
    kind = pa.struct([("x", pa.int64())])
    schema = pa.schema([("topic", pa.string()), ("value", kind)])
    given = {"topic": "", "schema.registry.topics": "a,b", "use.latest.version": "true"}
    columns = columns_of(registry, schema, {"value.format": "avro", **given})
    cases: list[tuple[list[str], list[Any]]] = [(["a", "b"], [None, None]), ([], []), (["b"], [{"x": 1}])]
    for topics, rows in cases:
        batch = pa.RecordBatch.from_arrays(
            [pa.array(topics, pa.string()), pa.array(rows, kind)], schema=schema
        )
        found = [row["value"] for one in columns.converted(batch) for row in one.to_pylist()]
        assert [one is None for one in found] == [one is None for one in rows]
