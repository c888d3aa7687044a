"""The breaker in a whole producer, against scripted brokers: errors, refusals, silence, flapping."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping

import pyarrow as pa
import pytest

from kafka_sink.breaker import ProducerStatusContext
from kafka_sink.errors import DeliveryError
from kafka_sink.model import TopicPartition
from kafka_sink.task.producer import Producer
from tests.support.breaker_cluster import IdleBreaker
from tests.support.fake_broker import PRODUCE, FakeCluster
from tests.support.fake_replies import OK, Reply, error
from tests.support.scripted_cluster import PATIENCE_S, TOPIC, attempts, rows, send, task, written
from tests.support.topics import moved_in
from tests.support.waiting import repeat_until, until

BREAKER = "producer_circuit_breaker_"
# On a loaded machine healthy brokers may take a while to respond.
QUICK = {f"{BREAKER}slow_request_min_ms": 150, f"{BREAKER}mute_retry_interval": 200}
PATIENT = {f"{BREAKER}slow_request_min_ms": 0}
REPEAT = {f"{BREAKER}mute_retry_interval": 200}
P0 = TopicPartition(TOPIC, 0)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """Broker n leads partition n."""
    with FakeCluster({TOPIC: 3}, brokers=3) as running:
        yield running


def mutes(producer: Producer) -> object:
    gate = producer.breaker
    assert gate is not None
    return gate.mutes


def send_elsewhere(producer: Producer, number: int) -> None:
    """A row for one of the partitions that broker 0 does not lead."""
    producer.send(rows(number, 1, partition=1 + number % 2))


class Keyless:
    """Numbered rows without a partition, sent until something has happened."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self.count = 0

    def send_until(self, condition: Callable[[], object], what: str) -> None:
        repeat_until(condition, self._send, what, PATIENCE_S, 0.002)

    def _send(self) -> None:
        # Larger than batch.size, so that every partition gets its turn.
        value = [b"<%d>" % self.count + b"x" * 2_000]
        partition = pa.array([None], pa.int32())
        self._producer.send(pa.record_batch({"value": pa.array(value, pa.binary()), "partition": partition}))
        self.count += 1

    def assert_all_written(self, cluster: FakeCluster) -> None:
        by_partition = [written(cluster, partition) for partition in range(3)]
        assert sorted(itertools.chain(*by_partition)) == list(range(self.count))
        late = itertools.chain(*map(moved_in, by_partition))
        assert len([*late]) <= self._producer.metrics()["record-moved-total"], "what was sent keeps its order"


def test_batches_of_a_muted_partition_go_in_order_once_a_probe_succeeds(
    cluster: FakeCluster,
) -> None:
    cluster.script(PRODUCE, *[error(19)] * 5, node_id=0)
    options = {f"{BREAKER}trigger_message_count": 1, f"{BREAKER}mute_retry_interval": 150, **PATIENT}
    with task(cluster, retry_backoff_ms=1, retry_backoff_max_ms=1, **options) as producer:
        producer.send(rows(0, 10))
        until(lambda: mutes(producer), "the failing partition is muted")
        before = time.monotonic()
        for start in range(10, 50, 10):
            producer.send(rows(start, 10))
            producer.send(rows(start, 10, partition=1))
        until(lambda: written(cluster, 1) == list(range(10, 50)), "others go on")
        until(lambda: len(cluster.received(PRODUCE, 0)) >= 6, "the last probe")
        result = producer.finish()
    assert time.monotonic() - before > 0.4, "two more probes failed, each an interval apart"
    assert written(cluster, 0) == list(range(50))
    assert result.breaker_trips == 1
    assert result.breaker_probes == 3
    sent = [batch for batch in attempts(cluster) if batch.base_sequence == 0]
    assert len(sent) >= 6


def test_expired_rows_name_broker_partitions_time_and_last_error(cluster: FakeCluster) -> None:
    cluster.script(PRODUCE, *[error(19)] * 1_000, node_id=0)
    options = {f"{BREAKER}trigger_message_count": 1, f"{BREAKER}mute_retry_interval": 100, **PATIENT}
    with pytest.raises(DeliveryError) as failed:
        send(cluster, rows(0, 10), delivery_timeout_ms=2_500, request_timeout_ms=1_000, **options)
    text = str(failed.value)
    assert "the circuit breaker has muted t-0, led by 127.0.0.1:" in text
    assert "(id 0) since " in text
    assert "batches failed; last error: t-0: NOT_ENOUGH_REPLICAS" in text
    assert text.count("last error") == 1


