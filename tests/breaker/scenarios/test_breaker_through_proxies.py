"""The breaker at its defaults, with a network that flaps, resets and is slow between task and brokers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from kafka_sink.task.producer import Producer
from tests.support.fake_broker import FakeCluster
from tests.support.proxy import ProxyCluster
from tests.support.scripted_cluster import PATIENCE_S, TOPIC, task, written
from tests.support.slow_machine import Stalls
from tests.support.topics import moved_in
from tests.support.waiting import repeat_until

# Partition n is led by broker n.
PARTITIONS = 3
PERIOD_S = 3.0
# Full within a second or two of a broker's share: a task that a muted broker can hold stalls.
SMALL = {"batch_size": 1_024, "buffer_memory": 131_072}
LONGEST_PAUSE_S = 2.0


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster({TOPIC: PARTITIONS}, brokers=PARTITIONS) as running:
        yield running


@pytest.fixture
def proxies(cluster: FakeCluster) -> Iterator[ProxyCluster]:
    with ProxyCluster(cluster.bootstrap_servers) as running:
        yield running


class Stream:
    """Numbered keyless rows, each larger than batch.size, so that partitions take turns."""

    def __init__(self, producer: Producer, cluster: FakeCluster) -> None:
        self.count = 0
        self.longest_pause_s = 0.0
        self._producer = producer
        self._cluster = cluster

    def send_until(self, condition: Callable[[], object], what: str) -> None:
        repeat_until(condition, self._send, what, PATIENCE_S)

    def _send(self) -> None:
        before = time.monotonic()
        value = pa.array([b"<%d>" % self.count + b"x" * 2_000], pa.binary())
        partition = pa.array([None], pa.int32())
        self._producer.send(pa.record_batch({"value": value, "partition": partition}))
        self.longest_pause_s = max(self.longest_pause_s, time.monotonic() - before)
        self.count += 1

    def send_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.send_until(lambda: time.monotonic() >= until, "time passes")

    def send_to_all(self) -> None:
        """Until every broker has answered enough for its usual latency to be known."""
        self.send_until(lambda: min(self.at(p) for p in range(PARTITIONS)) > 10, "all brokers have answered")
        self.longest_pause_s = 0.0

    def at(self, partition: int) -> int:
        return len(written(self._cluster, partition))

    def assert_all_written_in_order(self) -> None:
        found = [written(self._cluster, partition) for partition in range(PARTITIONS)]
        assert sorted(itertools.chain(*found)) == list(range(self.count))
        late = itertools.chain(*map(moved_in, found))
        assert len([*late]) <= self._producer.metrics()["record-moved-total"], "what was sent keeps its order"


def muted(producer: Producer) -> object:
    gate = producer.breaker
    assert gate is not None
    return gate.mutes


def connected_through(proxies: ProxyCluster) -> object:
    """The scripted cluster as the proxies show it."""

    class Through:
        bootstrap_servers = proxies.bootstrap_servers

    return Through


def test_a_broker_that_is_away_three_seconds_and_back_three_seconds(
    cluster: FakeCluster, proxies: ProxyCluster
) -> None:
    """Catches: a mute that outlasts the absence, one that is missed the second time, rows out of order."""
    with Stalls() as stalls, task(connected_through(proxies), **SMALL) as producer:  # type: ignore[arg-type]
        stream = Stream(producer, cluster)
        stream.send_to_all()
        for _ in range(2):
            proxies[0].freeze()
            went = time.monotonic()
            stream.send_until(lambda: muted(producer), "the broker is muted")
            assert time.monotonic() - went < 2.0 + stalls.total_s
            before = stream.count
            stream.send_for(PERIOD_S - (time.monotonic() - went))
            # All that was sent meanwhile went to the other two.
            stream.send_until(
                lambda sent=before: stream.at(1) + stream.at(2) > sent / 2, "the healthy brokers go on"
            )
            proxies[0].thaw()
            came = time.monotonic()
            stream.send_until(lambda: not muted(producer), "the broker is back")
            assert time.monotonic() - came < 3.0 + stalls.total_s
            seen = stream.at(0)
            stream.send_until(lambda had=seen: stream.at(0) > had + 10, "it takes its share again")
            stream.send_for(PERIOD_S - (time.monotonic() - came))
        result = producer.finish()
    assert result.breaker_trips == 2
    assert stream.longest_pause_s < LONGEST_PAUSE_S + 2 * stalls.longest_s
    stream.assert_all_written_in_order()


def test_a_broker_whose_connections_are_reset_and_refused(
    cluster: FakeCluster, proxies: ProxyCluster
) -> None:
    """Catches: probes that never find the broker again, a stall of the healthy partitions."""
    with Stalls() as stalls, task(connected_through(proxies), **SMALL) as producer:  # type: ignore[arg-type]
        stream = Stream(producer, cluster)
        stream.send_to_all()
        proxies[0].refuse()
        proxies[0].cut()
        stream.send_until(lambda: muted(producer), "the broker is muted")
        healthy = stream.at(1) + stream.at(2)
        stream.send_until(lambda: stream.at(1) + stream.at(2) > healthy + 100, "the healthy brokers go on")
        proxies[0].accept()
        came = time.monotonic()
        stream.send_until(lambda: not muted(producer), "the broker is back")
        # One interval and one connection backoff.
        assert time.monotonic() - came < 5.0 + stalls.total_s
        result = producer.finish()
    assert result.breaker_probes >= 1
    stream.assert_all_written_in_order()


def test_a_broker_that_has_become_slow_gets_less_while_it_is(
    cluster: FakeCluster, proxies: ProxyCluster
) -> None:
    """Catches: a slow broker that holds everybody up, or that stays muted once it is quick again."""
    with Stalls() as stalls, task(connected_through(proxies), **SMALL) as producer:  # type: ignore[arg-type]
        stream = Stream(producer, cluster)
        stream.send_to_all()
        proxies[0].slow(delay_ms=600)
        stream.send_until(lambda: muted(producer), "the slow broker is muted")
        sent, at_slow = stream.count, stream.at(0)
        stream.send_for(4.0)
        slow, all_of_them = stream.at(0) - at_slow, stream.count - sent
        assert slow < all_of_them / 6, "half of an even share"
        proxies[0].slow()
        stream.send_until(lambda: not muted(producer), "it is quick again")
        producer.finish()
    assert stream.longest_pause_s < LONGEST_PAUSE_S + 2 * stalls.longest_s
    stream.assert_all_written_in_order()
