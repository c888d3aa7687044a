"""Planning a write of Arrow data: checks its options, the brokers and the topic, and claims its transactions.

There is no coordinator: what it does for Spark's tasks, one process does without it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kafka_sink.activity import STARTING
from kafka_sink.breaker.interface import load_breaker
from kafka_sink.clock import monotonic_ms
from kafka_sink.coordinator.live.messages import DriverWaiting
from kafka_sink.driver import driver_log
from kafka_sink.driver.topics import STREAM_RECHECK_S, prepare_topic
from kafka_sink.options import SinkOptions, parse, texts
from kafka_sink.options.table import COORDINATOR, SPECS
from kafka_sink.reports import delivery_report

if TYPE_CHECKING:
    from kafka_sink.transactions.planning import PlannedTransactions

# In Spark they come with every query. Here they can only be meant for something that is missing.
_OF_SPARK = ("checkpointlocation", "queryname")
_OF_LIVE_VIEW = ("ui_port", "ui_bind_address")


@dataclass(frozen=True, slots=True)
class ArrowWrite:
    """A planned write. ``name`` is its name in reports."""

    options: SinkOptions
    transactions: PlannedTransactions | None = None
    name: str = field(default_factory=lambda: secrets.token_hex(8))


def checked(given: Mapping[str, Any]) -> tuple[SinkOptions, dict[str, str]]:
    """The options, and the same as texts. Logs their warnings. Raises ConfigurationError."""
    written = texts(given)
    parsed = parse(written)
    options = parsed.options
    for warning in (*parsed.warnings, *_about_spark(options, written)):
        driver_log.warn(f"kafka-chunked: {warning}")
    if options.delivery_report_path:
        delivery_report.check(options.delivery_report_path)
    breaker = load_breaker(options)
    if breaker is not None:
        breaker.close()
    return options, written


def plan(options: SinkOptions, given: Mapping[str, str]) -> ArrowWrite:
    """Raise what ``prepare_topic`` and ``transactions.planning.plan`` raise."""
    with DriverWaiting(options, "", STARTING, "a write"):
        PREPARED.prepare(options)
        if not options.exactly_once:
            return ArrowWrite(options)
        from kafka_sink.transactions import planning as transactions

        return ArrowWrite(options, transactions.plan(options, given, is_streaming=False, for_tasks=True))


def _about_spark(options: SinkOptions, given: Mapping[str, str]) -> list[str]:
    """Options that only Spark's writes have a use for. They change nothing of what is sent."""
    unused = [
        spec.name
        for spec in SPECS
        if (spec.group == COORDINATOR or spec.attribute in _OF_LIVE_VIEW)
        # Without a coordinator is how it works here.
        and spec.attribute != "coordinator_enabled"
        and getattr(options, spec.attribute) != spec.default
    ]
    warnings = []
    if unused:
        warnings.append(
            f"These options have no effect without Spark, as there is no coordinator: {', '.join(unused)}"
        )
    of_spark = sorted(name for name in given if name.strip().lower() in _OF_SPARK)
    if of_spark:
        warnings.append(f"These options of Spark have no effect without it: {', '.join(of_spark)}")
    return warnings


class PreparedTopics:
    """Which topics were looked up lately, so that a service that writes often does not ask before each write.

    Thread-safe. As in a stream, it is asked again after a minute.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the one below
        self._until_ms: dict[str, float] = {}

    def prepare(self, options: SinkOptions) -> None:
        """Raise what ``prepare_topic`` raises."""
        # Redacted, secrets are equal: other ones are checked when a connection logs in.
        key = repr(options)
        now_ms = monotonic_ms()
        with self._lock:
            self._until_ms = {one: until for one, until in self._until_ms.items() if until > now_ms}
            if key in self._until_ms:
                return
        prepare_topic(options)
        with self._lock:
            self._until_ms[key] = monotonic_ms() + STREAM_RECHECK_S * 1000


PREPARED = PreparedTopics()
