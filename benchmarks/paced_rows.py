"""Rows at a steady rate for any sink, and their fate according to the brokers' logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from benchmarks.surroundings import rows_in

SCHEMA = "key binary, value binary"
ROW_BYTES = 400
KEYS = 10_000
_STEP_S = 0.05
# The fields of a row: its task, its number within the task, when it was offered (Unix milliseconds).
STAMP = np.dtype([("task", ">i4"), ("number", ">i8"), ("offered", ">i8")])


def paced(rate: float, seconds: float, keyed: bool) -> Callable[[Iterator[pa.RecordBatch]], Iterator[Any]]:
    """A function for mapInArrow over one row per task that holds the task's number.

    It offers ``rate`` rows a second each, whether or not they are taken: rows that a sink has kept waiting
    come as soon as it takes rows again, as from a source that has a backlog.
    """

    def source(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for task in batch.column(0).to_pylist():
                yield from _rows(task, rate, seconds, keyed)

    return source


def _rows(task: int, rate: float, seconds: float, keyed: bool) -> Iterator[pa.RecordBatch]:
    started, sent, total = time.time(), 0, int(rate * seconds)
    largest = max(1, int(rate * _STEP_S))
    while sent < total:
        due = min(total, int((time.time() - started) * rate))
        if due == sent:
            time.sleep(_STEP_S)
            continue
        count = min(due - sent, largest)
        numbers = np.arange(sent, sent + count)
        yield _batch(task, numbers, numbers / rate + started, keyed)
        sent += count


def _batch(
    task: int, numbers: npt.NDArray[np.int64], due_s: npt.NDArray[np.float64], keyed: bool
) -> pa.RecordBatch:
    rows = np.full((len(numbers), ROW_BYTES), ord("x"), dtype=np.uint8)
    stamps = np.empty(len(numbers), dtype=STAMP)
    stamps["task"], stamps["number"], stamps["offered"] = task, numbers, due_s * 1000
    rows[:, : STAMP.itemsize] = stamps.view(np.uint8).reshape(len(numbers), -1)
    if keyed:
        texts = (np.int64(task) << 32) + numbers % KEYS
        keys = _fixed(texts.astype(">i8").view(np.uint8).reshape(len(numbers), -1))
    else:
        keys = pa.nulls(len(numbers), pa.binary())
    return pa.RecordBatch.from_arrays([keys, _fixed(rows)], ["key", "value"])


def _fixed(rows: npt.NDArray[np.uint8]) -> pa.Array:
    """Rows of a byte matrix as a binary array."""
    count, width = rows.shape
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    data = np.ascontiguousarray(rows)
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


@dataclass(frozen=True)
class Stored:
    """All records of a topic, in columns, by partition and offset. Times are Unix milliseconds; ``appended``
    is the broker's clock at the append, which needs message.timestamp.type=LogAppendTime; ``epoch`` is that
    of the leader that appended."""

    partition: npt.NDArray[np.int64]
    task: npt.NDArray[np.int64]
    number: npt.NDArray[np.int64]
    offered: npt.NDArray[np.int64]
    appended: npt.NDArray[np.int64]
    epoch: npt.NDArray[np.int64]

    def doubled(self) -> int:
        """Rows that stand there more than once."""
        return len(self.task) - len(np.unique(self._identity()))

    def lost(self, sent: int) -> int:
        """Rows of ``sent`` that are nowhere."""
        return sent - len(np.unique(self._identity()))

    def reordered(self) -> int:
        """Rows that stand after a later one of their task in their partition; doubled ones are left out."""
        _, first = np.unique(self._identity(), return_index=True)
        kept = np.sort(first)
        lane = self.partition[kept] * (self.task.max(initial=0) + 1) + self.task[kept]
        return _overtaken(lane, self.number[kept])

    def reordered_in_key(self) -> int:
        """Rows that were appended after a later one of their key, in whatever partition."""
        order = np.argsort(self.appended, kind="stable")
        key = self.task[order] * KEYS + self.number[order] % KEYS
        # The clock cannot order rows that were appended within a millisecond.
        numbers, times = self.number[order], self.appended[order]
        by_key = np.lexsort((numbers, times, key))
        return _overtaken(key[by_key], numbers[by_key])

    def _identity(self) -> npt.NDArray[np.int64]:
        return (self.task << 40) + self.number


def _overtaken(lane: npt.NDArray[np.int64], number: npt.NDArray[np.int64]) -> int:
    """Rows whose number is below the greatest one before them in their lane; lanes keep the given order."""
    by_lane = np.argsort(lane, kind="stable")
    # Lanes are apart by more than any number, so that one running maximum serves them all.
    lanes = np.unique(lane[by_lane], return_inverse=True)[1].astype(np.int64)
    ranked = (lanes << 40) + number[by_lane]
    return int(np.count_nonzero(ranked < np.maximum.accumulate(ranked)))


def read_back(bootstrap: str, topic: str, partitions: int) -> Stored:
    """Reads the whole topic."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    left = rows_in(bootstrap, topic)
    settings = {"bootstrap.servers": bootstrap, "group.id": "read", "fetch.max.bytes": 8 << 20}
    consumer = Consumer({**settings, "queued.max.messages.kbytes": 65_536})
    consumer.assign([TopicPartition(topic, p, OFFSET_BEGINNING) for p in range(partitions)])
    stamps, places = [], []
    deadline = time.monotonic() + 120
    try:
        while left > 0:
            messages = consumer.consume(10_000, 1.0)
            left -= len(messages)
            if messages:
                stamps.append(b"".join((one.value() or b"")[: STAMP.itemsize] for one in messages))
                places.append(
                    np.array([(one.partition(), one.timestamp()[1], one.leader_epoch()) for one in messages])
                )
            if time.monotonic() > deadline:
                raise RuntimeError(f"{left} rows of {topic} could not be read")
    finally:
        consumer.close()
    stamped = np.frombuffer(b"".join(stamps), dtype=STAMP)
    where = np.concatenate(places) if places else np.empty((0, 3), dtype=np.int64)
    order = np.argsort(where[:, 0], kind="stable")
    task, number, offered = (stamped[name].astype(np.int64) for name in ("task", "number", "offered"))
    columns = (where[:, 0], task, number, offered, where[:, 1], where[:, 2])
    return Stored(*(column[order] for column in columns))
