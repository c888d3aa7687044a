"""How a task ends: killed, throttled, on a broker that is too old, with brokers that take nothing."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pytest

import kafka_sink
from kafka_sink import clock
from kafka_sink.clock import BROKER, MEMORY, METADATA
from kafka_sink.dead_letters.rejected_rows import RejectedRows
from kafka_sink.engine.identity import ProducerIdentity
from kafka_sink.engine.responses import ResponseHandler
from kafka_sink.engine.sender import Sender
from kafka_sink.errors import BrokerVersionError, DeliveryError, KafkaSinkError
from kafka_sink.network.client import NetworkClient
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.spark import executor_connection
from kafka_sink.spark.executor_connection import watched
from kafka_sink.spark.write import PlannedWrite
from kafka_sink.task.producer import LIVE_PRODUCERS, Producer
from kafka_sink.task.producer_cache import PRODUCERS, task_producer
from kafka_sink.transactions.task_attempt import INIT_TIME_METRIC, SEND_OFFSETS_TIME_METRIC
from tests.support.commands import interruptible, printed_by
from tests.support.fake_broker import INIT_PRODUCER_ID, PRODUCE, FakeCluster
from tests.support.fake_replies import Reply, error
from tests.support.forked import in_a_fork
from tests.support.rejected_rows import rejected_rows
from tests.support.scripted_cluster import TOPIC, rows, send, sender_threads, task, task_options, written
from tests.support.sink_time import slow_until
from tests.support.strategy import forced
from tests.support.surroundings import Environ
from tests.support.telemetry_messages import GET_SUBSCRIPTIONS, PUSH, Wanted
from tests.support.waiting import throughout, until, within


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster({TOPIC: 4}, brokers=2) as running:
        yield running


def assert_nothing_is_left(cluster: FakeCluster, producer: Producer) -> None:
    assert sender_threads() == []
    metrics = producer.accumulator.allocator.pool.metrics()
    assert (metrics.buffer_available_bytes, metrics.heap_bytes) == (metrics.buffer_total_bytes, 0)
    assert metrics.waiting_threads == 0
    assert not producer.accumulator.live
    assert producer.accumulator.incomplete == 0
    for node in (0, 1):
        cluster.thaw(node)  # a frozen broker does not look at its connections either
    until(lambda: cluster.connections() == 0, "the end of all connections")


@contextmanager
def ends_with(
    kind: type[BaseException], said: str | None, cluster: FakeCluster, **options: object
) -> Iterator[Producer]:
    """A task that ends with this error, and leaves nothing behind."""
    with pytest.raises(kind, match=said), task(cluster, **options) as producer:
        yield producer
    assert_nothing_is_left(cluster, producer)


# -- killed -------------------------------------------------------------------------------------------


def _in_the_wait_for_memory(cluster: FakeCluster, producer: Producer) -> None:
    cluster.freeze(0)
    for start in range(0, 100_000, 200):
        producer.send(rows(start, 200))


def _in_the_wait_for_responses(cluster: FakeCluster, producer: Producer) -> None:
    cluster.freeze(0)
    producer.send(rows(0, 50))
    producer.finish()


def _in_the_wait_for_metadata(cluster: FakeCluster, producer: Producer) -> None:
    cluster.freeze(0)
    cluster.freeze(1)
    producer.send(rows(0, 50))


Work = Callable[[FakeCluster, Producer], None]
WAITS: dict[Work, str] = {
    _in_the_wait_for_memory: MEMORY,
    _in_the_wait_for_responses: BROKER,
    _in_the_wait_for_metadata: METADATA,
}
# Far below what a task waits for at most, a minute or two by default.
SOON_S = 40.0
LITTLE_MEMORY: dict[str, object] = {"buffer_memory": 65_536, "batch_size": 4_096}


@pytest.mark.parametrize(
    ("work", "logged"),
    [
        (_in_the_wait_for_memory, r"waits for memory: .* use all of kafka\.buffer\.memory = 65536 bytes"),
        (
            _in_the_wait_for_responses,
            r"waits for acknowledgements \(batches without one: 1; brokers: .* = 1500 ms",
        ),
        (_in_the_wait_for_metadata, r"waits for metadata of topic t \(no response; brokers: 127\.0\.0\.1:"),
        (
            lambda _, producer: producer.send(rows(0, 1, partition=99)),
            r"waits for partition 99 of topic t, which has 4 partitions, and fails after kafka\.max\.block",
        ),
    ],
)
def test_a_long_wait_is_logged_with_what_it_is_for(
    cluster: FakeCluster,
    work: Work,
    logged: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: 60 s without a line for a row with a partition, or a topic, that does not exist."""
    monkeypatch.setattr(clock, "WAIT_LOGGED_MS", 0.0)
    monkeypatch.setattr(clock, "WAIT_LOGGED_AGAIN_MS", 0.0)
    bounds = {"max_block_ms": 700, "delivery_timeout_ms": 1500, "request_timeout_ms": 1000}

    def is_logged() -> bool:
        return any(re.match(logged, line) for line in caplog.messages)

    def run() -> None:
        with slow_until(is_logged), task(cluster, **LITTLE_MEMORY, **bounds) as producer:
            if work is not _in_the_wait_for_metadata:
                producer.send(rows(0, 1))
                producer.flush()
            work(cluster, producer)

    with pytest.raises(KafkaSinkError):
        run()
    assert is_logged(), caplog.text


