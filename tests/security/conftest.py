"""A secured broker for all that connect to one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.security.secured_broker import MAX_IDLE_MS, MAX_REQUEST_BYTES, Secured, secured_broker


@pytest.fixture(scope="session")
def security_broker(_programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A broker with the limits of Azure Event Hubs. lanes.py groups its tests by this fixture's name."""
    folder = tmp_path_factory.mktemp("secured")
    limits = {"socket_request_max_bytes": MAX_REQUEST_BYTES, "connections_max_idle_ms": MAX_IDLE_MS}
    with secured_broker(folder, **limits) as running:
        yield running


@pytest.fixture(scope="session")
def secured(security_broker: Secured) -> Secured:
    return security_broker
