"""The metrics of a buffer pool, under Kafka's names."""

from __future__ import annotations

from dataclasses import dataclass

# metrics.num.samples and metrics.sample.window.ms at their defaults.
_SAMPLES = 2
_WINDOW_MS = 30_000.0


class WindowedRate:
    """Kafka's Rate: the sum recorded in the last two windows of 30 s, per second.

    As in Kafka, the divisor is never below one window, so that a first event does not look like a spike.
    """

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []  # (start in ms, sum), oldest first

    def record(self, value: float, now_ms: float) -> None:
        """Add ``value`` at ``now_ms``."""
        samples = self._samples
        if samples and now_ms - samples[-1][0] < _WINDOW_MS:
            start, total = samples[-1]
            samples[-1] = (start, total + value)
        else:
            samples.append((now_ms, value))
            del samples[:-_SAMPLES]

    def per_second(self, now_ms: float) -> float:
        """The rate at ``now_ms``; changes nothing."""
        alive = [sample for sample in self._samples if now_ms - sample[0] < _SAMPLES * _WINDOW_MS]
        if not alive:
            return 0.0
        elapsed_ms = max(now_ms - alive[0][0], (_SAMPLES - 1) * _WINDOW_MS)
        return sum(total for _, total in alive) / elapsed_ms * 1000


@dataclass(frozen=True, slots=True)
class PoolMetrics:
    """A snapshot of a pool: bytes, nanoseconds and counts.

    ``used_bytes`` are lent out; ``reserved_bytes`` are promised to waiters; ``allocated_bytes`` are used plus
    free memory that is kept for reuse; ``available`` is total minus used minus reserved. ``heap_*`` is
    outside of all these. ``full_strategy_*`` is what `full` would hold for the same open batches, so that
    ``saved_*`` is what the incremental strategy spares; 0 under `full`.
    """

    buffer_total_bytes: int
    buffer_available_bytes: int
    bufferpool_wait_time_ns_total: int
    bufferpool_wait_ratio: float
    buffer_exhausted_total: int
    buffer_exhausted_rate: float
    waiting_threads: int
    allocated_bytes: int
    max_allocated_bytes: int
    used_bytes: int
    max_used_bytes: int
    reserved_bytes: int
    free_bytes: int
    heap_bytes: int
    max_heap_bytes: int
    heap_total_bytes: int
    full_strategy_bytes: int
    max_full_strategy_bytes: int

    @property
    def saved_bytes(self) -> int:
        """What the incremental strategy spares now."""
        return max(0, self.full_strategy_bytes - self.used_bytes - self.heap_bytes)

    @property
    def max_saved_bytes(self) -> int:
        """The peak that `full` would have held, minus the peak that was held."""
        return max(0, self.max_full_strategy_bytes - self.max_used_bytes - self.max_heap_bytes)

    def by_kafka_name(self) -> dict[str, int | float]:
        """Values by Kafka's producer-metrics names, and by similar names for those that Kafka lacks."""
        return {
            "buffer-total-bytes": self.buffer_total_bytes,
            "buffer-available-bytes": self.buffer_available_bytes,
            "bufferpool-wait-time-ns-total": self.bufferpool_wait_time_ns_total,
            "bufferpool-wait-ratio": self.bufferpool_wait_ratio,
            "buffer-exhausted-total": self.buffer_exhausted_total,
            "buffer-exhausted-rate": self.buffer_exhausted_rate,
            "waiting-threads": self.waiting_threads,
            "buffer-allocated-bytes": self.allocated_bytes,
            "buffer-allocated-bytes-max": self.max_allocated_bytes,
            "buffer-used-bytes": self.used_bytes,
            "buffer-used-bytes-max": self.max_used_bytes,
            "buffer-heap-bytes": self.heap_bytes,
            "buffer-heap-bytes-max": self.max_heap_bytes,
            "buffer-heap-bytes-total": self.heap_total_bytes,
            "buffer-saved-bytes": self.saved_bytes,
            "buffer-saved-bytes-max": self.max_saved_bytes,
        }
