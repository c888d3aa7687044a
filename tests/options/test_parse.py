"""Options of a job: every name, type, bound and contradiction is judged before any work."""

from __future__ import annotations

import pickle

import pytest

from kafka_sink.errors import ConfigurationError
from kafka_sink.model import CompressionType
from kafka_sink.options import ParsedOptions, parse
from kafka_sink.options.table import SPECS

SERVERS = {"kafka.bootstrap.servers": "localhost:9092"}


def parsed(**kafka: str) -> ParsedOptions:
    """Parse with a bootstrap server; ``__`` in a keyword stands for a dot under ``kafka.``."""
    return parse({**SERVERS, **{"kafka." + name.replace("__", "."): text for name, text in kafka.items()}})


def error_of(raw: dict[str, str]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        parse(raw)
    assert caught.value.__cause__ is None
    return str(caught.value)


def test_defaults_need_only_the_servers() -> None:
    options, warnings = parsed().options, parsed().warnings
    assert warnings == ()
    assert options.bootstrap_servers == (("localhost", 9092),)
    for spec in SPECS:
        if not spec.required:
            assert getattr(options, spec.attribute) == spec.default, spec.name


def test_keys_come_in_any_case_and_values_with_blanks() -> None:
    options = parse({"KAFKA.Bootstrap.Servers": " h:1 ", "Topic": " t ", "kafka.LINGER.ms": " 7 "}).options
    assert (options.bootstrap_servers, options.topic, options.linger_ms) == ((("h", 1),), "t", 7)


def test_same_option_in_two_cases_must_agree() -> None:
    assert "twice" in error_of({**SERVERS, "topic": "a", "Topic": "b"})


def test_missing_servers_name_a_forgotten_prefix() -> None:
    assert error_of({}) == "Option 'kafka.bootstrap.servers' must be specified"
    assert error_of({"bootstrap.servers": "h:1"}).endswith("write 'kafka.bootstrap.servers'")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:1", (("a", 1),)),
        ("a:1, b-c.example.org:65535", (("a", 1), ("b-c.example.org", 65535))),
        ("[::1]:9092,127.0.0.1:2", (("::1", 9092), ("127.0.0.1", 2))),
        ("[fe80::1%eth0]:9092", (("fe80::1%eth0", 9092),)),
        ("plaintext://a:1", (("a", 1),)),
        ("a:1,a:1", (("a", 1),)),
    ],
)
def test_servers(text: str, expected: tuple[tuple[str, int], ...]) -> None:
    assert parse({"kafka.bootstrap.servers": text}).options.bootstrap_servers == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        ("a:1,", "empty entry"),
        ("a:1,,b:2", "empty entry"),
        ("localhost", "not host:port"),
        (":9092", "not host:port"),
        ("a:", "port"),
        ("a:0", "port"),
        ("a:65536", "port"),
        ("a:-1", "port"),
        ("a:９", "port"),
        ("::1:9092", "without brackets"),
        ("[::1]", "without brackets"),
        ("[localhost]:1", "not an IPv6 address"),
        ("a b:1", "not a name"),
        ("user:password@h:1", "credentials do not belong"),
        ("user:password@h", "credentials do not belong"),
        ("SSL://h:1", "kafka.security.protocol"),
    ],
)
def test_wrong_servers(text: str, reason: str) -> None:
    message = error_of({"kafka.bootstrap.servers": text})
    assert message.startswith("Option 'kafka.bootstrap.servers'")
    assert reason in message
    assert "password" not in message


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("batch.size", "1k", "not a whole number"),
        ("batch.size", "", "not a whole number"),
        ("batch.size", "1_000", "not a whole number"),
        ("batch.size", "1.5", "not a whole number"),
        ("batch.size", "-1", "out of bounds"),
        ("batch.size", str(2**31), "out of bounds (allowed: 0 to 2147483647)"),
        ("linger.ms", str(2**63), "out of bounds"),
        ("buffer.memory", "127", "out of bounds"),
        ("max.in.flight.requests.per.connection", "0", "out of bounds (allowed: 1 to"),
        ("metadata.max.idle.ms", "4999", "out of bounds"),
        ("metadata.evict.ms", "4999", "out of bounds"),
        ("compression.gzip.level", "0", "out of bounds (allowed: 1 to 9, or -1)"),
        ("compression.lz4.level", "18", "out of bounds"),
        ("compression.zstd.level", "23", "out of bounds"),
        ("acks", "2", "not one of all, -1, 1, 0"),
        ("acks", "ALL", "not one of"),
        ("compression.type", "LZ4", "not one of none, gzip, snappy, lz4, zstd"),
        ("client.dns.lookup", "default", "not one of"),
        ("enable.idempotence", "yes", "must be true or false"),
        ("buffer.memory.allocation.strategy", "half", "not one of incremental, full"),
    ],
)
def test_wrong_values_name_option_reason_and_value(name: str, text: str, reason: str) -> None:
    message = error_of({**SERVERS, f"kafka.{name}": text})
    assert f"'kafka.{name}'" in message
    assert reason in message
    assert f"got '{text}'" in message


