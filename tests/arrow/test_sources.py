"""What users hand over becomes record batches, read as they are needed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from kafka_sink.arrow.columns import ArrowColumns
from kafka_sink.arrow.producer import record_batches
from kafka_sink.errors import SchemaError

TABLE = pa.table({"value": ["a", "b", "c"]})


class OnlyAnArray:
    """What has no stream."""

    def __arrow_c_array__(self, requested_schema: Any = None) -> Any:
        return TABLE.to_batches()[0].__arrow_c_array__(requested_schema)


@pytest.mark.parametrize(
    "data",
    [
        TABLE,
        TABLE.to_reader(),
        TABLE.to_batches()[0],
        OnlyAnArray(),
        TABLE.to_batches(max_chunksize=1),
        iter([TABLE.slice(0, 1), TABLE.slice(1).to_reader()]),
        pd.DataFrame({"value": ["a", "b", "c"]}),
    ],
    ids=lambda data: type(data).__name__,
)
def test_record_batches_accepts_any_source_of_arrow_data(data: Any) -> None:
    _, batches = record_batches(data)
    assert [value for batch in batches for value in batch.column("value").to_pylist()] == ["a", "b", "c"]


def test_the_schema_is_known_before_rows_are_read_and_an_iterator_is_read_as_its_batches_are_taken() -> None:
    schema, _ = record_batches(TABLE.to_reader())
    assert schema == TABLE.schema
    assert record_batches([])[0] is None
    read = []

    def source() -> Iterator[pa.Table]:
        for number in range(3):
            read.append(number)
            yield TABLE

    _, batches = record_batches(source())
    assert read == []
    next(batches)
    assert read == [0]


def test_record_batches_rejects_lazy_frames_and_data_that_is_not_arrow() -> None:
    with pytest.raises(SchemaError, match="Collect it first"):
        record_batches(pl.LazyFrame({"value": ["a"]}))
    with duckdb.connect() as connection, pytest.raises(SchemaError, match=r"sql\(query\)"):
        record_batches(connection.execute("SELECT 'a' AS value"))
    with pytest.raises(SchemaError, match=r"pyarrow\.Table\.from_pylist"):
        list(record_batches([{"value": "a"}])[1])
    for data in (None, 7, "text", b"bytes", {"value": ["a"]}, [{"value": "a"}], ["a"], TABLE.column(0)):
        with pytest.raises(SchemaError, match="is not Arrow data"):
            list(record_batches(data)[1])


def test_python_objects_of_polars_are_refused_and_harmless_if_no_one_uses_them() -> None:
    """Catches: keys that are the addresses of Python objects."""
    frame = pl.DataFrame({"key": [uuid.UUID(int=1)], "value": ["x"]})
    for data in (frame, [frame], (one for one in [frame]), frame.lazy().collect_batches()):
        _, batches = record_batches(data)
        with pytest.raises(
            SchemaError, match=r"key attribute unsupported type Object of Polars.*map_elements"
        ):
            ArrowColumns.of(next(batches).schema, "t")
    schema, batches = record_batches(frame.rename({"key": "other"}))
    assert schema is not None
    (batch,) = ArrowColumns.of(schema, "t").converted(next(batches))
    assert batch.column("value").to_pylist() == [b"x"]
    # Bytes of the same size from elsewhere are what they are.
    table = pa.table({"value": pa.array([b"8 bytes."], pa.binary(8))})
    assert record_batches(table)[0] == table.schema


def test_a_frame_that_arrow_cannot_read_is_an_error_that_names_the_column() -> None:
    """Catches: a frame that is said to be no Arrow data, and pyarrow's own error."""
    wide = pl.DataFrame({"value": ["x"], "other": [1]}, schema_overrides={"other": pl.Int128})
    with pytest.raises(SchemaError, match="column 'other' has the type Int128, which pyarrow does not have"):
        record_batches(wide)
    with pytest.raises(SchemaError, match=r"cannot read.*column other with type object"):
        record_batches(pd.DataFrame({"value": ["x", "y"], "other": ["a", 1]}))
