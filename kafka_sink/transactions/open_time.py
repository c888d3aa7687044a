"""Says, while a batch runs, that its transactions come near the time after which brokers end them. Pure."""

from __future__ import annotations

# Share of kafka.transaction.timeout.ms from which on it is warned of.
_LONG_OPEN = 0.5


class OpenTime:
    """Of one task. ``timeout_ms`` is kafka.transaction.timeout.ms, ``batch_age_ms`` how long ago the batch
    was planned, by the clocks of two hosts. Times are monotonic milliseconds."""

    def __init__(self, timeout_ms: float, batch_age_ms: float = 0.0) -> None:
        self.long_ms = timeout_ms * _LONG_OPEN
        self._timeout_ms = timeout_ms
        self._batch_age_ms = batch_age_ms
        self._since_ms: float | None = None

    def began(self, now_ms: float) -> None:
        """The task's own transaction did."""
        self._since_ms = now_ms

    @property
    def earlier_may_be_long(self) -> bool:
        """Whether tasks that ran before can have been open for long, so that brokers should be asked."""
        return self._batch_age_ms > self.long_ms

    def of_own(self, now_ms: float) -> str | None:
        """What to warn of, once."""
        if self._since_ms is None or now_ms - self._since_ms <= self.long_ms:
            return None
        open_s = (now_ms - self._since_ms) / 1000
        self._since_ms = None
        return self._warning(f"this task's transaction has been open for {open_s:.0f} s")

    def of_others(self, count: int) -> str | None:
        """``count`` transactions of the batch have been open for longer than ``long_ms``."""
        if not count:
            return None
        return self._warning(
            f"{count} transaction{'s have' if count > 1 else ' has'} been open for more than "
            f"{self.long_ms / 1000:.0f} s, of tasks of this batch that ran before"
        )

    def _warning(self, what: str) -> str:
        return (
            f"kafka-chunked: {what}. Brokers abort a transaction after kafka.transaction.timeout.ms = "
            f"{self._timeout_ms:.0f} ms, and then nothing of the batch is committed: all tasks must end "
            "before that. Raise it, up to the brokers' transaction.max.timeout.ms, or cut the job into "
            "several writes: see 'Jobs longer than a transaction' in docs/exactly-once.md"
        )