def test_keyless_rows_avoid_a_frozen_broker_until_it_is_back(cluster: FakeCluster) -> None:
    with task(cluster, batch_size=1_024, **QUICK) as producer:
        stream = Keyless(producer)
        stream.send_until(lambda: all(written(cluster, p) for p in range(3)), "all partitions have rows")
        for _ in range(3):
            cluster.freeze(0)
            stream.send_until(lambda: mutes(producer), "the frozen broker is muted")
            others = len(written(cluster, 1)) + len(written(cluster, 2))
            stream.send_until(
                lambda before=others: len(written(cluster, 1)) + len(written(cluster, 2)) > before + 50,
                "the others take all rows",
            )
            cluster.thaw(0)
            stream.send_until(lambda: not mutes(producer), "it is back")
        result = producer.finish()
    assert result.breaker_trips >= 3
    stream.assert_all_written(cluster)


def test_keyless_rows_avoid_a_broker_that_refuses_connections(cluster: FakeCluster) -> None:
    with task(cluster, batch_size=1_024, **QUICK) as producer:
        stream = Keyless(producer)
        stream.send_until(lambda: all(written(cluster, p) for p in range(3)), "all partitions have rows")
        cluster.stop(0)
        stream.send_until(lambda: mutes(producer), "the absent broker is muted")
        cluster.start(0)
        stream.send_until(lambda: not mutes(producer), "a probe finds it again")
        result = producer.finish()
    assert result.breaker_probes >= 1
    stream.assert_all_written(cluster)


def test_a_throttled_broker_is_not_muted_for_delayed_requests(cluster: FakeCluster) -> None:
    cluster.script(PRODUCE, OK, Reply(delay_ms=100, throttle_ms=1_000), Reply(delay_ms=1_000), node_id=0)
    with task(cluster, batch_size=1_024, **QUICK) as producer:
        producer.send(rows(0, 1))
        until(lambda: written(cluster), "the broker's usual time is known")
        for start in (1, 2):
            # The second is on its way when the first one's response tells of the throttling.
            producer.send(rows(start, 1))
            until(lambda sent=start: len(cluster.received(PRODUCE, 0)) > sent, "it is sent")
        numbers = itertools.count(3)
        repeat_until(
            lambda: len(written(cluster)) == 3 and not producer.network.connections[0].in_flight,
            lambda: send_elsewhere(producer, next(numbers)),
            "the delayed response",
            pause_s=0.002,
        )
        result = producer.finish()
    assert result.breaker_trips == 0


def test_rows_do_not_gather_for_a_frozen_broker_that_owes_a_response(cluster: FakeCluster) -> None:
    """Catches: a memory that fills with keyless rows for a broker whose window is full: nothing waits for it
    that could be the probe, and new rows cannot be sent either."""
    alone = {"max_in_flight_requests_per_connection": 1, "partitioner_adaptive_partitioning_enable": "false"}
    with task(cluster, batch_size=1_024, **QUICK, **alone) as producer:
        producer.send(rows(0, 1))
        until(lambda: written(cluster), "the broker's usual time is known")
        cluster.freeze(0)
        producer.send(rows(1, 1))
        numbers = itertools.count(2)
        repeat_until(
            lambda: mutes(producer),
            lambda: send_elsewhere(producer, next(numbers)),
            "it is muted",
            pause_s=0.002,
        )
        stream = Keyless(producer)
        queue = producer.accumulator.partition(P0)
        begun = time.monotonic()
        stream.send_until(lambda: stream.count > 100 and time.monotonic() > begun + 1.5, "rows go on")
        assert not queue.batches
        cluster.thaw(0)
        producer.finish()


