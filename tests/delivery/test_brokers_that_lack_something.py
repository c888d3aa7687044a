"""Brokers that lack a feature of Apache Kafka's: one behaviour for each, which docs/clusters.md describes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kafka_sink.errors import DeliveryError, KafkaSinkError
from kafka_sink.options import parse
from kafka_sink.task.producer import Producer
from kafka_sink.task.producer_cache import task_producer
from tests.support.fake_broker import INIT_PRODUCER_ID, PRODUCE, FakeCluster
from tests.support.fake_replies import error
from tests.support.scripted_cluster import PLAN, finish_with, rows, send, task_options

UNSUPPORTED_VERSION, INVALID_REQUEST, UNSUPPORTED_COMPRESSION_TYPE = 35, 42, 76
LOST = r"kafka\.enable\.idempotence=false.*written twice.*max\.in\.flight\.requests\.per\.connection=1"


@contextmanager
def exactly_once(cluster: FakeCluster) -> Iterator[Producer]:
    options = task_options(cluster) | {
        "delivery.guarantee": "exactly-once",
        "transactional.id.prefix": "p",
    }
    with task_producer(parse(options).options, PLAN, None) as producer:
        yield producer


def test_a_broker_without_producer_ids_fails_the_task_by_the_options_name() -> None:
    """Catches: "does not support InitProducerId requests; Apache Kafka 2.1 or later is needed": untrue."""
    with FakeCluster({"t": 1}, without=[INIT_PRODUCER_ID]) as cluster:
        with pytest.raises(DeliveryError, match=LOST):
            send(cluster, rows(0, 5))
        assert not cluster.received(PRODUCE)
        assert send(cluster, rows(0, 5), enable_idempotence="false").records == 5


def test_a_broker_that_refuses_producer_ids_fails_the_task_by_the_options_name() -> None:
    with FakeCluster({"t": 1}) as cluster:
        cluster.script(INIT_PRODUCER_ID, *[error(UNSUPPORTED_VERSION)] * 10)
        with pytest.raises(DeliveryError, match=LOST):
            send(cluster, rows(0, 5))


def test_zstd_is_not_sent_to_a_broker_whose_produce_requests_lack_it() -> None:
    """Catches: batches that no consumer of such a broker may be able to read (KIP-110)."""
    with FakeCluster({"t": 1}, versions={PRODUCE: (3, 6)}) as cluster:
        with pytest.raises(KafkaSinkError, match=r"kafka\.compression\.type=zstd needs.*version 7.*lz4"):
            send(cluster, rows(0, 5), compression_type="zstd")
        assert not cluster.received(PRODUCE)
        assert send(cluster, rows(0, 5), compression_type="lz4").records == 5


def test_a_codec_that_the_broker_refuses_is_named_by_its_option() -> None:
    with FakeCluster({"t": 1}) as cluster:
        cluster.script(PRODUCE, error(UNSUPPORTED_COMPRESSION_TYPE))
        with pytest.raises(DeliveryError, match=r"UNSUPPORTED_COMPRESSION_TYPE.*kafka\.compression\.type"):
            send(cluster, rows(0, 5), compression_type="zstd")


def test_a_topic_that_takes_no_transactions_fails_the_task_by_what_it_may_be() -> None:
    """Catches: "INVALID_REQUEST (error 42)" of a diskless topic, and nothing that tells what to do."""
    with (
        FakeCluster({"t": 1}) as cluster,
        exactly_once(cluster) as producer,
    ):
        producer.begin_transaction("id", 7, 0)
        cluster.script(PRODUCE, error(INVALID_REQUEST))
        with pytest.raises(DeliveryError, match=r"INVALID_REQUEST.*diskless.*guarantee=at-least-once"):
            finish_with(producer, rows(0, 5))
