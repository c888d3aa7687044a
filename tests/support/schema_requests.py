"""Requests as kafka-python encodes them by Kafka's message schemas, to compare ours with byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kafka_sink.model import TopicPartition
from tests.support.response_checks import every_version

# This text is longer than one byte of a compact length can express, and is not ASCII.
LONG = "töpic" * 40
PARTITIONS = [TopicPartition(LONG, 3), TopicPartition("t", 0), TopicPartition(LONG, 2**31 - 1)]


def same(api: int, ours: Callable[[int], bytes | memoryview], theirs: Any, **fields: Any) -> None:
    """Compare the request in each version that this client writes. Elements of lists are tuples, in the
    schema's order."""
    for version in every_version(api):
        expected = bytes(theirs(version=version, **fields).encode(version=version))
        assert bytes(ours(version)) == expected, version
