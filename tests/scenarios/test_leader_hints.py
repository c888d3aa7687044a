"""Leaders that brokers name beside an error (KIP-951), and that are none: the cluster's metadata win."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kafka_sink.cluster.metadata import ClusterMetadata
from kafka_sink.model import MetadataUpdate, Node, PartitionMetadata, TopicPartition
from kafka_sink.options import SinkOptions
from tests.support.lifecycle_model import NODES, NOT_LEADER, TOPIC, Metadata, Model

P = TopicPartition(TOPIC, 0)
ADDRESSES = tuple(Node(number, f"host{number}", 9092) for number in range(NODES))
STEP_MS = 5.0


class Known(Metadata):
    """What a task knows of its cluster, whose partition 0 broker 0 leads, in epoch 0."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = ClusterMetadata(
            SinkOptions(
                bootstrap_servers=(),
                metadata_max_age_ms=300_000,
                metadata_max_idle_ms=300_000,
                retry_backoff_ms=100,
                retry_backoff_max_ms=1_000,
            ),
            random=lambda: 0.5,
        )
        self.requests = 0

    def leader(self, partition: TopicPartition) -> PartitionMetadata | None:
        return self.cluster.leader(partition)

    def mark_stale(self, topic: str, now_ms: float) -> None:
        self.cluster.mark_stale(topic, now_ms)

    def on_leader_hint(
        self,
        partition: TopicPartition,
        leader: int,
        epoch: int,
        nodes: Iterable[Node],
        topic_id: bytes | None,
    ) -> bool:
        return self.cluster.on_leader_hint(partition, leader, epoch, ADDRESSES, topic_id)

    def refresh(self, now_ms: float) -> None:
        """Send the request that is due; brokers respond at once."""
        self.cluster.on_use((TOPIC,), now_ms)
        asked = self.cluster.next_request(now_ms)
        if asked is not None:
            self.requests += 1
            topic = replace(self.described(), topic_id=b"i" * 16)
            self.cluster.on_response(MetadataUpdate(ADDRESSES, (topic,)), asked, now_ms)


class Scenario:
    """Two brokers, and a row for partition 0."""

    def __init__(self) -> None:
        self.known = Known()
        self.model = Model(metadata=self.known)
        self.known.refresh(self.model.now)
        assert self.known.leader(P) == PartitionMetadata(TOPIC, 0, 0, 0)
        self.model.append([0], 5, lambda: None)
        self.model.flush()
        self.attempts = 0

    def run(self, errors: dict[int, int], named: dict[int, tuple[int, int]]) -> None:
        """One pass of the sender, answered at once. ``named``: the leader and epoch that a broker names."""
        self.known.refresh(self.model.now)
        self.model.send()
        for node in range(NODES):
            while self.model.unhandled(node) is not None:
                self.attempts += 1
                code = errors.get(node, 0)
                self.model.arrive(node, code, append=not code, leader=named.get(node))
                self.model.respond(node)
        self.model.now += STEP_MS

    @property
    def leader(self) -> tuple[int, int]:
        found = self.known.leader(P)
        assert found is not None
        return found.leader, found.leader_epoch


def test_a_leader_that_was_named_by_mistake_is_given_up_when_it_denies() -> None:
    """Catches: by its epoch, above the cluster's, it outlived all metadata, until delivery.timeout.ms."""
    scenario = Scenario()
    scenario.run({0: NOT_LEADER}, {0: (1, 99)})
    assert scenario.leader == (1, 99)
    began_ms = scenario.model.now
    while scenario.model.accumulator.incomplete:
        scenario.run({}, {})
        assert scenario.model.now - began_ms < 9_000, f"{scenario.attempts} attempts, {scenario.leader}"
    assert (scenario.model.now - began_ms, scenario.attempts) == (2_405.0, 6)
    assert scenario.model.acknowledged == [0]
    assert scenario.leader == (0, 0)
    assert scenario.known.requests == 6, "the first, and five in a row that said another leader"


def test_a_leader_that_was_named_before_metadata_show_it_stays() -> None:
    """Brokers learn of an election one after the other."""
    scenario = Scenario()
    scenario.run({0: NOT_LEADER}, {0: (1, 1)})
    for _ in range(4):
        scenario.known.mark_stale(TOPIC, scenario.model.now)
        scenario.model.now += scenario.known.cluster.next_request_delay_ms(scenario.model.now)
        scenario.known.refresh(scenario.model.now)
        assert scenario.leader == (1, 1)
    scenario.known.leaders[0] = 1
    scenario.run({}, {})
    assert scenario.model.acknowledged == [0]
    assert scenario.attempts == 2, "without a wait"


def test_two_brokers_that_name_each_other_are_not_asked_without_a_pause() -> None:
    """Catches: each named the other in a newer epoch, and each such response was followed at once."""
    scenario = Scenario()
    for epoch in range(1, 1_000):
        scenario.run(dict.fromkeys(range(NODES), NOT_LEADER), {0: (1, epoch), 1: (0, epoch)})
    assert (scenario.model.now, scenario.attempts) == (5_995.0, 9)
