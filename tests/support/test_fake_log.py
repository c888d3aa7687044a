"""Compares the fake partition with Kafka's log layer: sequences, epochs and broken batches."""

from __future__ import annotations

import pytest

from tests.support.fake_log import (
    CORRUPT_MESSAGE,
    INVALID_PRODUCER_EPOCH,
    INVALID_RECORD,
    MESSAGE_TOO_LARGE,
    OUT_OF_ORDER_SEQUENCE_NUMBER,
    PartitionLog,
    RecordBatch,
    numbers_in,
    parse_batch,
)
from tests.support.network_harness import batch


def parsed(data: bytes) -> RecordBatch:
    found = parse_batch("t", 0, data)
    assert isinstance(found, RecordBatch)
    return found


def written(sequence: int, count: int = 2, producer_id: int = 7, epoch: int = 0) -> RecordBatch:
    """A batch of a producer; the header's other fields do not matter here."""
    return RecordBatch("t", 0, producer_id, epoch, sequence, count, 0, 0, 0, -1, b"x" * 100)


@pytest.fixture
def log() -> PartitionLog:
    """Empty; takes batches of up to 1,000 bytes."""
    return PartitionLog(1_000)


def test_a_batch_is_read_by_its_header() -> None:
    found = parsed(batch(3, producer_id=9, sequence=4))
    assert (found.topic, found.partition, found.record_count) == ("t", 0, 3)
    assert (found.producer_id, found.producer_epoch, found.base_sequence, found.last_sequence) == (9, 0, 4, 6)
    assert found.base_timestamp == found.max_timestamp == 1_700_000_000_000


def test_no_checksum_is_taken_for_a_row() -> None:
    assert numbers_in(bytes(17) + b"<45>" + bytes(40) + b"<1>, <2>") == [1, 2]


def test_bytes_that_are_not_one_batch() -> None:
    good = batch(2)
    for place in (16, 17, 21, 40, 60, -1):
        changed = bytearray(good)
        changed[place] ^= 1
        assert parse_batch("t", 0, bytes(changed)) == CORRUPT_MESSAGE, place
    assert parse_batch("t", 0, b"") == parse_batch("t", 0, good[:-1]) == CORRUPT_MESSAGE
    assert parse_batch("t", 0, good + good) == INVALID_RECORD


def test_a_repeat_gets_its_offset_again_and_is_not_doubled(log: PartitionLog) -> None:
    for sequence in (0, 2, 4, 6, 8):
        log.append(written(sequence))
    assert log.append(written(4)) == (0, 4)
    assert log.next_offset == 10
    assert len(log.batches) == 5


OUT_OF_ORDER, OLD_EPOCH = (OUT_OF_ORDER_SEQUENCE_NUMBER, -1), (INVALID_PRODUCER_EPOCH, -1)


# The sequence, records, producer and epoch of each batch, and its result.
SCENARIOS: dict[str, list[tuple[tuple[int, ...], tuple[int, int]]]] = {
    "a gap": [((0,), (0, 0)), ((3,), OUT_OF_ORDER), ((2,), (0, 2))],
    "an unknown producer may begin anywhere": [((500,), (0, 0))],
    "sequences wrap": [((2**31 - 2, 3), (0, 0)), ((1,), (0, 3))],
    "producers do not mix": [((0, 2, 1), (0, 0)), ((0, 2, 2), (0, 2))],
    "a repeat of what is forgotten": [*(((at,), (0, at)) for at in range(0, 12, 2)), ((0,), OUT_OF_ORDER)],
    "without a producer id": [((-1, 2, -1), (0, 0)), ((-1, 3, -1), (0, 2)), ((-1, 1, -1), (0, 5))],
    "a new epoch begins at 0": [
        ((0, 2, 7, 1), (0, 0)),
        ((2, 2, 7, 0), OLD_EPOCH),
        ((2, 2, 7, 2), OUT_OF_ORDER),
        ((0, 2, 7, 2), (0, 2)),
        ((2, 2, 7, 1), OLD_EPOCH),
    ],
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_sequences_and_epochs(log: PartitionLog, name: str) -> None:
    steps = SCENARIOS[name]
    assert [log.append(written(*batch)) for batch, _ in steps] == [expected for _, expected in steps]


def test_too_large_batch_is_refused(log: PartitionLog) -> None:
    assert log.append(parsed(batch(1, value=bytes(2_000)))) == (MESSAGE_TOO_LARGE, -1)
    assert log.batches == []
