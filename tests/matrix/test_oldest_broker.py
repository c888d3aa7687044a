"""The oldest broker that the sink claims; ``make matrix`` tries all of them, and every Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.matrix.job import Checks
from tests.matrix.released_kafka import RELEASES, ReleasedKafka

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_the_oldest_broker_takes_batches_streams_and_recreated_topics(spark: SparkSession) -> None:
    """Kafka 2.1 with ZooKeeper, which is refused for exactly-once."""
    with ReleasedKafka(RELEASES[0]) as kafka:
        checks = Checks(kafka.bootstrap_servers, spark, transactions=False)
        for check in checks.all().values():
            check()
