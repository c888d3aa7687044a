"""A real Apache Kafka without Docker. It is downloaded once, from Maven Central, and runs as KRaft brokers.

    with LocalBroker() as broker:
        print(broker.bootstrap_servers)

On the command line: ``local-kafka [--brokers 3] [--port 9092]``. Needs Java 17 or newer, on Linux.
"""

from __future__ import annotations

from local_kafka.broker import LocalBroker
from local_kafka.errors import LocalBrokerError
from local_kafka.jars import KAFKA_HOME_ENV, KAFKA_VERSION

__all__ = ["KAFKA_HOME_ENV", "KAFKA_VERSION", "LocalBroker", "LocalBrokerError"]
