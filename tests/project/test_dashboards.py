"""The dashboard and the alerts ask only for metrics and labels that exist, and the pages name only those."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kafka_sink.coordinator.live.prometheus import METRICS, PREFIX
from tests.support.live_view_client import sample_names

DOCS = Path(__file__).parents[2] / "docs"
_SUFFIXES = ("", "_total", "_bucket", "_sum", "_count")
# Labels that Prometheus itself adds to what it reads, and the one of a histogram's buckets.
_OF_PROMETHEUS = {"instance", "job", "le"}


def expressions(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, one in value.items():
            if name in ("expr", "query") and isinstance(one, str) and PREFIX in one:
                yield one
            yield from expressions(one)
    elif isinstance(value, list):
        for one in value:
            yield from expressions(one)


def of_dashboard() -> list[str]:
    return list(expressions(json.loads((DOCS / "grafana-dashboard.json").read_text())))


def of_rules() -> list[str]:
    text = (DOCS / "prometheus-rules.yml").read_text()
    found = re.findall(r"expr: (?:\|\n((?:          .*\n)+)|(.*)\n)", text)
    return [several_lines or one_line for several_lines, one_line in found]


@pytest.mark.parametrize("expression", [*of_dashboard(), *of_rules()])
def test_a_query_names_metrics_and_labels_that_exist(expression: str) -> None:
    names = set(re.findall(rf"{PREFIX}\w+", expression))
    assert names
    assert names <= sample_names()
    labels = set(re.findall(r"[{,](\w+)=~?\"", expression))
    labels |= {
        one for part in re.findall(r"\b(?:by|on) \(([\w, ]+)\)", expression) for one in part.split(", ")
    }
    used = [spec for spec in METRICS if any(PREFIX + spec.name + suffix in names for suffix in _SUFFIXES)]
    known = set().union(*(spec.labels for spec in used)) | _OF_PROMETHEUS
    assert labels <= known
    assert expression.count("(") == expression.count(")")


def test_there_are_queries_and_every_alert_is_on_the_page() -> None:
    assert len(of_dashboard()) > 20
    alerts = re.findall(r"alert: (\w+)", (DOCS / "prometheus-rules.yml").read_text())
    headings = re.findall(r"^### (\w+)$", (DOCS / "runbook.md").read_text(), re.MULTILINE)
    named = re.findall(r"runbook: docs/runbook\.md#(\w+)", (DOCS / "prometheus-rules.yml").read_text())
    assert len(alerts) == len(of_rules()) > 8
    assert [one for one in headings if one.startswith("KafkaChunked")] == alerts
    assert named == [one.lower() for one in alerts]


def test_pages_name_metrics_that_exist() -> None:
    text = "".join((DOCS / page).read_text() for page in ("runbook.md", "metrics.md"))
    named = set(re.findall(rf"`{PREFIX}(\w+)`", text))
    named |= {one for one in re.findall(r"`(\w+_total)\b", text) if not one.startswith(PREFIX)}
    named |= set(re.findall(r"`(buffer_\w+|oldest_\w+)`", text))
    known = {name.removeprefix(PREFIX) for name in sample_names()} | {spec.name for spec in METRICS}
    assert named <= known