def test_a_name_that_no_request_can_hold_is_refused() -> None:
    assert parsed(client__id="ü" * 16_383).options.client_id == "ü" * 16_383
    message = error_of({**SERVERS, "kafka.client.id": "ü" * 16_384})
    assert message.startswith("Option 'kafka.client.id' has 32768 bytes, more than 32767")


def test_words_become_values() -> None:
    options = parsed(acks="all", compression__type="zstd", enable__idempotence="TRUE").options
    assert (options.acks, options.compression_type, options.enable_idempotence) == (
        -1,
        CompressionType.ZSTD,
        True,
    )
    assert (
        parsed(buffer__memory__allocation__strategy="FULL").options.buffer_memory_allocation_strategy
        == "full"
    )
    assert parsed(metadata__recovery__strategy="None").options.metadata_recovery_strategy == "none"


@pytest.mark.parametrize(
    ("codec", "level", "expected"),
    [
        ("none", {}, None),
        ("snappy", {}, None),
        ("gzip", {}, None),
        ("gzip", {"compression__gzip__level": "9"}, 9),
        ("lz4", {}, None),
        ("lz4", {"compression__lz4__level": "3"}, 3),
        ("zstd", {}, 3),
        ("zstd", {"compression__zstd__level": "-5"}, -5),
        ("zstd", {"compression__gzip__level": "9"}, 3),
    ],
)
def test_level_of_the_chosen_codec(codec: str, level: dict[str, str], expected: int | None) -> None:
    assert parsed(compression__type=codec, **level).options.compression_level == expected


@pytest.mark.parametrize("name", ["", " ", ".", "..", "a b", "größe", "a/b", "x" * 250])
def test_illegal_topics(name: str) -> None:
    assert error_of({**SERVERS, "topic": name}).startswith("Option 'topic' ")


@pytest.mark.parametrize("name", ["a", "x" * 249, "A-Z_0.9", "..."])
def test_legal_topics(name: str) -> None:
    assert parse({**SERVERS, "topic": name}).options.topic == name


def test_both_names_of_the_idle_time() -> None:
    assert parsed(metadata__evict__ms="5000").options.metadata_max_idle_ms == 5000
    assert (
        parsed(metadata__evict__ms="5000", metadata__max__idle__ms="5000").options.metadata_max_idle_ms
        == 5000
    )
    message = error_of({**SERVERS, "kafka.metadata.evict.ms": "5000", "kafka.metadata.max.idle.ms": "6000"})
    assert "same option" in message


def test_breaker_options_go_to_the_breaker() -> None:
    options = parsed(producer__circuit__breaker__b="2", producer__circuit__breaker__a="1").options
    assert options.breaker.given == (("a", "1"), ("b", "2"))
    assert "Unknown option" in error_of({**SERVERS, "kafka.producer.circuit.breaker.": "1"})


def test_options_are_values() -> None:
    options = parsed(linger__ms="9").options
    again = pickle.loads(pickle.dumps(options))
    assert again == options
    assert hash(again) == hash(options)
    assert options != parsed().options
    assert {options: 1}[again] == 1


def test_repr_shows_what_was_set_and_hides_what_may_be_secret() -> None:
    options = parsed(linger__ms="9", producer__circuit__breaker__token="s3cret").options
    assert repr(options) == (
        "SinkOptions(kafka.bootstrap.servers='localhost:9092', kafka.linger.ms='9', "
        "kafka.producer.circuit.breaker.token='[hidden]')"
    )
    assert "s3cret" not in f"{options} {options!r} {options.redacted()}"


