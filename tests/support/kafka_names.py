"""The names in the kafka-clients jar: options with their defaults, producer metrics, error codes."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from local_kafka import LocalBroker


@dataclass(frozen=True)
class KafkaNames:
    """``options`` by name, with the default as Kafka writes it ("" for none). ``others``: names of the
    options of Kafka's consumer and admin clients. ``errors`` by code: the name, and whether Java's exception
    is a RetriableException and an InvalidMetadataException."""

    options: dict[str, str]
    others: frozenset[str]
    metrics: frozenset[str]
    errors: dict[int, tuple[str, bool, bool]]


def read_names(broker: LocalBroker) -> KafkaNames:
    source = Path(__file__).with_name("KafkaNames.java")
    command = [broker.java, "-cp", broker.classpath, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    options: dict[str, str] = {}
    others: set[str] = set()
    metrics: set[str] = set()
    errors: dict[int, tuple[str, bool, bool]] = {}
    for line in done.stdout.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "option":
            name, _, default = rest.partition("\t")
            options[name] = default
        elif kind == "other":
            others.add(rest)
        elif kind == "metric":
            metrics.add(rest)
        elif kind == "error":
            code, name, retriable, refreshes = rest.split()
            errors[int(code)] = name, retriable == "true", refreshes == "true"
    return KafkaNames(options, frozenset(others), frozenset(metrics), errors)
