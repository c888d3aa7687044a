"""Options of a job: every name, type, bound and contradiction is judged before any work."""

from __future__ import annotations

import itertools
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
    assert "twice" in error_of({**SERVERS, "topic": "a", "Topic": "b"})


def test_missing_servers_name_a_forgotten_prefix() -> None:
    assert error_of({}).startswith("Option 'kafka.bootstrap.servers' must be specified, as in ")
    assert error_of({"bootstrap.servers": "h:1"}).endswith("write 'kafka.bootstrap.servers'")
    assert "(found 'bootstrap.server': the name is 'kafka.b" in error_of({"bootstrap.server": "h:1"})


WRONG = [
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
    ("compression.zstd.level", "-131073", "out of bounds (allowed: -131072 to 22)"),
    ("acks", "2", "not one of all, -1, 1, 0"),
    ("acks", "ALL", "not one of"),
    ("compression.type", "LZ4", "not one of none, gzip, snappy, lz4, zstd"),
    ("metadata.recovery.strategy", "default", "not one of"),
    ("enable.idempotence", "yes", "must be true or false"),
    ("buffer.memory.allocation.strategy", "half", "not one of incremental, full"),
]


def test_wrong_values_name_option_reason_and_value() -> None:
    for name, text, reason in WRONG:
        message = error_of({**SERVERS, f"kafka.{name}": text})
        assert f"'kafka.{name}'" in message
        assert reason in message
        assert f"got '{text}'" in message


def test_invalid_values_are_reported_in_one_error_with_the_names_of_the_documentation() -> None:
    """Catches: a job that failed once for each of its invalid values."""
    raw = {"kafka.linger.ms": "5 apples", "kafka.lingr": "1", "txnversion": "2026-01-31"}
    message = error_of({**SERVERS, **raw})
    assert message.startswith("Unknown option 'kafka.lingr'")
    assert "Option 'kafka.linger.ms' is not a whole number" in message
    assert "Option 'txnVersion' is not a whole number, got '2026-01-31'" in message


def test_a_name_that_no_request_can_hold_is_refused() -> None:
    assert parsed(client__id="ü" * 16_383).options.client_id == "ü" * 16_383
    message = error_of({**SERVERS, "kafka.client.id": "ü" * 16_384})
    assert message.startswith("Option 'kafka.client.id' has 32768 bytes, more than 32767")


def test_words_become_values() -> None:
    words = {"acks": "all", "compression__type": "zstd", "enable__idempotence": "TRUE"}
    more = {"buffer__memory__allocation__strategy": "FULL", "metadata__recovery__strategy": "None"}
    options = parsed(**words, **more).options
    assert (options.acks, options.compression_type) == (-1, CompressionType.ZSTD)
    assert options.enable_idempotence is True
    assert (options.buffer_memory_allocation_strategy, options.metadata_recovery_strategy) == ("full", "none")


LEVELS = {"gzip": 9, "lz4": 3, "zstd": -5}


def test_level_of_the_chosen_codec() -> None:
    levels = {f"compression__{codec}__level": str(level) for codec, level in LEVELS.items()}
    for codec in ("none", "snappy", "gzip", "lz4", "zstd"):
        found = [parsed(compression__type=codec, **more).options.compression_level for more in ({}, levels)]
        assert found == [3 if codec == "zstd" else None, LEVELS.get(codec)]


def test_idle_time_has_two_names_which_must_agree() -> None:
    former = {"metadata__evict__ms": "5000"}
    for given in (former, {**former, "metadata__max__idle__ms": "5000"}):
        assert parsed(**given).options.metadata_max_idle_ms == 5000
    message = error_of({**SERVERS, "kafka.metadata.evict.ms": "5000", "kafka.metadata.max.idle.ms": "6000"})
    assert "same option" in message


