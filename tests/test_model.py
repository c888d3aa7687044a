from __future__ import annotations

import pytest

from kafka_sink.model import Node, PartitionMetadata, Partitions, TopicPartition
from tests.support.topic_metadata import topic_of

INFOS = tuple(PartitionMetadata("t", number, 10 + number, 7) for number in range(3))


def test_partitions_return_their_metadata_by_number() -> None:
    partitions = topic_of("t", None, INFOS).partitions
    assert (len(partitions), tuple(partitions), partitions[1]) == (3, INFOS, INFOS[1])
    with pytest.raises(IndexError):
        partitions[3]


def test_another_leader_makes_other_partitions_and_changes_none() -> None:
    before = Partitions("t", [1, 2], [5, 5])
    after = before.with_leader(1, 3, 6)
    assert list(after) == [PartitionMetadata("t", 0, 1, 5), PartitionMetadata("t", 1, 3, 6)]
    assert before == Partitions("t", [1, 2], [5, 5])
    assert before != after
    assert before != Partitions("u", [1, 2], [5, 5])
    assert (str(TopicPartition("orders", 3)), str(Node(-1, "h", 9092))) == ("orders-3", "h:9092 (id -1)")
