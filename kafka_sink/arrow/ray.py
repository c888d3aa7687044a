"""A sink for Ray Data: ``dataset.write_datasink(KafkaDatasink(options))``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
from ray.data import Datasink
from ray.data.block import BlockAccessor

from kafka_sink.arrow.many_writers import ManyWriters
from kafka_sink.model import TaskResult
from kafka_sink.reports.delivery_report import Written


class KafkaDatasink(Datasink):  # type: ignore[misc]  # ray is optional
    """Writes each block's rows to Kafka; ``written`` says what, when that is done.

    Columns and options are those of ``kafka_sink.write_arrow``. A task that Ray runs again writes its rows
    again: at least once. Raises ConfigurationError; exactly-once and rate limits are not supported.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._writers = ManyWriters(options, "Ray Data")
        self.written: Written | None = None

    def get_name(self) -> str:
        """In Ray's progress."""
        return "Kafka"

    def on_write_start(self, schema: pa.Schema | None = None) -> None:
        """On the driver."""
        self._writers.start(schema if isinstance(schema, pa.Schema) else None)

    def write(self, blocks: Iterable[Any], ctx: Any) -> TaskResult:
        """In a task."""
        return self._writers.write(BlockAccessor.for_block(block).to_arrow() for block in blocks)

    def on_write_complete(self, write_result: Any) -> None:
        """On the driver."""
        self.written = self._writers.end(write_result.write_returns)
