"""The process's own limits: see test_launcher for its life."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from kafka_sink.coordinator import server_process
from kafka_sink.coordinator.address import CoordinatorAddress
from kafka_sink.coordinator.rendezvous import LocationFolder, RunningCoordinator
from kafka_sink.coordinator.transport import ServerBounds
from kafka_sink.driver.driver_process import HostProcess


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


def test_a_process_that_comes_late_leaves_the_coordinator_that_serves_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning was killed while it waited for this process, and the next one has started another."""
    monkeypatch.setattr(server_process, "collect_garbage_seldom", lambda: None)
    place, this = LocationFolder.make(str(tmp_path)), HostProcess.running(os.getpid())
    assert this is not None
    serving = RunningCoordinator(CoordinatorAddress("::1", 1, b"a", "name", b"b"), b"d", this, "::1")
    place.publish(serving)
    listening = socket.create_server(("127.0.0.1", 0))
    settings = {"folder": str(tmp_path), "driver": [this.pid, this.started], "address": "127.0.0.1"}
    server_process.ServerProcess({**settings, "listening": listening.detach()}).run()
    assert place.found() == serving
