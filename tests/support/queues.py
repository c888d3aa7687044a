"""Partitions without an accumulator, and the ratio to which a topic's batches shrink."""

from __future__ import annotations

from typing import Any

from kafka_sink.cluster.partition import Partition
from kafka_sink.cluster.topic_limits import TopicLimits
from kafka_sink.engine.accumulator import RecordAccumulator
from kafka_sink.model import TopicPartition
from kafka_sink.options import SinkOptions


def partition_of(name: TopicPartition) -> Partition:
    """A partition that belongs to no accumulator, with batches of 16 KiB."""
    return Partition(name, TopicLimits(name.topic, 16_384))


def settings(**changes: Any) -> SinkOptions:
    """An accumulator's options, for small batches that neither linger nor wait for memory."""
    plain = {"batch_size": 1_000, "linger_ms": 0, "max_block_ms": 0, "delivery_timeout_ms": 10_000}
    return SinkOptions(bootstrap_servers=(), **{**plain, **changes})


def limits_of(accumulator: RecordAccumulator, topic: str = "t") -> TopicLimits:
    with accumulator.lock:
        return accumulator.partition(TopicPartition(topic, 0)).limits


def teach_ratio(accumulator: RecordAccumulator, ratio: float) -> None:
    """Estimate as if many batches of topic t had shrunk to ``ratio``."""
    limits = limits_of(accumulator)
    while limits.ratio > ratio:
        limits.observe(ratio)
