"""What planning makes of the topic that the options name: found, created, left to brokers, or an error."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource

from kafka_sink.clock import WAIT_LISTENER, monotonic_ms
from kafka_sink.driver import planning_client
from kafka_sink.driver.topics import STREAM_RECHECK_S, prepare_topic
from kafka_sink.errors import AuthenticationError, BrokersUnreachableError, ConfigurationError
from kafka_sink.model import Node
from kafka_sink.network import admin_requests, apis, requests
from kafka_sink.options import SinkOptions, parse
from local_kafka import LocalBroker
from tests.support.fake_broker import (
    API_VERSIONS,
    CREATE_TOPICS,
    DESCRIBE_CONFIGS,
    INIT_PRODUCER_ID,
    METADATA,
    FakeCluster,
)
from tests.support.fake_replies import Reply, error, garbage
from tests.support.ports import refusing_port
from tests.support.proxy import METADATA as METADATA_API
from tests.support.proxy import ProxyCluster
from tests.support.response_checks import every_version
from tests.support.waiting import until

_numbers = itertools.count()
TOPIC_AUTHORIZATION_FAILED, LEADER_NOT_AVAILABLE = 29, 5
CLUSTER_AUTHORIZATION_FAILED, COORDINATOR_LOAD_IN_PROGRESS = 31, 14


@pytest.fixture
def topic() -> str:
    return f"prepared-{next(_numbers)}"


def options(bootstrap: str, topic: str, **more: str) -> SinkOptions:
    names = {name.replace("_", "."): text for name, text in more.items()}
    return parse({"kafka.bootstrap.servers": bootstrap, "topic": topic, **names}).options


def partitions(broker: LocalBroker, topic: str) -> dict[int, int]:
    """Replicas of each partition, with no creation on the way: of a list of all topics."""
    found = AdminClient({"bootstrap.servers": broker.bootstrap_servers}).list_topics(timeout=30).topics
    return (
        {number: len(one.replicas) for number, one in found[topic].partitions.items()}
        if topic in found
        else {}
    )


def settled(broker: LocalBroker, topic: str) -> dict[int, int]:
    """As ``partitions``, once the broker shows the topic."""
    return until(lambda: partitions(broker, topic), poll_s=0.05)


def test_topics_of_a_column_are_created_with_their_settings(broker: LocalBroker, topic: str) -> None:
    """Catches: ``topic.create`` only for the option ``topic``, and every setting left to the brokers."""
    given = parse(
        {
            "kafka.bootstrap.servers": broker.bootstrap_servers,
            "topic.create": "true",
            "topic.create.names": f"{topic}, {topic}-too",
            "topic.partitions": "2",
            "topic.config.retention.ms": "123000",
        }
    ).options
    prepare_topic(given)
    for name in (topic, f"{topic}-too"):
        assert settled(broker, name) == dict.fromkeys(range(2), 1)
        resource = ConfigResource(ConfigResource.Type.TOPIC, name)
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        assert admin.describe_configs([resource])[resource].result(30)["retention.ms"].value == "123000"


def test_a_setting_that_brokers_refuse_fails_planning(broker: LocalBroker, topic: str) -> None:
    given = options(broker.bootstrap_servers, topic, topic_create="true", topic_config_retention_ms="soon")
    with pytest.raises(ConfigurationError, match=r"could not be created: .*retention\.ms.*topic\.config\.\*"):
        prepare_topic(given)


def test_a_missing_topic_is_created_as_told(cluster3: LocalBroker, topic: str) -> None:
    given = options(
        cluster3.bootstrap_servers,
        topic,
        topic_create="true",
        topic_partitions="5",
        topic_replication_factor="2",
    )
    prepare_topic(given)
    assert settled(cluster3, topic) == dict.fromkeys(range(5), 2)


def test_by_default_it_gets_what_the_broker_has_as_defaults(broker: LocalBroker, topic: str) -> None:
    prepare_topic(options(broker.bootstrap_servers, topic, topic_create="true"))
    auto = f"{topic}-auto"
    prepare_topic(options(broker.bootstrap_servers, auto))
    assert settled(broker, topic) == settled(broker, auto) != {}


# Kafka 2.1's versions: numbers of -1 came with version 4 (KIP-464).
_BEFORE_2_4 = {CREATE_TOPICS: (0, 3)}


def test_brokers_without_defaults_for_creation_are_asked_for_their_settings(topic: str) -> None:
    with FakeCluster(versions=_BEFORE_2_4) as old:
        prepare_topic(options(old.bootstrap_servers, topic, topic_create="true"))
        (request,) = old.received(CREATE_TOPICS)
        (asked,) = request.body.topics
        assert (asked.num_partitions, asked.replication_factor) == (4, 1)


def test_brokers_without_defaults_are_asked_only_for_numbers_that_no_option_sets(topic: str) -> None:
    with FakeCluster(versions=_BEFORE_2_4) as old:
        prepare_topic(options(old.bootstrap_servers, topic, topic_create="true", topic_partitions="2"))
        (request,) = old.received(CREATE_TOPICS)
        (asked,) = request.body.topics
        assert (asked.num_partitions, asked.replication_factor) == (2, 1)
        (question,) = old.received(DESCRIBE_CONFIGS)
        assert question.body.resources[0].configuration_keys == ["default.replication.factor"]


def test_a_login_that_may_not_read_brokers_settings_must_set_both_numbers(topic: str) -> None:
    with FakeCluster(versions=_BEFORE_2_4) as old:
        old.script(DESCRIBE_CONFIGS, error(CLUSTER_AUTHORIZATION_FAILED))
        with pytest.raises(ConfigurationError, match=r"Set topic\.partitions and topic\.replication\.factor"):
            prepare_topic(options(old.bootstrap_servers, topic, topic_create="true"))
        assert not old.received(CREATE_TOPICS)


def test_newer_brokers_are_not_asked_for_their_settings(topic: str) -> None:
    with FakeCluster() as new:
        prepare_topic(options(new.bootstrap_servers, topic, topic_create="true"))
        assert new.received(CREATE_TOPICS)
        assert not new.received(DESCRIBE_CONFIGS)


def test_an_existing_topic_stays_as_it_is(broker: LocalBroker, topic: str) -> None:
    broker.create_topic(topic, 2)
    prepare_topic(options(broker.bootstrap_servers, topic, topic_create="true", topic_partitions="7"))
    assert len(partitions(broker, topic)) == 2


def test_it_is_created_once_however_many_want_it(
    broker: LocalBroker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = options(broker.bootstrap_servers, topic, topic_create="true", topic_partitions="3")
    failures: list[Exception] = []
    together = threading.Barrier(6)

    def run() -> None:
        together.wait()
        try:
            prepare_topic(given)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the test fails with it
            failures.append(failure)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert caplog.messages == [f"kafka-chunked: created topic '{topic}'"]
    assert len(settled(broker, topic)) == 3


def test_a_refusal_by_brokers_is_raised_with_their_reason(broker: LocalBroker, topic: str) -> None:
    given = options(broker.bootstrap_servers, topic, topic_create="true", topic_replication_factor="3")
    with pytest.raises(
        ConfigurationError, match=rf"'{topic}' could not be created: .*(?i:replication).*topic\.rep"
    ):
        prepare_topic(given)
    assert partitions(broker, topic) == {}


def test_a_missing_topic_is_an_error_where_brokers_may_not_create_it(broker: LocalBroker, topic: str) -> None:
    given = options(
        broker.bootstrap_servers, topic, kafka_allow_auto_create_topics="false", kafka_max_block_ms="1500"
    )
    begun = time.monotonic()
    with pytest.raises(ConfigurationError) as caught:
        prepare_topic(given)
    assert 1.4 <= time.monotonic() - begun < 20
    for part in (topic, broker.bootstrap_servers, "topic.create=true", "allow.auto.create.topics=false"):
        assert part in str(caught.value)
    assert partitions(broker, topic) == {}


def test_brokers_create_it_before_tasks_start_where_they_may(broker: LocalBroker, topic: str) -> None:
    prepare_topic(options(broker.bootstrap_servers, topic))
    assert settled(broker, topic)


def test_where_brokers_do_not_create_it_planning_says_so(topic: str) -> None:
    with FakeCluster({"another": 1}) as cluster:
        given = options(cluster.bootstrap_servers, topic, kafka_max_block_ms="1500")
        with pytest.raises(ConfigurationError, match=rf"no topic '{topic}' .*auto\.create\.topics\.enable"):
            prepare_topic(given)


def test_a_topic_that_shows_up_late_is_found(broker: LocalBroker, topic: str) -> None:
    later = threading.Timer(0.5, broker.create_topic, [topic, 1])
    later.start()
    try:
        prepare_topic(options(broker.bootstrap_servers, topic, kafka_allow_auto_create_topics="false"))
    finally:
        later.join()


def test_a_topic_that_may_not_be_used_is_named_with_the_reason(topic: str) -> None:
    with FakeCluster({topic: 1}) as cluster:
        for _ in range(20):
            cluster.script(METADATA, error(TOPIC_AUTHORIZATION_FAILED))
        with pytest.raises(
            ConfigurationError, match=rf"'{topic}' cannot be used: .*(?i:authorization failed)"
        ):
            prepare_topic(options(cluster.bootstrap_servers, topic))


def test_a_login_without_the_right_to_write_idempotently_gets_an_error_that_names_it(topic: str) -> None:
    with FakeCluster({topic: 1}) as cluster:
        cluster.script(INIT_PRODUCER_ID, error(CLUSTER_AUTHORIZATION_FAILED))
        with pytest.raises(
            ConfigurationError, match=r"IDEMPOTENT_WRITE on the cluster or WRITE on the topic"
        ):
            prepare_topic(options(cluster.bootstrap_servers, topic))
        cluster.script(INIT_PRODUCER_ID, error(COORDINATOR_LOAD_IN_PROGRESS))
        prepare_topic(options(cluster.bootstrap_servers, topic))
        asked = len(cluster.received(INIT_PRODUCER_ID))
        prepare_topic(options(cluster.bootstrap_servers, topic, kafka_enable_idempotence="false"))
        assert len(cluster.received(INIT_PRODUCER_ID)) == asked


def test_addresses_that_brokers_advertise_and_nobody_reaches_are_named(topic: str) -> None:
    with FakeCluster({topic: 1}) as cluster:
        # The nodes in its metadata, not where it listens.
        cluster.advertise(1)
        given = options(cluster.bootstrap_servers, topic, kafka_max_block_ms="1500")
        with pytest.raises(
            BrokersUnreachableError, match=r"advertised\.listeners.*127\.0\.0\.1:1: connecting"
        ):
            prepare_topic(given)


def test_a_topic_without_leaders_is_there(topic: str) -> None:
    with FakeCluster({topic: 1}) as cluster:
        for _ in range(20):
            cluster.script(METADATA, error(LEADER_NOT_AVAILABLE))
        prepare_topic(options(cluster.bootstrap_servers, topic, kafka_max_block_ms="5000"))


@pytest.mark.parametrize("create", ["true", "false"])
def test_dead_brokers_are_named_with_the_reason(topic: str, create: str) -> None:
    begun = time.monotonic()
    with refusing_port() as port, pytest.raises(BrokersUnreachableError) as caught:
        prepare_topic(options(f"127.0.0.1:{port}", topic, kafka_max_block_ms="800", topic_create=create))
    assert time.monotonic() - begun < 20
    for part in (f"127.0.0.1:{port}", "connecting by TCP failed: Connection refused", "check host and port"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("advertised", "remedy"),
    [(False, "kafka.bootstrap.servers"), (True, "the brokers' advertised.listeners")],
)
def test_planning_that_waits_for_brokers_says_what_to_check(advertised: bool, remedy: str) -> None:
    """Catches: a minute of silence while no broker can be reached."""
    heard: list[str] = []
    WAIT_LISTENER.set(lambda awaited, *_: heard.append(awaited()))
    with refusing_port() as port:
        asked = options(f"127.0.0.1:{port}", "t")
        with planning_client.PlanningClient(asked, 300.0) as client:
            if advertised:
                client.use_advertised([Node(1, "127.0.0.1", port)])
            with pytest.raises(BrokersUnreachableError):
                client.connect()
    assert f"127.0.0.1:{port}" in heard[-1]
    assert heard[-1].endswith(f"check {remedy})")


def test_a_broker_that_never_responds_is_given_up(topic: str) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=50) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(
            BrokersUnreachableError, match=rf"{address}: asking for its API versions did not end"
        ):
            prepare_topic(options(address, topic, kafka_max_block_ms="900"))
        assert 0.8 <= time.monotonic() - begun < 20


def test_an_error_about_a_server_other_than_kafka_names_no_settings_of_java(topic: str) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=50) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def refuse() -> None:
            while True:
                try:
                    caller = server.accept()[0]
                except OSError:
                    return
                with caller:
                    caller.recv(4096)
                    caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        web = threading.Thread(target=refuse)
        web.start()
        try:
            with pytest.raises(
                BrokersUnreachableError, match=rf"{address}: .* not a Kafka broker, or .* TLS"
            ) as caught:
                prepare_topic(options(address, topic, kafka_max_block_ms="2500"))
        finally:
            server.shutdown(socket.SHUT_RDWR)
            web.join()
        assert "receive.message.max.bytes" not in str(caught.value)


def test_one_live_broker_of_two_is_enough(broker: LocalBroker, topic: str) -> None:
    with refusing_port() as port:
        prepare_topic(options(f"127.0.0.1:{port},{broker.bootstrap_servers}", topic))


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


def test_an_answer_that_is_no_kafka_is_told_as_such(topic: str) -> None:
    """Catches: "could not connect within 0.0 s", of a broker that was connected and answered."""
    with FakeCluster({topic: 1}) as cluster:
        cluster.script(API_VERSIONS, garbage(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
        with pytest.raises(
            BrokersUnreachableError, match=r"cannot use any broker: .*not a Kafka broker"
        ) as reported:
            prepare_topic(options(cluster.bootstrap_servers, topic))
    assert "within" not in str(reported.value)


@pytest.mark.usefixtures("application")
def test_a_stream_checks_again_after_an_error(
    topic: str,
) -> None:
    given = options("127.0.0.1:1", topic, kafka_max_block_ms="50")
    for _ in range(2):
        with pytest.raises(BrokersUnreachableError):
            prepare_topic(given, is_streaming=True)


@pytest.mark.parametrize("version", every_version(apis.CREATE_TOPICS))
def test_options_at_their_bounds_can_be_sent(version: int) -> None:
    body = admin_requests.encode_create_topic(version, "t" * 249, 100_000, 10_000, 2**31 - 1)
    assert (100_000).to_bytes(4, "big") + (10_000).to_bytes(2, "big") in body


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


def test_a_request_that_was_given_up_ends_no_later_one() -> None:
    """Catches: a check of planning that is skipped in silence, as the request before failed late."""
    with FakeCluster({"t": 1}, brokers=2) as cluster:
        nodes = [Node(number, "127.0.0.1", cluster.port(number)) for number in range(2)]
        asked = options(cluster.bootstrap_servers, "t")
        with planning_client.PlanningClient(asked, 9_000.0) as client:
            client.connect()
            client.use_advertised(nodes)
            assert all(client.reach(node.id) for node in nodes)
            cluster.freeze(0)
            now_ms = [monotonic_ms()]
            client._clock_ms = lambda: now_ms[0]

            def ask(node_id: int) -> object:
                encode = partial(requests.encode_metadata, topics=("t",), allow_auto_create=False)
                return client.ask(node_id, apis.METADATA, encode, 1_000.0)

            def go_on(*_: object) -> None:
                now_ms[0] += 2_000.0

            token = WAIT_LISTENER.set(go_on)
            assert ask(0) is None
            WAIT_LISTENER.reset(token)
            cluster.script(METADATA, Reply(delay_ms=300.0), node_id=1)
            cluster.disconnect(0)
            assert ask(1) is not None
