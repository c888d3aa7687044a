"""How long a broker usually takes to answer, and from when on a silence is suspicious. Pure."""

from __future__ import annotations

# Weight of the newest answer in the mean; a broker that has become slow for good is usual after some tens.
_WEIGHT = 0.1
_UNKNOWN_FACTOR = 3


class UsualLatency:
    """``least_ms`` and ``factor`` are slow.request.min.ms and slow.request.factor; ``most_ms`` bounds the
    threshold, so that a silence is noticed before the request times out."""

    def __init__(self, least_ms: float, factor: float, most_ms: float) -> None:
        self._least_ms = least_ms
        self._factor = factor
        self._most_ms = most_ms
        self._means: dict[int, float] = {}

    def observe(self, node_id: int, latency_ms: float) -> None:
        """An answer. One that was suspicious counts as the threshold: a freeze must not become usual."""
        sample = min(latency_ms, self.threshold_ms(node_id))
        mean = self._means.get(node_id)
        self._means[node_id] = sample if mean is None else mean + _WEIGHT * (sample - mean)

    def usual_ms(self, node_id: int) -> float | None:
        """The mean; None before the first answer."""
        return self._means.get(node_id)

    def threshold_ms(self, node_id: int) -> float:
        """How long an answer may take before its broker is suspicious."""
        mean = self._means.get(node_id)
        wanted = _UNKNOWN_FACTOR * self._least_ms if mean is None else self._factor * mean
        return max(self._least_ms, min(wanted, self._most_ms))
