"""When planning looks up the topics that options name."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from kafka_sink.driver.topics import STREAM_RECHECK_S, prepare_topic
from kafka_sink.errors import AuthenticationError, BrokersUnreachableError, ConfigurationError
from kafka_sink.options import parse
from local_kafka import LocalBroker
from tests.support.fake_broker import (
    INIT_PRODUCER_ID,
    METADATA,
    FakeCluster,
)
from tests.support.lookups import options
from tests.support.proxy import METADATA as METADATA_API
from tests.support.proxy import ProxyCluster


def test_without_a_topic_brokers_must_be_reached_all_the_same(broker: LocalBroker) -> None:
    prepare_topic(parse({"kafka.bootstrap.servers": broker.bootstrap_servers}).options)
    nowhere = parse({"kafka.bootstrap.servers": "127.0.0.1:1", "kafka.max.block.ms": "300"}).options
    with pytest.raises(BrokersUnreachableError, match=r"127\.0\.0\.1:1"):
        prepare_topic(nowhere)


def test_a_stream_checks_once_a_minute(broker: LocalBroker, topic: str, application: Path) -> None:
    with ProxyCluster(broker.bootstrap_servers) as proxies:
        given = options(proxies.bootstrap_servers, topic)

        def asks(is_streaming: bool = True) -> bool:
            before = proxies.requests[METADATA_API]
            prepare_topic(given, is_streaming=is_streaming)
            return proxies.requests[METADATA_API] > before

        assert [asks(), asks(), asks()] == [True, False, False]
        assert asks(is_streaming=False), "a batch job looks each time"
        for marker in application.iterdir():
            os.utime(marker, (time.time(), time.time() - STREAM_RECHECK_S - 1))
        assert [asks(), asks()] == [True, False]


def test_a_stream_that_was_connected_waits_for_brokers_that_restart_and_a_batch_job_does_not(
    topic: str, application: Path
) -> None:
    with FakeCluster({topic: 1}) as cluster:
        given = options(cluster.bootstrap_servers, topic)
        prepare_topic(given, is_streaming=True)
        for marker in application.iterdir():
            os.utime(marker, (time.time(), time.time() - STREAM_RECHECK_S - 1))
        cluster.stop(0)
        with pytest.raises(BrokersUnreachableError):
            prepare_topic(given, connect_bound_ms=300.0)
        later = threading.Timer(1.0, cluster.start, [0])
        later.start()
        try:
            prepare_topic(given, is_streaming=True, connect_bound_ms=300.0)
        finally:
            later.join()


@pytest.mark.usefixtures("application")
def test_a_stream_with_another_login_is_tried_at_once(
    topic: str,
) -> None:
    with FakeCluster({topic: 1}) as cluster:
        prepare_topic(options(cluster.bootstrap_servers, topic), is_streaming=True)
        login = {"kafka_security_protocol": "SASL_PLAINTEXT", "kafka_sasl_mechanism": "PLAIN"}
        login |= {"kafka_sasl_username": "u", "kafka_sasl_password": "p"}
        with pytest.raises(AuthenticationError, match="does not offer SASL"):
            prepare_topic(options(cluster.bootstrap_servers, topic, **login), is_streaming=True)


@pytest.mark.usefixtures("application")
def test_a_stream_checks_again_after_an_error(
    topic: str,
) -> None:
    given = options("127.0.0.1:1", topic, kafka_max_block_ms="50")
    for _ in range(2):
        with pytest.raises(BrokersUnreachableError):
            prepare_topic(given, is_streaming=True)


def test_a_missing_dead_letter_topic_is_found_at_planning() -> None:
    with FakeCluster({"there": 1}) as cluster:
        wanted = {"errors.tolerance": "all", "errors.deadletterqueue.topic.name": "dead-letters"}
        more = {"kafka.allow.auto.create.topics": "false", "kafka.max.block.ms": "1500"}
        given = options(cluster.bootstrap_servers, "there", **wanted, **more)
        text = r"Option 'errors\.deadletterqueue\.topic\.name': there is no topic 'dead-letters'"
        with pytest.raises(ConfigurationError, match=text):
            prepare_topic(given)
        cluster.create_topic("dead-letters", 1)
        prepare_topic(given)


def test_the_dead_letter_topic_shares_the_wait_of_the_topic(topic: str) -> None:
    """Brokers create both at once, and are asked once for a producer id."""
    dead_letters = f"{topic}-dead-letters"
    more = {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead_letters}
    with FakeCluster({}) as cluster:
        threading.Timer(
            1.0, lambda: [cluster.create_topic(name, 1) for name in (topic, dead_letters)]
        ).start()
        prepare_topic(options(cluster.bootstrap_servers, topic, **more))
        asked = [{one.name for one in request.body.topics} for request in cluster.received(METADATA)]
        assert len(asked) > 1
        assert all(names == {topic, dead_letters} for names in asked)
        assert len(cluster.received(INIT_PRODUCER_ID)) == 1
