"""The metrics of an application in the format of Prometheus.

METRICS is the one list of names; the documentation, the dashboard and the alerts are checked against it.
Names follow Kafka's producer metrics, with Prometheus's units and suffixes. Labels: topics and brokers are
bounded, partitions and tasks have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kafka_sink.activity import STATES, STEPS
from kafka_sink.coordinator.live.application import TRANSACTION_OUTCOMES
from kafka_sink.coordinator.live.messages import OUTCOMES
from kafka_sink.counts import GAUGES, LATENCY_BOUNDS_MS, SPECS
from kafka_sink.version import __version__

PREFIX = "kafka_chunked_"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """``source``: the key of the snapshot's value; ``scale`` converts it to the unit in the name."""

    name: str
    kind: str
    doc: str
    labels: tuple[str, ...]
    source: str = ""
    scale: float = 1.0


def _counter(name: str, source: str, doc: str, scale: float = 1.0) -> MetricSpec:
    return MetricSpec(name, "counter", doc, ("cluster",), source, scale)


def _gauge(name: str, source: str, doc: str) -> MetricSpec:
    return MetricSpec(name, "gauge", doc, ("cluster",), source)


# Sums over all tasks of a cluster. Tasks do not count the rows of attempts that their write did not count.
OF_CLUSTER: tuple[MetricSpec, ...] = (
    *(_counter(one.metric, name, one.doc, one.scale) for name, one in SPECS.items() if one.metric),
    _counter("record_uncommitted", "uncommitted", "Rows written by attempts that their write did not count"),
)
GAUGES_OF_CLUSTER: tuple[MetricSpec, ...] = tuple(_gauge(name, name, doc) for name, doc in GAUGES.items())
OF_TOPIC: tuple[MetricSpec, ...] = tuple(
    MetricSpec(name, "counter", doc, ("cluster", "topic"), source)
    for name, source, doc in (
        ("record_send", "records", "Rows that brokers acknowledged"),
        ("sent_bytes", "sent_bytes", "Bytes of record batches as sent"),
        ("uncompressed_bytes", "raw_bytes", "The same record batches uncompressed"),
        ("batch_send", "batches", "Record batches that brokers acknowledged"),
    )
)
OF_BROKER: tuple[MetricSpec, ...] = tuple(
    MetricSpec(name, kind, doc, ("cluster", "broker"), source)
    for name, kind, source, doc in (
        ("node_request", "counter", "requests", "Produce requests to this broker"),
        ("node_request_error", "counter", "failures", "Produce requests without a response"),
        ("produce_throttle_time_seconds", "counter", "throttled", "Time for which the broker throttled"),
        ("requests_in_flight", "gauge", "in_flight", "Produce requests without a response yet"),
        ("oldest_request_age_seconds", "gauge", "oldest", "How long rows have waited for its response"),
    )
)
LATENCY = MetricSpec(
    "request_latency_seconds", "histogram", "From a request to its response", ("cluster", "broker")
)
MUTED = MetricSpec("muted_seconds", "gauge", "How long this broker has been muted", ("cluster", "broker"))
MUTED_COUNT = MetricSpec("muted", "gauge", "Muted brokers and partitions", ("cluster", "kind"))
TASKS = MetricSpec("tasks", "gauge", "Running tasks by what they wait for", ("cluster", "state"))
DRIVER = MetricSpec(
    "driver_wait_seconds", "gauge", "How long the driver has waited for brokers", ("cluster", "step")
)
WRITES = MetricSpec("writes", "counter", "Jobs and micro-batches that ended", ("cluster", "outcome"))
METADATA = MetricSpec("metadata_request", "counter", "Metadata requests", ("cluster", "source"))
METADATA_AVOIDED = _counter(
    "metadata_request_avoided", "", "Metadata requests that the coordinator spared tasks"
)
TRANSACTIONS = MetricSpec("transactions", "counter", "Transactions that ended", ("cluster", "outcome"))
TRANSACTION_SECONDS = MetricSpec(
    "transaction_open_time_seconds",
    "counter",
    "For how long transactions had been open when they ended",
    ("cluster", "outcome"),
)
OPEN_TRANSACTIONS = _gauge("open_transactions", "", "Transactions of tasks whose write has not ended")
OLDEST_TRANSACTION = _gauge("oldest_open_transaction_age_seconds", "", "Age of the oldest of them")
REPORTS = MetricSpec("task_reports", "counter", "Reports of tasks that the coordinator received", ())
OF_COORDINATOR: tuple[MetricSpec, ...] = tuple(
    MetricSpec(f"coordinator_{name}", kind, doc, (), source)
    for name, kind, source, doc in (
        ("tasks", "gauge", "tasks", "Tasks that are connected to the coordinator"),
        ("messages", "counter", "messages", "Messages of tasks that it has handled"),
        ("late_replies", "counter", "late", "Messages that may have waited for more than a second"),
        ("busy_seconds", "counter", "busy", "Time for which its loop was at work"),
        (
            "longest_turn_seconds",
            "gauge",
            "longest_turn",
            "Longest iteration of its loop in the last minutes",
        ),
    )
)
CONNECTIONS = MetricSpec("coordinator_connections", "gauge", "Connections to the coordinator", ("kind",))
BUILD = MetricSpec("build_info", "gauge", "Version of the sink", ("version",))

