"""A partitioner without chance, for tests of what comes behind it."""

from __future__ import annotations

from kafka_sink.rows.partitioner import BatchCapacity, Partitioner


def plain_partitioner(batch_bytes: float = 100) -> Partitioner:
    """All queues are empty, and each batch takes ``batch_bytes``."""
    return Partitioner(
        capacity=lambda *_: BatchCapacity(None, batch_bytes),
        loads=lambda topic, count: [0] * count,
        ignore_keys=False,
        adaptive=False,
        random=lambda: 0.5,
    )
