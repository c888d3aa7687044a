"""Exactly once on a real Kafka 3.9, which has transaction protocol 1.

A late request is replayed by hand in the interleavings that KIP-890 names: docs/exactly-once-proof.md has
what this shows. test_transactions_real_broker.py runs on this Kafka, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from kafka_sink.model import TopicPartition
from kafka_sink.transactions.operations import ProducerEpoch
from local_kafka import LocalBroker
from tests.support.raw_producer import RawProducer
from tests.support.topics import read_to_end
from tests.support.waiting import until

VERIFICATION_SETTING = "transaction.partition.verification.enable"
_numbers = iter(range(1000))


@pytest.fixture
def unverifying(old_broker: LocalBroker) -> Iterator[LocalBroker]:
    """As brokers before 3.6 are. The setting may be changed while they run."""
    _alter(old_broker, AlterConfigOpType.SET)
    yield old_broker
    _alter(old_broker, AlterConfigOpType.DELETE)


def _alter(broker: LocalBroker, how: AlterConfigOpType) -> None:
    """Until the broker has taken it."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    off = ConfigEntry(VERIFICATION_SETTING, "false", incremental_operation=how)
    admin.incremental_alter_configs([ConfigResource("broker", "0", incremental_configs=[off])])
    wanted = "false" if how is AlterConfigOpType.SET else "true"

    def is_set() -> bool:
        (described,) = admin.describe_configs([ConfigResource("broker", "0")]).values()
        return bool(described.result(30)[VERIFICATION_SETTING].value == wanted)

    until(is_set, "its setting")


class Scene:
    """A topic of one partition, a producer by hand, and its aborted transaction of one row."""

    def __init__(self, broker: LocalBroker) -> None:
        name = f"late-{next(_numbers)}"
        broker.create_topic(name, 1)
        self.servers = broker.bootstrap_servers
        self.partition = TopicPartition(name, 0)
        self.raw = RawProducer(self.servers, name)
        self.aborted = self.raw.init()
        assert self.raw.add(self.aborted, self.partition) == "NONE"
        assert self.raw.produce(self.aborted, 0, self.partition, b"aborted") == "NONE"
        # Once more, as brokers answer that one when all markers are written.
        for _ in range(2):
            assert self.raw.end(self.aborted, commit=False) == "NONE"

    def late_write(self) -> str:
        """The aborted transaction's next batch, which was sent and held up on its way."""
        return self.raw.produce(self.aborted, 1, self.partition, b"late")

    def read(self) -> list[bytes]:
        self.raw.close()
        return sorted(read_to_end(self.servers, self.partition.topic))


def _commit(scene: Scene, producer: ProducerEpoch) -> None:
    """Until all markers are written, as in Scene."""
    for _ in range(2):
        assert scene.raw.end(producer, commit=True) == "NONE"


@pytest.mark.parametrize(("commit", "seen"), [(True, [b"late"]), (False, [])])
def test_late_requests_begin_and_end_a_transaction_if_two_share_an_epoch(
    old_broker: LocalBroker, *, commit: bool, seen: list[bytes]
) -> None:
    """What protocol 1 allows. Verification helps only while nothing is open."""
    scene = Scene(old_broker)
    assert scene.late_write() == "INVALID_TXN_STATE"
    assert scene.raw.add(scene.aborted, scene.partition) == "NONE"
    assert scene.late_write() == "NONE"
    assert scene.raw.end(scene.aborted, commit=commit) == "NONE"
    assert scene.read() == seen


def test_with_an_epoch_for_each_transaction_every_late_request_is_refused(old_broker: LocalBroker) -> None:
    """Before the next transaction begins, while it is open, once it has written, and once it is committed.

    While the next transaction's marker is being written, a few of thousands of such writes are refused with
    INVALID_TXN_STATE instead: the leader does not verify a producer that has a transaction open at that
    partition, and checks again before it compares epochs whether it still has one.
    """
    scene = Scene(old_broker)
    raised = scene.raw.init(scene.aborted)
    assert raised == (scene.aborted.producer_id, scene.aborted.epoch + 1)
    assert scene.raw.add(scene.aborted, scene.partition) == "PRODUCER_FENCED"
    assert scene.late_write() == "INVALID_PRODUCER_EPOCH"
    assert scene.raw.end(scene.aborted, commit=True) == "PRODUCER_FENCED"
    own = scene.raw.init()
    assert scene.raw.add(own, scene.partition) == "NONE"
    assert scene.raw.add(scene.aborted, scene.partition) == "PRODUCER_FENCED"
    assert scene.late_write() == "INVALID_PRODUCER_EPOCH"
    assert scene.raw.produce(own, 0, scene.partition, b"own") == "NONE"
    assert scene.late_write() == "INVALID_PRODUCER_EPOCH"
    _commit(scene, own)
    assert scene.late_write() == "INVALID_PRODUCER_EPOCH"
    late_mark = scene.raw.commit_offset(scene.aborted, "late", scene.partition, "progress marker")
    assert late_mark == "INVALID_PRODUCER_EPOCH"
    assert scene.read() == [b"own"]


def test_without_verification_an_epoch_for_each_transaction_is_not_enough(unverifying: LocalBroker) -> None:
    """So such brokers are refused when a write is planned."""
    scene = Scene(unverifying)
    own = scene.raw.init()
    assert scene.raw.commit_offset(scene.aborted, "late", scene.partition, "progress marker") == "NONE"
    assert scene.raw.add(own, scene.partition) == "NONE"
    assert scene.late_write() == "NONE"
    assert scene.raw.produce(own, 0, scene.partition, b"own") == "NONE"
    _commit(scene, own)
    assert scene.read() == [b"late", b"own"]


def test_a_late_copy_of_an_acknowledged_batch_is_written_by_no_broker(unverifying: LocalBroker) -> None:
    """Its sequence number gives it away: tasks end with every batch acknowledged."""
    scene = Scene(unverifying)
    own = scene.raw.init()
    assert scene.raw.add(own, scene.partition) == "NONE"
    assert scene.raw.produce(own, 0, scene.partition, b"own") == "NONE"
    _commit(scene, own)
    assert scene.raw.produce(own, 0, scene.partition, b"own") == "NONE"
    following = scene.raw.init()
    assert scene.raw.add(following, scene.partition) == "NONE"
    assert scene.raw.produce(own, 0, scene.partition, b"own") == "NONE"
    assert scene.raw.end(following, commit=True) == "NONE"
    assert scene.read() == [b"own"]
