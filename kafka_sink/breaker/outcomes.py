"""What the outcomes of attempts say: each of a broker's health, their counts of a partition's. No I/O."""

from __future__ import annotations

import math
from enum import Enum

from kafka_sink.errors import BrokerRefusedError, KafkaSinkError, ProtocolError
from kafka_sink.kafka_errors import error_of
from kafka_sink.model import TopicPartition


class Health(Enum):
    """NEUTRAL: the error blames the batch, the metadata or the permissions."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    NEUTRAL = "neutral"


def has_response(exception: Exception | None) -> bool:
    return exception is None or isinstance(exception, BrokerRefusedError)


def health_of(exception: Exception | None) -> Health:
    """A broker's health by the error code. No response is a bad sign, unless the client itself gave up."""
    if exception is None:
        return Health.HEALTHY
    if isinstance(exception, BrokerRefusedError):
        return Health.UNHEALTHY if error_of(exception.error_code).blames_broker else Health.NEUTRAL
    if isinstance(exception, OSError | ProtocolError) or not isinstance(exception, KafkaSinkError):
        return Health.UNHEALTHY
    return Health.NEUTRAL


# Outcomes by partition: the evidence of the failure rate. No I/O.
#
# Rows decide when judging starts, as in KIP-693. Batches decide the rate. A batch fails as a whole, so a
# batch of a thousand rows is no more evidence than one of ten, and failures of a slow stream count as much as
# those of a fast one. Batches in flight together count as one success and one failure at most, as a lost
# connection fails them all for one reason. The coordinator counts tasks.


# A window has two halves, the present one and the one before it, and so spans five to ten seconds.
_HALF_MS = 5_000.0
# Fewer may be a restart of the broker: one lost connection, and another when the batches are sent again.
MIN_FAILURES = 3
# Failures with no success in between count together if no more than this lies between two of them.
_STREAK_MS = 600_000.0


class _Window:
    __slots__ = ("failed", "failed_before", "failed_ms", "half", "ok", "ok_before", "ok_ms", "streak")

    def __init__(self, half: int) -> None:
        self.half = half
        self.ok = self.failed = self.ok_before = self.failed_before = 0
        self.ok_ms = self.failed_ms = -math.inf
        # Failures since the last success.
        self.streak = 0

    def advance(self, half: int) -> None:
        """``half`` is a later one."""
        follows = half == self.half + 1
        self.ok_before, self.failed_before = (self.ok, self.failed) if follows else (0, 0)
        self.ok = self.failed = 0
        self.half = half

    def succeed(self, sent_ms: float, now_ms: float) -> None:
        self.streak = 0
        if sent_ms >= self.ok_ms:
            self.ok_ms = now_ms
            self.ok += 1

    def fail(self, sent_ms: float, now_ms: float) -> None:
        # A batch sent before the last failure was known counts as one failure with it.
        if sent_ms >= self.failed_ms:
            self.streak = self.streak + 1 if now_ms - self.failed_ms < _STREAK_MS else 1
            self.failed_ms = now_ms
            self.failed += 1


def reaches(failed: float, total: float, trigger_perc: int) -> bool:
    """Whether the failure rate reaches trigger.failure.perc: of a partition's batches in a task, or of the
    tasks that write to it."""
    # Sums of fractions are not exact.
    return failed * 100 >= trigger_perc * total - 1e-6


class OutcomeWindows:
    """``trigger_count`` and ``trigger_perc`` are the KIP's trigger.message.count and trigger.failure.perc."""

    def __init__(self, trigger_count: int, trigger_perc: int) -> None:
        self._trigger_count = trigger_count
        self._trigger_perc = trigger_perc
        self._rows = 0
        self._windows: dict[TopicPartition, _Window] = {}

    def record(
        self, partition: TopicPartition, rows: int, sent_ms: float, now_ms: float, *, failed: bool
    ) -> bool:
        """An attempt of a batch has ended. True if it failed and failures now reach the threshold."""
        self._rows += rows
        half = int(now_ms // _HALF_MS)
        window = self._windows.get(partition)
        if window is None:
            window = self._windows[partition] = _Window(half)
        elif window.half != half:
            window.advance(half)
        if not failed:
            window.succeed(sent_ms, now_ms)
            return False
        window.fail(sent_ms, now_ms)
        failures, total = self.counts(partition)
        enough = self._rows >= self._trigger_count and failures >= MIN_FAILURES
        return enough and reaches(failures, total, self._trigger_perc)

    def counts(self, partition: TopicPartition) -> tuple[int, int]:
        """Failures of the last seconds, and failures and successes together."""
        window = self._windows.get(partition)
        if window is None:
            return 0, 0
        failures = max(window.failed + window.failed_before, window.streak)
        return failures, failures + window.ok + window.ok_before

    def recent(self, partition: TopicPartition, now_ms: float) -> tuple[int, int]:
        """As ``counts``, when nothing may have been recorded for a while."""
        window = self._windows.get(partition)
        half = int(now_ms // _HALF_MS)
        if window is not None and window.half != half:
            window.advance(half)
        return self.counts(partition)

    def forget(self, partition: TopicPartition) -> None:
        self._windows.pop(partition, None)
