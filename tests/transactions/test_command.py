"""The command kafka-chunked-transactions, without a broker that has transactions."""

from __future__ import annotations

import socket

import pytest

from kafka_sink.transactions import __main__ as command
from tests.support.fake_broker import FakeCluster
from tests.support.ports import resolve_many


def test_a_silent_address_does_not_end_the_command_while_another_is_untried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: "Metadata did not succeed within 9 s", while the first address could take 12 s."""
    with FakeCluster() as cluster, socket.create_server(("127.0.0.1", 0)) as silent:
        resolve_many(monkeypatch, silent.getsockname()[1], cluster.port(0))
        servers = ["--bootstrap-servers", "many.example:9092"]
        quick = ["--option", "kafka.socket.connection.setup.timeout.ms=600"]
        assert command.main(["list", *servers, *quick], connect_bound_ms=300.0) == 1
    # The second address is a cluster of an older version.
    assert "needs brokers of Apache Kafka 3.8" in capsys.readouterr().err
