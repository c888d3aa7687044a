"""Writes without Spark to a real broker: every column, exactly once, Ctrl-C, and no Spark in the process."""

from __future__ import annotations

import datetime
import signal
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

import kafka_sink
from kafka_sink.arrow.producer import ArrowProducer
from kafka_sink.errors import ChangedBatchError, ConfigurationError, SchemaError
from kafka_sink.model import TopicPartition
from local_kafka import LocalBroker
from tests.support.commands import printed_by, start
from tests.support.fake_broker import FakeCluster
from tests.support.topics import log_ends, read_to_end, read_topic

ROOT = Path(__file__).resolve().parents[2]


def options(broker: LocalBroker, topic: str | None, **more: object) -> dict[str, object]:
    given = {"kafka.bootstrap.servers": broker.bootstrap_servers, "log.summary": False, **more}
    return given if topic is None else {**given, "topic": topic}


def exactly_once(broker: LocalBroker, topic: str, version: int = 1) -> dict[str, object]:
    named = {"txnAppId": f"loads of {topic}", "txnVersion": version}
    return {**options(broker, topic), "delivery.guarantee": "exactly-once", **named}


def committed_values(broker: LocalBroker, topic: str) -> list[bytes]:
    """What readers with isolation.level=read_committed see now."""
    return read_to_end(broker.bootstrap_servers, topic)


def values(start: int, count: int) -> pa.Table:
    return pa.table({"value": [f"{number}" for number in range(start, start + count)]})


def test_write_arrow_returns_the_acknowledged_offsets_by_partition() -> None:
    with FakeCluster({"t": 2}) as cluster:
        given = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "topic": "t", "log.summary": False}
        rows = pa.table({"value": ["a", "b", "c"], "partition": pa.array([0, 1, 1], pa.int32())})
        result = kafka_sink.write_arrow(rows, given)
    assert result.offsets == {TopicPartition("t", 0): ((0, 0),), TopicPartition("t", 1): ((0, 1),)}


def test_every_column_arrives(broker: LocalBroker, topic: str) -> None:
    instant = datetime.datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=datetime.timezone.utc)
    headers = pa.list_(pa.struct([("key", pa.string_view()), ("value", pa.binary_view())]))
    data = pa.table(
        {
            "topic": [topic, topic],
            "key": pa.array(["k", None], pa.string_view()),
            "value": pa.array([b"v", None], pa.large_binary()),
            "headers": pa.array([[{"key": "h", "value": b"1"}, {"key": "i", "value": None}], None], headers),
            "partition": pa.array([2, 1], pa.int64()),
            "timestamp": pa.array([instant, instant], pa.timestamp("ns", "UTC")),
        }
    )
    result = kafka_sink.write_arrow(data, options(broker, None, **{"kafka.compression.type": "lz4"}))
    assert result.offsets == {TopicPartition(topic, 1): ((0, 0),), TopicPartition(topic, 2): ((0, 0),)}
    second, first = sorted(read_topic(broker, topic))
    millis = round(instant.timestamp() * 1000)
    assert first == (2, b"k", b"v", millis, (("h", b"1"), ("i", None)))
    assert second == (1, None, None, millis, ())


def test_a_version_is_written_once(broker: LocalBroker, topic: str) -> None:
    first, again = (kafka_sink.write_arrow(values(0, 100), exactly_once(broker, topic)) for _ in range(2))
    assert (first.rows, first.already_written, again.rows, again.already_written) == (100, False, 0, True)
    # However the rows are cut.
    with kafka_sink.producer(exactly_once(broker, topic)) as producer:
        producer.send(values(50, 50))
        producer.send(values(0, 50))
    assert producer.result is not None
    assert producer.result.already_written
    with pytest.raises(ChangedBatchError, match="was written before with 100 rows"):
        kafka_sink.write_arrow(values(0, 99), exactly_once(broker, topic))
    assert kafka_sink.write_arrow(values(100, 10), exactly_once(broker, topic, version=2)).rows == 10
    assert sorted(map(int, committed_values(broker, topic))) == list(range(110))


