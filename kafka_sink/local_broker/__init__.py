"""A real Apache Kafka without Docker. PySpark's Ivy downloads it once; it runs as KRaft brokers.

    with LocalBroker() as broker:
        print(broker.bootstrap_servers)

On the command line: ``python -m kafka_sink.local_broker [--brokers 3] [--port 9092]``. Needs Java 17 or
newer, on Linux or macOS.
"""

from __future__ import annotations

from kafka_sink.local_broker.broker import LocalBroker
from kafka_sink.local_broker.jars import IVY_SETTINGS_ENV, KAFKA_HOME_ENV, KAFKA_VERSION

__all__ = ["IVY_SETTINGS_ENV", "KAFKA_HOME_ENV", "KAFKA_VERSION", "LocalBroker"]
