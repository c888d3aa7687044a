"""What the options are compared with."""

from __future__ import annotations

import pytest

from local_kafka import LocalBroker
from tests.support.kafka_names import KafkaNames, read_names


@pytest.fixture(scope="session")
def names(broker: LocalBroker) -> KafkaNames:
    """Of the kafka-clients jar, read once: a JVM compiles and runs the program for it."""
    return read_names(broker)
