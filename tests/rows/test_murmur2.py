"""The vectorised murmur2 against kafka-python's; tests/records/test_batch_header.py asks Kafka's class."""

from __future__ import annotations

import random
import time
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2 as reference

from kafka_sink.rows import murmur2 as module
from kafka_sink.rows.murmur2 import murmur2, partitions_for

TYPES = [pa.binary(), pa.large_binary(), pa.string(), pa.large_string()]
KEYS = st.lists(st.one_of(st.none(), st.binary(max_size=70)), max_size=80)


def expected(keys: list[bytes | None]) -> list[int]:
    return [reference(key or b"") & 0xFFFFFFFF for key in keys]


def hashes(keys: pa.Array) -> list[int]:
    found = murmur2(keys)
    assert found.dtype == np.uint32
    return [int(value) for value in found]


def text(number: random.Random, length: int) -> bytes:
    """Bytes that are valid UTF-8, so that they fit every type."""
    return bytes(number.randrange(128) for _ in range(length))


@given(KEYS, st.sampled_from(TYPES[:2]), st.integers(0, 5), st.integers(0, 5))
@example([None] * 30, pa.binary(), 3, 0)
@example([b""] * 30, pa.binary(), 0, 0)
@example([], pa.binary(), 0, 0)
def test_any_keys_sliced_anywhere(keys: list[bytes | None], kind: pa.DataType, head: int, tail: int) -> None:
    array = pa.array(keys, kind).slice(head, max(0, len(keys) - head - tail))
    assert hashes(array) == expected(keys[head : max(head, len(keys) - tail)])


@pytest.mark.parametrize("count", [1, 12, 13, 100])
def test_every_length_at_every_place_of_a_round(count: int) -> None:
    number = random.Random(count)
    for length in range(70):
        keys: list[bytes | None] = [text(number, length) for _ in range(count)]
        wanted, binary = expected(keys), pa.array(keys, pa.binary())
        for kind in TYPES:
            assert hashes(binary.cast(kind)) == wanted, (length, kind)


@patch.object(module, "_BLOCK", 7)
def test_blocks_meet_without_a_seam() -> None:
    number = random.Random(1)
    keys = [None if number.random() < 0.1 else text(number, number.randrange(60)) for _ in range(500)]
    assert hashes(pa.array(keys, pa.binary()).slice(3)) == expected(keys[3:])
    alike = [text(number, 9) for _ in range(500)]
    assert hashes(pa.array(alike, pa.binary()).slice(3)) == expected(list(alike[3:]))


def test_buffers_that_hold_more_than_keys() -> None:
    """A null's slot may hold bytes; they are not its key."""
    data = b"x" * 40 * 20
    offsets = np.arange(0, len(data) + 1, 40, dtype=np.int32)
    validity = np.packbits(np.arange(20) % 2 == 0, bitorder="little").tobytes()
    buffers = [pa.py_buffer(validity), pa.py_buffer(offsets), pa.py_buffer(data)]
    array = pa.Array.from_buffers(pa.binary(), 20, buffers)
    assert hashes(array) == expected([b"x" * 40, None] * 10)
    # As IPC may bring them: the first offset is not 0, and the data ends with the last.
    data = b"junk" + b"".join(b"key-%03d" % number for number in range(50))
    wide_offsets = np.arange(4, len(data) + 1, 7, dtype=np.int64)
    array = pa.Array.from_buffers(
        pa.large_binary(), 50, [None, pa.py_buffer(wide_offsets), pa.py_buffer(data)]
    )
    assert hashes(array) == expected([b"key-%03d" % number for number in range(50)])


@pytest.mark.parametrize("long_keys", [1, 30, 70])
def test_long_keys_among_short_ones_hash_correctly(long_keys: int) -> None:
    number = random.Random(long_keys)
    keys = [text(number, number.randrange(14)) for _ in range(1000)]
    for place in number.sample(range(1000), long_keys):
        keys[place] = number.randbytes(2000 + place)
    assert hashes(pa.array(keys, pa.binary())) == expected(list(keys))


def test_a_key_of_900_kb_costs_its_own_bytes_only() -> None:
    """As many rounds over all rows as the longest key has would take minutes."""
    keys = [b"0123456789"] * 30_000
    keys[17_000] = random.Random(1).randbytes(900_001)
    array = pa.array(keys, pa.binary())
    started = time.thread_time()
    found = murmur2(array)
    assert time.thread_time() - started < 2
    assert int(found[17_000]) == reference(keys[17_000]) & 0xFFFFFFFF
    assert len(set(found.tolist())) == 2


def test_partitions_as_kafka_python_chooses_them() -> None:
    number = random.Random(5)
    keys = [text(number, number.randrange(30)) for _ in range(2000)]
    for partitions in (1, 2, 3, 12, 1000, 2**31 - 1):
        found = partitions_for(pa.array(keys, pa.binary()), partitions)
        assert found.dtype == np.int32
        assert found.tolist() == [(reference(key) & 0x7FFFFFFF) % partitions for key in keys]
