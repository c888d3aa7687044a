"""Widths of varints, without writing them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kafka_sink import varint
from kafka_sink.records import varint_columns


@given(st.integers(0, 1 << 21), st.integers(1, 300))
def test_widths_of_counted_numbers(first: int, count: int) -> None:
    numbers = np.arange(first, first + count)
    expected = [len(varint.signed(number)) for number in range(first, first + count)]
    assert np.broadcast_to(np.asarray(varint_columns.widths(numbers)), count).tolist() == expected
