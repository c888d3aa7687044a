"""The one line that the driver says of a job."""

from __future__ import annotations

from kafka_sink.model import PartitionResult, TaskResult
from kafka_sink.reports.write_report import about_empty_tasks, about_large_arrow_batches, details, summarise


def wrote(*partitions: tuple[str, int, int], **values: float) -> TaskResult:
    parts = tuple(PartitionResult(topic, number, rows, 1, 10, ()) for topic, number, rows in partitions)
    return TaskResult(partitions=parts, records=sum(rows for _, _, rows in partitions), **values)  # type: ignore[arg-type]  # numbers


def test_a_job_of_two_tasks() -> None:
    tasks = [
            wrote(
                ("flights", 0, 300_000), ("flights", 1, 36_776),
                batches=80, raw_bytes=41_000_000, sent_bytes=17_500_000, requests=40, retries=1,
                elapsed_ms=1500.0, flush_ms=30.0, pool_wait_ms=400.0,
            ),
            wrote(
                ("flights", 1, 1),
                batches=1, raw_bytes=1_100_000, sent_bytes=500_000, requests=1, splits=2, elapsed_ms=2.0,
                flush_ms=2.0,
            ),
        ]  # fmt: skip
    assert summarise(tasks) == (
        "336,777 rows acknowledged in flights (2 partitions) in 1.50 s, 224,518 rows/s (0.40 s waiting for "
        "memory), 1 retry, 2 splits"
    )
    assert details(tasks) == "2 tasks, 42.1 MB as 18.0 MB in 81 batches and 41 requests"


def test_a_small_write_is_reported_with_rows_topic_and_time_alone() -> None:
    """Catches: sizes, requests, memory and "1 rows/s" in the line about two rows, and "1 rows"."""
    task = wrote(("t", 0, 1), batches=1, raw_bytes=29, sent_bytes=151, elapsed_ms=130.0, flush_ms=70.0)
    assert summarise([task]) == "1 row acknowledged in t (1 partition) in 0.13 s"
    slow = wrote(("t", 0, 2), batches=1, elapsed_ms=2100.0)
    assert summarise([slow]) == "2 rows acknowledged in t (1 partition) in 2.10 s"


def test_memory_of_the_task_that_held_most() -> None:
    def with_memory(used: int, heap: int, saved: int) -> TaskResult:
        names = ("buffer-used-bytes-max", "buffer-heap-bytes-max", "buffer-saved-bytes-max")
        return TaskResult(batches=1, metrics=dict(zip(names, (used, heap, saved), strict=True)))

    tasks = [with_memory(2_000_000, 0, 0), with_memory(3_000_000, 500_000, 60_000_000)]
    line = details(tasks)
    assert line.endswith("; 3.5 MB of memory at most in a task (63.5 MB with the strategy 'full')")
    assert details(tasks[:1]).endswith("; 2.0 MB of memory at most in a task")


def test_summary_of_no_rows() -> None:
    assert summarise([]) == summarise([TaskResult()]) == "0 rows acknowledged"


def test_unconfirmed_rows_are_not_called_acknowledged() -> None:
    assert summarise([TaskResult(unconfirmed=3)]) == "3 rows sent unconfirmed"
    both = summarise([TaskResult(records=2, unconfirmed=3)])
    assert both == "2 rows acknowledged and 3 rows sent unconfirmed"


def test_summary_counts_the_topics_that_it_does_not_list() -> None:
    line = summarise([wrote(*((f"t{number}", 0, 1) for number in range(2000)))])
    assert line == "2,000 rows acknowledged in t0, t1, t10 and 1,997 more topics (2,000 partitions)"


def test_sizes() -> None:
    sizes = {999: "999 B", 1000: "1.0 kB", 1_500_000: "1.5 MB", 2_340_000_000: "2.3 GB", 10**12: "1.0 TB"}
    for count, text in sizes.items():
        task = TaskResult(batches=1, raw_bytes=count)
        assert details([task]) == f"1 task, {text} as 0 B in 1 batch and 0 requests"


def test_empty_tasks_are_reported_if_most_tasks_are_empty() -> None:
    some, none = wrote(("t", 0, 1)), TaskResult()
    advice = about_empty_tasks([some, some, *[none] * 198])
    assert advice is not None
    assert advice.startswith("198 of 200 tasks had no rows")
    assert "spark.sql.shuffle.partitions" in advice
    unconfirmed, skipped = TaskResult(unconfirmed=1), TaskResult(skipped=1)
    several = [some] * 60 + [none] * 140
    for fine in ([some] * 200, [some, *[none] * 20], several, [], [unconfirmed] * 200, [skipped] * 200):
        assert about_empty_tasks(fine) is None


def test_large_arrow_batches_have_advice() -> None:
    task = TaskResult(records=1000, raw_bytes=12_000_000, arrow_batch_bytes_max=64_000_000)
    assert about_large_arrow_batches([task, TaskResult(arrow_batch_bytes_max=10)]) == (
        "Spark handed rows over in Arrow batches of up to 64.0 MB, which costs time and memory. "
        "Set spark.sql.execution.arrow.maxRecordsPerBatch=300, so that a batch has about 4 MB"
    )
    huge = about_large_arrow_batches(
        [TaskResult(unconfirmed=2, raw_bytes=18_000_000, arrow_batch_bytes_max=30_000_000)]
    )
    assert huge is not None
    assert "maxRecordsPerBatch=1," in huge
    for fine in ([], [TaskResult()], [TaskResult(records=9, raw_bytes=9, arrow_batch_bytes_max=2_000_000)]):
        assert about_large_arrow_batches(fine) is None
