"""The names with which the options are compared."""

from __future__ import annotations

import pytest

from local_kafka import LocalBroker
from tests.support.kafka_names import KafkaNames, read_names


@pytest.fixture(scope="session")
def names(broker: LocalBroker) -> KafkaNames:
    """The names in the kafka-clients jar, read once: a JVM compiles and runs the program for it."""
    return read_names(broker)
