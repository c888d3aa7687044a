"""/metrics, as Prometheus reads it."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kafka_sink.coordinator.live.prometheus import METRICS, PREFIX, exposition
from tests.support.live_view_client import sample_names
from tests.support.task_reports import CLUSTER, Board, broker, full_report, report


def test_prometheus_own_parser_reads_the_metrics() -> None:
    board = Board()
    board.report(full_report())
    body, content_type = exposition(board.shown())
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert content_type.startswith("text/plain; version=")
    assert {PREFIX + spec.name for spec in METRICS} <= families.keys()
    names = {sample.name for family in families.values() for sample in family.samples}
    assert names <= sample_names() | {name + "_created" for name in families}
    (rows,) = families[PREFIX + "record_send"].samples
    assert (rows.labels, rows.value) == ({"cluster": CLUSTER, "topic": "t"}, 5.0)
    # All metrics are documented.
    text = Path("docs/metrics.md").read_text()
    missing = [spec.name for spec in METRICS if PREFIX + spec.name not in text]
    assert not missing


def test_latencies_are_a_histogram() -> None:
    board = Board()
    board.report(report(1, brokers={3: broker(6, (1, 0, 2) + (0,) * 9 + (3,))}))
    text = exposition(board.shown())[0].decode()
    name = PREFIX + "request_latency_seconds"
    assert f'{name}_bucket{{broker="3",cluster="{CLUSTER}",le="0.025"}} 3.0' in text
    assert f'{name}_bucket{{broker="3",cluster="{CLUSTER}",le="+Inf"}} 6.0' in text
    assert f'{name}_count{{broker="3",cluster="{CLUSTER}"}} 6.0' in text


def test_a_name_neither_breaks_the_format_nor_hides_the_others() -> None:
    """Kafka refuses such names. A task that is not ours could send one; the schema rejects surrogates."""
    name = 'a"b\\c\n<script>alert(1)</script>'
    board = Board()
    board.report(report(5))
    board.report(report(0, topics={name: report(1).topics["t"]}, cluster=CLUSTER + name))
    families = {
        one.name: one for one in text_string_to_metric_families(exposition(board.shown())[0].decode())
    }
    labels = {one.labels["topic"]: one.value for one in families[PREFIX + "record_send"].samples}
    assert labels == {"t": 5.0, name: 1.0}
