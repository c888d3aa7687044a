"""The process's own limits: see test_launcher for its life."""

from __future__ import annotations

import resource
from types import SimpleNamespace

import pytest

from kafka_sink.coordinator import server_process
from kafka_sink.coordinator.transport import ServerBounds


@pytest.mark.parametrize(
    ("soft", "allowed", "connections"),
    [
        (1024, 1_000_000, 20_000),
        (resource.RLIM_INFINITY, 0, 20_000),
        (2048, 6_000, 874),
        (1024, 10, 427),
    ],
)
def test_a_system_that_allows_few_files_gets_fewer_connections(
    caplog: pytest.LogCaptureFixture, soft: int, allowed: int, connections: int
) -> None:
    def setrlimit(_: int, limits: tuple[int, int]) -> None:
        if limits[0] > allowed:
            raise ValueError("current limit exceeds maximum limit")

    limits = SimpleNamespace(getrlimit=lambda _: (soft, resource.RLIM_INFINITY), setrlimit=setrlimit)
    bounds = server_process.bounds_of_process(limits)
    assert bounds.connections == connections
    assert bounds.connections + bounds.unauthenticated <= 20_000 + 8_192
    assert ("ulimit -n" in caplog.text) == (connections < ServerBounds().connections)


def test_every_service_takes_messages_that_no_other_takes() -> None:
    process = server_process.ServerProcess({"folder": "/nowhere", "driver": [1, "x"]})
    services = process.services()
    taken = [kind for service in services for kind in service.takes]
    assert len(taken) == len(set(taken)) > 8
