"""Reads a live view as a browser or Prometheus does."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from kafka_sink.coordinator.live.prometheus import METRICS, PREFIX
from tests.support.waiting import until

_PATIENCE_S = 60.0
_SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def get(url: str) -> str:
    """The content. A coordinator on a busy host may ask to be asked again."""

    def content() -> str | None:
        try:
            with urllib.request.urlopen(url, timeout=_PATIENCE_S) as response:
                text: str = response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                    raise
            return None
        return text

    return until(content, f"an answer of {url}", _PATIENCE_S, poll_s=0.1)


def metrics(address: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(get(f"{address.rstrip('/')}/metrics.json"))
    return found


def eventually(address: str, condition: Callable[[dict[str, Any]], object]) -> None:
    """Waits for metrics that tasks report by themselves, hence perhaps after the end of their write."""
    until(lambda: condition(metrics(address)), lambda: metrics(address), _PATIENCE_S, poll_s=0.1)


def sample_names() -> set[str]:
    return {PREFIX + one.name + suffix for one in METRICS for suffix in _SUFFIXES[one.kind]}
