"""What the driver reports when a write ends: to the log, to the live view, and to the delivery report.

For a query, the log has a line for the first micro-batch that has rows, one for each micro-batch with
trouble, and once a minute a digest of the others. Each commit runs in its own process, so the sums since the
last digest are a note in the application's folder. Writes in ``foreachBatch`` also count as micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from kafka_sink import spark_application
from kafka_sink.coordinator.address import PlannedCoordinator
from kafka_sink.coordinator.live.messages import (
    MAX_ALL_TOPICS,
    MAX_CAUSE,
    WriteEnded,
    cluster_name,
    report_end,
)
from kafka_sink.counts import SPECS, TopicMetrics, total
from kafka_sink.driver import driver_log
from kafka_sink.model import TaskResult
from kafka_sink.options import SinkOptions
from kafka_sink.printable import printable
from kafka_sink.reports.delivery_report import EndedWrite, append, partitions_of, skip_reasons_of
from kafka_sink.spark_application import rows_of_good_batch

_TOPICS_NAMED = 3
# The rate of fewer rows says nothing: starting took most of the time.
_ROWS_WITH_RATE = 100
# With fewer tasks, empty ones cost less than a second altogether.
_MANY_TASKS = 50
# In bytes. Larger Arrow batches do not fit the CPU's caches, and each of them needs new pages of memory.
_LARGE_ARROW_BATCH = 16_000_000
# The time between two digests, in seconds.
_INTERVAL_S = 60.0


def report(options: SinkOptions, coordinator: PlannedCoordinator, ended: EndedWrite) -> None:
    """Make all reports of a write. The line about an abort is logged elsewhere (see ``aborted``).

    A report that fails does not fail the write, because Kafka has the rows.
    """
    _to_live_view(options, coordinator, ended)
    if options.delivery_report_path:
        _to_delivery_report(options.delivery_report_path, ended)
    if ended.outcome == "skipped":
        driver_log.warn(ended.label + ended.note)
    elif ended.outcome == "committed" and options.log_summary:
        is_due, digest = _is_due(ended, time.time())
        if digest:
            driver_log.report(digest)
        if is_due:
            notes = "".join(f"; {note}" for note in (*ended.schemas, ended.note) if note)
            driver_log.report(ended.label + summarise(ended.results) + notes)
        driver_log.debug(ended.label + details(ended.results))
        _advise(ended)


def aborted(ended: EndedWrite) -> str:
    """Describe what an aborted write leaves behind, without the reason for the abort."""
    line = f"{ended.label}aborted"
    if ended.tasks is not None:
        line += f", {ended.tasks - len(ended.results)} of {ended.tasks} tasks did not finish"
    if ended.note:
        return f"{line}; {ended.note}"
    if ended.results:
        line += f"; Kafka keeps what the other tasks wrote: {summarise(ended.results)}"
    return line


def _advise(ended: EndedWrite) -> None:
    """Log advice. For a query, including one that writes in foreachBatch, it is logged once."""
    for about, advice in (
        ("empty tasks", about_empty_tasks(ended.results)),
        ("large Arrow batches", about_large_arrow_batches(ended.results)),
    ):
        if advice and (not ended.query or spark_application.first_time(f"{about} of {ended.query}")):
            driver_log.report(ended.label + advice)


def _to_live_view(options: SinkOptions, coordinator: PlannedCoordinator, ended: EndedWrite) -> None:
    if coordinator.address is not None and coordinator.address.has_view:
        from kafka_sink.coordinator.rendezvous import address_for_driver

        address = address_for_driver()
        if address is not None:
            report_end(address, write_ended(options, ended))


def _to_delivery_report(path: str, ended: EndedWrite) -> None:
    line = {**ended.identity, "partitions": partitions_of(ended.results)}
    try:
        append(path, line)
    except OSError as error:
        driver_log.error(
            f"{ended.label}delivery.report.path={path}: the write is {ended.outcome}, but its line could not "
            f"be written: {error.strerror}"
        )


def write_ended(options: SinkOptions, ended: EndedWrite) -> WriteEnded:
    """The sums that the summary shows, within the size limits of a message."""
    topics: dict[str, tuple[int, ...]] = dict(_topics_of(ended.results))
    return WriteEnded(
        cluster_name(options),
        ended.write,
        # For the live view, a skipped write is one more write that succeeded.
        "committed" if ended.outcome == "skipped" else ended.outcome,
        ended.query,
        -1 if ended.batch is None else ended.batch,
        len(ended.results),
        total(ended.results).by_name(),
        topics if len(topics) <= MAX_ALL_TOPICS else {},
        dict(ended.transactions),
        ended.last_task,
        printable(ended.cause, MAX_CAUSE),
    )


def _topics_of(results: Sequence[TaskResult]) -> dict[str, TopicMetrics]:
    # Lists are faster than objects: a commit may sum up tens of thousands of results.
    sums: dict[str, list[int]] = {}
    for result in results:
        for topic, _, records, batches, sent_bytes, _, _, raw_bytes in result.partitions:
            of_topic = sums.setdefault(topic, [0, 0, 0, 0])
            of_topic[0] += records
            of_topic[1] += sent_bytes
            of_topic[2] += raw_bytes
            of_topic[3] += batches
    return {topic: TopicMetrics(*of_topic) for topic, of_topic in sums.items()}


def summarise(results: Sequence[TaskResult]) -> str:
    """One line about the work of these tasks. Times are the slowest task's: tasks run in parallel."""
    counts = total(results)
    rows, unconfirmed = counts.records, counts.unconfirmed
    parts = [f"{_count(rows, 'row', 'rows')} acknowledged"] if rows or not unconfirmed else []
    if unconfirmed:
        parts.append(f"{_count(unconfirmed, 'row', 'rows')} sent unconfirmed")
    line = " and ".join(parts) + _topics(results)
    if counts.batches:
        line += f" in {_times(results, rows + unconfirmed)}"
    for name, count in counts.by_name().items():
        if nouns := SPECS[name].nouns:
            line += f", {_count(int(count), *nouns)}"
    return line + _skipped(results)


