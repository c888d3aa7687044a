"""The delivery report: for each job or micro-batch one line of JSON with the offsets that it wrote."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from kafka_sink.counts import total
from kafka_sink.errors import ConfigurationError
from kafka_sink.model import EndedTransactions, TaskResult, TopicPartition
from kafka_sink.options import SinkOptions
from kafka_sink.options.values import local_path

_OPTION = "delivery.report.path"
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
# The group may read it, as log collectors do. Names of topics are nobody else's business.
_MODE = 0o640


@dataclass(frozen=True, slots=True)
class EndedWrite:
    """A job or micro-batch. ``outcome``: "committed", "skipped" where it was written before, or "aborted".
    ``results``: of the tasks that finished.

    ``tasks`` is None where Spark does not tell how many there were: in a job of mapInArrow that failed.
    ``query`` is the query's id, and ``batch`` the micro-batch; "" and None for a batch write outside of
    queries. ``transactions``: by outcome. ``note`` is about transactions, in the line of a write.
    ``last_task`` is the highest taskAttemptId of the tasks that finished. ``schemas``: by which schemas keys
    and values were encoded. ``cause``: of an abort, "" where it is not known.
    """

    write: str
    outcome: str
    query: str
    batch: int | None
    tasks: int | None
    results: Sequence[TaskResult]
    transactions: Mapping[str, EndedTransactions] = field(default_factory=dict)
    note: str = ""
    last_task: int = -1
    schemas: tuple[str, ...] = ()
    cause: str = ""

    @property
    def identity(self) -> dict[str, Any]:
        """The fields by which lines of a query are joined with its progress."""
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
    """At planning: raises ConfigurationError if the file cannot be appended to."""
    try:
        os.close(_opened(local_path(value, _OPTION)))
    except OSError as error:
        raise ConfigurationError(
            f"Option '{_OPTION}' = {value} cannot be written on the driver's host: {error.strerror}"
        ) from None


def append(value: str, line: Mapping[str, Any]) -> None:
    """Append one line, whole or not at all, also where other processes append. Raises OSError.

    By one write, which the system places behind all others. There is no lock: whoever may read the file
    could hold it, and so keep a line out.
    """
    content = json.dumps(line, separators=(",", ":")).encode() + b"\n"
    handle = _opened(local_path(value, _OPTION))
    try:
        written = os.write(handle, content)
        if written < len(content):
            _take_back(handle, written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(handle)
    finally:
        os.close(handle)


def _take_back(handle: int, written: int) -> None:
    """Remove half a line, unless another process has written behind it."""
    end = os.lseek(handle, 0, os.SEEK_CUR)
    if os.fstat(handle).st_size == end:
        os.ftruncate(handle, end - written)


def _opened(path: str) -> int:
    """Do not wait for the reader of a FIFO. Raises OSError, also for what this user has not made."""
    irregular = OSError(errno.EINVAL, "it is not a regular file")
    try:
        handle = os.open(path, _FLAGS, _MODE)
    except OSError as error:
        # A FIFO without a reader, or a socket.
        if error.errno == errno.ENXIO:
            raise irregular from None
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link: name the file itself") from None
        raise
    found = os.fstat(handle)
    is_regular = stat.S_ISREG(found.st_mode)
    if is_regular and found.st_uid == os.geteuid() and found.st_nlink == 1:
        return handle
    os.close(handle)
    foreign = OSError(errno.EPERM, "it belongs to another user, or has a second name: delete it")
    raise foreign if is_regular else irregular


def partitions_of(results: Sequence[TaskResult]) -> list[dict[str, Any]]:
    """By topic and partition: rows, batches, bytes, and the offsets as inclusive ranges in ascending order.

    ``endOffset`` is one past the highest; a reader that has reached it has seen all. ``rowsWithoutOffset``
    are acknowledged rows whose offsets the broker did not return (acks=0, duplicates of a retry).
    """
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for result in results:
        for one in result.partitions:
            new = {"topic": one.topic, "partition": one.partition, "rows": 0, "batches": 0, "bytes": 0}
            entry = found.setdefault((one.topic, one.partition), {**new, "offsets": []})
            entry["rows"] += one.records
            entry["batches"] += one.batches
            entry["bytes"] += one.bytes
            entry["offsets"] += one.offset_ranges
    for entry in found.values():
        ranges = entry["offsets"] = _merged(entry["offsets"])
        entry["endOffset"] = ranges[-1][1] + 1 if ranges else None
        entry["rowsWithoutOffset"] = max(0, entry["rows"] - sum(last - first + 1 for first, last in ranges))
    return [found[key] for key in sorted(found)]


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
    """``rows`` are acknowledged, ``unconfirmed`` were sent with acks=0, and ``skipped`` can never be written
    (errors.tolerance=all), by reason in ``skip_reasons``.

    ``already_written``: an earlier run had written this ``txnVersion``, so this one wrote nothing.
    ``dead_letters``: of the skipped rows, in the topic for them.
    ``partitions``: as in the delivery report, one entry for each topic and partition with its ``offsets``.
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
        """``results``: of the tasks whose rows count."""
        counts = total(results)
        return cls(
            counts.records,
            counts.unconfirmed,
            counts.skipped,
            dict(skip_reasons_of(results)),
            already_written,
            partitions_of(results),
            # A write ends when each has its dead letter.
            counts.skipped if options.errors_deadletterqueue_topic_name else 0,
        )

    @property
    def offsets(self) -> dict[TopicPartition, tuple[tuple[int, int], ...]]:
        """Inclusive ranges by partition, those of dead letters included."""
        return {
            TopicPartition(one["topic"], one["partition"]): tuple(
                (first, last) for first, last in one["offsets"]
            )
            for one in self.partitions
        }


# Its former name, for one release.
Written = WriteResult
