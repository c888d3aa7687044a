"""Varints of single numbers are read as they were written, and a varint without an end is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_sink import varint
from tests.support.schema_responses import uvarint


@given(st.integers(0, (1 << 64) - 1))
def test_unsigned_varints_are_read_as_they_were_written(number: int) -> None:
    written = varint.unsigned(number)
    assert written == uvarint(number)
    assert varint.read_unsigned(b"x" + written + b"x", 1) == (number, 1 + len(written))


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_signed_varints_are_short_near_zero(number: int) -> None:
    written = varint.signed(number)
    assert varint.read_signed(memoryview(written), 0) == (number, len(written))
    assert (len(written) == 1) is (-64 <= number < 64)


def test_a_varint_without_an_end_is_refused() -> None:
    """Catches: a peer's bytes decide how long a number becomes."""
    with pytest.raises(IndexError):
        varint.read_unsigned(b"\x80", 0)
    for most in (5, varint.MAX_BYTES):
        with pytest.raises(ValueError, match=f"more than {most} bytes"):
            varint.read_unsigned(b"\x80" * 1_000, 0, most)
