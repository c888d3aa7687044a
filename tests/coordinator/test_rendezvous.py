"""The folder where planning finds the coordinator: see test_launcher for what happens in it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kafka_sink.coordinator.address import CoordinatorAddress
from kafka_sink.coordinator.rendezvous import LocationFolder, RunningCoordinator, read_found
from kafka_sink.options import parse

ADDRESS = CoordinatorAddress("::1", 1, b"a" * 32, "name.invalid", b"b" * 32)
FOUND = RunningCoordinator(ADDRESS, b"d" * 32, "::1")


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


def test_a_coordinator_is_alive_until_its_process_ends(place: LocationFolder) -> None:
    assert not place.is_alive()
    place.publish(FOUND)
    with place.life() as handle:
        assert place.found() is None, "that of the one before"
        assert place.is_alive()
        # As a child that inherits it.
        inherited = os.dup(handle)
    assert place.is_alive()
    with pytest.raises(TimeoutError, match="has not ended"), place.life():
        pass
    os.close(inherited)
    assert not place.is_alive()


def test_the_lock_is_waited_for(place: LocationFolder) -> None:
    with place.lock(1_000.0), pytest.raises(TimeoutError, match="held by another"), place.lock(20.0):
        pass
    with place.lock(0.0):
        pass


def test_a_groups_key_gives_no_password_away() -> None:
    """It goes over the wire: a hash without the token could be tried out."""
    settings = parse({"kafka.bootstrap.servers": "h:1"}).options.identity_of_cluster()
    other = RunningCoordinator(replace(ADDRESS, token=b"c" * 32), b"d" * 32, "::1")
    assert FOUND.group_of(settings) == FOUND.group_of(dict(reversed(settings.items())))
    assert FOUND.group_of(settings) != other.group_of(settings)
    assert FOUND.group_of(settings) != FOUND.group_of({**settings, "kafka.security.protocol": "SSL"})
