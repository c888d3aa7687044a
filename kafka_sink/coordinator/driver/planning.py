"""What planning a write does about the coordinator: finds or starts it, and asks it for the topic's metadata.

Runs on the driver, for each micro-batch of a stream several times. Nothing here fails a write: tasks find out
by themselves whatever is not known here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from kafka_sink.clock import monotonic_ms
from kafka_sink.coordinator.driver import launcher
from kafka_sink.coordinator.wire.address import CoordinatorAddress, Rendezvous
from kafka_sink.coordinator.wire.connection import CoordinatorConnection
from kafka_sink.coordinator.wire.metadata_messages import decode_snapshot
from kafka_sink.coordinator.wire.warnings import warn_once
from kafka_sink.errors import ProtocolError
from kafka_sink.metadata.snapshot import MetadataSnapshot
from kafka_sink.options import SinkOptions
from kafka_sink.timing_bounds import PLANNING_RESPONSE_MS

# A process that was just started must import its parts first; one that runs answers within milliseconds.
_NEW_SILENCE_MS = 5000.0
_SILENCE_MS = 500.0


@dataclass(frozen=True, slots=True)
class CoordinatorHandoff:
    """What a write's tasks are given: where the coordinator is, and what is known of their topic by now."""

    rendezvous: Rendezvous | None = None
    hints: MetadataSnapshot | None = None
    # Where the coordinator is for the driver.
    driver_address: CoordinatorAddress | None = None


def hand_off(
    options: SinkOptions, *, is_streaming: bool, environ: Mapping[str, str] = os.environ
) -> CoordinatorHandoff:
    """Finds or starts the coordinator, and asks it for the topic that the options name.

    A stream's tasks ask by themselves: their producers live on from micro-batch to micro-batch. Waits for a
    process that was just started, so that the first tasks find one that answers.
    """
    meeting = launcher.locate(options, environ)
    if meeting is None:
        return CoordinatorHandoff()
    address = CoordinatorAddress(meeting.host, meeting.rendezvous)
    if is_streaming and not meeting.is_new:
        return CoordinatorHandoff(meeting.rendezvous, driver_address=address)
    try:
        connection = CoordinatorConnection(
            address, _NEW_SILENCE_MS if meeting.is_new else _SILENCE_MS, monotonic_ms
        )
        try:
            hints = None if options.topic is None else _ask(connection, options.topic)
        finally:
            connection.close()
    except (OSError, ProtocolError) as error:
        warn_once(address, error)
        hints = None
    return CoordinatorHandoff(meeting.rendezvous, hints, address)


def _ask(connection: CoordinatorConnection, topic: str) -> MetadataSnapshot | None:
    until_ms = monotonic_ms() + PLANNING_RESPONSE_MS
    connection.tell("metadata", {"ask": [topic]}, monotonic_ms())
    while monotonic_ms() < until_ms:
        for heard in connection.receive(monotonic_ms()):
            if heard.last:
                hints = decode_snapshot(heard.body)
                return hints if any(one.metadata.name == topic for one in hints.topics) else None
    return None
