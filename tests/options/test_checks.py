"""Options that contradict each other, or that Kafka's own producer adjusts."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import pytest

from kafka_sink.coordinator.breaker_service import BreakerService
from kafka_sink.coordinator.metadata_service import MetadataService
from kafka_sink.errors import ConfigurationError
from kafka_sink.options import ParsedOptions, SinkOptions, parse, table, values
from kafka_sink.options.table import GROUP_OPTIONS, SPECS, is_of_cluster
from tests.support.fake_outbox import FakeOutbox

BASE = {"kafka.bootstrap.servers": "h:1"}


def parsed(raw: dict[str, str]) -> ParsedOptions:
    return parse({**BASE, **{f"kafka.{name}": text for name, text in raw.items()}})


def refused(raw: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        parse({**BASE, **raw})


def test_idempotence_gives_way_unless_it_was_asked_for() -> None:
    conflicts = {"acks": "1", "retries": "0", "max.in.flight.requests.per.connection": "6"}
    for conflict in (*({name: text} for name, text in conflicts.items()), {"acks": "0"}):
        quiet = parsed(conflict)
        assert quiet.options.enable_idempotence is False
        assert any("kafka.enable.idempotence is off" in warning for warning in quiet.warnings)
        assert next(iter(conflict)) in "".join(quiet.warnings)
        with pytest.raises(ConfigurationError, match=r"enable\.idempotence=true needs"):
            parsed({**conflict, "enable.idempotence": "true"})
        off = parsed({**conflict, "enable.idempotence": "false"})
        assert not any("idempotence" in warning for warning in off.warnings)
    found = parsed({"acks": "-1", "max.in.flight.requests.per.connection": "5", "retries": "1"})
    assert found.options.enable_idempotence
    assert found.warnings == ()
    assert "acknowledge nothing" in parsed({"acks": "0", "enable.idempotence": "false"}).warnings[0]


def test_delivery_timeout_holds_linger_and_request() -> None:
    fits = {"linger.ms": "10", "request.timeout.ms": "100", "delivery.timeout.ms": "110"}
    assert parsed(fits).options.delivery_timeout_ms == 110
    with pytest.raises(ConfigurationError, match=r"delivery\.timeout\.ms \(109\) must be at least"):
        parsed({**fits, "delivery.timeout.ms": "109"})
    # The default is raised.
    found = parsed({"linger.ms": "0", "request.timeout.ms": "200000"})
    assert found.options.delivery_timeout_ms == 200_000
    assert "raised" in found.warnings[0]
    # Kafka bounds the sum by its type.
    assert parsed({"linger.ms": str(2**40)}).options.delivery_timeout_ms == 2**31 - 1


def test_a_batch_must_fit_the_memory_and_a_request() -> None:
    large = {"batch.size": "1000001", "buffer.memory": "1000000"}
    assert "closed before they are full" in "".join(parsed(large).warnings)
    with pytest.raises(ConfigurationError, match="'full' no batch could be opened"):
        parsed({**large, "buffer.memory.allocation.strategy": "full"})
    refused({"kafka.buffer.memory": "16383"}, "is smaller than one chunk of 16384")
    assert parsed({"batch.size": "200", "buffer.memory": "200"}).warnings == ()
    assert "max.message.bytes" in parsed({"batch.size": "4194304"}).warnings[0]
    assert parsed({"batch.size": "4194304", "max.request.size": "4194304"}).warnings == ()


def test_a_level_without_its_codec_is_reported() -> None:
    warning = "kafka.compression.zstd.level has no effect without kafka.compression.type=zstd"
    for codec in ("none", "lz4"):
        assert parsed({"compression.zstd.level": "5", "compression.type": codec}).warnings == (warning,)
    assert parsed({"compression.zstd.level": "5", "compression.type": "zstd"}).warnings == ()


def test_a_time_above_its_limit_is_the_limit() -> None:
    for name in ("retry.backoff", "reconnect.backoff", "socket.connection.setup.timeout"):
        found = parsed({f"{name}.ms": "900", f"{name}.max.ms": "800"})
        assert getattr(found.options, f"{name}.ms".replace(".", "_")) == 800
        assert f"kafka.{name}.ms (900) is larger than kafka.{name}.max.ms (800)" in found.warnings[0]
    # The reconnect backoff alone is constant, as in Kafka.
    for raw, expected in (
        ({"reconnect.backoff.ms": "70"}, (70, 70)),
        ({"reconnect.backoff.max.ms": "500"}, (50, 500)),
    ):
        options = parsed(raw).options
        assert (options.reconnect_backoff_ms, options.reconnect_backoff_max_ms) == expected


def test_topic_creation_needs_a_topic_and_is_what_its_settings_need() -> None:
    refused({"topic.create": "true"}, r"topic\.create=true needs the option 'topic'")
    of_topic = {**BASE, "topic": "t"}
    for name in ("topic.partitions", "topic.replication.factor"):
        refused(of_topic | {name: "3"}, rf"'{name}' has no effect without topic\.create=true")
        for wrong in ("0", "100001"):
            refused(of_topic | {"topic.create": "true", name: wrong}, rf"'{name}' is out of bounds")
    numbers = {"topic.partitions": "12", "topic.replication.factor": "3"}
    found = parse({**of_topic, "topic.create": "true", **numbers})
    assert found.warnings == ()
    assert (found.options.topic_partitions, found.options.topic_replication_factor) == (12, 3)
    # Then brokers create nothing unless they are told to.
    assert not found.options.allow_auto_create_topics
    given = {"topic.create": "true", "kafka.allow.auto.create.topics": "true"}
    for more in (given, {"topic.create": "false"}):
        assert parse({**of_topic, **more}).options.allow_auto_create_topics


def test_a_coordinator_gets_what_it_reads_and_nothing_of_a_single_write_or_a_login() -> None:
    read = {
        "kafka.metadata.max.age.ms": "7",
        "kafka.allow.auto.create.topics": "false",
        "kafka.request.timeout.ms": "5",
        "kafka.producer.circuit.breaker.mute.retry.interval": "9000",
        "kafka.producer.circuit.breaker.class": "tests.breaker.test_interface.Own",
    }
    # What a user's breaker class is given may be a credential.
    token = {"kafka.producer.circuit.breaker.token": "secret"}
    login = {"kafka.sasl.mechanism": "PLAIN", "kafka.sasl.username": "u", "kafka.sasl.password": "secret"}
    of_write = {"topic": "t", "kafka.linger.ms": "0", "coordinator.port": "7", "kafka.client.id": "me"}
    given = {**BASE, **read, **token, **login, **of_write, "kafka.security.protocol": "SASL_SSL"}
    options = parse(given).options
    kept = options.group_settings()
    assert kept == read
    assert token.keys() <= options.identity_of_cluster().keys()
    again = parse({**BASE, **kept}).options
    assert again.group_settings() == kept
    assert again.breaker
    assert parse(BASE).options.group_settings() == {}


def test_options_that_only_name_or_time_a_client_share_a_cluster() -> None:
    """Catches: 70 values of client.id for one Kafka made 70 Metadata requests, and shared no mute."""

    def identity(**changes: str) -> Mapping[str, str]:
        return parse({"kafka.bootstrap.servers": "h:1,i:2"} | changes).options.identity_of_cluster()

    for name, value in (
        ("kafka.client.id", "me"),
        ("kafka.request.timeout.ms", "5"),
        ("kafka.retry.backoff.ms", "5"),
        ("kafka.reconnect.backoff.max.ms", "5"),
        ("kafka.connections.max.idle.ms", "5"),
        ("kafka.socket.connection.setup.timeout.ms", "5"),
        ("kafka.bootstrap.servers", "i:2,h:1,i:2"),
    ):
        assert identity(**{name: value}) == identity(), name
    for name, value in (
        ("kafka.bootstrap.servers", "h:1"),
        ("kafka.security.protocol", "SSL"),
        ("kafka.allow.auto.create.topics", "false"),
        ("kafka.metadata.max.age.ms", "5"),
        ("kafka.producer.circuit.breaker.mute.retry.interval", "9000"),
    ):
        assert identity(**{name: value}) != identity(), name


def test_security_settings_make_a_cluster_whatever_they_are_called() -> None:
    """Catches: jobs with different credentials that share one coordinator's connections."""
    of_write = {table.TARGET, table.RATE, table.TRANSACTIONS, table.DELIVERY, table.ERRORS, table.BATCHING}
    of_write |= {table.COMPRESSION, table.PARTITIONER, table.COORDINATOR, table.LIVE_VIEW}
    for group in {spec.group for spec in SPECS} | {"Security"}:
        for kind in (values.STRING, values.SECRET):
            spec = dataclasses.replace(SPECS[0], group=group, kind=kind)
            # Only planning talks to a schema registry.
            is_one = group != table.FORMATS and (group not in of_write or spec.secret)
            assert is_of_cluster(spec) is is_one
    assert all(is_of_cluster(spec) for spec in SPECS if spec.secret and spec.group != table.FORMATS)


