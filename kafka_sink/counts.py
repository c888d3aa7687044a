"""The counts of a task, which appear in the write's summary, the live view and /metrics.

Each count is declared here once, with its unit and its texts. A new count also needs the line that counts it,
in ``Deliveries`` under the same name or in ``ProducerTask.counts``, and a line in docs/metrics.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from operator import add, attrgetter
from typing import Any, NamedTuple

Number = int | float


@dataclass(frozen=True, slots=True)
class CountSpec:
    """How a count is presented.

    ``metric`` is its name in /metrics without the prefix, which includes the unit; "" if it is not a metric.
    ``scale`` converts the count to that unit. ``doc`` describes the metric. ``nouns`` are singular and plural
    for the summary, which omits a count of 0.
    """

    metric: str = ""
    doc: str = ""
    nouns: tuple[str, str] | None = None
    scale: float = 1.0


def _count(*texts: Any, **given: Any) -> Any:
    """Return a dataclass field whose CountSpec has these arguments."""
    return field(default=0, metadata={"spec": CountSpec(*texts, **given)})


# A time is counted in milliseconds here, and is in seconds in /metrics.
_time = partial(_count, scale=0.001)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCounts:
    """Totals of one task, or sums over tasks. They count rows, unless the name contains bytes or ms.

    ``records`` were acknowledged, ``unconfirmed`` were sent with acks=0. ``skipped`` can never be written
    (errors.tolerance=all); their dead letters do not count as rows, but they count in ``batches`` and bytes.
    ``sent_bytes`` is the size of record batches as sent (compressed, with headers, first attempts only),
    ``raw_bytes`` their uncompressed size.
    """

    records: int = _count()
    unconfirmed: int = _count("record_unconfirmed", "Rows sent with acks=0")
    skipped: int = _count("dead_letter", "Rows that went to the dead letter topic or were dropped")
    failed: int = _count("record_error", "Rows whose delivery failed; each fails its task")
    batches: int = _count()
    raw_bytes: int = _count()
    sent_bytes: int = _count()
    other_rack_bytes: int = _count(
        "other_rack_bytes", "Bytes of record batches sent to brokers outside kafka.client.rack"
    )
    requests: int = _count("request", "Produce requests")
    retries: int = _count("batch_retry", "Record batches that were sent again", nouns=("retry", "retries"))
    splits: int = _count(
        "batch_split",
        "Record batches that were too large for a broker and were split",
        nouns=("split", "splits"),
    )
    breaker_trips: int = _count(
        "breaker_trips",
        "Brokers and partitions that tasks muted",
        nouns=("circuit breaker trip", "circuit breaker trips"),
    )
    breaker_probes: int = _count(
        "breaker_probes", "Probes of muted brokers and partitions", nouns=("probe", "probes")
    )
    encode_ms: float = _time("encode_time_seconds", "Time that tasks spent encoding rows")
    pool_wait_ms: float = _time("bufferpool_wait_time_seconds", "Time that tasks waited for memory")
    rate_wait_ms: float = _time("rate_limit_wait_time_seconds", "Time that tasks waited for a rate limit")
    buffer_exhausted: int = _count("buffer_exhausted", "Waits for memory that ended after max.block.ms")
    metadata_requests: int = _count("metadata_request", "Metadata requests of tasks for their own topics")
    metadata_fetches: int = _count("metadata_fetch", "Metadata requests that also asked for other tasks")
    metadata_avoided: int = _count("metadata_request_avoided", "Metadata requests that the coordinator saved")
    transactions_begun: int = _count()

    def by_name(self) -> dict[str, Any]:
        """The counts that are not zero, by the names of their fields."""
        return {name: value for name, value in zip(NAMES, _VALUES(self), strict=True) if value}


NAMES = tuple(count.name for count in fields(TaskCounts))
SPECS: Mapping[str, CountSpec] = {count.name: count.metadata["spec"] for count in fields(TaskCounts)}
_VALUES = attrgetter(*NAMES)


def total(counts: Iterable[TaskCounts]) -> TaskCounts:
    return TaskCounts(**dict(zip(NAMES, map(sum, zip(*map(_VALUES, counts), strict=True)), strict=False)))


class TopicMetrics(NamedTuple):
    """A topic's acknowledged rows (with acks=0: sent rows), their size as sent and raw, and their batches."""

    records: int = 0
    sent_bytes: int = 0
    raw_bytes: int = 0
    batches: int = 0

    def plus(self, other: TopicMetrics) -> TopicMetrics:
        return TopicMetrics(*map(add, self, other))


# Upper bounds of the buckets of request latencies, in milliseconds. One more bucket has no bound.
LATENCY_BOUNDS_MS = (5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1e3, 2.5e3, 5e3, 10e3, 30e3)


@dataclass(slots=True)
class LatencyWindow:
    """Count, sum and maximum of the latencies since the window began."""

    count: int = 0
    total: float = 0.0
    most: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.most = max(self.most, value)


# Values that a task has at this moment, with the descriptions of their sums over all tasks in /metrics.
GAUGES: Mapping[str, str] = {
    "buffer_total_bytes": "buffer.memory of the running tasks",
    "buffer_used_bytes": "Memory that unacknowledged rows hold",
    "buffer_allocated_bytes": "Used memory and memory kept for reuse",
    "buffer_heap_bytes": "Memory held beyond the pool",
    "waiting_threads": "Tasks that wait for memory",
}


# Tasks report once a second, but not at the same moment: over a shorter window the rate would jump.
_SAMPLES = 6


class RateWindow:
    """The increase of a total over the last five samples."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)

    def add(self, now_ms: float, total: float) -> None:
        """Add a sample. Before the first one comes a zero a second earlier, so that a start shows at once."""
        if not self._samples:
            self._samples.append((now_ms - 1000.0, 0.0))
        self._samples.append((now_ms, total))

    @property
    def increase(self) -> float:
        """How much the total has grown within the window; 0 if the total was corrected downwards."""
        return max(0.0, self._samples[-1][1] - self._samples[0][1]) if self._samples else 0.0

    @property
    def per_second(self) -> float:
        elapsed_ms = self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0
        return self.increase / elapsed_ms * 1000 if elapsed_ms > 0 else 0.0