def test_breaker_options_go_to_the_breaker() -> None:
    prefix = "producer__circuit__breaker__"
    given = {"class": "a.users.Class", "b": "2", "a": "1"}
    options = parsed(**{f"{prefix}{name}": value for name, value in given.items()}).options
    assert options.breaker.given == (("a", "1"), ("b", "2"), ("class", "a.users.Class"))
    assert "Unknown option" in error_of({**SERVERS, "kafka.producer.circuit.breaker.": "1"})
    # Catches: options of a breaker that is switched off were silently ignored.
    (warning,) = parsed(**{f"{prefix}class": "none", f"{prefix}a": "1"}).warnings
    assert warning.endswith("no effect on this sink: kafka.producer.circuit.breaker.a")


def test_options_are_values() -> None:
    options = parsed(linger__ms="9").options
    again = pickle.loads(pickle.dumps(options))
    assert again == options != parsed().options
    assert {options: 1}[again] == 1


def test_repr_shows_what_was_set_and_hides_what_may_be_secret() -> None:
    breaker = {"producer__circuit__breaker__class": "a.users.Class"}
    breaker["producer__circuit__breaker__token"] = "s3cret"
    options = parsed(linger__ms="9", **breaker).options
    assert repr(options) == (
        "SinkOptions(kafka.bootstrap.servers='localhost:9092', kafka.linger.ms='9', "
        "kafka.producer.circuit.breaker.class='[hidden]', "
        "kafka.producer.circuit.breaker.token='[hidden]')"
    )
    assert "s3cret" not in f"{options} {options!r} {options.redacted()}"


PEM_KEY = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANhunter2\n-----END PRIVATE KEY-----"
KEYS = (PEM_KEY, PEM_KEY.replace("\n", " "), "MIIEvQIBADANhunter2" + "AbCd/+19" * 200 + "==")


def test_a_key_where_anything_else_belongs_is_refused_and_never_shown() -> None:
    """Catches: .location and .key confused, and the whole key in the error and in repr(SinkOptions)."""
    for key, name in itertools.product(KEYS, (spec.name for spec in SPECS if not spec.secret)):
        said = error_of({**SERVERS, name: key})
        assert name in said
        assert "hunter2" not in said, name
        if name.endswith(".location"):
            assert "instead of a path" in said
            assert "kafka.ssl.keystore.key" in said


def test_a_refused_value_is_cut_and_forges_no_line() -> None:
    for name in ("kafka.linger.ms", "kafka.producer.circuit.breaker.mute.retry.interval"):
        said = error_of({**SERVERS, name: "1\n26/11/22 ERROR forged" + "9" * 100_000})
        assert "\n" not in said
        assert len(said) < 500


def test_paths_are_taken_as_they_are() -> None:
    for path in ("/etc/MIIEvQ/key.pem", "MIIEvQ.pem", "certificates/" + "long/" * 40 + "key"):
        assert parsed(security__protocol="SSL", ssl__ca__location=path).options.ssl_ca_location == path


def test_settings_of_topics_belong_to_topic_create() -> None:
    raw = {**SERVERS, "topic": "t", "topic.config.retention.ms": "1000"}
    assert "'topic.config.retention.ms' has no effect without" in error_of(raw)
    found = parse({**raw, "topic.create": "true"})
    assert found.warnings == ()
    assert found.options.topic_config == (("retention.ms", "1000"),)
    names = ("topic.create", "topic.config.a", "topic.config.b")
    forth, back = (parse({**raw, **dict.fromkeys(order, "true")}) for order in (names, names[::-1]))
    assert forth == back
    assert found.options.redacted()["topic.config.retention.ms"] == "1000"
    assert found.options.for_tasks().topic_config == ()


def test_shown_options_hold_neither_logins_nor_defaults() -> None:
    # Catches: kafka.allow.auto.create.topics=false, which follows from topic.create.
    shown = {"topic": "orders", "topic.create": "true", "kafka.linger.ms": "5", "value.format": "json"}
    shown["schema.registry.url"] = "http://registry"
    login = {"kafka.sasl.mechanism": "PLAIN", "kafka.sasl.username": "u", "kafka.sasl.password": "hunter2"}
    others = {"kafka.acks": "all", "kafka.security.protocol": "SASL_SSL"}
    others |= {"schema.registry.basic.auth.user.info": "me:hunter3"}
    assert parse({**SERVERS, **shown, **login, **others}).options.shown() == shown
