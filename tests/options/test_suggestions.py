"""The known option that a misspelt name is meant to be."""

from __future__ import annotations

import pytest

from kafka_sink.options.suggestions import nearest
from kafka_sink.options.table import BY_NAME


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("compresion.type", "compression.type"),
        ("bootstrap_servers", "bootstrap.servers"),
        ("bootsrtap.servers", "bootstrap.servers"),
        ("linger", "linger.ms"),
        ("max.in.flight.requests", "max.in.flight.requests.per.connection"),
        ("sasl.jaas.cfg", "sasl.jaas.config"),
        ("ack", "acks"),
        ("zzz", None),
        ("session.timeout.ms", None),
        ("group.id", None),
        ("auto.offset.reset", None),
        ("batch", "batch.size"),
    ],
)
def test_a_name_is_suggested_only_within_a_few_edits(name: str, meant: str | None) -> None:
    """Catches: session.timeout.ms taken for transaction.timeout.ms, which a user then sets."""
    assert nearest(f"kafka.{name}", BY_NAME) == (meant and f"kafka.{meant}")