def test_no_rows_go_to_a_muted_broker_that_refuses_connections(cluster: FakeCluster) -> None:
    """Catches: rows that are to be the probe of a broker that is gone, and fail their task in the end."""
    quiet = {"partitioner_adaptive_partitioning_enable": "false", **PATIENT, **REPEAT}
    with task(cluster, batch_size=1_024, **quiet) as producer:
        producer.send(rows(0, 1))
        producer.send(rows(1, 1, partition=1))
        until(lambda: written(cluster) and written(cluster, 1), "the cluster is known")
        gate = producer.breaker
        assert gate is not None
        cluster.stop(0)
        gate.manager.mute(0, "I say so")
        until(lambda: mutes(producer), "it is muted")
        stream = Keyless(producer)
        queue = producer.accumulator.partition(P0)
        begun = time.monotonic()
        stream.send_until(lambda: stream.count > 100 and time.monotonic() > begun + 1.5, "rows go on")
        assert not queue.batches
        cluster.start(0)
        until(lambda: not mutes(producer), "its connection tells that it is back")
        producer.finish()


def test_rows_that_keep_their_partition_keep_their_order_through_mutes_and_retries(
    cluster: FakeCluster,
) -> None:
    """Catches: a batch that overtakes another of its partition when a mute begins or ends, with several in
    flight, refused ones among them."""
    options = {f"{BREAKER}trigger_message_count": 8, **QUICK}
    with task(cluster, batch_size=1_024, **options) as producer:
        numbers = itertools.count()

        def send_one() -> None:
            number = next(numbers)
            producer.send(rows(number, 1))
            producer.send(rows(number, 1, partition=1))

        def send_until(condition: Callable[[], object], what: str) -> None:
            repeat_until(condition, send_one, what, PATIENCE_S, 0.001)

        send_until(lambda: len(written(cluster)) > 20, "both brokers are known")
        for _ in range(2):
            cluster.freeze(0)
            send_until(lambda: mutes(producer), "the frozen broker is muted")
            cluster.thaw(0)
            send_until(lambda: not mutes(producer), "it is back")
            cluster.script(PRODUCE, *[OK, error(19), error(19), OK, error(20, append=True)] * 5, node_id=0)
            done = len(written(cluster))
            send_until(lambda had=done: len(written(cluster)) > had + 30, "some are refused, some written")
        result = producer.finish()
        count = next(numbers)
    assert written(cluster) == written(cluster, 1) == list(range(count))
    assert result.breaker_trips >= 2
    assert result.retries > 0


def test_one_request_to_a_frozen_broker_is_enough_to_mute_it(cluster: FakeCluster) -> None:
    """Catches: a sender that sleeps until the response, though the breaker has a deadline for it."""
    with task(cluster, **QUICK) as producer:
        producer.sender.max_poll_ms = 1e9
        for partition in range(3):
            producer.send(rows(0, 1, partition=partition))
        until(lambda: all(written(cluster, p) for p in range(3)), "all brokers are known")
        cluster.freeze(0)
        producer.send(rows(1, 1))
        until(lambda: mutes(producer), "it is muted, and no other row woke the sender")
        cluster.thaw(0)
        producer.finish()


class MutesPartitionZero(IdleBreaker):
    """A user's class: partition 0 is muted from its first batch on."""

    def configure(self, configs: Mapping[str, str]) -> None:
        self.after = int(configs["after.rows"])

    def on_complete(
        self, context: ProducerStatusContext, topic_partition: TopicPartition, exception: Exception | None
    ) -> bool:
        if topic_partition == P0 and context.record_count >= self.after:
            self.manager.mute(topic_partition, "enough")
            return True
        return False


def test_a_users_class_decides(cluster: FakeCluster) -> None:
    options = {
        f"{BREAKER}class": f"{__name__}.MutesPartitionZero",
        f"{BREAKER}after_rows": 10,
        f"{BREAKER}mute_retry_interval": 100,
    }
    with task(cluster, **options) as producer:
        producer.send(rows(0, 10))
        until(lambda: P0 in producer.breaker.mutes, "it is muted")  # type: ignore[union-attr]
        producer.send(rows(10, 5))
        result = producer.finish()
    assert written(cluster) == list(range(15))
    assert (result.breaker_trips, result.breaker_probes) == (1, 1)
