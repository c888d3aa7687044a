"""Partitions by themselves, and what a topic's batches shrink to."""

from __future__ import annotations

from kafka_sink.cluster.partition import Partition
from kafka_sink.cluster.topic_limits import TopicLimits
from kafka_sink.engine.accumulator import RecordAccumulator
from kafka_sink.model import TopicPartition


def partition_of(name: TopicPartition) -> Partition:
    """One of no accumulator's, with batches of 16 KiB."""
    return Partition(name, TopicLimits(name.topic, 16_384))


def limits_of(accumulator: RecordAccumulator, topic: str = "t") -> TopicLimits:
    with accumulator.lock:
        return accumulator.partition(TopicPartition(topic, 0)).limits


def teach_ratio(accumulator: RecordAccumulator, ratio: float) -> None:
    """As many batches of topic t that shrank to ``ratio`` would."""
    limits = limits_of(accumulator)
    while limits.ratio > ratio:
        limits.observe(ratio)