def test_the_coordinator_reads_no_option_that_tasks_do_not_tell_it() -> None:
    """Catches: a coordinator that works for one job with the settings of another, or with a default."""
    read: set[str] = set()

    class Recorder(SinkOptions):
        def __getattribute__(self, name: str) -> Any:
            caller = getattr(inspect.currentframe(), "f_back", None)
            # dataclasses.replace copies all.
            if caller is None or caller.f_globals["__name__"] != "dataclasses":
                read.add(name)
            return super().__getattribute__(name)

    parsed = parse(BASE).options
    options = Recorder(**{one.name: getattr(parsed, one.name) for one in dataclasses.fields(parsed)})
    read.clear()
    for service in (MetadataService, BreakerService):
        made = service(options, FakeOutbox())
        made.on_joined(1, 0.0)
        made.on_time(0.0)
    reported = {spec.attribute for spec in SPECS if spec.name in GROUP_OPTIONS}
    assert read - reported == {"breaker"}


def test_an_unencrypted_token_endpoint_is_warned_about() -> None:
    for scheme, count in (("http", 1), ("HTTP", 1), ("https", 0)):
        url = {"sasl.oauthbearer.token.endpoint.url": f"{scheme}://issuer/token"}
        warnings = parsed({"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER", **url}).warnings
        assert len([warning for warning in warnings if "begins with http://" in warning]) == count


def test_dead_letters_need_tolerance_and_a_topic_of_their_own() -> None:
    base, tolerant = {**BASE, "topic": "t"}, {"errors.tolerance": "all"}
    dead_letters = {"errors.deadletterqueue.topic.name": "dead"}
    refused(base | dead_letters, r"no effect without errors\.tolerance=all")
    refused(base | {"errors.max": "5"}, r"'errors\.max' has no effect")
    refused(base | tolerant | {"errors.deadletterqueue.topic.name": "t"}, "another topic for dead letters")
    assert parse(base | dead_letters | tolerant).options.errors_max == 10_000
