"""The delivery report: for each job or micro-batch, one line of JSON with the offsets that it wrote."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from kafka_sink.counts import total
from kafka_sink.errors import ConfigurationError
from kafka_sink.libraries import foreign
from kafka_sink.model import TaskResult, TopicPartition
from kafka_sink.options import SinkOptions
from kafka_sink.options.values import local_path

_OPTION = "delivery.report.path"
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
# The group may read the file, because log collectors do. Others must not: it contains the names of topics.
_MODE = 0o640


@dataclass(frozen=True, slots=True)
class EndedWrite:
    """A job or micro-batch that has ended.

    ``outcome`` is "committed", "aborted", or "skipped" if it had been written before. ``results`` are those
    of the tasks that finished. ``tasks`` is their planned number, or None for a failed job of mapInArrow, for
    which Spark does not report it. ``query`` is the query's id and ``batch`` the micro-batch; outside queries
    they are "" and None. ``transactions`` has counts by outcome. ``note`` is about transactions, for the
    summary line. ``last_task`` is the highest taskAttemptId of the tasks that finished. ``schemas`` describe
    how keys and values were encoded. ``cause`` is the reason for an abort, or "" if it is not known.
    """

    write: str
    outcome: str
    query: str
    batch: int | None
    tasks: int | None
    results: Sequence[TaskResult]
    transactions: Mapping[str, int] = field(default_factory=dict)
    note: str = ""
    last_task: int = -1
    schemas: tuple[str, ...] = ()
    cause: str = ""

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that identify the write, by which lines of a query can be joined with its progress."""
        return {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "queryId": self.query or None,
            "batchId": self.batch,
            "write": self.write,
            "outcome": self.outcome,
        }

    @property
    def label(self) -> str:
        return "kafka-chunked: " if self.batch is None else f"kafka-chunked, micro-batch {self.batch}: "


def check(value: str) -> None:
    """Check at planning that the file can be appended to. Raises ConfigurationError if not."""
    try:
        os.close(_opened(local_path(value, _OPTION)))
    except OSError as error:
        raise ConfigurationError(
            f"Option '{_OPTION}' = {value} cannot be written on the driver's host: {error.strerror}"
        ) from None


def append(value: str, line: Mapping[str, Any]) -> None:
    """Append one line completely or not at all, even if other processes append. Raises OSError.

    A single write does this, because the system places it after all others. A lock would let anyone who may
    read the file hold it, and so keep lines out.
    """
    content = json.dumps(line, separators=(",", ":")).encode() + b"\n"
    handle = _opened(local_path(value, _OPTION))
    try:
        written = os.write(handle, content)
        if written < len(content):
            # Remove the incomplete line, unless another process has written after it.
            end = os.lseek(handle, 0, os.SEEK_CUR)
            if os.fstat(handle).st_size == end:
                os.ftruncate(handle, end - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(handle)
    finally:
        os.close(handle)


def _opened(path: str) -> int:
    """Open the file without waiting for a FIFO's reader. Raises OSError, also for another user's file."""
    try:
        handle = os.open(path, _FLAGS, _MODE)
    except OSError as error:
        # The path is a FIFO without a reader, or a socket.
        if error.errno == errno.ENXIO:
            raise OSError(errno.EINVAL, "it is not a regular file") from None
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link: set the path of the file itself") from None
        raise
    problem = foreign(os.fstat(handle))
    if not problem:
        return handle
    os.close(handle)
    raise OSError(errno.EPERM, f"{problem}: delete it, or name another file")


def partitions_of(results: Sequence[TaskResult]) -> list[dict[str, Any]]:
    """The rows, batches, bytes and offsets (ascending inclusive ranges) of each partition.

    ``endOffset`` is the highest offset plus one: a reader that has reached it has seen all rows.
    ``rowsWithoutOffset``: acknowledged rows whose offsets are not listed (acks=0, a retry's duplicates).
    """
    entries: dict[tuple[str, int], dict[str, Any]] = {}
    for result in results:
        for written in result.partitions:
            key = topic, partition = written.topic, written.partition
            new = {"topic": topic, "partition": partition, "rows": 0, "batches": 0, "bytes": 0, "offsets": []}
            entry = entries.setdefault(key, new)
            entry["rows"] += written.records
            entry["batches"] += written.batches
            entry["bytes"] += written.bytes
            entry["offsets"] += written.offset_ranges
    for entry in entries.values():
        ranges = entry["offsets"] = _merged(entry["offsets"])
        entry["endOffset"] = ranges[-1][1] + 1 if ranges else None
        entry["rowsWithoutOffset"] = max(0, entry["rows"] - sum(last - first + 1 for first, last in ranges))
    return [entries[key] for key in sorted(entries)]


def skip_reasons_of(results: Sequence[TaskResult]) -> Counter[str]:
    reasons = Counter[str]()
    for result in results:
        reasons.update(result.skip_reasons)
    return reasons


def _merged(ranges: Sequence[tuple[int, int]]) -> list[list[int]]:
    merged: list[list[int]] = []
    for first, last in sorted(ranges):
        if merged and first == merged[-1][1] + 1:
            merged[-1][1] = last
        else:
            merged.append([first, last])
    return merged


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What a write has written.

    Attributes:
        rows: The number of acknowledged rows.
        unconfirmed: The number of rows that were sent with ``kafka.acks=0``.
        skipped: The number of rows that can never be written (``errors.tolerance=all``).
        skip_reasons: The number of skipped rows for each reason.
        already_written: True if an earlier run had written this ``txnVersion``, so that this one wrote
            nothing.
        partitions: One mapping for each topic and partition, as in the delivery report, with its ``offsets``.
        dead_letters: How many of the skipped rows are in the dead letter topic.

    Examples:
        >>> result = kafka_sink.write(df, options)
        >>> result.offsets
        {TopicPartition(topic='orders', partition=0): ((0, 41),)}
    """

    rows: int = 0
    unconfirmed: int = 0
    skipped: int = 0
    skip_reasons: Mapping[str, int] = field(default_factory=dict)
    already_written: bool = False
    partitions: Sequence[Mapping[str, Any]] = ()
    dead_letters: int = 0

    @classmethod
    def of(
        cls, results: Sequence[TaskResult], options: SinkOptions, *, already_written: bool = False
    ) -> WriteResult:
        """Sum up the results of the tasks whose rows count."""
        counts = total(results)
        return cls(
            counts.records,
            counts.unconfirmed,
            counts.skipped,
            dict(skip_reasons_of(results)),
            already_written,
            partitions_of(results),
            # The write has only succeeded if each skipped row has its dead letter.
            counts.skipped if options.errors_deadletterqueue_topic_name else 0,
        )

    @property
    def offsets(self) -> dict[TopicPartition, tuple[tuple[int, int], ...]]:
        """The inclusive ranges of offsets of each partition, including those of dead letters."""
        return {
            TopicPartition(entry["topic"], entry["partition"]): tuple(
                (first, last) for first, last in entry["offsets"]
            )
            for entry in self.partitions
        }
