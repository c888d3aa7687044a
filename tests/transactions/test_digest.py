"""Digests: the same rows give the same one in any order, and other rows another one."""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_sink.transactions import digest as digests
from kafka_sink.transactions.decision import RowsDigest
from kafka_sink.transactions.digest import RunningDigest

BINARY = pa.binary()
Row = tuple[bytes | None, bytes | None]
ROWS = st.lists(st.tuples(st.none() | st.binary(max_size=9), st.none() | st.binary(max_size=99)), max_size=30)


def batch_of(rows: Sequence[Row], kind: pa.DataType = BINARY) -> pa.RecordBatch:
    keys, values = [row[0] for row in rows], [row[1] for row in rows]
    return pa.record_batch({"key": pa.array(keys, kind), "value": pa.array(values, kind)})


def of(*batches: pa.RecordBatch, parts: Sequence[int | None] = (0, 1)) -> RowsDigest:
    digest = RunningDigest(parts)
    for one in batches:
        digest.update(one)
    return digest.result()


def of_column(values: Sequence[Any], kind: pa.DataType) -> RowsDigest:
    return of(pa.record_batch({"one": pa.array(values, kind)}), parts=(0,))


@settings(deadline=None)
@given(ROWS, st.randoms(use_true_random=False), st.integers(0, 30), st.integers(0, 3))
def test_a_digest_depends_neither_on_order_nor_on_batches_nor_on_tasks(
    rows: list[Row], chance: random.Random, cut: int, before: int
) -> None:
    """Catches: rows that came over another network path were taken for others."""
    moved = chance.sample(rows, len(rows))
    whole = of(batch_of(rows))
    # Slices begin anywhere in a buffer.
    longer = batch_of([(b"x" * before, b"y" * before), *moved])
    first, second = longer.slice(1, cut), longer.slice(1 + cut)
    assert of(first, second) == whole
    assert RowsDigest.total([of(second), of(first)]) == whole
    assert of(batch_of(moved, pa.large_binary())) == whole
    assert whole.rows == len(rows)
    assert whole.size == sum(len(part or b"") for row in rows for part in row)


@settings(deadline=None)
@given(ROWS, ROWS)
def test_other_rows_have_another_digest(ours: list[Row], theirs: list[Row]) -> None:
    same = Counter(ours) == Counter(theirs)
    assert (of(batch_of(ours)) == of(batch_of(theirs))) is same