def once_it_waits(producer: Producer, state: str, act: Callable[[], None]) -> None:
    """Does this on another thread as soon as the task waits."""

    def wait() -> None:
        until(lambda: producer.activity.current[0] == state, f"the wait for {state}")
        act()

    threading.Thread(target=wait).start()


def test_a_wait_for_responses_is_one_wait_however_often_the_task_looks(cluster: FakeCluster) -> None:
    """Catches: the live view says that a task has waited for a second at most, as its look at the sender's
    thread began a new wait."""
    began: set[float] = set()

    def is_one() -> bool:
        began.add(producer.activity.current[1])
        return len(began) == 1

    def thaw() -> None:
        within(lambda: not is_one(), 0.2)
        cluster.thaw(0)

    with task(cluster) as producer:
        producer.watch_ms = 5.0
        cluster.freeze(0)
        once_it_waits(producer, BROKER, thaw)
        producer.send(rows(0, 50))
        assert producer.finish().records == 50
    assert len(began) == 1


def test_rows_behind_a_flush_linger_again(cluster: FakeCluster) -> None:
    """Catches: after a flush every row went in a request of its own."""
    with task(cluster, linger_ms=60_000) as producer:
        producer.send(rows(0, 3))
        producer.flush()
        producer.send(rows(3, 2))
        throughout(lambda: producer.acknowledged == 3, 0.3, "the rows linger")
        assert producer.finish().records == 5


@pytest.mark.usefixtures("allocation_strategy")
@pytest.mark.parametrize("work", WAITS, ids=lambda w: w.__name__)
def test_a_task_that_is_interrupted_leaves_nothing_behind(cluster: FakeCluster, work: Work) -> None:
    sent_at: list[float] = []

    # Once, and only while the task waits. Python drops what is raised in a callback of the garbage collector,
    # and a second interrupt would end the cleaning up.
    def interrupt() -> None:
        sent_at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    with interruptible(), ends_with(KeyboardInterrupt, None, cluster, **LITTLE_MEMORY) as producer:
        once_it_waits(producer, WAITS[work], interrupt)
        work(cluster, producer)
    assert time.monotonic() - sent_at[0] < SOON_S


