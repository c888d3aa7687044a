"""Two producers and a coordinator over loopback: what a user's class mutes in one of them, both know."""

from __future__ import annotations

from kafka_sink.breaker import ProducerStatusContext
from kafka_sink.coordinator.breaker_service import BreakerService
from kafka_sink.coordinator.metadata import MetadataService
from kafka_sink.coordinator.server import Services
from kafka_sink.model import TopicPartition
from tests.support.breaker_cluster import IdleBreaker
from tests.support.coordinator_harness import serving
from tests.support.fake_broker import FakeCluster
from tests.support.scripted_cluster import TOPIC, mutes, rows, task, written
from tests.support.waiting import until

P0 = TopicPartition(TOPIC, 0)


class MutesAfterSeven(IdleBreaker):
    """Partition 0 is muted once it has a batch of exactly seven rows."""

    def on_complete(
        self, context: ProducerStatusContext, topic_partition: TopicPartition, exception: Exception | None
    ) -> bool:
        if context.record_count == 7:
            self.manager.mute(topic_partition, "seven is enough")
        return context.record_count == 7


def test_what_an_own_class_mutes_rests_for_both() -> None:
    breaker = "producer_circuit_breaker_"
    own = {f"{breaker}class": f"{__name__}.MutesAfterSeven", f"{breaker}mute_retry_interval": 1_500}
    services: Services = {MetadataService: MetadataService, BreakerService: BreakerService}
    with (
        FakeCluster({TOPIC: 3}, brokers=3) as cluster,
        serving(services=services) as running,
        task(cluster, running.address, **own) as first,
        task(cluster, running.address, **own) as second,
    ):
        first.send(rows(0, 1))
        second.send(rows(1, 1, partition=1))
        until(lambda: running.connections() and written(cluster, 0), "a batch of its own")
        first.send(rows(2, 7))
        until(lambda: P0 in mutes(second), "the second hears of it")
        second.send(rows(9, 2))
        second.finish()
        until(lambda: not mutes(first), "the second's probe got through")
        first.finish()
        assert written(cluster, 0) == [0, *range(2, 11)]
