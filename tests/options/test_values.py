"""Texts of options become values: addresses, topics, numbers with units; and errors say what is wrong."""

from __future__ import annotations

import pytest

from kafka_sink.errors import ConfigurationError
from kafka_sink.options import parse
from kafka_sink.options.parse import failure_rate_settings
from kafka_sink.options.table import BY_NAME, SPECS

SERVERS = {"kafka.bootstrap.servers": "localhost:9092"}


def error_of(raw: dict[str, str]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        parse(SERVERS | raw)
    return str(caught.value)


def test_servers() -> None:
    for text, expected in {
        "a:1": (("a", 1),),
        "a:1, b-c.example.org:65535": (("a", 1), ("b-c.example.org", 65535)),
        "[::1]:9092,127.0.0.1:2": (("::1", 9092), ("127.0.0.1", 2)),
        "[fe80::1%eth0]:9092": (("fe80::1%eth0", 9092),),
        "plaintext://a:1": (("a", 1),),
        "a:1,a:1": (("a", 1),),
        "a:1,b:2 , ": (("a", 1), ("b", 2)),
    }.items():
        assert parse({"kafka.bootstrap.servers": text}).options.bootstrap_servers == expected


def test_wrong_servers() -> None:
    for text, reason in {
        "": "is empty",
        "a:1,,": "empty entry",
        ",": "empty entry",
        "a:1 b:2": "write a comma between two addresses",
        "a:1\tb:2": "write a comma between two addresses",
        "kafka+ssl://a:1": "kafka+ssl:// in front of its address",
        "a:1,,b:2": "empty entry",
        "localhost": "not host:port",
        ":9092": "not host:port",
        "a:": "port",
        "a:0": "port",
        "a:65536": "port",
        "a:-1": "port",
        "a:９": "port",
        "::1:9092": "without brackets",
        "[::1]": "without brackets",
        "[localhost]:1": "not an IPv6 address",
        "a b:1": "a space inside an address",
        "a_b!:1": "not a name",
        "user:password@h:1": "credentials do not belong",
        "user:password@h": "credentials do not belong",
        "SSL://h:1": "kafka.security.protocol",
    }.items():
        message = error_of({"kafka.bootstrap.servers": text})
        assert message.startswith("Option 'kafka.bootstrap.servers'")
        assert reason in message
        assert "password" not in message


def test_topics() -> None:
    for name in ("", " ", ".", "..", "a b", "größe", "a/b", "x" * 250):
        assert error_of({"topic": name}).startswith("Option 'topic' ")
    for name in ("a", "x" * 249, "A-Z_0.9", "..."):
        assert parse({**SERVERS, "topic": name}).options.topic == name


def test_shown_default_parses_to_the_same_value() -> None:
    for spec in SPECS:
        if not spec.required and spec.default not in (None, "", ()):
            assert spec.kind.parse(spec.kind.show(spec.default)) == spec.default, spec.name


def test_values_may_have_units_where_the_name_says_of_what() -> None:
    for name, text, value in (
        ("kafka.linger.ms", "20ms", 20),
        ("kafka.delivery.timeout.ms", "5min", 300_000),
        ("kafka.max.block.ms", "30 s", 30_000),
        ("kafka.batch.size", "1MiB", 1 << 20),
        ("kafka.buffer.memory", "64mib", 64 << 20),
        ("max.bytes.per.second", "128KiB", 128 << 10),
        ("max.bytes.per.second", "2MiB", 2 << 20),
    ):
        assert getattr(parse({**SERVERS, name: text}).options, BY_NAME[name].attribute) == value
    assert failure_rate_settings({"slow.request.min.ms": "2s"}).slow_request_min_ms == 2000


def test_units_that_leave_a_doubt_are_errors() -> None:
    for name, text, problem in (
        ("kafka.linger.ms", "20MiB", "is not a whole number, with or without a unit of ms, s, min, h, d"),
        ("kafka.batch.size", "1MB", "is not a whole number, with or without a unit of B, KiB, MiB, GiB"),
        ("kafka.batch.size", "64m", "is not a whole number, with or without a unit of B, KiB, MiB, GiB"),
        ("kafka.max.block.ms", "1.5s", "is not a whole number"),
        ("topic.partitions", "4k", "is not a whole number"),
        ("kafka.batch.size", "4GiB", "is out of bounds"),
    ):
        said = error_of({"topic": "t", "topic.create": "true", name: text})
        assert f"Option '{name}' {problem}" in said
        assert said.endswith(f", got '{text}'")
