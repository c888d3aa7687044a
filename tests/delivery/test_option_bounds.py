"""Every number that an option takes, at both bounds: rows are delivered, or the task ends and says why."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from kafka_sink.errors import ConfigurationError, KafkaSinkError, MetadataTimeoutError, RecordTooLargeError
from kafka_sink.options import parse
from kafka_sink.options.table import SPECS, OptionSpec
from kafka_sink.options.values import INT_MAX, KAFKA_PREFIX, LONG_MAX
from kafka_sink.spark.write import PlannedWrite
from tests.support.fake_broker import FakeCluster
from tests.support.scripted_cluster import PLAN, TOPIC, rows, task_options
from tests.support.strategy import forced

# What cannot work at its bound, and how the task ends then.
ENDS: dict[tuple[str, int], type[KafkaSinkError]] = {
    ("kafka.delivery.timeout.ms", 0): ConfigurationError,
    ("kafka.buffer.memory", 128): ConfigurationError,
    ("kafka.max.request.size", 0): RecordTooLargeError,
    ("kafka.max.block.ms", 0): MetadataTimeoutError,
    ("kafka.socket.connection.setup.timeout.ms", 0): MetadataTimeoutError,
    ("kafka.socket.connection.setup.timeout.max.ms", 0): MetadataTimeoutError,
}

# A response that is already there when the sender looks for it counts.
MAY_END: dict[tuple[str, int], type[KafkaSinkError]] = {("kafka.request.timeout.ms", 0): MetadataTimeoutError}


def ending(name: str, value: int) -> type[KafkaSinkError] | None:
    """None where rows are delivered. Options of logins are refused on brokers that ask for no login."""
    if (name, value) == ("kafka.batch.size", INT_MAX) and forced.is_full():
        return RecordTooLargeError  # a batch takes its whole size from buffer.memory
    return ConfigurationError if name.startswith("kafka.sasl.") else ENDS.get((name, value))


def write(cluster: FakeCluster, **given: object) -> int:
    """A task of two batches, the second of which lets the first wait; returns the rows acknowledged."""
    options = parse(task_options(cluster, **given)).options
    return PlannedWrite(options, PLAN).write(iter([rows(0, 25), rows(25, 25)])).result.records


def bounds(spec: OptionSpec) -> tuple[int, int]:
    """From the words of docs/options.md: ``>= 1``, ``1 to 9, or -1``."""
    words = spec.kind.allowed.removesuffix(", or -1").split()
    if words[0] == ">=":
        return int(words[1]), INT_MAX if spec.kind.label == "int" else LONG_MAX
    return int(words[0]), int(words[2])


def numbers() -> Iterator[tuple[str, int]]:
    for spec in SPECS:
        if spec.name.startswith(KAFKA_PREFIX) and spec.kind.label in ("int", "long"):
            yield from ((spec.name, value) for value in bounds(spec))


def test_rows_are_delivered_or_the_task_ends() -> None:
    for name, value in numbers():
        given: dict[str, object] = {"max.block.ms": 5000, name.removeprefix(KAFKA_PREFIX): value}
        codec = name.partition("compression.")[2].removesuffix(".level")
        if codec:
            given["compression.type"] = codec
        end = ending(name, value)
        may_end = MAY_END.get((name, value))
        if MetadataTimeoutError in (end, may_end):
            given["max.block.ms"] = min(value, 700) if name == "kafka.max.block.ms" else 700
        started = time.monotonic()
        with FakeCluster({TOPIC: 1}) as cluster:
            if end is not None:
                with pytest.raises(end) as caught:
                    write(cluster, **given)
                assert "kafka." in str(caught.value), name
            else:
                with contextlib.suppress(*([may_end] if may_end else [])):
                    assert write(cluster, **given) == 50, (name, value)
        assert time.monotonic() - started < 60, f"{name} = {value}: delivery.timeout.ms is two minutes"
