"""What users hand over, as record batches: anything with Arrow's C interface, or an iterable of such things.

The interface is the Arrow PyCapsule one: ``__arrow_c_stream__`` of tables, frames and readers, and
``__arrow_c_array__`` of single batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from kafka_sink.errors import SchemaError


def record_batches(data: Any) -> tuple[pa.Schema | None, Iterator[pa.RecordBatch]]:
    """The schema, where it is known before the first batch is read, and the batches.

    Raises SchemaError for something else; the iterator raises it for an item, and what ``data`` raises.
    """
    if isinstance(data, pa.RecordBatch):
        return data.schema, iter((data,))
    if hasattr(data, "__arrow_c_stream__"):
        try:
            reader = pa.RecordBatchReader.from_stream(data)
        except pa.ArrowInvalid as error:
            raise _unfit(data, f": {error}") from None
        return reader.schema, iter(reader)
    if hasattr(data, "__arrow_c_array__"):
        return record_batches(pa.record_batch(data))
    # Of a frame of another kind, iteration would give columns or rows.
    if isinstance(data, Iterable) and not isinstance(data, str | bytes | dict) and not _is_frame(data):
        return None, _batches_of_each(data)
    raise _unfit(data)


def _batches_of_each(items: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    for item in items:
        if not hasattr(item, "__arrow_c_stream__") and not hasattr(item, "__arrow_c_array__"):
            raise _unfit(item)
        yield from record_batches(item)[1]


def _is_frame(data: Any) -> bool:
    return hasattr(data, "columns") or hasattr(data, "collect_schema")


def _unfit(data: Any, why: str = "") -> SchemaError:
    kind = f"{type(data).__module__}.{type(data).__qualname__}"
    remedy = ""
    if hasattr(data, "collect"):
        remedy = " Collect it first, or write its batches, as with collect_batches() of Polars."
    elif hasattr(data, "itertuples"):
        remedy = " Use pandas 3, or pyarrow.Table.from_pandas(frame)."
    return SchemaError(
        f"{kind} is no Arrow data{why}. Give a table, frame or reader with __arrow_c_stream__ (pyarrow, "
        f"Polars, DuckDB, pandas 3), a record batch, or an iterable of these.{remedy}"
    )
