"""A registry of the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kafka_sink.clock import ExponentialBackoff
from kafka_sink.formats import registry
from tests.support.http_server import Server


@pytest.fixture(autouse=True)
def _registries_are_tried_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BACKOFF", ExponentialBackoff(1, 5, lambda: 0.5))


@pytest.fixture
def fake() -> Iterator[Server]:
    """A registry that responds as a test wants."""
    with Server() as running:
        yield running
