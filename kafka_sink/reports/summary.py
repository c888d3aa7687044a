"""The one-line summary of a job or micro-batch that the driver logs.

Of a query's micro-batches the log has a line for the first, one for each with trouble, and a digest a minute
for the others. Each commit is a process of its own, so the sums since the last digest are a note in the
application's folder. Writes in ``foreachBatch`` count as micro-batches, too.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from kafka_sink import spark_application
from kafka_sink.counts import SPECS, total
from kafka_sink.model import TaskResult
from kafka_sink.reports.delivery_report import EndedWrite
from kafka_sink.rows.hand_over import rows_of_good_batch

_TOPICS_NAMED = 3
# Fewer tasks cost less than a second altogether.
_MANY_TASKS = 50
# Bytes. Larger Arrow batches leave the processor's caches, and each needs fresh pages of memory.
_LARGE_ARROW_BATCH = 16_000_000


def summarise(results: Sequence[TaskResult]) -> str:
    """One line about the work of these tasks. Times are the slowest task's, as tasks run in parallel."""
    counts = total(results)
    rows, unconfirmed = counts.records, counts.unconfirmed
    parts = [f"{rows:,} rows acknowledged"] if rows or not unconfirmed else []
    if unconfirmed:
        parts.append(f"{unconfirmed:,} rows sent unconfirmed")
    tasks = _count(len(results), "task", "tasks")
    line = " and ".join(parts) + f"{_topics(results)} by {tasks}{_skipped(results)}"
    if not counts.batches:
        return line
    batches = _count(counts.batches, "batch", "batches")
    requests = _count(counts.requests, "request", "requests")
    line += f": {size(counts.raw_bytes)} as {size(counts.sent_bytes)} in {batches} and {requests}"
    for name, count in counts.by_name().items():
        if nouns := SPECS[name].nouns:
            line += f", {_count(int(count), *nouns)}"
    return f"{line}; {_times(results)}{_memory(results)}"


def about_empty_tasks(results: Sequence[TaskResult]) -> str | None:
    """What to change where most of many tasks had no rows; None if nothing."""
    busy = sum(1 for result in results if result.records or result.unconfirmed or result.skipped)
    if len(results) < _MANY_TASKS or busy > len(results) / 4:
        return None
    return (
        f"{len(results) - busy:,} of {len(results):,} tasks had no rows. Spark runs a task for each "
        "partition of the DataFrame, after groupBy or join spark.sql.shuffle.partitions of them. Lower "
        "that (a query with state keeps the number that its checkpoint began with), or write df.coalesce(n)"
    )


def about_large_arrow_batches(results: Sequence[TaskResult]) -> str | None:
    """What to change where Spark hands rows over in large pieces; None if nothing."""
    largest = max((result.arrow_batch_bytes_max for result in results), default=0)
    rows = sum(result.records + result.unconfirmed for result in results)
    if largest < _LARGE_ARROW_BATCH or not rows:
        return None
    row_bytes = max(1.0, sum(result.raw_bytes for result in results) / rows)
    return (
        f"Spark handed rows over in Arrow batches of up to {size(largest)}, which costs time and memory. "
        f"Set spark.sql.execution.arrow.maxRecordsPerBatch={rows_of_good_batch(row_bytes)}, so that a "
        "batch has about 4 MB"
    )


def summary_fields(results: Sequence[TaskResult]) -> dict[str, Any]:
    """The same as values for JSON. Bytes and milliseconds; maxima are of one task."""
    topics: dict[str, int] = {}
    for result in results:
        for written in result.partitions:
            topics[written.topic] = topics.get(written.topic, 0) + written.records
    counts = total(results)
    return {
        **{spec.json: getattr(counts, name) for name, spec in SPECS.items() if spec.json},
        "rowsByTopic": dict(sorted(topics.items())),
        "partitions": len({(one.topic, one.partition) for result in results for one in result.partitions}),
        "arrowBatchBytesMax": max((result.arrow_batch_bytes_max for result in results), default=0),
        "elapsedMs": round(max((result.elapsed_ms for result in results), default=0.0)),
        "poolWaitMs": round(max((result.pool_wait_ms for result in results), default=0.0)),
        "flushMs": round(max((result.flush_ms for result in results), default=0.0)),
        "bufferBytesMax": max((_held(result) for result in results), default=0),
        "bufferBytesMaxOfFull": max(
            (_held(result) + int(result.metrics.get("buffer-saved-bytes-max", 0)) for result in results),
            default=0,
        ),
    }


def _skipped(results: Sequence[TaskResult]) -> str:
    reasons: Counter[str] = Counter()
    for result in results:
        reasons.update(result.skip_reasons)
    if not reasons:
        return ""
    rows = _count(total(results).skipped, "row", "rows")
    return f"; {rows} skipped ({', '.join(f'{name}: {count:,}' for name, count in reasons.most_common())})"


