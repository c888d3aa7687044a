"""partitioner.availability.timeout.ms: brokers that keep taking nothing (KIP-794). Pure."""

from __future__ import annotations

from collections.abc import Iterable

# Batches that back off after a failed attempt do not show for a while, though they wait all the same.
_GRACE_MS = 5_000.0


class NodeAvailability:
    """Told by the sender at every pass; ``unavailable`` may be read by any thread.

    ``timeout_ms`` 0 switches it off. Times are monotonic milliseconds.
    """

    def __init__(self, timeout_ms: float) -> None:
        self.unavailable: frozenset[int] = frozenset()
        self._timeout_ms = timeout_ms
        # Per broker: since when batches have been waiting for it, and when they last were.
        self._waits: dict[int, tuple[float, float]] = {}

    def observe(self, waiting: Iterable[int], taking: Iterable[int], now_ms: float) -> None:
        """Brokers for which batches are ready: those that take none now, and those that do."""
        if self._timeout_ms <= 0:
            return
        for node in taking:
            self._waits.pop(node, None)
        for node in waiting:
            since, _ = self._waits.get(node, (now_ms, now_ms))
            self._waits[node] = (since, now_ms)
        for node, (_, last) in list(self._waits.items()):
            # Nothing is left that waits for it, so nothing would ever show that it is back.
            if now_ms - last > self._timeout_ms + _GRACE_MS:
                del self._waits[node]
        late = {node for node, (since, last) in self._waits.items() if last - since > self._timeout_ms}
        if late != self.unavailable:
            self.unavailable = frozenset(late)