def test_a_block_is_one_transaction_that_is_aborted_where_it_fails_and_can_be_written_again(
    broker: LocalBroker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    def work(producer: ArrowProducer, *, fails: bool) -> None:
        producer.send(values(0, 5))
        producer.flush()
        assert producer.acknowledged == 5
        assert committed_values(broker, topic) == []
        if fails:
            raise KeyError
        producer.send(values(5, 5))

    with pytest.raises(KeyError), kafka_sink.producer(exactly_once(broker, topic)) as producer:
        work(producer, fails=True)
    assert "the write failed; 1 transaction aborted" in caplog.text
    assert committed_values(broker, topic) == []
    with kafka_sink.producer(exactly_once(broker, topic)) as producer:
        work(producer, fails=False)
    assert producer.result is not None
    assert not producer.result.already_written
    assert sorted(map(int, committed_values(broker, topic))) == list(range(10))


def test_a_transaction_has_no_rows_of_a_send_that_failed_half_way(broker: LocalBroker, topic: str) -> None:
    """Catches: a program that repairs its data and sends again, and commits 5 rows of 3."""
    wrong = pa.table({"value": [7]})
    failed = pytest.raises(SchemaError, match="unsupported type int64")
    with failed, kafka_sink.producer(exactly_once(broker, topic)) as producer:
        for data in ([values(0, 2), wrong], [values(0, 2), values(2, 1)]):
            with suppress(SchemaError):
                producer.send(data)
    assert committed_values(broker, topic) == []
    assert kafka_sink.write_arrow([values(0, 2), values(2, 1)], exactly_once(broker, topic)).rows == 3
    assert sorted(committed_values(broker, topic)) == [b"0", b"1", b"2"]


def test_the_topic_of_a_write_must_be_there(broker: LocalBroker) -> None:
    given = {**options(broker, "no-such-topic"), "kafka.allow.auto.create.topics": False}
    given["kafka.max.block.ms"] = 4000
    with pytest.raises(ConfigurationError, match="there is no topic 'no-such-topic'"):
        kafka_sink.write_arrow(values(0, 1), given)


_INTERRUPTED = """
    import time
    import pyarrow as pa
    import kafka_sink

    def source():
        for number in range(10**6):
            yield pa.record_batch({"value": [str(number)]})
            time.sleep(0.01)

    kafka_sink.write_arrow(source(), %r)
"""


def test_ctrl_c_ends_a_write_at_once_and_says_what_became_of_its_rows(
    broker: LocalBroker, topic: str, project_environment: dict[str, str]
) -> None:
    code = textwrap.dedent(_INTERRUPTED) % exactly_once(broker, topic)
    with start([sys.executable, "-c", code], project_environment) as process:
        # A write that has sent nothing has no transaction to abort, either.
        while not any(log_ends(broker.bootstrap_servers, topic)):
            assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=240)
    assert process.returncode == -signal.SIGINT
    assert "the write has failed (KeyboardInterrupt). Sending has stopped: of " in printed
    assert printed.rstrip().endswith("KeyboardInterrupt")
    assert "the write failed; 1 transaction aborted" in printed
    assert committed_values(broker, topic) == []


def test_write_arrow_neither_imports_pyspark_nor_starts_a_process(
    broker: LocalBroker, topic: str, project_environment: dict[str, str]
) -> None:
    """Catches: an environment without pyspark cannot write."""
    code = f"""
        import os, sys
        from pathlib import Path
        for module in ("pyspark", "py4j", "confluent_kafka"):
            sys.modules[module] = None
        import pyarrow as pa, kafka_sink
        result = kafka_sink.write_arrow(pa.table({{"value": ["a"]}}), {exactly_once(broker, topic)!r})
        children = Path(f"/proc/self/task/{{os.getpid()}}/children").read_text()
        print(result.rows, children or "alone")
    """
    assert printed_by(code, project_environment) == "1 alone"
