"""``kafka_sink.tune``: a session's settings with which Spark hands rows to Python at less cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafka_sink.driver import driver_log
from kafka_sink.rows import hand_over

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def tune(spark: SparkSession, row_bytes: int) -> dict[str, str]:
    """As ``kafka_sink.tune``."""
    made, kept = {}, []
    for name, value in hand_over.settings_for(row_bytes).items():
        present = spark.conf.get(name, None)
        if present is None:
            spark.conf.set(name, value)
            made[name] = value
        elif present != value:
            kept.append(f"left {name}={present} (it would be {value})")
    done = [f"set {name}={value}" for name, value in made.items()] + kept
    done += hand_over.advice(lambda name: spark.conf.get(name, None))
    driver_log.report(f"kafka_sink.tune: {', '.join(done) or 'all was set already'}")
    return made
