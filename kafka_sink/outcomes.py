"""The health of a broker according to an attempt to send a batch, the recent outcomes of a partition's
batches, and the rule by which they mute the partition (KIP-693).

Batches are counted and not rows: a batch fails as a whole, so a batch of a thousand rows is no more evidence
than a batch of ten. Batches in flight together count as at most one success and one failure, because a lost
connection fails all of them for one reason. Times are monotonic milliseconds.
"""

from __future__ import annotations

import math
from enum import Enum

from kafka_sink.clock import OUTCOME_WINDOW_MS
from kafka_sink.errors import BrokerRefusedError, KafkaSinkError, ProtocolError
from kafka_sink.kafka_errors import error_of

# A restart of the broker may cause fewer failures: one lost connection, and another when batches are resent.
MIN_FAILURES = 3
# Failures without a success in between count together if at most this much time lies between two of them.
_STREAK_MS = 600_000.0


class Health(Enum):
    """NEUTRAL: the error is about the batch, the metadata or the permissions, and not the broker."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    NEUTRAL = "neutral"


def has_response(exception: Exception | None) -> bool:
    return exception is None or isinstance(exception, BrokerRefusedError)


def health_of(exception: Exception | None) -> Health:
    """The broker's health according to an error, or to a response without one.

    A missing response is a bad sign, unless the client itself gave up.
    """
    if exception is None:
        return Health.HEALTHY
    if isinstance(exception, BrokerRefusedError):
        return Health.UNHEALTHY if error_of(exception.error_code).blames_broker else Health.NEUTRAL
    if isinstance(exception, OSError | ProtocolError) or not isinstance(exception, KafkaSinkError):
        return Health.UNHEALTHY
    return Health.NEUTRAL


def reaches(failed: float, total: float, trigger_perc: int) -> bool:
    """Whether the share of failed batches, or of tasks that see failures, reaches trigger.failure.perc."""
    # Sums of fractions are not exact.
    return failed * 100 >= trigger_perc * total - 1e-6


class RecentOutcomes:
    """The outcomes of one partition's batches. Only the sender's thread uses it."""

    __slots__ = (
        *("_failed", "_failed_before", "_failed_ms", "_streak"),
        *("_taken", "_taken_before", "_taken_ms", "_window_ends_ms"),
    )

    def __init__(self) -> None:
        self._window_ends_ms = 0.0
        # When a success and a failure were last counted.
        self._taken_ms = self._failed_ms = -math.inf
        self.forget()

    def forget(self) -> None:
        # The numbers of batches that brokers took, and of failures, in the window that ends at
        # ``_window_ends_ms`` and in the window before it. Then the failures since the last success.
        self._taken = self._taken_before = self._failed = self._failed_before = 0
        self._streak = 0

    def count(self, now_ms: float) -> tuple[int, int]:
        """The number of failures in the last seconds, and the number of failures and successes together."""
        if now_ms >= self._window_ends_ms:
            self._enter_window(now_ms)
        failures = max(self._failed + self._failed_before, self._streak)
        return failures, failures + self._taken + self._taken_before

    def on_success(self, sent_ms: float, now_ms: float) -> None:
        """Count a batch that was sent at ``sent_ms`` and that the broker has."""
        self._streak = 0
        if sent_ms >= self._taken_ms:
            if now_ms >= self._window_ends_ms:
                self._enter_window(now_ms)
            self._taken_ms = now_ms
            self._taken += 1

    def on_failure(self, sent_ms: float, now_ms: float) -> None:
        """Count the failure of a batch that was sent at ``sent_ms``, if its error blames the broker."""
        if sent_ms < self._failed_ms:
            return
        if now_ms >= self._window_ends_ms:
            self._enter_window(now_ms)
        self._streak = self._streak + 1 if now_ms - self._failed_ms < _STREAK_MS else 1
        self._failed_ms = now_ms
        self._failed += 1

    def is_failing(self, now_ms: float) -> bool:
        """Whether the last attempt failed recently, with an error that blames the broker."""
        return self._streak > 0 and now_ms - self._failed_ms < 2 * OUTCOME_WINDOW_MS

    def _enter_window(self, now_ms: float) -> None:
        """Start a new window, because the current one has ended."""
        follows = now_ms < self._window_ends_ms + OUTCOME_WINDOW_MS
        self._taken_before, self._failed_before = (self._taken, self._failed) if follows else (0, 0)
        self._taken = self._failed = 0
        self._window_ends_ms = (now_ms // OUTCOME_WINDOW_MS + 1) * OUTCOME_WINDOW_MS
