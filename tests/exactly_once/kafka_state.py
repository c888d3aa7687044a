"""Faults in what Kafka keeps for a prefix: who coordinates it, its progress markers, and its epochs."""

from __future__ import annotations

import io

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from kafka_sink.clock import wall_ms
from kafka_sink.errors import KafkaSinkError
from kafka_sink.options import SinkOptions
from kafka_sink.transactions import __main__ as command
from kafka_sink.transactions import driver
from kafka_sink.transactions.client import TransactionClient
from kafka_sink.transactions.operations import Scope, describe
from local_kafka import LocalBroker
from tests.support.last_epochs import LAST_EPOCH, set_epochs, settled_ids
from tests.support.waiting import until

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


def expire_marks(cluster: LocalBroker, prefix: str) -> None:
    """As offsets.retention.minutes does, which takes offsets one by one: progress markers are older than
    their decision."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    groups = [f"{prefix}-tasks", f"{prefix}-tasks-1"]
    for deleted in admin.delete_consumer_groups(groups, request_timeout=30).values():
        try:
            deleted.result(60)
        except KafkaException as error:
            if error.args[0].name() not in ("GROUP_ID_NOT_FOUND", "NON_EMPTY_GROUP"):
                raise


def last_decided(options: SinkOptions, prefix: str) -> int:
    """The number of the batch, -1 where none was."""
    client = TransactionClient(options)
    try:
        decision = client.run(driver.read_decision(Scope(prefix, "", 1)), _PATIENCE_MS)
        return -1 if decision is None else decision.batch.number
    finally:
        client.close()


def resolve(cluster: LocalBroker, prefix: str, action: str) -> None:
    """By the command, as a user does."""
    where = ["--bootstrap-servers", cluster.bootstrap_servers, "--prefix", prefix]
    printed = io.StringIO()
    assert command.main([action, *where], printed) == 0, printed.getvalue()


def near_last_epochs(cluster: LocalBroker, options: SinkOptions, prefix: str, topic: str) -> None:
    """The prefix's ids get to their last epochs in the next batches. Nothing of it runs."""
    client = TransactionClient(options)
    try:
        partitions = client.partitions(topic, _PATIENCE_MS)
        client.run(driver.take_over(Scope(prefix, topic, partitions), wall_ms()), _PATIENCE_MS)
    finally:
        client.close()
    ids = until(lambda: settled_ids(cluster, prefix), "ids that are settled", poll_s=0.2)
    set_epochs(cluster, dict.fromkeys(ids, LAST_EPOCH - 3), brokers=range(3))
