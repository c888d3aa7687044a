"""Parts that the tests of the breaker's modules share."""

from __future__ import annotations

import pytest

from kafka_sink.breaker.manager import CircuitBreakManager
from tests.support.breaker_cluster import Cluster


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(a=[1, 2, 3, -1], b=[1])


@pytest.fixture
def manager(cluster: Cluster) -> CircuitBreakManager:
    return cluster.manager()
