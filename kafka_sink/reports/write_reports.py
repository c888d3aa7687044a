"""What the driver reports when a write ends: to the log, to the live view, and to the delivery report."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from kafka_sink import spark_application
from kafka_sink.coordinator.address import PlannedCoordinator
from kafka_sink.coordinator.live.messages import (
    MAX_CAUSE,
    MAX_FINAL_TOPICS,
    MAX_SCHEMAS,
    WriteEnded,
    cluster_name,
    report_end,
)
from kafka_sink.coordinator.schema import cut
from kafka_sink.counts import TopicMetrics, total
from kafka_sink.driver import driver_log
from kafka_sink.model import TaskResult
from kafka_sink.options import SinkOptions
from kafka_sink.printable import printable
from kafka_sink.reports import summary
from kafka_sink.reports.delivery_report import EndedWrite, append, partitions_of
from kafka_sink.reports.summary import about_empty_tasks, about_large_arrow_batches, summarise, summary_fields


def report(options: SinkOptions, coordinator: PlannedCoordinator, ended: EndedWrite) -> None:
    """Make all reports of a write, but for the line of one that was aborted. No report fails the write, as
    Kafka has its rows.
    """
    _to_live_view(options, coordinator, ended)
    if options.delivery_report_path:
        _to_delivery_report(options.delivery_report_path, ended)
    is_skipped = ended.outcome == "skipped"
    if is_skipped:
        driver_log.warn(ended.label + ended.note)
    if options.log_summary_format == "json":
        if options.log_summary or is_skipped:
            fields = {**ended.identity, **summary_fields(ended.results), "tasks": ended.tasks}
            if ended.schemas:
                fields["schemas"] = ended.schemas
            driver_log.report_json(
                json.dumps({**fields, **_transaction_fields(ended)}, separators=(",", ":"))
            )
    elif ended.outcome == "committed" and options.log_summary:
        is_due, digest = summary.is_due(ended, time.time())
        if digest:
            driver_log.report(digest)
        if is_due:
            notes = "".join(f"; {note}" for note in (*ended.schemas, ended.note) if note)
            driver_log.report(ended.label + summarise(ended.results) + notes)
        _advise(ended)


def aborted(ended: EndedWrite) -> str:
    """What a write that was aborted leaves, without the reason."""
    line = f"{ended.label}aborted"
    if ended.tasks is not None:
        line += f", {ended.tasks - len(ended.results)} of {ended.tasks} tasks did not finish"
    if ended.note:
        return f"{line}; {ended.note}"
    if ended.results:
        line += f"; Kafka keeps what others wrote: {summarise(ended.results)}"
    return line


def _transaction_fields(ended: EndedWrite) -> dict[str, Any]:
    if not ended.transactions:
        return {}
    counts: dict[str, Any] = {name: one.count for name, one in ended.transactions.items()}
    oldest = {name: one.oldest_ms for name, one in ended.transactions.items()}
    return {"transactions": {**counts, "oldestMs": oldest}}


def _advise(ended: EndedWrite) -> None:
    """Log advice, once for a query, also where it writes in foreachBatch."""
    for about, advice in (
        ("empty tasks", about_empty_tasks(ended.results)),
        ("large Arrow batches", about_large_arrow_batches(ended.results)),
    ):
        if advice and (not ended.query or spark_application.only_once(f"{about} of {ended.query}")):
            driver_log.report(ended.label + advice)


def _to_live_view(options: SinkOptions, coordinator: PlannedCoordinator, ended: EndedWrite) -> None:
    address = coordinator.driver_address
    if address is not None and address.location.has_view:
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
    """The sums that the summary shows, within the bounds of a message."""
    topics: dict[str, tuple[int, ...]] = dict(topics_of(ended.results))
    return WriteEnded(
        cluster_name(options),
        ended.write,
        # There it is one more write that ended well.
        "committed" if ended.outcome == "skipped" else ended.outcome,
        ended.query,
        -1 if ended.batch is None else ended.batch,
        len(ended.results),
        total(ended.results).by_name(),
        topics if len(topics) <= MAX_FINAL_TOPICS else {},
        {name: one.count for name, one in ended.transactions.items()},
        {name: one.total_ms for name, one in ended.transactions.items()},
        ended.last_task,
        max((result.elapsed_ms for result in ended.results), default=0.0),
        tuple(cut(one) for one in ended.schemas[:MAX_SCHEMAS]),
        printable(ended.cause, MAX_CAUSE),
    )


def topics_of(results: Sequence[TaskResult]) -> dict[str, TopicMetrics]:
    """The sums by topic."""
    # Lists, because a commit may sum up tens of thousands of results.
    sums: dict[str, list[int]] = {}
    for result in results:
        for topic, _, records, batches, sent_bytes, _, _, raw_bytes in result.partitions:
            of_topic = sums.get(topic)
            if of_topic is None:
                sums[topic] = [records, sent_bytes, raw_bytes, batches]
            else:
                of_topic[0] += records
                of_topic[1] += sent_bytes
                of_topic[2] += raw_bytes
                of_topic[3] += batches
    return {topic: TopicMetrics(*of_topic) for topic, of_topic in sums.items()}
