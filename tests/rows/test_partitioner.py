"""Which partition a row goes to; the murmur2 oracle is in tests/records/test_golden.py."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from kafka_sink.errors import InvalidRowError
from kafka_sink.rows.murmur2 import partitions_for
from kafka_sink.rows.partitioner import Partitioner, TopicView

SIZES = np.full(1000, 100, dtype=np.int64)


def partitioner(*, ignore_keys: bool = False, adaptive: bool = False, seed: int = 1) -> Partitioner:
    return Partitioner(
        sticky_bytes=5000, ignore_keys=ignore_keys, adaptive=adaptive, random=random.Random(seed).random
    )


def view(count: int = 4, available: tuple[int, ...] | None = None) -> TopicView:
    return TopicView("t", count, tuple(range(count)) if available is None else available)


def idle(topic: str, count: int) -> list[int]:
    return [0] * count


def test_column_before_key_before_sticky() -> None:
    key = pa.array([b"a", b"a", None, None, b""] * 200, pa.binary())
    explicit = np.array([3, -1, 2, -1, -1] * 200, dtype=np.int32)
    found = partitioner().assign(key, explicit, SIZES, view(), idle)
    hashed = partitions_for(key, 4)
    assert set(found[0::5]) == {3}
    assert set(found[2::5]) == {2}
    assert (found[1::5] == hashed[1::5]).all()
    assert (found[4::5] == hashed[4::5]).all(), "an empty key is a key"
    assert ((found >= 0) & (found < 4)).all()


def test_a_partition_out_of_range_is_refused_with_its_count() -> None:
    explicit = np.array([0, 4, 9, -1] * 250, dtype=np.int32)
    with pytest.raises(InvalidRowError, match=r"has 9 in a row for topic 't'.*0 to 3 \(500 of 1000"):
        partitioner().assign(None, explicit, SIZES, view(), idle)


def test_keyless_rows_stick_for_a_batch_and_state_survives_calls() -> None:
    one = partitioner()
    found = np.concatenate([one.assign(None, None, SIZES[:130], view(), idle) for _ in range(10)])
    changes = np.flatnonzero(np.diff(found)) + 1
    assert changes.tolist() == list(range(50, 1300, 50)), "50 rows of 100 bytes make 5000"


def test_keyless_rows_spread_evenly() -> None:
    found = partitioner().assign(None, None, np.full(100_000, 100, dtype=np.int64), view(8), idle)
    counts = Counter(found.tolist())
    assert set(counts) == set(range(8))
    assert max(counts.values()) < 1.3 * min(counts.values())


def test_a_longer_queue_gets_less() -> None:
    loads = [0, 0, 9, 0]
    sizes = np.full(100_000, 100, dtype=np.int64)
    found = partitioner(adaptive=True).assign(None, None, sizes, view(), lambda *_: loads)
    counts = Counter(found.tolist())
    assert counts[2] < 0.2 * counts[0]


def test_a_partition_that_became_unavailable_is_left_at_once() -> None:
    one = partitioner()
    first = int(one.assign(None, None, SIZES[:1], view(), idle)[0])
    others = tuple(number for number in range(4) if number != first)
    found = one.assign(None, None, SIZES, view(available=others), idle)
    assert first not in found


def test_with_none_available_all_are_alike() -> None:
    found = partitioner().assign(None, None, SIZES, view(available=()), idle)
    assert len(set(found.tolist())) > 1


def test_keys_can_be_ignored() -> None:
    key = pa.array([b"same"] * 1000, pa.binary())
    assert len(set(partitioner(ignore_keys=True).assign(key, None, SIZES, view(), idle).tolist())) > 1
