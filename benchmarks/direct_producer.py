"""A task's producer without Spark, rows for it, and a look at its memory while it works."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.sampler import Sampler
from kafka_sink.memory.pool import PoolMetrics
from kafka_sink.options import SinkOptions, parse
from kafka_sink.task.producer import Producer

MIB = 1 << 20
# Spark puts this many rows in an Arrow batch.
BATCH_ROWS = 10_000
VALUE_BYTES = 110
LINGER_MS = 1000.0
ADMITS_8_MIB = {"max.message.bytes": 8 * MIB}


def _digits(numbers: npt.NDArray[np.int64], width: int) -> pa.StringArray:
    """Numbers as decimal text with leading zeros."""
    powers = 10 ** np.arange(width - 1, -1, -1, dtype=np.int64)
    text = (numbers[:, None] // powers % 10 + ord("0")).astype(np.uint8)
    ends = np.arange(0, (len(numbers) + 1) * width, width, dtype=np.int32)
    return pa.StringArray.from_buffers(len(numbers), pa.py_buffer(ends), pa.py_buffer(text))


def row_batches(count: int, *, partitions: int = 1, seed: int = 1) -> list[pa.RecordBatch]:
    """``count`` batches of 10-byte keys, 110-byte JSON values and partitions."""
    draw = np.random.default_rng(seed)
    batches = []
    for number in range(count):
        values = pc.binary_join_element_wise(
            '{"id":',
            _digits(np.arange(BATCH_ROWS) + number * BATCH_ROWS, 12),
            ',"user":"u',
            _digits(draw.integers(0, 10**6, BATCH_ROWS), 6),
            '","event":"click","page":"/item/',
            _digits(draw.integers(0, 10**8, BATCH_ROWS), 8),
            '","ms":',
            _digits(draw.integers(0, 10**6, BATCH_ROWS), 6),
            ',"ok":true}',
            "",
        )
        values = pc.utf8_rpad(values, VALUE_BYTES)
        keys = _digits(draw.integers(0, 10**10, BATCH_ROWS), 10)
        chosen = pa.array(draw.integers(0, partitions, BATCH_ROWS), pa.int32())
        batches.append(pa.record_batch([keys, values, chosen], names=["key", "value", "partition"]))
    return batches


def options_for(bootstrap: str, **settings: str | int) -> SinkOptions:
    """batch.size 4 MiB, linger 1 s, buffer.memory 64 MiB; ``settings`` have underscores for dots."""
    raw: dict[str, str] = {
        "kafka.bootstrap.servers": bootstrap,
        "kafka.batch.size": str(4 * MIB),
        "kafka.max.request.size": str(8 * MIB),
        "kafka.linger.ms": f"{LINGER_MS:.0f}",
        "kafka.buffer.memory": str(64 * MIB),
    }
    raw.update({f"kafka.{name.replace('_', '.')}": str(value) for name, value in settings.items()})
    return parse(raw).options


def pool_of(producer: Producer) -> PoolMetrics:
    """The metrics of the producer's pool."""
    return producer.accumulator.allocator.pool.metrics()


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment: bytes taken from the pool and from the heap, and bytes written by the ``batches`` there."""

    at_s: float
    used: int
    heap: int
    buffered: int
    batches: int
    writing: bool


class MemoryOverTime(Sampler):
    """Samples a producer's memory while the block runs.

    ``writing``: the task was in the middle of a turn, when memory is reserved for rows not yet written.
    """

    def __init__(self, producer: Producer, every_s: float = 0.01) -> None:
        super().__init__("memory-over-time", every_s)
        self.samples: list[Sample] = []
        self._producer = producer
        self._origin = time.monotonic()

    def sample(self) -> None:
        """See Sampler."""
        accumulator = self._producer.accumulator
        with accumulator.lock:
            live = list(accumulator.live)
            writing = any(batch.held for batch in live)
            buffered = sum(batch.size for batch in live)
            pool = pool_of(self._producer)
        at_s = time.monotonic() - self._origin
        self.samples.append(Sample(at_s, pool.used_bytes, pool.heap_bytes, buffered, len(live), writing))
