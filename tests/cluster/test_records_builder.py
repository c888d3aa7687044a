"""The batch's table of states, exhaustively, and when its memory goes back."""

from __future__ import annotations

import pytest

from kafka_sink.cluster.partition import TRANSITIONS, BatchState, ProducerBatch
from kafka_sink.errors import IllegalTransitionError
from kafka_sink.memory.pool import BufferPool
from kafka_sink.model import CompressionType, TopicPartition
from tests.support.allocators import incremental_allocator
from tests.support.queues import partition_of


def pool() -> BufferPool:
    return BufferPool(1 << 20, clock_ms=lambda: 0.0)


def batch_in(state: BatchState, memory: BufferPool | None = None) -> ProducerBatch:
    buffer = incremental_allocator(memory or pool(), 1024).open(100, 0)
    batch = ProducerBatch(
        buffer, None, CompressionType.NONE, 1.0, 0, partition_of(TopicPartition("t", 0)), 0.0
    )
    batch.state = state
    return batch


@pytest.mark.parametrize("start", list(BatchState))
def test_every_move_is_legal_late_or_raises(start: BatchState) -> None:
    for goal in BatchState:
        batch = batch_in(start)
        if goal not in TRANSITIONS[start]:
            with pytest.raises(IllegalTransitionError):
                batch.move_to(goal)
            assert batch.state is start
        else:
            is_late = start is BatchState.FAILED
            assert batch.move_to(goal) is not is_late
            assert batch.state is (start if is_late else goal)


def test_every_response_to_a_failed_batch_is_late_and_harmless() -> None:
    """An expired in-flight batch may still be answered in every way; the sender must survive it."""
    responses = {BatchState.SUCCEEDED, BatchState.SEALED, BatchState.SPLIT, BatchState.FAILED}
    assert TRANSITIONS[BatchState.IN_FLIGHT] <= responses
    assert responses <= TRANSITIONS[BatchState.FAILED]


def test_a_batch_that_is_sent_again_is_sent_whole() -> None:
    """Catches: a retry with a part of the batch, or without its header."""
    allocator = incremental_allocator(pool(), 1024)
    buffer, _between = allocator.open(100, 0), allocator.open(100, 0)
    assert buffer.grow(3_000)
    batch = ProducerBatch(
        buffer, None, CompressionType.NONE, 1.0, 0, partition_of(TopicPartition("t", 0)), 0.0
    )
    batch.held = True
    batch.append(memoryview(b"r" * 2_500), 1, 0)
    first, again = (b"".join(batch.write_header()) for _ in range(2))
    assert len(batch.buffer.views()) > 1
    assert first == again == b"".join(batch.buffer.views())
    assert first[61:] == b"r" * 2_500
    # Rows are taken only while it is held.
    with pytest.raises(IllegalTransitionError):
        batch_in(BatchState.OPEN).append(memoryview(b"record"), 1, 0)
