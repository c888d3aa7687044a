"""Outcomes of the last seconds by partition, weighted by rows: the evidence of the failure rate."""

from __future__ import annotations

from kafka_sink.model import TopicPartition

# The present half and the one before it: what is looked at spans five to ten seconds.
_HALF_MS = 5_000.0


class _Window:
    __slots__ = ("failed", "failed_before", "half", "ok", "ok_before")

    def __init__(self, half: int) -> None:
        self.half = half
        self.ok = self.failed = self.ok_before = self.failed_before = 0

    def turn(self, half: int) -> None:
        if half == self.half:
            return
        follows = half == self.half + 1
        self.ok_before, self.failed_before = (self.ok, self.failed) if follows else (0, 0)
        self.ok = self.failed = 0
        self.half = half


class OutcomeWindows:
    """``trigger_count`` and ``trigger_perc`` are the KIP's trigger.message.count and trigger.failure.perc."""

    def __init__(self, trigger_count: int, trigger_perc: int) -> None:
        self._trigger_count = trigger_count
        self._trigger_perc = trigger_perc
        self._windows: dict[TopicPartition, _Window] = {}

    def record(self, partition: TopicPartition, ok: int, failed: int, now_ms: float) -> bool:
        """Counts rows; True where some failed and the failures now exceed the threshold."""
        half = int(now_ms // _HALF_MS)
        window = self._windows.get(partition)
        if window is None:
            window = self._windows[partition] = _Window(half)
        window.turn(half)
        window.ok += ok
        window.failed += failed
        if not failed:
            return False
        failures, total = self.counts(partition)
        return total >= self._trigger_count and failures * 100 >= self._trigger_perc * total

    def counts(self, partition: TopicPartition) -> tuple[int, int]:
        """Failed and all rows of the present window."""
        window = self._windows.get(partition)
        if window is None:
            return 0, 0
        failures = window.failed + window.failed_before
        return failures, failures + window.ok + window.ok_before

    def forget(self, partition: TopicPartition) -> None:
        """Starts a partition's counts anew."""
        self._windows.pop(partition, None)

    def forget_idle(self, now_ms: float) -> None:
        """Drops what is too old to matter."""
        half = int(now_ms // _HALF_MS)
        old = [one for one, window in self._windows.items() if half > window.half + 1]
        for partition in old:
            del self._windows[partition]
