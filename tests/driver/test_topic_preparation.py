"""What planning makes of the topic that the options name: found, created, left to brokers, or an error."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource

from kafka_sink.driver.topic_preparation import prepare_topic
from kafka_sink.errors import BrokersUnreachableError, ConfigurationError
from kafka_sink.network import admin_requests, apis
from kafka_sink.options import parse
from local_kafka import LocalBroker
from tests.support.fake_broker import (
    CREATE_TOPICS,
    INIT_PRODUCER_ID,
    METADATA,
    FakeCluster,
)
from tests.support.fake_replies import error
from tests.support.lookups import options
from tests.support.response_checks import every_version
from tests.support.sink_time import slow_until
from tests.support.waiting import until

TOPIC_AUTHORIZATION_FAILED, LEADER_NOT_AVAILABLE = 29, 5
CLUSTER_AUTHORIZATION_FAILED, COORDINATOR_LOAD_IN_PROGRESS = 31, 14


def partitions(broker: LocalBroker, topic: str) -> dict[int, int]:
    """Replicas of each partition, with no creation on the way: of a list of all topics."""
    found = AdminClient({"bootstrap.servers": broker.bootstrap_servers}).list_topics(timeout=30).topics
    known = found[topic].partitions if topic in found else {}
    return {number: len(one.replicas) for number, one in known.items()}


def assert_refused(cluster: LocalBroker | FakeCluster, topic: str, why: str, **more: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        prepare_topic(options(cluster.bootstrap_servers, topic, **more))


def settled(broker: LocalBroker, topic: str) -> dict[int, int]:
    """As ``partitions``, once the broker shows the topic."""
    return until(lambda: partitions(broker, topic), poll_s=0.05)


def test_topics_of_a_column_are_created_with_their_settings(broker: LocalBroker, topic: str) -> None:
    """Catches: ``topic.create`` only for the option ``topic``, and every setting left to the brokers."""
    more = {"topic.create": "true", "topic.create.names": f"{topic}, {topic}-too"}
    more |= {"topic.partitions": "2", "topic.config.retention.ms": "123000"}
    prepare_topic(parse({"kafka.bootstrap.servers": broker.bootstrap_servers, **more}).options)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    for name in (topic, f"{topic}-too"):
        assert settled(broker, name) == dict.fromkeys(range(2), 1)
        resource = ConfigResource(ConfigResource.Type.TOPIC, name)
        assert admin.describe_configs([resource])[resource].result(30)["retention.ms"].value == "123000"


def test_a_refusal_by_brokers_is_raised_with_their_reason(broker: LocalBroker, topic: str) -> None:
    for wrong, reason in (
        ({"topic_config_retention_ms": "soon"}, r"retention\.ms.*topic\.config\.\*"),
        ({"topic_replication_factor": "3"}, r"(?i:replication).*topic\.rep"),
    ):
        why = rf"'{topic}' could not be created: .*{reason}"
        assert_refused(broker, topic, why, topic_create="true", **wrong)
    assert partitions(broker, topic) == {}


def test_a_missing_topic_is_created_as_told(cluster3: LocalBroker, topic: str) -> None:
    numbers = {"topic_partitions": "5", "topic_replication_factor": "2"}
    prepare_topic(options(cluster3.bootstrap_servers, topic, topic_create="true", **numbers))
    assert settled(cluster3, topic) == dict.fromkeys(range(5), 2)


def test_created_topic_gets_the_defaults_of_the_broker(broker: LocalBroker, topic: str) -> None:
    prepare_topic(options(broker.bootstrap_servers, topic, topic_create="true"))
    auto = f"{topic}-auto"
    prepare_topic(options(broker.bootstrap_servers, auto))
    assert settled(broker, topic) == settled(broker, auto) != {}


# Kafka 2.1's versions: numbers of -1 came with version 4 (KIP-464).
_BEFORE_2_4 = {CREATE_TOPICS: (0, 3)}


def test_brokers_without_defaults_need_both_numbers(topic: str) -> None:
    with FakeCluster(versions=_BEFORE_2_4) as old:
        why = r"Set topic\.partitions and topic\.replication\.factor"
        assert_refused(old, topic, why, topic_create="true", topic_partitions="2")
        assert not old.received(CREATE_TOPICS)
        numbers = {"topic_partitions": "2", "topic_replication_factor": "1"}
        prepare_topic(options(old.bootstrap_servers, topic, topic_create="true", **numbers))
        (request,) = old.received(CREATE_TOPICS)
        (asked,) = request.body.topics
        assert (asked.num_partitions, asked.replication_factor) == (2, 1)


def test_topic_is_created_once_by_concurrent_writes(
    broker: LocalBroker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = options(broker.bootstrap_servers, topic, topic_create="true", topic_partitions="3")
    together = threading.Barrier(6)

    def run(_: int) -> None:
        together.wait()
        prepare_topic(given)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(run, range(6)))
    assert caplog.messages == [f"kafka-chunked: created topic '{topic}'"]
    assert len(settled(broker, topic)) == 3
    # Then it stays as it is.
    prepare_topic(options(broker.bootstrap_servers, topic, topic_create="true", topic_partitions="7"))
    assert len(partitions(broker, topic)) == 3


def test_a_missing_topic_is_an_error_where_brokers_may_not_create_it(broker: LocalBroker, topic: str) -> None:
    more = {"kafka_allow_auto_create_topics": "false", "kafka_max_block_ms": "4000"}
    begun = time.monotonic()
    with pytest.raises(ConfigurationError) as caught:
        prepare_topic(options(broker.bootstrap_servers, topic, **more))
    assert 3.9 <= time.monotonic() - begun < 50
    for part in (topic, broker.bootstrap_servers, "topic.create=true", "allow.auto.create.topics=false"):
        assert part in str(caught.value)
    assert partitions(broker, topic) == {}


def test_planning_fails_if_brokers_do_not_create_the_topic(topic: str) -> None:
    with FakeCluster({"another": 1}) as cluster:
        why = rf"no topic '{topic}' .*auto\.create\.topics\.enable"
        with slow_until(lambda: cluster.received(METADATA)):
            assert_refused(cluster, topic, why, kafka_max_block_ms="700")


def test_a_topic_that_may_not_be_used_is_named_with_the_reason(topic: str) -> None:
    with FakeCluster({topic: 1}) as cluster:
        cluster.script(METADATA, *[error(TOPIC_AUTHORIZATION_FAILED)] * 20)
        why = rf"'{topic}' cannot be used: .*failed. Grant User:ANONYMOUS DESCRIBE and WRITE on this topic"
        assert_refused(cluster, topic, why)
        # Catches: advice that names CREATE only once the other rights are granted.
        assert_refused(cluster, topic, f"{why}, and CREATE if it does not exist", topic_create="true")
    with FakeCluster({topic: 1}) as cluster:
        # One without leaders is there.
        cluster.script(METADATA, *[error(LEADER_NOT_AVAILABLE)] * 20)
        prepare_topic(options(cluster.bootstrap_servers, topic, kafka_max_block_ms="5000"))


def test_a_login_without_the_right_to_write_idempotently_gets_an_error_that_names_it(topic: str) -> None:
    with FakeCluster({topic: 1}) as cluster:
        cluster.script(INIT_PRODUCER_ID, error(CLUSTER_AUTHORIZATION_FAILED))
        assert_refused(cluster, topic, "IDEMPOTENT_WRITE on the cluster or WRITE on the topic")
        cluster.script(INIT_PRODUCER_ID, error(COORDINATOR_LOAD_IN_PROGRESS))
        prepare_topic(options(cluster.bootstrap_servers, topic))
        asked = len(cluster.received(INIT_PRODUCER_ID))
        prepare_topic(options(cluster.bootstrap_servers, topic, kafka_enable_idempotence="false"))
        assert len(cluster.received(INIT_PRODUCER_ID)) == asked


def test_options_at_their_bounds_can_be_sent() -> None:
    for version in every_version(apis.CREATE_TOPICS):
        body = admin_requests.encode_create_topic(version, "t" * 249, 100_000, 10_000, 2**31 - 1)
        assert (100_000).to_bytes(4, "big") + (10_000).to_bytes(2, "big") in body


def test_without_a_topic_brokers_must_be_reached_all_the_same(broker: LocalBroker) -> None:
    prepare_topic(parse({"kafka.bootstrap.servers": broker.bootstrap_servers}).options)
    nowhere = parse({"kafka.bootstrap.servers": "127.0.0.1:1", "kafka.max.block.ms": "300"}).options
    with pytest.raises(BrokersUnreachableError, match=r"127\.0\.0\.1:1"):
        prepare_topic(nowhere)


def test_a_missing_dead_letter_topic_is_found_at_planning() -> None:
    with FakeCluster({"there": 1}) as cluster:
        more = {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": "dead-letters"}
        more |= {"kafka_allow_auto_create_topics": "false", "kafka_max_block_ms": "700"}
        why = r"Option 'errors\.deadletterqueue\.topic\.name': there is no topic 'dead-letters'"
        with slow_until(lambda: cluster.received(METADATA)):
            assert_refused(cluster, "there", why, **more)
        cluster.create_topic("dead-letters", 1)
        prepare_topic(options(cluster.bootstrap_servers, "there", **more))


def test_the_dead_letter_topic_shares_the_wait_of_the_topic(topic: str) -> None:
    """Brokers create both at once, late, and are asked once for a producer id."""
    names = (topic, f"{topic}-dead-letters")
    more = {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": names[1]}
    with FakeCluster({}) as cluster:
        threading.Timer(0.5, lambda: [cluster.create_topic(name, 1) for name in names]).start()
        prepare_topic(options(cluster.bootstrap_servers, topic, **more))
        asked = [{one.name for one in request.body.topics} for request in cluster.received(METADATA)]
        assert len(asked) > 1
        assert all(one == set(names) for one in asked)
        assert len(cluster.received(INIT_PRODUCER_ID)) == 1