METRICS: tuple[MetricSpec, ...] = (
    *OF_TOPIC,
    *OF_CLUSTER,
    *GAUGES_OF_CLUSTER,
    *OF_BROKER,
    *(LATENCY, MUTED, MUTED_COUNT, TASKS, DRIVER, WRITES, METADATA, METADATA_AVOIDED),
    *(TRANSACTIONS, TRANSACTION_SECONDS, OPEN_TRANSACTIONS, OLDEST_TRANSACTION, REPORTS, BUILD),
    *(*OF_COORDINATOR, CONNECTIONS),
)
_FAMILIES: Mapping[str, type[CounterMetricFamily] | type[GaugeMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
}


def exposition(snapshot: Mapping[str, Any]) -> tuple[bytes, str]:
    """The metrics in Prometheus's text format, and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(snapshot))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Collector:
    def __init__(self, snapshot: Mapping[str, Any]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Metric]:
        """See prometheus_client: no samples are needed to register."""
        return ()

    def collect(self) -> Iterator[Metric]:
        clusters, topics, brokers = (self._snapshot[name] for name in ("clusters", "topics", "brokers"))
        for spec in OF_TOPIC:
            yield _family(spec, (([one["cluster"], one["topic"]], one[spec.source]) for one in topics))
        for spec, part in [(one, "counters") for one in OF_CLUSTER] + [
            (one, "gauges") for one in GAUGES_OF_CLUSTER
        ]:
            yield _family(spec, (([one["cluster"]], one[part].get(spec.source, 0)) for one in clusters))
        for spec in OF_BROKER:
            yield _family(spec, (([one["cluster"], str(one["broker"])], one[spec.source]) for one in brokers))
        yield _latency(brokers)
        muted = (one for one in brokers if one["muted"] is not None)
        yield _family(MUTED, (([one["cluster"], str(one["broker"])], one["muted"]) for one in muted))
        yield _family(MUTED_COUNT, self._mutes(clusters))
        for spec, part, names in (
            (TASKS, "states", (*STATES, "silent")),
            (TRANSACTIONS, "transactions", TRANSACTION_OUTCOMES),
            (TRANSACTION_SECONDS, "transaction_seconds", TRANSACTION_OUTCOMES),
        ):
            yield _family(
                spec,
                (([one["cluster"], name], one[part].get(name, 0)) for one in clusters for name in names),
            )
        yield from self._others(clusters)

    def _mutes(self, clusters: Sequence[Mapping[str, Any]]) -> Iterator[tuple[list[str], int]]:
        for cluster in clusters:
            for kind in ("broker", "partition"):
                name = cluster["cluster"]
                found = [m for m in self._snapshot["mutes"] if m["cluster"] == name and m["kind"] == kind]
                yield [name, kind], len(found)

    def _others(self, clusters: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
        yield _family(
            WRITES,
            (
                ([one["cluster"], name], one["counters"].get(f"writes_{name}", 0))
                for one in clusters
                for name in OUTCOMES
            ),
        )
        yield _family(
            METADATA,
            (
                ([c["cluster"], name], c["lookups"][name])
                for c in clusters
                for name in ("coordinator", "tasks")
            ),
        )
        yield _family(METADATA_AVOIDED, (([one["cluster"]], one["lookups"]["avoided"]) for one in clusters))
        for spec, name in ((OPEN_TRANSACTIONS, "open"), (OLDEST_TRANSACTION, "oldest")):
            yield _family(spec, (([one["cluster"]], one["transactions"][name]) for one in clusters))
        waits = {(one["cluster"], one["step"]): one["seconds"] for one in reversed(self._snapshot["driver"])}
        steps = ((one["cluster"], step) for one in clusters for step in STEPS)
        yield _family(
            DRIVER, (([*key], seconds) for key, seconds in ({**dict.fromkeys(steps, 0.0), **waits}).items())
        )
        yield _family(REPORTS, [([], self._snapshot["reports"])])
        state = self._snapshot["coordinator"]
        for spec in OF_COORDINATOR:
            yield _family(spec, [([], state[spec.source])] if state else ())
        yield _family(CONNECTIONS, (([kind], count) for kind, count in state.get("connections", {}).items()))
        yield _family(BUILD, [([__version__], 1)])


def _family(spec: MetricSpec, samples: Iterable[tuple[Sequence[str], float]]) -> Metric:
    family = _FAMILIES[spec.kind](PREFIX + spec.name, spec.doc, labels=spec.labels)
    for labels, value in samples:
        family.add_metric([_label(one) for one in labels], value * spec.scale)
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
