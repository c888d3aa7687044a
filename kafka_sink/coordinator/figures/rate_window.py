"""Rates over the last seconds, from totals that are sampled about once a second."""

from __future__ import annotations

from collections import deque

# Tasks report once a second, but not together: shorter windows jump.
_SAMPLES = 6


class RateWindow:
    """The increase of a total over the last five samples."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)

    def add(self, now_ms: float, total: float) -> None:
        """A sample. The first one is preceded by a zero a second earlier, so that a start shows at once."""
        if not self._samples:
            self._samples.append((now_ms - 1000.0, 0.0))
        self._samples.append((now_ms, total))

    @property
    def increase(self) -> float:
        """How much the total has grown within the window. A total that was corrected downwards gives 0."""
        if not self._samples:
            return 0.0
        return max(0.0, self._samples[-1][1] - self._samples[0][1])

    @property
    def per_second(self) -> float:
        if not self._samples:
            return 0.0
        elapsed_ms = self._samples[-1][0] - self._samples[0][0]
        return self.increase / elapsed_ms * 1000 if elapsed_ms > 0 else 0.0