def details(results: Sequence[TaskResult]) -> str:
    """The numbers that ``summarise`` leaves out: sizes, batches and requests, and memory."""
    counts = total(results)
    batches = _count(counts.batches, "batch", "batches")
    requests = _count(counts.requests, "request", "requests")
    sizes = f"{_size(counts.raw_bytes)} as {_size(counts.sent_bytes)}"
    tasks = _count(len(results), "task", "tasks")
    return f"{tasks}, {sizes} in {batches} and {requests}{_memory(results)}"


def about_empty_tasks(results: Sequence[TaskResult]) -> str | None:
    """Advice for writes in which most of many tasks had no rows, or None."""
    busy = sum(1 for result in results if result.records or result.unconfirmed or result.skipped)
    if len(results) < _MANY_TASKS or busy > len(results) / 4:
        return None
    return (
        f"{len(results) - busy:,} of {len(results):,} tasks had no rows. Spark runs a task for each "
        "partition of the DataFrame; after groupBy or join there are spark.sql.shuffle.partitions of them. "
        "Lower that setting (a query with state keeps the number with which its checkpoint began), or write "
        "df.coalesce(n)"
    )


def about_large_arrow_batches(results: Sequence[TaskResult]) -> str | None:
    """Advice for writes to which Spark hands rows in large batches, or None."""
    largest = round(_most(results, _ARROW_BATCH_BYTES))
    rows = sum(result.records + result.unconfirmed for result in results)
    if largest < _LARGE_ARROW_BATCH or not rows:
        return None
    row_bytes = max(1.0, sum(result.raw_bytes for result in results) / rows)
    return (
        f"Spark handed rows over in Arrow batches of up to {_size(largest)}, which costs time and memory. "
        f"Set spark.sql.execution.arrow.maxRecordsPerBatch={rows_of_good_batch(row_bytes)}, so that a "
        "batch has about 4 MB"
    )


def _most(results: Iterable[TaskResult], of: Callable[[TaskResult], float]) -> float:
    return max(map(of, results), default=0)


