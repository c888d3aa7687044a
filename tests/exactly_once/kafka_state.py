"""Faults in what Kafka keeps for a prefix: who coordinates it, its progress markers, and its epochs."""

from __future__ import annotations

from kafka_sink.errors import KafkaSinkError
from kafka_sink.options import SinkOptions
from kafka_sink.transactions import driver
from kafka_sink.transactions.client import TransactionClient
from kafka_sink.transactions.operations import Scope, describe

_PATIENCE_MS = 60_000.0


def coordinator_of(options: SinkOptions, prefix: str) -> int | None:
    """The broker that coordinates the driver's id; None where nobody says so now."""
    client = TransactionClient(options)
    name = Scope(prefix, "", 1).driver_id
    try:
        client.run(describe(name), 5000.0)
        return client.coordinators.get((False, name))
    except KafkaSinkError:
        return None
    finally:
        client.close()


def last_decided(options: SinkOptions, prefix: str) -> int:
    """The number of the batch, -1 where none was."""
    client = TransactionClient(options)
    try:
        decision = client.run(driver.read_decision(Scope(prefix, "", 1)), _PATIENCE_MS)
        return -1 if decision is None else decision.batch.number
    finally:
        client.close()
