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
from tests.support.fake_broker import FakeCluster

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
    # Catches: the bitmap that Arrow gives them then, so that JSON has nothing in the place of null.
    column = pa.StructArray.from_arrays([pa.nulls(3)], ["x"]).take(indices(np.array([0, 2])))
    assert null_mask(column.flatten()[0]).tolist() == [True, True]


def test_indices_of_any_width() -> None:
    for dtype in (np.int16, np.int32, np.int64):
        rows = np.arange(10, dtype=dtype)[::3]
        assert indices(rows).to_pylist() == [0, 3, 6, 9]  # type: ignore[arg-type]


WITHOUT_PANDAS = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == 'pandas':
            raise AssertionError('pandas was imported')

sys.meta_path.insert(0, Refuse())
import pyarrow as pa
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.rows.rebatching import Rebatcher
from kafka_sink.task.producer import Producer

batch = pa.ipc.open_stream(sys.stdin.buffer).read_next_batch()
plan = ColumnPlan.of([(f.name, t) for f, t in zip(batch.schema, (
    'string', 'binary', 'string', 'array<struct<key:string,value:binary>>', 'timestamp'))], None)
producer = Producer(parse({'kafka.bootstrap.servers': sys.argv[1], 'kafka.batch.size': '200'}).options)
producer.begin()
builder = Rebatcher(plan.sized, linger_ms=0)
for unit in [*builder.offer(batch, 0.0), *builder.finish()]:
    producer.send(unit, plan=plan)
assert producer.finish().records == 20
producer.close()
assert 'pandas' not in sys.modules, 'pandas was imported'
"""


def test_rows_are_written_without_pandas(project_environment: dict[str, str]) -> None:
    """It would cost every Python worker 160 ms and 40 MB."""
    entries = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    batch = pa.record_batch(
        {
            "key": pa.array(["a", None] * 10),
            "value": pa.array([b"v"] * 19 + [None], pa.binary()),
            "topic": pa.array(["t", "u", "t", "t"] * 5),
            "headers": pa.array([[{"key": "a", "value": b"1"}], None] * 10, entries),
            "timestamp": pa.array([1, None] * 10, pa.timestamp("us", "UTC")),
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    with FakeCluster({"t": 2, "u": 2}) as cluster:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_PANDAS, cluster.bootstrap_servers],
            input=sink.getvalue().to_pybytes(),
            env=project_environment,
            capture_output=True,
            timeout=240,
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
