"""Where the coordinator and its live view listen."""

from __future__ import annotations

import socket

import pytest

from kafka_sink.coordinator.placement import (
    Placement,
    is_enabled,
    placement,
    ui_placement,
)
from kafka_sink.errors import ConfigurationError
from kafka_sink.options import SinkOptions, parse


def options(**given: str) -> SinkOptions:
    raw = {name.replace("_", "."): value for name, value in given.items()}
    return parse({"kafka.bootstrap.servers": "h:1", **raw}).options


def test_administrators_override_jobs() -> None:
    conf = {
        "spark.kafka-chunked.coordinator.port": "7",
        "spark.kafka-chunked.coordinator.bind.address": "[::1]",
        "spark.kafka-chunked.ui.port": "8",
    }
    environ = {"KAFKA_CHUNKED_UI_BIND_ADDRESS": "0.0.0.0"}
    assert placement(options(coordinator_port="9"), {}, conf) == Placement("::1", 7)
    assert ui_placement(options(), environ, conf) == Placement("0.0.0.0", 8)
    assert ui_placement(options(), {}) is None
    assert ui_placement(options(ui_port="0"), {}) == Placement("127.0.0.1", 0)
    assert not is_enabled(options(), {"KAFKA_CHUNKED_COORDINATOR_ENABLED": "false"})
    assert not is_enabled(options(coordinator_enabled="false"), {"KAFKA_CHUNKED_COORDINATOR_ENABLED": "true"})
    environ = {"KAFKA_CHUNKED_COORDINATOR_PORT": "7", "KAFKA_CHUNKED_COORDINATOR_BIND_ADDRESS": "127.0.0.7"}
    assert placement(options(coordinator_port="9"), environ, {}) == Placement("127.0.0.7", 7)
    with pytest.raises(ConfigurationError, match="'KAFKA_CHUNKED_COORDINATOR_ENABLED' must be true or false"):
        is_enabled(options(), {"KAFKA_CHUNKED_COORDINATOR_ENABLED": "flase"})


def test_without_settings_it_is_the_drivers_address(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"spark.driver.host": "a", "spark.driver.bindAddress": "b"}
    assert placement(options(), {"SPARK_LOCAL_IP": "c"}, given).address == "b"
    assert placement(options(), {"SPARK_LOCAL_IP": "c"}, {"spark.driver.host": "a"}).address == "a"
    assert placement(options(), {"SPARK_LOCAL_IP": "c"}, {}).address == "c"
    loopback = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: loopback)
    assert placement(options(), {}, {}).address


@pytest.mark.parametrize(
    ("address", "is_loopback", "local"),
    [
        ("127.0.0.5", True, "127.0.0.5"),
        ("localhost", True, "localhost"),
        ("::1", True, "::1"),
        ("0.0.0.0", False, "127.0.0.1"),
        ("10.0.0.1", False, "10.0.0.1"),
        ("some.host", False, "some.host"),
    ],
)
def test_placement_tells_loopback_and_local_addresses_apart(
    address: str, is_loopback: bool, local: str
) -> None:
    where = Placement(address, 1)
    assert (where.is_loopback, where.local_host) == (is_loopback, local)
