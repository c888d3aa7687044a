"""A sink for Daft: ``frame.write_sink(KafkaSink(options))``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from daft import Schema
from daft.io.sink import DataSink, WriteResult
from daft.recordbatch import MicroPartition

from kafka_sink.arrow.many_writers import ManyWriters
from kafka_sink.model import TaskResult
from kafka_sink.reports.delivery_report import Written

_RESULT = pa.schema([("rows", pa.int64()), ("skipped", pa.int64()), ("dead_letters", pa.int64())])


class KafkaSink(DataSink):  # type: ignore[misc]  # daft is optional
    """Writes a frame's rows to Kafka. The frame that comes back counts them, and ``written`` says
    all, with offsets.

    Columns and options are those of ``kafka_sink.write_arrow``. A task that Daft runs again writes its rows
    again: at least once. Raises ConfigurationError; exactly-once and rate limits are not supported.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._writers = ManyWriters(options, "Daft")
        self.written: Written | None = None

    def name(self) -> str:
        """In Daft's plans and errors."""
        return "Kafka"

    def schema(self) -> Schema:
        """Of the frame that comes back."""
        return Schema.from_pyarrow_schema(_RESULT)

    def start(self) -> None:
        """On the driver."""
        self._writers.start()

    def write(self, micropartitions: Iterator[MicroPartition]) -> Iterator[WriteResult[TaskResult]]:
        """In a task."""
        result = self._writers.write(one.to_arrow() for one in micropartitions)
        yield WriteResult(result, int(result.raw_bytes), int(result.records + result.unconfirmed))

    def finalize(self, write_results: list[WriteResult[TaskResult]]) -> MicroPartition:
        """On the driver."""
        self.written = written = self._writers.end([one.result for one in write_results])
        row = {"rows": [written.rows], "skipped": [written.skipped], "dead_letters": [written.dead_letters]}
        return MicroPartition.from_arrow(pa.table(row, schema=_RESULT))
