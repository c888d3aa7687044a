"""When known brokers are given up, with plain numbers for the time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kafka_sink.cluster.metadata_requests import MetadataRequests
from kafka_sink.cluster.producer_metadata import ProducerMetadata
from kafka_sink.kafka_errors import UNKNOWN_TOPIC_OR_PARTITION
from kafka_sink.model import MetadataUpdate, Node, PartitionMetadata
from kafka_sink.options import parse
from tests.support.topic_metadata import topic_of


class _Silent:
    """A network that can send to no broker, unless it gets a connection."""

    def __init__(self) -> None:
        self.rebootstraps = 0
        self.connection: object = None

    def connection_to_ask(self, now_ms: float) -> tuple[object, float]:
        return self.connection, 100.0

    def wakeup(self) -> None: ...

    def rebootstrap(self) -> None:
        self.rebootstraps += 1


class _Requests:
    """``strategy``: whether brokers are given up; ``trigger_ms``: after so long."""

    def __init__(self, strategy: str, trigger_ms: int) -> None:
        recovery = "kafka.metadata.recovery"
        raw = {f"{recovery}.strategy": strategy, f"{recovery}.rebootstrap.trigger.ms": str(trigger_ms)}
        options = parse({"kafka.bootstrap.servers": "b:1", "topic": "t", **raw}).options
        network: Any = _Silent()
        self._network = network
        self._cluster = ProducerMetadata(replace(options, retry_backoff_ms=10), lambda: 0.0, network)
        self._requests = MetadataRequests(options, self._cluster, network, lambda *_: None)

    def wanted(self, now_ms: float) -> bool:
        """Whether brokers are given up now, as metadata is wanted."""
        self._cluster.on_use(["t"], now_ms)
        before: int = self._network.rebootstraps
        self._requests.refresh(now_ms)
        return bool(self._network.rebootstraps > before)

    def described(self, now_ms: float) -> None:
        """A response describes the topic."""
        topic = topic_of("t", None, [PartitionMetadata("t", 0, 1, 0)])
        self._cluster.on_response(MetadataUpdate((Node(1, "b", 9092),), (topic,), {}), ["t"], now_ms)

    def ages(self, now_ms: float) -> None:
        """The topic's metadata is old, but not so old that it is worth a request."""
        self._network.connection = object()
        assert not self.wanted(now_ms)
        self._network.connection = None

    def responded(self, now_ms: float) -> None:
        """A response says that the topic is unknown."""
        self._cluster.on_response(MetadataUpdate((), (), {"t": UNKNOWN_TOPIC_OR_PARTITION}), ["t"], now_ms)

    def satisfied(self, now_ms: float) -> None:
        """No metadata is wanted any more."""
        self._cluster.forget("t")
        self._requests.refresh(now_ms)


def test_a_rebootstrap_follows_each_trigger_time_without_a_response() -> None:
    recovery = _Requests("rebootstrap", 1000)
    triggered = [now for now in range(0, 3500, 100) if recovery.wanted(now)]
    assert triggered == [1000, 2000, 3000]


def test_a_response_starts_the_timer_anew() -> None:
    recovery = _Requests("rebootstrap", 1000)
    assert not recovery.wanted(0)
    recovery.satisfied(100)
    assert not recovery.wanted(5000)
    assert recovery.wanted(6000)


def test_a_response_that_does_not_help_starts_the_timer_anew() -> None:
    """It shows that a broker responds, though metadata is wanted still."""
    recovery = _Requests("rebootstrap", 1000)
    assert not recovery.wanted(0)
    recovery.responded(900)
    assert not recovery.wanted(1_899)
    assert recovery.wanted(1_900)


def test_metadata_that_may_age_further_starts_no_timer() -> None:
    """Catches: connections that are closed every five minutes, with a trigger shorter than half of that."""
    recovery = _Requests("rebootstrap", 1000)
    assert not recovery.wanted(0)
    recovery.described(10)
    assert not recovery.wanted(20)
    recovery.ages(200_000)
    assert not recovery.wanted(400_000), "now it is worth a request"
    assert recovery.wanted(401_000)


def test_a_new_start_is_given_time_however_short_the_trigger() -> None:
    recovery = _Requests("rebootstrap", 0)
    assert [now for now in range(0, 2500, 100) if recovery.wanted(now)] == [0, 1000, 2000]
    recovery.satisfied(2500)
    assert not recovery.wanted(2600), "a response came, but the last start is no second ago"
    assert recovery.wanted(3000)


def test_recovery_strategy_none_never_bootstraps_again() -> None:
    recovery = _Requests("none", 0)
    assert not any(recovery.wanted(now) for now in range(0, 100_000, 1000))
