"""The kinds of messages that a relay adds up for its tasks. Those of other kinds it passes on.

A task's figures name the task, and all tasks together send 200 reports a second. What a task asks of
metadata, and which write it belongs to, it says once, and gets an answer of its own.
"""

from __future__ import annotations

from kafka_sink.coordinator.breaker.group import BreakerGroup
from kafka_sink.coordinator.metadata.group import MetadataGroup
from kafka_sink.coordinator.rates.group import RateGroup
from kafka_sink.coordinator.transport.group import GroupFactory

RELAY_GROUPS: tuple[GroupFactory, ...] = (BreakerGroup, MetadataGroup, RateGroup)
