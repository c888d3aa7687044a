"""partitioner.availability.timeout.ms: brokers that accept no requests for that long (KIP-794). Pure."""

from __future__ import annotations

from collections.abc import Iterable

# A batch that backs off after a failed attempt still waits for its broker, but is not ready for a while.
_GRACE_MS = 5_000.0


class NodeAvailability:
    """The sender calls ``observe`` at every pass. Any thread may read ``unavailable``.

    A ``timeout_ms`` of 0 switches it off. Times are monotonic milliseconds.
    """

    def __init__(self, timeout_ms: float) -> None:
        self.unavailable: frozenset[int] = frozenset()
        self._timeout_ms = timeout_ms
        # Per broker: when batches began to wait for it, and when they were last seen waiting.
        self._waits: dict[int, tuple[float, float]] = {}

    @property
    def is_watching(self) -> bool:
        """Whether batches have waited for a broker of late, so that ``observe`` may change something."""
        return bool(self._waits)

    def observe(self, waiting: Iterable[int], taking: Iterable[int], now_ms: float) -> None:
        """``waiting`` brokers have ready batches and accept no request now; ``taking`` ones accept them."""
        if self._timeout_ms <= 0:
            return
        for node in taking:
            self._waits.pop(node, None)
        for node in waiting:
            since, _ = self._waits.get(node, (now_ms, now_ms))
            self._waits[node] = (since, now_ms)
        for node, (_, last) in list(self._waits.items()):
            # No batch waits for it any more, so nothing would ever show that it is back.
            if now_ms - last > self._timeout_ms + _GRACE_MS:
                del self._waits[node]
        late = {node for node, (since, last) in self._waits.items() if last - since > self._timeout_ms}
        if late != self.unavailable:
            self.unavailable = frozenset(late)