def checksum(value: bytes) -> int:
    """As the module says it: what other digests follow from."""
    total, power = (len(value) + 1) * int(digests.LENGTH), 1
    for (word,) in struct.iter_unpack("<Q", value.ljust(-(-len(value) // 8) * 8, b"\0")):
        mixed = (word ^ word >> 33) * int(digests.MIX) % 2**64
        total += (mixed ^ mixed >> 32) * power
        power = power * digests.R % 2**64
    return total % 2**64


@settings(deadline=None)
@given(st.lists(st.binary(max_size=70), max_size=30), st.integers(0, 3), st.sampled_from([1, 50, 1000]))
def test_a_value_has_its_checksum_in_any_block(values: list[bytes], before: int, block: int) -> None:
    column = pa.array([b"before"] * before + values, BINARY).slice(before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "BLOCK_BYTES", block)
        assert list(digests.of_bytes(column)) == list(map(checksum, values))


def test_values_of_very_different_lengths_have_the_checksums_that_they_have_alone() -> None:
    chance = random.Random(2)
    sizes = [0, 1, 7, 8, 9, *(chance.randrange(50) for _ in range(300)), 5000, 200_000, 1_000_000]
    values = [chance.randbytes(size) for size in chance.sample(sizes, len(sizes))]
    for kind in (BINARY, pa.large_binary()):
        assert list(digests.of_bytes(pa.array(values, kind))) == list(map(checksum, values))


def test_the_argument_for_other_digests_holds() -> None:
    """What the module says of its constants, of which no test of rows could find a failure of one in 2^30."""
    assert digests.R % 8 == 5
    assert list(digests.POWERS[[0, 1, -1]]) == [1, digests.R, pow(digests.R, digests.SEGMENT - 1, 2**64)]
    for distance in (1, 2, 3, 8, 96, 2**20, 2**27 - 2**20, *range(1000, 1100)):
        power = pow(digests.R, distance, 2**64)
        divides = (distance & -distance).bit_length() - 1
        assert (power - 1) & -(power - 1) == 1 << 2 + divides
        assert (power + 1) & -(power + 1) == 2
    values = np.random.default_rng(1).bytes(800_000)
    column = [values[start : start + 8] for start in range(0, len(values), 8)]
    assert len(np.unique(digests.of_bytes(pa.array(column, BINARY)))) == len(column)


@pytest.mark.parametrize("places", [(7,), (3,), (3, 7), (2, 6), (0, 4), tuple(range(8))], ids=str)
def test_no_kind_of_change_of_a_word_keeps_the_low_bits_of_its_checksum(places: tuple[int, ...]) -> None:
    """Catches: two changes of bytes 3 and 7 together made up for each other."""
    random_bits = np.random.default_rng(3)
    text = (random_bits.integers(0, 64, (20_000, 8)) + 48).astype(np.uint8)
    changed = text.copy()
    high = 1 << random_bits.integers(4, 7, 20_000)
    for place in places:
        # A shift by 33 bits puts the one onto the other.
        changed[:, place] ^= (high if place > 3 else high >> 1).astype(np.uint8)
    swapped = text[:, [4, 5, 6, 7, 0, 1, 2, 3]]
    for other in (changed, np.ascontiguousarray(swapped)):
        are_other = (text != other).any(axis=1)
        sums = [digests.of_bytes(pa.array([bytes(one) for one in words], BINARY)) for words in (text, other)]
        difference = (sums[0] - sums[1])[are_other]
        assert not (difference % np.uint64(2**32) == 0).any(), "one in 2^32 would by chance"


OTHER = bytes.fromhex("0000004000000080")


def trading(one: str, between: str, two: str, start: str = "") -> tuple[list[Row], list[Row]]:
    first, second = (f"{start}{place}{between}{other}" for place, other in ((one, two), (two, one)))
    return [(None, first.encode())], [(None, second.encode())]


TRADED: dict[str, tuple[list[Row], list[Row]]] = {
    "orders": trading("4000123400000000", f'","memo":"{"m" * 30}","to":"', "4000123400400080", '{"from":"'),
    "64 bytes apart": trading("00000000", "x" * 56, "00040008"),
    "16 bytes apart": trading("aaaaaaaa", "x" * 8, "aaaqaaaA"),
    "key and value": ([(b"abcA000p", b"abca0000")], [(b"abca0000", b"abcA000p")]),
    "twice": ([(None, bytes(8) + b"x" * 8 + bytes(8))], [(None, OTHER + b"x" * 8 + OTHER)]),
    "concatenated": ([(b"ab", b"c")], [(b"a", b"bc")]),
    "columns": ([(b"a", b"b")], [(b"b", b"a")]),
    "rows": ([(b"a", b"1"), (b"b", b"2")], [(b"a", b"2"), (b"b", b"1")]),
    "null key": ([(b"", b"v")], [(None, b"v")]),
    "all null": ([(None, None)], [(b"", b"")]),
    "length": ([(b"k", b"v" * 7)], [(b"k", b"v" * 8)]),
    "repeated": ([(b"k", b"0123" * 20)], [(b"k", b"0124" * 20)]),
}


def test_words_of_text_and_parts_that_trade_places_are_noticed() -> None:
    """Catches: the first five had one digest in pairs, so a payment in the other direction was skipped."""
    same = [name for name, pair in TRADED.items() if len({of(batch_of(one)).checksum for one in pair}) < 2]
    assert same == []


def test_a_part_is_known_by_its_name_and_not_by_its_column() -> None:
    rows = batch_of([(b"k", b"v")])
    assert of(rows, parts=(None, 0, 1)) == of(rows.select(["value", "key"]), parts=(None, 1, 0))
    assert of(rows, parts=(None, 0, 1)) != of(rows, parts=(0, None, 1))


def test_numbers_and_lists_count_too() -> None:
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    one, two = {"key": "a", "value": b"1"}, {"key": "b", "value": None}
    for kind, values in (
        (pa.int32(), [0, 1, 2, None]),
        (pa.timestamp("us", "UTC"), [0, 1, 2, None]),
        (pa.string(), ["", "topic", "other", None]),
        (headers, [[], [one], [two], [one, two], [two, one], [one, one], None]),
    ):
        rows = [of_column([value], kind) for value in values]
        assert len({row.checksum for row in rows}) == len(values), kind
        assert of_column(values[::-1], kind) == of_column(values, kind) == RowsDigest.total(rows)
        assert (
            of(pa.record_batch({"one": pa.array(values, kind)}).slice(1), parts=(0,)).rows == len(values) - 1
        )
    assert of_column([None, None], pa.null()) == RowsDigest(2)


def test_blocks_and_buffers_that_are_not_aligned_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: just the first of 256 rows was looked at, so tasks could exchange the others."""
    chance = random.Random(1)
    rows: list[Row] = [
        (chance.choice([None, b"", b"key"]), chance.randbytes(chance.randrange(60))) for _ in range(500)
    ]
    whole = of(batch_of(rows))
    with monkeypatch.context() as patch:
        for block in (1, 50, 1000):
            patch.setattr(digests, "BLOCK_BYTES", block)
            assert of(batch_of(rows)) == whole
    values = batch_of(rows).column(1)
    _, ends, data = values.buffers()
    for shift in range(1, 8):
        moved = np.frombuffer(b"-" * shift + data.to_pybytes(), np.uint8)[shift:]
        array = pa.Array.from_buffers(pa.binary(), len(values), [None, ends, pa.py_buffer(moved)])
        batch = pa.record_batch({"key": batch_of(rows).column(0), "value": array})
        assert of(batch) == whole
