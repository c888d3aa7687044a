"""The metrics of an application in the format of Prometheus.

METRICS is the one list of names; the documentation, the dashboard and the alerts are checked against it.
Names follow Kafka's producer metrics, with Prometheus's units and suffixes. Labels: topics and brokers are
bounded, partitions and tasks have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kafka_sink.clock import STATES, STEPS
from kafka_sink.coordinator.live.application import TRANSACTION_OUTCOMES
from kafka_sink.coordinator.live.messages import OUTCOMES
from kafka_sink.counts import GAUGES, LATENCY_BOUNDS_MS, SPECS
from kafka_sink.version import __version__

PREFIX = "kafka_chunked_"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric, and where the snapshot has its samples.

    ``of``: the list with an entry for each label set, the snapshot itself if "". ``part``: the mapping in
    such an entry that has the value, the entry itself if "". ``source``: the value's key; with ``names``,
    which are the values of the last label, what their keys begin with. ``scale`` converts to the unit in the
    name.
    """

    name: str
    kind: str
    doc: str
    labels: tuple[str, ...] = ("cluster",)
    source: str = ""
    scale: float = 1.0
    of: str = "clusters"
    part: str = ""
    names: tuple[str, ...] = ()

    def samples(self, snapshot: Mapping[str, Any]) -> Iterator[tuple[list[str], float]]:
        for one in snapshot[self.of] if self.of else [snapshot]:
            part = one[self.part] if self.part else one
            labels = [str(one[label]) for label in (self.labels[:-1] if self.names else self.labels)]
            for name in self.names or ("",):
                value = part.get(self.source + name, 0 if self.of else None)
                if value is not None:
                    yield [*labels, name] if name else labels, value * self.scale


# Sums over all tasks of a cluster. Tasks do not count the rows of attempts that their write did not count.
OF_CLUSTER: tuple[MetricSpec, ...] = (
    *(
        MetricSpec(one.metric, "counter", one.doc, source=name, part="counters", scale=one.scale)
        for name, one in SPECS.items()
        if one.metric
    ),
    *(MetricSpec(name, "gauge", doc, source=name, part="gauges") for name, doc in GAUGES.items()),
    *(
        MetricSpec(name, kind, doc, source=source, part=part)
        for name, kind, part, source, doc in (
            (
                "record_uncommitted",
                "counter",
                "counters",
                "uncommitted",
                "Rows that their write did not count",
            ),
            ("open_transactions", "gauge", "transactions", "open", "Transactions whose write has not ended"),
            (
                "oldest_open_transaction_age_seconds",
                "gauge",
                "transactions",
                "oldest",
                "Age of the oldest one",
            ),
        )
    ),
    *(
        MetricSpec(name, kind, doc, ("cluster", label), source, part=part, names=names)
        for name, kind, part, source, label, names, doc in (
            ("muted", "gauge", "muted", "", "kind", ("broker", "partition"), "Muted brokers and partitions"),
            ("tasks", "gauge", "states", "", "state", (*STATES, "silent"), "Tasks by what they wait for"),
            ("driver_wait_seconds", "gauge", "driver", "", "step", STEPS, "How long the driver has waited"),
            ("writes", "counter", "counters", "writes_", "outcome", OUTCOMES, "Ended jobs and micro-batches"),
            (
                "transactions",
                "counter",
                "transactions",
                "",
                "outcome",
                TRANSACTION_OUTCOMES,
                "Ended transactions",
            ),
        )
    ),
)
OF_TOPIC: tuple[MetricSpec, ...] = tuple(
    MetricSpec(name, "counter", doc, ("cluster", "topic"), source, of="topics")
    for name, source, doc in (
        ("record_send", "records", "Rows that brokers acknowledged"),
        ("sent_bytes", "sent_bytes", "Bytes of record batches as sent"),
        ("uncompressed_bytes", "raw_bytes", "The same record batches uncompressed"),
        ("batch_send", "batches", "Record batches that brokers acknowledged"),
    )
)
OF_BROKER: tuple[MetricSpec, ...] = tuple(
    MetricSpec(name, kind, doc, ("cluster", "broker"), source, of="brokers")
    for name, kind, source, doc in (
        ("node_request", "counter", "requests", "Produce requests to this broker"),
        ("node_request_error", "counter", "failures", "Produce requests without a response"),
        ("produce_throttle_time_seconds", "counter", "throttled", "Time for which the broker throttled"),
        ("requests_in_flight", "gauge", "in_flight", "Produce requests without a response yet"),
        ("oldest_request_age_seconds", "gauge", "oldest", "How long rows have waited for its response"),
        ("muted_seconds", "gauge", "muted", "How long this broker has been muted"),
    )
)
OF_COORDINATOR: tuple[MetricSpec, ...] = (
    MetricSpec("task_reports", "counter", "Reports that the coordinator received", (), "reports", of=""),
    *(
        MetricSpec(f"coordinator_{name}", kind, doc, (), source, of="", part="coordinator")
        for name, kind, source, doc in (
            ("tasks", "gauge", "tasks", "Tasks that are connected to the coordinator"),
            ("messages", "counter", "messages", "Messages of tasks that it has handled"),
            ("stalls", "counter", "stalls", "How often it was late by more than a second"),
        )
    ),
)
_TABLE = (*OF_TOPIC, *OF_CLUSTER, *OF_BROKER, *OF_COORDINATOR)
LATENCY = MetricSpec(
    "request_latency_seconds", "histogram", "From a request to its response", ("cluster", "broker")
)
CONNECTIONS = MetricSpec("coordinator_connections", "gauge", "Connections to the coordinator", ("kind",))
BUILD = MetricSpec("build_info", "gauge", "Version of the sink", ("version",))
METRICS: tuple[MetricSpec, ...] = (*_TABLE, LATENCY, CONNECTIONS, BUILD)


