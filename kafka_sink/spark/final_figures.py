"""A write's final figures, which the driver reports to the live view when it commits or aborts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kafka_sink.coordinator.figures.messages import FinalFigures, TopicFigures
from kafka_sink.model import EndedTransactions, TaskResult


def final_figures(
    write: str,
    outcome: str,
    query: str,
    batch: int,
    results: Sequence[TaskResult],
    transactions: Mapping[str, EndedTransactions],
    last_task: int = -1,
) -> FinalFigures:
    """The sums that the summary shows. ``results``: of the tasks that Spark counts."""
    return FinalFigures(
        write,
        outcome,
        query,
        batch,
        len(results),
        {
            "records": sum(result.records for result in results),
            "unconfirmed": sum(result.unconfirmed for result in results),
            "batches": sum(result.batches for result in results),
            "raw_bytes": sum(result.raw_bytes for result in results),
            "sent_bytes": sum(result.wire_bytes for result in results),
            "requests": sum(result.requests for result in results),
            "retries": sum(result.retries for result in results),
            "splits": sum(result.splits for result in results),
            "dead_letters": sum(result.skipped for result in results),
            "rate_wait_ms": sum(result.rate_wait_ms for result in results),
            "breaker_trips": sum(result.breaker_trips for result in results),
            "breaker_probes": sum(result.breaker_probes for result in results),
        },
        topics_of(results),
        {name: one.count for name, one in transactions.items()},
        {name: one.total_ms for name, one in transactions.items()},
        last_task,
    )


def topics_of(results: Sequence[TaskResult]) -> dict[str, TopicFigures]:
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
    return {topic: TopicFigures(*of_topic) for topic, of_topic in sums.items()}
