"""Planning a write finds or starts the coordinator, and asks it for the topic's metadata.

Runs on the driver, several times for each micro-batch of a stream. Nothing here fails a write: tasks ask
brokers for what planning did not learn.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from kafka_sink.clock import monotonic_ms
from kafka_sink.coordinator.metadata.messages import KIND, decode_snapshot
from kafka_sink.coordinator.process import launcher
from kafka_sink.coordinator.transport.address import CoordinatorAddress, Rendezvous, warn_once
from kafka_sink.coordinator.transport.connection import CoordinatorConnection
from kafka_sink.errors import ProtocolError
from kafka_sink.metadata.topic_state import MetadataSnapshot
from kafka_sink.options import SinkOptions
from kafka_sink.timing_bounds import PLANNING_RESPONSE_MS

# A process that was just started imports its modules first; one that runs responds within milliseconds.
_NEW_SILENCE_MS = 5000.0
_SILENCE_MS = 500.0


@dataclass(frozen=True, slots=True)
class PlannedCoordinator:
    """What planning gives a write's tasks: where the coordinator is, and the metadata of their topic."""

    rendezvous: Rendezvous | None = None
    snapshot: MetadataSnapshot | None = None
    # Where the driver itself finds the coordinator.
    driver_address: CoordinatorAddress | None = None


def plan_coordinator(
    options: SinkOptions, *, is_streaming: bool, environ: Mapping[str, str] = os.environ
) -> PlannedCoordinator:
    """Find or start the coordinator, and ask it for the topic that the options name.

    For a stream it does not ask: the producers of its tasks live on from micro-batch to micro-batch. It waits
    for a process that was just started, so that the first tasks find one that responds.
    """
    located = launcher.locate(options, environ)
    if located is None:
        return PlannedCoordinator()
    address = CoordinatorAddress(located.host, located.rendezvous)
    if is_streaming and not located.is_new:
        return PlannedCoordinator(located.rendezvous, driver_address=address)
    try:
        connection = CoordinatorConnection(
            address, _NEW_SILENCE_MS if located.is_new else _SILENCE_MS, monotonic_ms
        )
        try:
            snapshot = None if options.topic is None else _ask(connection, options.topic)
        finally:
            connection.close()
    except (OSError, ProtocolError) as error:
        warn_once(address, error)
        snapshot = None
    return PlannedCoordinator(located.rendezvous, snapshot, address)


def _ask(connection: CoordinatorConnection, topic: str) -> MetadataSnapshot | None:
    until_ms = monotonic_ms() + PLANNING_RESPONSE_MS
    connection.send(KIND, {"ask": [topic]}, monotonic_ms())
    while monotonic_ms() < until_ms:
        for received in connection.receive(monotonic_ms()):
            if received.last:
                snapshot = decode_snapshot(received.body)
                return snapshot if any(one.metadata.name == topic for one in snapshot.topics) else None
    return None
