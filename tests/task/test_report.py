"""The reports of a task to the live view, within the bounds of a message."""

from __future__ import annotations

from unittest.mock import patch

import pyarrow as pa

from kafka_sink.coordinator.live.messages import BrokerReport
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer import Producer
from kafka_sink.task.producer_cache import task_producer
from kafka_sink.task.report import first_dead_letters
from tests.support.fake_broker import FakeCluster
from tests.support.task_reports import TASK
from tests.support.waiting import until

PLAN = ColumnPlan.of([("value", "string")], "t")
NO_BREAKER = {"kafka.producer.circuit.breaker.class": "none"}


def test_a_report_names_few_of_many_topics_with_dead_letters() -> None:
    many = {(f"t{number}", "E"): 1 for number in range(1_000)}
    few = first_dead_letters(many)
    assert sum(one.rows for one in few) == 1_000
    assert few[-1] == ("", "", 981)
    # Rows may name topics that no message takes.
    (one,) = first_dead_letters({("x" * 300, "InvalidTopicError"): 3})
    assert (len(one.topic), one.rows) == (249, 3)


def test_a_broker_owes_an_answer_while_rows_wait_for_it_though_no_request_is_under_way() -> None:
    """Catches: a frozen broker looked well again at kafka.request.timeout.ms, its connection being closed."""
    raw = {"topic": "t", "kafka.request.timeout.ms": "300", "kafka.linger.ms": "0", **NO_BREAKER}
    with FakeCluster({"t": 1}) as cluster:
        options = parse({**raw, "kafka.bootstrap.servers": cluster.bootstrap_servers}).options
        with task_producer(options, PLAN, None) as producer:
            producer.send(pa.table({"value": ["a"]}))
            until(lambda: reported(producer).requests == 1 and not reported(producer).in_flight)
            assert reported(producer).oldest_ms == 0
            cluster.freeze(0)
            producer.send(pa.table({"value": ["b"]}))
            until(lambda: reported(producer).failures > 0 and not reported(producer).in_flight)
            until(lambda: reported(producer).oldest_ms > 700)
            # A broker that is fenced leads nothing, and rows wait for it all the same.
            with patch.object(producer.cluster, "leader", lambda _: None):
                assert [reported(producer).oldest_ms > 700 for _ in range(3)] == [True] * 3
            cluster.thaw(0)
            producer.finish()
            assert reported(producer).oldest_ms == 0


def reported(producer: Producer) -> BrokerReport:
    return producer.report(TASK).brokers[0]
