"""Arrow arrays through their buffers."""

from __future__ import annotations

import mmap
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_sink.records.arrays import as_binary, indices, null_mask, numbers

VALUES = st.lists(st.one_of(st.none(), st.integers(-5, 5)), max_size=70)


@settings(deadline=None)
@given(VALUES, st.integers(0, 70), st.integers(0, 70))
def test_nulls_and_numbers_of_any_slice(values: list[int | None], start: int, count: int) -> None:
    array = pa.array(values, pa.int32()).slice(start, count)
    expected = values[start : start + count]
    assert null_mask(array).tolist() == [value is None for value in expected]
    found = numbers(array, np.int32).tolist()
    assert [None if value is None else got for value, got in zip(expected, found, strict=True)] == expected


def test_nulls_of_other_types() -> None:
    for kind in (pa.string(), pa.large_binary(), pa.list_(pa.string()), pa.null()):
        assert null_mask(pa.nulls(11, kind).slice(3)).tolist() == [True] * 8
        assert null_mask(pa.nulls(0, kind)).tolist() == []


def test_nulls_without_a_type_stay_nulls_in_a_struct_that_was_taken() -> None:
    """Catches: the bitmap that Arrow gives them then, so that JSON has nothing in the place of null."""
    column = pa.StructArray.from_arrays([pa.nulls(3)], ["x"]).take(indices(np.array([0, 2])))
    assert null_mask(column.flatten()[0]).tolist() == [True, True]


def test_indices_of_any_width() -> None:
    for dtype in (np.int16, np.int32, np.int64):
        rows = np.arange(10, dtype=dtype)[::3]
        assert indices(rows).to_pylist() == [0, 3, 6, 9]  # type: ignore[arg-type]


def test_a_unit_is_made_without_pandas(project_environment: dict[str, str]) -> None:
    """It would cost every Python worker 160 ms and 40 MB."""
    script = """
import sys
import pyarrow as pa
from kafka_sink.records.ordered_rows import OrderedRows
import kafka_sink.task.producer
from kafka_sink.model import PartitionMetadata, TopicMetadata
from kafka_sink.records import encoder
from kafka_sink.records.encoder import RowRange
from kafka_sink.rows import columns, rebatching
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.rows.partitioner import BatchCapacity
from kafka_sink.rows.partitioner import Partitioner
import numpy as np

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == 'pandas':
            raise AssertionError('pandas was imported')

sys.meta_path.insert(0, Refuse())
reader = pa.ipc.open_stream(sys.stdin.buffer)
plan = ColumnPlan.of([(f.name, t) for f, t in zip(reader.schema, (
    'string', 'binary', 'string', 'array<struct<key:string,value:binary>>', 'timestamp'))], None)
builder = rebatching.Rebatcher(plan.sized, linger_ms=0)
capacity = BatchCapacity(None, 99)
partitioner = Partitioner(
    capacity=lambda *_: capacity,
    loads=lambda topic, count: [0] * count,
    ignore_keys=False,
    adaptive=True,
    random=lambda: 0.5,
)
for batch in reader:
    for unit_rows in [*builder.offer(batch, 0.0), *builder.finish()]:
        rows = columns.extract(plan, unit_rows, 5)
        parts = [(n, (PartitionMetadata(n, 0, 0), PartitionMetadata(n, 1, 0))) for n in rows.topics]
        topics = {n: TopicMetadata.of(n, None, found) for n, found in parts}
        unit = partitioner.order(rows, topics, 5)
        encoder.encode(unit.columns, unit.timestamps, [RowRange(0, len(unit), 0, 5)])
        encoder.encode(unit.columns.slice(1, 3), 5, [RowRange(0, 2, 0, 5)])
assert 'pandas' not in sys.modules, 'pandas was imported'
"""
    headers = pa.array(
        [[{"key": "a", "value": b"1"}], None] * 10,
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    )
    batch = pa.record_batch(
        {
            "key": pa.array(["a", None] * 10),
            "value": pa.array([b"v"] * 19 + [None], pa.binary()),
            "topic": pa.array(["t", "u", "t", "t"] * 5),
            "headers": headers,
            "timestamp": pa.array([1, None] * 10, pa.timestamp("us", "UTC")),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=sink.getvalue().to_pybytes(),
        env=project_environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]


@pytest.mark.parametrize("kind", [pa.large_string(), pa.large_binary()])
def test_a_slice_beyond_2_31_bytes_gets_narrow_offsets(kind: pa.DataType) -> None:
    start = 2**31 + 10
    with mmap.mmap(-1, start + 16) as memory:  # untouched pages take no memory
        memory[start : start + 5] = b"abcde"
        offsets = np.array([0, start, start + 2, start + 2, start + 5], dtype=np.int64)
        valid = pa.py_buffer(np.packbits([1, 1, 0, 1], bitorder="little"))
        whole = pa.Array.from_buffers(kind, 4, [valid, pa.py_buffer(offsets), pa.py_buffer(memory)])
        found = as_binary(whole.slice(1))
        assert found.type == pa.binary()
        assert found.to_pylist() == [b"ab", None, b"cde"]
        with pytest.raises(OverflowError, match="4 entries take 2147483663 bytes"):
            as_binary(whole)
        del found, whole


def test_narrow_offsets_keep_the_values() -> None:
    some: list[list[bytes | None]] = [[], [None], [b"", None, b"x"], [b"a", b"bc"]]
    for values in some:
        array = pa.array([b"before", *values, b"after"], pa.large_binary()).view(pa.large_string())
        found = as_binary(array.slice(1, len(values)))
        found.validate(full=True)
        assert found.to_pylist() == values
