"""The columns of records over Arrow's buffers; test_encoder.py compares what is encoded of them."""

from __future__ import annotations

import mmap

import numpy as np
import pyarrow as pa

from kafka_sink.records import encoder
from kafka_sink.records.encoder import RowRange
from kafka_sink.records.record_columns import RecordColumns


def test_rows_of_a_slice_beyond_2_31_bytes_are_encoded() -> None:
    start = 2**31
    with mmap.mmap(-1, start + 8) as memory:
        memory[start : start + 2] = b"ab"
        offsets = np.array([0, start, start + 2], dtype=np.int64)
        whole = pa.Array.from_buffers(
            pa.large_binary(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(memory)]
        )
        value = whole.slice(1)
        rows = RecordColumns.of(None, (value,), None)
        # length 8, attributes, deltas, no key (-1), value of 2, no headers: zigzag varints
        (records,) = encoder.encode(rows, 0, [RowRange(0, 1, 0, 0)])
        assert bytes(records[:]) == b"\x10\0\0\0\x01\x04ab\0"
        del whole, value, rows
