"""Locations of checkpoints identify queries."""

from __future__ import annotations

from kafka_sink.transactions.checkpoint import Location


def test_same_path_on_two_file_systems_is_two_checkpoints() -> None:
    """Catches: strangers that fenced each other."""
    places = ["hdfs://a/c", "hdfs://b/c", "s3a://a/c", "abfss://x@a/c", "abfss://y@a/c", "dbfs:/c", "dbfs:/C"]
    assert len({Location.of(place) for place in places}) == len(places)
    assert Location.of("HDFS://A//c/./") == Location.of("hdfs://a/c")