PEM_KEY = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANhunter2\n-----END PRIVATE KEY-----"
KEYS = (PEM_KEY, PEM_KEY.replace("\n", " "), "MIIEvQIBADANhunter2" + "AbCd/+19" * 200 + "==")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", [spec.name for spec in SPECS if not spec.secret])
def test_a_key_where_anything_else_belongs_is_refused_and_never_shown(name: str, key: str) -> None:
    """Catches: .location and .key confused, and the whole key in the error and in repr(SinkOptions)."""
    said = error_of({**SERVERS, name: key})
    assert name.lower() in said
    assert "hunter2" not in said
    if name.endswith(".location"):
        assert "where a path belongs" in said
        assert "kafka.ssl.keystore.key" in said


def test_a_refused_value_is_cut_and_forges_no_line() -> None:
    said = error_of({**SERVERS, "kafka.linger.ms": "1\n26/11/22 ERROR forged" + "9" * 100_000})
    assert "\n" not in said
    assert len(said) < 500


@pytest.mark.parametrize(
    "path", ["/etc/MIIEvQ/key.pem", "MIIEvQ.pem", "certificates/" + "long/" * 40 + "key"]
)
def test_paths_are_taken_as_they_are(path: str) -> None:
    options = parsed(security__protocol="SSL", ssl__ca__location=path).options
    assert options.ssl_ca_location == path


@pytest.mark.parametrize("name", [spec.name for spec in SPECS])
def test_what_is_shown_can_be_read_back(name: str) -> None:
    spec = next(spec for spec in SPECS if spec.name == name)
    if spec.default not in (None, "", ()):
        assert spec.kind.parse(spec.kind.show(spec.default)) == spec.default


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("kafka.linger.ms", "20ms", 20),
        ("kafka.delivery.timeout.ms", "5min", 300_000),
        ("kafka.max.block.ms", "30 s", 30_000),
        ("kafka.batch.size", "1MiB", 1 << 20),
        ("kafka.buffer.memory", "64mib", 64 << 20),
        ("kafka.send.buffer.bytes", "128KiB", 128 << 10),
        ("max.bytes.per.second", "2MiB", 2 << 20),
    ],
)
def test_values_may_have_units_where_the_name_says_of_what(name: str, text: str, value: int) -> None:
    attribute = name.removeprefix("kafka.").replace(".", "_")
    assert getattr(parse({"kafka.bootstrap.servers": "h:1", name: text}).options, attribute) == value


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("kafka.linger.ms", "20MiB", "is not a whole number, or one with a unit of ms, s, min, h, d"),
        ("kafka.batch.size", "1MB", "is not a whole number, or one with a unit of B, KiB, MiB, GiB"),
        ("kafka.batch.size", "64m", "is not a whole number, or one with a unit of B, KiB, MiB, GiB"),
        ("kafka.max.block.ms", "1.5s", "is not a whole number"),
        ("topic.partitions", "4k", "is not a whole number"),
        ("kafka.batch.size", "4GiB", "is out of bounds"),
    ],
)
def test_units_that_leave_a_doubt_are_errors(name: str, text: str, problem: str) -> None:
    raw = {"kafka.bootstrap.servers": "h:1", "topic": "t", "topic.create": "true", name: text}
    with pytest.raises(ConfigurationError) as caught:
        parse(raw)
    assert f"Option '{name}' {problem}" in str(caught.value)
    assert str(caught.value).endswith(f", got '{text}'")


def test_settings_of_topics_belong_to_topic_create() -> None:
    raw = {"kafka.bootstrap.servers": "h:1", "topic": "t", "topic.config.retention.ms": "1000"}
    with pytest.raises(ConfigurationError, match=r"'topic\.config\.retention\.ms' has no effect without"):
        parse(raw)
    found = parse({**raw, "topic.create": "true"})
    assert found.warnings == ()
    assert found.options.topic_config == (("retention.ms", "1000"),)
    assert found.options.redacted()["topic.config.retention.ms"] == "1000"
    assert found.options.for_tasks().topic_config == ()


def test_shown_options_hold_neither_logins_nor_defaults() -> None:
    options = {
        "kafka.bootstrap.servers": "b:9092",
        "topic": "orders",
        "kafka.linger.ms": "5",
        "kafka.acks": "all",
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.username": "night",
        "kafka.sasl.password": "hunter2",
        "value.format": "json",
        "schema.registry.url": "http://registry",
        "schema.registry.basic.auth.user.info": "me:hunter3",
    }
    assert parse(options).options.shown() == {
        "topic": "orders",
        "kafka.linger.ms": "5",
        "value.format": "json",
        "schema.registry.url": "http://registry",
    }