def _topics(results: Sequence[TaskResult]) -> str:
    partitions: dict[str, set[int]] = {}
    for result in results:
        for written in result.partitions:
            partitions.setdefault(written.topic, set()).add(written.partition)
    if not partitions:
        return ""
    names = sorted(partitions)
    more = f" and {len(names) - _TOPICS_NAMED:,} more topics" if len(names) > _TOPICS_NAMED else ""
    total = sum(map(len, partitions.values()))
    return f" in {', '.join(names[:_TOPICS_NAMED])}{more} ({_count(total, 'partition', 'partitions')})"


def _times(results: Sequence[TaskResult]) -> str:
    slowest = max(results, key=lambda result: result.elapsed_ms)
    parts = [f"{slowest.elapsed_ms / 1000:.2f} s"]
    for name, spent in (
        ("held back by the rate limit", slowest.rate_wait_ms),
        ("waiting for memory", slowest.pool_wait_ms),
        ("waiting for responses", slowest.flush_ms),
    ):
        # Only times worth acting on: at least a tenth of the total.
        if spent >= slowest.elapsed_ms / 10:
            parts.append(f"{spent / 1000:.2f} s {name}")
    return parts[0] if len(parts) == 1 else f"{parts[0]} ({', '.join(parts[1:])})"


def _memory(results: Sequence[TaskResult]) -> str:
    """The maximum memory of unacknowledged rows in one task, and its estimate for the strategy `full`."""
    held = max(_held(result) for result in results)
    if not held:
        return ""
    text = f"; {size(held)} of memory at most in a task"
    full = max(_held(result) + int(result.metrics.get("buffer-saved-bytes-max", 0)) for result in results)
    if full > held:
        text += f" ({size(full)} with the strategy 'full')"
    return text


def _held(result: TaskResult) -> int:
    return int(
        sum(result.metrics.get(name, 0) for name in ("buffer-used-bytes-max", "buffer-heap-bytes-max"))
    )


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def size(count: int) -> str:
    for exponent, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if count >= 1000**exponent:
            return f"{count / 1000**exponent:.1f} {unit}"
    return f"{count} B"


_INTERVAL_S = 60.0


@dataclass(slots=True)
class _Sums:
    """Since the last line: of micro-batches that no line was about. Times are of the wall clock."""

    since_s: float
    writes: int = 0
    first: int | None = None
    rows: int = 0
    sent_bytes: int = 0
    slowest_ms: float = 0.0

    def add(self, ended: EndedWrite) -> None:
        counts = total(ended.results)
        self.writes += 1
        self.first = ended.batch if self.first is None else self.first
        self.rows += counts.records + counts.unconfirmed
        self.sent_bytes += counts.sent_bytes
        slowest = max((result.elapsed_ms for result in ended.results), default=0.0)
        self.slowest_ms = max(self.slowest_ms, slowest)

    def line(self, ended: EndedWrite, now_s: float) -> str:
        which = "" if ended.batch is None else f", micro-batches {self.first} to {ended.batch}"
        return (
            f"kafka-chunked{which}: {self.writes:,} writes in {now_s - self.since_s:,.0f} s, "
            f"{self.rows:,} rows in {size(self.sent_bytes)}; the slowest task took "
            f"{self.slowest_ms / 1000:.2f} s"
        )


def is_due(ended: EndedWrite, now_s: float) -> tuple[bool, str]:
    """Whether the committed write has a line of its own, and a digest of those before it or "".

    Every write has a line of its own outside of queries, or where nothing is kept.
    """
    if not ended.query or not spark_application.folder():
        return True, ""
    key = f"digest of {ended.query}"
    sums = _noted(key)
    if sums is None:
        spark_application.note(key, json.dumps(asdict(_Sums(now_s))))
        return True, ""
    own = has_trouble(ended)
    if not own:
        sums.add(ended)
    digest = ""
    # A clock that was set back begins a new minute.
    if sums.writes and not 0 <= now_s - sums.since_s < _INTERVAL_S:
        digest, sums = sums.line(ended, now_s), _Sums(now_s)
    spark_application.note(key, json.dumps(asdict(sums)))
    return own, digest


def has_trouble(ended: EndedWrite) -> bool:
    """Whether somebody may want to look at this write: rows were skipped, sends repeated, or transactions
    other than its own ended with it."""
    counts = total(ended.results)
    others = sum(one.count for name, one in ended.transactions.items() if name != "committed")
    return bool(counts.skipped or counts.retries or counts.breaker_trips or others)


def _noted(key: str) -> _Sums | None:
    with suppress(ValueError, TypeError):
        return _Sums(**json.loads(spark_application.noted_within(key, math.inf) or "null"))
    return None
