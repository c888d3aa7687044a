"""errors.tolerance=all: others are written once and in order, and each rejected row has its dead letter."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from kafka_sink.coordinator.live.messages import TaskIdentity
from kafka_sink.dead_letters.dead_letter_writer import DeadLetterWriter
from kafka_sink.engine.appender import RecordAppender
from kafka_sink.errors import DeliveryError, KafkaSinkError
from kafka_sink.model import TaskResult
from kafka_sink.options import parse
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.rows.column_plan import HEADERS_TYPE, ColumnPlan
from kafka_sink.spark.reading import send_tables
from kafka_sink.task.producer import Producer
from kafka_sink.task.producer_cache import task_producer
from local_kafka import LocalBroker
from tests.support.commands import run
from tests.support.fake_broker import METADATA, PRODUCE, FakeCluster
from tests.support.fake_replies import Reply, error
from tests.support.partitioners import row_batch
from tests.support.scripted_cluster import PLAN, TOPIC, attempts, finish_with, rows, task_options, written
from tests.support.topics import read_topic, save
from tests.support.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEAD_LETTERS = "dead-letters"
MIB = 1 << 20
NOT_LEADER_OR_FOLLOWER, TOPIC_AUTHORIZATION_FAILED = 6, 29
TOLERANT = {"errors.tolerance": "all", "errors.deadletterqueue.topic.name": DEAD_LETTERS}


def tolerant(
    cluster: FakeCluster, extra: dict[str, str] | None = None, **options: object
) -> AbstractContextManager[Producer]:
    raw = task_options(cluster, **options) | TOLERANT | (extra or {})
    return task_producer(parse(raw).options, PLAN, task=TaskIdentity("w", 7, 7))


def finished(
    cluster: FakeCluster,
    *batches: pa.RecordBatch | pa.Table,
    extra: dict[str, str] | None = None,
    **given: object,
) -> TaskResult:
    """The result of a task of these rows."""
    with tolerant(cluster, extra, **given) as producer:
        for batch in batches:
            producer.send(batch)
        return producer.finish()


def by_topic_column(
    cluster: FakeCluster, columns: list[tuple[str, str]], *batches: pa.RecordBatch, **more: str
) -> TaskResult:
    """As ``finished``, where rows name their topics, beside values and these columns."""
    raw = task_options(cluster) | {"errors.tolerance": "all"} | more
    del raw["topic"]
    plan = ColumnPlan.of([("value", "binary"), ("topic", "string"), *columns], None)
    with task_producer(parse(raw).options, plan) as producer:
        for batch in batches:
            producer.send(batch)
        return producer.finish()


def dead_letters_in(cluster: FakeCluster) -> int:
    return sum(batch.record_count for batch in cluster.batches(DEAD_LETTERS, 0))


def large(number: int, size: int, partition: int = 0) -> pa.RecordBatch:
    return row_batch([(b"<%d>" % number).ljust(size, b"x")], [partition])


BoundWaits = Callable[..., None]


@pytest.fixture
def bound_waits(monkeypatch: pytest.MonkeyPatch) -> BoundWaits:
    """How long a task waits for a topic that refuses it, and for a partition that is missing."""

    def bound(*, refused_ms: float | None = None, missing_ms: float | None = None) -> None:
        for name, wait_ms in (
            ("kafka_sink.clock.UNAUTHORIZED_TOPIC_MS", refused_ms),
            ("kafka_sink.dead_letters.row_rejection.PARTITION_WAIT_MS", missing_ms),
        ):
            if wait_ms is not None:
                monkeypatch.setattr(name, wait_ms)

    return bound


def test_a_record_too_large_for_its_topic_is_skipped_between_batches_in_flight() -> None:
    """The broker refuses all batches behind it, whose sequences are then too high."""
    with FakeCluster({TOPIC: 1, DEAD_LETTERS: 1}, max_message_bytes={TOPIC: 10_000}) as cluster:
        batches = [
            batch
            for number in range(0, 300, 30)
            for batch in (rows(number, 29), large(number + 29, 20_000 if number % 60 == 0 else 200))
        ]
        result = finished(cluster, *batches, batch_size=500)
        skipped = {number + 29 for number in range(0, 300, 60)}
        assert written(cluster) == [number for number in range(300) if number not in skipped]
        assert (result.records, result.skipped) == (295, 5)
        assert result.skip_reasons == {"RecordTooLargeError": 5}
        assert dead_letters_in(cluster) == 5


@pytest.mark.parametrize("skipped", [{1}, {2}, {1, 2, 3}, {1, 2, 3, 4}], ids=str)
def test_batches_in_flight_behind_a_skipped_record_are_written_next(skipped: set[int]) -> None:
    """Their sequences are too high. They get lower ones of the same epoch without a backoff or a retry."""
    with (
        FakeCluster({TOPIC: 1, DEAD_LETTERS: 1}, max_message_bytes={TOPIC: 10_000}) as cluster,
        tolerant(cluster, retry_backoff_ms=60_000, retry_backoff_max_ms=60_000, retries=2) as producer,
    ):
        producer.send(rows(0, 1))
        until(lambda: written(cluster) == [0] and not requests_in_flight(producer), "the first row")
        cluster.freeze(0)
        for number in range(1, 5):
            until(lambda count=number: in_flight(producer) == count - 1, "a request of its own")
            producer.send(large(number, 20_000) if number in skipped else rows(number, 1))
        cluster.thaw(0)
        result = producer.finish()
        assert written(cluster) == [number for number in range(5) if number not in skipped]
        assert result.skipped == len(skipped)
        assert result.elapsed_ms < 50_000
        assert {batch.producer_epoch for batch in attempts(cluster)} == {0}


def requests_in_flight(producer: Producer) -> int:
    """The number of requests in flight at broker 0."""
    return producer.network.connections[0].in_flight


def in_flight(producer: Producer) -> int:
    """The number of rows in flight, each in a request of its own."""
    return producer.accumulator.unacknowledged_records()


@pytest.mark.parametrize("idempotence", ["true", "false"])
def test_a_topic_that_refuses_this_login_gives_its_rows_to_the_dead_letters(
    idempotence: str, bound_waits: BoundWaits
) -> None:
    bound_waits(refused_ms=0.0)
    with FakeCluster({TOPIC: 1, DEAD_LETTERS: 1}) as cluster:
        cluster.script(PRODUCE, error(TOPIC_AUTHORIZATION_FAILED))
        with tolerant(cluster, enable_idempotence=idempotence) as producer:
            # A task that nobody wakes would look by itself every second.
            producer.watch_ms = 60_000.0
            producer.send(rows(0, 20))
            first = producer.finish()
        assert (first.records, first.skipped) == (0, 20)
        assert first.flush_ms < 30_000, "the wait ends with the last row"
        assert written(cluster) == []
        assert dead_letters_in(cluster) == 20
        again = finished(cluster, rows(20, 5), enable_idempotence=idempotence)
        assert again.skipped == 0, "counts restart"
        assert written(cluster) == list(range(20, 25))


def test_a_topic_that_is_refused_for_a_moment_gets_its_rows_and_spends_no_retry() -> None:
    """As by a broker that has not loaded its ACLs yet, to Metadata and to Produce requests."""
    with FakeCluster({TOPIC: 1, DEAD_LETTERS: 1}) as cluster:
        rejected = [error(TOPIC_AUTHORIZATION_FAILED)] * 3
        cluster.script(METADATA, *rejected[1:])
        cluster.script(PRODUCE, *rejected, error(NOT_LEADER_OR_FOLLOWER))
        assert finished(cluster, rows(0, 20), retries=1, retry_backoff_ms=1).skipped == 0
        assert written(cluster) == list(range(20))


@pytest.mark.parametrize("idempotence", ["true", "false"])
def test_refused_rows_that_wait_for_the_dead_letters_of_others_are_not_sent_again(
    idempotence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 MiB of rejected rows, of which 4 MiB are taken out of their batches at once."""
    with FakeCluster({TOPIC: 1, DEAD_LETTERS: 1}, max_message_bytes={TOPIC: 400_000}) as cluster:
        extra = {"kafka.retries": "1", "kafka.retry.backoff.ms": "1", "kafka.enable.idempotence": idempotence}
        with tolerant(cluster, extra=extra, batch_size=2_000_000, buffer_memory=64 * MIB) as producer:
            values = [(b"<%d>" % number).ljust(500_000, b"x") for number in range(24)]
            with monkeypatch.context() as slow:
                # Else a slow task writes dead letters as fast as rows are refused, before all are appended.
                slow.setattr(DeadLetterWriter, "write", lambda _: False)
                producer.send(row_batch(values, [0] * 24))
            dead_letters = producer.dead_letters
            assert dead_letters is not None
            until(
                lambda: not dead_letters.has_room and not requests_in_flight(producer),
                "as many rejected rows as may be",
            )
            # Where a rejected batch had spent retries while it waited, it would have none left for this.
            cluster.script(PRODUCE, error(NOT_LEADER_OR_FOLLOWER))
            producer.send(rows(24, 1))
            result = producer.finish()
        assert (result.records, result.skipped) == (1, 24)
        assert written(cluster) == [24]
        assert len(cluster.received(PRODUCE)) < 80, "a request for each time that a row's batch gets smaller"
        assert dead_letters_in(cluster) == 24


