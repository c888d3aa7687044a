"""A broker's usual time to respond or to connect, and from when on a longer time is suspicious. No I/O."""

from __future__ import annotations

from collections.abc import Mapping

# The weight of the newest response in the mean. The mean rises slowly: it takes some tens of responses to
# follow a broker that has become slow. It falls fast: the slow first responses of a broker are soon
# forgotten.
_WEIGHT_ABOVE, _WEIGHT_BELOW = 0.1, 0.5
# A broker that has not responded yet, while no other has either, gets this multiple of slow.request.min.ms.
_UNKNOWN_FACTOR = 6
# If the first responses of others were quick, it gets this multiple at least.
_UNKNOWN_MIN_FACTOR = 2
# The first responses of a broker say little: it may have had to create files and connections of its own.
_FEW_RESPONSES = 5
# A connection needs this multiple of slow.request.min.ms at least. TLS and SASL take round trips and
# cryptography: 0.9 s was seen where requests take milliseconds, and more where all tasks of a stage connect
# to a broker at once.
_SETUP_MIN_FACTOR = 4


class UsualLatency:
    """By broker. ``min_ms`` and ``factor`` are slow.request.min.ms and slow.request.factor. ``max_ms``
    bounds the threshold, so that a silence is noticed before the request times out."""

    def __init__(self, min_ms: float, factor: float, max_ms: float) -> None:
        self._min_ms = min_ms
        self._factor = factor
        self._max_ms = max_ms
        self._means: dict[int, float] = {}
        self._few: dict[int, int] = {}
        self._slowest_first_ms: float | None = None

    def observe(self, node_id: int, latency_ms: float) -> None:
        """A response. A suspicious latency counts as the threshold: a freeze must not become usual."""
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
        if self._few[node_id] >= _FEW_RESPONSES:
            del self._few[node_id]

    def usual_ms(self, node_id: int) -> float | None:
        """The mean latency; None before the first response."""
        return self._means.get(node_id)

    def threshold_ms(self, node_id: int) -> float:
        """The latency from which on a broker is suspicious."""
        mean, unknown = self._means.get(node_id), self._unknown_ms()
        wanted = unknown if mean is None else self._factor * mean
        if node_id in self._few:
            wanted = min(wanted, unknown)
        return max(self._min_ms, min(wanted, self._max_ms))

    def _unknown_ms(self) -> float:
        """The bound for a broker's first responses, by the first of others: brokers that just started are
        all slow."""
        limit = _UNKNOWN_FACTOR * self._min_ms
        if self._slowest_first_ms is None:
            return limit
        return min(max(self._factor * self._slowest_first_ms, _UNKNOWN_MIN_FACTOR * self._min_ms), limit)


def setup_threshold_ms(
    setup_ms: Mapping[int, float], node_id: int, min_ms: float, factor: float, max_ms: float
) -> float:
    """The time to connect from which on a broker is suspicious.

    ``setup_ms``: by broker, the last time to connect. A broker that was never connected to is judged by the
    slowest of the others, as all use the same security protocol.
    """
    own = setup_ms.get(node_id)
    if own is None:
        own = max(setup_ms.values(), default=None)
    wanted = _UNKNOWN_FACTOR * min_ms if own is None else factor * own
    return max(_SETUP_MIN_FACTOR * min_ms, min(wanted, max_ms))
