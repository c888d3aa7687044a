"""A registry of the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.http_server import Server


@pytest.fixture
def fake() -> Iterator[Server]:
    """A registry that responds as a test wants."""
    with Server() as running:
        yield running
