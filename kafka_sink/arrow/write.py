"""One write of Arrow data, from a terminal, a notebook or a job.

Rows and rate of the writes that run are on one line of the terminal. It is drawn on stderr where that is a
terminal, from a write's first second on, and removed before the write returns. Writes of several threads
share it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from kafka_sink.arrow.columns import check_early
from kafka_sink.arrow.producer import ArrowProducer, record_batches
from kafka_sink.clock import monotonic_ms
from kafka_sink.counts import RateWindow
from kafka_sink.errors import DeliveryError
from kafka_sink.reports.delivery_report import Written

_INTERVAL_S = 1.0
_ERASE = "\r\x1b[2K"


class ProgressLine:
    """Thread-safe. ``write`` puts text on the terminal."""

    def __init__(self, write: Callable[[str], None], interval_s: float = _INTERVAL_S) -> None:
        self._write = write
        self._interval_s = interval_s
        self._lock = threading.Lock()  # guards the ones below
        self._counts: dict[object, Callable[[], int]] = {}
        # Of writes that have ended while others run.
        self._ended_rows = 0
        self._rates = RateWindow()
        self._ended = threading.Condition(self._lock)
        self._is_drawn = False

    @contextmanager
    def shown(self, rows: Callable[[], int]) -> Iterator[None]:
        """Within the block, a write is part of the line. ``rows``: how many it has written so far."""
        key = object()
        with self._lock:
            self._counts[key] = rows
            if len(self._counts) == 1:
                self._ended_rows, self._rates = 0, RateWindow()
                threading.Thread(target=self._draw, name="kafka-chunked-progress", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                self._ended_rows += self._counts.pop(key)()
                if not self._counts:
                    self._erase()
                self._ended.notify_all()

    def _draw(self) -> None:
        with self._lock:
            rates = self._rates
            while True:
                self._ended.wait(self._interval_s)
                # Another line may have begun meanwhile, with a thread of its own.
                if not self._counts or self._rates is not rates:
                    return
                rows = self._ended_rows + sum(count() for count in self._counts.values())
                rates.add(monotonic_ms(), rows)
                self._write(f"{_ERASE}[Kafka: {rows:,} rows, {rates.per_second:,.0f} rows/s]")
                self._is_drawn = True

    def _erase(self) -> None:
        if self._is_drawn:
            self._write(_ERASE)
            self._is_drawn = False


def is_wanted() -> bool:
    """Whether a user watches stderr: a terminal in whose foreground this process runs."""
    try:
        return sys.stderr.isatty() and os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except (AttributeError, OSError, ValueError):
        return False


def _to_terminal(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # the terminal is gone


LINE = ProgressLine(_to_terminal)


def write_arrow(data: Any, options: Mapping[str, Any], *, progress: bool | None = None) -> Written:
    """See ``kafka_sink.write_arrow``."""
    producer = ArrowProducer(options)
    schema, batches = record_batches(data)
    if schema is not None:
        # Before any broker is asked. With a format, the registry is asked when the rows come.
        check_early(schema, producer.options)
    is_shown = is_wanted() if progress is None else progress
    with producer:
        shown = LINE.shown(lambda: producer.acknowledged) if is_shown else nullcontext()
        with shown:
            producer.send(batches)
            producer.flush()
    if producer.result is None:
        raise DeliveryError("the write has ended without a result")
    return producer.result