@pytest.mark.parametrize("work", WAITS, ids=lambda w: w.__name__)
def test_a_task_whose_executor_hangs_up_ends_at_once_and_leaves_nothing_behind(
    cluster: FakeCluster, work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    jvm, worker = socket.socketpair()
    hung_up: list[float] = []

    def hang_up() -> None:
        hung_up.append(time.monotonic())
        jvm.close()

    said = "Spark's executor closed its connection"
    with (
        worker,
        ends_with(DeliveryError, said, cluster, **LITTLE_MEMORY) as producer,
        watched(worker.fileno(), producer.abort),
    ):
        # A task that nobody wakes would look by itself every second.
        producer.watch_ms = 60_000.0
        once_it_waits(producer, WAITS[work], hang_up)
        work(cluster, producer)
    assert time.monotonic() - hung_up[0] < SOON_S
    assert "Sending has stopped: of" in caplog.text


def test_unsent_rows_are_never_sent_after_the_executor_hung_up(cluster: FakeCluster) -> None:
    jvm, worker = socket.socketpair()
    first, second = rows(0, 10), rows(10, 10, partition=2)  # both led by the broker that freezes
    options = parse(
        {
            "kafka.bootstrap.servers": cluster.bootstrap_servers,
            "topic": TOPIC,
            "kafka.linger.ms": "0",
            "kafka.max.in.flight.requests.per.connection": "1",
        }
    ).options
    plan = ColumnPlan.of([("value", "binary"), ("partition", "int")], TOPIC)

    def batches() -> Iterator[pa.RecordBatch]:
        warm = rows(100, 1)
        yield warm
        until(lambda: written(cluster) == [100], "a connection that is up")
        cluster.freeze(0)
        yield first
        (producer,) = LIVE_PRODUCERS.values()
        until(lambda: producer.accumulator.unacknowledged_records() == 10, "the first rows are in flight")
        yield second
        jvm.close()  # what a reader takes for the end of the rows
        thawing.start()

    # For a task that did not notice, and would wait for responses.
    thawing = threading.Timer(20.0, cluster.thaw, [0])
    with (
        patch.object(executor_connection, "executor_socket", worker.fileno),
        worker,
        pytest.raises(KafkaSinkError, match="Spark's executor closed its connection"),
    ):
        PlannedWrite(options, plan).write(batches())
    thawing.cancel()
    cluster.thaw(0)
    until(lambda: cluster.connections() == 0, "the end of all connections")
    assert written(cluster, 2) == []


def dies_while_it_writes_into_batches(
    cluster: FakeCluster, before: Callable[[Producer], None] = lambda _: None
) -> None:
    """A task with an open batch, and nothing is left of it. ``before`` is called just then."""

    def dying(*_: object) -> None:
        before(producer)
        raise KeyboardInterrupt

    with ends_with(KeyboardInterrupt, None, cluster) as producer:
        producer.send(rows(0, 1))
        with patch("kafka_sink.engine.appender.encoder.encode", dying):
            producer.send(rows(1, 50))


@pytest.mark.usefixtures("allocation_strategy")
def test_a_task_that_dies_while_it_writes_into_batches_leaves_nothing_behind(cluster: FakeCluster) -> None:
    dies_while_it_writes_into_batches(cluster)


InsteadOfPoll = Callable[[Callable[..., object]], None]


@pytest.fixture
def instead_of_poll(monkeypatch: pytest.MonkeyPatch) -> InsteadOfPoll:
    """Every sender's thread calls this from then on."""
    return lambda call: monkeypatch.setattr(NetworkClient, "poll", call)


def breaking(*_: object) -> None:
    raise RuntimeError("a bug")


def test_a_sender_that_breaks_down_fails_the_task_and_gives_all_back(cluster: FakeCluster) -> None:
    said = r"the sender stopped: RuntimeError\('a bug'\)"
    with (
        ends_with(DeliveryError, said, cluster) as producer,
        patch.object(ResponseHandler, "on_produce", breaking),
    ):
        producer.send(rows(0, 50))
        producer.finish()


def test_a_sender_that_breaks_down_before_the_first_task_begins_says_why(
    cluster: FakeCluster, instead_of_poll: InsteadOfPoll
) -> None:
    instead_of_poll(breaking)
    producer = Producer(parse({"kafka.bootstrap.servers": cluster.bootstrap_servers}).options)
    try:
        producer.sender.join(60)
        producer.begin()
        with pytest.raises(DeliveryError, match=r"the sender stopped: RuntimeError\('a bug'\)"):
            producer.check()
    finally:
        producer.close()


def test_memory_held_when_the_sender_broke_down_is_returned_with_the_task(
    cluster: FakeCluster, instead_of_poll: InsteadOfPoll
) -> None:
    def ends_its_sender(producer: Producer) -> None:
        instead_of_poll(breaking)
        producer.network.wakeup()
        producer.sender.join(60)
        assert producer.accumulator.live, "the task still writes into it"

    dies_while_it_writes_into_batches(cluster, ends_its_sender)


def test_a_sender_that_ends_late_gives_everything_back_itself(
    cluster: FakeCluster, instead_of_poll: InsteadOfPoll
) -> None:
    stuck, free = threading.Event(), threading.Event()
    poll = NetworkClient.poll

    def sticking(network: NetworkClient, timeout_ms: float, now_ms: float) -> object:
        stuck.set()
        free.wait(60)
        return poll(network, timeout_ms, now_ms)

    with ends_with(ValueError, "the task fails", cluster, linger_ms=10_000) as producer:
        producer.send(rows(0, 50))
        instead_of_poll(sticking)
        producer.network.wakeup()
        assert stuck.wait(60)
        producer.sender.close(1)
        assert producer.accumulator.live
        threading.Timer(0.1, free.set).start()
        raise ValueError("the task fails")


@pytest.mark.usefixtures("allocation_strategy")
def test_a_lost_task_does_not_wait_for_memory(cluster: FakeCluster) -> None:
    """Nothing more of it is sent, so no memory would come free. The error must name the first cause."""
    cluster.freeze(1)
    cluster.script(PRODUCE, error(87, delay_ms=400), node_id=0)
    started = time.monotonic()
    with ends_with(DeliveryError, r"t-0.*error 87.*5 failed", cluster, **LITTLE_MEMORY) as producer:
        producer.send(rows(0, 5, partition=0))
        for start in range(5, 805, 200):
            producer.send(rows(start, 200, partition=1))
        # More than comes free with the batch that fails.
        large = pa.array([bytes(30_000)] * 3, pa.binary())
        producer.send(rows(805, 3, partition=1).set_column(0, "value", large))
    assert time.monotonic() - started < SOON_S


# -- used again, or not -------------------------------------------------------------------------------


def test_a_producer_id_serves_the_next_task_while_all_is_well(cluster: FakeCluster) -> None:
    requests = [send(cluster, rows(start, 5)).metadata_requests for start in (0, 5, 10)]
    assert requests == [1, 0, 0], "counted from each task's begin"
    assert written(cluster) == list(range(15))
    assert len(cluster.received(INIT_PRODUCER_ID)) == 1
    assert [batch.base_sequence for batch in cluster.batches(TOPIC, 0)] == [0, 5, 10]


@pytest.mark.usefixtures("allocation_strategy")
def test_metrics_come_with_the_result_and_while_the_producer_lives(
    cluster: FakeCluster, allocation_strategy: str
) -> None:
    assert kafka_sink.producer_metrics() == []
    with task(cluster, linger_ms=10_000, batch_size=65_536) as producer:
        producer.send(rows(0, 50))
        (now,) = kafka_sink.producer_metrics()
        result = producer.finish()
    size = len(cluster.batches(TOPIC, 0)[0].data)
    held = 65_536 if allocation_strategy == "full" else 16_384
    assert now["buffer-used-bytes"] == held
    assert (result.metrics["buffer-used-bytes"], result.metrics["buffer-used-bytes-max"]) == (0, held)
    assert result.metrics["buffer-saved-bytes-max"] == 65_536 - held
    assert result.metrics["batch-size-avg"] == result.metrics["batch-size-max"] == size
    assert result.metrics["compression-rate-avg"] == 1.0
    assert result.metrics["record-size-avg"] <= result.metrics["record-size-max"] < 100
    assert result.metrics["metadata-wait-time-ns-total"] > 0
    breaker = ("muted-partitions", "breaker-trips-total", "breaker-probes-total")
    assert [result.metrics[name] for name in breaker] == [0] * 3
    # At rest nothing is kept for reuse.
    (metrics,) = kafka_sink.producer_metrics()
    age = metrics["metadata-age"]
    assert age >= result.metrics["metadata-age"] >= 0
    assert metrics == {**result.metrics, "buffer-allocated-bytes": 0, "metadata-age": age}
    second = send(cluster, rows(50, 5), linger_ms=10_000, batch_size=65_536)
    assert second.metrics["batch-size-avg"] < size
    PRODUCERS.close()
    assert kafka_sink.producer_metrics() == []


def test_between_tasks_too_metrics_are_pushed() -> None:
    """Catches: a producer that rests for a moment counts as one that has had no task for long."""
    with FakeCluster({TOPIC: 1}, versions={GET_SUBSCRIPTIONS: (0, 0), PUSH: (0, 0)}) as cluster:
        cluster.want_metrics(Wanted(interval_ms=100))
        send(cluster, rows(0, 5))
        before = len(cluster.received(PUSH))
        until(lambda: len(cluster.received(PUSH)) >= before + 2, "pushes")
        assert not any(one.body.terminating for one in cluster.received(PUSH))


def test_a_producer_at_rest_raises_no_heap_limit(cluster: FakeCluster, environ: Environ) -> None:
    """One with `full` may hold as much beyond the pool as in it, others a quarter. They share the pool."""
    environ(**{forced.VARIABLE: None})
    limits = []
    for strategy in ("full", "incremental", "full"):
        # A pool of its own: other tests' producers may still be there.
        memory = {"buffer_memory": 48 << 20, "buffer_memory_allocation_strategy": strategy}
        with task(cluster, **memory) as producer:
            producer.send(rows(0, 5))
            pool = producer.accumulator.allocator.pool
            limits.append(pool.heap_limit_bytes >> 20)
            producer.finish()
    assert limits == [48, 12, 48]


def test_a_producer_with_something_unresolved_is_not_used_again(cluster: FakeCluster) -> None:
    with patch.object(ProducerIdentity, "settled", new=False):
        send(cluster, rows(0, 5))
    assert sender_threads() == []
    send(cluster, rows(5, 5))
    assert len(cluster.received(INIT_PRODUCER_ID)) == 2


def test_a_sender_that_died_at_rest_is_replaced(cluster: FakeCluster, instead_of_poll: InsteadOfPoll) -> None:
    send(cluster, rows(0, 5))
    poll = NetworkClient.poll
    instead_of_poll(breaking)
    for thread in sender_threads():
        assert isinstance(thread, Sender)
        thread.join(60)
    instead_of_poll(poll)
    assert sender_threads() == []
    assert send(cluster, rows(5, 5)).records == 5


# -- throttled ----------------------------------------------------------------------------------------


def test_a_throttled_broker_gets_no_request_until_the_time_has_passed(cluster: FakeCluster) -> None:
    with task(cluster) as producer:
        cluster.script(PRODUCE, Reply(throttle_ms=500), node_id=0)
        began = time.monotonic()
        producer.send(rows(0, 5))
        until(lambda: producer.acknowledged == producer.rows, "the throttling response")
        producer.send(rows(5, 5))
        producer.send(rows(100, 5, partition=1))
        until(lambda: len(written(cluster, 1)) == 5, "the other broker's rows")
        # Unless the machine took as long for that as the throttling lasts.
        assert written(cluster) == [0, 1, 2, 3, 4] or time.monotonic() - began > 0.5
        producer.finish()
        assert 0.5 <= time.monotonic() - began < SOON_S
    assert written(cluster) == list(range(10))


# -- too old ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("api", "versions", "said"),
    [
        (PRODUCE, (0, 2), r"speaks Produce in versions.*this sink in 3 to 13"),
        (PRODUCE, (14, 99), r"speaks Produce in versions.*this sink in 3 to 13"),
        (PRODUCE, (0, -1), r"speaks Produce in versions.*this sink in 3 to 13"),
        (INIT_PRODUCER_ID, (7, 9), r"^delivery failed: broker .* speaks InitProducerId in versions 7 to 9"),
    ],
)
def test_a_broker_without_a_common_version_is_a_final_error(
    api: int, versions: tuple[int, int], said: str
) -> None:
    with FakeCluster({TOPIC: 1}, versions={api: versions}) as old:
        started = time.monotonic()
        with pytest.raises(DeliveryError, match=said) as caught:
            send(old, rows(0, 5))
        assert time.monotonic() - started < SOON_S
        assert isinstance(caught.value.__cause__, BrokerVersionError)


