"""Metrics that clients push, read by OpenTelemetry's own classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_DELTA, MetricsData

PREFIX = "org.apache.kafka.producer."


@dataclass
class Pushed:
    """``values`` by name, followed by a label; ``sums``: whether each sum is a delta."""

    resource: dict[str, str] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    sums: dict[str, bool] = field(default_factory=dict)
    # The times of the last sum and of the last value, in seconds since 1970.
    start_s: float = 0.0
    end_s: float = 0.0


def read(data: bytes) -> Pushed:
    pushed = Pushed()
    for resource_metrics in MetricsData.FromString(data).resource_metrics:
        pushed.resource |= _labels(resource_metrics.resource.attributes)
        for scope in resource_metrics.scope_metrics:
            for metric in scope.metrics:
                # Java's client also pushes other metrics.
                if metric.name.startswith(PREFIX):
                    _take(pushed, metric)
    return pushed


def _take(pushed: Pushed, metric: Any) -> None:
    kind = metric.WhichOneof("data")
    (point,) = getattr(metric, kind).data_points
    name = ":".join((metric.name.removeprefix(PREFIX), *_labels(point.attributes).values()))
    pushed.values[name] = point.as_double
    pushed.end_s = point.time_unix_nano / 1e9
    if kind == "sum":
        assert metric.sum.is_monotonic
        pushed.sums[name] = metric.sum.aggregation_temporality == AGGREGATION_TEMPORALITY_DELTA
        pushed.start_s = point.start_time_unix_nano / 1e9


def _labels(attributes: Any) -> dict[str, str]:
    return {one.key: one.value.string_value for one in attributes}
