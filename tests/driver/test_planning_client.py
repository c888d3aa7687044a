"""The errors of planning for brokers that it cannot use."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, closing, suppress

import pytest

from kafka_sink.clock import WAIT_LISTENER
from kafka_sink.driver import planning_client
from kafka_sink.driver.topic_preparation import prepare_topic
from kafka_sink.errors import BrokersUnreachableError
from kafka_sink.model import Node
from local_kafka import LocalBroker
from tests.support.fake_broker import API_VERSIONS, METADATA, FakeCluster
from tests.support.fake_replies import garbage
from tests.support.lookups import options
from tests.support.ports import refusing_port, resolve_many
from tests.support.sink_time import slow_until


def test_addresses_that_brokers_advertise_and_nobody_reaches_are_named(topic: str) -> None:
    with FakeCluster({topic: 1}) as cluster:
        # The nodes in its metadata, not where it listens.
        cluster.advertise(1)
        why = r"advertised\.listeners.*127\.0\.0\.1:1: connecting"
        unreachable = pytest.raises(BrokersUnreachableError, match=why)
        with slow_until(lambda: cluster.received(METADATA)), unreachable:
            prepare_topic(options(cluster.bootstrap_servers, topic, kafka_max_block_ms="1500"))


def test_dead_brokers_are_named_with_the_reason(topic: str) -> None:
    for create in ("true", "false"):
        begun = time.monotonic()
        with refusing_port() as port, pytest.raises(BrokersUnreachableError) as caught:
            prepare_topic(options(f"127.0.0.1:{port}", topic, kafka_max_block_ms="500", topic_create=create))
        assert time.monotonic() - begun < 50
        refused = "connecting by TCP failed: Connection refused"
        for part in (f"127.0.0.1:{port}", refused, "check host and port"):
            assert part in str(caught.value)


@pytest.mark.parametrize(
    ("advertised", "remedy"),
    [(False, "kafka.bootstrap.servers"), (True, "the brokers' advertised.listeners")],
)
def test_planning_that_waits_for_brokers_says_what_to_check(advertised: bool, remedy: str) -> None:
    """Catches: a minute of silence while no broker can be reached."""
    heard: list[str] = []
    token = WAIT_LISTENER.set(lambda awaited, *_: heard.append(awaited()))
    try:
        with refusing_port() as port:
            asked = options(f"127.0.0.1:{port}", "t")
            with closing(planning_client.PlanningClient(asked, 300.0)) as client:
                if advertised:
                    client.use_advertised([Node(1, "127.0.0.1", port)])
                with pytest.raises(BrokersUnreachableError):
                    client.connect()
    finally:
        WAIT_LISTENER.reset(token)
    assert f"127.0.0.1:{port}" in heard[-1]
    assert heard[-1].endswith(f"check {remedy})")


def test_a_broker_that_never_responds_is_given_up(topic: str) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=50) as server, ExitStack() as peers:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        server.setblocking(False)

        def has_asked() -> bytes:
            with suppress(BlockingIOError):
                peer, _ = server.accept()
                peers.enter_context(peer)
                return peer.recv(1)
            return b""

        begun = time.monotonic()
        why = rf"{address}: asking for its API versions did not complete: .* may expect TLS .*HTTP server"
        with slow_until(has_asked), pytest.raises(BrokersUnreachableError, match=why):
            prepare_topic(options(address, topic, kafka_max_block_ms="500"))
        assert 0.4 <= time.monotonic() - begun < 50


def test_an_address_that_is_silent_does_not_end_planning_while_another_is_untried(
    topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeCluster({topic: 1}) as cluster, socket.create_server(("127.0.0.1", 0)) as silent:
        resolve_many(monkeypatch, silent.getsockname()[1], cluster.port(0))
        asked = options("many.example:9092", topic, kafka_socket_connection_setup_timeout_ms="2000")
        with closing(planning_client.PlanningClient(asked, 300.0)) as client:
            assert client.connect() == -1


def test_planning_needs_one_live_broker_of_two(broker: LocalBroker, topic: str) -> None:
    with refusing_port() as port:
        prepare_topic(options(f"127.0.0.1:{port},{broker.bootstrap_servers}", topic))


def test_an_answer_that_is_no_kafka_is_told_as_such(topic: str) -> None:
    """Catches: "could not connect within 0.0 s", of a broker that was connected and answered; and settings of
    Java's client."""
    with FakeCluster({topic: 1}) as cluster:
        for _ in range(50):
            cluster.script(API_VERSIONS, garbage(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
        why = r"cannot use any broker: .*is an HTTP server, and not a Kafka broker"
        with pytest.raises(BrokersUnreachableError, match=why) as reported:
            prepare_topic(options(cluster.bootstrap_servers, topic))
    for wrong in ("within", "receive.message.max.bytes"):
        assert wrong not in str(reported.value)