def test_another_bootstrap_address_is_tried_first() -> None:
    with FakeCluster({TOPIC: 1}, versions={PRODUCE: (0, 2)}) as old, FakeCluster({TOPIC: 1}) as new:
        both = f"{old.bootstrap_servers},{new.bootstrap_servers}"
        for start in range(0, 20, 5):
            assert send(new, rows(start, 5), bootstrap_servers=both).records == 5
            PRODUCERS.close()
        assert written(new) == list(range(20))


# -- brokers that take nothing ------------------------------------------------------------------------


def keyless(start: int, count: int) -> pa.RecordBatch:
    batch = rows(start, count)
    return batch.set_column(1, "partition", pa.nulls(count, pa.int32()))


def test_keyless_rows_avoid_a_broker_that_has_taken_nothing_for_long(cluster: FakeCluster) -> None:
    options = {"partitioner_availability_timeout_ms": 100, "batch_size": 2_000}
    with task(cluster, **options) as producer:
        producer.send(keyless(0, 400))
        until(lambda: producer.acknowledged == producer.rows, "a healthy start")
        cluster.stop(0)
        producer.send(rows(400, 5))
        sender = producer.sender
        until(lambda: sender.unavailable == {0}, "the broker's absence to be noticed")
        before = {partition: len(written(cluster, partition)) for partition in range(4)}
        producer.send(keyless(405, 400))
        until(
            lambda: sum(len(written(cluster, p)) for p in (1, 3)) == before[1] + before[3] + 400, "all rows"
        )
        cluster.start(0)
        producer.finish()
        assert sender.unavailable == set()
    assert len(written(cluster, 0)) == before[0] + 5
    assert len(written(cluster, 2)) == before[2]


