"""Transactional ids whose producer epochs are nearly used up, without 32,000 requests for each."""

from __future__ import annotations

from collections.abc import Mapping

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from local_kafka import LocalBroker
from tests.support.topics import messages
from tests.support.waiting import until

# The last epoch that brokers give to a client; the transaction after it has another producer id.
LAST_EPOCH = 32_766
_STATE = "__transaction_state"
# TransactionLogKey: a version of two bytes, and the id behind its length. TransactionLogValue: a version, the
# producer id, and the epoch.
_NAME_AT = 4
_EPOCH_AT, _EPOCH_END = 10, 12


def set_epochs(broker: LocalBroker, epochs: Mapping[str, int]) -> None:
    """Bring ids, which have been initialised, to these epochs, and start the broker again.

    It takes the last record that the coordinator itself has written of each id, and writes it again with
    another epoch; the coordinator reads it when it starts. As nothing was written under the epochs in
    between, that is the state in which InitProducerId, called as often, leaves an id.
    """
    records = _last_records(broker)
    # Only a client of this name may write to topics of brokers themselves.
    producer = Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "client.id": "__admin_client", "log_level": 0}
    )
    for name, epoch in epochs.items():
        partition, key, value = records[name]
        changed = value[:_EPOCH_AT] + epoch.to_bytes(2, "big") + value[_EPOCH_END:]
        producer.produce(_STATE, changed, key, partition)
    assert producer.flush(30) == 0
    del producer  # before the broker goes, which it would try to reach
    broker.stop(0)
    broker.start(0)
    _await_coordinator(broker)


def _last_records(broker: LocalBroker) -> dict[str, tuple[int, bytes, bytes]]:
    """By transactional id: partition, key and value."""
    found: dict[str, tuple[int, bytes, bytes]] = {}
    for message in messages(broker.bootstrap_servers, _STATE):
        key, value = message.key(), message.value()
        if value is not None and key is not None:
            raw = key if isinstance(key, bytes) else key.encode()
            found[raw[_NAME_AT:].decode()] = message.partition() or 0, raw, bytes(value)
    return found


def _await_coordinator(broker: LocalBroker) -> None:
    """A broker that has just started may have no partitions of that topic yet."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    until(lambda: _STATE in admin.list_topics(timeout=30).topics, "its partitions", poll_s=0.05)
