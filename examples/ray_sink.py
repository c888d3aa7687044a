"""Write a dataset of Ray to Kafka, with a sink to copy.

    pip install 'ray[data]'
    python examples/ray_sink.py localhost:9092 [topic]

The address can also stand in KAFKA_BOOTSTRAP_SERVERS. A Kafka to try it on: local-kafka

Each task of Ray writes its blocks with a producer of its own, and the driver adds up the rows. A task that
Ray runs again writes its rows again, so this is at least once. Each task keeps to rate limits and errors.max
by itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ray.data import Datasink
from ray.data.block import BlockAccessor

import kafka_sink


class KafkaDatasink(Datasink):  # type: ignore[misc]
    """``options`` and columns are those of ``kafka_sink.write_arrow``; ``rows`` is there after the write."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        if "exactly-once" in options.values():
            raise ValueError("Ray may run a task twice, so rows are written at least once")
        self.options = options
        self.rows = 0

    def write(self, blocks: Iterable[Any], ctx: Any) -> int:
        """Runs in a task. Returns when all rows are acknowledged."""
        with kafka_sink.producer(self.options) as producer:
            for block in blocks:
                producer.send(BlockAccessor.for_block(block).to_arrow())
        return 0 if producer.result is None else producer.result.rows

    def on_write_complete(self, write_result: Any) -> None:
        """Runs on the driver."""
        self.rows = sum(write_result.write_returns)


if __name__ == "__main__":
    servers = sys.argv[1] if len(sys.argv) > 1 else os.environ["KAFKA_BOOTSTRAP_SERVERS"]
    topic = sys.argv[2] if len(sys.argv) > 2 else "ray-example"
    sink = KafkaDatasink({"kafka.bootstrap.servers": servers, "topic": topic, "topic.create": True})
    orders = ray.data.from_items([{"value": f"<{number}>"} for number in range(1_000)])
    orders.repartition(3).write_datasink(sink)
    print(f"{sink.rows:,} orders are in {topic}.")
