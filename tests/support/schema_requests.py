"""Requests as kafka-python encodes them by Kafka's message schemas, to compare ours with byte for byte."""

from __future__ import annotations

from typing import Any

import pytest

from kafka_sink.model import TopicPartition
from tests.support.response_checks import every_version

# Longer than what one byte of a compact length can say, and no ASCII.
LONG = "töpic" * 40
PARTITIONS = [TopicPartition(LONG, 3), TopicPartition("t", 0), TopicPartition(LONG, 2**31 - 1)]


def encoded(request: Any, version: int, **fields: Any) -> bytes:
    """The request's body by kafka-python's class for it."""
    return bytes(request(version=version, **fields).encode(version=version))


def each(api_key: int) -> pytest.MarkDecorator:
    """A test for each version of the API that this client writes."""
    return pytest.mark.parametrize("version", every_version(api_key))
