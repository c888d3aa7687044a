"""Write a frame of Daft to Kafka, with a sink to copy.

    pip install daft
    python examples/daft_sink.py localhost:9092 [topic]

The address can also stand in KAFKA_BOOTSTRAP_SERVERS. A Kafka to try it on: local-kafka

Each task of Daft writes its partitions with a producer of its own, and the frame that comes back counts the
rows. A task that Daft runs again writes its rows again, so this is at least once. Each task keeps to rate
limits and errors.max by itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import daft
import pyarrow as pa
from daft.io.sink import DataSink, WriteResult
from daft.recordbatch import MicroPartition

import kafka_sink


class KafkaSink(DataSink):  # type: ignore[misc]
    """``options`` and columns are those of ``kafka_sink.write_arrow``."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        if "exactly-once" in options.values():
            raise ValueError("Daft may run a task twice, so rows are written at least once")
        self.options = options

    def name(self) -> str:
        return "Kafka"

    def schema(self) -> Any:
        """The schema of the DataFrame that comes back."""
        return daft.Schema.from_pyarrow_schema(pa.schema([("rows", pa.int64())]))

    def start(self) -> None: ...

    def write(self, micropartitions: Iterator[Any]) -> Iterator[Any]:
        """Runs in a task. Yields once all rows are acknowledged."""
        size = 0
        with kafka_sink.producer(self.options) as producer:
            for part in micropartitions:
                producer.send(part.to_arrow())
                size += part.size_bytes()
        rows = 0 if producer.result is None else producer.result.rows
        yield WriteResult(rows, size, rows)

    def finalize(self, write_results: list[Any]) -> Any:
        """Runs on the driver."""
        return MicroPartition.from_pydict({"rows": [sum(one.result for one in write_results)]})


if __name__ == "__main__":
    servers = sys.argv[1] if len(sys.argv) > 1 else os.environ["KAFKA_BOOTSTRAP_SERVERS"]
    topic = sys.argv[2] if len(sys.argv) > 2 else "daft-example"
    sink = KafkaSink({"kafka.bootstrap.servers": servers, "topic": topic, "topic.create": True})
    orders = daft.from_pylist([{"value": f"<{number}>"} for number in range(1_000)])
    (rows,) = orders.write_sink(sink).to_pydict()["rows"]
    print(f"{rows:,} orders are in {topic}.")