def test_an_error_says_what_was_acknowledged_failed_unacknowledged_and_never_sent(
    cluster: FakeCluster,
) -> None:
    with task(cluster, max_in_flight_requests_per_connection=1) as producer:
        producer.send(rows(0, 7, partition=1))
        until(lambda: producer.acknowledged == producer.rows, "the acknowledged rows")
        cluster.freeze(1)
        producer.send(rows(7, 6, partition=1))
        until(lambda: producer.accumulator.unacknowledged_records() == 6, "the unacknowledged rows")
        producer.send(rows(13, 4, partition=3))  # its broker is busy
        cluster.script(PRODUCE, error(87), node_id=0)

        def send_and_finish() -> None:
            producer.send(rows(17, 5, partition=0))
            producer.finish()

        with pytest.raises(DeliveryError) as caught:
            send_and_finish()
        cluster.thaw(1)
    counts = "[7 rows acknowledged, 5 failed, 6 sent without a response, 4 never sent]"
    assert counts in str(caught.value)


def test_rows_refused_while_others_are_sent_are_counted(cluster: FakeCluster) -> None:
    """Catches: a count that two threads change, so that the task fails though each row is accounted for."""
    options = parse({**task_options(cluster), "errors.tolerance": "all"}).options
    with task_producer(
        options, ColumnPlan.of([("value", "binary"), ("partition", "int")], TOPIC)
    ) as producer:

        class Meanwhile(RejectedRows):
            """The task's thread sends in the middle of a count."""

            @property
            def count(self) -> int:
                if not producer.rows:
                    producer.send(rows(0, 5))
                return super().count

        row = rejected_rows([b"x"], TOPIC)
        producer.reject(Meanwhile(*(getattr(row, field.name) for field in dataclasses.fields(row))))
        assert producer.rows == 6
        result = producer.finish()
    assert (result.records, result.skipped) == (5, 1)


