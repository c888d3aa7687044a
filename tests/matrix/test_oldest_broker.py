"""The oldest broker that the sink claims; ``make matrix`` tries the others, and every Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.matrix.job import Checks
from tests.matrix.released_kafka import WITH_ZOOKEEPER, ReleasedKafka

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_the_oldest_broker_takes_batches_and_recreated_topics_and_is_refused_for_exactly_once(
    spark: SparkSession,
) -> None:
    """Kafka 2.1 with ZooKeeper: older versions of each request than any newer broker."""
    with ReleasedKafka(WITH_ZOOKEEPER[0]) as kafka:
        checks = Checks(kafka.bootstrap_servers, spark, transactions=False, codecs=("zstd",))
        checks.batch()
        checks.recreated_topic()
        checks.exactly_once()
