"""The metrics of an application in Prometheus's format.

METRICS is the only list of their names; the documentation, the dashboard and the alerts are checked against
it. The names follow Kafka's producer metrics, with Prometheus's units and suffixes. The labels are bounded:
there are labels for topics and brokers, and none for partitions and tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kafka_sink.clock import STATES, STEPS
from kafka_sink.coordinator.live.messages import OUTCOMES
from kafka_sink.counts import GAUGES, LATENCY_BOUNDS_MS, SPECS
from kafka_sink.version import __version__

PREFIX = "kafka_chunked_"
COUNTER, GAUGE = "counter", "gauge"
# The kinds of connections: see ``CoordinatorServer.state``.
_KINDS = ("joined", "idle", "unauthenticated")
# The lists in the snapshot, with the labels of their entries.
_LISTS = {"clusters": ("cluster",), "topics": ("cluster", "topic"), "brokers": ("cluster", "broker")}


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric. ``source``: the path to its value in the snapshot, as names with dots between them.

    ``names`` are the values of one more label, and the path is ``source`` followed by the name. ``scale``
    converts the value to the unit in the metric's name.
    """

    name: str
    kind: str
    source: str
    doc: str
    label: str = ""
    names: tuple[str, ...] = ()
    scale: float = 1.0

    @property
    def labels(self) -> tuple[str, ...]:
        of_list = _LISTS.get(self.source.partition(".")[0], ())
        return (*of_list, self.label) if self.label else of_list

    def samples(self, snapshot: Mapping[str, Any]) -> Iterator[tuple[list[str], float]]:
        *where, key = self.source.split(".")
        labels = _LISTS.get(where[0], ()) if where else ()
        for entry in snapshot[where.pop(0)] if labels else [snapshot]:
            values = reduce(lambda part, name: part.get(name, {}), where, entry)
            shown = [str(entry[label]) for label in labels]
            for name in self.names or ("",):
                value = values.get(key + name, 0 if labels else None)
                if value is not None:
                    yield [*shown, name] if name else shown, value * self.scale


# The arguments of each MetricSpec. The metrics of clusters are sums over all their tasks.
_ROWS: tuple[tuple[Any, ...], ...] = (
    ("record_send", COUNTER, "topics.records", "Rows that brokers acknowledged"),
    ("sent_bytes", COUNTER, "topics.sent_bytes", "Bytes of record batches as sent"),
    ("uncompressed_bytes", COUNTER, "topics.raw_bytes", "The same record batches uncompressed"),
    ("batch_send", COUNTER, "topics.batches", "Record batches that brokers acknowledged"),
    *(
        (one.metric, COUNTER, f"clusters.counters.{name}", one.doc, "", (), one.scale)
        for name, one in SPECS.items()
        if one.metric
    ),
    *((name, GAUGE, f"clusters.gauges.{name}", doc) for name, doc in GAUGES.items()),
    ("record_uncommitted", COUNTER, "clusters.counters.uncommitted", "Rows that their write did not count"),
    ("open_transactions", GAUGE, "clusters.transactions.open", "Transactions whose write has not ended"),
    ("oldest_open_transaction_age_seconds", GAUGE, "clusters.transactions.oldest", "Age of the oldest one"),
    ("muted", GAUGE, "clusters.muted.", "Muted brokers and partitions", "kind", ("broker", "partition")),
    ("tasks", GAUGE, "clusters.states.", "Tasks by what they wait for", "state", (*STATES, "silent")),
    ("driver_wait_seconds", GAUGE, "clusters.driver.", "How long the driver has waited", "step", STEPS),
    ("writes", COUNTER, "clusters.counters.writes_", "Ended jobs and micro-batches", "outcome", OUTCOMES),
    ("transactions", COUNTER, "clusters.counters.transactions_", "Ended ones", "outcome", OUTCOMES),
    ("node_request", COUNTER, "brokers.requests", "Produce requests to this broker"),
    ("node_request_error", COUNTER, "brokers.failures", "Produce requests without a response"),
    ("produce_throttle_time_seconds", COUNTER, "brokers.throttled", "Time for which the broker throttled"),
    ("requests_in_flight", GAUGE, "brokers.in_flight", "Produce requests without a response yet"),
    ("oldest_request_age_seconds", GAUGE, "brokers.oldest", "How long rows have waited for its response"),
    ("muted_seconds", GAUGE, "brokers.muted", "How long this broker has been muted"),
    ("task_reports", COUNTER, "reports", "Reports that the coordinator received"),
    ("coordinator_tasks", GAUGE, "coordinator.connections.joined", "Tasks that are connected"),
    ("coordinator_messages", COUNTER, "coordinator.messages", "Messages of tasks that it has handled"),
    ("coordinator_stalls", COUNTER, "coordinator.stalls", "How often it was late by more than a second"),
    ("coordinator_connections", GAUGE, "coordinator.connections.", "Its connections", "kind", _KINDS),
)
_TABLE = tuple(MetricSpec(*row) for row in _ROWS)
LATENCY = MetricSpec(
    "request_latency_seconds", "histogram", "brokers.latency_buckets", "From a request to its response"
)
BUILD = MetricSpec("build_info", GAUGE, "", "Version of the sink", "version")
METRICS: tuple[MetricSpec, ...] = (*_TABLE, LATENCY, BUILD)


def exposition(snapshot: Mapping[str, Any]) -> tuple[bytes, str]:
    """The metrics in Prometheus's text format, and its content type."""
    # The exposition needs only this method of a registry.
    registry: Any = SimpleNamespace(collect=lambda: _families(snapshot))
    return generate_latest(registry), CONTENT_TYPE_LATEST


def _families(snapshot: Mapping[str, Any]) -> Iterator[Metric]:
    for spec in _TABLE:
        yield _family(spec, spec.samples(snapshot))
    yield _latency(snapshot["brokers"])
    yield _family(BUILD, [([__version__], 1)])


def _family(spec: MetricSpec, samples: Iterable[tuple[Sequence[str], float]]) -> Metric:
    kind = CounterMetricFamily if spec.kind == COUNTER else GaugeMetricFamily
    family = kind(PREFIX + spec.name, spec.doc, labels=spec.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _latency(brokers: Sequence[Mapping[str, Any]]) -> Metric:
    family = HistogramMetricFamily(PREFIX + LATENCY.name, LATENCY.doc, labels=LATENCY.labels)
    bounds = [str(bound / 1000) for bound in LATENCY_BOUNDS_MS] + ["+Inf"]
    for broker in brokers:
        counts = accumulate(broker["latency_buckets"])
        buckets = [(bound, float(below)) for bound, below in zip(bounds, counts, strict=False)]
        if buckets and buckets[-1][0] == "+Inf":
            labels = [broker["cluster"], str(broker["broker"])]
            family.add_metric(labels, buckets, broker["latency_sum"])
    return family