@dataclass(frozen=True, slots=True)
class _Collector:
    """What prometheus_client asks for the metrics of a snapshot."""

    snapshot: Mapping[str, Any]

    def collect(self) -> Iterator[Metric]:
        for spec in _TABLE:
            yield _family(spec, spec.samples(self.snapshot))
        yield _latency(self.snapshot["brokers"])
        kinds = self.snapshot["coordinator"].get("connections", {})
        yield _family(CONNECTIONS, (([kind], count) for kind, count in kinds.items()))
        yield _family(BUILD, [([__version__], 1)])


def exposition(snapshot: Mapping[str, Any]) -> tuple[bytes, str]:
    """The metrics in Prometheus's text format, and its content type."""
    # It needs the one method of a registry.
    return generate_latest(_Collector(snapshot)), CONTENT_TYPE_LATEST


def _family(spec: MetricSpec, samples: Iterable[tuple[Sequence[str], float]]) -> Metric:
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    family = kind(PREFIX + spec.name, spec.doc, labels=spec.labels)
    for labels, value in samples:
        family.add_metric([_label(one) for one in labels], value)
    return family


def _latency(brokers: Sequence[Mapping[str, Any]]) -> Metric:
    family = HistogramMetricFamily(PREFIX + LATENCY.name, LATENCY.doc, labels=LATENCY.labels)
    bounds = [str(bound / 1000) for bound in LATENCY_BOUNDS_MS] + ["+Inf"]
    for one in brokers:
        below, buckets = 0, []
        for bound, count in zip(bounds, one["latency_buckets"], strict=False):
            below += count
            buckets.append((bound, float(below)))
        if buckets and buckets[-1][0] == "+Inf":
            labels = [_label(one["cluster"]), str(one["broker"])]
            family.add_metric(labels, buckets, one["latency_sum"])
    return family


def _label(value: str) -> str:
    """A name that UTF-8 cannot encode is shown by its codes: it must not hide all other metrics."""
    return value.encode(errors="backslashreplace").decode()
