"""The table of broker responses, row by row, from the task's rows to the brokers' logs and back.

What a response means is tested in test_response_classifier.py, sequences, splits and restarts in the model of
tests/scenarios/test_batch_lifecycle.py; here, the whole way.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from kafka_sink.errors import DeliveryError, RecordTooLargeError
from kafka_sink.task.producer import LIVE_PRODUCERS
from tests.support.fake_broker import METADATA, PRODUCE, FakeCluster
from tests.support.fake_log import numbers_in
from tests.support.fake_replies import SWALLOWED, Refuse, Reply, error
from tests.support.partitioners import row_batch
from tests.support.scripted_cluster import (
    SECRET,
    TOPIC,
    attempts,
    finish_with,
    marks,
    rows,
    send,
    task,
    written,
)
from tests.support.sink_time import slow_time, slow_until
from tests.support.surroundings import Environ
from tests.support.waiting import until


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster({TOPIC: 2}, brokers=2) as running:
        yield running


# Stale metadata, what passes, doubt with and without an append, no answer; the classifier's test has all.
STALE = error(6)
REPLIES = [STALE, error(2), error(7), error(56), error(20, append=True), Refuse(), SWALLOWED]


@pytest.mark.parametrize("reply", REPLIES, ids=str)
def test_the_same_batch_goes_again_with_its_sequence(cluster: FakeCluster, reply: Reply) -> None:
    cluster.script(PRODUCE, reply)
    result = send(cluster, rows(0, 10))
    assert (result.records, result.retries) == (10, 1)
    assert written(cluster) == list(range(10))
    first, second = attempts(cluster)
    assert marks(first) == marks(second)
    assert first.data == second.data
    if reply is STALE:
        # The batch may have been faster.
        until(lambda: len(cluster.received(METADATA)) >= 2, "another look at the topic")


@pytest.mark.parametrize("leader_hint", [True, False])
def test_a_leader_that_was_deposed_is_left_for_the_next(cluster: FakeCluster, leader_hint: bool) -> None:
    """It had appended the batch and said so by its offset; the follower that took over has it too."""
    with task(cluster) as producer:
        producer.send(rows(0, 5))
        until(lambda: written(cluster) == [0, 1, 2, 3, 4], "the first batch")
        deposed = error(6, append=True, tell_offset=True, leader=(1, 1) if leader_hint else None)
        cluster.script(PRODUCE, deposed, node_id=0)
        producer.send(rows(5, 5))
        until(lambda: len(written(cluster)) == 10, "the second batch")
        cluster.move_leader(TOPIC, 0, 1)
        assert producer.finish().records == 10
    assert written(cluster) == list(range(10))
    assert cluster.received(PRODUCE)[-1].node_id == 1


def test_a_recreated_topic_is_looked_up_by_name(cluster: FakeCluster) -> None:
    with task(cluster) as producer:
        producer.send(rows(0, 5))
        until(lambda: written(cluster) == [0, 1, 2, 3, 4], "the first batch")
        until(lambda: producer.acknowledged == producer.rows, "its acknowledgement")
        cluster.create_topic(TOPIC, 2)
        producer.send(rows(5, 5))
        result = producer.finish()
    assert (result.records, written(cluster)) == (10, [5, 6, 7, 8, 9])


def test_a_recreated_topic_gets_its_first_batch_alone_where_requests_name_topics() -> None:
    """Catches: the second batch was written before the first, which was refused, and failed the task."""
    with FakeCluster({TOPIC: 1}, versions={PRODUCE: (3, 12)}) as cluster:
        with task(cluster, metadata_max_age_ms=100, batch_size=1) as producer:
            producer.send(rows(0, 1))
            until(lambda: producer.acknowledged == producer.rows, "its acknowledgement")
            cluster.create_topic(TOPIC, 1)
            seen = len(cluster.received(METADATA))
            until(lambda: len(cluster.received(METADATA)) > seen + 1, "the new topic's metadata")
            cluster.script(PRODUCE, error(6, delay_ms=200))
            producer.send(rows(1, 4))
            assert producer.finish().records == 5
        assert written(cluster) == [1, 2, 3, 4]


def test_a_topic_that_comes_late_is_waited_for() -> None:
    with FakeCluster({TOPIC: 1}) as cluster:
        cluster.script(METADATA, error(3), error(3), error(5))
        assert send(cluster, rows(0, 5)).records == 5


def test_the_error_of_a_large_row_leaves_out_no_part_of_the_sum(cluster: FakeCluster) -> None:
    """Catches: "a record of 1048517 bytes, more than kafka.max.request.size = 1048576"."""
    limit = 2_000
    for size in range(limit - 80, limit):
        with task(cluster, max_request_size=limit) as producer:
            try:
                producer.send(row_batch([b"v" * size], [0]))
                assert producer.finish().records == 1
            except RecordTooLargeError as error:
                total, key, value, rest = map(
                    int, re.findall(r"up to (\d+) bytes \(key (\d+), value (\d+), .* (\d+)\)", str(error))[0]
                )
                assert total == key + value + rest > limit
                return
    raise AssertionError("no row was too large")


def test_a_record_too_large_fails_by_size_and_limit() -> None:
    with (
        FakeCluster({TOPIC: 1}, max_message_bytes=80) as cluster,
        pytest.raises(
            DeliveryError, match=r"t-0.*a record of \d+ bytes.*max\.message\.bytes.*set errors\.tolerance=all"
        ) as caught,
    ):
        send(cluster, rows(0, 1))
    assert isinstance(caught.value.__cause__, RecordTooLargeError)


IN_DOUBT = {
    "too large": ([SWALLOWED, error(10)], r"t-0: .*error 10.*\[0 rows acknowledged, 10 failed"),
    # Catches: rows written twice, as the offset beside an error did not count as a sign of a write.
    "too large after a deposed leader had it": (
        [error(6, append=True, tell_offset=True), error(10)],
        r"t-0: .*error 10",
    ),
    "lost place": ([SWALLOWED, error(45)], r"t-0: .*error 45.*may have been written"),
}


@pytest.mark.parametrize(("replies", "said"), IN_DOUBT.values(), ids=IN_DOUBT)
def test_a_refusal_after_an_attempt_in_doubt_fails_the_task(
    cluster: FakeCluster, replies: list[Reply], said: str
) -> None:
    cluster.script(PRODUCE, *replies)
    with pytest.raises(DeliveryError, match=said):
        send(cluster, rows(0, 10))
    assert len(attempts(cluster)) == 2
    assert written(cluster) == list(range(10)), "by the first attempt"


def test_a_bad_network_before_a_small_limit_costs_some_attempts_and_not_all(
    tmp_path: Path, environ: Environ
) -> None:
    """Every attempt's first batch meets a broken connection. One that may have been written is not split when
    it turns out to be too large; so what that taught must reach the next attempt, in another process."""
    environ(SPARK_LOCAL_DIRS=str(tmp_path))
    with FakeCluster({TOPIC: 1}, max_message_bytes=20_000) as cluster:
        failures = 0
        for _ in range(4):
            cluster.script(PRODUCE, Refuse())
            try:
                result = send(cluster, rows(0, 8_000))
                break
            except DeliveryError:
                failures += 1
        assert failures < 4
        assert (result.records, result.splits) == (8_000, 0)


def test_a_duplicate_is_a_success_without_an_offset(cluster: FakeCluster) -> None:
    cluster.script(PRODUCE, error(46, append=True))
    result = send(cluster, rows(0, 5))
    assert (result.records, result.retries) == (5, 0)
    assert result.partitions[0].offset_ranges == ()
    assert written(cluster) == [0, 1, 2, 3, 4]


def test_a_final_response_fails_the_task_with_cause_place_and_counts(cluster: FakeCluster) -> None:
    with task(cluster) as producer:
        producer.send(rows(0, 7, partition=1))
        until(lambda: producer.acknowledged == producer.rows, "the first acknowledgement")
        cluster.script(PRODUCE, error(29, message="in the broker's words"))
        producer.send(rows(7, 5))
        with pytest.raises(
            DeliveryError, match=r"delivery to t-0 failed.*may not write to this topic"
        ) as caught:
            producer.finish()
    text = str(caught.value)
    assert "in the broker's words" in text
    assert "[7 rows acknowledged, 5 failed, 0 sent without a response, 0 never sent]" in text
    assert SECRET not in text
    assert SECRET not in repr(caught.value.__cause__)


def test_a_batch_that_expires_behind_a_quota_says_so() -> None:
    with FakeCluster({TOPIC: 1}) as cluster:
        cluster.script(PRODUCE, Reply(throttle_ms=60_000))
        bounds = {"delivery_timeout_ms": 600, "request_timeout_ms": 500}
        with slow_time() as sinks, task(cluster, **bounds) as producer:
            producer.send(rows(0, 1))
            until(lambda: producer.acknowledged == producer.rows, "its acknowledgement")
            sinks.go_on()
            with pytest.raises(DeliveryError, match=r"throttled this task for 60\.0 s .*producer_byte_rate"):
                finish_with(producer, rows(1, 1))


def has_sent() -> bool:
    """Whether rows of a producer in this process are on their way."""
    return any(one.accumulator.unacknowledged_records() for one in list(LIVE_PRODUCERS.values()))


def test_delivery_timeout_after_a_send_fails_and_the_id_is_not_used_again(cluster: FakeCluster) -> None:
    options = {"request_timeout_ms": 300, "delivery_timeout_ms": 700}
    with slow_time():
        send(cluster, rows(0, 5), **options)
    cluster.freeze(0)
    expired = pytest.raises(
        DeliveryError, match=r"t-0 .*kafka\.delivery\.timeout\.ms = 700 ms, after \d+ attempt"
    )
    with slow_until(has_sent), expired:
        send(cluster, rows(5, 5), **options)
    cluster.thaw(0)
    with slow_time():
        send(cluster, rows(10, 5), **options)
    ids = {marks(batch)[0]: numbers_in(batch.data) for batch in cluster.batches(TOPIC, 0)}
    assert len(ids) == 2
    assert list(ids.values())[-1] == [10, 11, 12, 13, 14]


def test_a_lost_task_sends_nothing_more() -> None:
    # The last batch may only be sent after the response for the one before.
    one_at_a_time = {"max_in_flight_requests_per_connection": 1}
    with FakeCluster({TOPIC: 2}) as cluster, task(cluster, **one_at_a_time) as producer:
        producer.send(rows(0, 7))
        until(lambda: producer.acknowledged == producer.rows, "the first acknowledgement")
        cluster.freeze(0)
        cluster.script(PRODUCE, error(87))
        producer.send(rows(7, 5))
        until(lambda: producer.accumulator.unacknowledged_records() == 5, "a request in flight")
        producer.send(rows(12, 5, partition=1))
        cluster.thaw(0)
        until(lambda: producer.accumulator.deliveries.has_failed, "the failure")
        with patch.object(producer.sender, "run_once", wraps=producer.sender.run_once) as run_once:
            until(lambda: producer.network.wakeup() or run_once.call_count > 5, "some passes of the sender")
        with pytest.raises(DeliveryError, match="5 never sent"):
            producer.check()
    assert len(attempts(cluster)) == 2


def test_linger_ends_by_itself_while_the_task_gives_no_more_rows(cluster: FakeCluster) -> None:
    """Catches a sender that sleeps on, having heard of no new batch: its longest sleep is a minute here."""
    with task(cluster, linger_ms=30) as producer:
        producer.sender.max_poll_ms = 60_000.0
        for start in range(0, 20, 5):
            sent = time.monotonic()
            producer.send(rows(start, 5))
            until(lambda start=start: len(written(cluster)) == start + 5, "the batch")  # type: ignore[misc]
            assert time.monotonic() - sent < 30
        producer.finish()