# -- the producers of a process -------------------------------------------------------------------------

NO_BROKER = parse({"kafka.bootstrap.servers": "127.0.0.1:1"}).options


def test_producers_that_live_are_asked() -> None:
    first, second = Producer(NO_BROKER), Producer(NO_BROKER)
    assert len(kafka_sink.producer_metrics()) == 2
    second.close()
    assert len(kafka_sink.producer_metrics()) == 1
    sender = first.sender
    del first
    gc.collect()
    assert kafka_sink.producer_metrics() == []
    sender.close(1000, abort=True)
    # Those of the parent do not live in a fork.
    producer = Producer(NO_BROKER)
    assert in_a_fork(lambda: kafka_sink.producer_metrics() == [])
    producer.close()


def test_the_page_names_every_metric_and_no_other() -> None:
    producer = Producer(NO_BROKER)
    names = {*producer.metrics(), INIT_TIME_METRIC, SEND_OFFSETS_TIME_METRIC}
    producer.close()
    page = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
    section = page.read_text().split("## Metrics of a producer")[1].split("\n## ")[0]
    assert set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", section)) == names


def test_asking_where_no_task_has_run_loads_nothing() -> None:
    ask = "import sys, kafka_sink; assert kafka_sink.producer_metrics() == []; print('numpy' in sys.modules)"
    assert printed_by(ask) == "False"
    assert "producer_metrics" in kafka_sink.__all__