def _held(result: TaskResult) -> float:
    """The most memory that the task's unacknowledged rows took, in bytes."""
    return sum(result.metrics.get(name, 0) for name in ("buffer-used-bytes-max", "buffer-heap-bytes-max"))


def _held_by_full(result: TaskResult) -> float:
    """The estimated memory with the strategy `full`."""
    return _held(result) + result.metrics.get("buffer-saved-bytes-max", 0)


_ARROW_BATCH_BYTES, _ELAPSED_MS = attrgetter("arrow_batch_bytes_max"), attrgetter("elapsed_ms")


def _skipped(results: Sequence[TaskResult]) -> str:
    reasons = skip_reasons_of(results)
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


def _times(results: Sequence[TaskResult], rows: int) -> str:
    """The time of the slowest task. From a second on also the rate of more than a few rows, and what took at
    least a tenth."""
    slowest = max(results, key=_ELAPSED_MS)
    seconds = slowest.elapsed_ms / 1000
    if seconds < 1:
        return f"{seconds:.2f} s"
    rate = f", {rows / seconds:,.0f} rows/s" if rows >= _ROWS_WITH_RATE else ""
    parts = [f"{seconds:.2f} s{rate}"]
    for name, spent in (
        ("held back by the rate limit", slowest.rate_wait_ms),
        ("waiting for memory", slowest.pool_wait_ms),
        ("waiting for responses", slowest.flush_ms),
    ):
        # Show only times that are worth acting on: at least a tenth of the total.
        if spent >= slowest.elapsed_ms / 10:
            parts.append(f"{spent / 1000:.2f} s {name}")
    return parts[0] if len(parts) == 1 else f"{parts[0]} ({', '.join(parts[1:])})"


def _memory(results: Sequence[TaskResult]) -> str:
    held, full = _most(results, _held), _most(results, _held_by_full)
    if not held:
        return ""
    text = f"; {_size(held)} of memory at most in a task"
    return f"{text} ({_size(full)} with the strategy 'full')" if full > held else text


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _size(count: float) -> str:
    for exponent, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if count >= 1000**exponent:
            return f"{count / 1000**exponent:.1f} {unit}"
    return f"{count:.0f} B"


@dataclass(slots=True)
class _UnreportedWrites:
    """Sums of the micro-batches without a line of their own since the last line. Times are wall time."""

    since_s: float
    # Whether a micro-batch with rows had a line of its own.
    is_announced: bool = False
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
        self.slowest_ms = max(self.slowest_ms, _most(ended.results, _ELAPSED_MS))

    def line(self, ended: EndedWrite, now_s: float) -> str:
        which = "" if ended.batch is None else f", micro-batches {self.first} to {ended.batch}"
        return (
            f"kafka-chunked{which}: {self.writes:,} writes in {now_s - self.since_s:,.0f} s, "
            f"{self.rows:,} rows in {_size(self.sent_bytes)}; the slowest task took "
            f"{self.slowest_ms / 1000:.2f} s"
        )


def _is_due(ended: EndedWrite, now_s: float) -> tuple[bool, str]:
    """Whether the committed write gets its own line, and a digest of the micro-batches before it, or "".

    Outside queries, every write gets its own line.
    """
    if not ended.query:
        return True, ""
    key = f"digest of {ended.query}"
    noted = spark_application.noted_within(key, math.inf, _UnreportedWrites)
    sums = noted or _UnreportedWrites(now_s)
    counts = total(ended.results)
    is_first = not sums.is_announced and bool(counts.records or counts.unconfirmed)
    sums.is_announced |= is_first
    # Trouble means that rows were skipped, batches sent again, breakers tripped or transactions aborted.
    uncommitted = sum(count for name, count in ended.transactions.items() if name != "committed")
    has_trouble = bool(counts.skipped or counts.retries or counts.breaker_trips or uncommitted)
    own = is_first or has_trouble
    if not own:
        sums.add(ended)
    digest = ""
    # If the clock was set back, the minute also ends.
    if sums.writes and not 0 <= now_s - sums.since_s < _INTERVAL_S:
        digest, sums = sums.line(ended, now_s), _UnreportedWrites(now_s, sums.is_announced)
    spark_application.note(key, sums)
    return own, digest
