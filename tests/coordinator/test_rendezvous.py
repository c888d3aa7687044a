"""The folder where planning finds the coordinator: see test_launcher for what happens in it."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from kafka_sink.coordinator.address import CoordinatorAddress
from kafka_sink.coordinator.rendezvous import LocationFolder, RunningCoordinator, read_found, serving
from kafka_sink.driver.driver_process import HostProcess
from kafka_sink.options import parse
from tests.support.waiting import until

ADDRESS = CoordinatorAddress("::1", 1, b"a" * 32, "name.invalid", b"b" * 32)
PROCESS = HostProcess(1, "now")
FOUND = RunningCoordinator(ADDRESS, b"d" * 32, PROCESS, "::1")


@pytest.fixture
def place(tmp_path: Path) -> LocationFolder:
    return LocationFolder.make(str(tmp_path))


def test_published_coordinators_are_found(place: LocationFolder) -> None:
    assert place.found() is None
    place.publish(FOUND)
    assert place.found() == FOUND
    assert "bbbb" not in repr(FOUND)
    assert "name.invalid" not in repr(FOUND)


def test_files_without_a_coordinator_are_ignored(place: LocationFolder) -> None:
    """Catches: a file of another version of the package that ends every write."""
    path = place.folder / "found"
    wrong = b'{"address":{"host":"","port":1,"fingerprint":"","name":"","token":1},"bound_to":""}'
    for content in (b"", b"[]", b"{}", b'{"port": 1}', wrong, b"\xff"):
        path.write_bytes(content)
        assert read_found(path) is None


def test_a_coordinator_serves_until_its_process_ends(place: LocationFolder) -> None:
    assert serving(place) is None
    process = subprocess.Popen(["sleep", "60"])
    running = HostProcess.running(process.pid)
    assert running is not None
    found = replace(FOUND, process=running)
    place.publish(found)
    assert serving(place) == found
    # Nobody has waited for the process yet.
    process.kill()
    until(lambda: serving(place) is None)
    process.wait()
    place.withdraw()
    assert place.found() is None


def test_the_lock_is_waited_for(place: LocationFolder) -> None:
    with place.lock(1_000.0), pytest.raises(TimeoutError, match="held by another"), place.lock(20.0):
        pass
    with place.lock(0.0):
        pass


def test_a_groups_key_gives_no_password_away() -> None:
    """It goes over the wire: a hash without the token could be tried out."""
    settings = parse({"kafka.bootstrap.servers": "h:1"}).options.identity_of_cluster()
    other = replace(FOUND, address=replace(ADDRESS, token=b"c" * 32))
    assert FOUND.group_of(settings) == FOUND.group_of(dict(reversed(settings.items())))
    assert FOUND.group_of(settings) != other.group_of(settings)
    assert FOUND.group_of(settings) != FOUND.group_of({**settings, "kafka.security.protocol": "SSL"})
