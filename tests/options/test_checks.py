"""Options that contradict each other, or that Kafka's own producer adjusts."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest

from kafka_sink.coordinator.breaker_service import BreakerService
from kafka_sink.coordinator.metadata import MetadataService
from kafka_sink.errors import ConfigurationError
from kafka_sink.options import ParsedOptions, SinkOptions, parse
from kafka_sink.options.table import (
    BATCHING,
    COMPRESSION,
    COORDINATOR,
    DELIVERY,
    ERRORS,
    FORMATS,
    GROUP_OPTIONS,
    LIVE_VIEW,
    PARTITIONER,
    RATE,
    SPECS,
    TARGET,
    TRANSACTIONS,
    is_of_cluster,
)
from tests.support.fake_outbox import FakeOutbox


def parsed(raw: dict[str, str]) -> ParsedOptions:
    return parse({"kafka.bootstrap.servers": "h:1", **{f"kafka.{name}": text for name, text in raw.items()}})


@pytest.mark.parametrize(
    "conflict",
    [{"acks": "1"}, {"acks": "0"}, {"retries": "0"}, {"max.in.flight.requests.per.connection": "6"}],
)
def test_idempotence_gives_way_unless_it_was_asked_for(conflict: dict[str, str]) -> None:
    quiet = parsed(conflict)
    assert quiet.options.enable_idempotence is False
    assert any("kafka.enable.idempotence is off" in warning for warning in quiet.warnings)
    assert next(iter(conflict)) in "".join(quiet.warnings)
    with pytest.raises(ConfigurationError, match=r"enable\.idempotence=true needs"):
        parsed({**conflict, "enable.idempotence": "true"})
    off = parsed({**conflict, "enable.idempotence": "false"})
    assert not any("idempotence" in warning for warning in off.warnings)


def test_idempotence_stays_where_nothing_is_against_it() -> None:
    found = parsed({"acks": "-1", "max.in.flight.requests.per.connection": "5", "retries": "1"})
    assert found.options.enable_idempotence
    assert found.warnings == ()


def test_acks_0_is_warned_about() -> None:
    assert "acknowledge nothing" in parsed({"acks": "0", "enable.idempotence": "false"}).warnings[0]


def test_delivery_timeout_holds_linger_and_request() -> None:
    fits = {"linger.ms": "10", "request.timeout.ms": "100", "delivery.timeout.ms": "110"}
    assert parsed(fits).options.delivery_timeout_ms == 110
    with pytest.raises(ConfigurationError, match=r"delivery\.timeout\.ms \(109\) must be at least"):
        parsed({**fits, "delivery.timeout.ms": "109"})


def test_default_delivery_timeout_is_raised() -> None:
    found = parsed({"linger.ms": "0", "request.timeout.ms": "200000"})
    assert found.options.delivery_timeout_ms == 200_000
    assert "raised" in found.warnings[0]
    # Kafka bounds the sum by its type.
    assert parsed({"linger.ms": str(2**40)}).options.delivery_timeout_ms == 2**31 - 1


def test_a_batch_must_fit_the_memory() -> None:
    large = {"batch.size": "1000001", "buffer.memory": "1000000"}
    found = parsed(large)
    assert "closed before they are full" in "".join(found.warnings)
    with pytest.raises(ConfigurationError, match="'full' no batch could be opened"):
        parsed({**large, "buffer.memory.allocation.strategy": "full"})
    with pytest.raises(ConfigurationError, match="does not hold one chunk of 16384"):
        parsed({"buffer.memory": "16383"})
    assert parsed({"batch.size": "200", "buffer.memory": "200"}).warnings == ()


def test_a_batch_size_above_the_request_size_causes_a_warning() -> None:
    assert "max.message.bytes" in parsed({"batch.size": "4194304"}).warnings[0]
    assert parsed({"batch.size": "4194304", "max.request.size": "4194304"}).warnings == ()


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("retry.backoff.ms", "retry.backoff.max.ms"),
        ("reconnect.backoff.ms", "reconnect.backoff.max.ms"),
        ("socket.connection.setup.timeout.ms", "socket.connection.setup.timeout.max.ms"),
    ],
)
def test_a_time_above_its_limit_is_the_limit(name: str, limit: str) -> None:
    found = parsed({name: "900", limit: "800"})
    assert getattr(found.options, name.replace(".", "_")) == 800
    assert f"kafka.{name} (900) is larger than kafka.{limit} (800)" in found.warnings[0]


def test_reconnect_backoff_alone_is_constant_as_in_kafka() -> None:
    options = parsed({"reconnect.backoff.ms": "70"}).options
    assert (options.reconnect_backoff_ms, options.reconnect_backoff_max_ms) == (70, 70)
    options = parsed({"reconnect.backoff.max.ms": "500"}).options
    assert (options.reconnect_backoff_ms, options.reconnect_backoff_max_ms) == (50, 500)


def test_topic_creation_needs_a_topic_and_is_what_its_settings_need() -> None:
    base = {"kafka.bootstrap.servers": "h:1"}
    with pytest.raises(ConfigurationError, match=r"topic\.create=true needs the option 'topic'"):
        parse({**base, "topic.create": "true"})
    for name in ("topic.partitions", "topic.replication.factor"):
        with pytest.raises(ConfigurationError, match=rf"'{name}' has no effect without topic\.create=true"):
            parse({**base, "topic": "t", name: "3"})
        # What is above, the library that creates the topic does not take.
        for refused in ("0", "100001"):
            with pytest.raises(ConfigurationError, match=rf"'{name}' is out of bounds"):
                parse({**base, "topic": "t", "topic.create": "true", name: refused})
    found = parse(
        {
            **base,
            "topic": "t",
            "topic.create": "true",
            "topic.partitions": "12",
            "topic.replication.factor": "3",
        }
    )
    assert found.warnings == ()
    assert (found.options.topic_partitions, found.options.topic_replication_factor) == (12, 3)


def test_with_topic_creation_brokers_create_nothing_unless_told_to() -> None:
    base = {"kafka.bootstrap.servers": "h:1", "topic": "t", "topic.create": "true"}
    assert not parse(base).options.allow_auto_create_topics
    assert parse({**base, "kafka.allow.auto.create.topics": "true"}).options.allow_auto_create_topics
    assert parse({**base, "topic.create": "false"}).options.allow_auto_create_topics


def test_a_coordinator_gets_what_it_reads_and_nothing_of_a_single_write_or_a_login() -> None:
    base = {"kafka.bootstrap.servers": "h:1,i:2"}
    read = {
        "kafka.metadata.max.age.ms": "7",
        "kafka.allow.auto.create.topics": "false",
        "kafka.request.timeout.ms": "5",
        "coordinator.report.interval.ms": "60000",
        "kafka.producer.circuit.breaker.mute.retry.interval": "9000",
    }
    others = {
        "topic": "t",
        "kafka.linger.ms": "0",
        "coordinator.port": "7",
        "kafka.client.id": "me",
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.username": "u",
        "kafka.sasl.password": "secret",
    }
    kept = parse({**base, **read, **others}).options.group_settings()
    assert kept == read
    again = parse({**base, **kept}).options
    assert again.group_settings() == kept
    assert again.coordinator_report_interval_ms == 60_000
    assert again.breaker
    assert parse(base).options.group_settings() == {}


def test_a_coordinator_gets_no_option_of_a_users_breaker_class() -> None:
    """It may be a credential."""
    prefix = "kafka.producer.circuit.breaker."
    given = {f"{prefix}class": "tests.breaker.test_interface.Own", f"{prefix}token": "secret"}
    options = parse({"kafka.bootstrap.servers": "h:1", **given}).options
    assert options.group_settings() == {f"{prefix}class": "tests.breaker.test_interface.Own"}
    assert f"{prefix}token" in options.identity_of_cluster()


@pytest.mark.parametrize(
    ("name", "value", "splits"),
    [
        ("kafka.client.id", "me", False),
        ("kafka.request.timeout.ms", "5", False),
        ("kafka.retry.backoff.ms", "5", False),
        ("kafka.reconnect.backoff.max.ms", "5", False),
        ("kafka.connections.max.idle.ms", "5", False),
        ("kafka.socket.connection.setup.timeout.ms", "5", False),
        ("kafka.send.buffer.bytes", "5", False),
        ("kafka.receive.buffer.bytes", "5", False),
        ("kafka.bootstrap.servers", "i:2,h:1,i:2", False),
        ("kafka.bootstrap.servers", "h:1", True),
        ("kafka.security.protocol", "SSL", True),
        ("kafka.client.dns.lookup", "resolve_canonical_bootstrap_servers_only", True),
        ("kafka.allow.auto.create.topics", "false", True),
        ("kafka.metadata.max.age.ms", "5", True),
        ("coordinator.report.interval.ms", "5000", True),
        ("kafka.producer.circuit.breaker.mute.retry.interval", "9000", True),
    ],
)
def test_options_that_only_name_or_time_a_client_share_a_cluster(name: str, value: str, splits: bool) -> None:
    """Catches: 70 values of client.id for one Kafka made 70 Metadata requests, and shared no mute."""
    base = {"kafka.bootstrap.servers": "h:1,i:2"}
    one, other = (parse(given).options.identity_of_cluster() for given in (base, {**base, name: value}))
    assert (one != other) is splits


def test_the_principal_is_told_by_all_that_decides_who_connects_and_how() -> None:
    base = {"kafka.bootstrap.servers": "h:1", "kafka.security.protocol": "SSL"}
    others = {"kafka.bootstrap.servers": "i:1", "kafka.client.id": "me", "kafka.metadata.max.age.ms": "5"}
    assert parse({**base, **others}).options.principal() == parse(base).options.principal()
    assert (
        parse({**base, "kafka.ssl.ca.location": "/x"}).options.principal() != parse(base).options.principal()
    )


def test_security_settings_make_a_cluster_whatever_they_are_called() -> None:
    """Catches: jobs with different credentials that share one coordinator's connections."""
    for group in {spec.group for spec in SPECS} | {"Security"}:
        for secret in (False, True):
            spec = dataclasses.replace(SPECS[0], attribute="new", group=group, secret=secret)
            of_write = group in (
                *(TARGET, RATE, TRANSACTIONS, DELIVERY, ERRORS, BATCHING, COMPRESSION, PARTITIONER),
                *(COORDINATOR, LIVE_VIEW),
            )
            # Only planning talks to a schema registry.
            assert is_of_cluster(spec) is (group != FORMATS and (not of_write or secret))
    assert all(is_of_cluster(spec) for spec in SPECS if spec.secret and spec.group != FORMATS)