def test_refused_rows_get_their_dead_letters_while_the_task_waits_for_more_rows() -> None:
    """Catches: above 4 MiB they expired in their batches while Spark computed the next one."""
    values = [(b"<%d>" % number).ljust(500_000, b"x") for number in range(24)]
    with FakeCluster({TOPIC: 1, DEAD_LETTERS: 1}, max_message_bytes={TOPIC: 400_000}) as cluster:

        def batches() -> Iterator[pa.RecordBatch]:
            yield row_batch(values, [0] * 24)
            # Spark computes until all dead letters are there.
            until(lambda: dead_letters_in(cluster) == 24, "the dead letters")
            yield rows(24, 1)

        with tolerant(cluster, batch_size=2_000_000, buffer_memory=64 * MIB) as producer:
            send_tables(batches(), producer, PLAN, linger_ms=0)
            result = producer.finish()
        assert (result.records, result.skipped) == (1, 24)
        assert (written(cluster), dead_letters_in(cluster)) == ([24], 24)


@pytest.mark.parametrize("strategy", ["full", "incremental"])
def test_dead_letters_are_written_while_rows_wait_for_memory_that_refused_rows_hold(strategy: str) -> None:
    """The task's thread writes dead letters, and it waits for the memory of the rows of which they are: of
    8 MB in one table 4 MiB are taken out of their batches at once, and 1 MiB is in memory."""
    extra = {"kafka.buffer.memory.allocation.strategy": strategy}
    memory: dict[str, Any] = {"buffer_memory": MIB, "batch_size": MIB // 8, "max_block_ms": 30_000}
    some = [large(number, 10_000 if number % 5 else 200) for number in range(1_000)]
    with FakeCluster({TOPIC: 1, DEAD_LETTERS: 1}, max_message_bytes={TOPIC: 5_000}) as cluster:
        result = finished(cluster, pa.concat_batches(some), extra=extra, **memory)
        assert (result.records, result.skipped) == (200, 800)
        assert written(cluster) == list(range(0, 1_000, 5))
        assert dead_letters_in(cluster) == 800


def test_topics_that_stay_refused_and_partitions_that_are_missing_cost_one_wait_for_all(
    bound_waits: BoundWaits,
) -> None:
    bound_waits(refused_ms=800.0, missing_ms=800.0)
    names = [f"rejected-{number}" for number in range(40)]
    with FakeCluster({TOPIC: 1, DEAD_LETTERS: 1} | dict.fromkeys(names, 1)) as cluster:
        cluster.script(METADATA, *[error(TOPIC_AUTHORIZATION_FAILED)] * 1_000)
        table = pa.record_batch({"value": [b"v"] * 40, "topic": names})
        result = by_topic_column(cluster, [], table, table)
        assert result.skipped == 80
        assert 700 < result.elapsed_ms < 25_000, "forty waits are 32 s"
    partitions = pa.array([0] * 40 + [1] * 40, pa.int32())
    table = pa.record_batch({"value": [b"v"] * 80, "topic": names * 2, "partition": partitions})
    with FakeCluster(dict.fromkeys(names, 1)) as cluster:
        result = by_topic_column(cluster, [("partition", "int")], *[table] * 20)
        assert (result.records, result.skipped) == (800, 800)
        assert result.elapsed_ms < 25_000, "forty waits are 32 s"


def failure(cluster: FakeCluster, *batches: pa.RecordBatch, **options: str) -> str:
    """The error of a task that fails."""
    with pytest.raises(KafkaSinkError) as caught:
        finished(cluster, *batches, extra=options)
    return str(caught.value)


def test_dead_letters_that_are_refused_or_too_large_for_their_topic_fail_the_task(
    bound_waits: BoundWaits,
) -> None:
    """They must not become dead letters again, for ever. Several are split before."""
    bound_waits(refused_ms=0.0)
    with FakeCluster({TOPIC: 1, DEAD_LETTERS: 1}) as cluster:
        cluster.script(PRODUCE, error(TOPIC_AUTHORIZATION_FAILED), error(TOPIC_AUTHORIZATION_FAILED))
        assert "delivery to dead-letters-0 failed" in failure(cluster, rows(0, 5))
    small = {TOPIC: 2_000, DEAD_LETTERS: 3_000}
    with FakeCluster({TOPIC: 1, DEAD_LETTERS: 1}, max_message_bytes=small) as cluster:
        message = failure(cluster, large(0, 2_000), large(1, 2_000), large(2, 20_000), rows(3, 1))
        assert "larger than errors.deadletterqueue.topic.name = 'dead-letters' accepts" in message
        assert "Raise that topic's max.message.bytes" in message


def test_task_fails_if_more_rows_than_errors_max_are_rejected() -> None:
    with FakeCluster({TOPIC: 1, DEAD_LETTERS: 1}, max_message_bytes={TOPIC: 1000}) as cluster:
        rejected = [large(number, 2000) for number in range(3)]
        assert "more than errors.max = 2" in failure(cluster, *rejected, **{"errors.max": "2"})
        negative = row_batch([b"v"] * 3, [-1, -2, -3])
        assert "more than errors.max = 2" in failure(cluster, negative, **{"errors.max": "2"})


def test_wait_for_a_missing_partition_does_not_use_up_max_block_ms(
    bound_waits: BoundWaits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: good rows of a table that failed after 0 ms behind a row that had waited for max.block.ms."""
    bound_waits(missing_ms=300.0)
    waits: list[float] = []
    append = RecordAppender.append

    def noting(
        appender: RecordAppender, ordered: OrderedRows, check: Callable[[], None], waited_ms: float = 0.0
    ) -> None:
        if TOPIC in {partition.topic for partition in ordered.partitions}:
            waits.append(waited_ms)
        append(appender, ordered, check, waited_ms)

    monkeypatch.setattr(RecordAppender, "append", noting)
    with FakeCluster({TOPIC: 1, DEAD_LETTERS: 1}) as cluster, tolerant(cluster) as producer:
        producer.send(pa.concat_batches([rows(0, 5), rows(5, 1, partition=7)]))
        assert producer.finish().skipped == 1
        all_ms = producer.metrics()["metadata-wait-time-ns-total"] / 1e6
        assert written(cluster) == [0, 1, 2, 3, 4]
        [waited_ms] = waits
        assert 0 <= waited_ms <= all_ms - 300


def test_slow_metadata_is_no_proof_that_a_partition_is_missing(bound_waits: BoundWaits) -> None:
    """Only a broker's response is. A timeout fails the task."""
    bound_waits(missing_ms=200.0)
    with (
        FakeCluster({TOPIC: 2, DEAD_LETTERS: 1}) as cluster,
        tolerant(cluster, max_block_ms=20_000) as producer,
    ):
        producer.send(rows(0, 1, partition=1))
        producer.finish()
        cluster.add_partitions(TOPIC, 3)
        cluster.script(METADATA, Reply(delay_ms=1200))
        producer.send(rows(1, 1, partition=2))
        assert producer.finish().skipped == 0
        assert written(cluster, 2) == [1]


@pytest.mark.parametrize("header", [b"own", b"__connect.errors.connector.name"])
def test_a_row_of_the_topic_column_for_the_dead_letters_topic_is_not_cut(header: bytes) -> None:
    """Also one that was a dead letter of this sink, and is written there again."""
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    headers = pa.array([[{"key": header.decode(), "value": b"kafka-chunked"}]], kind)
    row = pa.record_batch({"value": [b"v" * 1_500_000], "topic": [DEAD_LETTERS], "headers": headers})
    more = TOLERANT | {"kafka.max.request.size": "4194304"}
    with FakeCluster({TOPIC: 1, DEAD_LETTERS: 1}) as cluster:
        result = by_topic_column(cluster, [("headers", HEADERS_TYPE)], row, **more)
        assert (result.records, result.skipped) == (0, 1)


@pytest.mark.parametrize("tolerance", ["none", "all"])
def test_the_largest_key_and_the_largest_value_of_different_rows_make_no_record(tolerance: str) -> None:
    plan = ColumnPlan.of([("key", "binary"), ("value", "binary")], TOPIC)
    table = pa.table({"key": [b"k" * 60_000, b"k", b"x"], "value": [b"<0>", b"v" * 1_000_000, b"<2>"]})
    with FakeCluster({TOPIC: 1, DEAD_LETTERS: 1}) as cluster:
        raw = task_options(cluster) | {"errors.tolerance": tolerance}
        with task_producer(parse(raw).options, plan) as producer:
            producer.send(table)
            assert producer.finish().records == 3


def test_topics_that_are_no_utf8_become_dead_letters() -> None:
    names = pa.array([TOPIC.encode(), b"\xff\xfe"], pa.binary()).view(pa.string())
    table = pa.record_batch([pa.array([b"<0>", b"<1>"]), names], ["value", "topic"])
    with FakeCluster({TOPIC: 1, DEAD_LETTERS: 1}) as cluster:
        result = by_topic_column(cluster, [], table, **TOLERANT)
        assert (result.records, result.skipped) == (1, 1)
        assert dead_letters_in(cluster) == 1


def test_counts_of_a_failed_task_tell_rows_from_dead_letters() -> None:
    invalid_required_acks = 21
    rejected = row_batch([b"v"] * 3, [-1] * 3)
    with FakeCluster({TOPIC: 1, DEAD_LETTERS: 1}) as cluster, tolerant(cluster) as producer:
        producer.send(rows(0, 4))
        producer.send(rejected)
        until(lambda: cluster.batches(DEAD_LETTERS, 0) and len(written(cluster)) == 4, "the dead letters")
        until(lambda: not requests_in_flight(producer), "the responses")
        cluster.script(PRODUCE, error(invalid_required_acks))
        with pytest.raises(DeliveryError) as caught:
            finish_with(producer, rows(4, 5))
    counts = (
        "4 rows acknowledged, 3 skipped (3 dead letters acknowledged), 5 failed, 0 sent without a response"
    )
    assert f"[{counts}, 0 never sent]" in str(caught.value)


def test_a_hundred_thousand_refused_rows_take_no_minutes(bound_waits: BoundWaits) -> None:
    bound_waits(refused_ms=0.0)
    with FakeCluster({TOPIC: 1, DEAD_LETTERS: 1}) as cluster:
        cluster.script(PRODUCE, error(TOPIC_AUTHORIZATION_FAILED))
        table = pa.table({"value": [b"v"] * 100_000, "partition": pa.array([0] * 100_000, pa.int32())})
        sizes = {"batch_size": 10**7, "max_request_size": 10**7}
        result = finished(cluster, table, extra={"errors.max": "-1"}, **sizes)
        assert result.skipped == 100_000
        assert result.elapsed_ms < 120_000


def on(broker: LocalBroker, topic: str) -> dict[str, str]:
    """Options of a task for this topic and its dead letters."""
    servers = {"kafka.bootstrap.servers": broker.bootstrap_servers, "topic": topic}
    return servers | {"errors.tolerance": "all", "errors.deadletterqueue.topic.name": f"{topic}-dead-letters"}


def test_single_bad_rows_among_thousands_become_dead_letters(
    spark: SparkSession, broker: LocalBroker
) -> None:
    """The whole way, on a real broker: all others written, dead letters complete, counts equal."""
    broker.create_topic("tolerant", 4)
    broker.create_topic("tolerant-dead-letters", 1)
    frame = spark.range(5_000).selectExpr(
        "cast(id as string) as key",
        "case when id = 77 then repeat('x', 1500000) else concat(id, ':') end as value",
        "cast(case when id = 99 then 4 else null end as int) as partition",
        "array(struct('origin' as key, cast('test' as binary) as value)) as headers",
    )
    save(frame, on(broker, "tolerant"))
    found = sorted(int(row.key or b"-1") for row in read_topic(broker, "tolerant"))
    wrong = {77, 99}
    assert found == [number for number in range(5_000) if number not in wrong]
    dead_letters = read_topic(broker, "tolerant-dead-letters")
    assert sorted(int(dead_letter.key or b"-1") for dead_letter in dead_letters) == sorted(wrong)
    for dead_letter in dead_letters:
        context = dict(dead_letter.headers)
        assert context["origin"] == b"test"
        assert context["__connect.errors.topic"] == b"tolerant"
        assert context["__connect.errors.stage"] == b"KAFKA_PRODUCE"
        if dead_letter.key == b"77":
            assert context["__connect.errors.exception.class.name"] == b"RecordTooLargeError"
            assert context["kafka-chunked.errors.value.length"] == b"1500000"
            assert 400_000 < len(dead_letter.value or b"") < 1_000_000
        else:
            assert context["__connect.errors.partition"] == b"4"
            assert b"only partitions 0 to 3" in (context["__connect.errors.exception.message"] or b"")


def test_a_compacted_topic_refuses_rows_without_a_key_by_name(broker: LocalBroker) -> None:
    """INVALID_RECORD names rows of a batch; its others and batches behind it are written in order."""
    broker.create_topic("compacted", config={"cleanup.policy": "compact"})
    broker.create_topic("compacted-dead-letters", 1)
    plan = ColumnPlan.of([("key", "binary"), ("value", "binary")], "compacted")
    refused = range(25, 5_000, 50)
    keys = [None if number in refused else b"%d" % number for number in range(5_000)]
    table = pa.table({"key": keys, "value": [b"%d" % number for number in range(5_000)]})
    raw = on(broker, "compacted") | {"kafka.batch.size": "2048", "kafka.linger.ms": "0"}
    with task_producer(parse(raw).options, plan) as producer:
        for start in range(0, 5_000, 250):
            producer.send(table.slice(start, 250))
        result = producer.finish()
    assert (result.records, result.skipped) == (4_900, 100)
    found = [int(row.value or b"") for row in read_topic(broker, "compacted")]
    assert found == [number for number in range(5_000) if number not in refused]
    dead_letters = read_topic(broker, "compacted-dead-letters")
    assert sorted(int(one.value or b"") for one in dead_letters) == list(refused)
    names = {dict(one.headers)["__connect.errors.exception.class.name"] for one in dead_letters}
    assert names == {b"INVALID_RECORD"}


def rejected_rows_job(
    broker: LocalBroker, name: str, rows: int, size: int, **given: object
) -> dict[str, float]:
    """A task in a process of its own whose rows a compacted topic refuses."""
    broker.create_topic(name, 2, config={"cleanup.policy": "compact"})
    broker.create_topic(f"{name}-dead-letters", 2)
    options = [f"{option.replace('_', '.')}={value}" for option, value in given.items()]
    command = [sys.executable, "-m", "tests.support.rejected_rows_job", broker.bootstrap_servers]
    done = run([*command, name, f"{name}-dead-letters", rows, size, *options])
    found: dict[str, float] = json.loads(done.stdout)
    assert found["skipped"] + found["records"] == rows
    return found


def test_refused_rows_take_little_memory_beyond_buffer_memory(broker: LocalBroker) -> None:
    """In large batches, of whose rows a response names each by a text with the topic's name.

    Catches: a response that was so long that it was "not Kafka".
    """
    options = {"kafka_buffer_memory": 64 * MIB, "kafka_batch_size": MIB // 4}
    plain = rejected_rows_job(broker, "taken-" * 28, 40_000, 16, keyed=1, **options)
    topic = "refused-" * 21
    found = rejected_rows_job(broker, topic, 40_000, 16, **options)
    assert (plain["skipped"], found["skipped"], found["retries"]) == (0, 40_000, 0)
    assert found["peak_mib"] - plain["peak_mib"] <= 64, "5 kB a dead letter are 200 MiB"
    assert found["peak_mib"] < 450
    dead_letters = read_topic(broker, f"{topic}-dead-letters")
    assert sorted(int((dead_letter.value or b"")[:9]) for dead_letter in dead_letters) == list(range(40_000))
    assert {len(dead_letter.value or b"") for dead_letter in dead_letters} == {16}
