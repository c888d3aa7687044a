"""Metrics as OpenTelemetry's MetricsData, in protobuf (opentelemetry-proto's metrics.proto, version 1).

By hand: the few fields that are used take fewer lines than a library's objects take to be filled, and no
worker has to load protobuf.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kafka_sink.network.wire import uvarint

# Protobuf's wire types.
_VARINT, _FIXED64, _LENGTH = 0, 1, 2
_DELTA, _CUMULATIVE = 1, 2


@dataclass(frozen=True, slots=True)
class Metric:
    """A gauge, or a sum that only grows. ``labels`` are those of the one data point."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    is_sum: bool = False


def metrics_data(
    metrics: Iterable[Metric], resource: Mapping[str, str], start_ms: float, now_ms: float, *, delta: bool
) -> bytes:
    """``start_ms``: from when sums count. Both times are milliseconds since 1970."""
    times = _nanoseconds(2, start_ms), _nanoseconds(3, now_ms)
    made = b"".join(_message(2, _metric(one, times, delta)) for one in metrics)
    of_resource = _message(1, _labels(1, resource)) + _message(2, made)
    return _message(1, of_resource)


def _metric(metric: Metric, times: tuple[bytes, bytes], delta: bool) -> bytes:
    value = _key(4, _FIXED64) + struct.pack("<d", metric.value) + _labels(7, metric.labels)
    if not metric.is_sum:
        return _text(1, metric.name) + _message(5, _message(1, times[1] + value))
    temporality = _key(2, _VARINT) + uvarint(_DELTA if delta else _CUMULATIVE)
    is_monotonic = _key(3, _VARINT) + uvarint(1)
    point = _message(1, times[0] + times[1] + value)
    return _text(1, metric.name) + _message(7, point + temporality + is_monotonic)


def _labels(number: int, labels: Mapping[str, str]) -> bytes:
    pairs = (_text(1, name) + _message(2, _text(1, value)) for name, value in labels.items())
    return b"".join(_message(number, pair) for pair in pairs)


def _nanoseconds(number: int, milliseconds: float) -> bytes:
    return _key(number, _FIXED64) + struct.pack("<Q", int(milliseconds * 1e6))


def _text(number: int, text: str) -> bytes:
    # A rack out of the environment may hold what is no UTF-8.
    return _message(number, text.encode(errors="replace"))


def _message(number: int, data: bytes) -> bytes:
    return _key(number, _LENGTH) + uvarint(len(data)) + data


def _key(number: int, wire_type: int) -> bytes:
    return uvarint(number << 3 | wire_type)
