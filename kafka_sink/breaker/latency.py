"""How long a broker usually takes to answer or to connect, and from when on that is suspicious. Pure."""

from __future__ import annotations

from collections.abc import Mapping

# Weight of the newest answer in the mean: a broker that has become slow for good is usual after some tens of
# answers, while its first ones, which are slow, are soon forgotten.
_WEIGHT_ABOVE, _WEIGHT_BELOW = 0.1, 0.5
_UNKNOWN_FACTOR = 6
# Where the first answers of others were quick, a broker that has answered nothing yet gets twice the least.
_UNKNOWN_LEAST_FACTOR = 2
# A broker's very first answers tell little: it may have had to make files and connections of its own.
_FEW_ANSWERS = 5
# TLS and SASL take round trips and cryptography that requests do not: 0.9 s has been seen where requests take
# milliseconds, and a broker that is asked by all tasks of a stage at once takes longer for some.
_SETUP_LEAST_FACTOR = 4


class UsualLatency:
    """``min_ms`` and ``factor`` are slow.request.min.ms and slow.request.factor; ``max_ms`` bounds the
    threshold, so that a silence is noticed before the request times out."""

    def __init__(self, min_ms: float, factor: float, max_ms: float) -> None:
        self._min_ms = min_ms
        self._factor = factor
        self._max_ms = max_ms
        self._means: dict[int, float] = {}
        self._few: dict[int, int] = {}
        self._slowest_first_ms: float | None = None

    def observe(self, node_id: int, latency_ms: float) -> None:
        """An answer. One that was suspicious counts as the threshold: a freeze must not become usual."""
        sample = min(latency_ms, self.threshold_ms(node_id))
        mean = self._means.get(node_id)
        if mean is None:
            self._means[node_id] = sample
            self._few[node_id] = 1
            self._slowest_first_ms = max(sample, self._slowest_first_ms or 0.0)
        else:
            weight = _WEIGHT_ABOVE if sample > mean else _WEIGHT_BELOW
            self._means[node_id] = mean + weight * (sample - mean)
            if node_id in self._few:
                self._count(node_id)

    def _count(self, node_id: int) -> None:
        self._few[node_id] += 1
        if self._few[node_id] >= _FEW_ANSWERS:
            del self._few[node_id]

    def usual_ms(self, node_id: int) -> float | None:
        """The mean; None before the first answer."""
        return self._means.get(node_id)

    def threshold_ms(self, node_id: int) -> float:
        """How long an answer may take before its broker is suspicious."""
        mean, unknown = self._means.get(node_id), self._unknown_ms()
        wanted = unknown if mean is None else self._factor * mean
        if node_id in self._few:
            wanted = min(wanted, unknown)
        return max(self._min_ms, min(wanted, self._max_ms))

    def _unknown_ms(self) -> float:
        """For a broker's first answer, by those of others: brokers that have just started are all slow."""
        limit = _UNKNOWN_FACTOR * self._min_ms
        if self._slowest_first_ms is None:
            return limit
        return min(max(self._factor * self._slowest_first_ms, _UNKNOWN_LEAST_FACTOR * self._min_ms), limit)


def setup_threshold_ms(
    setup_ms: Mapping[int, float], node_id: int, min_ms: float, factor: float, max_ms: float
) -> float:
    """How long a connection may take to be made before its broker is suspicious.

    ``setup_ms`` are the last times by broker. A broker that has not been connected to is judged by the
    slowest of the others, as all use the same security protocol.
    """
    own = setup_ms.get(node_id)
    if own is None:
        own = max(setup_ms.values(), default=None)
    wanted = _UNKNOWN_FACTOR * min_ms if own is None else factor * own
    return max(_SETUP_LEAST_FACTOR * min_ms, min(wanted, max_ms))