def test_the_coordinator_reads_no_option_that_tasks_do_not_tell_it() -> None:
    """Catches: a coordinator that works for one job with the settings of another, or with a default."""
    read: set[str] = set()

    class Recorder(SinkOptions):
        def __getattribute__(self, name: str) -> Any:
            # dataclasses.replace copies all.
            if sys._getframe(1).f_globals["__name__"] != "dataclasses":
                read.add(name)
            return super().__getattribute__(name)

    parsed = parse({"kafka.bootstrap.servers": "127.0.0.1:1"}).options
    options = Recorder(**{one.name: getattr(parsed, one.name) for one in dataclasses.fields(parsed)})
    read.clear()
    for service in (MetadataService, BreakerService):
        made = service(options, FakeOutbox())
        made.on_joined(1, 0.0)
        made.on_time(0.0)
    reported = {spec.attribute for spec in SPECS if spec.name in GROUP_OPTIONS}
    assert read - reported == {"breaker"}


@pytest.mark.parametrize(("scheme", "count"), [("http", 1), ("HTTP", 1), ("https", 0)])
def test_an_unencrypted_token_endpoint_is_warned_about(scheme: str, count: int) -> None:
    options = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.token.endpoint.url": f"{scheme}://issuer/token",
    }
    found = [warning for warning in parsed(options).warnings if "begins with http://" in warning]
    assert len(found) == count


def test_dead_letters_need_tolerance_and_a_topic_of_their_own() -> None:
    base = {"kafka.bootstrap.servers": "h:1", "topic": "t"}
    dead_letters = {"errors.deadletterqueue.topic.name": "dead"}
    with pytest.raises(ConfigurationError, match=r"no effect without errors\.tolerance=all"):
        parse(base | dead_letters)
    with pytest.raises(ConfigurationError, match=r"'errors\.max' has no effect"):
        parse(base | {"errors.max": "5"})
    with pytest.raises(ConfigurationError, match="a topic of their own"):
        parse(base | {"errors.tolerance": "all", "errors.deadletterqueue.topic.name": "t"})
    assert parse(base | dead_letters | {"errors.tolerance": "all"}).options.errors_max == 10_000
